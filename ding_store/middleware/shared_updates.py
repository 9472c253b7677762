"""Learners or workers of one policy that each go at their own pace, and exchange their updates through the store."""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from ding.framework import task
from ditk import logging

from ding_store.config import LearnersConfig
from ding_store.errors import ConfigError, ServerFull, StoreClosed, StoreTimeout
from ding_store.learners import ParameterServer, StoreOptimizer
from ding_store.learners.optimizer_copy import copy_optimizer, set_state
from ding_store.learners.wire import SERVED, SYNCHRONOUS, stream_of, value_of
from ding_store.metrics.figures import STALENESS_BUCKETS
from ding_store.middleware.policy_bytes import policy_from_bytes, policy_to_bytes
from ding_store.middleware.policy_state import targets_of
from ding_store.middleware.shared_policy import optimizers_by_attribute
from ding_store.run.members import Members
from ding_store.run.session import RunSession
from ding_store.run.several_learners import LEARNERS, OWN_PACE, decide_own_pace
from ding_store.run.waiting import best_effort
from ding_store.storage.base import Header

#: How often the counts go into this member's figures.
_REPORT_EVERY_S = 0.5
#: How long a step whose server has ended waits to see that the run has ended as well.
_END_S = 5.0
#: Prefix of the models' names in the run, and of the values with which rank 0 starts the others.
ROOT = f'{LEARNERS}/shared'
START, POLICIES = f'{ROOT}/start', f'{ROOT}/policies'
#: Figure of members that share updates.
SENT = 'updates_sent'
#: Options of ``LearnersConfig`` that are arguments of ``StoreOptimizer``.
_WORKER_OPTIONS = ('period', 'rho', 'max_staleness', 'max_ahead', 'dtype')


class SharedUpdates:
    """
    Overview:
        One process's part in the training of a policy by several. Its optimizers become ``StoreOptimizer``. In modes
        with a server, rank 0 has one for each optimizer, in threads. Each process goes at its own pace: none waits for
        another, but in the synchronous modes for its updates.

        Rank 0 gives the others the whole state of its policies when they start. One that starts later begins with the
        newest parameters, and its target networks with a copy of them. If the server loses what rank 0 gave, rank 0
        gives it again.
    Arguments:
        - sync (:obj:`str`): The mode, one of ``OWN_PACE``.
        - rank (:obj:`int`), num (:obj:`int`): Number of this process, and of all.
    """

    def __init__(self, session: RunSession, sync: str, rank: int, num: int) -> None:
        self.sync, self.rank, self.num = sync, rank, num
        self._session, self._store = session, session.store
        self._settings = session.config.learners or LearnersConfig()
        self._settings.check_for(sync)
        self._servers: List[ParameterServer] = []
        self._optimizers: List[RunOptimizer] = []
        self._policies: List[Any] = []  # of rank 0, once it has given them
        self._note: Dict[str, Any] = {}
        self._reported_at = 0.0

    # The start

    def begin(self, note: Optional[Dict[str, Any]] = None) -> Optional[Header]:
        """
        Overview:
            Agree on the start. Return what rank 0 gives, or None if the run has ended.
        Arguments:
            - note (:obj:`Optional[dict]`): JSON that rank 0 gives.
        """
        self._session.figures(rank=self.rank, num_learners=self.num)
        if self.rank == 0:
            self._tidy()
            self._note = note or {}
            self._decide_start()
            self._session.upheld.extend((OWN_PACE, START))
            return self._note
        value = self._wait_for(START)
        if value is None:
            return None
        if value.header['sync'] != self.sync:
            raise ConfigError(
                f'store.learners.sync ({self.sync!r}): rank 0 of run {self._store.run!r} has {value.header["sync"]!r}. '
                'Give this process the same config, or the same --set learners=....'
            )
        given: Header = value.header['note']
        return given

    def _decide_start(self) -> None:
        decide_own_pace(self._store)
        self._store.decide(START, {'member': self._own_id, 'note': self._note, 'sync': self.sync})

    def share(self, policies: List[Any]) -> bool:
        """Replace the optimizers of this process's policies. Return False if the run has ended."""
        if self.rank:
            value = self._wait_for(POLICIES)
            if value is None:
                return False
            for index, policy in enumerate(policies):
                policy_from_bytes(policy, value.arrays[str(index)].tobytes())
        given = {} if self.rank else _states_of(policies)
        for index, policy in enumerate(policies):
            for attribute, optimizer in optimizers_by_attribute(policy).items():
                setattr(policy, attribute, self._share(optimizer, f'{ROOT}/{index}/{attribute}'))
            if self.rank and any(each.figures.get('version', 0) for each in self._optimizers):
                for _, target in targets_of(policy):
                    target.update(policy._learn_model.state_dict(), direct=True)
        if self.rank == 0:
            self._policies = policies
            self._store.put(POLICIES, {'member': self._own_id}, given)
            self._session.while_waiting.append(self.report)
        self._session.before_leaving.append(self._end)
        of = f'of {self.num}' if self.rank < self.num else 'has joined, and'
        logging.info(f'ding_store: rank {self.rank} {of} shares its updates (sync {self.sync!r})')
        return True

    def _share(self, optimizer: torch.optim.Optimizer, name: str) -> RunOptimizer:
        settings, server = self._settings, None
        if self.rank == 0 and self.sync in SERVED:
            parameters, own = copy_optimizer(optimizer)
            is_stepped = self.sync in ('gradients', 'async')
            server = ParameterServer(
                parameters,
                own if is_stepped else None,
                self._store,
                name,
                sync=self.sync,
                num_workers=self.num if self.sync in SYNCHRONOUS else 1,
                straggler_timeout_s=settings.straggler_timeout_s,
                scale_by=settings.scale_by,
                dtype=settings.dtype,
            ).start()
            self._servers.append(server)
        options = {each: getattr(settings, each) for each in _WORKER_OPTIONS}
        made = RunOptimizer(
            self._session,
            server if self.sync in ('gradients', 'async') else None,
            self.report,
            *(optimizer, self._store, name),
            sync=self.sync,
            timeout_s=self._session.config.peer_timeout_s,
            worker=f'rank-{self.rank}-{uuid.uuid4().hex[:6]}',
            **options,
        )
        self._optimizers.append(made)
        return made

    @property
    def _own_id(self) -> str:
        member = self._session.member
        return '' if member is None else member.id

    def _wait_for(self, name: str) -> Any:
        """Wait for a value of a rank 0 that lives. One of an earlier start may be left."""
        members, seen = Members(self._store), 0

        def look(timeout_s: float) -> Any:
            nonlocal seen
            value = self._store.get(name, seen, timeout_s)
            if value is None:
                return None
            giver = members.refresh().by_id.get(str(value.header['member']))
            if giver is not None and (giver.was_killed or giver.state != 'alive'):
                seen = value.version
                return None
            return value

        member = self._session.member
        role = None if member is None else member.role
        return self._session.wait_for('rank 0 of this run', look, role, part='wait_ranks')

    def _tidy(self) -> None:
        """Delete what earlier starts of this run have left, unless other ranks of theirs go on."""
        living = [each for each in Members(self._store).refresh().alive() if not each.was_killed]
        if any(SENT in each.figures for each in living):
            return
        info = self._store.info()
        for stream in info.streams:
            if stream.startswith((stream_of(f'{ROOT}/'), f'gossip/{ROOT}/')):
                for reader in info.streams[stream].readers:
                    self._store.forget(stream, reader)
        for value in info.values:
            if value.startswith((f'{ROOT}/', value_of(f'{ROOT}/'), f'gossip/{ROOT}/', f'hogwild/{ROOT}/')):
                self._store.delete(value)

    # While it trains

    def report(self) -> None:
        """
        Overview:
            Put the counts of updates and of their staleness into this member's figures, if it is time. Give again
            what the others need to start, if the server lost it. Call it between two updates.
        """
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            self._session.figures(**self.figures())
            if self._policies:
                with contextlib.suppress(ServerFull), best_effort(self._store):
                    self._give_again()

    def _give_again(self) -> None:
        """Give what the server has lost, as by a FLUSHALL, which the session takes for a deletion."""
        if not self._store.wait_for_version(START, 1, 0.0) and self._store.get(START) is None:
            self._decide_start()
        if not self._store.wait_for_version(POLICIES, 1, 0.0) and self._store.get(POLICIES) is None:
            self._store.put(POLICIES, {'member': self._own_id}, _states_of(self._policies))

    def figures(self) -> Dict[str, Any]:
        """Return the counts of this process, and in rank 0 those of the servers, as docs/reference/metrics.md has."""
        own = [each.figures for each in self._optimizers]
        found = {f'updates_{name}': sum(each.get(name, 0) for each in own) for name in ('sent', 'averaged', 'local')}
        if self._servers:
            served = [each.figures for each in self._servers]
            names = ('used', 'dropped_stale', 'dropped_late', 'dropped_foreign')
            found.update({f'updates_{name}': sum(each[name] for each in served) for name in names})
            found['stragglers'] = sum(each['stragglers'] for each in served)
            found['updates_workers'] = max(each['workers'] for each in served)
            found.update(staleness_figures([each['staleness'] for each in served]))
        return found

    def leave(self) -> None:
        """Leave: the others no longer wait for this process. The servers go on until it leaves the run."""
        with best_effort(self._store):
            for each in self._optimizers:
                each.close()
        self._session.figures(**self.figures())

    def _end(self, failed: bool) -> None:
        """End the servers. After a failure they go on until this process ends: the one after it takes over."""
        if failed:
            return
        self.leave()
        for each in self._servers:
            each.close()


class RunOptimizer(StoreOptimizer):
    """
    Overview:
        A ``StoreOptimizer`` of a run. If the run ends during a step, the task finishes. In rank 0 its ``state_dict``
        has the state of the server's optimizer, for checkpoints.
    """

    def __init__(
        self,
        session: RunSession,
        server: Optional[ParameterServer],
        report: Callable[[], None],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._session, self._server, self._state_version = session, server, -1
        self._report = report
        super().__init__(*args, **kwargs)

    def _while_waiting(self) -> None:
        self._session.show_health()
        self._report()

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        try:
            return super().step(closure)
        except (StoreClosed, StoreTimeout):
            deadline = time.monotonic() + _END_S
            while not self._session.finished and time.monotonic() < deadline:
                time.sleep(0.02)
            if not self._session.finished:
                raise
            task.finish = True
            return None

    def state_dict(self) -> Dict[str, Any]:
        if self._server is not None and self._server.version != self._state_version:
            self._state_version = self._server.version
            set_state(self.optimizer, self._server.optimizer_state())
        return super().state_dict()


def _states_of(policies: List[Any]) -> Dict[str, np.ndarray]:
    return {str(index): np.frombuffer(policy_to_bytes(each), np.uint8) for index, each in enumerate(policies)}


def staleness_figures(histograms: List[Dict[int, int]]) -> Dict[str, int]:
    """Return histograms of staleness as figures: counts by bucket, the sum and the maximum."""
    counts = [(staleness, count) for each in histograms for staleness, count in each.items()]
    if not counts:
        return {}
    found = {'staleness_sum': sum(staleness * count for staleness, count in counts)}
    found['staleness_max'] = max(staleness for staleness, _ in counts)
    for staleness, count in counts:
        bucket = int(np.searchsorted(STALENESS_BUCKETS, staleness))
        found[f'staleness_bucket_{bucket}'] = found.get(f'staleness_bucket_{bucket}', 0) + count
    return found
