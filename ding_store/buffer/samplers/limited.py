"""Limits for any sampler: rows leave the table after so many uses, or when they are too old."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any, Dict, List, Mapping, Optional

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.elements import Elements
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.persistence.persisted import PersistedState
from ding_store.buffer.samplers.base import PrioritySampler, Sampler, check_is_sampler
from ding_store.buffer.samplers.use_counts import UseCounts
from ding_store.buffer.table.rows import NO_ROWS, RowIndex, RowListener
from ding_store.errors import ConfigError, SchemaMismatch

logger = logging.getLogger(__name__)

#: Version of rows that are older than any other.
_OF_ANOTHER_RUN = -(1 << 62)


def limited(
    sampler: Sampler,
    max_times_sampled: Optional[int] = None,
    max_age: Optional[int] = None,
    version: str = 'policy_version',
) -> Limited:
    """
    Overview:
        Return a sampler with limits. Rows that reach a limit leave the table, so they end in all its views at once.
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
    made = LimitedPriorities if isinstance(sampler, PrioritySampler) else Limited
    return made(sampler, max_times_sampled, max_age, version)


class Limited(RowListener):
    """A sampler with limits of uses and age. See ``limited``."""

    def __init__(
        self, sampler: Sampler, max_times_sampled: Optional[int], max_age: Optional[int], version: str
    ) -> None:
        if max_times_sampled is not None:
            max_times_sampled = integer('max_times_sampled', max_times_sampled, 1)
        if max_age is not None:
            max_age = integer('max_age', max_age, 0)
        if max_times_sampled is None and max_age is None:
            raise ConfigError('limited() needs max_times_sampled, max_age or both')
        if isinstance(sampler, Limited):
            raise ConfigError('limited() accepts only a sampler without limits. Pass all limits in one call.')
        check_is_sampler(sampler)
        self.sampler = sampler
        self.max_times_sampled, self.max_age, self.version = max_times_sampled, max_age, version
        #: Serializes samples: a sample must not return rows that another one is using up.
        self.lock = hold_over_forks(threading.RLock())
        self._index: Optional[RowIndex] = None
        self._elements: Optional[Elements] = None
        #: None without a limit of uses, or before ``attach``.
        self._uses: Optional[UseCounts] = None
        self._start_uses: Optional[UseCounts] = None
        self._kept: Optional[PersistedState] = None
        self._newest: Optional[int] = None
        self._loaded_end = 0  # Rows below it were loaded. 0 once a version that follows the loaded ones is known.
        self._rows_of: Dict[int, List[Array]] = {}
        self._next_row = 0
        # Rows that are used up. If an exception kept them from leaving, they leave before the next sample.
        self._leaving = NO_ROWS
        self._is_counting = False

    def attach(self, index: RowIndex) -> None:
        self.sampler.attach(index)
        if self._index is index:
            return
        if self._index is not None:
            raise ConfigError('limits count the uses of one table. Create other limits for another table.')
        if self.max_times_sampled is not None:
            self._uses = UseCounts(index, self.max_times_sampled)
        index.listen(self)
        self._index = index

    def bind(self, elements: Elements) -> None:
        """Set the elements, which hold the rows' versions and delete rows."""
        self._elements = elements

    def keep(self, kept: PersistedState) -> None:
        """Restore the recorded uses, and record them from now on. Rows at the limit leave."""
        assert self._index is not None
        assert self._elements is not None
        keep_inner = getattr(self.sampler, 'keep', None)
        if keep_inner is not None:
            keep_inner(kept)
        if self._uses is None:
            return
        self._kept = kept
        with self._index.lock:
            used_up = self._uses.keep(kept.values('uses'))
        self._elements.delete(used_up)

    def start_uses(self) -> Optional[UseCounts]:
        """
        Return the use counts of sequences that share rows, counted at each sequence's first row, which stays. None
        without a limit of uses. They are created, and read from the record, at the first call.
        """
        if self._start_uses is None and self.max_times_sampled is not None:
            assert self._index is not None
            with self.lock, self._index.lock:
                uses = self._start_uses or UseCounts(self._index, self.max_times_sampled)
                if self._kept is not None and self._start_uses is None:
                    uses.keep(self._kept.values('start_uses'))
                self._start_uses = uses
        return self._start_uses

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        slots = self.sampler.choose(index, size, replace, sample_range)
        if self._uses is None:
            return slots
        return self._uses.within(
            slots,
            lambda count: self.sampler.choose(index, count, True, sample_range),
            lambda: index.live_slots if sample_range is None else index.slots_by_age()[sample_range],
        )

    def weigh(self, slots: Array) -> Optional[Array]:
        return self.sampler.weigh(slots)

    def prepare(self) -> None:
        """
        Delete rows that are too old, and rows that an exception kept from leaving. Amortised O(1) per row. Call it
        before a sample, without any lock.
        """
        with self.lock:
            self._let_leave()
            if self.max_age is None:
                return
            assert self._index is not None
            assert self._elements is not None
            with self._index.lock:
                self._take_in(self._index, self._elements)
            if self._newest is None:
                return
            stale = [version for version in self._rows_of if version < self._newest - self.max_age]
            for version in stale:
                self._elements.delete(np.concatenate(self._rows_of[version]))
                del self._rows_of[version]

    def _let_leave(self) -> None:
        assert self._index is not None
        with self._index.lock:
            if self._is_counting and self._uses is not None:
                slots = self._index.live_slots
                self._leaving = self._index.row_of_slot[slots[self._uses.are_used_up(slots)]]
                self._is_counting = False
            are_there = self._index.find(self._leaving)[1] if len(self._leaving) else NO_ROWS
        if are_there.any():
            assert self._elements is not None
            self._elements.delete(self._leaving)
        self._leaving = NO_ROWS

    def set_version(self, version: int) -> None:
        """Set the policy's current version. It decreases only if the loaded rows came from another run."""
        if self._loaded_end and self._newest is not None and self._is_anew(version, self._newest):
            self._newest, self._loaded_end = None, 0
            rows = [rows for known in self._rows_of.values() for rows in known]
            self._rows_of = {_OF_ANOTHER_RUN: rows} if rows else {}
        self._newest = version if self._newest is None else max(version, self._newest)

    def loaded(self) -> None:
        assert self._index is not None
        self._newest, self._loaded_end = None, self._index.next_row

    def _is_anew(self, version: int, newest_loaded: int) -> bool:
        if self.max_age is None or version >= newest_loaded - self.max_age:
            return False
        logger.warning(
            'max_age (%d): rows that were loaded have versions up to %d, and the policy is at version %d: they are of '
            'another run, count as too old, and leave',
            self.max_age,
            newest_loaded,
            version,
        )
        return True

    def delivered(self, rows: Array) -> Optional[Array]:
        """Count these sampled rows. Return those that must leave."""
        self._tell_inner(rows)
        return self.count(rows)

    def count(self, rows: Array) -> Optional[Array]:
        """Count rows that the sampler did not choose itself. Return those that must leave."""
        if self._uses is None:
            return None
        assert self._index is not None
        with self._index.lock:
            self._is_counting = True
            used_up = self._uses.count(rows)
            self._leaving, self._is_counting = used_up, False
            return used_up

    def use(self, rows: Array) -> None:
        """Count rows that the sampler did not choose itself, and delete those that must leave."""
        used_up = self.count(rows)
        if used_up is not None and len(used_up):
            assert self._elements is not None
            self._elements.delete(used_up)

    def _tell_inner(self, rows: Array) -> None:
        tell = getattr(self.sampler, 'delivered', None)
        if tell is not None:
            tell(rows)

    def sampled_by(self, ahead: Any) -> None:
        """Pass on which Prefetch, if any, draws ahead for the next sample."""
        tell = getattr(self.sampler, 'sampled_by', None)
        if tell is not None:
            tell(ahead)

    def drawn(self, rows: Array) -> None:
        """Pass on rows that are drawn ahead. Their use counts when they are delivered."""
        tell = getattr(self.sampler, 'drawn', None)
        if tell is not None:
            tell(rows)

    def may_come(self, rows: Array) -> bool:
        """Return whether live rows that were drawn ahead may still come, after the uses since the draw."""
        if self._uses is None:
            return True
        assert self._index is not None
        with self._index.lock:
            return self._uses.may_come(rows)

    def returned(self, num_batches: int) -> None:
        """Pass on that so many batches drawn ahead will not be delivered."""
        tell = getattr(self.sampler, 'returned', None)
        if tell is not None:
            tell(num_batches)

    def take_over(self, other: Limited) -> None:
        """Continue from the counts of another sampler, of this table or of the table that this one copies."""
        assert self._index is not None
        assert other._index is not None
        self._newest = other._newest
        with other._index.lock:
            rows: Array = other._index.row_of_slot[other._index.slots_by_age()]
            counts = [None if each is None else each.of(rows) for each in (other._uses, other._start_uses)]
        for known, starts in zip(counts, (False, True)):
            own = None if known is None else self.start_uses() if starts else self._uses
            if own is not None and known is not None:
                with self._index.lock:
                    own.take_over(rows, known)

    def uses_of(self, rows: Array) -> Array:
        """Return how often rows were sampled. 0 for rows that are gone."""
        assert self._index is not None
        with self._index.lock:
            return np.zeros(len(rows), np.int64) if self._uses is None else self._uses.of(rows)

    def uses_of_starts(self, rows: Array) -> Array:
        """Return how often sequences that share rows were sampled from these first rows."""
        uses = self.start_uses()
        assert self._index is not None
        with self._index.lock:
            return np.zeros(len(rows), np.int64) if uses is None else uses.of(rows)

    def cleared(self) -> None:
        self._rows_of, self._next_row, self._loaded_end = {}, 0, 0

    def __deepcopy__(self, memo: Dict[int, Any]) -> Limited:
        """Return the same limits without a table. ``take_over`` copies the counts."""
        twin = type(self)(copy.deepcopy(self.sampler, memo), self.max_times_sampled, self.max_age, self.version)
        memo[id(self)] = twin
        twin._newest, twin._loaded_end = self._newest, self._loaded_end
        return twin

    def _take_in(self, index: RowIndex, elements: Elements) -> None:
        first, next_row = self._next_row, index.next_row
        if next_row - first > index.capacity:
            rows = index.row_of_slot[index.slots_by_age()]
            rows = rows[rows >= first]
        else:
            rows = np.arange(first, next_row, dtype=np.int64)
        slots, found = index.find(rows)
        if found.any():
            rows, of_steps = rows[found], self._versions(elements, slots[found])
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

    def _versions(self, elements: Elements, slots: Array) -> Array:
        """Return the version of each row, or of each step if rows are sequences: ``(n, steps)``."""
        column = elements.table.columns.get(self.version)
        if column is not None and (column[:1].size == 1 or column.dtype.kind in 'iu'):
            return column[slots].reshape(len(slots), -1).astype(np.int64)
        metas = [elements.metas.peek(slot).get(self.version) for slot in slots.tolist()]
        if None in metas:
            raise SchemaMismatch(
                f'version ({self.version!r}) is neither a column of integers nor in every meta. Choose one of the '
                f'columns {sorted(elements.table.columns)}, or push every row with this meta.'
            )
        return np.array(metas, np.int64)[:, None]


class LimitedPriorities(Limited):
    """Limits over a sampler with priorities. The priorities stay in that sampler."""

    sampler: PrioritySampler

    @property
    def num_stale_updates(self) -> int:
        """The number of updates for rows that are gone."""
        return self.sampler.num_stale_updates

    def update(self, rows: Array, priority: Any) -> None:
        self.sampler.update(rows, priority)

    def insert(self, rows: Array, priority: Any) -> None:
        self.sampler.insert(rows, priority)

    def check(self, priority: Any, num_rows: int) -> Array:
        return self.sampler.check(priority, num_rows)

    def state(self) -> Dict[str, Array]:
        return self.sampler.state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self.sampler.load_state(state)
