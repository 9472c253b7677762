"""Type names for numpy arrays, and allocation of their memory."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

#: An array of any dtype. Comments and docstrings name the dtype.
Array = npt.NDArray[Any]

_LINE, _HUGE_PAGE = 64, 2 << 20


def filled(size: int, value: float, dtype: Any) -> Array:
    """
    Overview:
        Return an array as ``np.full`` does, aligned so that no block of one cache line spans two. Large arrays use huge
        pages: with small pages a random access also waits for its address translation.
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
        made.fill(value)  # Pages of zeros use no memory before the first write.
    return made


def anonymous(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that is allocated on the first write."""
    # Private: forked environment workers and data loaders see the rows as of the fork. See ``forks``.
    # No reserve: otherwise the kernel refuses a sparse table larger than its memory, even if few pages are used.
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    if hasattr(mmap, 'MADV_HUGEPAGE'):
        try:
            # With small pages, random rows of a large table miss the TLB at each access.
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # The kernel has no huge pages.
    return region
