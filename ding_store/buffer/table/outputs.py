"""Reused arrays for batches. The page faults of fresh arrays cost up to five times the gather itself."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from math import prod
from sys import getrefcount
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch
from ditk import logging

from ding_store.buffer.array_types import Array
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.kernels.load import BRIEF_BYTES, Kernels, load_kernels
from ding_store.buffer.table.cold import ColdColumn
from ding_store.buffer.table.encodings import Column, SharedColumn
from ding_store.buffer.table.frame_pool import FramePool, FramesOfRow
from ding_store.buffer.table.specs import ColumnSpec, spec_bytes
from ding_store.columns.collate import PlainBatch
from ding_store.compiled import FAR_BYTES

Arrays = Dict[str, Array]
#: Default number of batches of one size that are kept for reuse. A pipeline that holds more gets fresh arrays.
MAX_WARM = 8
#: Number of batch sizes that are kept for reuse.
MAX_SIZES = 4


class Gather:
    """Addresses and row sizes of columns, for a compiled copy."""

    def __init__(self, columns: Mapping[str, Column], arrays: Arrays) -> None:
        #: This reference also keeps the columns in memory.
        self.columns = columns
        taken = {name: columns[name] for name in arrays}
        self.capacity = len(next(iter(taken.values()))) if taken else 0
        addresses = [column.address for column in taken.values()]
        #: True if all rows can be copied as they are, or decoded by their columns.
        self.fits = bool(self.capacity) and all(
            address is not None and column.dtype == arrays[name].dtype and column.shape == arrays[name].shape[1:]
            for address, (name, column) in zip(addresses, taken.items())
        )
        self.addresses = np.array([address or 0 for address in addresses], np.int64)
        self.sizes = np.array([column.stored_bytes for column in taken.values()], np.int64)
        #: Names of the columns that are not stored as they are, and their positions.
        self.encoded = [(name, place) for place, (name, column) in enumerate(taken.items()) if not column.is_plain]
        self._plain = np.delete(np.arange(len(taken)), [place for _, place in self.encoded])
        #: Addresses and row sizes of the columns that are copied as they are.
        self.plain = self.addresses[self._plain], self.sizes[self._plain]

    def plain_targets(self, targets: Array) -> Array:
        """Return the targets of the columns that are copied as they are."""
        return targets[self._plain]


class RowWriter:
    """
    Overview:
        Copies elements to columns, leaf by leaf in one compiled pass. Leaves that the table stores as bytes are first
        converted, in memory of the writer. For one thread at a time.
    """

    def __init__(self, gather: Gather, batch: PlainBatch, kernels: Kernels) -> None:
        self.gather, self._batch = gather, batch
        self._put = kernels.put if gather.sizes.sum() <= BRIEF_BYTES else kernels.put_freely
        encoded = [(gather.columns[name], place) for name, place in gather.encoded]
        floats = [(column, place) for column, place in encoded if column.encoding]
        #: Columns of floats that are stored as bytes, their numbers of values, and memory for their bytes.
        sizes = np.array([prod(column.shape) for column, _ in floats], np.int64)
        self._floats = np.array([place for _, place in floats], np.int64), sizes, np.empty(sizes.sum(), np.uint8)
        self._narrow = kernels.narrow_row if 4 * sizes.sum() <= BRIEF_BYTES else kernels.narrow_row_freely
        shared: Dict[int, List[Tuple[SharedColumn, int]]] = {}
        for column, place in encoded:
            if isinstance(column, SharedColumn):
                shared.setdefault(id(column.shared.pool), []).append((column, place))
        self._frames = [_frames_of_row(columns, kernels) for columns in shared.values()]

    def writing(self, element: Any) -> Optional[Callable[[int], None]]:
        """
        Return a function that writes the element to a slot. It cannot fail, unless there is no room for its frames.
        Return None if the element is not just bytes, or does not fit.
        """
        found = self._batch.addresses(element)
        if found is None:
            return None
        places, held = np.array(found[0], np.int64), found[1]
        if len(self._floats[0]) and not self._narrow(places, *self._floats):
            return None

        def write(slot: int) -> None:
            for pool, row in self._frames:
                pool.intern_row(places, row)
            self._put(places, self.gather.sizes, self.gather.addresses, slot)
            held.clear()  # Until here ``held`` keeps the memory of the element's leaves.

        return write


def _frames_of_row(columns: List[Tuple[SharedColumn, int]], kernels: Kernels) -> Tuple[FramePool, FramesOfRow]:
    """Return the pool of these columns, which are given with their places, and what it needs to intern a row."""
    pool, numbers = columns[0][0].shared.pool, [column.shared.num_frames for column, _ in columns]
    is_brief = sum(numbers) * pool.frames[:1].nbytes <= BRIEF_BYTES
    return pool, FramesOfRow([place for _, place in columns], numbers, kernels, is_brief)


class Output:
    """
    Overview:
        The arrays of one batch, with values that can be computed in advance: ``addresses`` of the arrays, and the views
        of which batches are made. A user holds a copy of ``arrays``.
    """

    __slots__ = ('arrays', 'addresses', '_batch', '_views', '_steps', '_held', '_num_references')

    def __init__(self, arrays: Arrays, batch: Optional[PlainBatch]) -> None:
        self.arrays, self._batch = arrays, batch
        self._views = batch.views(arrays) if batch is not None else []
        self._steps: Dict[int, List[Array]] = {}
        self.addresses = np.array([array.ctypes.data for array in arrays.values()], np.int64)
        self._held = list({id(array): array for array in (*arrays.values(), *self._views)}.values())
        # The reference counts without any user. Measured, because they differ between versions of the interpreter.
        self._num_references = self._count()

    def is_free(self) -> bool:
        """
        Return whether there are no references to the arrays from outside. A user may be adding views meanwhile, so
        ``_num_references`` is read before ``_held``.
        """
        return self._num_references == sum(map(getrefcount, self._held))

    def batch(self, length: Optional[int] = None) -> Optional[ttorch.Tensor]:
        """
        Return the arrays as one tree, as ``length`` steps if it is given. Return None if that takes more than views.
        """
        if self._batch is None:
            return None
        return self._batch.tree(self._views if length is None else self._views_of_steps(self._batch, length))

    def _views_of_steps(self, batch: PlainBatch, length: int) -> List[Array]:
        """Return cached views of ``length`` steps. The caller holds the arrays, so ``is_free`` is false meanwhile."""
        views = self._steps.get(length)
        if views is None:
            before = self._count()
            views = self._steps[length] = batch.steps(self.arrays, length)
            self._held = [*self._held, *views]  # before the number, see ``is_free``
            self._num_references += self._count() - before
        return views

    def _count(self) -> int:
        return sum(map(getrefcount, self._held))


class WarmOutputs:
    """
    Overview:
        Hands out arrays for batches, and reuses them when they are free. They are free when the reference count of
        every array is back at its initial value. Tensors, views and tensors saved by autograd all refer to the array
        that owns the bytes. A batch therefore stays valid while anything refers to a part of it.
    Arguments:
        - columns (:obj:`Mapping`): Name -> (dtype, shape of one element).
        - batch (:obj:`Optional[PlainBatch]`): Builds batches from the arrays.
        - max_warm (:obj:`int`): Number of batches of one size that are kept for reuse.
        - is_pinned (:obj:`bool`): The arrays are in pinned memory, if there can be some, for copies to a GPU.
    """

    def __init__(
        self,
        columns: Mapping[str, ColumnSpec],
        batch: Optional[PlainBatch] = None,
        max_warm: int = MAX_WARM,
        is_pinned: bool = False,
    ) -> None:
        self._columns, self._batch, self._max_warm, self._is_pinned = dict(columns), batch, max_warm, is_pinned
        self._lock = hold_over_forks(threading.Lock())
        self._warm: OrderedDict[int, List[Output]] = OrderedDict()
        self._row_bytes = sum(map(spec_bytes, self._columns.values()))
        self._gather: Optional[Gather] = None
        self._writer: Optional[RowWriter] = None
        self._kernels = load_kernels()

    def take(self, num_rows: int) -> Arrays:
        """
        Return arrays ``(num_rows, *shape)`` by name, with undefined contents. They are reused when the caller drops
        them.
        """
        return self.lend(num_rows)[0]

    def lend(self, num_rows: int) -> Tuple[Arrays, Output]:
        """Return the arrays of ``take`` and the ``Output`` to which they belong."""
        # Two threads must not both find the same arrays free: the copy below marks them as used.
        with self._lock:
            warm = self._warm.get(num_rows)
            if warm is None:
                warm = self._warm[num_rows] = []
            if len(self._warm) > 1:
                self._warm.move_to_end(num_rows)
            for output in warm:
                if output.is_free():
                    return dict(output.arrays), output
            arrays = {name: self._empty(name, num_rows) for name in self._columns}
            output = Output(arrays, self._batch)
            if len(warm) < self._max_warm:
                warm.append(output)
            if len(self._warm) > MAX_SIZES:
                self._warm.popitem(last=False)
            return dict(arrays), output

    def gather(
        self, columns: Mapping[str, Column], slots: Array, cold: Optional[Mapping[str, ColdColumn]] = None
    ) -> Tuple[Arrays, Output]:
        """
        Gather slots of these columns into arrays from ``lend``. ``cold`` names columns to read from the disk. Calls
        with the same ``columns`` object reuse the addresses.
        """
        arrays, output = self.lend(len(slots))
        if self._kernels is not None and not cold:
            gather = self._gather
            if gather is None or gather.columns is not columns:
                gather = self._gather = Gather(columns, arrays)
            if gather.fits:
                num_bytes = len(slots) * self._row_bytes
                copy = self._kernels.gather if num_bytes <= BRIEF_BYTES else self._kernels.gather_freely
                sources, sizes = gather.plain
                targets = gather.plain_targets(output.addresses) if gather.encoded else output.addresses
                slots = np.ascontiguousarray(slots, np.int64)
                copy(sources, sizes, targets, slots, gather.capacity, num_bytes >= FAR_BYTES)
                for name, _ in gather.encoded:
                    columns[name].read_into(slots, arrays[name])
                return arrays, output
        for name, array in arrays.items():
            columns[name].read_into(slots, array, None if cold is None else cold.get(name))
        return arrays, output

    def row_writer(self, columns: Mapping[str, Column]) -> Optional[RowWriter]:
        """
        Return a writer that copies elements to these columns. Return None if that takes more than a copy of bytes.
        """
        if self._kernels is None or self._batch is None or not self._row_bytes:
            return None
        writer = self._writer
        if writer is None or writer.gather.columns is not columns:
            gather = Gather(columns, {name: self._empty(name, 0) for name in self._batch.names})
            writer = self._writer = RowWriter(gather, self._batch, self._kernels)
        return writer if writer.gather.fits else None

    def _empty(self, name: str, num_rows: int) -> Array:
        dtype, shape = self._columns[name]
        return aligned((num_rows, *shape), dtype, self._is_pinned)


def aligned(shape: Tuple[int, ...], dtype: Any, is_pinned: bool = False) -> Array:
    """
    Overview:
        Return an empty array that begins at a cache line, like torch's own memory. Memory from malloc begins 16 bytes
        later, so that each vector spans two lines and training takes longer. Views of the array keep it alive, as
        usual.
    """
    try:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # torch has no such dtype, or the byte order is another
        return np.empty(shape, dtype)
    if is_pinned:
        try:
            return torch.empty(shape, dtype=kind, pin_memory=True).numpy()
        except RuntimeError as error:
            _warn_of_pageable(str(error).partition('\n')[0])
    return torch.empty(shape, dtype=kind).numpy()


@functools.cache
def _warn_of_pageable(reason: str) -> None:
    """Warn once, not for each array."""
    logging.warning(f'ding_store: copies to the GPU take longer: memory cannot be pinned ({reason})')
