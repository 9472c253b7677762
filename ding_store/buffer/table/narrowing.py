"""
Frames whose float32 values are exactly k/255, k in 0 to 255, as the bytes k: a quarter of the memory, and the same bits
when they are read. Atari's frames are such.
"""

from __future__ import annotations

import threading
from typing import Dict, Iterable, List, Mapping, Optional

import numpy as np
import torch

from ding_store.buffer.arrays import Array
from ding_store.buffer.kernels.load import Kernels, load_kernels
from ding_store.buffer.table.cold import ColdColumn
from ding_store.buffer.table.regions import ColumnSpec, spec_bytes

#: Smaller leaves are not worth a look at every push.
MIN_BYTES = 4096
#: So many numbers are looked at at once: they stay in the cache.
_STEP = 1 << 17
#: As many as a core's own cache holds beside other things.
_CACHED = 1 << 15

_scratch = threading.local()


def narrow(values: Array) -> Optional[Array]:
    """The bytes k of float32 values that are all exactly k/255, bit by bit; None if one is not."""
    flat = np.ascontiguousarray(values).reshape(-1)
    narrowed = np.empty(flat.shape, np.uint8)
    kernels = load_kernels()
    is_exact = _narrow_in_numpy(flat, narrowed) if kernels is None else _narrow_compiled(kernels, flat, narrowed)
    return narrowed.reshape(values.shape) if is_exact else None


def _narrow_compiled(kernels: Kernels, flat: Array, narrowed: Array) -> bool:
    # Values that no cache has are copied to where they are in one: the loop alone waits for memory line by line, 65 us
    # for 113 KB, and 29 with the copy.
    copied = _reused('copied', min(_CACHED, len(flat)), np.float32)
    for start in range(0, len(flat), _CACHED):
        part = copied[: len(flat) - start][:_CACHED]
        part[...] = flat[start : start + _CACHED]
        if not kernels.narrow(part, part.view(np.int32), narrowed[start : start + _CACHED]):
            return False
    return True


def _narrow_in_numpy(flat: Array, narrowed: Array) -> bool:
    scaled = _reused('floats', min(_STEP, len(flat)), np.float32)
    for start in range(0, len(flat), _STEP):
        part, target = flat[start : start + _STEP], narrowed[start : start + _STEP]
        floats, levels = torch.from_numpy(scaled[: len(part)]), torch.from_numpy(target)
        # numpy reads the values: torch does not like that what others own is read-only. What is no number of 0 to 255
        # becomes any byte, which the comparison finds out; of bits, since 0.0 equals -0.0, and no NaN itself.
        with np.errstate(all='ignore'):
            np.multiply(part, np.float32(255), out=scaled[: len(part)])
        levels.copy_(floats.round_())
        floats.copy_(levels).div_(255.0)
        if not np.array_equal(scaled[: len(part)].view(np.int32), part.view(np.int32)):
            return False
    return True


def widen(narrowed: Array, out: Array) -> None:
    """The values that ``narrow`` was given."""
    torch.from_numpy(out).copy_(torch.from_numpy(narrowed)).div_(255.0)


def widened(narrowed: Array) -> Array:
    """As ``widen``, of bytes that may be read-only, into a fresh array."""
    return gather(narrowed, np.arange(len(narrowed)), None)


def gather(column: Array, slots: Array, out: Optional[Array]) -> Array:
    """Rows of a narrow column, widened."""
    if out is None:
        out = np.empty((len(slots), *column.shape[1:]), np.float32)
    count = out.size
    rows = _reused('bytes', count, np.uint8)[:count].reshape(out.shape)
    widen(column.take(slots, 0, rows, 'clip'), out)
    return out


def take_into(column: Array, slots: Array, out: Array, cold: Optional[ColdColumn] = None) -> None:
    """
    Rows of a column, narrow or not, into an array of the dtype that they have outside of the table; by way of ``cold``
    if that is the column's.
    """
    if cold is not None:
        cold.each(slots, lambda place, row: put_row(row, out[place]))
    elif column.dtype == out.dtype:
        # Without mode='clip' numpy fills a buffer of its own first: 2-5 times slower.
        column.take(slots, 0, out, 'clip')
    else:
        gather(column, slots, out)


def put_row(row: Array, out: Array) -> None:
    """A row, narrow or not, into an array of the same shape."""
    if row.dtype == out.dtype:
        out[...] = row
    else:
        widen(row, out)


def candidates(specs: Mapping[str, ColumnSpec], columns: Mapping[str, Array]) -> List[str]:
    """Names of columns that may be kept so, going by these rows of them."""
    large = [name for name, spec in specs.items() if spec[0] == np.float32 and spec_bytes(spec) >= MIN_BYTES]
    return [name for name in large if name in columns and len(columns[name]) and narrow(columns[name]) is not None]


def stored_specs(specs: Mapping[str, ColumnSpec], names: Iterable[str]) -> Dict[str, ColumnSpec]:
    """As columns are kept when these are narrow."""
    chosen = set(names)
    return {name: (np.dtype(np.uint8) if name in chosen else spec[0], spec[1]) for name, spec in specs.items()}


def _reused(name: str, size: int, dtype: type) -> Array:
    """Memory of this thread, at least so large: fresh memory costs more than the work on it."""
    found: Optional[Array] = getattr(_scratch, name, None)
    if found is None or len(found) < size:
        found = np.empty(size, dtype)
        setattr(_scratch, name, found)
    return found
