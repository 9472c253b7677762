"""A queue sampler: each row once, or a set number of times, in the order of the pushes."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Deque, Dict, NamedTuple, Optional, Tuple

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.commits import CommitRecord
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.samplers.base import DrawsAhead, Sampler, StoredRows, not_enough
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import ConfigError

#: The number of row numbers that one look-up covers. It skips the gaps of deleted rows.
_CHUNK = 1024
#: Value of ``unseen`` if no row has come since all others left.
_NONE = -1


class Fifo(Sampler):
    """
    Overview:
        Samples the oldest rows that were not sampled yet, for on-policy learners such as IMPALA and PPO. O(size)
        amortised. Sampled rows stay in the table. ``limited(Fifo(), max_times_sampled=1)`` removes them. Rows that
        leave before their turn, because the table is full, are skipped and counted.
    Arguments:
        - times (:obj:`int`): The number of times that each row is sampled before the queue moves on.
    """

    def __init__(self, times: int = 1) -> None:
        self.times = integer('times', times, 1)
        #: Serializes samples through this sampler, so that no two of them get the same rows.
        self.lock = hold_over_forks(threading.RLock())
        self._index: Optional[RowIndex] = None
        self._place = _Place()
        # The queue's place after each of the batches that are drawn ahead.
        self._ahead: Deque[_Place] = deque()
        # A strong reference, so that batches that a view drew ahead can go back after the view is gone.
        self._drawer: Optional[DrawsAhead] = None
        self._record: Optional[CommitRecord] = None
        #: The number of rows that left before they were sampled.
        self.num_missed = 0

    def attach(self, index: RowIndex, rows: Optional[StoredRows] = None) -> None:
        if self._index is index:
            return
        if self._index is not None:
            raise ConfigError('a Fifo belongs to one table. Create another Fifo for another table.')
        index.listen(self)
        self._index = index

    def persist_to(self, files: TableDirectory) -> None:
        """Restore the recorded place, and record the place from now on."""
        self._record = files.record('queue')
        found = self._record.value
        if found is not None:
            try:
                self._place = _Place(int(found['next']), int(found['unseen']), tuple(map(int, found['ends'])))
                self.num_missed = int(found['num_missed'])
            except (KeyError, TypeError, ValueError, OverflowError) as e:
                raise self._record.damaged(e) from e
        assert self._index is not None
        with self._index.lock:
            # A power cut may have lost the record and kept the rows.
            self.published(self._index.live_slots)

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - NotEnoughData: Fewer than ``size`` rows were pushed since the last sample.
            - TypeError: ``replace`` or ``sample_range`` is given.
        """
        if replace or sample_range is not None:
            raise TypeError(
                f'a Fifo samples rows once. Leave out replace ({replace}) and sample_range ({sample_range}).'
            )
        if self._place.unseen == _NONE:
            raise not_enough(size, 0)
        found, count, row = [], 0, self._last_place().next
        while count < size and row < index.next_row:
            rows = np.arange(row, min(row + max(_CHUNK, size), index.next_row), dtype=np.int64)
            slots, is_live = index.find(rows)
            live = slots[is_live]
            if not count and not len(live) and not self._ahead:
                self._pass_over(int(rows[-1]) + 1)
            found.append(live)
            count, row = count + len(live), row + len(rows)
        if count < size:
            raise not_enough(size, count)
        chosen: Array = np.concatenate(found)[:size].astype(np.intp)
        return chosen

    def num_left(self) -> int:
        """Return how many rows can be sampled now. Rows that are drawn ahead count."""
        assert self._index is not None
        with self._index.lock:
            return self._index.num_from(self._place.next)

    @property
    def max_times(self) -> int:
        return self.times

    def delivered(self, rows: Array) -> Optional[Array]:
        """Move the place past these sampled rows. Return None: no row has to leave."""
        if self._place.unseen == _NONE:
            return None  # They left in the meantime, with all others.
        place, last = self._place, int(rows[-1])
        self.num_missed += max(0, last + 1 - place.unseen) - int(np.count_nonzero(rows >= place.unseen))
        self._place = place.after(last, self.times)
        if self._ahead:
            self._ahead.popleft()
        # Record the place before the rows are returned, so that a killed process never samples a row twice.
        self._put_on_record()
        return None

    def sampled_by(self, ahead: Optional[DrawsAhead]) -> None:
        """
        Overview:
            Prepare a sample. Batches that another Prefetch drew ahead go back, so that rows come in order and once.
        Arguments:
            - ahead: The Prefetch that draws ahead for this sample, or None.
        """
        if self._drawer is not None and self._drawer is not ahead:
            self._drawer.give_back()
        self._drawer = ahead

    def drawn(self, rows: Array) -> None:
        """Record that these rows are drawn ahead. The next choice begins after them."""
        self._ahead.append(self._last_place().after(int(rows[-1]), self.times))

    def returned(self, num_batches: int) -> None:
        """Cancel all batches drawn ahead. The next choice begins where the last delivery ended."""
        self._ahead.clear()

    def published(self, slots: Array) -> None:
        if self._place.unseen == _NONE:
            assert self._index is not None
            # An empty ``slots`` also starts the queue: it is published for new columns that have no rows yet.
            first = int(self._index.row_of_slot[slots].min(initial=self._index.next_row))
            self._place = _Place(first, first)
            self._put_on_record()

    def settled(self, slots: Array) -> None:
        assert self._index is not None
        self.published(slots[self._index.row_of_slot[slots] != EMPTY])

    def cleared(self) -> None:
        """Count the waiting rows as missed. The next rows may have any numbers, such as those of a loaded file."""
        assert self._index is not None
        if self._place.unseen != _NONE:
            self.num_missed += max(0, self._index.next_row - self._place.unseen)
        self._place = _Place(unseen=_NONE)
        self._ahead.clear()
        self._put_on_record()

    def _put_on_record(self) -> None:
        if self._record is not None:
            self._record.put({**self._place._asdict(), 'num_missed': self.num_missed})

    def _last_place(self) -> _Place:
        return self._ahead[-1] if self._ahead else self._place

    def _pass_over(self, next_row: int) -> None:
        place = self._place
        self.num_missed += max(0, next_row - place.unseen)
        self._place = _Place(next_row, max(next_row, place.unseen), tuple(e for e in place.ends if e >= next_row))

    def __deepcopy__(self, memo: Dict[int, Any]) -> Fifo:
        twin = memo[id(self)] = type(self)(self.times)
        twin._place, twin.num_missed = self._place, self.num_missed
        return twin


class _Place(NamedTuple):
    """
    The position of a queue. Every sample begins at the same row, ``next``, until that row was sampled often enough.
    ``ends`` holds the last row of each sample. A row was sampled as often as there are ends at or after it.
    """

    next: int = 0
    unseen: int = 0  # The first row that was never sampled. _NONE: the first row that comes.
    ends: Tuple[int, ...] = ()

    def after(self, last: int, times: int) -> _Place:
        """Return the position after a sample up to this row."""
        ends = sorted((*self.ends, last))
        done = ends[-times] if len(ends) >= times else self.next - 1
        return _Place(done + 1, max(self.unseen, last + 1), tuple(end for end in ends if end > done))
