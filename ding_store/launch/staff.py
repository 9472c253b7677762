"""The collectors and the evaluator of a launcher's host: started again when they die, and more or fewer of them."""

from __future__ import annotations

import os
import signal
import time
from typing import Dict, List, Optional, Protocol, Sequence, Tuple

from ding_store.config import StoreConfig
from ding_store.errors import StoreError
from ding_store.launch.process import Process, bury, member_of, report_given_up
from ding_store.launch.restarts import LEFT, Restarts
from ding_store.metrics.figures import Figures
from ding_store.metrics.sizing import Sizing
from ding_store.run.health import Health
from ding_store.run.members import Members, launch
from ding_store.run.node_addresses import claim_node_id
from ding_store.run.scale import NO_BOUND, Host, Seat, Target, change_target, put_target, target_of
from ding_store.run.session import RunSession
from ding_store.storage.store import Store

#: Seconds that a collector may take to leave, until SIGKILL. It leaves by itself after 8 s.
RETIRE_S = 10.0
#: How often the wanted number is read.
LOOK_EVERY_S = 1.0


class Work(Protocol):
    """The part of ``ding_store.launch.job.Job`` that this module needs."""

    config: StoreConfig
    processes: List[Process]
    failed: Optional[str]

    def report(self, text: str) -> None: ...

    def join_command(self) -> str: ...

    def start_process(self, role: str, node_id: int) -> Process: ...


class Staff:
    """
    Overview:
        Starts, restarts and retires collectors of one host, and restarts its evaluator.
    Arguments:
        - job (:obj:`Work`): Has the processes, and starts new ones.
        - limit (:obj:`int`): See ``Restarts``.
    """

    def __init__(self, job: Work, limit: int) -> None:
        self._job, self._limit = job, limit
        self._restarts: Dict[Tuple[str, int], Restarts] = {}
        self._pending: List[Tuple[float, Process]] = []  # when to start it again, and what died
        self._given_up: List[Process] = []
        self._retire_by: Dict[int, float] = {}  # pid -> when it is killed
        self._members: Optional[Members] = None
        self._seat: Optional[Seat] = None
        self._target: Optional[Target] = None
        self._sizing: Optional[Sizing] = None
        self._look_at = 0.0
        self._is_launcher = False  # of the run, and so puts the wanted number

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def begin(
        self, store: Store, number: int, bounds: Optional[Tuple[int, int]], capacity: Optional[int] = None
    ) -> None:
        """Put the wanted number of collectors, as the launcher of the run."""
        least, most = bounds or (1, NO_BOUND)
        self._target, self._is_launcher = Target(number, least, most), True
        put_target(store, self._target)
        room = most if capacity is None else capacity
        self._seat = Seat(store, Host(min(number, room), room))
        if bounds is not None:
            self._sizing = Sizing(least, most)

    def join(self, store: Store, capacity: int) -> None:
        """Start this host's share of the wanted number."""
        self._seat = Seat(store, Host(0, capacity))

    # After a death

    def goes_on_after(self, process: Process, code: int, how: str, store: Store) -> bool:
        """Plan what follows the death of a collector or an evaluator. Return False if the run cannot go on."""
        members = self._refreshed(store)
        member = member_of(members, process)
        restarts = self._restarts.setdefault((process.role, process.node_id), Restarts(self._limit))
        has_worked = member is not None and ('rows' in member.figures or 'eval_iter' in member.figures)
        worked_s = member.figures.get('up_s', 0.0) if member is not None and has_worked else None
        delay_s = None if process.is_debugged else restarts.after(code, worked_s)
        if delay_s is not None:
            bury(members, process, store, f'it {how}, and is started again in {delay_s:g} s')
            self._job.report(f'it is started again in {delay_s:g} s')
            self._pending.append((time.monotonic() + delay_s, process))
            return True
        last = member.reason if member is not None and member.reason else f'it {how}'
        reason = (
            f'given up after {restarts.num_early} early end{"s" * (restarts.num_early != 1)} in a row; last: {last}'
        )
        if code == os.EX_CONFIG:
            reason = f'given up: it failed with a ConfigError, which would occur again: {last}'
        self._given_up.append(process)
        self._forget_health(process)
        report_given_up(members, process, store, reason, launch(self._job.config.launched))
        self._job.report(f'{process.title} is {reason}')
        if process.role != 'collector' or not self._has_collectors(members):
            return False
        self._job.report(f'the run goes on without it; this adds another:\n  {self._job.join_command()}')
        return True

    def left(self, process: Process, code: int) -> None:
        """Note the end of a process that was asked to leave."""
        self._retire_by.pop(process.pid, None)
        self._forget_health(process)
        self._job.report(f'{process.title} has left' if code in (0, LEFT) else f'{process.title} was ended')

    def _forget_health(self, process: Process) -> None:
        """Remove the health file of a process that is not started again. A killed one has left it."""
        Health(self._job.config.health, process.role, process.node_id).end()

    def _has_collectors(self, members: Members) -> bool:
        """Return True if a collector runs or is started again, on this host or another."""
        own = any(each.role == 'collector' and each.code is None for each in self._job.processes)
        pending = any(each.role == 'collector' for _, each in self._pending)
        ended = {each.pid for each in self._job.processes if each.code is not None}
        host = os.uname().nodename
        others = any(
            state == 'alive' and not (members.by_id[name].host == host and members.by_id[name].pid in ended)
            for name, state in members.states().items()
            if members.by_id[name].role == 'collector'
        )
        return own or pending or others

    # At each look

    def tick(self, session: RunSession) -> List[Process]:
        """Start and retire processes as far as it is time for it. Return those that were started."""
        if self._job.failed is not None or session.finished:
            self._pending.clear()
            return []
        started = [*self._restart_due(), *self._resize(session.store)]
        self.hurry()
        return started

    def _restart_due(self) -> List[Process]:
        now = time.monotonic()
        due = [process for at, process in self._pending if at <= now]
        self._pending = [(at, process) for at, process in self._pending if at > now]
        started = [self._job.start_process(process.role, process.node_id) for process in due]
        for successor in started:
            self._job.report(f'started again as {successor.title}')
        return started

    def _resize(self, store: Store) -> List[Process]:
        now = time.monotonic()
        if self._seat is None or now < self._look_at:
            return []
        self._look_at = now + LOOK_EVERY_S
        try:
            with store.nonblocking():
                own = self._own_number(store, now)
                return [] if own is None else self._come_to(own, store)
        except StoreError:  # it is away: the number stays as it is
            return []

    def _own_number(self, store: Store, now: float) -> Optional[int]:
        """Return how many collectors this host should have, or None if that is not known."""
        assert self._seat is not None
        self._seat.renew()
        target = target_of(store)
        if target is None:
            if self._is_launcher and self._target is not None:
                put_target(store, self._target)  # the server lost its memory
            return None
        if target != self._target and self._target is not None and target.number != self._target.number:
            self._job.report(f'collectors: {self._target.number} become {target.number}')
            if target.is_by_hand:
                self._given_up.clear()  # a person may have mended the cause
        self._target = target
        if self._sizing is not None and not target.is_by_hand:
            figures = Figures.of(self._refreshed(store))
            number = self._sizing.step(now, figures, target.number)
            if number != target.number:
                self._job.report(f'collectors: {target.number} become {number}, because {self._sizing.reason}')
                changed = change_target(store, lambda old: old if old.is_by_hand else old._replace(number=number))
                self._target = changed or target
        return self._seat.share(self._target.number, len(self._running()) + len(self._waiting()))

    def _come_to(self, number: int, store: Store) -> List[Process]:
        """Start or retire collectors of this host until there are as many, with those that are started again."""
        running, waiting = self._running(), self._waiting()
        more = number - len(running) - len(waiting)
        if more > 0:  # nothing is started in the place of those that were given up
            more = max(0, more - sum(each.role == 'collector' for each in self._given_up))
        for each in waiting[: max(0, -more)]:
            self._pending.remove(each)
            self._forget_health(each[1])
            more += 1
        for process in running[len(running) + min(0, more) :]:
            process.is_retired = True
            self._retire_by[process.pid] = time.monotonic() + RETIRE_S
            process.send(signal.SIGTERM)
        ids: List[int] = []  # all of them before the first start: the store may go away in between
        while len(ids) < more:
            ids.append(self._new_node_id(store, ids))
        return [self._job.start_process('collector', node_id) for node_id in ids]

    def _running(self) -> List[Process]:
        return [p for p in self._job.processes if p.role == 'collector' and p.code is None and not p.is_retired]

    def _waiting(self) -> List[Tuple[float, Process]]:
        return [each for each in self._pending if each[1].role == 'collector']

    def _new_node_id(self, store: Store, taken: Sequence[int]) -> int:
        """Return the lowest node id of a collector of this host that has left, or a new one."""
        own = {*taken, *(each.node_id for each in self._job.processes if each.role == 'collector')}
        running = [each for each in self._job.processes if each.code is None]
        used = {each.node_id for each in [*running, *(each for _, each in self._pending), *self._given_up]}
        free = own - used - set(taken)
        return min(free) if free else claim_node_id(store, 'collector', own)

    def retire_all(self) -> None:
        """Ask all collectors of this host to leave, and start none."""
        self._pending.clear()
        self.leave()
        for process in self._job.processes:
            if process.code is None and not process.is_retired:
                process.is_retired = True
                self._retire_by[process.pid] = time.monotonic() + RETIRE_S
                process.send(signal.SIGTERM)

    def leave(self) -> None:
        """Let other hosts start this one's collectors at once."""
        if self._seat is not None:
            self._seat.release()
            self._seat = None

    def hurry(self) -> None:
        """Kill processes that did not leave in time."""
        now = time.monotonic()
        for process in self._job.processes:
            if process.code is None and self._retire_by.get(process.pid, now + 1.0) <= now:
                process.send(signal.SIGKILL)

    def _refreshed(self, store: Store) -> Members:
        if self._members is None:
            self._members = Members(store)
        return self._members.refresh()
