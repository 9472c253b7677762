"""Priorities of sequences. Each belongs to the row at which its sequence starts (R2D2)."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.interrupts import finish
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.samplers.masses import Masses, moved
from ding_store.buffer.samplers.prioritized import PrioritySampler, check_count
from ding_store.buffer.samplers.slot_set import SlotSet
from ding_store.buffer.samplers.sum_tree import SumTree
from ding_store.buffer.sequences.sequences import ROUNDS, SequenceKind, purge
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import PriorityError


class StartMasses(Masses):
    """
    Overview:
        Masses of rows at which a sequence can start. All others have the mass 0, whatever their priority. New starts
        get the largest priority seen.
    """

    has_new_rows = False

    def __init__(self, alpha: float, epsilon: float) -> None:
        super().__init__(alpha, epsilon)
        #: The possible starts. None before the first draw.
        self.starts: Optional[SlotSet] = None
        #: Priorities by slot, and the rows that they belong to.
        self._priorities: Array = np.full(1, np.nan)
        self._rows: Array = np.full(1, EMPTY, np.int64)

    def begin(self, index: RowIndex) -> None:
        super().begin(index)
        self._start(index.capacity)

    def clear(self) -> None:
        self._start(self.tree.capacity)

    def refresh(self, slots: Array, largest: float) -> None:
        is_start = self._is_start(slots)
        new = slots[is_start & ~self._is_known(slots)]
        self._priorities[new], self._rows[new] = largest, self.index.row_of_slot[new]
        self.tree.set(slots, np.where(is_start, self.of(np.nan_to_num(self._priorities[slots])), 0.0))

    def set(self, slots: Array, priorities: Array) -> None:
        self._priorities[slots], self._rows[slots] = priorities, self.index.row_of_slot[slots]
        self.tree.set(slots, np.where(self._is_start(slots), self.of(priorities), 0.0))

    def priorities_at(self, slots: Array, largest: float) -> Array:
        return np.where(self._is_known(slots), self._priorities[slots], largest)

    def with_mass(self, slots: Array) -> Array:
        """Return those of these slots that have a mass."""
        with_mass: Array = slots[self.tree.masses[slots] > 0]
        return with_mass

    def resize(self, capacity: int, source: Array, target: Array) -> None:
        if len(self._rows) == capacity:
            return
        priorities = moved(self._priorities, capacity, source, target, np.nan)
        rows = moved(self._rows, capacity, source, target, EMPTY).astype(np.int64)

        def resize() -> None:
            self._start(capacity)
            self._priorities, self._rows = priorities, rows

        finish(resize)

    def state(self, slots: Array) -> Dict[str, Array]:
        priority = np.where(self._is_known(slots), self._priorities[slots], np.nan)
        return {**super().state(slots), 'priority': priority}

    def check_state(self, state: Mapping[str, Array]) -> None:
        super().check_state(state)
        if 'priority' not in state:
            raise PriorityError('the saved priorities belong to another sampler than SequencePrioritized')

    def load_state(self, slots: Array, state: Mapping[str, Array]) -> None:
        self._start(self.tree.capacity)
        is_known = ~np.isnan(state['priority'])
        known = slots[is_known]
        self._priorities[known], self._rows[known] = state['priority'][is_known], self.index.row_of_slot[known]

    def _start(self, capacity: int) -> None:
        self.tree = SumTree(capacity)
        self.starts = None
        self._priorities, self._rows = np.full(capacity, np.nan), np.full(capacity, EMPTY, np.int64)

    def _is_start(self, slots: Array) -> Array:
        if self.starts is None:
            return np.zeros(len(slots), bool)
        is_start: Array = self.starts.contains(slots) & (self.index.row_of_slot[slots] != EMPTY)
        return is_start

    def _is_known(self, slots: Array) -> Array:
        """Return which rows have a priority."""
        rows = self.index.row_of_slot[slots]
        is_known: Array = (self._rows[slots] == rows) & (rows != EMPTY)
        return is_known


class SequencePrioritized(PrioritySampler):
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

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_end: float = 1.0,
        beta_anneal_steps: int = 100_000,
        epsilon: float = 1e-5,
        seed: Optional[int] = None,
    ) -> None:
        self._masses = StartMasses(alpha, epsilon)
        super().__init__(self._masses, beta, beta_end, beta_anneal_steps, seed)
        self._kind: Tuple[int, ...] = ()

    @property
    def sequence_sampler(self) -> SequencePrioritized:
        return self

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
        masses = self._masses

        def draw(count: int, replace: bool = True) -> Array:
            self.priorities.flush()
            check_count(count, len(starts), replace, masses.tree.total, what)
            return self.draws.draw(count)

        for attempt in range(ROUNDS + 1):
            slots = draw(size, replace)
            if uses is not None:
                slots = uses.within(slots, draw, lambda: masses.with_mass(starts.members), starts.discard)
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
        self.priorities.changed(slots)

    def settings(self) -> Dict[str, Any]:
        return {**super().settings(), 'epsilon': self._masses.epsilon}

    def _follow(self, sequences: SequenceKind) -> SlotSet:
        length, stride = sequences.length, sequences.stride
        kind = (id(sequences.index), length, stride)
        if self._kind not in ((), kind):
            raise TypeError(
                f'this SequencePrioritized draws sequences of {self._kind[1]} steps, every {self._kind[2]}, in one '
                f'grouping. Create a view with another one for {length} steps, every {stride}.'
            )
        self._kind = kind
        starts, masses = sequences.starts(), self._masses
        if starts is not masses.starts:
            # The first set of starts, or a new one.
            try:
                masses.tree.clear()
                masses.starts = starts
                starts.listen(self)
                self.priorities.only_changed(starts.members)
            except BaseException:
                masses.starts = None  # The next draw follows it again.
                raise
        return starts
