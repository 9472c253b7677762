"""Sharing of frames: the frames of stacks, and of columns whose values recur in another column, are kept once."""

from __future__ import annotations

import logging
from math import prod
from typing import Dict, List, Mapping, NamedTuple, Optional, Protocol, Tuple

import numpy as np

from ding_store import free_space
from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.persistence.table_header import REFERENCE, StoredColumn
from ding_store.buffer.table.frame_pool import FramePool
from ding_store.buffer.table.rows import RowIndex, RowListener
from ding_store.buffer.table.specs import ColumnSpec, spec_bytes

#: Smaller frames of stacks are not shared: their references and hashes would take more than the gain.
MIN_BYTES = 1024
#: Smaller leaves that recur as a whole are not shared: it halves their memory at best, and a push takes three times as
#: long.
MIN_LEAF_BYTES = 4096
#: Sharing is given up if rows have fewer frames per frame in memory than this, judged after so many rows.
MIN_RATIO, JUDGED_ROWS = 1.5, 1000

#: The share of all frames of a table that its pools probably keep. Atari's stacks share eight references to a frame.
_EXPECTED = 1 / 8

logger = logging.getLogger(__name__)


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
        return REFERENCE, (self.num_frames,)

    def as_frames(self, values: Array) -> Array:
        """Return values ``(n, *shape)`` as frames ``(n * num_frames, *frame shape)``."""
        return values.reshape(len(values) * self.num_frames, *self.pool.frames.shape[1:])

    def intern(self, values: Array) -> Array:
        """Return references ``(n, num_frames)`` to the frames of values ``(n, *shape)``, each counted once more."""
        numbers = self.pool.intern(self.as_frames(values), lag_of(self.spec, self.pool.frames.ndim - 1))
        return numbers.reshape(len(values), self.num_frames)


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


def shared_columns(
    specs: Mapping[str, ColumnSpec], capacity: int, table_dir: Optional[TableDirectory] = None
) -> Dict[str, Shared]:
    """
    Overview:
        Choose columns whose frames may recur: frames of a stack, or of columns of one kind such as ``obs`` and
        ``next_obs``. Whether they do is seen when there are rows.
    Arguments:
        - specs (:obj:`Mapping`): The columns as they would be stored without sharing.
        - capacity (:obj:`int`): The number of rows.
        - table_dir (:obj:`Optional[TableDirectory]`): Directory of the files, or None for private columns.
    Raises:
        - NotEnoughSpace: There is no space for the files. None was made.
    """
    shared: Dict[str, Shared] = {}
    found = columns_by_frame(specs)
    if not _fits_memory(found, capacity):
        return shared
    try:
        for spec, numbers in found.items():
            num_frames = capacity * sum(numbers.values())
            if num_frames < 1 << 31:  # References are int32.
                pool = FramePool(spec, num_frames, table_dir)
                shared.update({name: Shared(pool, specs[name], number) for name, number in numbers.items()})
    except BaseException:
        for pool in pools_of(shared):
            pool.discard()
        raise
    return shared


def opened_columns(columns: List[StoredColumn], table_dir: Optional[TableDirectory]) -> Dict[str, Shared]:
    """Return those columns of an existing directory that share frames. ``recount`` must follow."""
    pools: Dict[str, FramePool] = {}
    shared: Dict[str, Shared] = {}
    try:
        for column in columns:
            frames = column.frames
            if frames is not None:
                dtype = np.dtype(column.dtype)
                if frames.file not in pools:
                    spec = dtype, tuple(frames.shape)
                    pools[frames.file] = FramePool(spec, frames.capacity, table_dir=table_dir, stored=frames)
                shared[column.name] = Shared(pools[frames.file], (dtype, tuple(column.shape)), column.num_frames)
    except BaseException:
        for pool in pools.values():
            pool.close()
        raise
    return shared


def pools_of(shared: Mapping[str, Shared]) -> List[FramePool]:
    """Return the pools of these columns."""
    return list({id(each.pool): each.pool for each in shared.values()}.values())


def columns_by_frame(specs: Mapping[str, ColumnSpec]) -> Dict[ColumnSpec, Dict[str, int]]:
    """
    Return the columns whose frames may recur in a row or in neighbouring rows: spec of a frame -> name of a column ->
    the number of frames of a value.
    """
    found: Dict[ColumnSpec, Dict[str, int]] = {}
    for name, spec in specs.items():
        number, frame = frame_of(spec)
        if spec_bytes(frame) >= (MIN_BYTES if number > 1 else MIN_LEAF_BYTES):
            found.setdefault(frame, {})[name] = number
    return {frame: numbers for frame, numbers in found.items() if sum(numbers.values()) > 1}


def _fits_memory(found: Mapping[ColumnSpec, Mapping[str, int]], capacity: int) -> bool:
    """
    Return whether the frames will probably fit into memory. Frames of larger tables are not shared: a row would be read
    from the disk in many small pieces.
    """
    num_bytes = capacity * sum(spec_bytes(spec) * sum(numbers.values()) for spec, numbers in found.items())
    memory = free_space.available_memory() if found else 0
    fits = _EXPECTED * num_bytes <= memory
    if not fits:
        logger.info(
            'the columns %s share no frames: even an eighth of all frames takes %s, and memory has %s. Rows are stored '
            'as they are, so that the disk reads each in one piece.',
            sorted(name for numbers in found.values() for name in numbers),
            free_space.format_bytes(_EXPECTED * num_bytes),
            free_space.format_bytes(memory),
        )
    return fits


def lag_of(spec: ColumnSpec, num_axes: int) -> int:
    """
    Return the distance of a frame from the equal one of the step before. Each step's stack is that of the step before,
    moved by one frame. A frame has the last ``num_axes`` axes of a value.
    """
    stack = spec[1][: len(spec[1]) - num_axes]
    return stack[-1] - 1 if stack else 0


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
