"""The members of a run: each process reports itself in the ``members`` stream, which any process may read."""

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
from ding_store.run.last_checkpoint import wait_until_saved
from ding_store.storage.base import OLDEST, Entry, EntryId
from ding_store.storage.store import Store

logger = logging.getLogger(__name__)

STREAM = 'members'
#: Only the newest reports matter, so the server drops old ones when the stream is full.
STREAM_OPTIONS = {STREAM: {'max_pending_bytes': 1 << 20, 'overflow': 'drop_oldest'}}

#: Members are ranked by their last report, the latest first. The one at rank n is presumed crashed if more than n times
#: this many reports came after its last one.
SILENT_AFTER = 10
#: Number of departed members that are kept by name, at most twice as many. Of older ones only sums are kept.
MAX_DEPARTED = 1000


def pid_space() -> str:
    """Return a text for the scope of this process's pid: one boot of one kernel, and one pid namespace in it."""
    boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'


def parent_process() -> Optional[str]:
    """Return the process that started this worker and its siblings, as DI-engine's ``Parallel`` does, or None."""
    parent = multiprocessing.parent_process()
    return None if parent is None else f'{pid_space()} {parent.pid}'


def launch(launched: Optional[str] = None) -> str:
    """
    Overview:
        Return the name of this process's launch.
    Arguments:
        - launched (:obj:`Optional[str]`): The name that its launcher gave, ``StoreConfig.launched``. None: the parent
            process's, else this process's.
    """
    return launched or parent_process() or f'{pid_space()} {os.getpid()}'


def die_with_parent() -> None:
    """
    Overview:
        Kill this worker process when its parent is gone, once a last checkpoint is written. Workers of ``ditask``
        ignore the signals that end ``ditask``, and would collect for ever. The kernel's PR_SET_PDEATHSIG watches the
        thread that started a process, and that thread may end long before the parent.
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
        One process of a run, as in its last report. ``state`` is 'alive', 'left' (in order) or 'failed'. ``beat`` is
        the number of its report. ``figures`` are cumulative: rows, env_step, train_iter, policy_version, ...
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
        """Append the member's present state to the ``members`` stream."""
        self.beat += 1
        self.state, self.reason = state, reason
        store.append(STREAM, asdict(self), {}, timeout_s=1.0)

    @property
    def was_killed(self) -> bool:
        """True if the process is gone without a last report. Only processes of the same pid space can see that."""
        return self.state == 'alive' and self.pid_space == pid_space() and not os.path.exists(f'/proc/{self.pid}')

    @property
    def gave_no_last_report(self) -> bool:
        """True if the process runs, or was killed. A launcher that saw it killed has added the figure ``crashed``."""
        return self.state == 'alive' or 'crashed' in self.figures

    @property
    def clock(self) -> str:
        """The boot whose CLOCK_MONOTONIC the member's times are of. Times of two boots cannot be compared."""
        return self.pid_space.split(' ')[0]

    @property
    def title(self) -> str:
        rank = f' rank {self.figures["rank"]}' if 'rank' in self.figures else ''
        return f'{self.role}{rank} (node {self.node_id}, pid {self.pid} on {self.host})'


@dataclass
class _Departed:
    """Sums of members of a role that are no longer kept by name. A member that reports again counts twice."""

    sums: Dict[str, float] = field(default_factory=dict)
    began_s: Dict[str, float] = field(default_factory=dict)  # clock -> of the first member with that clock
    num_not_left: int = 0

    def add(self, member: Member) -> None:
        for name, figure in member.figures.items():
            if name == 'began_s':
                self.began_s[member.clock] = min(figure, self.began_s.get(member.clock, figure))
            elif name not in _OTHER_FIGURES:
                self.sums[name] = self.sums.get(name, 0) + figure
        self.num_not_left += member.gave_no_last_report


class Members:
    """
    Overview:
        A view of a run's members, brought up to date by ``refresh``. A refresh costs one read, and one more if there
        were new reports. Unreadable reports are skipped with one warning, because the next report has the same figures.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.after: EntryId = OLDEST
        self.by_id: Dict[str, Member] = {}
        self._departed: Dict[str, _Departed] = {}  # by role
        self._num_reports = 0
        self._reported: Dict[str, int] = {}  # member id -> the number of its last report among all reports
        self._has_complained = False
        self.num_rejected = 0  # entries that are no reports of members, and why the last one is none
        self.rejected = ''

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
        """Return as soon as any member reports, or after ``timeout_s``."""
        self._read(max_entries=1, timeout_s=timeout_s)

    def _read(self, max_entries: int, timeout_s: float = 0.0) -> List[Entry]:
        """Return reports after entry ``after``. If one cannot be read, return none and move ``after`` past it."""
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
            self._complain(f'entry {entry.id.number} of {STREAM!r} is not a report of a member')
            return
        self._num_reports += 1
        self._reported[member.id] = self._num_reports
        known = self.by_id.get(member.id)
        if known is None or member.beat >= known.beat:
            self.by_id[member.id] = member

    def _complain(self, reason: str) -> None:
        self.num_rejected, self.rejected = self.num_rejected + 1, reason
        if not self._has_complained:
            self._has_complained = True
            logger.warning('members of run %r: %s. The report is skipped', self._store.run, reason)

    def of(self, role: str, state: Optional[str] = None) -> List[Member]:
        return [m for m in self.by_id.values() if m.role == role and state in (None, m.state)]

    def alive(self, role: Optional[str] = None) -> List[Member]:
        return [m for m in self.by_id.values() if m.state == 'alive' and role in (None, m.role)]

    def reporting(
        self, role: Optional[str], timeout_s: float, where: Callable[[Member], bool] = lambda member: True
    ) -> Optional[Member]:
        """
        Overview:
            Return the first member that reports within ``timeout_s``, or None. Members that left or failed are not
            watched. A killed member's last report still reads 'alive', so only a new report shows that it runs.
        Arguments:
            - role (:obj:`Optional[str]`): Watch members of this role only.
            - where (:obj:`Callable`): Watch members only if this returns True for them.
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
            Wait until all members, or all of one role, have left, for ``timeout_s`` at most. If none of them has
            reported for ``silent_s``, they were killed, and the wait ends.
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
            Wait until ``num`` workers of one parent process have joined, for ``timeout_s`` at most. Return early if
            this process's parent exits.
        """
        deadline, parent_pid = time.monotonic() + timeout_s, os.getppid()
        while time.monotonic() < deadline and os.getppid() == parent_pid:
            if len({m.node_id for m in self.refresh().by_id.values() if m.parent == parent}) >= num:
                return
            self.wait(0.5)

    def policy_lag(self, name: str, version: int) -> int:
        """Return ``version`` minus the oldest version of the policy that a running collector uses."""
        running = self._running('collector')
        held = [member.figures.get('policy_versions', {}).get(name, version) for member in running]
        return max(0, version - min(held, default=version))

    def states(self) -> Dict[str, str]:
        """Return the state of each member by its id: that of its last report, or 'killed' or 'silent' (no reports)."""
        reporting = {member.id for member in self._reporting()}

        def state_of(member: Member) -> str:
            if member.state != 'alive':
                return member.state
            return 'killed' if member.was_killed else 'alive' if member.id in reporting else 'silent'

        return {member.id: state_of(member) for member in self.by_id.values()}

    def num_died(self) -> int:
        """Return the number of members of all roles that failed or were killed, of those that are kept by name."""
        return sum(member.state == 'failed' or member.was_killed for member in self.by_id.values())

    def num_reporting(self) -> int:
        """Return the number of members of all roles that still report."""
        return sum(1 for _ in self._reporting())

    def num_running(self, role: str) -> int:
        """Return the number of members of a role that still report."""
        return len(self._running(role))

    def _running(self, role: str) -> List[Member]:
        return [member for member in self._reporting() if member.role == role and not member.was_killed]

    def _reporting(self) -> Iterator[Member]:
        """
        Yield members that still report, the latest first. A member is left out if more than ``SILENT_AFTER`` reports
        per member up to it came after its own. All members after it are left out as well.
        """
        latest = sorted(self.alive(), key=lambda member: -self._reported[member.id])
        for count, member in enumerate(latest, 1):
            if self._num_reports - self._reported[member.id] > SILENT_AFTER * count:
                return
            yield member

    def total(self, role: str, figure: str) -> float:
        """Sum one figure over all members that ever had this role, including those that left, failed or crashed."""
        return self._gone(role).sums.get(figure, 0) + sum(m.figures.get(figure, 0) for m in self.of(role))

    def began_s(self, role: str, clock: str) -> Optional[float]:
        """Return when the first member of a role with this clock began, in seconds of that clock. None: no member."""
        began = [m.figures['began_s'] for m in self.of(role) if 'began_s' in m.figures and m.clock == clock]
        gone = [began_s for departed, began_s in self._gone(role).began_s.items() if departed == clock]
        return min(began + gone, default=None)

    def num_not_left(self, role: str) -> int:
        """Return the number of members of a role that did not leave in order."""
        return sum(m.gave_no_last_report for m in self.of(role)) + self._gone(role).num_not_left

    def _gone(self, role: str) -> _Departed:
        return self._departed.get(role, _Departed())

    def _forget_departed(self) -> None:
        """Keep only sums of members that left long ago. All learners and evaluators stay, because they are few."""
        reported = {member.id for member in self._reporting()}
        gone = [m for m in self.by_id.values() if m.id not in reported and m.role not in ('learner', 'evaluator')]
        gone.sort(key=lambda member: self._reported[member.id])
        for member in gone[: max(0, len(gone) - MAX_DEPARTED)]:
            self._departed.setdefault(member.role, _Departed()).add(member)
            del self.by_id[member.id], self._reported[member.id]


def _member_of(header: Mapping[str, Any]) -> Optional[Member]:
    """Return the member that a report describes, or None if a field is missing or has a wrong type."""
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


#: Figures that are neither counts nor durations (``<part>_s``). An evaluation's return may be infinite before the
#: first one. ``at_s`` is the time of the report, in seconds since 1970 by the member's clock.
_OTHER_FIGURES: Dict[str, Callable[[Any], bool]] = {
    'eval_value': _is_number,
    'checkpoint_overhead': _is_number,
    'samples_per_insert': _is_number,
    'began_s': _is_time,
    'ended_s': _is_time,
    'at_s': _is_time,
    'is_resumed': lambda value: isinstance(value, bool),
    'policy_versions': _are_versions,
}


def _are_figures(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_text(name) and _OTHER_FIGURES.get(name, _is_time if name.endswith('_s') else _is_int)(figure)
        for name, figure in value.items()
    )


#: A check for each field of a report. Any client of the server can write reports, and terminals show them.
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
