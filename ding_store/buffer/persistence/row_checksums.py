"""Checksums of row numbers by slot. They detect a damaged row number, which would look like another row or none."""

from __future__ import annotations

import mmap
from typing import List

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.errors import CorruptPayload

#: Odd factors: every bit of a row number changes its checksum.
_OF_ROW, _OF_SLOT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_ROW_FACTOR, _SLOT_FACTOR = int(_OF_ROW), int(_OF_SLOT)
_ALL, _ONE = (1 << 64) - 1, {'i': np.int64(1), 'u': np.uint64(1)}
_BITS = np.uint64(1) << np.arange(64, dtype=np.uint64)


class RowChecksums:
    """
    Overview:
        A checksum per slot, of its row number. It is stored before the row number. Therefore the checksum of a live row
        is right after a kill at any time. The checksum of a free slot is ignored.
    Arguments:
        - region (:obj:`mmap.mmap`): At least 8 bytes per slot.
    """

    def __init__(self, region: mmap.mmap, capacity: int) -> None:
        self._region = region
        self._marks = np.frombuffer(region, np.uint64)[:capacity]
        self._is_synced = False

    def put(self, slots: Array, rows: Array) -> None:
        self._marks[slots] = _marks(slots, rows)
        self._is_synced = False

    def put_one(self, slot: int, row: int) -> None:
        """Store one checksum, without the fixed cost of array operations."""
        self._marks[slot] = ((row + 1) * _ROW_FACTOR ^ (slot + 1) * _SLOT_FACTOR) & _ALL
        self._is_synced = False

    def sync(self) -> None:
        if not self._is_synced:
            self._region.flush()
            self._is_synced = True

    def findings(self, numbers: Array) -> List[str]:
        """Return which slots have wrong checksums."""
        live = np.flatnonzero(numbers != EMPTY)
        wrong = live[self._marks[live] != _marks(live, numbers[live])]
        return [f'the row numbers of slots {wrong[:9].tolist()} are damaged'] if len(wrong) else []

    def repaired(self, numbers: Array, first_row: int, next_row: int, path: str) -> Array:
        """
        Overview:
            Return the row numbers as they were stored, and EMPTY for rows that do not count. Rows from ``next_row`` on
            were never committed. Rows below ``first_row`` were cleared. Nothing is changed.
        Raises:
            - CorruptPayload: A row number was damaged and has no unique original.
        """
        repaired = numbers.copy()
        used = np.flatnonzero(numbers != EMPTY)
        for slot in used[self._marks[used] != _marks(used, numbers[used])].tolist():
            repaired[slot] = self._original(slot, int(numbers[slot]), first_row, next_row, path)
        repaired[(repaired < first_row) | (repaired >= next_row)] = EMPTY
        return repaired

    def _original(self, slot: int, number: int, first_row: int, next_row: int, path: str) -> int:
        """Return the row number as it was before one bit was flipped, in itself or in its checksum."""
        stored, mark = np.array([number]).astype(np.uint64), self._marks[slot]
        candidates = stored ^ _BITS
        found = candidates[_marks(np.full(64, slot), candidates) == mark].astype(np.int64).tolist()
        if int(stored[0]) in (~_BITS).tolist():
            return EMPTY
        if bin(int(_marks(np.array([slot]), stored)[0]) ^ int(mark)).count('1') == 1:
            found.append(number)
        found = [row for row in found if row >= 0]
        if not found and number >= next_row:
            return EMPTY  # A power cut before the commit may keep the row number and lose the checksum.
        if len(found) != 1:
            raise CorruptPayload(
                f'{path!r} was damaged: slot {slot} holds the number {number}, which is not what was stored. Restore '
                'the directory from a copy, or remove it to start again.'
            )
        return int(found[0])


def _marks(slots: Array, rows: Array) -> Array:
    """Compute checksums. Both arrays have integers of 64 bits, signed or unsigned."""
    return (rows + _ONE[rows.dtype.kind]).view(np.uint64) * _OF_ROW ^ (slots + _ONE['i']).view(np.uint64) * _OF_SLOT
