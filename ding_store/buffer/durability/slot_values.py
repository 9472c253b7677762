"""One number per row that survives the process, such as a priority; beside the table, whose rows do not wait for it."""

from __future__ import annotations

import mmap
import os
from typing import Callable, Tuple, Union

import numpy as np

from ding_store import private
from ding_store.buffer.arrays import Array
from ding_store.buffer.durability.journal import reserve

#: A page in front, for numbers of the whole.
_START = 4096


class SlotValues:
    """
    Overview:
        Values by slot, each with the row that it is of: what is left of a row that had the slot before counts for
        nothing, so that new rows need not be written here.
    Arguments:
        - path (:obj:`str`): The file; made if there is none.
        - capacity (:obj:`int`): The number of slots.
        - is_ours (:obj:`Callable`): Whether the directory is still this process's: otherwise nothing is written.
    """

    # A new file is all zeros, and so are row numbers at the beginning: stored is the number plus one.

    def __init__(self, path: str, capacity: int, is_ours: Callable[[], bool] = lambda: True) -> None:
        self._path, self._is_ours = path, is_ours
        self._map(capacity)

    @property
    def step(self) -> int:
        """A count of their owner's."""
        return int(self._step[0])

    @step.setter
    def step(self, step: int) -> None:
        if self._is_ours():
            self._step[0] = step

    @property
    def largest(self) -> float:
        """The largest value that their owner has seen; 0 before it said so."""
        return float(self._largest[0])

    @largest.setter
    def largest(self, largest: float) -> None:
        if self._is_ours():
            self._largest[0] = largest

    def drop(self, slots: Array) -> None:
        """What is in these slots has no value."""
        if self._is_ours():
            self._follows[slots] = 0

    def set(self, slots: Array, rows: Array, values: Union[Array, float]) -> None:
        if not self._is_ours():
            return
        # The value first: a row with the value of another would be wrong, one without a value is just unknown.
        self._values[slots] = values
        self._follows[slots] = rows + 1

    def get(self, slots: Array, rows: Array) -> Tuple[Array, Array]:
        """Values of rows that live in these slots, and which of them have one that a sampler can use."""
        values = self._values[slots]
        # A file that was damaged must not keep anybody from sampling.
        return values, (self._follows[slots] == rows + 1) & np.isfinite(values) & (values >= 0)

    def successor(self, path: str) -> SlotValues:
        """A new file in which no row has a value: numbers that were others' come back, with the rows of a file."""
        made = SlotValues(path, len(self._follows), self._is_ours)
        made._follows[:] = 0
        made.step, made.largest = self.step, self.largest
        return made

    def become(self, successor: SlotValues) -> None:
        self.__dict__.update(vars(successor))

    def grow(self, capacity: int) -> None:
        """
        Overview:
            Have at least so many slots.
        Raises:
            - NotEnoughSpace: The disk is full; nothing changed.
        """
        if capacity > len(self._follows):
            self._map(capacity)

    def move(self, source: Array, target: Array) -> None:
        """Rows move from slots to other slots."""
        self.set(target, self._follows[source] - 1, self._values[source])

    def sync(self) -> None:
        self._region.flush()

    def _map(self, capacity: int) -> None:
        num_bytes = _START + 16 * capacity
        descriptor = private.opener(self._path, os.O_RDWR | os.O_CREAT)
        try:
            # All of it: a copy of the file may have holes, and on a full disk writing to one is a SIGBUS.
            reserve(descriptor, self._path, 0, num_bytes)
            self._region = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self._step = np.frombuffer(self._region, np.int64, 1)
        self._largest = np.frombuffer(self._region, np.float64, 1, 8)
        pairs = np.frombuffer(self._region, [('row', '<i8'), ('value', '<f8')], capacity, _START)
        self._follows, self._values = pairs['row'], pairs['value']
