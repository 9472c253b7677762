"""The arrays of ragged leaves in packets: how they are laid out, written and gathered."""

from __future__ import annotations

import functools
import threading
from math import prod
from sys import getrefcount
from typing import Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.kernels.load import load_kernels
from ding_store.buffer.table.outputs import aligned
from ding_store.columns import Schema
from ding_store.columns.ragged import Ragged
from ding_store.storage.encoding.checksum import checksum

#: Rows in a batch without padding begin at multiples of this.
_ALIGNMENT = 64
#: No leaf has more items than this. Sums of sizes then fit into 64 bits.
_MAX_ITEMS = 1 << 40
#: Batches of this size are written past the processor's caches. 64 arrays of 100 KB take half the time then.
_FAR_BYTES = 1 << 20
#: Number of arrays that are kept for reuse. A pipeline that holds more batches gets fresh arrays.
_MAX_WARM = 8


class ItemPacket(NamedTuple):
    """The arrays of one row as bytes, one behind the other."""

    parts: List[Array]
    size: int
    checksum: int


class ItemLayout:
    """
    Overview:
        The packets of one schema with ragged leaves: the arrays of a row without gaps, in the order of the leaves.
        Their lengths are in the columns of the leaves.
    Arguments:
        - schema (:obj:`Schema`): The schema.
        - has_checksums (:obj:`bool`): Whether packets get checksums. Packets in memory need none.
    """

    def __init__(self, schema: Schema, has_checksums: bool) -> None:
        self._leaves, self._has_checksums = schema.ragged, has_checksums
        self._item_bytes = np.array([dtype.itemsize * prod(shape) for dtype, shape in schema.ragged.values()], np.int64)
        self._warm = WarmBytes()

    def packet(self, arrays: Sequence[Array]) -> ItemPacket:
        """Return the packet of one row. The arrays are in the order of the leaves."""
        parts = [bytes_of(array) for array in arrays]
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        return ItemPacket(parts, size, checksum([part.data for part in parts], size) if self._has_checksums else 0)

    def sizes(self, columns: Mapping[str, Array], places: Array, sizes: Array, end: int) -> Tuple[Array, Array]:
        """
        Overview:
            Return the bytes of each leaf and row, ``(num_leaves, n)``, and which rows are sound, ``(n,)``. A row that
            was overwritten meanwhile, or was damaged, may not be sound. Its bytes count as 0.
        Arguments:
            - places (:obj:`np.ndarray`): The positions of the packets.
            - sizes (:obj:`np.ndarray`): Their sizes.
            - end (:obj:`int`): The size of the file.
        """
        lengths = np.array([columns[name] for name in self._leaves], np.int64)
        is_sound = (places >= 0) & (sizes >= 0) & (sizes <= end) & (places <= end - sizes)
        is_sound &= ((lengths >= 0) & (lengths <= _MAX_ITEMS)).all(0)
        num_bytes: Array = lengths * self._item_bytes[:, None]
        is_sound &= num_bytes.sum(0) == sizes
        if not is_sound.all():
            num_bytes[:, ~is_sound] = 0
        return num_bytes, is_sound

    def padded(
        self, view: Array, columns: Mapping[str, Array], places: Array, num_bytes: Array, is_sound: Array
    ) -> Dict[str, Ragged]:
        """Copy the arrays of some rows to one array per leaf, padded with zeros."""
        made, starts = {}, places
        for (name, (dtype, shape)), size, sizes in zip(self._leaves.items(), self._item_bytes.tolist(), num_bytes):
            lengths = columns[name] if is_sound.all() else np.where(is_sound, columns[name], 0)
            longest = int(lengths.max(initial=0))
            stride = longest * size
            memory = self._warm.take(len(sizes) * stride)
            copy_items(view, starts, sizes, memory, np.arange(len(sizes) + 1) * stride)
            array = memory[: len(sizes) * stride].view(dtype).reshape(len(sizes), longest, *shape)
            made[name] = Ragged(lengths, _cut_rows(array, lengths), array)
            starts = starts + sizes
        return made

    def rows(
        self, view: Array, columns: Mapping[str, Array], places: Array, num_bytes: Array, is_sound: Array
    ) -> Dict[str, Ragged]:
        """Copy the arrays of some rows, without padding."""
        made, starts = {}, places
        for (name, (dtype, shape)), sizes in zip(self._leaves.items(), num_bytes):
            lengths = columns[name] if is_sound.all() else np.where(is_sound, columns[name], 0)
            ends = np.zeros(len(sizes) + 1, np.int64)
            np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT, out=ends[1:])
            memory = self._warm.take(int(ends[-1]))
            copy_items(view, starts, sizes, memory, ends)
            made[name] = Ragged(lengths, _views(memory, ends, lengths, dtype, shape))
            starts = starts + sizes
        return made

    def unpacked(self, data: Array, columns: Mapping[str, Array]) -> Dict[str, Ragged]:
        """Return the arrays of one row as views of its packet."""
        made, place = {}, 0
        for (name, (dtype, shape)), size in zip(self._leaves.items(), self._item_bytes.tolist()):
            end = place + int(columns[name][0]) * size
            # A copy: the packet's arrays may begin anywhere.
            array = np.frombuffer(data[place:end].tobytes(), dtype).reshape(int(columns[name][0]), *shape)
            made[name] = Ragged(columns[name], functools.partial(_copied, array))
            place = end
        return made


class WarmBytes:
    """Hands out memory, and reuses it when no view refers to it any more. The page faults of fresh memory are slow."""

    def __init__(self) -> None:
        self._lock = hold_over_forks(threading.Lock())
        self._warm: List[Array] = []
        self._num_references = 0

    def take(self, num_bytes: int) -> Array:
        """Return at least so many bytes, with undefined contents."""
        with self._lock:
            for place in range(len(self._warm)):
                is_fit = num_bytes <= self._warm[place].nbytes <= 4 * num_bytes + (1 << 16)
                if is_fit and getrefcount(self._warm[place]) == self._num_references:
                    return self._warm[place]
            made = aligned((num_bytes + num_bytes // 8,), np.uint8)
            free = [i for i in range(len(self._warm)) if getrefcount(self._warm[i]) == self._num_references]
            if free and len(self._warm) == _MAX_WARM:
                self._warm.pop(free[0])
            if len(self._warm) < _MAX_WARM:
                self._warm.append(made)
                if not self._num_references:
                    self._num_references = self._count_alone()
            return made

    def _count_alone(self) -> int:
        # Measured, because it differs between versions of the interpreter.
        warm = [np.empty(1, np.uint8)]
        return getrefcount(warm[0])


def bytes_of(array: Array) -> Array:
    """Return an array as bytes, without a copy if it is contiguous."""
    try:
        return np.frombuffer(array, np.uint8)  # A third of the time of what follows.
    except ValueError:  # It is empty, has gaps, or has a dtype that is no buffer.
        pass
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def copy_items(view: Array, starts: Array, sizes: Array, target: Array, places: Array) -> None:
    """Copy items to these places of the target. The bytes between them become zero, see ``copy_kernels``."""
    kernels = load_kernels()
    if kernels is not None:
        is_far = int(places[-1]) >= _FAR_BYTES
        kernels.copy_items(view.ctypes.data, np.ascontiguousarray(starts), sizes, target, places, is_far)
        return
    for start, size, place, end in zip(starts.tolist(), sizes.tolist(), places.tolist(), places[1:].tolist()):
        target[place : place + size] = view[start : start + size]
        target[place + size : end] = 0


def _cut_rows(padded: Array, lengths: Array) -> Callable[[], List[Array]]:
    return lambda: [row[:length] for row, length in zip(padded, lengths.tolist())]


def _views(
    memory: Array, starts: Array, lengths: Array, dtype: np.dtype, shape: Tuple[int, ...]
) -> Callable[[], List[Array]]:
    # A third of the time of a slice, a view and a reshape.
    return lambda: [
        np.ndarray((length, *shape), dtype, memory, start) for start, length in zip(starts.tolist(), lengths.tolist())
    ]


def _copied(array: Array) -> List[Array]:
    return [array.copy()]
