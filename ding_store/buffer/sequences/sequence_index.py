"""An index of the order of rows within groups and of possible starts of sequences, updated with each row."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.samplers.slot_set import PendingSlots, SlotSet
from ding_store.buffer.samplers.use_counts import UseCounts
from ding_store.buffer.sequences.breaks import Breaks
from ding_store.buffer.sequences.group_lines import NOWHERE, GroupStates, LinkedPages, Rows
from ding_store.buffer.table.rows import RowIndex, RowListener

#: Slots -> each slot's group value, int64, and which slots have a group.
ReadGroups = Callable[[Array], Tuple[Array, Array]]
#: Slots -> which of them end an episode.
ReadDone = Callable[[Array], Array]

#: The number of kinds of starts (length, stride) that are kept. A new kind replaces the one longest unused.
_MAX_KINDS = 4
_Starts = Dict[Tuple[int, int], SlotSet]


class SequenceIndex(RowListener):
    """
    Overview:
        The lines of all groups, and sets of slots at which a sequence may start or an episode ends.

        New rows wait and are added many at once, at the latest at the next sample. Rows that left are noticed when
        their slots are reused, or when a draw meets them. Then each leaves the sets once, so that the cost of a draw
        does not depend on the number of rows.

        A *run* can be cut into sequences: it holds the rows of one group up to a done. Every group begins a new run at
        a break. It also does so after rows that were never seen, because one push exceeded the table's capacity.
    Arguments:
        - index (:obj:`RowIndex`): The table's index. The caller holds its lock.
        - read_groups (:obj:`ReadGroups`): Reads the groups of new rows.
        - read_done (:obj:`Optional[ReadDone]`): None: runs end only at breaks and missing rows.
        - breaks (:obj:`Breaks`): The table's breaks.
    """

    def __init__(self, index: RowIndex, read_groups: ReadGroups, read_done: Optional[ReadDone], breaks: Breaks) -> None:
        self._index, self._read_groups, self._read_done, self._breaks = index, read_groups, read_done, breaks
        self.lines = LinkedPages(index.capacity)
        self.groups = GroupStates()
        self._starts: _Starts = {}
        #: The sets of starts for each UseCounts, which discards used-up starts from them. They end with the UseCounts.
        self._starts_of: weakref.WeakKeyDictionary[UseCounts, _Starts] = weakref.WeakKeyDictionary()
        self._ends: Dict[Optional[int], SlotSet] = {}
        self._first_row, self._next_row, self._num_missed = 0, index.next_row, 0
        self._pending = PendingSlots(self._take_in)
        #: The number of rebuilds, after which batches drawn ahead may be wrong.
        self.num_forgotten = 0
        self._start()
        index.listen(self)

    @property
    def rows(self) -> RowIndex:
        """The table's row index."""
        return self._index

    # Callbacks of the table.

    def published(self, slots: Array) -> None:
        if self._is_stale or not len(slots):
            return
        first, last = int(self._index.row_of_slot[slots[0]]), int(self._index.row_of_slot[slots[-1]])
        if last - first != len(slots) - 1:
            self.forget()  # The rows come from a file, and some had left.
            return
        if first != self._next_row:
            self._pending.flush()
            self._num_missed += 1
        self._next_row = first + len(slots)
        self._pending.add(slots)
        # Set after ``add``: if too many slots wait, it applies them and clears their flags.
        self._is_pending[slots] = True

    def removed(self, slots: Array) -> None:
        # Their groups and dones are still in the columns, but will soon be overwritten.
        if not self._is_stale and self._is_pending[slots].any():
            self._pending.flush()

    def settled(self, slots: Array) -> None:
        self._start()

    def restored(self, slots: Array) -> None:
        # The rows are in their old slots, but a draw in between may have discarded them.
        self.forget()

    def cleared(self) -> None:
        self._start()
        self._first_row, self._is_stale = self._next_row, False

    def resizing(self) -> None:
        """Do nothing: ``resized`` starts anew with the new slots."""

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        self._start()

    # Calls of samplers.

    def refresh(self) -> None:
        """Apply all changes since the last call. Amortised O(1) per row."""
        if self._is_stale:
            self._rebuild()
        else:
            self._pending.flush()

    def forget(self) -> None:
        """Read all rows again at the next sample, because live rows changed their groups or dones."""
        self._pending.clear()
        self._is_stale = True
        self.num_forgotten += 1

    def replaced(self) -> None:
        """Start anew with a file's rows. Their first row begins an episode only if its number is 0."""
        self._first_row = 0
        self.forget()

    def starts(self, length: int, stride: int = 1, uses: Optional[UseCounts] = None) -> SlotSet:
        """
        Overview:
            Return the slots at which ``length`` rows of one run begin. Some of these rows may have left. See
            ``windows``.
        Arguments:
            - stride (:obj:`int`): Start only at multiples of it, counted from the start of the run.
            - uses (:obj:`Optional[UseCounts]`): Leave out sequences that are used up, except any used up since. The set
              is returned without a copy.
        """
        kind = (length, stride)

        def fill(members: SlotSet) -> None:
            slots = self._held_slots()
            self._add_starts(kind, members, self.lines.at[slots], self._positions[slots])
            if uses is not None:
                members.discard(members.members[uses.are_used_up(members.members)])

        return self._kept(self._starts if uses is None else self._starts_of.setdefault(uses, {}), kind, fill)

    def ends(self, max_length: Optional[int] = None) -> SlotSet:
        """Return the slots of the last rows of whole episodes. Some of their rows may have left. See ``episodes``."""

        def fill(members: SlotSet) -> None:
            slots = self._held_slots()
            self._add_ends(max_length, members, slots[self._is_end[slots]])

        return self._kept(self._ends, max_length, fill)

    def _kept(self, sets: Dict[Any, SlotSet], kind: Any, fill: Callable[[SlotSet], None]) -> SlotSet:
        found = sets.pop(kind, None)
        if found is None:
            if len(sets) >= _MAX_KINDS:
                sets.pop(next(iter(sets)))
            found = SlotSet(self._index.capacity)
            fill(found)
        # Insert it again: the dict's order is the order of use.
        sets[kind] = found
        return found

    def _held_slots(self) -> Array:
        return np.flatnonzero(self.lines.at != NOWHERE)

    def windows(self, starts: Array, length: int) -> Tuple[Array, Optional[Array]]:
        """Return slots ``(length, B)`` from each start on, and which windows are complete ``(B,)``. None: all."""
        lines, kernels = self.lines, self._index.kernels
        if kernels is not None and lines.at.dtype == np.int32:
            slots, are_there = np.empty((length, len(starts)), np.int64), np.empty(len(starts), np.bool_)
            starts = np.ascontiguousarray(starts, np.int64)
            are_all_there = kernels.walk(
                lines.at, lines.held, lines.after, self._index.row_of_slot, starts, slots, are_there
            )
            return slots, None if are_all_there else are_there
        slots = lines.windows(lines.at[starts], length)
        # One check instead of ``_are_live``: missing rows and missing slots are both below zero.
        rows = self._index.row_of_slot.take(slots, mode='clip')
        are_there = np.minimum(rows.min(axis=0), slots.min(axis=0)) >= 0
        return slots, None if are_there.all() else are_there

    def episodes(self, ends: Array) -> Tuple[Array, Array, Optional[Array]]:
        """Return slots ``(T, B)`` of episodes with these ends, lengths ``(B,)``, and which are whole. None: all."""
        lengths = self._positions[ends].astype(np.int64)
        slots, are_there = self.windows_from(self.lines.walk(self.lines.at[ends], 1 - lengths), lengths)
        return slots, lengths, None if are_there.all() else are_there

    def windows_from(self, places: Array, lengths: Array) -> Tuple[Array, Array]:
        """Return slots ``(T, B)`` from each place on, and whether the first ``lengths`` are all live ``(B,)``."""
        slots = self.lines.windows(places, int(lengths.max(initial=0)))
        is_beyond = np.arange(len(slots))[:, None] >= lengths
        return slots, (self._are_live(slots) | is_beyond).all(axis=0)

    def _are_live(self, slots: Array) -> Array:
        rows: Array = self._index.row_of_slot[slots]
        are_live: Array = (slots != NOWHERE) & (rows != EMPTY)
        return are_live

    def _start(self) -> None:
        """Clear all state."""
        self._is_stale = True
        self._pending.clear()
        capacity = self._index.capacity
        self.lines, self.groups = LinkedPages(capacity), GroupStates()
        for starts in self._all_starts():
            starts.update({kind: SlotSet(capacity) for kind in starts})
        self._ends.update({kind: SlotSet(capacity) for kind in self._ends})
        #: Each row's place in its run, from 1, and whether it is the last row of a whole episode.
        self._positions, self._is_end = np.zeros(capacity, np.int32), np.zeros(capacity, bool)
        self._is_pending = np.zeros(capacity, bool)
        self._next_row, self._num_missed = self._index.next_row, 0

    def _rebuild(self) -> None:
        """Build all state from the live rows. Runs break at missing rows, whose groups and dones are unknown."""
        self._start()
        slots = self._index.slots_by_age().astype(np.intp)
        missed = np.cumsum(np.diff(self._index.row_of_slot[slots], prepend=self._first_row - 1) != 1)
        self._add(slots, missed)
        for uses, starts in list(self._starts_of.items()):
            for members in starts.values():
                members.discard(members.members[uses.are_used_up(members.members)])
        self._num_missed = int(missed[-1]) if len(missed) else int(self._next_row > self._first_row)
        self._num_missed += bool(len(slots) and self._index.row_of_slot[slots[-1]] != self._next_row - 1)
        self._is_stale = False

    def _take_in(self, slots: Array) -> None:
        """Add rows that are new since the last call, ordered by age. No row left without a call of ``removed``."""
        self._is_stale = True  # After an exception, all rows are read again.
        self._is_pending[slots] = False
        self._add(slots, np.full(len(slots), self._num_missed))
        self._is_stale = False

    def _add(self, slots: Array, missed: Array) -> None:
        self._vacate(slots)
        values, has_group = self._read_groups(slots)
        if not has_group.all():
            slots, values, missed = slots[has_group], values[has_group], missed[has_group]
        if len(slots):
            is_done = np.zeros(len(slots), bool) if self._read_done is None else self._read_done(slots)
            segments = self._breaks.segments(self._index.row_of_slot[slots])
            self._append(slots, self.groups.ids(values), is_done, missed, segments)

    def _vacate(self, slots: Array) -> None:
        """Remove the former rows of these slots."""
        places: Array = self.lines.at[slots]
        self.groups.count_down(self.lines.owners(places[places >= 0]))
        for members in self._sets():
            members.discard(slots)
        pages = self.lines.drop(slots)
        self.groups.lose_tails(self.lines.owner_of_pages(pages), pages)

    def _sets(self) -> Tuple[SlotSet, ...]:
        return (*(each for starts in self._all_starts() for each in starts.values()), *self._ends.values())

    def _all_starts(self) -> List[_Starts]:
        return [self._starts, *self._starts_of.values()]

    def _append(self, slots: Array, ids: Array, is_done: Array, missed: Array, segments: Array) -> None:
        order = np.argsort(ids, kind='stable')
        slots, ids, is_done, missed, segments = (each[order] for each in (slots, ids, is_done, missed, segments))
        is_first = np.diff(ids, prepend=-1) != 0
        firsts = np.flatnonzero(is_first)
        owners, counts = ids[firsts], np.diff(firsts, append=len(ids))
        places = self.lines.append(owners, self.groups.tails[owners], counts, slots)
        positions, is_known = self._places_in_runs(ids, is_first, is_done, missed, segments)
        self._positions[slots], self._is_end[slots] = positions, is_done & is_known
        for starts in self._all_starts():
            for kind, members in starts.items():
                self._add_starts(kind, members, places, positions)
        for max_length, members in self._ends.items():
            self._add_ends(max_length, members, slots[is_done & is_known])
        rows = Rows(places, positions, is_known, is_done, missed, segments)
        self.groups.advance(owners, counts, rows.at(firsts + counts - 1))

    def _places_in_runs(
        self, ids: Array, is_first: Array, is_done: Array, missed: Array, segments: Array
    ) -> Tuple[Array, Array]:
        """Return each row's place in its run, from 1, and whether the run began with its episode."""
        groups = self.groups
        is_broken = missed != np.where(is_first, groups.missed[ids], np.roll(missed, 1))
        is_cut = segments != np.where(is_first, groups.segments[ids], np.roll(segments, 1))
        had_ended = np.where(is_first, groups.runs[ids] == 0, np.roll(is_done, 1))
        begins = is_first | is_broken | is_cut | np.roll(is_done, 1)
        ordinal = np.arange(len(ids))
        begin = np.maximum.accumulate(np.where(begins, ordinal, 0))
        # The first rows of a group here continue its current run.
        goes_on = (is_first & ~is_broken & ~is_cut)[begin]
        run = np.where(goes_on, groups.runs[ids], 0)
        # An unfinished episode may continue after a break.
        is_episode = ~is_broken & (~is_cut | had_ended | self._breaks.begin_episodes(segments))
        is_known = np.where(goes_on, groups.is_known[ids], is_episode[begin])
        return ordinal - begin + 1 + run, is_known

    def _add_starts(self, kind: Tuple[int, int], members: SlotSet, places: Array, positions: Array) -> None:
        length, stride = kind
        fits = positions >= length
        if stride > 1:
            fits &= (positions - length) % stride == 0
        slots = self.lines.slots(self.lines.walk(places[fits], np.array(1 - length)))
        members.add(slots[slots != NOWHERE])

    def _add_ends(self, max_length: Optional[int], members: SlotSet, slots: Array) -> None:
        members.add(slots if max_length is None else slots[self._positions[slots] <= max_length])
