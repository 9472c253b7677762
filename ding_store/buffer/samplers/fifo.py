"""A queue sampler: each row once, or a set number of times, in the order of the pushes."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, NamedTuple, Optional, Tuple

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.commits import CommitRecord
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.samplers.base import StoredRows, not_enough
from ding_store.buffer.samplers.in_order import InOrder
from ding_store.buffer.table.rows import RowIndex, RowListener
from ding_store.errors import ConfigError

#: The number of row numbers that one look-up covers. It skips the gaps of deleted rows.
_CHUNK = 1024
#: Value of ``unseen`` if no row has come since all others left.
_NONE = -1


class Place(NamedTuple):
    """
    The position of a queue. Every sample begins at the same row, ``next``, until that row was sampled often enough.
    ``ends`` holds the last row of each sample. A row was sampled as often as there are ends at or after it.
    """

    next: int = 0
    unseen: int = 0  # The first row that was never sampled. _NONE: the first row that comes.
    ends: Tuple[int, ...] = ()

    def after(self, last: int, times: int) -> Place:
        """Return the position after a sample up to this row."""
        ends = sorted((*self.ends, last))
        done = ends[-times] if len(ends) >= times else self.next - 1
        return Place(done + 1, max(self.unseen, last + 1), tuple(end for end in ends if end > done))


class Queue(RowListener):
    """
    Overview:
        The place of a queue in its table, and its places after batches that are drawn ahead. If it has a record, it
        records the place whenever it moves.
    Arguments:
        - times (:obj:`int`): The number of times that each row is sampled before the queue moves on.
    """

    def __init__(self, times: int) -> None:
        self.times = times
        self.place = Place()
        self._index: Optional[RowIndex] = None
        #: The number of rows that left before they were sampled.
        self.num_missed = 0
        self._ahead: Deque[Place] = deque()
        self._record: Optional[CommitRecord] = None

    @property
    def index(self) -> RowIndex:
        """The index of the table."""
        if self._index is None:
            raise ConfigError('the queue has no table yet. Pass the sampler to a StoreBuffer first.')
        return self._index

    def attach(self, index: RowIndex) -> None:
        """
        Raises:
            - ConfigError: The queue belongs to another table.
        """
        if self._index is index:
            return
        if self._index is not None:
            raise ConfigError('a Fifo belongs to one table. Create another Fifo for another table.')
        index.listen(self)
        self._index = index

    @property
    def has_begun(self) -> bool:
        """False if no row has come since all others left."""
        return self.place.unseen != _NONE

    def persist_to(self, record: CommitRecord) -> None:
        """Restore the recorded place, and record the place from now on."""
        self._record, found = record, record.value
        if found is not None:
            try:
                self.place = Place(int(found['next']), int(found['unseen']), tuple(map(int, found['ends'])))
                self.num_missed = int(found['num_missed'])
            except (KeyError, TypeError, ValueError, OverflowError) as e:
                raise record.damaged(e) from e
        with self.index.lock:
            # A power cut may have lost the record and kept the rows.
            self.published(self.index.live_slots)

    def last_place(self) -> Place:
        """Return the place after all batches that are drawn ahead."""
        return self._ahead[-1] if self._ahead else self.place

    def deliver(self, rows: Array) -> None:
        """Move past these sampled rows."""
        place, last = self.place, int(rows[-1])
        self.num_missed += max(0, last + 1 - place.unseen) - int(np.count_nonzero(rows >= place.unseen))
        self.place = place.after(last, self.times)
        if self._ahead:
            self._ahead.popleft()
        # Record the place before the rows are returned, so that a killed process never samples a row twice.
        self.put_on_record()

    def draw_ahead(self, rows: Array) -> None:
        """Note that these rows are drawn ahead. The next choice begins after them."""
        self._ahead.append(self.last_place().after(int(rows[-1]), self.times))

    def give_back(self) -> None:
        """Cancel all batches drawn ahead. The next choice begins where the last delivery ended."""
        self._ahead.clear()

    def pass_over(self, next_row: int) -> None:
        """Move to this row, because those before it left. Do nothing if batches are drawn ahead."""
        if self._ahead:
            return
        place = self.place
        self.num_missed += max(0, next_row - place.unseen)
        self.place = Place(next_row, max(next_row, place.unseen), tuple(e for e in place.ends if e >= next_row))

    def published(self, slots: Array) -> None:
        if not self.has_begun:
            # An empty ``slots`` also starts the queue: it is published for new columns that have no rows yet.
            first = int(self.index.row_of_slot[slots].min(initial=self.index.next_row))
            self.place = Place(first, first)
            self.put_on_record()

    def settled(self, slots: Array) -> None:
        self.published(slots[self.index.row_of_slot[slots] != EMPTY])

    def cleared(self) -> None:
        """Count the waiting rows as missed. The next rows may have any numbers, such as those of a loaded file."""
        if self.has_begun:
            self.num_missed += max(0, self.index.next_row - self.place.unseen)
        self.place = Place(unseen=_NONE)
        self._ahead.clear()
        self.put_on_record()

    def put_on_record(self) -> None:
        if self._record is not None:
            self._record.put({**self.place._asdict(), 'num_missed': self.num_missed})


class Fifo(InOrder):
    """
    Overview:
        Samples the oldest rows that were not sampled yet, for on-policy learners such as IMPALA and PPO. O(size)
        amortised. Sampled rows stay in the table. ``limited(Fifo(), max_times_sampled=1)`` removes them. Rows that
        leave before their turn, because the table is full, are skipped and counted.
    Arguments:
        - times (:obj:`int`): The number of times that each row is sampled before the queue moves on.
    """

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.queue = Queue(integer('times', times, 1))

    def attach(self, index: RowIndex, rows: Optional[StoredRows] = None) -> None:
        self.queue.attach(index)

    def persist_to(self, files: TableDirectory) -> None:
        """Restore the recorded place, and record the place from now on."""
        self.queue.persist_to(files.record('queue'))

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - NotEnoughData: Fewer than ``size`` rows were pushed since the last sample.
            - TypeError: ``replace`` or ``sample_range`` is given.
        """
        self.refuse_options(replace, sample_range)
        if not self.queue.has_begun:
            raise not_enough(size, 0)
        found, count, row = [], 0, self.queue.last_place().next
        while count < size and row < index.next_row:
            rows = np.arange(row, min(row + max(_CHUNK, size), index.next_row), dtype=np.int64)
            slots, is_live = index.find(rows)
            live = slots[is_live]
            if not count and not len(live):
                self.queue.pass_over(int(rows[-1]) + 1)
            found.append(live)
            count, row = count + len(live), row + len(rows)
        if count < size:
            raise not_enough(size, count)
        chosen: Array = np.concatenate(found)[:size].astype(np.intp)
        return chosen

    def num_left(self) -> int:
        """Return how many rows can be sampled now. Rows that are drawn ahead count."""
        index = self.queue.index
        with index.lock:
            return index.num_from(self.queue.place.next)

    @property
    def max_times(self) -> int:
        return self.queue.times

    @property
    def num_missed(self) -> int:
        """The number of rows that left before they were sampled."""
        return self.queue.num_missed

    def delivered(self, rows: Array) -> Optional[Array]:
        """Move the place past these sampled rows. Return None: no row has to leave."""
        if self.queue.has_begun:  # Otherwise they left in the meantime, with all others.
            self.queue.deliver(rows)
        return None

    def drawn(self, rows: Array) -> None:
        self.queue.draw_ahead(rows)

    def returned(self, num_batches: int) -> None:
        self.queue.give_back()

    def __deepcopy__(self, memo: Dict[int, Any]) -> Fifo:
        twin = memo[id(self)] = type(self)(self.queue.times)
        twin.queue.place, twin.queue.num_missed = self.queue.place, self.queue.num_missed
        return twin
