"""``ding-store clean``: what it lists and removes, and that it keeps what lives."""

import json
import os
import socket
import time

import pytest

from ding_store import cli
from ding_store.errors import StoreError
from ding_store.launch import clean, log_dir
from ding_store.storage import open_store
from ding_store.storage.embedded.private_server import mark_finished, stop_server
from ding_store.storage.shared_memory.cache_dir import cache_name, open_cache_dir

OLD_S = time.time() - 10 * 86400


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The directory of the runs. Other users' leftovers on this host are out of the way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(clean, 'socket_directories', lambda: iter(()))
    (tmp_path / 'cache').mkdir()
    return tmp_path / '.ding_store'


def cleaned(capsys, *arguments):
    """Return what ``ding-store clean`` lists: name of the file -> its record."""
    assert cli.main(['clean', '--dir', 'cache', '--json', *arguments]) == 0
    return {os.path.basename(found['path']): found for found in json.loads(capsys.readouterr().out)}


def logged(runs, name):
    """Make the logs of a run whose data are on a Redis server."""
    logs = runs / name / 'logs'
    logs.mkdir(parents=True)
    for file in ('learner-0.log', 'history', 'warnings', log_dir.LOCK):
        (logs / file).write_text('x' * 100)
    return logs


def test_clean_removes_an_ended_run_and_keeps_one_that_lives(runs, capsys):
    url = f'embedded://{runs}'
    for name in ('ended', 'living'):
        logged(runs, name)
    with open_store(url, run='living') as living:
        with open_store(url, run='ended') as store:
            store.append('s', {'x': 'y' * 1000}, {})
        stop_server(runs / 'ended')
        found = cleaned(capsys, '--dry-run')
        assert list(found) == ['ended']
        assert found['ended']['num_bytes'] > 1000
        assert found['ended']['note'].startswith('has not finished')
        assert cli.main(['clean', '--dir', 'cache']) == 0
        assert f'kept: {runs / "living"}' in capsys.readouterr().out
        assert [path.name for path in runs.iterdir()] == ['living']
        assert living.append('s', {}, {}) is not None
        assert (runs / 'living' / 'logs' / 'learner-0.log').exists()


def test_clean_does_not_warn_of_a_finished_run(runs, capsys):
    with open_store(f'embedded://{runs}', run='done'):
        mark_finished(runs / 'done')
    stop_server(runs / 'done')
    assert cleaned(capsys)['done']['note'] == ''
    assert not (runs / 'done').exists()


def test_clean_keeps_logs_that_a_process_holds(runs, capsys):
    logs = logged(runs, 'redis')
    held = log_dir.hold(logs)
    assert cleaned(capsys) == {}
    os.close(held)
    assert cleaned(capsys)['redis']['num_bytes'] == 400
    assert not (runs / 'redis').exists()


def test_clean_keeps_files_that_are_not_ours(runs, capsys):
    logs = logged(runs, 'mine')
    (logs / 'notes.txt').touch()
    (runs / 'other' / 'logs').mkdir(parents=True)
    (runs / 'other' / 'appendonly.aof').touch()
    assert list(cleaned(capsys)) == ['mine']
    assert [path.name for path in logs.iterdir()] == ['notes.txt']
    assert (runs / 'other' / 'appendonly.aof').exists()


def test_clean_of_names_leaves_other_runs_and_caches(runs, tmp_path, capsys):
    for name in ('one', 'two'):
        logged(runs, name)
        for url in (f'embedded://{runs / name}', f'embedded:///elsewhere/{name}'):
            open_cache_dir(cache_name(name, url), str(tmp_path / 'cache')).create_ring(4096, {}).close()
    here = cache_name('one', f'embedded://{runs}/one')
    assert sorted(cleaned(capsys, 'one')) == ['one', here]
    rest = cleaned(capsys)
    assert here not in rest
    assert len(rest) == 4  # another store's cache of this name, and all of the other run


def test_clean_keeps_what_changed_lately(runs, capsys):
    for name in ('new', 'old'):
        logs = logged(runs, name)
        if name == 'old':
            for path in (*logs.iterdir(), logs, logs.parent):
                os.utime(path, (OLD_S, OLD_S))
    assert list(cleaned(capsys, '--older-than', '9')) == ['old']
    assert [path.name for path in runs.iterdir()] == ['new']


@pytest.mark.parametrize('is_old', [True, False])
def test_clean_keeps_sockets_that_may_live(runs, tmp_path, monkeypatch, capsys, is_old):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    for name in ('dead', 'alive', 'files'):
        (tmp_path / name).mkdir()
    (tmp_path / 'files' / 'x').touch()
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind('alive/0.ipc')
        alive.listen()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind('dead/0.ipc')
        for name in ('dead', 'alive', 'files') if is_old else ():
            os.utime(name, (OLD_S, OLD_S))
        monkeypatch.setattr(clean, 'socket_directories', lambda: iter(['dead', 'alive', 'files']))
        assert list(cleaned(capsys)) == (['dead'] if is_old else [])
    assert [os.path.exists(name) for name in ('dead', 'alive', 'files')] == [not is_old, True, True]


def test_clean_says_what_stays(runs, monkeypatch, capsys):
    with open_store(f'embedded://{runs}', run='started'):
        pass
    stop_server(runs / 'started')
    logged(runs, 'ended')

    def refuse(directory):
        raise StoreError('it is in use')

    monkeypatch.setattr(clean, 'remove_run', refuse)
    assert cli.main(['clean', '--dir', 'cache']) == 1
    said = capsys.readouterr()
    assert said.err == f'ding-store: {runs / "started"} stays: it is in use\n'
    assert said.out.endswith('400 B were freed\n')
    assert [path.name for path in runs.iterdir()] == ['started']


def test_clean_refuses_a_run_that_is_not_there(runs, capsys):
    assert cli.main(['clean', 'pnog', '--dir', 'cache']) == 2
    assert 'there is no run pnog' in capsys.readouterr().err


@pytest.mark.parametrize('days', ['-1', 'week', 'nan'])
def test_clean_refuses_an_age_that_is_none(capsys, days):
    with pytest.raises(SystemExit):
        cli.main(['clean', f'--older-than={days}'])
    assert 'should be a number of days' in capsys.readouterr().err
