"""The rows of each group: linked pages of slots in order, so that a step costs O(1), and the state of its run."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import PAGE, PAGE_SHIFT

_MASK = PAGE - 1

NOWHERE = -1
#: Groups without rows are kept up to this number, or up to the number of other groups. Episodes come and go, but an
#: environment's steps may continue after all its earlier ones have left.
_MAX_IDLE = 4096


class LinkedPages:
    """
    Overview:
        Each group has a line of slots that grows at its tail. A place is an entry of a page. ``at[slot]`` is the place
        of a slot. Methods are vectorised over groups and slots. The caller holds the lock of the table's index.

        * ``held`` holds the entries. Its last page is never used and holds NOWHERE. A place beyond a line's ends is on
          page -1, which is that page, so it needs no special case.
        * ``after`` and ``_before`` link the pages. Their last item is NOWHERE for the same reason.
    Arguments:
        - capacity (:obj:`int`): All slots are below it.
    """

    def __init__(self, capacity: int) -> None:
        self.at = np.full(capacity, NOWHERE, np.int64 if capacity * PAGE > np.iinfo(np.int32).max else np.int32)
        self.clear()

    def clear(self) -> None:
        self.at.fill(NOWHERE)
        self.held = np.full(PAGE, NOWHERE, np.int32)
        self.after, self._before = np.full(1, NOWHERE, np.int32), np.full(1, NOWHERE, np.int32)
        self._num_held = np.zeros(0, np.int32)
        self._owner = np.zeros(0, np.int64)
        self._free = np.empty(0, np.int32)
        #: The pages of each group, first to last.
        self._pages_of: Dict[int, List[int]] = {}

    def append(self, owners: Array, tails: Array, counts: Array, slots: Array) -> Array:
        """
        Overview:
            Append slots to lines.
        Arguments:
            - owners (:obj:`np.ndarray`): Distinct groups ``(k,)``.
            - tails (:obj:`np.ndarray`): The last place of each group's line ``(k,)``, NOWHERE for a new line.
            - counts (:obj:`np.ndarray`): The number of new slots of each group ``(k,)``, at least 1.
            - slots (:obj:`np.ndarray`): The slots ``(n,)``, ordered by group. None of them has a place yet.
        Returns:
            - places (:obj:`np.ndarray`): Their new places ``(n,)``.
        """
        room = np.where(tails >= 0, _MASK - (tails & _MASK), 0)
        num_pages = (np.maximum(counts - room, 0) + _MASK) >> PAGE_SHIFT
        pages = self._take_pages(int(num_pages.sum()))
        first_page = np.cumsum(num_pages) - num_pages
        self._link(pages, owners, tails, num_pages, first_page)
        group = np.repeat(np.arange(len(counts)), counts)
        ordinal = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
        beyond = ordinal - room[group]
        places: Array = tails[group] + 1 + ordinal
        new = np.flatnonzero(beyond >= 0)
        page = pages[first_page[group[new]] + (beyond[new] >> PAGE_SHIFT)].astype(np.int64)
        places[new] = (page << PAGE_SHIFT) + (beyond[new] & _MASK)
        self.held[places] = slots
        self.at[slots] = places
        np.add.at(self._num_held, places >> PAGE_SHIFT, 1)
        return places

    def drop(self, slots: Array) -> Array:
        """
        Overview:
            Remove distinct slots from their places, and release empty pages. The rest of a line stays in place, with
            NOWHERE in the gaps.
        Returns:
            - pages (:obj:`np.ndarray`): The released pages.
        """
        places: Array = self.at[slots]
        places = places[places >= 0]
        if not len(places):
            return places
        self.at[slots] = NOWHERE
        self.held[places] = NOWHERE
        pages: Array = places >> PAGE_SHIFT
        np.subtract.at(self._num_held, pages, 1)
        pages = np.unique(pages)
        empty: Array = pages[self._num_held[pages] == 0]
        for owner, page in zip(self._owner[empty].tolist(), empty.tolist()):
            # It is nearly always the first page, because rows leave in the order in which they came.
            self._pages_of[owner].remove(page)
            if not self._pages_of[owner]:
                del self._pages_of[owner]
        self._unlink(empty)
        self._free = np.concatenate([self._free, empty])
        return empty

    def owners(self, places: Array) -> Array:
        """Return the groups that own these places."""
        owners: Array = self._owner[places >> PAGE_SHIFT]
        return owners

    def owner_of_pages(self, pages: Array) -> Array:
        owners: Array = self._owner[pages]
        return owners

    def slots(self, places: Array) -> Array:
        """Return the slots at these places, or NOWHERE."""
        return np.where(places >= 0, self.held[places], NOWHERE)

    def back(self, owners: Array, tails: Array, steps: Array) -> Array:
        """Walk back as ``walk(tails, -steps)`` does, in O(1) for any distance. Lines must have no gaps."""
        ordinal = (tails & _MASK) - steps
        hops = ordinal >> PAGE_SHIFT
        pages = [
            self._pages_of[owner][hop - 1] if -hop < len(self._pages_of[owner]) else NOWHERE
            for owner, hop in zip(owners.tolist(), hops.tolist())
        ]
        page = np.array(pages, np.int64)
        return np.where(page >= 0, (page << PAGE_SHIFT) + (ordinal & _MASK), NOWHERE)

    def walk(self, places: Array, steps: Array) -> Array:
        """Return the places so many steps on, or back if negative. NOWHERE beyond the ends of a line."""
        offset = (places & _MASK) + steps
        page, hops = places >> PAGE_SHIFT, offset >> PAGE_SHIFT
        for hop in range(int(hops.max(initial=0))):
            page = np.where(hops > hop, self.after[page], page)
        for hop in range(-int(hops.min(initial=0))):
            page = np.where(-hops > hop, self._before[page], page)
        return np.where((page >= 0) & (places >= 0), (page.astype(np.int64) << PAGE_SHIFT) + (offset & _MASK), NOWHERE)

    def windows(self, places: Array, length: int) -> Array:
        """Return the slots of ``length`` places from each of these on ``(length, B)``. NOWHERE if a place is empty."""
        first, page = places & _MASK, places >> PAGE_SHIFT
        num_pages = ((int(first.max(initial=0)) + length - 1) >> PAGE_SHIFT) + 1
        pages = np.empty((len(places), num_pages), np.int64)
        for number in range(num_pages):
            pages[:, number] = page
            page = self.after[page]
        # Gather whole contiguous pages first, and take entries from those: half the time of gathering single entries.
        held = self.held.reshape(-1, PAGE)[pages].reshape(-1)
        start = np.arange(len(places)) * (num_pages << PAGE_SHIFT) + first
        slots: Array = held.take(start + np.arange(length)[:, None])
        return slots

    def _take_pages(self, num_pages: int) -> Array:
        if num_pages > len(self._free):
            self._grow(max(num_pages - len(self._free), len(self._num_held), 16))
        split = len(self._free) - num_pages
        taken, self._free = self._free[split:], self._free[:split]
        return taken

    def _grow(self, num_pages: int) -> None:
        known = len(self._num_held)
        self.held = np.concatenate([self.held, np.full(num_pages << PAGE_SHIFT, NOWHERE, np.int32)])
        fill = np.full(num_pages, NOWHERE, np.int32)
        self.after, self._before = np.concatenate([self.after, fill]), np.concatenate([self._before, fill])
        self._num_held = np.concatenate([self._num_held, np.zeros(num_pages, np.int32)])
        self._owner = np.concatenate([self._owner, np.zeros(num_pages, np.int64)])
        self._free = np.concatenate([np.arange(known + num_pages - 1, known - 1, -1, dtype=np.int32), self._free])

    def _link(self, pages: Array, owners: Array, tails: Array, num_pages: Array, first_page: Array) -> None:
        if not len(pages):
            return
        grown = num_pages > 0
        firsts = first_page[grown]
        self._owner[pages] = np.repeat(owners, num_pages)
        for owner, first, count in zip(owners[grown].tolist(), firsts.tolist(), num_pages[grown].tolist()):
            self._pages_of.setdefault(owner, []).extend(pages[first : first + count].tolist())
        self._before[pages[1:]] = pages[:-1]
        self.after[pages[:-1]] = pages[1:]
        # At the border between two groups' pages, link the group's old tail page instead.
        tail_pages = np.where(tails >= 0, tails >> PAGE_SHIFT, NOWHERE)[grown]
        self.after[pages[np.append(firsts[1:] - 1, len(pages) - 1)]] = NOWHERE
        self._before[pages[firsts]] = tail_pages
        continued = tail_pages >= 0
        self.after[tail_pages[continued]] = pages[firsts[continued]]

    def _unlink(self, pages: Array) -> None:
        for there, back in ((self.after, self._before), (self._before, self.after)):
            neighbours = there[pages]
            back[neighbours[neighbours >= 0]] = NOWHERE
        self.after[pages] = self._before[pages] = NOWHERE


class Rows(NamedTuple):
    """Facts about new rows, one array each."""

    places: Array
    positions: Array  # The place in the run, from 1.
    is_known: Array  # True if the run began where an episode did.
    is_done: Array
    missed: Array
    segments: Array

    def at(self, which: Array) -> Rows:
        return Rows(*(array[which] for array in self))


class GroupStates:
    """
    Overview:
        Arrays by group number:

        * ``tails``: the last place of the group's line.
        * ``runs``: the number of rows in its current run, including rows that left. 0 after a done.
        * ``is_known``: True if that run began where an episode did.
        * ``missed``: the count of gaps in the rows of all groups when its last row came.
        * ``segments``: the number of breaks before its last row. See ``Breaks``.
        * ``num_rows``: the number of its rows that hold a slot.
    """

    def __init__(self) -> None:
        self._id_of: Dict[Any, int] = {}
        self._free: List[int] = []
        self.tails, self.runs = np.empty(0, np.int64), np.empty(0, np.int64)
        self.num_rows, self.missed = np.empty(0, np.int64), np.empty(0, np.int64)
        self.segments = np.empty(0, np.int64)
        self.is_known = np.empty(0, bool)

    def __len__(self) -> int:
        return len(self._id_of)

    def ids(self, values: Array) -> Array:
        """Return group numbers ``(n,)`` of values ``(n,)`` or ``(n, k)``."""
        distinct, inverse = np.unique(values, axis=0 if values.ndim > 1 else None, return_inverse=True)
        if len(self._free) < len(distinct):
            self._make_room(len(distinct))
        keys = distinct.tolist() if values.ndim == 1 else list(map(tuple, distinct.tolist()))
        ids = np.array([self._id(key) for key in keys], np.int64)
        each: Array = ids[inverse.reshape(-1)]
        return each

    def advance(self, ids: Array, counts: Array, lasts: Rows) -> None:
        """Add ``counts`` rows to these distinct groups. ``lasts`` are the last new rows of each."""
        self.tails[ids] = lasts.places
        self.num_rows[ids] += counts
        self.runs[ids] = np.where(lasts.is_done, 0, lasts.positions)
        self.is_known[ids] = lasts.is_known | lasts.is_done
        self.missed[ids], self.segments[ids] = lasts.missed, lasts.segments

    def count_down(self, ids: Array) -> None:
        """Subtract one row of a group for each time that it is listed."""
        np.subtract.at(self.num_rows, ids, 1)

    def lose_tails(self, ids: Array, pages: Array) -> None:
        """Reset the tails on these pages, which these groups released."""
        is_tail = self.tails[ids] // PAGE == pages
        self.tails[ids[is_tail]] = NOWHERE

    def _id(self, key: Any) -> int:
        found = self._id_of.get(key)
        if found is None:
            found = self._id_of[key] = self._free.pop()
            self.tails[found] = NOWHERE
            self.runs[found] = self.num_rows[found] = self.missed[found] = self.segments[found] = 0
            # If rows were missed before the group's first row, that row's ``missed`` differs from this 0 and breaks the
            # run.
            self.is_known[found] = True
        return found

    def _make_room(self, num_new: int) -> None:
        idle = [(key, i) for key, i in self._id_of.items() if self.num_rows[i] == 0]
        if len(idle) > max(_MAX_IDLE, len(self._id_of) // 2):
            # Drop the oldest ones. If one of them comes back later, it counts as new.
            for key, i in idle[: len(idle) // 2]:
                del self._id_of[key]
                self._free.append(i)
        if len(self._free) < num_new:
            self._grow(max(num_new, len(self.tails), 16))

    def _grow(self, num_more: int) -> None:
        known = len(self.tails)
        self._free += range(known + num_more - 1, known - 1, -1)
        fill = np.zeros(num_more, np.int64)
        self.tails = np.concatenate([self.tails, fill + NOWHERE])
        self.runs, self.num_rows = np.concatenate([self.runs, fill]), np.concatenate([self.num_rows, fill])
        self.missed, self.segments = np.concatenate([self.missed, fill]), np.concatenate([self.segments, fill])
        self.is_known = np.concatenate([self.is_known, fill.astype(bool)])
