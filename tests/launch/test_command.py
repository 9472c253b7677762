"""Commands that start their own workers under ``ding-store run``: one job per run, and one end for all of it."""

import contextlib
import json
import os
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest
from jobs import DEADLINE_S, PIPELINES, ROOT, ding_store, job

from ding_store.config import StoreConfig
from ding_store.environment import ENV_RUN, ENV_URL, Environment
from ding_store.errors import ConfigError
from ding_store.launch import command
from ding_store.launch import join as join_command
from ding_store.run.members import Members
from ding_store.run.session import RunSession
from ding_store.storage import open_store

pytest.importorskip('mpire')
pytest.importorskip('ding')
torch = pytest.importorskip('torch')
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def run(redis_server):
    """The store's URL and the name of a run of its own."""
    return redis_server.url, f'r{uuid.uuid4().hex[:8]}'


def workers(run, *nodes):
    url, name = run
    command = [sys.executable, PIPELINES / 'workers.py', *nodes]
    return ding_store('run', '--store', url, '--run', name, '--', *command)


def alive(run):
    with open_store(run[0], run=run[1]) as store:
        return [m for m in Members(store).refresh().alive() if not m.was_killed]


def finish(run):
    session = RunSession(StoreConfig(enable=True, url=run[0], run=run[1]))
    session.finish('enough')
    session.close()


def gone(pids, timeout_s=DEADLINE_S):
    deadline = time.monotonic() + timeout_s
    while any(os.path.exists(f'/proc/{pid}') for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)  # they are no children of ours: nobody tells us


def test_two_jobs_that_start_together_stay_apart(run, tmp_path):
    with job(workers(run, 0, 2), tmp_path, name='a') as a, job(workers(run, 0, 2), tmp_path, name='b') as b:
        a.wait_for(lambda: (a.text + b.text).count('refused') == 2, 'a job of which both are refused')
        one, other = (b, a) if 'refused' in a.text else (a, b)
        assert other.wait() == 0
        assert f'run {run[1]!r} is running already, with ' in other.text
        assert '--run NAME' in other.text
        one.wait_for(lambda: one.text.count('joined') == 2, 'the other one')
        assert len({m.launch for m in alive(run)}) == 1
        finish(run)
        assert one.wait() == 0


def test_ctrl_c_ends_the_command_and_all_of_its_workers(run, tmp_path):
    with job(workers(run, 0, 2), tmp_path) as started:
        started.wait_for(lambda: len(alive(run)) == 2, 'two members')
        pids = [member.pid for member in alive(run)]
        os.killpg(started.process.pid, signal.SIGINT)  # as a terminal does
        assert started.wait() != 0
        gone(pids)
    assert 'interrupted' in started.text


def test_workers_die_with_their_parent(run, tmp_path):
    with job(workers(run, 0, 2), tmp_path) as started:
        started.wait_for(lambda: len(alive(run)) == 2, 'two members')
        members = alive(run)
        os.kill(int(members[0].launch.rpartition(' ')[2]), signal.SIGKILL)
        gone([member.pid for member in members])
        assert started.wait() == 137


LAST_SAVE = Path(__file__).parent / 'last_save.py'
#: Of commands that are told to end, here.
SHORT_S = 1.0


@contextlib.contextmanager
def in_its_last_save(run, tmp_path):
    """A job whose learner writes its last checkpoint, until the gate is opened; the learner's pid, and the gate."""
    gate = tmp_path / 'gate'
    os.mkfifo(gate)
    command = [sys.executable, str(LAST_SAVE), str(gate), str(tmp_path / 'checkpoints')]
    code = f'import sys\nfrom ding_store.launch.command import run_command\nsys.exit(run_command({command}, {SHORT_S}))'
    extra = {ENV_URL: run[0], ENV_RUN: run[1], 'PYTHONPATH': os.pathsep.join([str(ROOT), str(PIPELINES)])}
    with job([sys.executable, '-c', code], tmp_path, **extra) as started:
        started.wait_for(lambda: 'learner trained' in started.text and len(alive(run)) == 2, 'a learner')
        learner = next(member.pid for member in alive(run) if member.role == 'learner')
        finish(run)
        started.wait_for(lambda: 'saving' in started.text, 'its last checkpoint')
        yield started, learner, gate


def tell(started, number):
    """A terminal tells all processes of a command, others its launcher."""
    (os.killpg if number == signal.SIGINT else os.kill)(started.process.pid, number)


@pytest.mark.parametrize('number', [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_command_terminated_waits_for_the_last_checkpoint(run, tmp_path, number):
    with in_its_last_save(run, tmp_path) as (started, learner, gate):
        tell(started, number)
        told = time.monotonic()
        started.wait_for(lambda: time.monotonic() > told + 4 * SHORT_S, 'as long as it is waited for a checkpoint')
        with open(gate, 'w'):
            pass
        started.wait()
        gone([learner])
    assert 'waiting for the last checkpoint' in started.text
    assert torch.load(tmp_path / 'checkpoints' / 'iteration_2.pth.tar').keys() >= {'weight', 'bias'}
    assert json.loads((tmp_path / 'checkpoints' / 'run.json').read_text())['finished'] is not None


@pytest.mark.long
def test_command_signalled_twice_writes_no_last_checkpoint(run, tmp_path):
    with in_its_last_save(run, tmp_path) as (started, learner, gate):
        for text in ('waiting for the last checkpoint', ''):
            tell(started, signal.SIGTERM)
            started.wait_for(lambda text=text: text in started.text, 'word of it')
        started.wait()
        gone([learner])
    assert [path.name for path in (tmp_path / 'checkpoints').glob('*.tar')] == ['iteration_1.pth.tar']


def test_process_that_ignores_signals_is_killed_at_the_end(tmp_path):
    code = (
        'import signal, subprocess, sys, time\n'
        'for number in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(number, signal.SIG_IGN)\n'
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open('pid', 'w').write(str(child.pid))\n"
        'time.sleep(600)\n'
    )
    pid = tmp_path / 'pid'
    with job(ding_store('run', '--', sys.executable, '-c', code), tmp_path) as started:
        started.wait_for(lambda: pid.exists() and pid.read_text(), 'its child')
        for _ in range(2):  # the second time means now
            os.kill(started.process.pid, signal.SIGTERM)
            started.wait_for(lambda: 'interrupted' in started.text, 'word of it')
        assert started.wait() == 137
        gone([int(pid.read_text())])


def test_process_that_cannot_be_killed_is_named_and_left(tmp_path):
    code = (
        'import os, sys\n'
        'from ding_store.launch import command\n'
        'command.KILL_S, command.os.kill = 0.5, lambda *args: None\n'  # as if it waited for a disk
        "sys.exit(command.run_command(['sh', '-c', 'trap : TERM; echo $$ > pid; while :; do sleep 1; done'], 0.2))\n"
    )
    pid = tmp_path / 'pid'
    with job([sys.executable, '-c', code], tmp_path) as started:
        started.wait_for(lambda: pid.exists() and pid.read_text(), 'the command')
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 137
        assert f'cannot be killed, and left alone: processes [{int(pid.read_text())}' in started.text


def test_run_returns_the_exit_code_of_its_command(tmp_path):
    with job(ding_store('run', '--', sys.executable, '-c', 'raise SystemExit(3)'), tmp_path) as started:
        assert started.wait() == 3


def test_processes_that_cannot_be_read_are_passed_over(monkeypatch):
    def hidden(path):
        if path == '/proc/1/stat':
            raise PermissionError(path)
        return open(path)

    monkeypatch.setattr(command, 'open', hidden, raising=False)
    found = [pid for pid, _ in command._processes()]
    assert os.getpid() in found
    assert 1 not in found


def test_join_of_a_run_that_ends_meanwhile_is_refused(redis_server, monkeypatch):
    run = f'ending-{uuid.uuid4().hex[:8]}'
    config = StoreConfig(enable=True, url=redis_server.url, run=run, heartbeat_s=0.1)
    with open_store(redis_server.url, run) as store:
        learner = RunSession(config)
        learner.join('learner', 0)
        claim = join_command.claim_role

        def claiming(*arguments):
            learner.close()
            store.retire()
            return claim(*arguments)

        class Nothing:
            def run(self):
                config = StoreConfig.from_block({'heartbeat_s': 0.1})
                with contextlib.closing(RunSession(config)) as session:
                    session.join('evaluator', 7)

        monkeypatch.setattr(join_command, 'claim_role', claiming)
        monkeypatch.setattr(join_command, 'ON_JOIN', [])  # the calls are for one process that joins
        called = []
        for name in ('import_di_engine', 'install', 'activate', 'deactivate', 'remove_address'):
            monkeypatch.setattr(join_command, name, lambda *arguments, name=name, **options: called.append(name))
        environment = Environment(url=config.url, run=run)
        with pytest.raises(ConfigError, match='ended while this process started'):
            join_command.join(config, environment, 'evaluator', 7, Nothing())
        assert called == ['import_di_engine', 'install', 'activate', 'deactivate', 'remove_address']
