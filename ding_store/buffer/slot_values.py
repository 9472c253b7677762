"""One number per row that survives the process, such as a priority; beside the table, whose rows do not wait for it."""

from __future__ import annotations

import mmap
import os
from typing import Tuple

import numpy as np

from ding_store.buffer.arrays import Array
from ding_store.buffer.journal import reserve

#: A page in front, for one number of the whole.
_START = 4096


class SlotValues:
    """
    Overview:
        Values by slot, each with the row that it is of: what is left of a row that had the slot before counts for
        nothing, so that new rows need not be written here.
    Arguments:
        - path (:obj:`str`): The file; made if there is none.
        - capacity (:obj:`int`): The number of slots.
    """

    # A new file is all zeros, and so are row numbers at the beginning: stored is the number plus one.

    def __init__(self, path: str, capacity: int) -> None:
        self._path = path
        self._map(capacity)

    @property
    def step(self) -> int:
        """A count of their owner's."""
        return int(self._step[0])

    @step.setter
    def step(self, step: int) -> None:
        self._step[0] = step

    def set(self, slots: Array, rows: Array, values: Array) -> None:
        # The value first: a row with the value of another would be wrong, one without a value is just unknown.
        self._values[slots] = values
        self._follows[slots] = rows + 1

    def get(self, slots: Array, rows: Array) -> Tuple[Array, Array]:
        """Values of rows that live in these slots, and which of them have one."""
        return self._values[slots], self._follows[slots] == rows + 1

    def resize(self, capacity: int, source: Array, target: Array) -> None:
        """Rows move from slots to other slots, of which there are so many from now on."""
        self.set(target, self._follows[source] - 1, self._values[source])
        self._map(capacity)

    def sync(self) -> None:
        self._region.flush()

    def _map(self, capacity: int) -> None:
        num_bytes = _START + 16 * capacity
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size < num_bytes:
                reserve(descriptor, self._path, size, num_bytes - size)
            self._region = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self._step = np.frombuffer(self._region, np.int64, 1)
        pairs = np.frombuffer(self._region, [('row', '<i8'), ('value', '<f8')], capacity, _START)
        self._follows, self._values = pairs['row'], pairs['value']
