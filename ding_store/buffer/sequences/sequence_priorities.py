"""Priorities of sequences. Each belongs to the row at which its sequence starts (R2D2)."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.interrupts import finish
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.samplers.prioritized import Prioritized, check_count, moved
from ding_store.buffer.samplers.slot_set import SlotSet
from ding_store.buffer.sequences.sequences import ROUNDS, SequenceKind, purge
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import PriorityError


class SequencePrioritized(Prioritized):
    """
    Overview:
        A sampler for ``sample_sequences``. Sequences come in proportion to ``(priority + epsilon) ** alpha`` of their
        first row, burn-in included. See R2D2, Kapturowski et al. 2019, section 2.3. A row at which no sequence can
        start never comes, whatever its priority. A priority given at a push counts once the later steps are there. New
        starts get the largest priority seen. O(B log(capacity)).

        After training, update the priorities of a batch's sequences by their first rows::

            buffer.update_priorities(batch.rows[0], mixed_priority(td_errors))

        One sampler draws sequences of one kind. For other kinds create a view with another sampler. The arguments are
        those of Prioritized.
    """

    has_new_rows = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._starts: Optional[SlotSet] = None
        self._kind: Tuple[int, ...] = ()
        #: Priorities by slot, and the rows that they belong to.
        self._priorities: Array = np.full(1, np.nan)
        self._rows: Array = np.full(1, EMPTY, np.int64)
        super().__init__(*arguments, **options)

    @property
    def sequence_sampler(self) -> SequencePrioritized:
        return self

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - TypeError: Always.
        """
        raise TypeError('SequencePrioritized draws sequences only. Call sample_sequences, or sample another view.')

    def draw_sequences(self, kind: SequenceKind, size: int, replace: bool) -> Tuple[Array, Array]:
        """
        Overview:
            Draw starts ``(size,)`` and the slots of their sequences ``(length, size)``. Starts that turn out invalid
            leave the set.
        Raises:
            - NotEnoughData: There are fewer than ``size`` starts, or none with ``replace``, or none with a priority.
            - TypeError: The sampler has drawn sequences of another kind.
        """
        starts, uses, what = self._follow(kind), kind.uses, f'sequences of {kind.length} steps'

        def find_others(count: int) -> Array:
            self._pending.flush()
            check_count(count, len(starts), True, self._tree.total, what)
            return self._find(count)

        for attempt in range(ROUNDS + 1):
            self._pending.flush()
            check_count(size, len(starts), replace, self._tree.total, what)
            slots = self._find(size)
            if uses is not None:
                slots = uses.within(slots, find_others, lambda: self._with_mass(starts.members), starts.discard)
            windows, is_valid = kind.look(slots)
            if is_valid is None:
                return slots, windows
            if attempt < ROUNDS - 1:
                starts.discard(np.unique(slots[~is_valid]))
            else:
                purge(starts, kind.look)
        raise AssertionError('all starts were checked')

    def starts_changed(self, slots: Array) -> None:
        """Handle slots that became starts or stopped being starts."""
        self._pending.add(slots)

    def cleared(self) -> None:
        super().cleared()
        self._start(self._tree.capacity)

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        if len(self._rows) == capacity:
            return
        priorities = moved(self._priorities, capacity, source, target, np.nan)
        rows = moved(self._rows, capacity, source, target, EMPTY).astype(np.int64)

        def resize() -> None:
            self._start(capacity)
            self._priorities, self._rows = priorities, rows

        finish(resize)

    def state(self) -> Dict[str, Array]:
        index = self._attached()
        with index.lock:
            state = super().state()
            slots = index.slots_by_age()
            state['priority'] = np.where(self._is_known(slots), self._priorities[slots], np.nan)
        return state

    def _find(self, size: int) -> Array:
        return self._tree.draw(self._random.random_sample(size))

    def _with_mass(self, slots: Array) -> Array:
        with_mass: Array = slots[self._tree.masses[slots] > 0]
        return with_mass

    def _follow(self, sequences: SequenceKind) -> SlotSet:
        length, stride = sequences.length, sequences.stride
        kind = (id(sequences.index), length, stride)
        if self._kind not in ((), kind):
            raise TypeError(
                f'this SequencePrioritized draws sequences of {self._kind[1]} steps, every {self._kind[2]}, in one '
                f'grouping. Create a view with another one for {length} steps, every {stride}.'
            )
        self._kind = kind
        starts = sequences.starts()
        if starts is not self._starts:
            # The first set of starts, or a new one.
            try:
                self._tree.clear()
                self._pending.clear()
                self._starts = starts
                starts.listen(self)
                self._pending.add(starts.members)
            except BaseException:
                self._starts = None  # The next draw follows it again.
                raise
        return starts

    def _start(self, capacity: int) -> None:
        super()._start(capacity)
        self._pending.clear()
        self._starts = None
        self._priorities, self._rows = np.full(capacity, np.nan), np.full(capacity, EMPTY, np.int64)

    def _refresh(self, slots: Array) -> None:
        is_start = self._is_start(slots)
        new = slots[is_start & ~self._is_known(slots)]
        self._priorities[new], self._rows[new] = self.max_priority, self._attached().row_of_slot[new]
        self._tree.set(slots, np.where(is_start, self._mass_of(np.nan_to_num(self._priorities[slots])), 0.0))

    def _set(self, slots: Array, priorities: Array) -> None:
        self._priorities[slots], self._rows[slots] = priorities, self._attached().row_of_slot[slots]
        self._tree.set(slots, np.where(self._is_start(slots), self._mass_of(priorities), 0.0))

    def _is_start(self, slots: Array) -> Array:
        if self._starts is None:
            return np.zeros(len(slots), bool)
        is_start: Array = self._starts.contains(slots) & (self._attached().row_of_slot[slots] != EMPTY)
        return is_start

    def _is_known(self, slots: Array) -> Array:
        """Return which rows have a priority."""
        rows = self._attached().row_of_slot[slots]
        is_known: Array = (self._rows[slots] == rows) & (rows != EMPTY)
        return is_known

    def _priorities_at(self, slots: Array) -> Array:
        return np.where(self._is_known(slots), self._priorities[slots], self.max_priority)

    def _check_state(self, state: Mapping[str, Array], num_rows: int) -> None:
        super()._check_state(state, num_rows)
        if 'priority' not in state:
            raise PriorityError('the saved priorities belong to another sampler than SequencePrioritized')

    def _load_rows(self, index: RowIndex, state: Mapping[str, Array]) -> None:
        self._start(index.capacity)
        is_known = ~np.isnan(state['priority'])
        slots = index.slots_by_age()[is_known]
        self._priorities[slots], self._rows[slots] = state['priority'][is_known], index.row_of_slot[slots]
