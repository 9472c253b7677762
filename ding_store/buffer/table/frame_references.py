"""Columns whose values are references to frames, each of which is there once. Chunks travel in this form."""

from __future__ import annotations

from math import prod
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.load import load_kernels
from ding_store.buffer.table.encodings import gather_frames
from ding_store.buffer.table.frame_sharing import MIN_BYTES, Shared, lag_of
from ding_store.buffer.table.narrowing import flat, gather, parts_of, warm_bytes, widened_columns
from ding_store.compiled import FAR_BYTES
from ding_store.errors import SchemaMismatch

#: The bits of a hash that are used, see ``kernels.frame_kernels``.
_ALL_BITS = (1 << 64) - 1


class FrameReferences:
    """
    Overview:
        The values of a column as references to frames. ``np.asarray`` returns the values themselves.
    Arguments:
        - frames (:obj:`np.ndarray`): The frames ``(m, *frame shape)``. Columns may have them in common.
        - references (:obj:`np.ndarray`): The number of each frame ``(n, num_frames)``, int32.
        - shape (:obj:`tuple`): The shape of a value. Its last axes are those of a frame.
    """

    __slots__ = ('frames', 'references', 'shape')

    def __init__(self, frames: Array, references: Array, shape: Tuple[int, ...]) -> None:
        self.frames, self.references = frames, references
        self.shape = (len(references), *shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.frames.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.references)

    def __getitem__(self, rows: slice) -> FrameReferences:
        return FrameReferences(self.frames, self.references[rows], self.shape[1:])

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Array:
        values = np.empty(self.shape, self.dtype)
        self.copy_to(values, values.nbytes >= FAR_BYTES)
        return values if dtype is None else values.astype(dtype, copy=False)

    def copy_to(self, out: Array, is_far: bool = True) -> None:
        """Write the values to a contiguous array of this dtype and shape. ``is_far``: the array is not read soon."""
        numbers = self._numbers()
        gather_frames(self.frames, numbers, out.reshape(len(numbers), *self.frames.shape[1:]), is_far)

    def widened(self) -> Array:
        """Return the float32 values k/255 of these bytes k."""
        return gather(self.frames, self._numbers(), None).reshape(self.shape)

    def _numbers(self) -> Array:
        return self.references.reshape(-1).astype(np.int64)


def checked_references(name: str, frames: Array, references: Array, shape: Tuple[int, ...]) -> FrameReferences:
    """
    Overview:
        Return a column that came from another process.
    Arguments:
        - name (:obj:`str`): The column, for the error.
        - shape (:obj:`tuple`): The shape that a value must have.
    Raises:
        - SchemaMismatch: The arrays are not frames of such values and references to them.
    """
    num_axes = len(shape) + 1 - frames.ndim
    is_form = frames.ndim > 0 and num_axes >= 0 and frames.shape[1:] == shape[num_axes:]
    if not is_form or frames[:1].nbytes < MIN_BYTES:
        raise SchemaMismatch(f'column {name!r}: {frames.dtype} {frames.shape} are not frames of values {shape}')
    if references.dtype != np.int32 or references.ndim != 2 or references.shape[1] != prod(shape[:num_axes]):
        found = f'{references.dtype} {references.shape}'
        raise SchemaMismatch(f'column {name!r}: {found} are not references to the frames of values {shape}')
    if references.size and not 0 <= references.min() <= references.max() < len(frames):
        raise SchemaMismatch(f'column {name!r}: it refers to a frame that is not among its {len(frames)} frames')
    return FrameReferences(frames, references, shape)


def with_values(columns: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the columns with values in place of references."""
    return {name: np.asarray(each) if isinstance(each, FrameReferences) else each for name, each in columns.items()}


def with_wide_values(columns: Mapping[str, Any], narrowed: Collection[str]) -> Mapping[str, Array]:
    """
    Overview:
        Return the columns with values in place of references, and those in ``narrowed`` widened to float32.
    Raises:
        - SchemaMismatch: A column in ``narrowed`` is missing, or is not bytes.
    """
    held = {name: columns[name] for name in narrowed if isinstance(columns.get(name), FrameReferences)}
    wide = {name: column.widened() for name, column in held.items() if column.dtype == np.uint8}
    return widened_columns(with_values({**columns, **wide}), [name for name in narrowed if name not in wide])


def narrowed_references(columns: Mapping[str, Any], shared: Mapping[str, Shared]) -> Dict[str, Any]:
    """
    Overview:
        Convert float32 columns that share frames to bytes, like ``narrowing.narrowed_columns``. A frame that equals the
        one of the step before is kept once. Columns without such frames are left out, and all without numba.
    Returns:
        - narrowed (:obj:`dict`): Name -> FrameReferences, or None if a value of the column is not exactly k/255. The
          frames are in memory that is valid until this thread calls again.
    """
    kernels = load_kernels()
    lags = {name: lag_of(shared[name].spec, shared[name].pool.frames.ndim - 1) for name in columns}
    wanted = {name: list(map(flat, parts_of(columns[name]))) for name, lag in lags.items() if lag and kernels}
    free = warm_bytes('frames', sum(len(parts) * parts[0].size for parts in wanted.values()))
    found: Dict[str, Any] = {}
    for name, parts in wanted.items():
        assert kernels is not None
        shape, num_frames = shared[name].pool.frames.shape[1:], shared[name].num_frames
        size, num_values = prod(shape), len(parts) * parts[0].size
        levels, free = free[:num_values].reshape(-1, size), free[num_values:]
        addresses = np.array([part.__array_interface__['data'][0] for part in parts])
        numbers = np.empty(len(levels), np.int32)
        count = kernels.narrow_frames(addresses, parts[0].size // size, lags[name], levels, numbers)
        frames = levels[:count].reshape(-1, *shape)
        references = numbers.reshape(-1, num_frames)
        found[name] = None if count < 0 else FrameReferences(frames, references, shared[name].spec[1])
    return found


def pool_references(columns: Mapping[str, FrameReferences], shared: Mapping[str, Shared]) -> Dict[str, Array]:
    """
    Overview:
        Add the frames of these columns to the pools, and count the references to them.
    Returns:
        - references (:obj:`Dict[str, np.ndarray]`): Name -> numbers of frames of the column's pool, ``(n,
          num_frames)``.
    """
    together: Dict[int, List[str]] = {}
    for name, column in columns.items():
        together.setdefault(id(column.frames), []).append(name)
    found: Dict[str, Array] = {}
    for names in together.values():
        frames = columns[names[0]].frames
        numbers = np.concatenate([columns[name].references.reshape(-1) for name in names])
        in_pool = shared[names[0]].pool.intern_repeated(frames, numbers)
        found.update({name: in_pool[columns[name].references] for name in names})
    return found


def distinct_frames(parts: Sequence[Array], lags: Sequence[int]) -> Tuple[Array, Array]:
    """
    Overview:
        Find the distinct frames of several arrays. Two frames are one only if all their bytes are equal.
    Arguments:
        - parts (:obj:`Sequence[np.ndarray]`): Frames ``(n, *shape)`` of one dtype and shape.
        - lags (:obj:`Sequence[int]`): Of each part, see ``FramePool.intern``.
    Returns:
        - frames (:obj:`np.ndarray`): The distinct frames, in the order in which they come first.
        - numbers (:obj:`np.ndarray`): The number of each frame of all parts, ``(sum of n,)``, int32.
    """
    num_frames = sum(map(len, parts))
    frames = np.empty((num_frames, *parts[0].shape[1:]), parts[0].dtype)
    numbers = np.empty(num_frames, np.int32)
    kernels = load_kernels()
    if kernels is None:
        known: Dict[bytes, int] = {}
        for place, frame in enumerate(frame for part in parts for frame in part):
            number = numbers[place] = known.setdefault(frame.tobytes(), len(known))
            if number == len(known) - 1:
                frames[number] = frame
        return frames[: len(known)], numbers
    # Never more than half full, so that the loop never returns early.
    table = np.zeros(1 << (2 * num_frames + 2).bit_length(), np.int32)
    hashes, counts = np.empty(num_frames, np.uint64), np.empty(num_frames, np.int32)
    free, state = np.empty(1, np.int32), np.zeros(3, np.int64)
    num_bytes, num_done = frames[:1].nbytes, 0
    for part, lag in zip(map(np.ascontiguousarray, parts), lags):
        addresses = part.ctypes.data, num_bytes, frames.ctypes.data
        found = numbers[num_done : num_done + len(part)]
        kernels.intern(*addresses, hashes, counts, table, free, state, _ALL_BITS, lag, found, 0)
        num_done += len(part)
    return frames[: numbers.max(initial=-1) + 1], numbers
