"""A file with one number per row that survives the process, such as a priority. Commits do not include it."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Tuple, Union

import numpy as np

from ding_store import private_files
from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.journal import reserve

#: The first page, for values of the whole file.
_START = 4096
#: Its words: the owner's count and largest value, whether a store is in progress, and a checksum of the first two.
_STEP, _LARGEST, _STORING, _CHECK = range(4)
#: All bits are set, so that a single flipped bit does not look like it.
_YES = np.uint64((1 << 64) - 1)
#: The layout of a word: 48 bits for the row number plus one. Above them is a checksum of that and the value.
_ROW = np.uint64((1 << 48) - 1)
_VALUE, _BITS = struct.Struct('<d'), struct.Struct('<Q')


class SlotValues:
    """
    Overview:
        Values by slot, each stored with its row number. A value left by an earlier row of the slot is ignored, so
        that a write that a kill prevented does no harm.
    Arguments:
        - path (:obj:`str`): The file. It is created if there is none.
        - capacity (:obj:`int`): The number of slots.
        - is_ours (:obj:`Callable`): Returns whether this process still owns the directory. If not, nothing is written.
        - report (:obj:`Callable`): Called with a sentence about damage. The damaged value then counts as unknown.
    """

    # A new file is all zeros. Row numbers are stored plus one, so that zero means no row.
    _region: mmap.mmap
    _head: Array
    _follows: Array
    _values: Array

    def __init__(
        self,
        path: str,
        capacity: int,
        is_ours: Callable[[], bool] = lambda: True,
        report: Callable[[str], None] = lambda finding: None,
    ) -> None:
        self._path, self._is_ours, self._report = path, is_ours, report
        self._map(capacity)
        if not is_ours():
            return
        if self._head[_STORING] == _YES:
            # A kill during a store may leave the old or the new value with the checksum of the other.
            self._sum_again()
        elif self._head[_CHECK] != self._checksum() or not (np.isfinite(self.largest) and self.largest >= 0):
            report(f'{path!r} was damaged in its first page: the largest priority and the step are unknown')
            self._head[_STEP] = self._head[_LARGEST] = 0
        self._head[_CHECK], self._head[_STORING] = self._checksum(), 0

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        """Return None: a copied sampler has no files."""

    def _sum_again(self) -> None:
        """Compute the checksums of all values. It may be repeated."""
        rows = self._follows & _ROW
        self._follows[:] = _words(rows, self._values)

    @property
    def step(self) -> int:
        """A count that belongs to the owner of the values."""
        return int(self._head.view(np.int64)[_STEP])

    @step.setter
    def step(self, step: int) -> None:
        if self._is_ours():
            with self._storing():
                self._head.view(np.int64)[_STEP] = step
                self._head[_CHECK] = self._checksum()

    @property
    def largest(self) -> float:
        """The largest value that the owner has seen, or 0 before the owner stored it."""
        return float(self._head.view(np.float64)[_LARGEST])

    @largest.setter
    def largest(self, largest: float) -> None:
        if self._is_ours():
            with self._storing():
                self._head.view(np.float64)[_LARGEST] = largest
                self._head[_CHECK] = self._checksum()

    def drop(self, slots: Array) -> None:
        """Remove the values of these slots."""
        if self._is_ours():
            self._follows[slots] = 0

    def set(self, slots: Array, rows: Array, values: Union[Array, float]) -> None:
        if not self._is_ours():
            return
        if len(slots) == 1:
            self._set_one(int(slots[0]), int(rows[0]) + 1, float(np.asarray(values).item()))
            return
        stored = np.empty(len(slots), np.float64)
        stored[:] = values
        words = _words((rows + 1).view(np.uint64), stored)
        before, self._head[_STORING] = self._head[_STORING], _YES
        # Store the value first: a row with the value of another row would be wrong, a row without a value is just
        # unknown.
        self._values[slots] = stored
        self._follows[slots] = words
        self._head[_STORING] = before

    def _set_one(self, slot: int, row: int, value: float) -> None:
        # Same result as ``set`` without the fixed cost of array operations. Every push of one element runs this.
        (bits,) = _BITS.unpack(_VALUE.pack(value))
        mixed = row ^ bits
        mixed ^= mixed >> 32
        mixed ^= mixed >> 16
        before, self._head[_STORING] = self._head[_STORING], _YES
        self._values[slot] = value
        self._follows[slot] = row | (~mixed & 0xFFFF) << 48 if row else 0
        self._head[_STORING] = before

    def get(self, slots: Array, rows: Array) -> Tuple[Array, Array]:
        """Return the values of live rows in these slots, and whether each has a value that a sampler can use."""
        values, words = self._values[slots], self._follows[slots]
        is_whole, is_theirs = words == _words(words & _ROW, values), (words & _ROW) == rows + 1
        if not is_whole.all():
            damaged = rows[~is_whole][:9].tolist()
            self._report(f'{self._path!r} was damaged: its values of rows {damaged} are unknown')
        return values, is_theirs & is_whole & np.isfinite(values) & (values >= 0)

    def findings(self) -> List[str]:
        """Return the differences between the file and what was written."""
        if self._head[_STORING] == _YES:
            return []
        is_whole = self._follows == _words(self._follows & _ROW, self._values)
        found = (
            [] if is_whole.all() else [f'{self._path!r} is damaged at slots {np.flatnonzero(~is_whole)[:9].tolist()}']
        )
        return found + (
            [] if self._head[_CHECK] == self._checksum() else [f'{self._path!r} is damaged in its first page']
        )

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """
        Flag a store of a value and its checksum as in progress. After an interruption the flag stays, as after a kill.
        """
        before = self._head[_STORING]
        self._head[_STORING] = _YES
        yield
        self._head[_STORING] = before

    def _checksum(self) -> Any:
        # It is 0 for a new file. A flipped bit in any of the words changes one side of the comparison.
        return self._head[_STEP] ^ self._head[_LARGEST]

    def successor(self, path: str) -> SlotValues:
        """
        Return a new file in which no row has a value. For a replacement of all rows, after which row numbers may
        repeat.
        """
        made = SlotValues(path, len(self._follows), self._is_ours, self._report)
        made._follows[:] = 0
        made.step, made.largest = self.step, self.largest
        return made

    def become(self, successor: SlotValues) -> None:
        """Continue with the file of a ``successor``."""
        self._path, self._region, self._head = successor._path, successor._region, successor._head
        self._follows, self._values = successor._follows, successor._values

    def grow(self, capacity: int) -> None:
        """
        Overview:
            Extend the file to at least ``capacity`` slots.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        if capacity > len(self._follows):
            self._map(capacity)

    def move(self, source: Array, target: Array) -> None:
        """Copy the values of rows from ``source`` slots to ``target`` slots."""
        self.set(target, (self._follows[source] & _ROW).astype(np.int64) - 1, self._values[source])

    def sync(self) -> None:
        self._region.flush()

    def _map(self, capacity: int) -> None:
        num_bytes = _START + 16 * capacity
        descriptor = private_files.opener(self._path, os.O_RDWR | os.O_CREAT)
        try:
            # Reserve all of it: a copy of the file may have holes, and on a full disk a write to a hole raises SIGBUS.
            reserve(descriptor, self._path, 0, num_bytes)
            self._region = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self._head = np.frombuffer(self._region, np.uint64, 4)
        pairs = np.frombuffer(self._region, [('row', '<u8'), ('value', '<f8')], capacity, _START)
        self._follows, self._values = pairs['row'], pairs['value']


def _words(rows: Array, values: Array) -> Array:
    """
    Return row numbers plus one, combined with checksums. The checksum detects any single flipped bit in row, value or
    checksum.
    """
    halves = (rows ^ np.ascontiguousarray(values).view(np.uint64)).view(np.uint16).reshape(-1, 4)
    checks = np.bitwise_xor.reduce(halves, axis=1, initial=0xFFFF)
    words: Array = rows | checks.astype(np.uint64) << np.uint64(48)
    if not rows.all():
        words[rows == 0] = 0
    return words
