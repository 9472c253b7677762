"""Ways from a producer's process to a collated batch in the consumer's: the store's, and their limit.

A *chunk* is what the producer sends at once: columns of some rows, numbered consecutively. Both sides of a way are made
from the same address, each in its own process.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Deque, Dict, List, Mapping, Optional

import numpy as np

from benchmarks.workloads import Leaves
from ding_store.compiled import FAR_BYTES, copy_past_caches, is_far
from ding_store.storage import Reader, open_store
from ding_store.storage.base import Entry

Columns = Mapping[str, np.ndarray]
#: Function with the arguments of np.copyto.
Copy = Callable[[np.ndarray, np.ndarray], None]
STREAM = 'bench'
#: Entries are acked after this many entries or bytes, because an ack is a round trip.
ACK_ENTRIES, ACK_BYTES = 32, 4 << 20


@dataclass(frozen=True)
class Element:
    """
    One row's leaves, the rows per chunk, and the rows per batch. ``number`` names an int64 leaf with the row number.
    """

    name: str
    leaves: Leaves
    chunk: int
    batch: int
    number: str

    @property
    def row_bytes(self) -> int:
        return sum(int(np.dtype(dtype).itemsize * np.prod(shape, dtype=int)) for dtype, shape in self.leaves.values())


class Timeout(Exception):
    """No data came in time."""


class Path(ABC):
    """
    Overview:
        One way. The consumer's process calls ``consume`` first, then the producer's calls ``produce``.
    Arguments:
        - address (:obj:`str`): A private directory.
    """

    title: str
    needs = ''  # a module that must be installed
    is_queue = True  # True if a sender need not wait for the receiver

    def __init__(self, element: Element, address: str) -> None:
        self.element = element
        self.address = address

    @abstractmethod
    def consume(self) -> None:
        """Make this the consumer's side."""

    @abstractmethod
    def produce(self) -> None:
        """Make this the producer's side."""

    @abstractmethod
    def send(self, columns: Columns) -> None:
        """Send one chunk."""

    @abstractmethod
    def batch(self, timeout_s: float) -> Columns:
        """
        Overview:
            Return the next rows, collated.
        Raises:
            - Timeout: They did not come in time.
        """

    def chunk(self, timeout_s: float) -> Columns:
        """Receive one chunk in place if the way can, for latency. Otherwise a batch, which then is one chunk."""
        return self.batch(timeout_s)

    def close(self) -> None:  # noqa: B027 some hold nothing
        """Close this side."""


class Outputs:
    """
    Overview:
        Two batches in warm memory, filled in turn: the caller uses one while the other is filled.
    Arguments:
        - copy (:obj:`Optional[Copy]`): Function that copies. By default as the table copies.
    """

    def __init__(self, element: Element, copy: Optional[Copy] = None) -> None:
        self._copy = copy or _copy_to(element.batch * element.row_bytes >= FAR_BYTES)
        self._rows = element.batch
        self._batches: List[Dict[str, np.ndarray]] = [
            {name: np.zeros((element.batch, *shape), dtype) for name, (dtype, shape) in element.leaves.items()}
            for _ in range(2)
        ]
        self._filled = 0

    @property
    def is_full(self) -> bool:
        return self._filled == self._rows

    def add(self, columns: Columns, start: int) -> int:
        """Copy rows from ``start`` on, as many as there is room for. Return how many."""
        begin, batch = self._filled, self._batches[0]
        count = 0
        for name, column in batch.items():
            source = columns[name][start : start + self._rows - begin]
            count = len(source)
            self._copy(column[begin : begin + count], source)
        self._filled += count
        return count

    def take(self) -> Columns:
        batch = self._batches.pop(0)
        self._batches.append(batch)
        self._filled = 0
        return batch


class Ours(Path):
    """``Store.append`` to ``Reader.read``, and one copy into the batch."""

    title = 'ding_store'
    plane = 'auto'

    def consume(self) -> None:
        self._open()
        self._reader = Reader(self._store, STREAM, 'consumer')
        self._outputs = Outputs(self.element)
        self._entries: Deque[Entry] = deque()
        self._start = 0  # rows of the first entry that are already copied
        self._unacked = 0
        self._ack_every = max(1, min(ACK_ENTRIES, ACK_BYTES // (self.element.row_bytes * self.element.chunk)))

    def produce(self) -> None:
        self._open()

    def send(self, columns: Columns) -> None:
        self._store.append(STREAM, {}, columns)

    def batch(self, timeout_s: float) -> Columns:
        outputs = self._outputs
        while not outputs.is_full:
            entry = self._first(timeout_s)
            self._start += outputs.add(entry.arrays, self._start)
            if self._start == len(entry.arrays[self.element.number]):
                self._done()
        return outputs.take()

    def chunk(self, timeout_s: float) -> Columns:
        entry = self._first(timeout_s)
        self._done()
        return entry.arrays

    def close(self) -> None:
        if hasattr(self, '_reader'):
            self._store.retire()
        self._store.close()

    def _open(self) -> None:
        self._store = open_store(f'embedded://{self.address}', 'bench', host_plane=self.plane)

    def _first(self, timeout_s: float) -> Entry:
        if not self._entries:
            deadline = time.monotonic() + timeout_s
            while not self._entries:
                if time.monotonic() > deadline:
                    raise Timeout
                self._entries.extend(self._reader.read(timeout_s=timeout_s))
        return self._entries[0]

    def _done(self) -> None:
        entry = self._entries.popleft()
        self._start = 0
        self._unacked += 1
        if self._unacked >= self._ack_every:
            self._reader.ack(entry.id, wait=False)
            self._unacked = 0


class OursOnWire(Ours):
    """The store between hosts: every byte goes through the server."""

    title = 'ding_store (wire)'
    plane = 'off'


class OursThroughTable(Ours):
    """The store and the learner's replay: each chunk is pushed, and each row is sampled once, in order."""

    title = 'ding_store (table)'
    needs = 'ding'
    #: Size of the table: more than caches hold, with a maximum number of rows if they are small.
    table_bytes, max_rows = 256 << 20, 100_000

    def consume(self) -> None:
        from ding_store.buffer import Fifo, StoreBuffer

        super().consume()
        rows = min(self.table_bytes // self.element.row_bytes, self.max_rows)
        self._buffer = StoreBuffer(max(rows, 4 * self.element.batch), sampler=Fifo())
        self._num_waiting = 0  # rows that are not sampled yet

    def batch(self, timeout_s: float) -> Columns:
        while self._num_waiting < self.element.batch:
            self._num_waiting += len(self._buffer.extend(self._first(timeout_s).arrays))
            self._done()
        self._num_waiting -= self.element.batch
        data = self._buffer.sample_batch(self.element.batch).data
        return {name: data[name].numpy() for name in self.element.leaves}

    def chunk(self, timeout_s: float) -> Columns:
        return self.batch(timeout_s)

    def close(self) -> None:
        if hasattr(self, '_buffer'):
            self._buffer.close()
        super().close()


class BareRing(Path):
    """The limit: slots in shared memory and two counters that both sides poll. There are no notifications."""

    title = 'bare ring'
    is_queue = False
    ring_bytes = 16 << 20

    def consume(self) -> None:
        self._open('w+')
        self._outputs = Outputs(self.element)
        self._start = 0

    def produce(self) -> None:
        self._open('r+')

    def send(self, columns: Columns) -> None:
        sent = int(self._sent[0])
        while sent - int(self._taken[0]) >= len(self._slots):
            os.sched_yield()
        for name, column in self._slots[sent % len(self._slots)].items():
            self._copy(column, columns[name])
        self._sent[0] = sent + 1

    def batch(self, timeout_s: float) -> Columns:
        while not self._outputs.is_full:
            self._start += self._outputs.add(self._next(timeout_s), self._start)
            if self._start == self.element.chunk:
                self._start = 0
                self._taken[0] += 1
        return self._outputs.take()

    def _open(self, mode: Any) -> None:
        rows = self.element.chunk
        sizes = {name: rows * _bytes(leaf) for name, leaf in self.element.leaves.items()}
        slot_bytes = sum(-(-size // 64) * 64 for size in sizes.values())
        num_slots = max(4, self.ring_bytes // slot_bytes)
        self._copy = _copy_to(is_far(slot_bytes, num_slots * slot_bytes))
        ring = np.memmap(os.path.join(self.address, 'ring'), np.uint8, mode, shape=(4096 + num_slots * slot_bytes,))
        self._sent, self._taken = ring[:8].view(np.uint64), ring[128:136].view(np.uint64)
        self._slots: List[Dict[str, np.ndarray]] = []
        at = 4096
        for _ in range(num_slots):
            slot: Dict[str, np.ndarray] = {}
            for name, (dtype, shape) in self.element.leaves.items():
                slot[name] = np.ndarray((rows, *shape), dtype, ring, at)
                at += -(-sizes[name] // 64) * 64
            self._slots.append(slot)

    def _next(self, timeout_s: float) -> Columns:
        taken, deadline = int(self._taken[0]), time.monotonic() + timeout_s
        while int(self._sent[0]) <= taken:
            if time.monotonic() > deadline:
                raise Timeout
            os.sched_yield()
        return self._slots[taken % len(self._slots)]


def _copy_to(is_far: bool) -> Copy:
    return copy_past_caches if is_far else np.copyto


def _bytes(leaf: Any) -> int:
    dtype, shape = leaf
    return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=int))
