"""Choices of rows without a sampler: by index, by age, by group. They are called with the index locked."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import RowGone


def to_row(index: Any) -> int:
    """Return the row number of an index string, or -1 for a string of another origin. No row has number -1."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return -1


def by_indices(indices: Sequence[str], sample_range: Optional[slice] = None) -> Callable[[RowIndex], Array]:
    """
    Overview:
        Choose the slots of these rows, in this order, with repetitions.
    Raises (when called):
        - RowGone: A row is not in the table, or not in ``sample_range``.
    """
    rows = np.array([to_row(index) for index in indices], np.int64)

    def choose(index: RowIndex) -> Array:
        slots, found = index.find(rows)
        if sample_range is not None:
            found &= np.isin(slots, index.slots_by_age()[sample_range])
        if not found.all():
            raise RowGone(f'index {indices[int(np.argmin(found))]!r} is not in the buffer')
        return slots

    return choose


def by_rows(rows: Array) -> Callable[[RowIndex], Array]:
    """
    Overview:
        Choose the slots of these row numbers, in this order.
    Raises (when called):
        - RowGone: A row is not in the table.
    """
    wanted = as_rows(rows)

    def choose(index: RowIndex) -> Array:
        slots, found = index.find(wanted)
        if not found.all():
            gone = wanted[~found][0]
            raise RowGone(f'row {gone} is not in the table: it was evicted or deleted, or never existed')
        return slots

    return choose


def as_rows(rows: Array) -> Array:
    """Convert row numbers to int64 of shape ``(B,)``. Raises TypeError for anything else."""
    rows = np.asarray(rows)
    if rows.ndim != 1 or (rows.dtype.kind not in 'iu' and rows.size):
        raise TypeError(f'rows must be integers of shape (B,), got {rows.dtype} of shape {rows.shape}')
    return rows.astype(np.int64, copy=False)


def by_live_rows(rows: Array) -> Callable[[RowIndex], Array]:
    """Choose the slots of those rows that are still in the table, in the given order."""

    def choose(index: RowIndex) -> Array:
        slots, found = index.find(rows)
        return slots[found]

    return choose


def by_age(position: int) -> Callable[[RowIndex], Array]:
    """
    Overview:
        Choose the slot of the row at a position in the order of age: 0 is the oldest, -1 the newest.
    Raises (when called):
        - IndexError: There are too few rows.
    """

    def choose(index: RowIndex) -> Array:
        count = index.count
        if not -count <= position < count:
            raise IndexError(f'index {position} is out of range of a buffer of {count}')
        place = position % count
        return index.slots_by_age()[place : place + 1].astype(np.intp)

    return choose


def split(items: List[Any], lengths: Sequence[int]) -> List[List[Any]]:
    """Cut a list into lists of these lengths."""
    ends = np.cumsum(lengths).tolist()
    return [items[end - length : end] for end, length in zip(ends, lengths)]


def check_sample_arguments(
    size: Optional[int],
    indices: Optional[Sequence[str]],
    groupby: Optional[str],
    unroll_len: Optional[int],
    sample_range: Optional[slice],
) -> Tuple[int, Optional[List[str]]]:
    """
    Overview:
        Check the arguments of a sample. Return the number of rows, and the indices if they were given.
    Raises:
        - TypeError: The arguments are invalid. DI-engine's fetcher takes ValueError and AssertionError for a lack of
          data.
    """
    # False counts as None: middleware written for DequeBuffer passes its ``replace`` in this position.
    chosen = None if indices is None or (isinstance(indices, bool) and not indices) else list(indices)
    if size is not None:
        size = integer('size', size, 0, TypeError)
    if not size and not chosen:
        raise TypeError(f'one of size ({size!r}) and indices ({chosen!r}) must not be empty')
    if size and chosen and size != len(chosen):
        raise TypeError(f'size ({size}) and the number of indices ({len(chosen)}) must be equal')
    if chosen and groupby is not None:
        raise TypeError(f'indices cannot be combined with groupby ({groupby!r})')
    if unroll_len is not None:
        unroll_len = integer('unroll_len', unroll_len, 0, TypeError)
    if unroll_len and groupby is None:
        raise TypeError(f'unroll_len ({unroll_len}) needs groupby')
    if sample_range is not None and (not isinstance(sample_range, slice) or sample_range.step == 0):
        raise TypeError(f'sample_range ({sample_range!r}) must be a slice with a step other than 0')
    return int(size or len(chosen or ())), chosen or None
