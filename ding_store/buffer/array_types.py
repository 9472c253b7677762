"""Names for numpy's types, and the memory that arrays are in."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

#: An array of any dtype; comments and docstrings say which.
Array = npt.NDArray[Any]

_LINE, _HUGE_PAGE = 64, 2 << 20


def filled(size: int, value: float, dtype: Any) -> Array:
    """
    Overview:
        As ``np.full``, beginning with a cache line, so that no block of such is on one more; and, where that is worth
        it, in huge pages: at random places of small ones each look waits for its address, too.
    """
    num_bytes = size * np.dtype(dtype).itemsize
    if num_bytes >= _HUGE_PAGE:
        num_pages = -(-num_bytes // _HUGE_PAGE)
        memory, unit = np.frombuffer(anonymous((num_pages + 1) * _HUGE_PAGE), np.uint8), _HUGE_PAGE
    else:
        memory, unit = np.zeros(num_bytes + _LINE, np.uint8), _LINE
    first = -memory.ctypes.data % unit
    made: Array = memory[first : first + num_bytes].view(dtype)
    if value:
        made.fill(value)  # Zeros take no memory before they are written.
    return made


def anonymous(num_bytes: int) -> mmap.mmap:
    """Memory that is zero, and taken when it is written to."""
    # Private: forked environment workers and data loaders have the rows of the moment of the fork. See ``forks``.
    # No reserve: the kernel would refuse a sparse table larger than its memory, though few of its pages be used.
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    if hasattr(mmap, 'MADV_HUGEPAGE'):
        try:
            # Random rows of a large table miss the TLB at every one of its small pages.
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # A kernel without huge pages.
    return region
