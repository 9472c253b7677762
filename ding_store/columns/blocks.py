"""Checks and gathers the values of one leaf from many elements, and writes them to its column."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Callable, Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from ding_store.compiled import MIN_BYTES, copy_past_caches

from .infer import infer
from .leaves import PLAIN_ARRAYS, TENSOR_DTYPES, Shape, as_array
from .merge import wider
from .nodes import Leaf
from .ragged import Items

#: Rows of this size or more are copied one by one to their place. Smaller ones are stacked first, which is faster.
LARGE_ROW_BYTES = 16384

_INT64 = np.iinfo(np.int64)
_NO_ITEMS = np.empty(0, np.uint8)


class Misfit(Exception):
    """An element does not fit. The handler of this exception finds the place."""


class Inexact(Misfit):
    """A number has no exact equal among the numbers of its column's kind."""


class Column(NamedTuple):
    """Storage that is allocated per row. The first ``num_time_axes`` axes of the shape are time."""

    name: str
    dtype: np.dtype
    shape: Shape
    num_time_axes: int


#: A new array of all values, or a list of arrays that may be views of the elements.
Values = Union[np.ndarray, List[np.ndarray]]
Collect = Callable[[Sequence[Any]], Values]
#: Rows of the values, with time steps counted as rows. None for all rows. The other rows become zero.
Rows = Optional[np.ndarray]
Block = Tuple[Column, Values, Rows]


def collector(leaf: Leaf) -> Collect:
    """Return the function that checks values against a leaf and converts them for its column, or raises Misfit."""
    if leaf.kind == 'tensor':
        return _tensors(leaf)
    collect = {'array': _arrays, 'scalar': _numpy_scalars}.get(leaf.kind, _python_scalars)(leaf)
    if leaf.shape:
        return collect

    def collect_or_convert(values: Sequence[Any]) -> Values:
        try:
            return collect(values)
        except Misfit:
            return _converted(leaf, values)

    return collect_or_convert


def _converted(leaf: Leaf, values: Sequence[Any]) -> np.ndarray:
    """Convert numbers of several kinds to this leaf's kind, which must hold each of them exactly."""
    made = np.empty(len(values), leaf.storage)
    for place, value in enumerate(values):
        if not _is_number(value) or (kind := infer(value)) != leaf and wider(leaf, kind) != leaf:
            raise Misfit
        number = value if isinstance(value, (bool, int, float)) else value.item()
        made[place] = number
        if made[place].item() != number and number == number:
            raise Inexact(number)
    return made


def _is_number(value: Any) -> bool:
    if type(value) in PLAIN_ARRAYS:
        return value.shape == () and value.dtype.kind in 'biuf'
    if type(value) is int:
        return _INT64.min <= value <= _INT64.max
    return type(value) in (bool, float) or (isinstance(value, np.generic) and value.dtype.kind in 'biuf')


def item_collector(leaf: Leaf) -> Callable[[Sequence[Any]], Items]:
    """Return the function that checks values against a ragged leaf, or raises Misfit. It copies nothing."""
    row = _tensor_row(leaf) if leaf.kind == 'tensor' else _array_row(leaf)
    num_axes, tail = len(leaf.shape), leaf.shape[1:]

    def collect(values: Sequence[Any]) -> Items:
        items = Items()
        for value in values:
            array = row(value)
            if array.ndim != num_axes or array.shape[1:] != tail:
                raise Misfit
            items.append(array)
        return items

    return collect


def _array_row(leaf: Leaf) -> Callable[[Any], np.ndarray]:
    dtype = leaf.storage

    def row(value: Any) -> np.ndarray:
        if type(value) not in PLAIN_ARRAYS or value.dtype != dtype:
            raise Misfit
        return value

    return row


def _tensor_row(leaf: Leaf) -> Callable[[Any], np.ndarray]:
    stored = TENSOR_DTYPES[leaf.dtype]
    dtype = stored.torch

    def row(value: Any) -> np.ndarray:
        if not isinstance(value, torch.Tensor) or value.dtype is not dtype or value.layout is not torch.strided:
            raise Misfit
        return as_array(value, stored)

    return row


def _row_bytes(leaf: Leaf) -> int:
    return leaf.storage.itemsize * int(np.prod(leaf.shape))


def _tensors(leaf: Leaf) -> Collect:
    stored, shape = TENSOR_DTYPES[leaf.dtype], leaf.shape
    dtype, dtype_of = stored.torch, attrgetter('dtype')
    large = _row_bytes(leaf) >= LARGE_ROW_BYTES

    def row(value: Any) -> np.ndarray:
        if not isinstance(value, torch.Tensor) or value.dtype is not dtype:
            raise Misfit
        try:
            array = value.numpy() if stored.carrier is None else as_array(value, stored)
        except (RuntimeError, TypeError):  # It has a gradient, is on a GPU, or is sparse.
            array = _as_dense_array(value)
        if array.shape != shape:
            raise Misfit
        return array

    def _as_dense_array(value: torch.Tensor) -> np.ndarray:
        if value.layout is not torch.strided:
            raise Misfit
        return as_array(value, stored)

    def collect(values: Sequence[Any]) -> Values:
        if len(values) == 1:
            return [row(values[0])]
        if large:
            return [row(value) for value in values]
        if set(map(type, values)) == {torch.Tensor} and set(map(dtype_of, values)) == {dtype}:
            try:
                block = as_array(torch.stack(list(values)), stored)
            except (RuntimeError, TypeError):
                pass  # Shapes or devices differ: convert them one by one.
            else:
                if block.shape[1:] == shape:
                    return block
        rows: Values = np.stack([row(value) for value in values])
        return rows

    return collect


def _arrays(leaf: Leaf) -> Collect:
    dtype, shape = leaf.storage, leaf.shape
    large = _row_bytes(leaf) >= LARGE_ROW_BYTES

    def collect(values: Sequence[Any]) -> Values:
        for value in values:
            if type(value) not in PLAIN_ARRAYS or value.dtype != dtype or value.shape != shape:
                raise Misfit
        if large or len(values) == 1:
            return list(values)
        if not shape:
            return np.array(values, dtype)
        block: np.ndarray = np.concatenate(values, dtype=dtype).reshape((len(values),) + shape)
        return block

    return collect


def _numpy_scalars(leaf: Leaf) -> Collect:
    dtype = leaf.storage

    def collect(values: Sequence[Any]) -> Values:
        if not all(isinstance(value, np.generic) and value.dtype == dtype for value in values):
            raise Misfit
        return np.array(values, dtype)

    return collect


def _python_scalars(leaf: Leaf) -> Collect:
    dtype, expected = leaf.storage, {{'bool': bool, 'int': int, 'float': float}[leaf.kind]}

    def collect(values: Sequence[Any]) -> Values:
        if set(map(type, values)) != expected:
            raise Misfit
        try:
            return np.array(values, dtype)
        except OverflowError as e:
            raise Misfit from e

    return collect


def make_columns(blocks: Sequence[Block], num_rows: int, listed: Collection[str]) -> Dict[str, Values]:
    """
    Overview:
        Make new columns of these blocks. New arrays become columns without a copy. Lists of ``listed`` columns stay
        lists.
    """
    columns: Dict[str, Values] = {}
    for block in blocks:
        column, values, rows = block = _with_lengths(block)
        shape = (num_rows,) + column.shape
        if column.name in listed and rows is None and isinstance(values, list):
            columns[column.name] = values
        elif rows is not None or (num_rows > 1 and isinstance(values, list)):
            made = columns[column.name] = np.empty(shape, column.dtype)
            write(block, made)
        elif isinstance(values, np.ndarray):
            columns[column.name] = values.reshape(shape)
        else:
            columns[column.name] = np.array(values, column.dtype).reshape(shape)
    return columns


def _with_lengths(block: Block) -> Block:
    """Return the block of a leaf's column. For a ragged leaf, these are the lengths of its items."""
    column, values, rows = block
    return (column, values.lengths, rows) if isinstance(values, Items) else block


def items_of(block: Block, num_rows: int) -> List[np.ndarray]:
    """Return the arrays of a ragged leaf by row. Rows that lack the leaf have an empty one."""
    _, values, rows = block
    if rows is None:
        return list(values)
    made = [_NO_ITEMS] * num_rows
    for row, array in zip(rows.tolist(), values):
        made[row] = array
    return made


def write(block: Block, place: np.ndarray, slots: Optional[np.ndarray] = None, is_far: bool = False) -> None:
    """
    Overview:
        Write a block to all rows of a column, or to ``slots``, one row per element. ``is_far``: the column belongs to a
        table and is not read soon.
    """
    column, values, rows = block
    if rows is None and isinstance(values, np.ndarray):
        if slots is None:
            place[...] = values.reshape(place.shape)
        else:
            place[slots] = values.reshape((len(slots), *place.shape[1:]))
    elif rows is None and not column.num_time_axes:
        is_far = is_far and place[:1].nbytes >= MIN_BYTES
        for slot, value in zip(range(len(place)) if slots is None else slots.tolist(), values):
            if is_far:
                copy_past_caches(place[slot], value)
            else:
                place[slot] = value
    else:
        num_rows = len(place) if slots is None else len(slots)
        _scatter(values, rows, place, (num_rows, *place.shape[1 : 1 + column.num_time_axes]), slots)


def _scatter(values: Values, rows: Rows, place: np.ndarray, steps: Shape, slots: Optional[np.ndarray]) -> None:
    if rows is None:
        rows = np.arange(len(values))
    else:
        place[... if slots is None else slots] = 0
    where = np.unravel_index(rows, steps)
    if slots is not None:
        where = (slots[where[0]], *where[1:])
    if isinstance(values, np.ndarray):
        place[where] = values
        return
    for index, value in zip(zip(*where), values):
        place[index] = value
