"""Rows of many groups, each in its own order: pages of slots, linked, so that a step along a group costs O(1)."""

from __future__ import annotations

from typing import Dict, List

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import PAGE, PAGE_SHIFT

_MASK = PAGE - 1

NOWHERE = -1


class LinkedPages:
    """
    Overview:
        Every group has a line of slots that grows at its tail. A place is an entry of some page; ``at[slot]`` says
        where a slot is. Vectorised over groups and slots; the caller has the table's index locked.

        * ``held`` holds the entries; the last page is never used and holds NOWHERE, so that a place on page -1,
          which is what lies beyond the ends of a line, needs no special case.
        * ``after``, ``_before`` link the pages, with NOWHERE as their last item for the same reason.
    Arguments:
        - capacity (:obj:`int`): Slots are below it.
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
        #: Group -> its pages, first to last.
        self._pages_of: Dict[int, List[int]] = {}

    def append(self, owners: Array, tails: Array, counts: Array, slots: Array) -> Array:
        """
        Overview:
            Append slots to lines.
        Arguments:
            - owners (:obj:`np.ndarray`): Distinct groups ``(k,)``.
            - tails (:obj:`np.ndarray`): The last place of each one's line ``(k,)``, NOWHERE for a new one.
            - counts (:obj:`np.ndarray`): How many slots each one gets ``(k,)``, at least 1.
            - slots (:obj:`np.ndarray`): The slots ``(n,)``, one group's after the other's. They are nowhere now.
        Returns:
            - places (:obj:`np.ndarray`): Where they are now ``(n,)``.
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
            Distinct slots leave their places; pages without any go back. What is left of a line stays as it is, with
            NOWHERE between.
        Returns:
            - pages (:obj:`np.ndarray`): The pages that went back.
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
            # Nearly always the first: rows leave in the order in which they came.
            self._pages_of[owner].remove(page)
            if not self._pages_of[owner]:
                del self._pages_of[owner]
        self._unlink(empty)
        self._free = np.concatenate([self._free, empty])
        return empty

    def owners(self, places: Array) -> Array:
        """The groups whose places these are."""
        owners: Array = self._owner[places >> PAGE_SHIFT]
        return owners

    def owner_of_pages(self, pages: Array) -> Array:
        owners: Array = self._owner[pages]
        return owners

    def slots(self, places: Array) -> Array:
        """What is at places: slots, or NOWHERE."""
        return np.where(places >= 0, self.held[places], NOWHERE)

    def back(self, owners: Array, tails: Array, steps: Array) -> Array:
        """As ``walk(tails, -steps)`` for far steps: O(1) each, along lines without holes."""
        ordinal = (tails & _MASK) - steps
        hops = ordinal >> PAGE_SHIFT
        pages = [
            self._pages_of[owner][hop - 1] if -hop < len(self._pages_of[owner]) else NOWHERE
            for owner, hop in zip(owners.tolist(), hops.tolist())
        ]
        page = np.array(pages, np.int64)
        return np.where(page >= 0, (page << PAGE_SHIFT) + (ordinal & _MASK), NOWHERE)

    def walk(self, places: Array, steps: Array) -> Array:
        """Places so many steps further, or back where negative; NOWHERE beyond the ends of the line."""
        offset = (places & _MASK) + steps
        page, hops = places >> PAGE_SHIFT, offset >> PAGE_SHIFT
        for hop in range(int(hops.max(initial=0))):
            page = np.where(hops > hop, self.after[page], page)
        for hop in range(-int(hops.min(initial=0))):
            page = np.where(-hops > hop, self._before[page], page)
        return np.where((page >= 0) & (places >= 0), (page.astype(np.int64) << PAGE_SHIFT) + (offset & _MASK), NOWHERE)

    def windows(self, places: Array, length: int) -> Array:
        """The slots of ``length`` consecutive places from each of these on ``(length, B)``; NOWHERE where is none."""
        first, page = places & _MASK, places >> PAGE_SHIFT
        num_pages = ((int(first.max(initial=0)) + length - 1) >> PAGE_SHIFT) + 1
        pages = np.empty((len(places), num_pages), np.int64)
        for number in range(num_pages):
            pages[:, number] = page
            page = self.after[page]
        # Whole pages first, which are contiguous, and then from those: half the time of single entries.
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
        # Where one group's pages end and another's begin: the old tail's page instead.
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
