"""
Copies past the caches. A processor reads a line of memory before it writes to it, and a copy of more than its caches
hold is a third slower by that; it also drives out what others would have found there.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import numpy as np

from ding_store.copying.compiler import Compiler, is_wanted, with_compiler

#: More than a core's caches hold, in all: what is written goes past them.
FAR_BYTES = 10 << 20
#: Arrays that are smaller are copied through the caches: the call takes longer than numpy's.
MIN_BYTES = 1 << 16


def copy_past_caches(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """
    Overview:
        ``np.copyto(target, source)``, for targets of which nothing is read soon, or more than the caches hold. Other
        threads run meanwhile.
    Arguments:
        - target (:obj:`np.ndarray`): Overlaps the source nowhere.
    Raises:
        - TypeError, ValueError: As np.copyto.
    """
    if _are_plain(target, source):
        copy = _load()
        if copy is not None:
            copy(target.ctypes.data, source.ctypes.data, target.nbytes)
            return
    np.copyto(target, source)


def _are_plain(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> bool:
    """Whether the copy is one of bytes, and large."""
    return (
        target.nbytes >= MIN_BYTES
        and target.dtype == source.dtype
        and target.shape == source.shape
        and target.flags.carray
        and source.flags.c_contiguous
        and not target.dtype.hasobject
    )


def _load() -> Optional[Callable[[int, int, int], None]]:
    return _compiled() if is_wanted() else None


@functools.cache
def _compiled() -> Optional[Callable[[int, int, int], None]]:
    return with_compiler(_compile)


def _compile(compiled: Compiler) -> Callable[..., Any]:
    from ding_store.copying import lines

    return compiled('void(int64, int64, int64)', lines.copy, nogil=True)
