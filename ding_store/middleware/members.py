"""Who takes part in a run: every process reports itself in the ``members`` stream, and anybody may read it."""

from __future__ import annotations

import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

from ding_store.errors import CorruptPayload
from ding_store.middleware.last_checkpoint import wait_until_saved
from ding_store.storage.base import OLDEST, Entry, EntryId, Store

logger = logging.getLogger(__name__)

STREAM = 'members'
#: The newest reports are what matters: old ones make room.
STREAM_OPTIONS = {STREAM: {'max_pending_bytes': 1 << 20, 'overflow': 'drop_oldest'}}

#: Who has reported nothing while the others did so many times each is no more.
SILENT_AFTER = 10
#: So many processes that went are known by name, and at most twice as many; of those before them only the sums.
MAX_DEPARTED = 1000

#: Set for processes of ``ding-store run --roles`` and ``join``, to their launch. Launchers retire the run, after they
#: have read the last figures.
ENV_LAUNCHED = 'DING_STORE_LAUNCHED'
#: Set for processes of ``ding-store join``: the epoch of the run's members as it found them.
ENV_JOINED = 'DING_STORE_JOINED'


def pid_space() -> str:
    """Where process ids mean the same: one boot of one kernel, and there one namespace."""
    boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'


def parent_process() -> Optional[str]:
    """The one process that started this and its sibling workers, where one did: DI-engine's ``Parallel`` does."""
    parent = multiprocessing.parent_process()
    return None if parent is None else f'{pid_space()} {parent.pid}'


def launch() -> str:
    """What was started together with this process: the process that started all of it, itself where none did."""
    return os.environ.get(ENV_LAUNCHED) or parent_process() or f'{pid_space()} {os.getpid()}'


def die_with_parent() -> None:
    """
    Overview:
        Have this process killed as soon as the one that spawned it as a worker is gone, and a last checkpoint written:
        workers of ``ditask`` ignore the signals that end it, and would collect for ever. The kernel's own way
        (PR_SET_PDEATHSIG) is about the thread that started a process, which may end long before its process does.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        wait_until_saved()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name='ding_store-parent', daemon=True).start()


@dataclass
class Member:
    """
    Overview:
        One process of a run, as it last reported itself. ``state`` is 'alive', 'left' (in order) or 'failed'.
        ``figures`` are cumulative: rows, env_step, train_iter, policy_version, ...
    """

    id: str
    role: str
    node_id: int
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    pid_space: str = field(default_factory=pid_space)
    parent: Optional[str] = field(default_factory=parent_process)
    launch: str = field(default_factory=launch)
    address: Optional[str] = None
    state: str = 'alive'
    beat: int = 0
    reason: str = ''
    figures: Dict[str, Any] = field(default_factory=dict)

    def report(self, store: Store, state: str = 'alive', reason: str = '') -> None:
        """Append the member's present state to the run's members."""
        self.beat += 1
        self.state, self.reason = state, reason
        store.append(STREAM, asdict(self), {}, timeout_s=1.0)

    @property
    def was_killed(self) -> bool:
        """Whether it could report no end, as far as that can be seen from here: only beside it."""
        return self.state == 'alive' and self.pid_space == pid_space() and not os.path.exists(f'/proc/{self.pid}')

    @property
    def title(self) -> str:
        return f'{self.role} (node {self.node_id}, pid {self.pid} on {self.host})'


@dataclass
class _Departed:
    """Members of a role that are no longer known by name. One that reports after all counts twice."""

    sums: Dict[str, float] = field(default_factory=dict)
    began_s: List[float] = field(default_factory=list)  # the first one's, if any
    num_not_left: int = 0

    def add(self, member: Member) -> None:
        for name, figure in member.figures.items():
            if name == 'began_s':
                self.began_s = [min([figure, *self.began_s])]
            elif name not in _FIGURES:
                self.sums[name] = self.sums.get(name, 0) + figure
        self.num_not_left += member.state == 'alive'


class Members:
    """
    Overview:
        A view of the members of a run, brought up to date by ``refresh``; costs one read of what is new, and one more
        where something was. A report that cannot be read is passed over, with one warning: the next one says as much.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.after: EntryId = OLDEST
        self.by_id: Dict[str, Member] = {}
        self._departed: Dict[str, _Departed] = {}  # by role
        self._num_reports = 0
        self._reported: Dict[str, int] = {}  # which one of them was a member's last
        self._has_complained = False

    def refresh(self) -> Members:
        before = None
        while self.after != before:
            before = self.after
            for entry in self._read(max_entries=512):
                self.after = entry.id
                self._see(entry)
        if len(self.by_id) > 2 * MAX_DEPARTED:
            self._forget_departed()
        return self

    def wait(self, timeout_s: float) -> None:
        """Return as soon as somebody reports."""
        self._read(max_entries=1, timeout_s=timeout_s)

    def _read(self, max_entries: int, timeout_s: float = 0.0) -> List[Entry]:
        """Reports behind ``after``; of one that cannot be read none, and ``after`` is behind it."""
        try:
            return self._store.read(STREAM, self.after, max_entries, timeout_s)
        except CorruptPayload as e:
            if e.entry_id is None:
                raise
            self.after = EntryId(*e.entry_id)
            self._complain(str(e))
            return []

    def _see(self, entry: Entry) -> None:
        member = _member_of(entry.header)
        if member is None:
            self._complain(f'entry {entry.id.number} of {STREAM!r} is no report of a member')
            return
        self._num_reports += 1
        self._reported[member.id] = self._num_reports
        known = self.by_id.get(member.id)
        if known is None or member.beat >= known.beat:
            self.by_id[member.id] = member

    def _complain(self, reason: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning('members of run %r: %s; it is passed over', self._store.run, reason)

    def of(self, role: str, state: Optional[str] = None) -> List[Member]:
        return [m for m in self.by_id.values() if m.role == role and state in (None, m.state)]

    def alive(self, role: Optional[str] = None) -> List[Member]:
        return [m for m in self.by_id.values() if m.state == 'alive' and role in (None, m.role)]

    def reporting(
        self, role: Optional[str], timeout_s: float, where: Callable[[Member], bool] = lambda member: True
    ) -> Optional[Member]:
        """
        Overview:
            One (of a role) that lives: of those who neither left nor failed the first to report within ``timeout_s``.
            None when there is none; who was killed counts as alive by its last report, and does not report any more.
        """

        def alive() -> List[Member]:
            return [member for member in self.refresh().alive(role) if where(member) and not member.was_killed]

        beats = {member.id: member.beat for member in alive()}
        deadline = time.monotonic() + timeout_s
        while beats:
            moved = [member for member in alive() if member.beat != beats.get(member.id)]
            left_s = deadline - time.monotonic()
            if moved or left_s <= 0:
                return moved[0] if moved else None
            self.wait(left_s)
        return None

    def wait_until_left(self, role: Optional[str] = None, silent_s: float = 3.0, timeout_s: float = 5.0) -> None:
        """
        Overview:
            Wait until nobody (of a role) is in the run any more, for ``timeout_s`` at most. Who has not reported for
            ``silent_s`` was killed, and is not waited for.
        """
        silent_since, beats = time.monotonic(), -1
        deadline = silent_since + timeout_s
        while time.monotonic() < deadline:
            awaited = self.refresh().alive(role)
            if not awaited:
                return
            seen = sum(member.beat for member in awaited)
            if seen != beats:
                silent_since, beats = time.monotonic(), seen
            elif time.monotonic() - silent_since > silent_s:
                return
            self.wait(0.5)

    def wait_for_workers(self, parent: str, num: int, timeout_s: float) -> None:
        """
        Overview:
            Wait until all workers of one parent process have joined, for ``timeout_s`` at most and while it lives.
        """
        deadline, parent_pid = time.monotonic() + timeout_s, os.getppid()
        while time.monotonic() < deadline and os.getppid() == parent_pid:
            if len({m.node_id for m in self.refresh().by_id.values() if m.parent == parent}) >= num:
                return
            self.wait(0.5)

    def policy_lag(self, name: str, version: int) -> int:
        """This version of a policy less the oldest that a living collector uses of it."""
        living = [m for m in self._heard() if m.role == 'collector' and not m.was_killed]
        held = [member.figures.get('policy_versions', {}).get(name, version) for member in living]
        return max(0, version - min(held, default=version))

    def _heard(self) -> Iterator[Member]:
        """Who lives, the latest to report first: who is silent for ``SILENT_AFTER`` is judged by those before alone."""
        latest = sorted(self.alive(), key=lambda member: -self._reported[member.id])
        for count, member in enumerate(latest, 1):
            if self._num_reports - self._reported[member.id] > SILENT_AFTER * count:
                return
            yield member

    def total(self, role: str, figure: str) -> float:
        """Sum of one figure over all members that ever had this role, the dead included."""
        return self._gone(role).sums.get(figure, 0) + sum(m.figures.get(figure, 0) for m in self.of(role))

    def began_s(self, role: str) -> Optional[float]:
        """When the first of a role began."""
        began = [m.figures['began_s'] for m in self.of(role) if 'began_s' in m.figures]
        return min(began + self._gone(role).began_s, default=None)

    def num_not_left(self, role: str) -> int:
        """Members of a role that live, or were killed."""
        return len(self.of(role, 'alive')) + self._gone(role).num_not_left

    def _gone(self, role: str) -> _Departed:
        return self._departed.get(role, _Departed())

    def _forget_departed(self) -> None:
        """Keep the sums of those that went long ago. Of roles that a run has once all stay: they are few."""
        heard = {member.id for member in self._heard()}
        gone = [m for m in self.by_id.values() if m.id not in heard and m.role not in ('learner', 'evaluator')]
        gone.sort(key=lambda member: self._reported[member.id])
        for member in gone[: max(0, len(gone) - MAX_DEPARTED)]:
            self._departed.setdefault(member.role, _Departed()).add(member)
            del self.by_id[member.id], self._reported[member.id]


def _member_of(header: Mapping[str, Any]) -> Optional[Member]:
    """The member that a report describes; None where a field is missing or is not what our processes write."""
    if set(header) != set(_KINDS) or not all(is_one(header[name]) for name, is_one in _KINDS.items()):
        return None
    return Member(**header)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_text_or_none(value: Any) -> bool:
    return value is None or _is_text(value)


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and (not isinstance(value, int) or _is_int(value))


def _is_time(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _are_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(name) and _is_int(version) for name, version in value.items())


#: Figures that are not counts. An evaluation's return may be infinite before the first one.
_FIGURES: Dict[str, Callable[[Any], bool]] = {
    'eval_value': _is_number,
    'checkpoint_overhead': _is_number,
    'began_s': _is_time,
    'ended_s': _is_time,
    'is_resumed': lambda value: isinstance(value, bool),
    'policy_versions': _are_versions,
}


def _are_figures(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_text(name) and _FIGURES.get(name, _is_int)(figure) for name, figure in value.items()
    )


#: What each field of a report holds. Reports come from whatever can write to the store, and are shown on terminals.
_KINDS: Dict[str, Callable[[Any], bool]] = {
    'id': _is_text,
    'role': _is_text,
    'node_id': _is_int,
    'pid': _is_int,
    'host': _is_text,
    'pid_space': _is_text,
    'parent': _is_text_or_none,
    'launch': _is_text,
    'address': _is_text_or_none,
    'state': lambda value: value in ('alive', 'left', 'failed'),
    'beat': _is_int,
    'reason': lambda value: isinstance(value, str),
    'figures': _are_figures,
}
