"""What platforms need: probes, a run without a launcher, and signals that end a process in order."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from jobs import TINY, ding_store, environment, job
from redis_server import left_by_runs

from ding_store.launch.health import show_health
from ding_store.run.health import Health
from ding_store.run.members import STREAM_OPTIONS, Member
from ding_store.storage import open_store

pytestmark = pytest.mark.timeout(600)


def said(cwd, *arguments, code, **variables):
    with job(ding_store(*arguments), cwd, name='command', **variables) as run:
        assert run.wait() == code, run.text
        assert 'Traceback' not in run.text
        return run.text


def test_health_is_that_of_the_processes_that_have_joined(tmp_path, capsys):
    where = str(tmp_path / 'health')
    assert show_health(where, '', 60.0) == 1
    learner, collector = Health(where, 'learner', 0), Health(where, 'collector', 2)
    assert show_health(where, '', 60.0) == 1  # it has not begun
    learner.beat()
    collector.beat()
    assert show_health(where, '', 60.0) == 0
    os.utime(tmp_path / 'health' / 'collector-2', (time.monotonic() - 100.0,) * 2)
    assert [show_health(where, *arguments) for arguments in (('', 60.0), ('learner', 60.0), ('', 200.0))] == [1, 0, 0]
    capsys.readouterr()
    collector.end()
    collector.beat()
    assert show_health(where, 'collector', 60.0) == 1
    assert 'no process of role collector has joined' in capsys.readouterr().out


def test_health_of_a_full_disk_does_not_stop_a_process(tmp_path):
    (tmp_path / 'file').touch()
    health = Health(str(tmp_path / 'file' / 'below'), 'learner', 0)
    health.beat()
    health.end()


def test_health_imports_neither_numpy_nor_torch(tmp_path):
    code = (
        'import sys\nfrom ding_store.cli import main\n'
        "assert main(['health']) == 1\n"
        "assert not {'numpy', 'torch', 'redis', 'ding'} & set(sys.modules)\n"
    )
    variables = environment(DING_STORE_HEALTH=str(tmp_path))
    done = subprocess.run([sys.executable, '-c', code], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_health_without_a_directory_is_refused(tmp_path):
    assert 'DING_STORE_HEALTH' in said(tmp_path, 'health', code=2)


def test_retire_deletes_a_run_that_has_ended(tmp_path, redis_server):
    where = ['retire', '--store', redis_server.url, '--run', 'gone']
    with open_store(redis_server.url, 'gone', stream_options=STREAM_OPTIONS) as store:
        store.append('experience', {}, {})
        assert 'has not ended' in said(tmp_path, *where, code=2)
        store.decide('finish', {'reason': 'why', 'failed': True}, 0)
        member = Member('m', 'learner', 0)
        stop = threading.Event()

        def report():
            while not stop.wait(0.1):
                member.report(store)

        reports = threading.Thread(target=report)
        reports.start()
        try:
            assert 'still has a process: learner' in said(tmp_path, *where, code=2)
        finally:
            stop.set()
            reports.join()
        member.report(store, 'left')
    assert 'it had ended: why' in said(tmp_path, *where, code=0)
    with redis_server.client() as client:
        assert left_by_runs(client, '*gone*') == []


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        (['--role', 'collector', '--owner'], '--owner is for --role learner'),
        (['--role', 'learner', '--capacity', 2], '--capacity is for --role collector'),
        (['--role', 'collector', '--logs', 'x'], '--logs goes with --capacity'),
        (['--role', 'evaluator', '--restarts', 0], '--restarts goes with --capacity'),
        (['--role', 'collector', '--capacity', 2, '--learners', 2], '--learners means nothing with --capacity'),
    ],
)
def test_join_with_options_of_another_role_is_refused(tmp_path, options, reason):
    assert reason in said(tmp_path, 'join', *options, '--', 'python', TINY, code=2)


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        (['--capacity', 0], '--capacity goes with --roles'),
        (['--restarts', 0], '--restarts goes with --roles'),
        (['--roles', 'worker=2', '--learners', 2], '--learners means nothing with --roles worker=N'),
        (['--roles', 'worker=2', '--capacity', 2], '--capacity means nothing with --roles worker=N'),
        (['--roles', 'worker=2', '--restarts', 2], '--restarts means nothing with --roles worker=N'),
    ],
)
def test_run_with_options_without_an_effect_is_refused(tmp_path, options, reason):
    assert reason in said(tmp_path, 'run', *options, '--', 'python', TINY, code=2)


@pytest.mark.parametrize(
    ('roles', 'reason'),
    [
        ('learner=1..2,collector=1', 'only collector may have'),
        ('learner=1,collector=3..3', 'second bound above the first'),
        ('learner=1,collector=0..4', 'first bound of 1 or above'),
        ('learner=1,collector=3..', 'should read like'),
    ],
)
def test_bounds_of_another_form_are_refused(tmp_path, roles, reason):
    assert reason in said(tmp_path, 'run', '--roles', roles, '--', 'python', TINY, code=2)


class Session:
    """What ``leave_on_signal`` needs of a session."""

    def __init__(self):
        self.asked = threading.Event()
        self.leaves_alone = False

    def ask_to_leave(self):
        self.leaves_alone = True
        self.asked.set()

    def leave_at_once(self):
        return True


@pytest.fixture
def no_handler():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_asks_the_session_to_leave(monkeypatch, no_handler):
    pytest.importorskip('ding')
    from ding_store.middleware import leave_on_signal as module

    ended = threading.Event()
    codes = []
    monkeypatch.setattr(module, 'ITERATION_S', 0.0)
    monkeypatch.setattr(os, '_exit', lambda code: (codes.append(code), ended.set()))
    session = Session()
    module.leave_on_signal(session)
    assert module.exit_code(0) == 0
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # a scheduler and a launcher may both send it
    assert session.asked.wait(60.0)
    # The iteration does not end in time: the process leaves without it.
    assert ended.wait(60.0)
    assert codes == [module.EXIT_CODE]
    assert (module.exit_code(0), module.exit_code(1)) == (143, 1)


def test_handler_of_the_script_stays(no_handler):
    pytest.importorskip('ding')
    from ding_store.middleware.leave_on_signal import exit_code, leave_on_signal

    def own(number, frame):
        pass

    signal.signal(signal.SIGTERM, own)
    leave_on_signal(Session())
    assert signal.getsignal(signal.SIGTERM) is own
    assert exit_code(0) == 0  # whatever runs this process has left before
