"""Free space of a file that holds items of varying sizes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import accumulate
from typing import Dict, Iterable, Iterator, List, Sequence, Tuple


class Extents:
    """
    Overview:
        The free extents between items in use, and all space behind the last item. Allocation is next fit: items mostly
        leave in the order of their arrival. The free space then moves around the file in one piece, and is found at
        once.
    Arguments:
        - used (:obj:`Iterable`): (start, number of bytes) of the items in use, in any order.
    """

    def __init__(self, used: Iterable[Tuple[int, int]] = ()) -> None:
        self._starts: List[int] = []
        self._end_of: Dict[int, int] = {}
        self._next = 0
        #: Nothing is in use from this position on.
        self.end = 0
        for start, num_bytes in sorted(used):
            if start > self.end:
                self._add(self.end, start)
            self.end = max(self.end, start + num_bytes)

    def allocate(self, num_bytes: int) -> int:
        """Allocate ``num_bytes`` bytes and return their start."""
        start = self._next
        if self._end_of.get(start, 0) - start >= num_bytes:  # It continues the last allocation, as it does mostly.
            self._shorten(start, start + num_bytes)
            self._next = start + num_bytes
            return start
        for start in self._from_next():
            if self._end_of[start] - start >= num_bytes:
                self._shorten(start, start + num_bytes)
                self._next = start + num_bytes
                return start
        start, self._next = self.end, 0
        self.end += num_bytes
        return start

    def allocate_each(self, sizes: Sequence[int]) -> List[int]:
        """
        Overview:
            Allocate space for several items, in one piece if the next free extent is large enough. Return their starts.
            An item of no bytes starts at 0.
        """
        total, free = sum(sizes), next(self._from_next(), None)
        if len(sizes) > 1 and total and free is not None and self._end_of[free] - free >= total:
            starts = accumulate(sizes, initial=self.allocate(total))
            return [start if size else 0 for start, size in zip(starts, sizes)]
        return [self.allocate(size) if size else 0 for size in sizes]

    def free(self, start: int, num_bytes: int) -> None:
        """Free an allocation, and merge it with its free neighbours."""
        end = start + num_bytes
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == end:
            end = self._remove(place)
        before = self._starts[place - 1] if place > 0 else -1
        if before >= 0 and self._end_of[before] == start:
            if end != self.end:
                self._end_of[before] = end
                return
            self._remove(place - 1)
            start = before
        if end == self.end:
            self.end = start
        else:
            self._add(start, end)

    def _from_next(self) -> Iterator[int]:
        first = bisect_right(self._starts, self._next)
        first -= first > 0 and self._end_of[self._starts[first - 1]] > self._next
        yield from self._starts[first:]
        yield from self._starts[:first]

    def _add(self, start: int, end: int) -> None:
        insort(self._starts, start)
        self._end_of[start] = end

    def _remove(self, place: int) -> int:
        return self._end_of.pop(self._starts.pop(place))

    def _shorten(self, start: int, new_start: int) -> None:
        place, end = bisect_left(self._starts, start), self._end_of.pop(start)
        if new_start < end:
            self._starts[place], self._end_of[new_start] = new_start, end
        else:
            del self._starts[place]
