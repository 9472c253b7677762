"""
Elements -> columns. A schema is compiled once into splitters, one per node, that work on many values at a time: each
checks its container, and hands the values of each child on; leaves collect them into blocks, which are written last.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Callable, List, Mapping as MappingType, Optional as Maybe, Sequence, Tuple

import numpy as np
import torch
from treevalue import TreeValue
from treevalue.tree.common import TreeStorage

from .infer import MAPPING_TYPES
from .leaves import TENSOR_DTYPES, Shape, TensorDtype, as_array
from .nodes import (
    TREE_KINDS,
    Leaf,
    Mapping,
    Node,
    Nothing,
    Optional,
    Positional,
    Unrolled,
    children,
    presence_path,
)

#: Which of all rows, time steps counted as rows, a block belongs to; None for all of them.
Rows = Maybe[np.ndarray]
Split = Callable[[Sequence[Any], Rows, List['Block']], None]


class Misfit(Exception):
    """An element does not fit; who catches it finds out where."""


class Column:
    """One column: what storage allocates per row."""

    __slots__ = ('name', 'dtype', 'shape')

    def __init__(self, name: str, dtype: np.dtype, shape: Shape) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape


class Block(Tuple[Column, np.ndarray, Rows]):
    """Values of one column, checked, ready to be written."""


def splitter(node: Node, path: str, lead: Shape, columns: List[Column]) -> Split:
    """
    Overview:
        Compile a node; ``lead`` are the time axes above it. Adds its columns to ``columns``, in order.
    """
    if isinstance(node, Leaf):
        column = Column(path or '~~', node.storage, lead + node.shape)
        columns.append(column)
        return _leaf(node, column)
    if isinstance(node, Nothing):
        return _nothing
    if isinstance(node, Optional):
        presence = Column(presence_path(path), np.dtype('uint8'), lead)
        columns.append(presence)
        return _optional(presence, splitter(node.node, path, lead, columns))
    if isinstance(node, Unrolled):
        return _unrolled(node.length, splitter(node.item, path, lead + (node.length,), columns))
    splits = [splitter(child, place, lead, columns) for place, child in children(node, path)]
    if isinstance(node, Positional):
        return _places(node, splits)
    return _tree(node, splits) if node.kind in TREE_KINDS else _dict(node, splits)


def _leaf(node: Leaf, column: Column) -> Split:
    if node.kind == 'tensor':
        collect = _tensors(node)
    else:
        collect = _arrays(node) if node.kind in ('array', 'scalar') else _scalars(node)

    def split(values: Sequence[Any], rows: Rows, blocks: List[Any]) -> None:
        blocks.append((column, collect(values), rows))

    return split


def _only(kinds: Any, expected: Any) -> None:
    """All of one kind: a set of kinds has one member, and that is it."""
    if any(kind != expected for kind in kinds):
        raise Misfit


def _tensors(node: Leaf) -> Callable[[Sequence[Any]], np.ndarray]:
    stored: TensorDtype = TENSOR_DTYPES[node.dtype]
    dtype, shape = stored.torch, torch.Size(node.shape)
    facts = attrgetter('dtype', 'shape', 'layout')
    expected = (dtype, shape, torch.strided)

    def collect(values: Sequence[Any]) -> np.ndarray:
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise Misfit
        if len(values) == 1:
            if facts(values[0]) != expected:
                raise Misfit
            return as_array(values[0], stored)[None]
        _only(set(map(facts, values)), expected)
        return as_array(_stack(values), stored)

    return collect


def _stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({value.device for value in values}) > 1:
        values = [value.cpu() for value in values]
    with torch.no_grad():
        return torch.stack(tuple(values))


def _arrays(node: Leaf) -> Callable[[Sequence[Any]], np.ndarray]:
    expected = (np.dtype(node.dtype), node.shape)
    facts = attrgetter('dtype', 'shape')
    base = np.ndarray if node.kind == 'array' else np.generic

    def collect(values: Sequence[Any]) -> np.ndarray:
        if not all(isinstance(value, base) for value in values):
            raise Misfit
        _only(set(map(facts, values)), expected)
        if node.kind == 'scalar':
            return np.array(values, expected[0])
        return values[0][None] if len(values) == 1 else np.stack(values)

    return collect


def _scalars(node: Leaf) -> Callable[[Sequence[Any]], np.ndarray]:
    expected = {'bool': bool, 'int': int, 'float': float}[node.kind]

    def collect(values: Sequence[Any]) -> np.ndarray:
        _only(set(map(type, values)), expected)
        try:
            return np.array(values, node.storage)
        except OverflowError as e:
            raise Misfit from e

    return collect


def _nothing(values: Sequence[Any], rows: Rows, blocks: List[Any]) -> None:
    if any(value is not None for value in values):
        raise Misfit


def _optional(presence: Column, child: Split) -> Split:
    def split(values: Sequence[Any], rows: Rows, blocks: List[Any]) -> None:
        flags = np.array([value is not None for value in values], np.uint8)
        blocks.append((presence, flags, rows))
        if flags.all():
            child(values, rows, blocks)
            return
        held = np.flatnonzero(flags)
        child([values[i] for i in held], held if rows is None else rows[held], blocks)

    return split


def _unrolled(length: int, child: Split) -> Split:
    steps = np.arange(length)

    def split(values: Sequence[Any], rows: Rows, blocks: List[Any]) -> None:
        _only(set(map(type, values)), list)
        _only(set(map(len, values)), length)
        child(
            list(chain.from_iterable(values)),
            None if rows is None else (rows[:, None] * length + steps).reshape(-1),
            blocks,
        )

    return split


def _places(node: Positional, splits: List[Split]) -> Split:
    getters = [itemgetter(place) for place in range(len(splits))]

    def split(values: Sequence[Any], rows: Rows, blocks: List[Any]) -> None:
        for kind in set(map(type, values)):
            if not _is_kind(kind, node):
                raise Misfit
        _only(set(map(len, values)), len(splits))
        for getter, child in zip(getters, splits):
            child(list(map(getter, values)), rows, blocks)

    return split


def _is_kind(kind: type, node: Positional) -> bool:
    if not node.fields:
        return kind is (list if node.kind == 'list' else tuple)
    return f'{kind.__module__}:{kind.__qualname__}' == node.kind and getattr(kind, '_fields', None) == node.fields


def _dict(node: Mapping, splits: List[Split]) -> Split:
    expected = next(kind for kind, name in MAPPING_TYPES.items() if name == node.kind)
    getters = [itemgetter(key) for key in node.keys]

    def split(values: Sequence[Any], rows: Rows, blocks: List[Any]) -> None:
        _only(set(map(type, values)), expected)
        _only(set(map(len, values)), len(splits))
        try:
            for getter, child in zip(getters, splits):
                child(list(map(getter, values)), rows, blocks)
        except KeyError as e:
            raise Misfit from e

    return split


def _tree(node: Mapping, splits: List[Split]) -> Split:
    expected = next(kind for kind, name in MAPPING_TYPES.items() if name == node.kind)
    keys = node.keys

    def split(values: Sequence[Any], rows: Rows, blocks: List[Any]) -> None:
        for kind in set(map(type, values)):
            if kind is not TreeStorage and kind is not expected:
                raise Misfit
        stores = [value._detach() if isinstance(value, TreeValue) else value for value in values]
        _only({store.size() for store in stores}, len(splits))
        try:
            for key, child in zip(keys, splits):
                child([store.get(key) for store in stores], rows, blocks)
        except KeyError as e:
            raise Misfit from e

    return split


def write(blocks: Sequence[Any], columns: MappingType[str, np.ndarray], start: int, n: int) -> None:
    for column, values, rows in blocks:
        place = columns[column.name][start : start + n]
        if rows is None:
            place[...] = values.reshape(place.shape)
        else:
            place[...] = 0
            lead = place.shape[: place.ndim - (values.ndim - 1)]
            place[np.unravel_index(rows, lead)] = values
