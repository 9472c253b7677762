"""The orders in which objects leave a full directory: fifo, lru and s3fifo.

An object's *stamp* is the modification time of its file, a number that needs no other place and that no crash tears. It
is when the object was stored, by a clock that only runs forward. ``lru`` sets it again at each read. ``s3fifo`` counts
reads in its last two bits. It adds ``MAIN`` once the object is in the main queue.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Callable, Dict, Iterator, List, NamedTuple, Type

#: Added to the stamp of an object in the main queue of ``s3fifo``: 36 years in nanoseconds.
MAIN = 1 << 60
#: The bits of a stamp that count reads, and the highest count.
_READS = 3
#: Share of the bytes that the small queue of ``s3fifo`` may have.
_SMALL = 0.1


class Found(NamedTuple):
    """An object in a directory, as it was when the directory was listed."""

    stamp: int
    name: str
    num_bytes: int


class Listing(NamedTuple):
    """A listed directory, as an order sees it."""

    objects: List[Found]
    #: Returns the stamp of an object now. -1: it is gone.
    stamp_of: Callable[[str], int]
    #: Sets the stamp of an object that may be gone.
    restamp: Callable[[str, int], None]
    #: Returns the bytes that were stored since the directory was listed.
    arrived: Callable[[], int]


class Order(ABC):
    """Base of the orders. They keep no state but the stamps."""

    def first_stamp(self, was_evicted: bool) -> int:
        """Return the stamp of an object that is stored now. ``was_evicted``: it was here not long ago."""
        return now()

    def stamp_at_read(self, stamp: int) -> int:
        """Return the new stamp of an object that is read. The same number: it stays."""
        return stamp

    @abstractmethod
    def victims(self, listing: Listing) -> Iterator[Found]:
        """Yield the objects to evict, the first one first. The caller skips those that it cannot evict."""


class Fifo(Order):
    """The object that was stored first leaves first."""

    def victims(self, listing: Listing) -> Iterator[Found]:
        for found in sorted(listing.objects):
            if listing.stamp_of(found.name) == found.stamp:
                yield found


class Lru(Fifo):
    """The object that was not read for the longest time leaves first. One with a newer stamp was read since."""

    def stamp_at_read(self, stamp: int) -> int:
        return now()


class S3Fifo(Order):
    """
    Overview:
        Two queues (Yang et al., SOSP 2023). A new object is in the small one, with a tenth of the bytes. An object that
        was read twice there moves to the main queue, and others leave. In the main queue, an object goes back to the
        end for each read. An object that was evicted not long ago enters the main queue at once.
    """

    def first_stamp(self, was_evicted: bool) -> int:
        return (now() & ~_READS) + (MAIN if was_evicted else 0)

    def stamp_at_read(self, stamp: int) -> int:
        return stamp if stamp & _READS == _READS else stamp + 1

    def victims(self, listing: Listing) -> Iterator[Found]:
        ordered = sorted(listing.objects)
        small = deque(found for found in ordered if found.stamp < MAIN)
        main = deque(found for found in ordered if found.stamp >= MAIN)
        small_bytes = sum(found.num_bytes for found in small)
        limit = _SMALL * sum(found.num_bytes for found in ordered)
        has_left = False  # one of the objects that were yielded
        while small or main:
            is_small = small_bytes + listing.arrived() > limit or not main
            if is_small and not small:
                if has_left:
                    return  # What has arrived since is next: list the directory again.
                is_small = False
            found = (small if is_small else main).popleft()
            small_bytes -= found.num_bytes if is_small else 0
            stamp = listing.stamp_of(found.name)
            reads = stamp & _READS
            if stamp < 0 or (is_small and stamp >= MAIN):
                continue
            if reads <= (1 if is_small else 0):
                yield found
                has_left = has_left or listing.stamp_of(found.name) < 0
            else:
                left = 0 if is_small else reads - 1
                listing.restamp(found.name, MAIN + (now() & ~_READS) + left)
                main.append(found)


ORDERS: Dict[str, Type[Order]] = {'fifo': Fifo, 'lru': Lru, 's3fifo': S3Fifo}


def now() -> int:
    """Return nanoseconds since the host was started. All its processes have this clock."""
    return time.monotonic_ns()
