"""One process of a job, as its launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ding_store.errors import AppendUnsettled, ServerFull
from ding_store.launch.nursery import Nursery
from ding_store.run.members import Member, Members
from ding_store.storage.store import Store


@dataclass
class Process:
    """Process of one role."""

    role: str
    node_id: int
    pid: int
    pidfd: int
    log: Path
    address: str
    code: Optional[int] = None  # as in a shell: 128 + signal if it was killed
    is_terminated: bool = False  # SIGTERM was sent: a second one would end it without a last checkpoint
    is_debugged: bool = False  # it uses the terminal of the launcher
    rank: Optional[int] = None  # among several learners
    nursery: Optional[Nursery] = None  # that has forked it. None: it is a child of this process
    is_retired: bool = False  # it was asked to leave, because the run needs fewer

    @property
    def title(self) -> str:
        rank = '' if self.rank is None else f' rank {self.rank}'
        return f'{self.role}{rank} (node {self.node_id}, pid {self.pid})'

    def send(self, number: int) -> bool:
        """Send it a signal. Return False if it was waited for: its pid may be that of another process by now."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
            return True
        return False

    def wait(self) -> int:
        """Wait for its end. Return its exit status, or the negative number of the signal that killed it."""
        if self.nursery is not None:
            return self.nursery.code_of(self.pid)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def member_of(members: Members, process: Process) -> Optional[Member]:
    """Return the member that a process of this host has become, or None."""
    host = os.uname().nodename
    found = [each for each in members.of(process.role) if (each.pid, each.host) == (process.pid, host)]
    return found[-1] if found else None


def bury(members: Members, process: Process, store: Store, reason: str) -> None:
    """Report a process that has died as failed, unless it has reported its end itself."""
    member = member_of(members, process)
    if member is not None and member.state == 'alive':
        member.figures = {**member.figures, 'crashed': 1}
        report_failed(member, store, reason)


def report_given_up(members: Members, process: Process, store: Store, reason: str, launched: str) -> None:
    """Report a process that is not started again. It may have died before it became a member."""
    member = member_of(members, process)
    if member is None:
        name = f'{process.role}-{process.node_id}-{process.pid}-{uuid.uuid4().hex[:6]}'
        member = Member(name, process.role, process.node_id, pid=process.pid, launch=launched)
    report_failed(member, store, reason)


def report_failed(member: Member, store: Store, reason: str) -> None:
    """Report a member as failed. At its maxmemory the server takes no report: others then see that it is silent."""
    with contextlib.suppress(ServerFull):
        try:
            member.report(store, 'failed', reason)
        except AppendUnsettled as error:
            if not error.needs_room:
                raise
