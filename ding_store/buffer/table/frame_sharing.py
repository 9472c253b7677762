"""Sharing of frames: the frames of stacks, and of columns whose values recur in another column, are kept once."""

from __future__ import annotations

from math import prod
from typing import Dict, Mapping, NamedTuple, Protocol, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.table.frame_pool import FramePool
from ding_store.buffer.table.rows import RowIndex, RowListener
from ding_store.buffer.table.specs import ColumnSpec, spec_bytes

#: Smaller frames are not shared: their references and hashes would take more than the gain.
MIN_BYTES = 1024
#: Sharing is given up if rows have fewer frames per frame in memory than this, judged after so many rows.
MIN_RATIO, JUDGED_ROWS = 1.5, 1000

_REFERENCE = np.dtype(np.int32)


class FrameHolder(Protocol):
    """The columns of a table, as far as they hold references to frames."""

    def release(self, slots: Array) -> None:
        """Give up the frames of rows that left these slots."""

    def recount(self, slots: Array) -> None:
        """Count the references to frames anew. ``slots`` are those of all live rows. It may be called again."""


class Shared(NamedTuple):
    """
    Overview:
        A column that holds references to frames.
    Arguments:
        - pool (:obj:`FramePool`): The frames. Columns with frames of one dtype and shape use one pool.
        - spec (:obj:`ColumnSpec`): dtype and shape of a value, in which the frames are as the pool has them.
        - num_frames (:obj:`int`): The number of frames of a value.
    """

    pool: FramePool
    spec: ColumnSpec
    num_frames: int

    @property
    def reference_spec(self) -> ColumnSpec:
        """The dtype and shape of the references of one row."""
        return _REFERENCE, (self.num_frames,)

    def as_frames(self, values: Array) -> Array:
        """Return values ``(n, *shape)`` as frames ``(n * num_frames, *frame shape)``."""
        return values.reshape(len(values) * self.num_frames, *self.pool.frames.shape[1:])

    def intern(self, values: Array) -> Array:
        """Return references ``(n, num_frames)`` to the frames of values ``(n, *shape)``, each counted once more."""
        return self.pool.intern(self.as_frames(values)).reshape(len(values), self.num_frames)


class FrameListener(RowListener):
    """
    Overview:
        Gives up the frames of rows that leave. With the index's lock held, so no reader chooses these rows any more.
    Arguments:
        - columns (:obj:`FrameHolder`): The columns that hold references.
        - index (:obj:`RowIndex`): The rows.
    """

    def __init__(self, columns: FrameHolder, index: RowIndex) -> None:
        self._columns, self._index = columns, index

    def removed(self, slots: Array) -> None:
        self._columns.release(slots)

    def settled(self, slots: Array) -> None:
        self._columns.recount(self._index.live_slots)

    def restored(self, slots: Array) -> None:
        self._columns.recount(self._index.live_slots)

    def cleared(self) -> None:
        self._columns.recount(self._index.live_slots)


def shared_columns(specs: Mapping[str, ColumnSpec], capacity: int) -> Dict[str, Shared]:
    """
    Overview:
        Choose columns whose frames may recur: frames of a stack, or of columns of one kind such as ``obs`` and
        ``next_obs``. Whether they do is seen when there are rows.
    Arguments:
        - specs (:obj:`Mapping`): The columns as they would be stored without sharing.
        - capacity (:obj:`int`): The number of rows.
    """
    shared = {}
    for spec, numbers in columns_by_frame(specs).items():
        num_frames = capacity * sum(numbers.values())
        if num_frames < 1 << 31:  # References are int32.
            pool = FramePool(spec, num_frames, expected=1 / 4)
            shared.update({name: Shared(pool, specs[name], number) for name, number in numbers.items()})
    return shared


def columns_by_frame(specs: Mapping[str, ColumnSpec]) -> Dict[ColumnSpec, Dict[str, int]]:
    """
    Return the columns whose frames may recur in a row or in neighbouring rows: spec of a frame -> name of a column ->
    the number of frames of a value.
    """
    found: Dict[ColumnSpec, Dict[str, int]] = {}
    for name, spec in specs.items():
        number, frame = frame_of(spec)
        if spec_bytes(frame) >= MIN_BYTES:
            found.setdefault(frame, {})[name] = number
    return {frame: numbers for frame, numbers in found.items() if sum(numbers.values()) > 1}


def frame_of(spec: ColumnSpec) -> Tuple[int, ColumnSpec]:
    """
    Return the number of frames of a value, and the spec of a frame. A frame consists of the last axes, as few as have
    ``MIN_BYTES``. A smaller value is one frame.
    """
    dtype, shape = spec
    for axis in reversed(range(len(shape) + 1)):
        if spec_bytes((dtype, shape[axis:])) >= MIN_BYTES:
            return prod(shape[:axis]), (dtype, shape[axis:])
    return 1, spec
