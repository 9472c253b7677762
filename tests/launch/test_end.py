"""How a launcher takes the end of its processes."""

import io
import os
import signal
import time
from types import SimpleNamespace

import pytest

pytest.importorskip('ding')
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import StoreUnavailable  # noqa: E402
from ding_store.launch import job as job_module  # noqa: E402
from ding_store.launch import role_process  # noqa: E402
from ding_store.launch.job import LEAVE_S, TERM_S, WORKER_RESTARTS, Job, Process  # noqa: E402
from ding_store.launch.progress import Display  # noqa: E402
from ding_store.launch.role_process import Role  # noqa: E402
from ding_store.launch.user_script import UserScript  # noqa: E402
from ding_store.run.ending import CHECKPOINTS, FINISH  # noqa: E402
from ding_store.run.last_checkpoint import SAVE_S  # noqa: E402
from ding_store.run.lease import Lease, Owner, role_lease  # noqa: E402
from ding_store.run.members import STREAM_OPTIONS, Member, Members  # noqa: E402
from ding_store.run.node_addresses import remove_address  # noqa: E402
from ding_store.run.several_learners import OWN_PACE  # noqa: E402
from ding_store.run.waiting import STARTING, PeerWatch  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.testing.faulty import FaultyStore  # noqa: E402


@pytest.mark.parametrize(
    ('role', 'rank', 'known', 'run_failed', 'fails'),
    [
        ('evaluator', None, [], False, False),
        ('evaluator', None, [], True, True),
        ('learner', None, [], False, True),
        ('learner', 0, [OWN_PACE], False, True),
        ('learner', 1, [OWN_PACE], False, False),
        ('learner', 1, [], False, True),  # all learners end together
        ('worker', 1, [OWN_PACE, CHECKPOINTS], False, False),
        ('worker', 1, [OWN_PACE], True, True),
        ('worker', 0, [OWN_PACE], False, False),
        ('worker', 0, [OWN_PACE, CHECKPOINTS], False, True),  # its last checkpoint may be missing
    ],
)
def test_evaluator_killed_after_the_end_does_not_fail_the_run(tmp_path, role, rank, known, run_failed, fails):
    """Nor does a worker, or a learner at its own pace, that has nothing to save."""
    pid = os.posix_spawn('/bin/sleep', ['sleep', '60'], os.environ)
    process = Process(role, 1, pid, os.pidfd_open(pid), tmp_path / 'log', '', rank=rank)
    said = []
    with open_store('memory://', run='r') as store:
        for name in known:
            store.put(name, {'path': str(tmp_path), 'max_restarts': 5}, {})
        store.put(FINISH, {'reason': 'the learner finished', 'failed': run_failed, 'parent': 0}, {})
        session = SimpleNamespace(store=store, finished=True, finish=lambda *args, **kwargs: None)
        job = Job(None, {}, StoreConfig(), tmp_path, say=said.append, processes=[process])
        job._hurry(time.monotonic() - LEAVE_S - 1)
        assert job._reap(process, session) == []
    assert (job.failed is not None) == fails
    assert ('was not done 10 s after the end' in said[0]) == (not fails)


@pytest.mark.parametrize('role', ['learner', 'worker'])
def test_learner_writing_its_last_checkpoint_is_awaited(tmp_path, monkeypatch, role):
    said, killed, writers = [], [], {1}
    monkeypatch.setattr(signal, 'pidfd_send_signal', lambda pidfd, number: killed.append((pidfd, number.name)))
    monkeypatch.setattr(job_module, 'is_saving', lambda pid: pid in writers)
    learner, evaluator = (Process(role, pid, pid, pid, tmp_path, '') for role, pid in ((role, 1), ('evaluator', 2)))
    job, now = Job(None, {}, StoreConfig(), tmp_path, say=said.append, processes=[learner, evaluator]), time.monotonic()

    def hurry(since_end_s):
        killed.clear()
        job._hurry(now - since_end_s)
        return list(killed)

    assert hurry(LEAVE_S - 5) == []
    assert hurry(LEAVE_S + 1) == [(2, 'SIGTERM')]
    assert hurry(LEAVE_S + 2) == []  # a second one would end a learner at once
    assert hurry(LEAVE_S + TERM_S + 1) == [(2, 'SIGKILL')]
    assert said == [f'waiting for the last checkpoint: the {role} is still writing it']
    writers.clear()
    assert hurry(LEAVE_S + TERM_S + 1) == [(2, 'SIGKILL')]  # then it may leave
    job.saving_s -= LEAVE_S + 1
    assert hurry(LEAVE_S + TERM_S + 1) == [(1, 'SIGTERM'), (2, 'SIGKILL')]
    writers.add(1)
    assert hurry(LEAVE_S + TERM_S + 1) == [(2, 'SIGKILL')]
    job.saving_s = 0.0
    assert hurry(SAVE_S + 1) == [(1, 'SIGKILL'), (2, 'SIGKILL')]


def test_interrupt_during_the_end_keeps_the_watch_running(tmp_path, monkeypatch):
    pid = os.posix_spawn('/bin/sleep', ['sleep', '60'], os.environ)
    process, looks = Process('learner', 0, pid, os.pidfd_open(pid), tmp_path / 'log', ''), []

    def hurry(self, ended_s):
        looks.append(ended_s)
        if len(looks) == 1:
            raise KeyboardInterrupt
        if process.code is None:
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(Job, '_hurry', hurry)
    with open_store('memory://', run='r') as store:
        finish = {'finished': True, 'on_finish': lambda call: call('it finished'), 'finish': lambda *_, **__: None}
        job = Job(None, {}, StoreConfig(), tmp_path, processes=[process])
        assert job.watch(SimpleNamespace(store=store, **finish), lambda: None, tick_s=0.01) == 1
    assert (job.failed, process.code, len(looks) >= 2) == ('interrupted', 128 + signal.SIGKILL, True)


@pytest.mark.parametrize('is_forgotten', [False, True])
@pytest.mark.parametrize(('code', 'num_restarts'), [(1, 1), (os.EX_CONFIG, 0)])
def test_learner_with_wrong_settings_is_not_restarted(tmp_path, monkeypatch, code, num_restarts, is_forgotten):
    """Nor does another one stay away because the server lost its memory, and with it that there are checkpoints."""
    log, said, restarted = tmp_path / 'log', [], []
    log.touch()
    pid = os.posix_spawn('/bin/sh', ['sh', '-c', f'exit {code}'], os.environ)
    process = Process('learner', 0, pid, os.pidfd_open(pid), log, '')
    monkeypatch.setattr(Job, '_restart', lambda self, process, session: restarted.append(process))
    with open_store('memory://', run='r') as store:
        if is_forgotten:
            Member('l', 'learner', 0, figures={'max_restarts': 5}).report(store)
        else:
            store.put(CHECKPOINTS, {'path': str(tmp_path), 'max_restarts': 5}, {})
        session = SimpleNamespace(store=store, finished=False, finish=lambda *args, **kwargs: None)
        job = Job(None, {}, StoreConfig(), tmp_path, say=said.append, processes=[process])
        job._reap(process, session)
    assert len(restarted) == num_restarts
    assert ('ConfigError' in ''.join(said)) == (job.failed is not None) == (num_restarts == 0)


@pytest.mark.parametrize(('run_failed', 'num_restarts'), [(False, 1), (True, 0)])
def test_learner_killed_as_the_run_ended_is_started_again(tmp_path, monkeypatch, run_failed, num_restarts):
    """It reads the last experience, and saves the last state. The run has ended in order."""
    pid, spawned = os.posix_spawn('/bin/sh', ['sh', '-c', 'kill -9 $$'], os.environ), []
    process = Process('learner', 0, pid, os.pidfd_open(pid), tmp_path / 'log', '')

    def spawn(self, log):
        spawned.append(self.title)
        return os.posix_spawn('/bin/true', ['true'], os.environ)

    monkeypatch.setattr(Role, 'spawn', spawn)
    with open_store('memory://', run='r') as store:
        store.put(CHECKPOINTS, {'path': str(tmp_path), 'max_restarts': 5}, {})
        store.put(FINISH, {'reason': 'mean return 200', 'failed': run_failed, 'parent': 0}, {})
        finish = {'finished': True, 'on_finish': lambda call: None, 'finish': lambda *_, **__: None}
        job = Job(None, {'learner': 1}, StoreConfig(), tmp_path, processes=[process])
        code = job.watch(SimpleNamespace(store=store, **finish), lambda: None, tick_s=0.01)
        assert store.get(f'{STARTING}learner') is None
    assert spawned == ['learner-0'] * num_restarts
    assert code == (0 if num_restarts else 1)


def test_launcher_reports_a_learner_that_starts_until_it_joins(tmp_path):
    pid = os.posix_spawn('/bin/sleep', ['sleep', '60'], os.environ)
    process, seen = Process('learner', 0, pid, os.pidfd_open(pid), tmp_path / 'log', ''), []
    name = f'{STARTING}learner'
    with open_store('memory://', run='r', stream_options=STREAM_OPTIONS) as store:
        peers = PeerWatch(store, 'learner', 60.0, lambda: True, lambda: False)
        Lease(store, role_lease('learner'), Owner.this_process('x'), 'the learner before', 5.0).acquire()
        peers.look()

        def tick():
            value = store.get(name)
            seen.append((value is not None, peers.look()))
            if len(seen) == 4:
                Member('l', 'learner', 0, pid=pid).report(store)
            if len(seen) == 6:
                os.kill(pid, signal.SIGKILL)

        finish = {'finished': False, 'on_finish': lambda call: None, 'finish': lambda *_, **__: None}
        job = Job(None, {}, StoreConfig(), tmp_path, processes=[process], starting=[process])
        job.watch(SimpleNamespace(store=store, **finish), tick, tick_s=0.01)
        assert store.get(name) is None
    assert [is_there for is_there, _ in seen[:6]] == [False, True, True, True, False, False]
    assert all('is being started again' in text for _, text in seen[1:4])
    assert all('has gone silent' in text for _, text in seen[4:6])


def test_store_away_as_a_learner_joined_leaves_no_start_behind(tmp_path, monkeypatch):
    """Else others would take every later learner that failed for one that is being started again."""
    pid = os.posix_spawn('/bin/sleep', ['sleep', '60'], os.environ)
    process, seen = Process('learner', 0, pid, os.pidfd_open(pid), tmp_path / 'log', ''), []
    with open_store('memory://', run='r', stream_options=STREAM_OPTIONS) as store:
        delete, faults = store.delete, [StoreUnavailable('away')]

        def delete_later(name):
            if faults:
                raise faults.pop()
            return delete(name)

        def tick():
            seen.append(store.get(f'{STARTING}learner') is not None)
            if len(seen) == 2:
                Member('l', 'learner', 0, pid=pid).report(store)
            if len(seen) == 4:
                os.kill(pid, signal.SIGKILL)

        monkeypatch.setattr(store, 'delete', delete_later)
        finish = {'finished': False, 'on_finish': lambda call: None, 'finish': lambda *_, **__: None}
        job = Job(None, {}, StoreConfig(), tmp_path, processes=[process], starting=[process])
        job.watch(SimpleNamespace(store=store, **finish), tick, tick_s=0.01)
    assert seen[:4] == [False, True, True, False]


def test_start_that_a_killed_launcher_reported_is_forgotten(tmp_path, monkeypatch, forgetful_server):
    config, seen = StoreConfig(url=forgetful_server.url, run='r'), []
    with open_store(forgetful_server.url, run='r') as store:
        for role in ('learner', 'evaluator'):
            store.put(f'{STARTING}{role}', {}, {})

        def watch(self, session, tick):
            seen.extend(store.get(f'{STARTING}{role}') for role in ('learner', 'evaluator'))
            return 1

        monkeypatch.setattr(Job, 'start', lambda self: None)
        monkeypatch.setattr(Job, 'watch', watch)
        Job(UserScript('main.py', False, []), {'learner': 1}, config, tmp_path / 'logs').run(io.StringIO())
    assert seen == [None, None]


@pytest.mark.parametrize(('figures', 'most'), [({'train_iter': 3, 'up_s': 2.0}, None), ({}, WORKER_RESTARTS)])
def test_worker_is_given_up_after_early_deaths_in_a_row(tmp_path, monkeypatch, figures, most):
    """One that has trained may be preempted as often as it likes."""
    spawned, said, enough = [], [], WORKER_RESTARTS + 3
    with open_store('memory://', run='r', stream_options=STREAM_OPTIONS) as store:

        def spawn(*_):
            if len(spawned) == enough:
                store.put(FINISH, {'reason': 'enough', 'failed': False, 'parent': 0}, {})
                return os.posix_spawn('/bin/true', ['true'], os.environ)
            pid = os.posix_spawn('/bin/sh', ['sh', '-c', 'kill -9 $$'], os.environ)
            Member(f'w{len(spawned)}', 'worker', 1, pid=pid, figures=figures).report(store)
            spawned.append(pid)
            return pid

        monkeypatch.setattr(Role, 'spawn', spawn)
        pid = spawn()
        process = Process('worker', 1, pid, os.pidfd_open(pid), tmp_path / 'log', '', rank=1)
        finish = {'finished': False, 'on_finish': lambda call: None, 'finish': lambda *_, **__: None}
        job = Job(None, {'worker': 2}, StoreConfig(), tmp_path, say=said.append, processes=[process])
        code = job.watch(SimpleNamespace(store=store, **finish), lambda: None, tick_s=0.01)
    assert (code, len(spawned)) == ((0, enough) if most is None else (1, 1 + most))
    assert ('it ended early 6 times in a row' in ''.join(said)) == (most is not None)


@pytest.mark.parametrize(
    ('title', 'rank', 'is_worker', 'number'),
    [
        ('learner-0', None, False, signal.SIGTERM),
        ('collector-2', None, False, signal.SIGKILL),
        ('worker-0', 0, True, signal.SIGTERM),
        ('worker-1', 1, True, signal.SIGKILL),
    ],
)
def test_process_that_may_save_gets_sigterm_with_its_launcher(monkeypatch, title, rank, is_worker, number):
    asked = []
    monkeypatch.setattr(signal, 'signal', lambda *_: None)
    monkeypatch.setattr(role_process, 'end_with', lambda *arguments: asked.append(arguments))
    Role(None, 0, '', [], 1, 7, title=title, rank=rank, is_worker=is_worker).enter()
    assert asked == [(7, number)]


def test_socket_removed_by_its_listener_meanwhile_is_no_error(tmp_path, monkeypatch):
    """nng unlinks it in a thread of its own."""
    path = tmp_path / 'a.ipc'
    path.touch()
    remove_address(f'ipc://{path}')
    assert not path.exists()
    monkeypatch.setattr(os.path, 'exists', lambda path: True)  # it was, when somebody looked
    remove_address(f'ipc://{path}')


def test_store_away_at_the_end_leaves_the_result_unchanged(tmp_path, monkeypatch):
    job, out = Job(None, {}, StoreConfig(), tmp_path), io.StringIO()
    with open_store('memory://', run='r', stream_options=STREAM_OPTIONS) as store:
        Member('c', 'collector', 2, figures={'rows': 8}).report(store)
        session = SimpleNamespace(store=store, watch=lambda: None, finish_reason='enough', failed=False)

        def watch(session, tick):
            display._members.refresh()
            session.store = display._members._store = FaultyStore(store, num_faults=1000)
            return 0

        display = Display(store, out)
        monkeypatch.setattr(job_module, 'Display', lambda *arguments: display)
        monkeypatch.setattr(job, 'watch', watch)
        result = job._watched(session, out)
    assert (result.code, result.reason, result.figures.rows_appended) == (0, 'enough', 8)
    assert 'figures may be missing' in out.getvalue()
    assert 'could not be retired' in out.getvalue()


def test_process_death_at_maxmemory_ends_no_run(forgetful_server):
    """That nobody can be told of its death is no reason to end the run."""
    with open_store(forgetful_server.url, stream_options=STREAM_OPTIONS) as store, forgetful_server.client() as client:
        member = Member('l', 'learner', 0, host=os.uname().nodename)
        member.report(store)
        client.config_set('maxmemory', 1)
        Job._bury(SimpleNamespace(role='learner', pid=member.pid), store)
        assert [one.state for one in Members(store).refresh().of('learner')] == ['alive']
