"""The loop that copies rows to the columns of a batch. Numba compiles it at its first use, once per installation."""

from __future__ import annotations

import functools
from typing import Callable, Optional

from ding_store.buffer.array_types import Array
from ding_store.compiled.compiler import Compiler, is_wanted, with_compiler

_INTS = 'int64[::1]'
GATHER_ROWS = f'void(int64, int64, {_INTS}, {_INTS}, {_INTS}, {_INTS}, {_INTS})'

GatherRows = Callable[[int, int, Array, Array, Array, Array, Array], None]


def load_gather() -> Optional[GatherRows]:
    """Return the compiled ``gather_rows``. Return None if numba is not installed or ``DING_STORE_NO_NUMBA`` is set."""
    return _compiled() if is_wanted() else None


@functools.cache
def _compiled() -> Optional[GatherRows]:
    return with_compiler(_compile)


def _compile(compiled: Compiler) -> GatherRows:
    from ding_store.datasets import row_kernels

    return compiled(GATHER_ROWS, row_kernels.gather_rows, nogil=True)
