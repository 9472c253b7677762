"""Limits for any sampler: rows leave the table after so many uses, or when they are too old."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any, ContextManager, Dict, List, Mapping, Optional

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.samplers.base import DrawsAhead, RowPriorities, Sampler, StoredRows, check_is_sampler
from ding_store.buffer.samplers.use_counts import UseCounts
from ding_store.buffer.table.rows import NO_ROWS, RowIndex, RowListener
from ding_store.errors import ConfigError

logger = logging.getLogger(__name__)

#: Version of rows that are older than any other.
_OF_ANOTHER_RUN = -(1 << 62)


class UseLimit:
    """
    Overview:
        Counts the uses of rows, and of sequences that share rows. Rows at the limit leave the table.
    Arguments:
        - most (:obj:`int`): The limit of uses per row, including repeats in one batch.
        - lock: The sampler's lock.
    """

    def __init__(self, index: RowIndex, rows: StoredRows, most: int, lock: ContextManager[Any]) -> None:
        self._index, self._rows, self._most, self._lock = index, rows, most, lock
        self.counts = UseCounts(index, most)
        self._start_uses: Optional[UseCounts] = None
        self._files: Optional[TableDirectory] = None
        # Rows that are used up. If an exception kept them from leaving, they leave before the next sample.
        self._leaving = NO_ROWS
        self._is_counting = False

    def persist_to(self, files: TableDirectory) -> None:
        """Restore the recorded uses, and record them from now on. Rows at the limit leave."""
        self._files = files
        with self._index.lock:
            used_up = self.counts.keep(files.values('uses'))
        self._rows.delete(used_up)

    def start_uses(self) -> UseCounts:
        """Return the counts of sequences, created and read from the record at the first call."""
        if self._start_uses is None:
            with self._lock, self._index.lock:
                uses = self._start_uses or UseCounts(self._index, self._most)
                if self._files is not None and self._start_uses is None:
                    uses.keep(self._files.values('start_uses'))
                self._start_uses = uses
        return self._start_uses

    def count(self, rows: Array) -> Array:
        """Count a use of each of these rows. Return those that must leave."""
        with self._index.lock:
            self._is_counting = True
            used_up = self.counts.count(rows)
            self._leaving, self._is_counting = used_up, False
            return used_up

    def let_leave(self) -> None:
        """Delete rows that an exception kept from leaving."""
        with self._index.lock:
            if self._is_counting:
                slots = self._index.live_slots
                self._leaving = self._index.row_of_slot[slots[self.counts.are_used_up(slots)]]
                self._is_counting = False
            are_there = self._index.find(self._leaving)[1] if len(self._leaving) else NO_ROWS
        if are_there.any():
            self._rows.delete(self._leaving)
        self._leaving = NO_ROWS

    def may_come(self, rows: Array) -> bool:
        """Return whether these live rows may come once more for each time they are listed."""
        with self._index.lock:
            return self.counts.may_come(rows)

    def of(self, rows: Array, starts: bool) -> Array:
        """Return how often rows were sampled, or sequences that start at these rows. 0 for rows that are gone."""
        uses = self.start_uses() if starts else self.counts
        with self._index.lock:
            return uses.of(rows)

    def take_over(self, other: UseLimit) -> None:
        """Continue from the counts of another limit, of this table or of the table that this one copies."""
        with other._index.lock:
            rows: Array = other._index.row_of_slot[other._index.slots_by_age()]
            counts = other.counts.of(rows)
            start_counts = None if other._start_uses is None else other._start_uses.of(rows)
        starts = None if start_counts is None else self.start_uses()
        with self._index.lock:
            self.counts.take_over(rows, counts)
            if starts is not None and start_counts is not None:
                starts.take_over(rows, start_counts)


class AgeLimit(RowListener):
    """
    Overview:
        Deletes rows whose version is more than ``max_age`` below the newest.
    Arguments:
        - version (:obj:`str`): The column or meta key with the policy version of a row.
    """

    def __init__(self, max_age: int, version: str) -> None:
        self._max_age, self._version = max_age, version
        self._index: Optional[RowIndex] = None
        self._rows: Optional[StoredRows] = None
        self._newest: Optional[int] = None
        self._loaded_end = 0  # Rows below it were loaded. 0 once a version that follows the loaded ones is known.
        self._rows_of: Dict[int, List[Array]] = {}
        self._next_row = 0

    def attach(self, index: RowIndex, rows: StoredRows) -> None:
        index.listen(self)
        self._index, self._rows = index, rows

    def delete_stale(self) -> None:
        """Delete rows that are too old. Amortised O(1) per row."""
        index, rows = self._index, self._rows
        assert index is not None
        assert rows is not None
        with index.lock:
            self._take_in(index, rows)
        if self._newest is None:
            return
        stale = [version for version in self._rows_of if version < self._newest - self._max_age]
        for version in stale:
            rows.delete(np.concatenate(self._rows_of[version]))
            del self._rows_of[version]

    def set_version(self, version: int) -> None:
        """Set the policy's current version. It decreases only if the loaded rows came from another run."""
        if self._loaded_end and self._newest is not None and self._is_anew(version, self._newest):
            self._newest, self._loaded_end = None, 0
            rows = [rows for known in self._rows_of.values() for rows in known]
            self._rows_of = {_OF_ANOTHER_RUN: rows} if rows else {}
        self._newest = version if self._newest is None else max(version, self._newest)

    def continue_from(self, other: AgeLimit) -> None:
        """Continue with the versions that another limit has seen."""
        self._newest, self._loaded_end = other._newest, other._loaded_end

    def take_over(self, other: AgeLimit) -> None:
        """Continue with the newest version that another limit has seen."""
        self._newest = other._newest

    def loaded(self) -> None:
        assert self._index is not None
        self._newest, self._loaded_end = None, self._index.next_row

    def cleared(self) -> None:
        self._rows_of, self._next_row, self._loaded_end = {}, 0, 0

    def _is_anew(self, version: int, newest_loaded: int) -> bool:
        if version >= newest_loaded - self._max_age:
            return False
        logger.warning(
            'max_age (%d): rows that were loaded have versions up to %d, and the policy is at version %d: they are of '
            'another run, count as too old, and leave',
            self._max_age,
            newest_loaded,
            version,
        )
        return True

    def _take_in(self, index: RowIndex, stored: StoredRows) -> None:
        first, next_row = self._next_row, index.next_row
        if next_row - first > index.capacity:
            rows = index.row_of_slot[index.slots_by_age()]
            rows = rows[rows >= first]
        else:
            rows = np.arange(first, next_row, dtype=np.int64)
        slots, found = index.find(rows)
        if found.any():
            rows, of_steps = rows[found], stored.versions(self._version, slots[found])
            are_loaded = rows < self._loaded_end
            if are_loaded.any():
                self._take_in_loaded(rows[are_loaded], of_steps[are_loaded])
            if not are_loaded.all():
                self.set_version(int(of_steps[~are_loaded].max()))
                self._loaded_end = 0
                self._note(rows[~are_loaded], of_steps[~are_loaded].min(axis=1))
        # Last: after an exception the rows are read once more, which does no harm.
        self._next_row = next_row

    def _take_in_loaded(self, rows: Array, of_steps: Array) -> None:
        newest = int(of_steps.max())
        if self._newest is not None and self._is_anew(self._newest, newest):
            self._loaded_end = 0
            self._note(rows, np.full(len(rows), _OF_ANOTHER_RUN))
        else:
            self._newest = newest if self._newest is None else max(newest, self._newest)
            self._note(rows, of_steps.min(axis=1))

    def _note(self, rows: Array, versions: Array) -> None:
        for version in np.unique(versions).tolist():
            self._rows_of.setdefault(version, []).append(rows[versions == version])


class Limited(Sampler):
    """
    Overview:
        A sampler with limits. Rows that reach a limit leave the table, so they end in all its views at once. All else
        is that of the sampler inside.
    Arguments:
        - sampler (:obj:`Sampler`): Chooses the rows: ``Prioritized()``, ``Fifo()`` ...
        - max_times_sampled (:obj:`Optional[int]`): The limit of uses per row, including repeats in one batch. For
          sequences that share rows, it limits the sequences that start at a row. That row then stays in the table.
        - max_age (:obj:`Optional[int]`): Rows leave if their version is more than this below the newest. A row that is
          a sequence is as old as its oldest step.
        - version (:obj:`str`): The column or meta key with the policy version of a row. The newest version is the
          largest one seen or passed to ``set_version``. If ``load_data`` loaded rows of another run, whose versions are
          so high that new rows would be too old at once, the loaded rows leave with a warning.
    Raises:
        - ConfigError: There is no limit, or one is out of range.
    """

    def __init__(
        self,
        sampler: Sampler,
        max_times_sampled: Optional[int] = None,
        max_age: Optional[int] = None,
        version: str = 'policy_version',
    ) -> None:
        max_times_sampled = None if max_times_sampled is None else integer('max_times_sampled', max_times_sampled, 1)
        max_age = None if max_age is None else integer('max_age', max_age, 0)
        if max_times_sampled is None and max_age is None:
            raise ConfigError('limited() needs max_times_sampled, max_age or both')
        if isinstance(sampler, Limited):
            raise ConfigError('limited() accepts only a sampler without limits. Pass all limits in one call.')
        check_is_sampler(sampler)
        self.sampler = sampler
        self.max_times_sampled, self.max_age, self.version = max_times_sampled, max_age, version
        #: Serializes samples: a sample must not return rows that another one is using up.
        self.lock: ContextManager[Any] = sampler.lock or hold_over_forks(threading.RLock())
        self._index: Optional[RowIndex] = None
        #: None without a limit of uses, or before ``attach``.
        self._uses: Optional[UseLimit] = None
        self._age = None if max_age is None else AgeLimit(max_age, version)

    def attach(self, index: RowIndex, rows: Optional[StoredRows] = None) -> None:
        self.sampler.attach(index, rows)
        if self._index is index:
            return
        if self._index is not None:
            raise ConfigError('limits count the uses of one table. Create other limits for another table.')
        if rows is None:
            raise ConfigError('limits delete rows, so they need the table. Pass them to a StoreBuffer.')
        if self.max_times_sampled is not None:
            self._uses = UseLimit(index, rows, self.max_times_sampled, self.lock)
        if self._age is not None:
            self._age.attach(index, rows)
        self._index = index

    def persist_to(self, files: TableDirectory) -> None:
        """Restore the recorded uses, and record them from now on. Rows at the limit leave."""
        self.sampler.persist_to(files)
        if self._uses is not None:
            self._uses.persist_to(files)

    def start_uses(self) -> Optional[UseCounts]:
        """Return the use counts of sequences that share rows. None without a limit of uses."""
        return None if self._uses is None else self._uses.start_uses()

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        slots = self.sampler.choose(index, size, replace, sample_range)
        if self._uses is None:
            return slots
        return self._uses.counts.within(
            slots,
            lambda count: self.sampler.choose(index, count, True, sample_range),
            lambda: index.live_slots if sample_range is None else index.slots_by_age()[sample_range],
        )

    def prepare(self) -> None:
        """Delete rows that are too old, and rows that an exception kept from leaving. Amortised O(1) per row."""
        with self.lock:
            self.sampler.prepare()
            if self._uses is not None:
                self._uses.let_leave()
            if self._age is not None:
                self._age.delete_stale()

    def set_version(self, version: int) -> None:
        """Set the policy's current version. It decreases only if the loaded rows came from another run."""
        if self._age is not None:
            self._age.set_version(version)

    def delivered(self, rows: Array) -> Optional[Array]:
        """Count these sampled rows. Return those that must leave."""
        leaving, used_up = self.sampler.delivered(rows), self.used(rows)
        if leaving is None or not len(leaving):
            return used_up
        return leaving if used_up is None else np.union1d(leaving, used_up)

    def used(self, rows: Array) -> Optional[Array]:
        return None if self._uses is None else self._uses.count(rows)

    def may_deliver(self, rows: Array) -> bool:
        return self.sampler.may_deliver(rows) and (self._uses is None or self._uses.may_come(rows))

    @property
    def max_times(self) -> Optional[int]:
        times = [each for each in (self.max_times_sampled, self.sampler.max_times) if each is not None]
        return min(times, default=None)

    def take_over(self, other: Sampler) -> None:
        """Continue from the counts of other limits, of this table or of the table that this one copies."""
        if not isinstance(other, Limited):
            return
        self.sampler.take_over(other.sampler)
        if self._age is not None and other._age is not None:
            self._age.take_over(other._age)
        if self._uses is not None and other._uses is not None:
            self._uses.take_over(other._uses)

    def uses_of(self, rows: Array, starts: bool = False) -> Array:
        """Return how often rows were sampled, or sequences that start at these rows. 0 for rows that are gone."""
        return np.zeros(len(rows), np.int64) if self._uses is None else self._uses.of(rows, starts)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Limited:
        """Return the same limits without a table. ``take_over`` copies the counts."""
        twin = type(self)(copy.deepcopy(self.sampler, memo), self.max_times_sampled, self.max_age, self.version)
        memo[id(self)] = twin
        if self._age is not None and twin._age is not None:
            twin._age.continue_from(self._age)
        return twin

    # The sampler inside does the rest.

    def weights(self, slots: Array) -> Optional[Array]:
        return self.sampler.weights(slots)

    def sampled_by(self, ahead: Optional[DrawsAhead]) -> None:
        self.sampler.sampled_by(ahead)

    def drawn(self, rows: Array) -> None:
        self.sampler.drawn(rows)

    def returned(self, num_batches: int) -> None:
        self.sampler.returned(num_batches)

    def num_left(self) -> Optional[int]:
        return self.sampler.num_left()

    @property
    def sequence_sampler(self) -> Optional[Sampler]:
        return self.sampler.sequence_sampler

    @property
    def priorities(self) -> Optional[RowPriorities]:
        return self.sampler.priorities

    def state(self) -> Dict[str, Array]:
        return self.sampler.state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self.sampler.load_state(state)

    def generators(self) -> List[np.random.RandomState]:
        return self.sampler.generators()


#: The name that reads well where a buffer is created.
limited = Limited
