"""Batches of a data set in the order of epochs, which a thread reads ahead."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from concurrent.futures import Future, wait
from typing import Any, Deque, Dict, Generator, Iterator, List, Optional, Protocol, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import TrainBatch, mask_of
from ding_store.buffer.table.outputs import Output
from ding_store.columns.ragged import Ragged
from ding_store.datasets.order import EpochOrder
from ding_store.datasets.segment import finish_reads
from ding_store.errors import ConfigError

#: The rows of a batch, their columns, and the output that reuses their memory.
Batch = Tuple[Array, Dict[str, Array], Output]
#: How often a thread whose queue is full looks whether its reader is gone.
_LOOK_S = 0.2


class Rows(Protocol):
    """The calls of a ``DataSet`` that read rows."""

    is_direct: bool

    def load_more(self, num_rows: int) -> None: ...

    def gather(self, rows: Array) -> Tuple[Dict[str, Array], Output]: ...

    def start(self, rows: Array, slot: int) -> Tuple[List[Any], List[Future]]: ...

    def decode(self, records: List[Any], rows: Array) -> Tuple[Dict[str, Array], Output]: ...

    def collated(self, columns: Dict[str, Array], output: Output) -> ttorch.Tensor: ...

    def listed(self, batch: ttorch.Tensor, columns: Dict[str, Array]) -> TrainBatch: ...


class Epochs:
    """
    Overview:
        An iterator over collated batches, see ``DataSet.epochs``. A thread begins to read when it is created. ``close``
        or the end of the last epoch stops the thread. It also works as a context manager.
    Attributes:
        - num_batches (:obj:`int`): Batches of an epoch.
        - epoch (:obj:`int`): The epoch of the last batch.
        - position (:obj:`int`): Batches so far: the ``start`` with which another iterator goes on.
        - rows (:obj:`np.ndarray`): The rows of the last batch.
        - lengths (:obj:`Mapping`): Ragged leaf -> its lengths in the last batch, ``(B,)``, see ``mask``.
    """

    def __init__(self, data_set: Rows, order: EpochOrder, prefetch: int, num_epochs: Optional[int], start: int) -> None:
        if prefetch < 1 or start < 0 or (num_epochs is not None and num_epochs < 1):
            raise ConfigError(
                f'prefetch ({prefetch}) and num_epochs ({num_epochs}) must be at least 1, and start ({start}) at least '
                '0'
            )
        self._data_set = data_set
        self.num_batches = order.num_batches
        self.position, self.epoch = start, start // order.num_batches
        self.rows: Optional[Array] = None
        self._batch: Any = None
        self._columns: Any = {}
        # A window of batches is one item: handing each over by itself takes as long as gathering it.
        self._queue: queue.Queue = queue.Queue(1)
        self._window: Deque[Any] = deque()
        self._closed = threading.Event()
        last = None if num_epochs is None else num_epochs * order.num_batches
        arguments = (data_set, order, prefetch, start, last, self._queue, self._closed)
        self._thread = threading.Thread(target=_read, args=arguments, name='ding-store-epochs', daemon=True)
        self._thread.start()
        # The thread does not refer to this object: it ends when the object is dropped.
        weakref.finalize(self, self._closed.set)

    def __iter__(self) -> Iterator[ttorch.Tensor]:
        return self

    def __next__(self) -> ttorch.Tensor:
        """
        Raises:
            - StopIteration: The last epoch is over, or the iterator was closed.
            - OSError: The disk could not be read.
        """
        if self._closed.is_set():
            raise StopIteration
        if not self._window:
            found = self._queue.get()
            if found is None or isinstance(found, BaseException):
                self._closed.set()
                raise StopIteration if found is None else found
            self._window.extend(found)
        self.rows, self._columns, output = self._window.popleft()
        self.epoch = self.position // self.num_batches
        self.position += 1
        self._batch = self._data_set.collated(self._columns, output)
        return self._batch

    @property
    def lengths(self) -> Dict[str, Array]:
        return {name: column.lengths for name, column in self._columns.items() if isinstance(column, Ragged)}

    def mask(self, name: str) -> torch.Tensor:
        """
        Overview:
            Return where a ragged leaf of the last batch has values, bool ``(B, longest)``: False at padding.
        Raises:
            - KeyError: The leaf is not ragged.
        """
        return mask_of(self.lengths, name)

    def as_list(self) -> TrainBatch:
        """Return the last batch as a ``TrainBatch``, which is also the list of its elements."""
        return self._data_set.listed(self._batch, self._columns)

    def close(self) -> None:
        """Stop the thread. Batches stay valid."""
        self._closed.set()
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Epochs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _read(
    data_set: Rows,
    order: EpochOrder,
    prefetch: int,
    position: int,
    last: Optional[int],
    filled: queue.Queue,
    closed: threading.Event,
) -> None:
    """Read windows of batches and put them into the queue until the end, or until it is closed."""
    try:
        windows = _windows(order.num_batches, position, last, prefetch)
        batches = _from_disk(data_set, order, windows) if data_set.is_direct else _mapped(data_set, order, windows)
        with contextlib.closing(batches):
            for window in batches:
                if closed.is_set() or not _put(filled, window, closed):
                    return
        _put(filled, None, closed)
    except BaseException as error:  # noqa: BLE001 - the reader of the queue raises it
        _put(filled, error, closed)


def _windows(num_batches: int, position: int, last: Optional[int], prefetch: int) -> Iterator[List[Tuple[int, int]]]:
    """Yield windows of batches (epoch, number) that are read together. The first is small, so that it comes soon."""
    size = 1
    while last is None or position < last:
        end = position + size if last is None else min(position + size, last)
        yield [divmod(number, num_batches) for number in range(position, end)]
        position, size = end, min(2 * size, prefetch)


def _mapped(data_set: Rows, order: EpochOrder, windows: Iterator[Any]) -> Generator[List[Batch], None, None]:
    for window in windows:
        rows = [order.batch(*batch) for batch in window]
        data_set.load_more(sum(map(len, rows)))
        yield [(each, *data_set.gather(each)) for each in rows]


def _from_disk(data_set: Rows, order: EpochOrder, windows: Iterator[Any]) -> Generator[List[Batch], None, None]:
    """Read the rows of a window together. The disk reads the next window while this one is decoded and used."""
    ahead: Any = None
    try:
        for number, window in enumerate(windows):
            rows = [order.batch(*batch) for batch in window]
            before, ahead = ahead, (rows, *data_set.start(np.concatenate(rows), number % 2))
            if before is not None:
                yield _decoded(data_set, *before)
                # Last, since it takes a while: the first batches come sooner.
                data_set.load_more(sum(map(len, rows)))
        if ahead is not None:
            before, ahead = ahead, None
            yield _decoded(data_set, *before)
    finally:
        if ahead is not None:
            wait(ahead[2])  # their memory and the files are used until then


def _decoded(data_set: Rows, rows: List[Array], records: List[Any], started: List[Future]) -> List[Batch]:
    finish_reads(started)
    edges = np.cumsum([0, *map(len, rows)]).tolist()
    return [
        (each, *data_set.decode(_part(records, first, stop), each)) for each, first, stop in zip(rows, edges, edges[1:])
    ]


def _part(records: List[Any], first: int, stop: int) -> List[Any]:
    """Return places ``first`` to ``stop`` of the result of ``DataSet.records``."""
    parts = []
    for layout, places, each in records:
        if places is None:
            parts.append((layout, None, each[first:stop]))
            continue
        begin, end = np.searchsorted(places, [first, stop]).tolist()
        parts.append((layout, places[begin:end] - first, each[begin:end]))
    return parts


def _put(filled: queue.Queue, item: Any, closed: threading.Event) -> bool:
    """Put an item. Return False if the reader is gone."""
    while not closed.is_set():
        try:
            filled.put(item, timeout=_LOOK_S)
        except queue.Full:
            continue
        return True
    return False
