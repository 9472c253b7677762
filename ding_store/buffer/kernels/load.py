"""Loads the loops that numba compiles. Numba is imported only when they are requested."""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple, Optional

from ding_store.buffer.kernels import draw_kernels
from ding_store.compiled.compiler import Compiler, is_wanted, with_compiler

#: Copies of more bytes than this release the interpreter lock, so that other threads run. A thread that releases the
#: lock may have to wait for it afterwards.
BRIEF_BYTES = 1 << 20


class Kernels(NamedTuple):
    """The compiled functions."""

    set_many: Callable[..., None]
    set_powers: Callable[..., None]
    find_many: Callable[..., None]
    locate: Callable[..., float]
    pick: Callable[..., bool]
    mass: Callable[..., None]
    weigh: Callable[..., None]
    gather: Callable[..., None]
    gather_freely: Callable[..., None]
    put: Callable[..., None]
    put_freely: Callable[..., None]
    copy_items: Callable[..., None]
    free: Callable[..., None]
    retire: Callable[..., bool]
    publish: Callable[..., None]
    walk: Callable[..., bool]
    are_at: Callable[..., bool]
    narrow: Callable[..., bool]
    narrow_freely: Callable[..., bool]
    narrow_row: Callable[..., bool]
    narrow_row_freely: Callable[..., bool]
    narrow_frames: Callable[..., int]
    widen: Callable[..., None]
    widen_many: Callable[..., None]
    widen_steps: Callable[..., bool]
    intern: Callable[..., int]
    intern_row: Callable[..., int]
    intern_row_freely: Callable[..., int]
    release: Callable[..., None]
    index_frames: Callable[..., None]


def load_kernels() -> Optional[Kernels]:
    """Return the compiled kernels. Return None if numba is not installed or ``DING_STORE_NO_NUMBA`` is set."""
    return _compiled() if is_wanted() else None


@functools.cache
def _compiled() -> Optional[Kernels]:
    return with_compiler(_compile)


def _compile(compiled: Compiler) -> Kernels:
    from ding_store.buffer.kernels import copy_kernels, frame_kernels, power_kernels, row_kernels, sum_tree_kernels

    return Kernels(
        set_many=compiled(sum_tree_kernels.SET, sum_tree_kernels.set_many),
        set_powers=compiled(sum_tree_kernels.SET_POWERS, sum_tree_kernels.set_powers),
        find_many=compiled(sum_tree_kernels.FIND, sum_tree_kernels.find_many),
        locate=compiled(draw_kernels.LOCATE, draw_kernels.locate),
        pick=compiled(draw_kernels.PICK, draw_kernels.pick),
        mass=compiled(power_kernels.MASS, power_kernels.mass),
        weigh=compiled(power_kernels.WEIGH, power_kernels.weigh),
        gather=compiled(copy_kernels.GATHER, copy_kernels.gather),
        put=compiled(copy_kernels.PUT, copy_kernels.put),
        free=compiled(row_kernels.FREE, row_kernels.free),
        retire=compiled(row_kernels.RETIRE, row_kernels.retire),
        publish=compiled(row_kernels.PUBLISH, row_kernels.publish),
        walk=compiled(row_kernels.WALK, row_kernels.walk),
        are_at=compiled(row_kernels.ARE_AT, row_kernels.are_at),
        narrow=compiled(copy_kernels.NARROW, copy_kernels.narrow),
        narrow_row=compiled(copy_kernels.NARROW_ROW, copy_kernels.narrow_row),
        widen=compiled(copy_kernels.WIDEN, copy_kernels.widen),
        intern_row=compiled(frame_kernels.INTERN_ROW, frame_kernels.intern_row),
        release=compiled(frame_kernels.RELEASE, frame_kernels.release),
        index_frames=compiled(frame_kernels.INDEX, frame_kernels.index_frames),
        # These take up to milliseconds, in which other threads may run.
        gather_freely=compiled(copy_kernels.GATHER, copy_kernels.gather, nogil=True),
        put_freely=compiled(copy_kernels.PUT, copy_kernels.put, nogil=True),
        copy_items=compiled(copy_kernels.COPY_ITEMS, copy_kernels.copy_items, nogil=True),
        narrow_freely=compiled(copy_kernels.NARROW, copy_kernels.narrow, nogil=True),
        narrow_row_freely=compiled(copy_kernels.NARROW_ROW, copy_kernels.narrow_row, nogil=True),
        narrow_frames=compiled(copy_kernels.NARROW_FRAMES, copy_kernels.narrow_frames, nogil=True),
        widen_many=compiled(copy_kernels.WIDEN, copy_kernels.widen_many, nogil=True),
        intern=compiled(frame_kernels.INTERN, frame_kernels.intern, nogil=True),
        intern_row_freely=compiled(frame_kernels.INTERN_ROW, frame_kernels.intern_row, nogil=True),
        widen_steps=compiled(copy_kernels.WIDEN_STEPS, copy_kernels.widen_steps, nogil=True),
    )
