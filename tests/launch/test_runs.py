"""``ding-store ls``, ``logs`` and ``stop``."""

import time

import pytest

from ding_store import cli
from ding_store.launch.log_dir import note_end
from ding_store.launch.plot import note_history
from ding_store.launch.runs import STOPPED, Logs
from ding_store.run.ending import FINISH, end_of
from ding_store.run.members import STREAM_OPTIONS, Member
from ding_store.storage import open_store
from ding_store.storage.embedded.private_server import ensure_server, mark_finished, running

#: A line of the learner's log, without the name that the column has already.
THREE = 'learner-0    | 2026-01-31 14:05:09 WARNING three'


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = tmp_path / '.ding_store' / 'pong' / 'logs'
    found.mkdir(parents=True)
    (found / 'learner-0.log').write_text('one\ntwo\n2026-01-31 14:05:09 learner-0: WARNING three\n')
    (found / 'collector-2.log').write_text('red\n\x1b[31mbad\nhalf a li')
    return found


@pytest.mark.parametrize(
    ('arguments', 'lines'),
    [
        (['learner'], ['learner-0    | one', 'learner-0    | two', THREE]),
        (['learner', '-n', '1'], [THREE]),
        (['-n', '1'], ['collector-2  | \\x1b[31mbad', THREE]),
        (['collector-2', '-f', '-n', '0'], []),
    ],
)
def test_logs_have_the_last_lines_of_each_process(logs, capsys, arguments, lines):
    assert cli.main(['logs', '--run', 'pong', *arguments]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_logs_that_are_missing_are_refused(logs, capsys):
    assert cli.main(['logs', '--run', 'pong', 'evaluator']) == 2
    assert 'There are: collector-2, learner-0' in capsys.readouterr().err
    assert cli.main(['logs', '--run', 'other']) == 2
    assert 'Name the run with --run' in capsys.readouterr().err


def test_followed_logs_have_new_lines_and_new_files(logs):
    found = Logs(logs, 'collector')
    assert len(list(found.last(10))) == 2
    assert list(found.new()) == []
    with open(logs / 'collector-2.log', 'a') as log:
        log.write('ne\n')
    (logs / 'collector-3.log').write_text('new\n')
    assert list(found.new()) == ['collector-2  | half a line\n', 'collector-3  | new\n']
    (logs / 'collector-3.log').write_text('x\n')  # a new launcher begins the file anew
    assert list(found.new()) == ['collector-3  | x\n']


def test_ls_lists_runs_with_their_files(logs, tmp_path, capsys):
    note_history(str(logs), '/exp/metrics.jsonl')
    (tmp_path / '.ding_store' / 'empty').mkdir()
    assert cli.main(['ls']) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ['RUN', 'STATE', 'LOGS', 'HISTORY']
    assert rows[1] == ['empty', 'ended', '-', '-']
    assert [*rows[2][:2], rows[2][3]] == ['pong', 'ended', '/exp/metrics.jsonl']
    assert rows[2][2].endswith('.ding_store/pong/logs')


def test_look_at_a_run_that_has_failed_says_why(logs, capsys):
    note_end(logs, 'failed: evaluator (node 1, pid 7) failed with exit code 1')
    for command in ('status', 'doctor'):
        assert cli.main([command, '--run', 'pong']) == 2
        error = capsys.readouterr().err
        assert "run 'pong' in " in error
        assert 'failed: evaluator (node 1, pid 7) failed with exit code 1 (0s ago)' in error
        assert f'ding-store logs --logs {logs.absolute()}' in error or f'ding-store logs --logs {logs}' in error
        assert 'The command that started it starts it again' in error
    assert cli.main(['ls']) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ['pong', 'failed']
    with open_store(f'embedded://{logs.parents[1]}', run='pong'):  # begun again, by processes without a launcher
        assert cli.main(['ls']) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[:2] == ['pong', 'running']


def test_ls_of_a_redis_server_is_refused(capsys):
    assert cli.main(['ls', '--store', 'redis://localhost:1']) == 2
    assert 'embedded:// only' in capsys.readouterr().err


def test_stop_ends_a_run_that_can_resume(redis_server, capsys):
    where = ['--store', redis_server.url, '--run', 'stopped-run']
    with open_store(redis_server.url, run='stopped-run', stream_options=STREAM_OPTIONS) as store:
        Member('l', 'learner', 0).report(store)
        assert cli.main(['stop', *where]) == 0
        end = end_of(store)
        assert (end.reason, end.failed) == (STOPPED, True)
        assert cli.main(['stop', *where]) == 2
        assert f'has ended already: {STOPPED}' in capsys.readouterr().err
        store.retire(last=(FINISH,))


@pytest.mark.parametrize('command', [['status'], ['stop'], ['join', '--role', 'collector', '--', 'python', 'x.py']])
def test_run_that_ends_is_not_started_by_a_look(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'x.py').touch()
    directory = tmp_path / '.ding_store' / 'default'
    ensure_server(directory)
    (directory / 'finished').touch()  # as mark_finished does, but this process still holds the server
    assert running(directory).is_finished
    assert cli.main(command) == 2
    assert "run 'default' in " in capsys.readouterr().err
    mark_finished(directory)
    deadline = time.monotonic() + 60.0
    while running(directory) is not None:
        assert time.monotonic() < deadline
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert '. Start it with ding-store run, or wait' in error if command[0] == 'join' else '--store' in error
