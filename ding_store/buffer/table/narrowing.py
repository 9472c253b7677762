"""
Columns of float32 values that are exactly k/255, stored as the bytes k in 0 to 255. They take a quarter of the memory
and are read back with the same bits. Atari frames have such values.
"""

from __future__ import annotations

import threading
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np
import torch

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.load import BRIEF_BYTES, load_kernels
from ding_store.buffer.table.specs import ColumnSpec, not_narrowed, spec_bytes

#: Smaller leaves are not checked: the gain does not pay for a check at every push.
MIN_BYTES = 4096
#: Number of values that the version without numba converts at once. They stay in the cache.
_STEP = 1 << 17
#: Up to this size the result is written to memory that this thread reuses.
_MAX_WARM_BYTES = 16 << 20

_scratch = threading.local()


def narrow(values: Array) -> Optional[Array]:
    """Return the bytes k if all float32 values are exactly k/255, bit by bit. Otherwise return None."""
    narrowed = np.empty(values.shape, np.uint8)
    return narrowed if narrow_into([values], narrowed[None]) else None


def narrowed_columns(columns: Mapping[str, Any], names: Iterable[str]) -> Dict[str, Optional[Array]]:
    """
    Overview:
        Convert columns to bytes. Each column is an array or the list of its parts. The results share memory that is
        valid until this thread calls again.
    Returns:
        - narrowed (:obj:`Dict[str, Optional[np.ndarray]]`): Name -> bytes ``(size,)``, or None if a value of the column
          is not exactly k/255.
    """
    parts = {name: parts_of(columns[name]) for name in names}
    sizes = {name: len(each) * each[0].size for name, each in parts.items()}
    free = warm_bytes('narrowed', sum(sizes.values()))
    narrowed: Dict[str, Optional[Array]] = {}
    for name, each in parts.items():
        target, free = free[: sizes[name]], free[sizes[name] :]
        narrowed[name] = target if narrow_into(each, target) else None
    return narrowed


def narrow_into(parts: Sequence[Array], narrowed: Array) -> bool:
    """
    Overview:
        Convert arrays of one size to bytes, like ``narrow``. Write them to the rows of a contiguous array.
    Returns:
        - is_exact (:obj:`bool`): Whether all values are exactly k/255. If not, the contents of ``narrowed`` are
          undefined.
    """
    kernels = load_kernels()
    convert = _narrow_in_numpy
    if kernels is not None:
        convert = kernels.narrow if parts[0].nbytes <= BRIEF_BYTES else kernels.narrow_freely
    return all(convert(flat(part), target) for part, target in zip(parts, narrowed.reshape(len(parts), -1)))


def parts_of(column: Any) -> List[Array]:
    """Return the arrays of a column that may be the list of its parts."""
    return column if isinstance(column, list) else [column]


def flat(part: Array) -> Array:
    """Return the values of an array behind each other, as compiled loops take them."""
    return (part if part.flags.c_contiguous and part.flags.aligned else part.copy()).reshape(-1)


def _narrow_in_numpy(flat: Array, narrowed: Array) -> bool:
    scaled = _reused('floats', min(_STEP, len(flat)), np.float32)
    for start in range(0, len(flat), _STEP):
        part, target = flat[start : start + _STEP], narrowed[start : start + _STEP]
        floats, levels = torch.from_numpy(scaled[: len(part)]), torch.from_numpy(target)
        # Use numpy here: torch warns about read-only arrays. A value outside 0 to 255 becomes an arbitrary byte, which
        # the comparison below detects. It compares bits, since 0.0 equals -0.0, and NaN does not equal itself.
        with np.errstate(all='ignore'):
            np.multiply(part, np.float32(255), out=scaled[: len(part)])
        levels.copy_(floats.round_())
        floats.copy_(levels).div_(255.0)
        if not np.array_equal(scaled[: len(part)].view(np.int32), part.view(np.int32)):
            return False
    return True


def warm_bytes(name: str, size: int) -> Array:
    """Return so many bytes. This thread gets the same memory for the same name again, unless it is large."""
    return np.empty(size, np.uint8) if size > _MAX_WARM_BYTES else _reused(name, size, np.uint8)[:size]


def widen(narrowed: Array, out: Array) -> None:
    """Write the float32 values k/255 of these bytes to ``out``."""
    torch.from_numpy(out).copy_(torch.from_numpy(narrowed)).div_(255.0)


def widened(narrowed: Array) -> Array:
    """Return the float32 values of bytes in a fresh array. The bytes may be read-only."""
    return gather(narrowed, np.arange(len(narrowed)), None)


def widened_columns(columns: Mapping[str, Array], names: Collection[str]) -> Mapping[str, Array]:
    """
    Overview:
        Return the columns with those in ``names`` widened to float32.
    Raises:
        - SchemaMismatch: A column in ``names`` is missing, or is not bytes.
    """
    for name in names:
        if name not in columns or columns[name].dtype != np.uint8:
            raise not_narrowed(name, columns)
    return {**columns, **{name: widened(columns[name]) for name in names}} if names else columns


def gather(column: Array, slots: Array, out: Optional[Array]) -> Array:
    """
    Return rows of a narrow column, widened. Raises ValueError if ``out`` has another shape: another thread may have
    replaced the columns meanwhile.
    """
    shape = (len(slots), *column.shape[1:])
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.shape != shape:
        raise ValueError(f'rows of shape {shape} do not fit into an array of shape {out.shape}')
    kernels = load_kernels()
    if kernels is not None and column.size and out.size and column.flags.c_contiguous and out.flags.carray:
        convert = kernels.widen if out.nbytes <= BRIEF_BYTES else kernels.widen_many
        rows = np.ascontiguousarray(slots, np.int64)
        convert(column.reshape(len(column), -1), rows, out.reshape(len(slots), -1))
        return out
    count = out.size
    taken = _reused('bytes', count, np.uint8)[:count].reshape(out.shape)
    widen(column.take(slots, 0, taken, 'clip'), out)
    return out


def candidates(
    specs: Mapping[str, ColumnSpec], columns: Mapping[str, Array], narrowed: Collection[str] = ()
) -> List[str]:
    """
    Return the names of columns that may be stored as bytes, judged by these rows. ``narrowed`` names columns that are
    bytes already.
    """
    large = [name for name, spec in specs.items() if spec[0] == np.float32 and spec_bytes(spec) >= MIN_BYTES]
    found = [name for name in large if name in narrowed or (name in columns and len(columns[name]))]
    # Another dtype than that of the schema is refused later, by the check of the columns.
    return [n for n in found if n in narrowed or (columns[n].dtype == np.float32 and narrow(columns[n]) is not None)]


def stored_specs(specs: Mapping[str, ColumnSpec], names: Iterable[str]) -> Dict[str, ColumnSpec]:
    """Return the specs with which columns are stored if those in ``names`` are narrow."""
    chosen = set(names)
    return {name: (np.dtype(np.uint8) if name in chosen else spec[0], spec[1]) for name, spec in specs.items()}


def _reused(name: str, size: int, dtype: type) -> Array:
    """Return memory of this thread with room for ``size`` values. Fresh memory would cost more than the work on it."""
    found: Optional[Array] = getattr(_scratch, name, None)
    if found is None or len(found) < size:
        found = np.empty(size, dtype)
        setattr(_scratch, name, found)
    return found
