"""Prefetching: a thread gathers the next batches while the learner trains on the last one."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from threading import RLock
from typing import Any, Callable, Deque, Dict, Hashable, NamedTuple, Optional, TypeVar

from ding_store.buffer.array_types import Array
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.interrupts import finish
from ding_store.buffer.samplers.base import Sampler
from ding_store.buffer.samplers.choices import Choice
from ding_store.buffer.table.row_choices import by_rows
from ding_store.buffer.table.rows import RowIndex, RowListener
from ding_store.buffer.table.table import Table
from ding_store.errors import NotEnoughData, RowGone, StoreTimeout

T = TypeVar('T')
Choose = Callable[[RowIndex], Array]

#: A gather takes milliseconds. One that takes longer than this is presumed hung.
_TIMEOUT_S = 60.0


class Drawn(NamedTuple):
    """A batch that was drawn ahead and is being gathered."""

    choose: Choice
    rows: Array
    num_updates: int
    num_clears: int
    gathered: Future[Any]


class Prefetch(RowListener):
    """
    Overview:
        Keeps ``depth`` batches drawn and gathered ahead. The sampling thread *chooses* their rows when it delivers the
        batch before. Only the gather runs in another thread. Therefore the rows and their order never depend on thread
        timing, and a seeded run stays reproducible. Priorities are those of ``depth`` batches ago.

        A batch counts for uses, rate limiter and queue when it is delivered. If one of its rows has left by then, or
        has reached its limit of uses, the batch cannot be delivered. It and all batches after it are given back and
        drawn anew. If rows were updated, the batch is gathered again.
    Arguments:
        - depth (:obj:`int`): The number of batches ahead. Each uses the memory of one batch.
        - table (:obj:`Table`): The table to gather from.
        - sampler (:obj:`Sampler`): The buffer's sampler, which views may share. If it has a lock for samples, draws
          ahead hold it as well.
    """

    def __init__(self, depth: int, table: Table, sampler: Sampler) -> None:
        self.depth, self._table = depth, table
        self._lock = sampler.lock or hold_over_forks(RLock())
        self._key: Hashable = None
        #: The sampler that drew the pending batches, or None for choices without one.
        self._sampler: Optional[Sampler] = None
        self._pending: Deque[Drawn] = deque()
        #: True while the sampler may count a batch that is not pending.
        self._is_changing = False
        self._pool: Optional[ThreadPoolExecutor] = None
        self._process = os.getpid()
        self._num_clears = 0
        table.index.listen(self)

    def next(self, key: Hashable, choose: Choice, read: Callable[[Choose], T]) -> T:
        """
        Overview:
            Return the oldest batch that was drawn ahead for ``key``. If there is none, draw a batch now.
        Arguments:
            - choose (:obj:`Choice`): Chooses the rows of a batch. It gets the weights of the choice made ahead.
            - read (:obj:`Callable`): Reads the batch of a choice.
        Raises:
            - NotEnoughData: No batch is ahead, and the table has too few rows.
        """
        with self._lock:
            if key != self._key or self._process != os.getpid():
                self.give_back()
                self._key = key
            if self._pending:
                drawn = self._pending[0]
                try:
                    batch = self._batch_of(drawn, read)
                    choose.weights = drawn.choose.weights
                    self._is_changing = True
                    self._pending.popleft()
                    self._is_changing = False
                    return batch
                except RowGone:
                    self.give_back()
                except BaseException:
                    finish(self.give_back)
                    raise
        return read(choose)

    def draw(
        self,
        key: Hashable,
        make: Callable[[], Choice],
        read: Callable[[Choose], Any],
        sampler: Optional[Sampler] = None,
    ) -> None:
        """
        Overview:
            Choose the rows of the next batches and start to gather them.
        Arguments:
            - make (:obj:`Callable`): Makes a choice like that of ``next``.
            - sampler (:obj:`Optional[Sampler]`): The sampler that chooses the rows, if one does.
        """
        with self._lock:
            if key != self._key:
                return
            self._sampler = sampler
            if sampler is not None:
                sampler.sampled_by(self)
            while len(self._pending) < self.depth:
                choose = make()
                try:
                    with self._table.index.lock:
                        rows = self._table.index.row_of_slot[choose(self._table.index)]
                        seen = self._table.num_updates, self._num_clears
                except NotEnoughData:
                    return
                try:
                    self._is_changing = True
                    if sampler is not None:
                        sampler.drawn(rows)
                    self._pending.append(Drawn(choose, rows, *seen, self._submit(read, by_rows(rows))))
                    self._is_changing = False
                except BaseException:
                    finish(self.give_back)
                    raise

    def give_back(self) -> None:
        """Cancel all batches that were drawn and not delivered. They do not count."""
        with self._lock:
            if self._process == os.getpid():
                # A forked process lacks the gathering thread, which may have held a lock of these futures.
                for drawn in self._pending:
                    drawn.gathered.cancel()
            if (self._pending or self._is_changing) and self._sampler is not None:
                with self._table.index.lock:
                    self._sampler.returned(len(self._pending))
            self._pending.clear()
            self._is_changing = False

    def close(self) -> None:
        """Cancel all batches and stop the thread. The next draw starts it again."""
        with self._lock:
            self.give_back()
            pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown()

    def published(self, slots: Array) -> None:
        """Do nothing. This and the next callbacks run with the table's index locked."""

    def removed(self, slots: Array) -> None:
        """Do nothing: the delivery of a batch checks its rows."""

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        """Do nothing: rows keep their numbers, and the delivery treats batches being gathered as changed."""

    def cleared(self) -> None:
        """Count the clear: new rows, such as those of a file, may reuse the numbers of old ones."""
        self._num_clears += 1

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        """Return None: a Prefetch belongs to one table."""

    def _batch_of(self, drawn: Drawn, read: Callable[[Choose], T]) -> T:
        """
        Raises:
            - RowGone: One of its rows has left since the draw, or has reached its limit of uses.
        """
        if drawn.num_clears != self._num_clears or not self._table.contains(drawn.rows).all():
            raise RowGone('a row of a batch drawn ahead has left')
        if not drawn.choose.may_deliver(drawn.rows):
            raise RowGone('a row of a batch drawn ahead has reached its limit of uses')
        if drawn.num_updates != self._table.num_updates:
            return read(by_rows(drawn.rows))
        try:
            batch: T = drawn.gathered.result(_TIMEOUT_S)
        except FutureTimeout as e:
            raise StoreTimeout(f'a batch that was drawn ahead was not gathered within {_TIMEOUT_S:g} s') from e
        return batch

    def _submit(self, read: Callable[[Choose], Any], choose: Choose) -> Future[Any]:
        if self._pool is None or self._process != os.getpid():
            # Threads do not exist in a forked process.
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(1, 'ding_store prefetch')
        return self._pool.submit(read, choose)
