"""The process that forks roles, and signals to roles that it has waited for."""

import os
import select
import signal
from pathlib import Path

import pytest

from ding_store.launch import nursery as module
from ding_store.launch.nursery import Nursery, NurseryLost
from ding_store.launch.process import Process
from ding_store.launch.role_process import Role
from ding_store.launch.user_script import UserScript

pytest.importorskip('ding')
DEADLINE_S = 60.0
pytestmark = pytest.mark.timeout(300)


def has_ended(pidfd):
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])


@pytest.fixture
def role():
    """A role that sleeps before it runs its script."""
    return Role(UserScript('main.py', False, []), 2, '', [], 1, 0, delay_s=600.0, title='collector-2')


def test_process_that_the_nursery_waited_for_gets_no_signal(tmp_path, role):
    nursery = Nursery()
    pid, pidfd = nursery.start(role, tmp_path / 'log')
    process = Process('collector', 2, pid, pidfd, Path('log'), '', nursery=nursery)
    try:
        assert process.send(signal.SIGKILL)
        assert has_ended(pidfd)
        assert nursery.code_of(pid) == -signal.SIGKILL  # so it has waited for it
        assert not process.send(signal.SIGTERM)
    finally:
        os.close(pidfd)
        nursery.close()


def test_nursery_that_does_not_answer_is_killed(tmp_path, role, monkeypatch):
    monkeypatch.setattr(module, 'ANSWER_S', 0.1)
    nursery = Nursery()
    own = os.pidfd_open(nursery.pid)
    try:
        os.kill(nursery.pid, signal.SIGSTOP)
        with pytest.raises(NurseryLost):
            nursery.start(role, tmp_path / 'log')
        assert has_ended(own)
    finally:
        signal.pidfd_send_signal(own, signal.SIGKILL)
        os.close(own)
        nursery.close()
