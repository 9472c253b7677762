"""What ``ding-store``'s options accept, and what it says where they are wrong; on a server of the test's own."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from jobs import DEADLINE_S, PIPELINES, ROOT, ding_store, environment, job, start

from ding_store.config import StoreConfig, parse_settings
from ding_store.environment import ENV_SETTINGS
from ding_store.errors import ConfigError
from ding_store.launch.progress import Display
from ding_store.run.members import STREAM_OPTIONS, Member
from ding_store.storage import open_store

ROLES = ['run', '--roles', 'learner=1,collector=1']
JOIN = ['join', '--role', 'collector']
pytestmark = pytest.mark.timeout(300)


def said(cwd, *arguments, code=2):
    """What a command says that ends with ``code``."""
    with job(ding_store(*arguments), cwd) as run:
        assert run.wait() == code, run.text
        assert 'Traceback' not in run.text
        return run.text


def test_settings_are_literals_or_strings():
    words = ['max_lead=4', 'overflow=drop_oldest', 'checkpoint={"keep": 5}', 'weights_dtype=None', 'buffer_path=/a=b']
    assert parse_settings(words) == {
        'max_lead': 4,
        'overflow': 'drop_oldest',
        'checkpoint': {'keep': 5},
        'weights_dtype': None,
        'buffer_path': '/a=b',
    }


@pytest.mark.parametrize(
    ('word', 'fix'),
    [('max_lead', 'should read like'), ('run=x', '--run'), ('url=redis://h', '--store'), ('enable=1', 'on')],
)
def test_settings_that_cannot_be_parsed_are_refused(word, fix):
    with pytest.raises(ConfigError, match=fix):
        parse_settings([word])


def test_settings_reach_the_processes_and_override_the_config(tmp_path):
    code = (
        'from ding_store.config import StoreConfig\n'
        "config = StoreConfig.from_block({'max_lead': 7, 'prefetch': 1})\n"
        "assert (config.max_lead, config.overflow, config.prefetch) == (5, 'drop_oldest', 1), config\n"
    )
    settings = ['--set', 'max_lead=5', '--set', 'overflow=drop_oldest']
    said(tmp_path, 'run', *settings, '--', sys.executable, '-c', code, code=0)


@pytest.mark.parametrize('command', [['run'], ROLES, JOIN])
def test_settings_are_checked_before_the_start(tmp_path, command):
    ran = tmp_path / 'ran'
    script = tmp_path / 'main.py'
    script.write_text(f"open({str(ran)!r}, 'w')\n")
    assert 'max_lead' in said(tmp_path, *command, '--set', 'max_leed=5', '--', 'python', script)
    assert 'store.max_lead (0)' in said(tmp_path, *command, '--set', 'max_lead=0', '--', 'python', script)
    assert not ran.exists()


def test_join_of_a_run_without_processes_is_refused(tmp_path, redis_server):
    pytest.importorskip('ding')
    script = tmp_path / 'main.py'
    script.write_text("open('ran', 'w')\n")
    where = ['--store', redis_server.url, '--run', 'typo', '--role', 'collector']
    assert "run 'typo' has no living process" in said(tmp_path, 'join', *where, '--', 'python', script)
    assert not (tmp_path / 'ran').exists()
    said(tmp_path, 'join', *where, '--wait', '--', 'python', script, code=0)
    assert (tmp_path / 'ran').exists()


def test_join_of_a_starting_run_waits_for_its_first_process(capsys):
    pytest.importorskip('ding')
    from ding_store.launch.join import living
    from ding_store.run.claim import claim_run
    from ding_store.run.members import Member, Members

    config = StoreConfig.from_block({'peer_timeout_s': 60.0, 'heartbeat_s': 0.1})
    with (
        open_store('memory://', stream_options=STREAM_OPTIONS) as store,
        ThreadPoolExecutor(1) as pool,
        pytest.MonkeyPatch.context() as patch,
    ):
        claim_run(store, 0, 1.0, {})  # as a launcher does, before anybody can report
        member, is_waiting = Member('m', 'learner', 0), threading.Event()
        patch.setattr(Members, 'wait', lambda members, timeout_s: is_waiting.set() or members._read(1, timeout_s))
        joined = pool.submit(living, store, config)
        assert is_waiting.wait(DEADLINE_S)
        while not joined.done():
            member.report(store)
        assert joined.result().last > 0
    assert capsys.readouterr().err.count(f'a job that starts there (pid {os.getpid()} on ') == 1


@pytest.mark.parametrize('how', ['gone', 'elsewhere', 'hangs'])
def test_join_does_not_wait_for_a_dead_launcher(how, monkeypatch):
    pytest.importorskip('ding')
    from ding_store.launch.join import living
    from ding_store.run import claim
    from ding_store.run import lease as lease_module

    config = StoreConfig.from_block({'peer_timeout_s': 0.05, 'heartbeat_s': 0.1})
    with open_store('memory://') as store:
        claim.claim_run(store, 0, 1.0, {})
        if how == 'gone':
            monkeypatch.setattr(lease_module, 'is_gone', lambda pid, birth: True)
        if how == 'elsewhere':
            monkeypatch.setattr(lease_module, 'pid_space', lambda: 'another')
        with pytest.raises(ConfigError, match='has no living process'):
            living(store, config)


def test_status_of_a_run_not_on_the_server_is_refused(tmp_path, redis_server):
    assert "there is no run 'nobody' at " in said(tmp_path, 'status', '--store', redis_server.url, '--run', 'nobody')


@pytest.mark.parametrize('seconds', ['-1', '0', 'nan', 'often'])
def test_status_watch_without_seconds_is_refused(tmp_path, seconds):
    assert 'number of seconds above 0' in said(tmp_path, 'status', f'--watch={seconds}')


@pytest.mark.parametrize('command', [ROLES, JOIN, ['status']])
def test_memory_store_across_processes_is_refused(tmp_path, command):
    script = [] if command == ['status'] else ['--', 'python', PIPELINES / 'tiny_dqn.py']
    assert 'one process only' in said(tmp_path, *command, '--store', 'memory://', *script)


@pytest.mark.parametrize(
    ('arguments', 'fix'),
    [
        ([*ROLES, 'python', '-u', 'main.py'], 'a command goes after --, as in ding-store run'),
        ([*JOIN, 'python', 'main.py'], 'a command goes after --, as in ding-store join'),
        ([*ROLES, '--rols', '--', 'python', 'main.py'], 'unrecognized arguments: --rols\n'),
        ([*ROLES, '--', 'python', '-m', 'nowhere.main'], "there is no module 'nowhere'"),
        ([*ROLES, '--delay', 'learner=nan', '--', 'python', '-m', 'json'], "'learner=nan' should be seconds"),
        ([*ROLES, '--delay', 'learner=-5', '--', 'python', '-m', 'json'], "'learner=-5' should be seconds"),
        ([*ROLES, '--cpu-roles', 'actor', '--', 'python', '-m', 'json'], "--cpu-roles: unknown key 'actor'"),
        (['run', '--cpu-roles', 'learner', '--', 'python', '-m', 'json'], '--cpu-roles goes with --roles'),
        ([*ROLES, '--debug', 'actor', '--', 'python', '-m', 'json'], "--debug: unknown key 'actor'"),
        ([*ROLES, '--debug', 'evaluator', '--', 'python', '-m', 'json'], '--roles starts no evaluator'),
        (['run', '--roles', 'learner=1,collector=\u00b2', '--', 'python', '-m', 'json'], 'should read like'),
        ([*ROLES, '--logs', 'file/logs', '--', 'python', '-m', 'json'], "'file/logs' (Not a directory)"),
        ([*JOIN, '--node-id=-3', '--', 'python', '-m', 'json'], "'-3' should be a whole number"),
        (['clean', '--dir', 'nowhere'], "--dir 'nowhere': there is no such directory"),
    ],
)
def test_options_that_are_wrong_are_refused_before_the_start(tmp_path, arguments, fix):
    (tmp_path / 'file').touch()
    text = said(tmp_path, *arguments)
    assert fix in text
    assert 'failed with exit code' not in text


def test_settings_in_the_environment_not_a_dict_are_refused(monkeypatch):
    for text in ('{x', '3'):
        monkeypatch.setenv(ENV_SETTINGS, text)
        with pytest.raises(ConfigError, match='DING_STORE_SETTINGS .* must be a dict'):
            StoreConfig.from_block({})


def test_display_writes_its_first_line_to_a_file_at_once():
    out = io.StringIO()
    with open_store('memory://', stream_options=STREAM_OPTIONS) as store:
        display = Display(store, out, file_every_s=3600.0, first_s=0.0)
        for _ in range(3):
            display.tick()
    assert out.getvalue().count('env steps 0') == 1


class Unread(io.StringIO):
    """What a pipe is whose reader has gone."""

    def __init__(self, file):
        super().__init__()
        self.fileno = file.fileno

    def flush(self):
        raise BrokenPipeError(32, 'Broken pipe')


def test_display_without_a_reader_writes_to_devnull(tmp_path):
    with open(tmp_path / 'out', 'wb') as file, open_store('memory://', stream_options=STREAM_OPTIONS) as store:
        out = Unread(file)
        display = Display(store, out, file_every_s=0.0, first_s=0.0)
        display.tick()
        display.say('a collector died')
        assert os.path.samefile(f'/proc/self/fd/{out.fileno()}', os.devnull)


def test_closed_pipe_ends_status_but_not_a_run(tmp_path):
    """A run that is piped to it goes on: hours of training are not to be lost for it."""
    script, figures = tmp_path / 'main.py', tmp_path / 'figures.json'
    script.write_text("import sys\nsys.exit('in vain')\n")

    def ended(*arguments):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, 'wb') as out:
            process = start(ding_store(*arguments), tmp_path, environment(), out)
        return process.wait(DEADLINE_S)

    assert ended('run', '--json', figures, *ROLES[1:], '--', 'python', script) == 1
    assert 'failed with exit code 1' in figures.read_text()
    assert ended('clean', '--dry-run') == 128 + signal.SIGPIPE


HOSTILE = [
    {'role': '\x1b[2Jlearner'},
    {'role': ['learner']},
    {'host': 'vm\x1b]0;owned\x07'},
    {'node_id': '0'},
    {'pid': 1.5},
    {'pid': 1 << 70},
    {'state': 'alive\r'},
    {'beat': True},
    {'figures': {'rows': '7'}},
    {'figures': {'rows': float('inf')}},
    {'figures': {'rows': {}}},
    {'figures': {'train_iter': None}},
    {'figures': {'began_s': float('nan')}},
    {'figures': {'policy_versions': 3}},
    {'figures': {'policy_versions': {'model': '9'}}},
    {'figures': []},
]


def test_status_passes_over_foreign_reports(tmp_path, redis_server):
    where = ['--store', redis_server.url, '--run', 'hostile']
    with open_store(redis_server.url, 'hostile', stream_options=STREAM_OPTIONS) as store:
        for role, name in (('collector', 'c'), ('learner', 'l'), ('evaluator', 'e')):
            good = Member(name, role, 0, figures={'rows': 5, 'eval_value': float('-inf')})
            good.report(store)
            for i, change in enumerate(HOSTILE):
                store.append('members', {**asdict(good), 'id': f'{name}{i}', **change}, {})
        store.put('finish', {'reason': '\x1b[31mbad'}, {})
    text = said(tmp_path, 'status', *where, code=0)
    assert '\x1b' not in text
    assert '\\x1b[31mbad' in text
    assert re.search(r'\d+ reports of members were not valid: entry \d+ of', text)
    status = json.loads(said(tmp_path, 'status', '--json', *where, code=0).splitlines()[-1], parse_constant=pytest.fail)
    assert sorted(member['id'] for member in status['members']) == ['c', 'e', 'l']
    assert status['figures']['rows_ingested'] == 5


COUNT = (
    'from ding_store.config import StoreConfig\n'
    'from ding_store.storage import open_store\n'
    'config = StoreConfig.from_block({})\n'
    'with open_store(config.url, config.run, grace_s=0.0) as store:\n'
    "    store.append('s', {}, {})\n"
    "    print(config.run, 'holds', store.info().streams['s'].last)\n"
)


def test_run_in_odd_directories_shares_no_store(tmp_path):
    for name in ('exp', 'exp#1', 'exp%31'):
        (tmp_path / name).mkdir()
        assert 'pong holds 1\n' in said(
            tmp_path / name, 'run', '--run', 'pong', '--', sys.executable, '-c', COUNT, code=0
        )


def test_run_accepts_the_name_of_any_experiment(tmp_path):
    first = said(tmp_path, 'run', '--run', '实验/pong', '--', sys.executable, '-c', COUNT, code=0)
    assert re.search(r'^pong-\w{8} holds 1$', first, re.M), first


@pytest.mark.parametrize('call', ['status', 'run -- python -c pass'])
def test_command_in_a_deleted_directory_is_refused(call, tmp_path):
    command = f'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m ding_store.cli {call}'
    run = subprocess.run(
        ['sh', '-c', command, sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    said = [line for line in run.stderr.splitlines() if line.startswith('ding-store:')]
    assert (run.returncode, said) == (2, ['ding-store: the working directory no longer exists: change to another one'])
    assert 'Traceback' not in run.stderr


@pytest.mark.parametrize(
    ('package', 'content', 'fix'),
    [
        ('ditk', 'raise ModuleNotFoundError("No module", name="ditk")', "the package 'ditk' is missing"),
        ('ding', 'raise AttributeError("no bool8 in numpy 2")', 'AttributeError: no bool8 in numpy 2'),
    ],
)
def test_run_without_di_engine_names_the_doctor(tmp_path, package, content, fix):
    (tmp_path / f'{package}.py').write_text(content)
    (tmp_path / 'main.py').touch()
    environ = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    command = [sys.executable, '-m', 'ding_store.cli', *ROLES, '--', 'python', 'main.py']
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode in (1, 2)
    assert fix in done.stderr
    assert 'Run ding-store doctor' in done.stderr
    assert 'Traceback' not in done.stderr
