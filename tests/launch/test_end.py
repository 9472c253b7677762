"""How a launcher takes the end of its processes."""

import os
import time
from types import SimpleNamespace

import pytest

pytest.importorskip('ding')
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.launch.job import LEAVE_S, SAVE_S, TERM_S, Job, Process  # noqa: E402
from ding_store.middleware.members import STREAM_OPTIONS, Member, Members  # noqa: E402
from ding_store.middleware.session import CHECKPOINTS, FINISH  # noqa: E402
from ding_store.storage import open_store  # noqa: E402


@pytest.mark.parametrize(
    ('role', 'run_failed', 'fails'),
    [('evaluator', False, False), ('evaluator', True, True), ('learner', False, True)],
)
def test_an_evaluator_in_its_last_evaluation_does_not_fail_the_run(tmp_path, role, run_failed, fails):
    pid = os.posix_spawn('/bin/sleep', ['sleep', '60'], os.environ)
    process = Process(role, 1, pid, os.pidfd_open(pid), tmp_path / 'log', '')
    said = []
    with open_store('memory://', run='r') as store:
        store.put(FINISH, {'reason': 'the learner finished', 'failed': run_failed, 'parent': 0}, {})
        session = SimpleNamespace(store=store, finished=True, finish=lambda *args, **kwargs: None)
        job = Job(None, {}, StoreConfig(), tmp_path, say=said.append, processes=[process])
        job._hurry(time.monotonic() - LEAVE_S - 1, Members(store))
        assert job._reap(process, session) is None
    assert (job.failed is not None) == fails
    assert ('was not done 10 s after the end' in said[0]) == (not fails)


def test_a_learner_that_writes_its_last_checkpoint_is_waited_for(tmp_path, monkeypatch):
    said, killed = [], []
    monkeypatch.setattr(os, 'kill', lambda pid, number: killed.append((pid, number.name)))
    learner, evaluator = (Process(role, pid, pid, 0, tmp_path, '') for role, pid in (('learner', 1), ('evaluator', 2)))
    job = Job(None, {}, StoreConfig(), tmp_path, say=said.append, processes=[learner, evaluator])
    with open_store('memory://', run='r', stream_options=STREAM_OPTIONS) as store:
        member, members, now = Member('a', 'learner', 0, figures={'is_saving': True}), Members(store), time.monotonic()

        def hurry(since_end_s):
            member.report(store)
            killed.clear()
            job._hurry(now - since_end_s, members)
            return list(killed)

        assert hurry(LEAVE_S - 5) == []
        assert hurry(LEAVE_S + 1) == [(2, 'SIGTERM')]
        assert hurry(LEAVE_S + TERM_S + 1) == [(2, 'SIGKILL')]
        assert said == ['waiting for the last checkpoint: the learner is still writing it']
        member.figures = {'is_saving': False}
        assert hurry(LEAVE_S + TERM_S + 1) == [(2, 'SIGKILL')]  # then it may leave
        job.saving_s -= LEAVE_S + 1
        assert hurry(LEAVE_S + TERM_S + 1) == [(1, 'SIGTERM'), (2, 'SIGKILL')]
        member.figures = {'is_saving': True}
        assert hurry(LEAVE_S + TERM_S + 1) == [(2, 'SIGKILL')]
        job.saving_s = 0.0
        assert hurry(SAVE_S + 1) == [(1, 'SIGKILL'), (2, 'SIGKILL')]


@pytest.mark.parametrize('is_forgotten', [False, True])
@pytest.mark.parametrize(('code', 'num_restarts'), [(1, 1), (os.EX_CONFIG, 0)])
def test_a_learner_whose_settings_are_wrong_is_not_started_again(
    tmp_path, monkeypatch, code, num_restarts, is_forgotten
):
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
