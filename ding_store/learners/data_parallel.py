"""The process group of several learners: they gather numbers, add up gradients and send bytes, always in step."""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import timedelta
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from ding_store.errors import StoreError, StoreTimeout
from ding_store.learners.data_parallel_rendezvous import CONNECT_S, HERE, Place, Rendezvous, StoreKeys
from ding_store.run.members import Members
from ding_store.run.session import RunSession
from ding_store.run.time_spent import TimeSpent
from ding_store.run.waiting import best_effort

logger = logging.getLogger(__name__)

#: Time that the other learners may take to reach a common operation after the run's end.
END_S = 20.0
#: Timeout of the operations. It is never reached: the checks in ``_wait`` come first.
_NEVER = timedelta(days=7)
#: How often a waiting learner looks at the run, and at what the others report.
_LOOK = timedelta(seconds=0.5)


class LearnerLost(StoreError):
    """Another learner of this run is gone, so a common operation cannot be completed."""


class LearnerGroup:
    """
    Overview:
        One learner's side of the process group. Every learner calls the same methods in the same order. A call returns
        when all learners have made it. It fails if another learner is gone, or reports nothing for
        ``store.peer_timeout_s``.
    Arguments:
        - rank (:obj:`int`): Number of this learner, from 0 on.
        - num (:obj:`int`): Number of all learners.
    """

    def __init__(self, rank: int, num: int) -> None:
        self.rank, self.num = rank, num
        self.is_connected = False
        self.is_alone = False  # the learners exchange updates in another way: a sum is that of this learner
        self._group: Any = None
        self._watch: Optional[_Watch] = None
        self._spent: Optional[TimeSpent] = None

    def connect(self, session: RunSession) -> bool:
        """
        Overview:
            Wait until all learners are there, and connect to them. Return False if the run ended before.
        Raises:
            - ConfigError: The learners are on several hosts, and this one has no address that the others reach.
        """
        session.figures(rank=self.rank, num_learners=self.num)
        self._spent = session.time_spent
        meeting = Rendezvous(session.store, self.rank, self.num)
        places = session.wait_for(f'the other learners, {self.num} in all', meeting.look)
        if places is None:
            return False
        keys = StoreKeys(session.store, meeting.keys)
        try:
            self.connect_through(keys, _Watch(session, self), meeting.place_among(places))
            self.gather([])  # Every learner has read all keys.
        finally:
            with best_effort(session.store):
                keys.delete_own()
        meeting.leave()
        return True

    def connect_through(self, keys: dist.Store, watch: Optional[_Watch] = None, place: Place = HERE) -> None:
        """Connect through keys that all learners read and write. This one listens at ``place``."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(**place._asdict())]
        options._timeout = timedelta(seconds=CONNECT_S)
        self._group = dist.ProcessGroupGloo(keys, self.rank, self.num, options)
        self._watch = watch
        self.is_connected = True

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """Return the numbers of all learners, one row per rank. All give equally many."""
        mine = torch.tensor([0.0, *numbers], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.num)]
        self._gather(found, mine)
        return torch.stack(found).numpy()[:, 1:]

    def add_up(self, tensor: torch.Tensor) -> None:
        """
        Replace a tensor by the sum of all learners' tensors, which is equal to the bit on all of them. That of a GPU
        goes through host memory.
        """
        if self.is_alone:
            return
        options = dist.AllreduceOptions()
        options.timeout = _NEVER
        host = tensor.cpu()  # the tensor itself, if it is there
        self._wait(self._group.allreduce([host], options))
        if host is not tensor:
            tensor.copy_(host)

    def concatenate(self, array: np.ndarray) -> np.ndarray:
        """Return all learners' arrays in the order of ranks, joined along the first axis. Their lengths may differ."""
        if self.is_alone:
            return array
        lengths = [int(length) for (length,) in self.gather([len(array)])]
        mine = torch.from_numpy(np.ascontiguousarray(array))
        padded = torch.zeros(max(lengths), *mine.shape[1:], dtype=mine.dtype)
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in range(self.num)]
        self._gather(found, padded)
        return torch.cat([each[:length] for each, length in zip(found, lengths)]).numpy()

    def send_from_first(self, data: Optional[bytes]) -> bytes:
        """Return the bytes that rank 0 gives. The other ranks give None."""
        size = torch.tensor([len(data or b'')], dtype=torch.int64)
        self._broadcast(size)
        sent = torch.zeros(int(size), dtype=torch.uint8)
        if data:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(sent):
            self._broadcast(sent)
        return sent.numpy().tobytes()

    def _gather(self, found: List[torch.Tensor], mine: torch.Tensor) -> None:
        options = AllgatherOptions()
        options.timeout = _NEVER
        self._wait(self._group.allgather([found], [mine], options))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, _NEVER
        self._wait(self._group.broadcast([tensor], options))

    def _wait(self, work: Any) -> None:
        """Wait until an operation is complete, and look at the run meanwhile."""
        with contextlib.nullcontext() if self._spent is None else self._spent.measure('wait_ranks'):
            self._wait_for(work)

    def _wait_for(self, work: Any) -> None:
        while not work.is_completed():
            # An operation that takes longer, or that failed: the last call tells which.
            with contextlib.suppress(RuntimeError):
                work.wait(_LOOK)
            if self._watch is not None and not work.is_completed():
                self._watch.look()
        if self._watch is not None:
            self._watch.rest()
        try:
            work.wait()
        except RuntimeError as error:
            raise LearnerLost(
                f'a learner of this run is gone, so rank {self.rank} of {self.num} stops: {error}. See its log. With '
                'checkpoints the launcher starts all learners again.'
            ) from error


class _Watch:
    """Looks at the run while a learner waits for the others: has it ended, and do the others report themselves?"""

    def __init__(self, session: RunSession, group: LearnerGroup) -> None:
        self._session, self._group = session, group
        self._members = Members(session.store)
        self._beats: Dict[int, int] = {}
        self._moved_at: Dict[int, float] = {}
        self._ended_at: Optional[float] = None

    def rest(self) -> None:
        """Note that the learner no longer waits."""
        self._moved_at.clear()

    def look(self) -> None:
        now = time.monotonic()
        for call in self._session.while_waiting:
            call()
        if self._session.finished:
            self._ended_at = self._ended_at or now
            if now - self._ended_at > END_S:
                raise LearnerLost(
                    f'the run has ended, and another learner did not reach its end within {END_S:.0f} s. See the logs '
                    'of the learners.'
                )
        with best_effort(self._session.store):
            self._members.refresh()
        for rank, member in self._others().items():
            if member.beat != self._beats.get(rank) or self._session.store.is_away or self._session.is_server_full:
                self._moved_at[rank], self._beats[rank] = now, member.beat
            silent_s = now - self._moved_at.setdefault(rank, now)
            if silent_s > self._session.config.peer_timeout_s:
                raise StoreTimeout(
                    f'learner rank {rank} ({member.title}) has been silent for {silent_s:.0f} s '
                    '(store.peer_timeout_s), so the others stop. Start the run again to continue: its data is kept.'
                )

    def _others(self) -> Dict[int, Any]:
        """Return the newest member of each other rank."""
        found = {member.figures['rank']: member for member in self._members.of('learner') if 'rank' in member.figures}
        return {rank: member for rank, member in found.items() if rank != self._group.rank}
