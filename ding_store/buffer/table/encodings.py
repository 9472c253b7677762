"""The columns of a table. They store values as they are, float32 values as bytes, or references to frames."""

from __future__ import annotations

from math import prod
from typing import Dict, List, Mapping, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.load import BRIEF_BYTES, load_kernels
from ding_store.buffer.persistence.table_header import ENCODING
from ding_store.buffer.table.cold import ColdColumn
from ding_store.buffer.table.frame_sharing import Shared
from ding_store.buffer.table.narrowing import gather, widen
from ding_store.compiled import FAR_BYTES, copy_past_caches

_FIRST = np.zeros(1, np.int64)


class Column:
    """
    Overview:
        A column of a table, indexed by slot. This class stores values as they are, and a subclass in another form. It
        alone knows the form.
    Arguments:
        - stored (:obj:`np.ndarray`): The array of all slots, in the form in which it is stored.
    """

    __slots__ = ('dtype', 'row_bytes', 'shape', 'stored', 'stored_bytes')

    #: The name of the form in a directory's header. None: values are stored as they are.
    encoding: Optional[str] = None
    #: True if each stored row is a value, so that its bytes can be copied.
    is_plain = True

    def __init__(self, stored: Array) -> None:
        self.stored = stored
        #: dtype and shape of one value outside the table.
        self.dtype: np.dtype = stored.dtype
        self.shape: Tuple[int, ...] = stored.shape[1:]
        #: Bytes of one stored row, and of one row of ``take_bytes``.
        self.stored_bytes = self.row_bytes = stored.itemsize * prod(self.shape)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def address(self) -> Optional[int]:
        """The memory address of the stored rows, for compiled copies. None if they do not follow each other."""
        return self.stored.ctypes.data if self.stored.flags.c_contiguous else None

    def read(self, slots: Array) -> Array:
        """Return the values of these slots in a fresh array."""
        return self.stored.take(slots, 0, None, 'clip')

    def integer(self, slot: int) -> int:
        """Return the value of one slot of a column of integers."""
        return int(self.stored.item(slot))

    def read_into(self, slots: Array, out: Array, cold: Optional[ColdColumn] = None) -> None:
        """
        Overview:
            Copy the values of these slots to an array. If ``cold`` is given, rows are read through it.
        Raises:
            - TypeError, ValueError: The array has another dtype or shape, because columns were replaced meanwhile.
        """
        if cold is not None:
            cold.each(slots, lambda place, row: self.put(row, out[place]))
        else:
            self._gather(slots, out)

    def put(self, row: Array, out: Array) -> None:
        """Copy the value of a stored row to an array of its shape."""
        copy_past_caches(out, row)

    def decode(self, rows: Array, out: Array) -> None:
        """Copy the values of stored rows to an array, which may have a wider dtype."""
        out[...] = rows

    def take_bytes(self, slots: Array, out: Array) -> None:
        """Copy the bytes of these slots to an array of bytes, in the form that ``encoding`` names."""
        if not len(out):
            return
        rows = out.view(self.stored.dtype).reshape((len(slots), *self.stored.shape[1:]))
        if is_run(slots):
            rows[:] = self.stored[slots[0] : slots[-1] + 1]
        else:
            self.stored.take(slots, 0, rows, 'clip')

    def by_step(self) -> Column:
        """Return a view of a column of sequences with one row per step."""
        return type(self)(self.stored.reshape(-1, *self.stored.shape[2:]))

    def _gather(self, slots: Array, out: Array) -> None:
        # Without mode='clip' numpy fills an internal buffer first, which is 2-5 times slower.
        self.stored.take(slots, 0, out, 'clip')


class NarrowColumn(Column):
    """A column of float32 values that are stored as bytes, see ``narrowing``."""

    __slots__ = ()

    encoding = ENCODING
    is_plain = False

    def __init__(self, stored: Array) -> None:
        super().__init__(stored)
        self.dtype = np.dtype(np.float32)

    def read(self, slots: Array) -> Array:
        return gather(self.stored, slots, None)

    def put(self, row: Array, out: Array) -> None:
        if out.ndim > 1 and not out.flags.carray and out[0].flags.carray:
            # In a batch of sequences, each step of the row is in another place.
            kernels = load_kernels()
            if kernels is not None:
                # Without the interpreter's lock.
                kernels.widen_steps(row.reshape(len(row), -1), out.reshape(len(out), -1))
                return
            for part, target in zip(row, out):
                gather(part[None], _FIRST, target[None])
        else:
            gather(row[None], _FIRST, out[None])

    def decode(self, rows: Array, out: Array) -> None:
        if out.dtype == np.float32:
            widen(rows, out)
        else:
            out[...] = gather(rows, np.arange(len(rows)), None)

    def _gather(self, slots: Array, out: Array) -> None:
        if out.dtype != np.float32:
            raise TypeError(f'values of float32 do not fit into an array of {out.dtype}')
        gather(self.stored, slots, out)


class SharedColumn(Column):
    """
    Overview:
        A column of references to frames, see ``frame_sharing``.
    Arguments:
        - stored (:obj:`np.ndarray`): The references, ``(capacity, num_frames)``, int32.
        - shared (:obj:`Shared`): The pool of the frames, and the form of a value.
        - is_narrow (:obj:`bool`): Whether the frames are float32 values as bytes.
    """

    __slots__ = ('_frames', 'encoding', 'shared')

    is_plain = False

    def __init__(self, stored: Array, shared: Shared, is_narrow: bool) -> None:
        super().__init__(stored)
        self.shared = shared
        # Another thread may replace the pool's frames by a longer array.
        frames = shared.pool.frames
        self._frames: Column = NarrowColumn(frames) if is_narrow else Column(frames)
        self.encoding = self._frames.encoding
        self.dtype, self.shape = self._frames.dtype, shared.spec[1]
        self.row_bytes = shared.num_frames * self._frames.row_bytes

    def read(self, slots: Array) -> Array:
        return self._frames.read(self._numbers(slots)).reshape(len(slots), *self.shape)

    def decode(self, rows: Array, out: Array) -> None:
        frames = self._frames.stored[rows.reshape(-1)]
        if out.dtype == frames.dtype:
            out[...] = frames.reshape(out.shape)
        else:
            self._frames.decode(frames, out.reshape(-1, *self._frames.shape))

    @property
    def frame_shape(self) -> Tuple[int, ...]:
        """The shape of a frame."""
        return self._frames.shape

    def references(self, slots: Array) -> Array:
        """Return the references ``(n, num_frames)`` of these slots to frames."""
        return self.stored.take(slots, 0, None, 'clip')

    def frames(self, numbers: Array) -> Array:
        """Return frames in the form in which the pool has them."""
        return self._frames.stored.take(numbers, 0, None, 'clip')

    def by_step(self) -> Column:
        num_steps, *shape = self.shape
        dtype = self.shared.spec[0]
        if self.shared.num_frames % num_steps:
            return StepsOfFrames(self, num_steps)
        step = self.shared._replace(spec=(dtype, tuple(shape)), num_frames=self.shared.num_frames // num_steps)
        return SharedColumn(self.stored.reshape(-1, step.num_frames), step, self.encoding is not None)

    def _gather(self, slots: Array, out: Array) -> None:
        if out.shape != (len(slots), *self.shape) or out.dtype != self.dtype:
            raise ValueError(f'values of shape {self.shape} do not fit into an array of shape {out.shape}')
        if not out.flags.c_contiguous:
            out[...] = self.read(slots)
            return
        numbers = self._numbers(slots)
        out = out.reshape(len(numbers), *self._frames.shape)
        if self._frames.is_plain:
            gather_frames(self._frames.stored, numbers, out, out.nbytes >= FAR_BYTES)
        else:
            self._frames.read_into(numbers, out)

    def _numbers(self, slots: Array) -> Array:
        return self.references(slots).reshape(-1).astype(np.int64)


class StepsOfFrames(SharedColumn):
    """
    Overview:
        The steps of a column of sequences that are one frame each. It is indexed by slot times ``num_steps`` plus step.
    Arguments:
        - column (:obj:`SharedColumn`): The column of sequences.
        - num_steps (:obj:`int`): Steps of a sequence.
    """

    __slots__ = ('_num_steps',)

    def __init__(self, column: SharedColumn, num_steps: int) -> None:
        super().__init__(column.stored, column.shared, column.encoding is not None)
        self._num_steps, self._frames = num_steps, self._frames.by_step()
        self.shape, self.row_bytes = self.shape[1:], self.row_bytes // num_steps

    def __len__(self) -> int:
        return len(self.stored) * self._num_steps

    def _numbers(self, slots: Array) -> Array:
        return super()._numbers(slots // self._num_steps) * self._num_steps + slots % self._num_steps


def in_stored_form(column: Column) -> Column:
    """Return a column whose values are the bytes that the table keeps, if it keeps float32 values as bytes."""
    if isinstance(column, SharedColumn):
        return SharedColumn(column.stored, column.shared, is_narrow=False)
    return Column(column.stored) if isinstance(column, NarrowColumn) else column


def columns_by_pool(columns: Mapping[str, Column]) -> List[Dict[str, SharedColumn]]:
    """Return the columns that share frames, by name, grouped by the pool that has the frames."""
    found: Dict[int, Dict[str, SharedColumn]] = {}
    for name, column in columns.items():
        if isinstance(column, SharedColumn):
            found.setdefault(id(column.shared.pool), {})[name] = column
    return list(found.values())


def gather_frames(frames: Array, numbers: Array, out: Array, is_far: bool) -> None:
    """
    Overview:
        Copy frames to a contiguous array.
    Arguments:
        - numbers (:obj:`np.ndarray`): The frames to copy, int64.
        - is_far (:obj:`bool`): Whether to write past the processor's caches.
    """
    kernels = load_kernels()
    if kernels is None:
        # Without mode='clip' numpy fills an internal buffer first, which is 2-5 times slower.
        frames.take(numbers, 0, out, 'clip')
        return
    copy = kernels.gather if out.nbytes <= BRIEF_BYTES else kernels.gather_freely
    source, size, target = (np.array([n]) for n in (frames.ctypes.data, frames[:1].nbytes, out.ctypes.data))
    copy(source, size, target, numbers, len(frames), is_far)


def is_run(slots: Array) -> bool:
    """Return whether slots are consecutive and in order."""
    if len(slots) < 2:
        return len(slots) == 1
    first, last = slots.item(0), slots.item(-1)
    if last - first != len(slots) - 1:
        return False
    # Comparing bytes takes half the time of array operations for 64 slots.
    return bool(slots.tobytes() == np.arange(first, last + 1, dtype=slots.dtype).tobytes())
