"""The collectors of one host: how many it has after some have died, and after the wanted number has changed."""

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from ding_store.config import StoreConfig
from ding_store.launch import restarts
from ding_store.launch import staff as module
from ding_store.launch.process import Process
from ding_store.launch.staff import Staff
from ding_store.run.health import Health, seen_in
from ding_store.run.members import STREAM_OPTIONS
from ding_store.run.scale import change_target
from ding_store.storage import open_store


class Work:
    """A job whose processes sleep."""

    def __init__(self, **settings):
        self.config, self.processes, self.failed, self.reports = StoreConfig(**settings), [], None, []

    def report(self, text):
        self.reports.append(text)

    def join_command(self):
        return 'ding-store join'

    def start_process(self, role, node_id):
        self.children = [*getattr(self, 'children', ()), subprocess.Popen(['sleep', '600'])]
        pid = self.children[-1].pid
        self.processes.append(Process(role, node_id, pid, os.pidfd_open(pid), Path('log'), ''))
        return self.processes[-1]

    def end(self, process):
        """End a process as by itself, and note it as the job does."""
        os.kill(process.pid, signal.SIGKILL)
        process.code = 128 - process.wait()

    def running(self):
        return [each for each in self.processes if each.code is None and not each.is_retired]

    def close(self):
        for process in self.processes:
            if process.code is None:
                self.end(process)
            os.close(process.pidfd)
        for child in getattr(self, 'children', ()):
            child.returncode = 0  # it was waited for


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(module, 'LOOK_EVERY_S', 0.0)
    made = Work(health=str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def store():
    with open_store('memory://', stream_options=STREAM_OPTIONS) as opened:
        yield opened


def want(store, number):
    """Let the run want another number, as it does when it sizes itself."""
    change_target(store, lambda old: old._replace(number=number))


def test_smaller_number_retires_none_for_those_given_up(work, store):
    staff, session = Staff(work, 3), SimpleNamespace(store=store, finished=False)
    staff.begin(store, 4, None)
    assert len(staff.tick(session)) == 4
    for process in work.running()[:2]:
        work.end(process)
        staff.goes_on_after(process, os.EX_CONFIG, 'failed', store)
    assert staff.tick(session) == []
    assert len(work.running()) == 2
    want(store, 2)
    assert staff.tick(session) == []
    assert len(work.running()) == 2
    want(store, 3)
    assert staff.tick(session) == []  # those given up are not replaced
    want(store, 5)
    assert len(staff.tick(session)) == 1
    want(store, 1)
    staff.tick(session)
    assert len(work.running()) == 1


def test_health_files_of_collectors_not_started_again_go(work, store, tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, 'FIRST_S', restarts.LONGEST_S)
    staff, session = Staff(work, 3), SimpleNamespace(store=store, finished=False)
    staff.begin(store, 3, None)
    first, second, third = staff.tick(session)
    for process in (first, second, third):
        Health(str(tmp_path), 'collector', process.node_id).beat()
        work.end(process)
    staff.goes_on_after(first, os.EX_CONFIG, 'failed', store)  # it is given up
    for process in (second, third):
        staff.goes_on_after(process, -signal.SIGKILL, 'was killed', store)
    assert len(seen_in(str(tmp_path))) == 2  # probes wait for the next ones
    want(store, 1)
    assert staff.tick(session) == []
    (left,) = seen_in(str(tmp_path))
    assert left.name == f'collector-{third.node_id}'
    third.is_retired = True
    staff.left(third, -signal.SIGKILL)
    assert seen_in(str(tmp_path)) == []
