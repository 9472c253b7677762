"""Sampling ahead: the next batches are gathered in a thread, while the last one is trained on."""

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
from ding_store.buffer.sampling.samplers import Sampler
from ding_store.buffer.table.row_choices import by_rows
from ding_store.buffer.table.rows import RowIndex, RowListener
from ding_store.buffer.table.table import Table
from ding_store.errors import NotEnoughData, RowGone, StoreTimeout

T = TypeVar('T')
Choose = Callable[[RowIndex], Array]

#: A gather takes milliseconds; one that takes so long never ends.
_TIMEOUT_S = 60.0


class Drawn(NamedTuple):
    """A batch that is on its way."""

    choose: Any
    rows: Array
    num_updates: int
    num_clears: int
    gathered: Future[Any]


class Prefetch(RowListener):
    """
    Overview:
        Keeps ``depth`` batches drawn and gathered ahead. Rows are *chosen* where the batch before is delivered, in the
        thread of who samples, and only gathered elsewhere: so which rows come, and in which order, never depends on
        when a thread ran, and a seeded run stays reproducible. Priorities are those of ``depth`` batches ago.

        A batch counts (uses, rate limiter, queue) when it is delivered. One of whose rows any has left by then, or may
        not come so often any more, is given back, with those behind it, and others are drawn in its place; what was
        changed is gathered again.
    Arguments:
        - depth (:obj:`int`): Batches ahead; each takes the memory of a batch.
        - table (:obj:`Table`): What they are gathered from.
        - sampler (:obj:`Sampler`): The buffer's, which may be that of others, too: where samples through it take turns,
          so do draws ahead.
    """

    def __init__(self, depth: int, table: Table, sampler: Sampler) -> None:
        self.depth, self._table = depth, table
        self._lock = getattr(sampler, 'lock', None) or hold_over_forks(RLock())
        self._key: Hashable = None
        self._sampler: Any = None
        self._pending: Deque[Drawn] = deque()
        #: Whether the sampler may have been told of a batch that is not pending.
        self._is_changing = False
        self._pool: Optional[ThreadPoolExecutor] = None
        self._process = os.getpid()
        self._num_clears = 0
        table.index.listen(self)

    def next(self, key: Hashable, choose: Any, read: Callable[[Choose], T]) -> T:
        """
        Overview:
            The oldest of the batches that were drawn ahead for the same ``key``, or one drawn now.
        Arguments:
            - choose: Chooses the rows of a batch; if it has ``adopt``, it learns what was chosen ahead.
            - read (:obj:`Callable`): Makes the batch of a choice.
        Raises:
            - NotEnoughData: There is nothing ahead, and too little in the table.
        """
        with self._lock:
            if key != self._key or self._process != os.getpid():
                self.give_back()
                self._key = key
            if self._pending:
                drawn = self._pending[0]
                try:
                    batch = self._batch_of(drawn, read)
                    if hasattr(choose, 'adopt'):
                        choose.adopt(drawn.choose)
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

    def draw(self, key: Hashable, make: Callable[[], Any], read: Callable[[Choose], Any], sampler: Any = None) -> None:
        """
        Overview:
            Choose the rows of the next batches, and let them be gathered.
        Arguments:
            - make (:obj:`Callable`): Makes a choice as that of ``next``.
            - sampler: Told what was drawn for it, and what is given back.
        """
        with self._lock:
            if key != self._key:
                return
            self._sampler = sampler
            if hasattr(sampler, 'sampled_by'):
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
                    if hasattr(sampler, 'drawn'):
                        sampler.drawn(rows)
                    self._pending.append(Drawn(choose, rows, *seen, self._submit(read, by_rows(rows))))
                    self._is_changing = False
                except BaseException:
                    finish(self.give_back)
                    raise

    def give_back(self) -> None:
        """What was drawn and not delivered counts for nothing."""
        with self._lock:
            if self._process == os.getpid():
                # In a forked process a thread that it lacks may have had a lock of theirs.
                for drawn in self._pending:
                    drawn.gathered.cancel()
            if (self._pending or self._is_changing) and hasattr(self._sampler, 'returned'):
                with self._table.index.lock:
                    self._sampler.returned(len(self._pending))
            self._pending.clear()
            self._is_changing = False

    def close(self) -> None:
        """Give everything back and end the thread; it starts again if somebody samples."""
        with self._lock:
            self.give_back()
            pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown()

    def published(self, slots: Array) -> None:
        """As all of these, called with the table's index locked."""

    def removed(self, slots: Array) -> None:
        """Looked at when a batch is delivered."""

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        """Rows keep their numbers, and batches that were being gathered count as changed."""

    def cleared(self) -> None:
        """What comes now may have the numbers of rows that were there: a file's."""
        self._num_clears += 1

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        """Of a table: another table needs another one."""

    def _batch_of(self, drawn: Drawn, read: Callable[[Choose], T]) -> T:
        """
        Raises:
            - RowGone: One of its rows has left since it was drawn, or may not come so often any more.
        """
        if drawn.num_clears != self._num_clears or not self._table.contains(drawn.rows).all():
            raise RowGone('a row of a batch drawn ahead has left')
        for each in (self._sampler, drawn.choose):
            if hasattr(each, 'may_come') and not each.may_come(drawn.rows):
                raise RowGone('a row of a batch drawn ahead has come too often since')
        if drawn.num_updates != self._table.num_updates:
            return read(by_rows(drawn.rows))
        try:
            batch: T = drawn.gathered.result(_TIMEOUT_S)
        except FutureTimeout as e:
            raise StoreTimeout(f'a batch that was sampled ahead was not gathered within {_TIMEOUT_S:g} s') from e
        return batch

    def _submit(self, read: Callable[[Choose], Any], choose: Choose) -> Future[Any]:
        if self._pool is None or self._process != os.getpid():
            # Threads do not survive a fork.
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(1, 'ding_store prefetch')
        return self._pool.submit(read, choose)
