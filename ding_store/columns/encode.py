"""Turns elements into blocks of values, with one compiled splitter per node of the schema.

A splitter works on the values of many elements at a time. It checks its container and passes the values of each child
on. Leaves gather them.
"""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import Any, Callable, List, Sequence

import numpy as np
from treevalue.tree.common import TreeStorage

from ding_store.errors import SchemaMismatch

from .blocks import Block, Column, Inexact, Misfit, Rows, collector, item_collector
from .infer import MAPPING_TYPES, kind_of
from .leaves import Shape
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
    column_name,
    presence_name,
)

#: (values, their rows, list to append the blocks to) -> None. Raises Misfit.
Split = Callable[[Sequence[Any], Rows, List[Block]], None]

_TYPES = {name: kind for kind, name in MAPPING_TYPES.items()}


def splitter(node: Node, path: str, lead: Shape, columns: List[Column]) -> Split:
    """Compile a node. ``lead`` are the time axes above it. Adds its columns to ``columns``."""
    if isinstance(node, Leaf):
        dtype, shape = (np.dtype(np.int64), ()) if node.is_ragged else (node.storage, node.shape)
        return _leaf(node, _add(columns, column_name(path), dtype, lead, shape))
    if isinstance(node, Nothing):
        return _nothing
    if isinstance(node, Optional):
        presence = _add(columns, presence_name(path, lead), np.dtype('uint8'), lead, ())
        return _optional(presence, splitter(node.node, path, lead, columns))
    if isinstance(node, Unrolled):
        return _unrolled(node.length, splitter(node.item, path, lead + (node.length,), columns))
    splits = [splitter(child, place, lead, columns) for place, child in children(node, path)]
    if isinstance(node, Positional):
        return _places(node, splits)
    return _tree(node, splits) if node.kind in TREE_KINDS else _dict(node, splits)


def _add(columns: List[Column], name: str, dtype: np.dtype, lead: Shape, shape: Shape) -> Column:
    columns.append(Column(name, dtype, lead + shape, len(lead)))
    return columns[-1]


def _leaf(node: Leaf, column: Column) -> Split:
    if node.is_ragged:
        return _ragged(node, column)
    collect, none = collector(node), np.empty((0,) + node.shape, node.storage)

    def split(values: Sequence[Any], rows: Rows, blocks: List[Block]) -> None:
        try:
            blocks.append((column, collect(values) if values else none, rows))
        except Inexact as e:
            raise SchemaMismatch(f'leaf {column.name!r}: expected {node}, got {e}, which it cannot hold') from None

    return split


def _ragged(node: Leaf, column: Column) -> Split:
    collect = item_collector(node)

    def split(values: Sequence[Any], rows: Rows, blocks: List[Block]) -> None:
        blocks.append((column, collect(values), rows))

    return split


def _nothing(values: Sequence[Any], rows: Rows, blocks: List[Block]) -> None:
    if any(value is not None for value in values):
        raise Misfit


def _optional(presence: Column, child: Split) -> Split:
    def split(values: Sequence[Any], rows: Rows, blocks: List[Block]) -> None:
        flags = np.array([value is not None for value in values], np.uint8)
        blocks.append((presence, flags, rows))
        if flags.all():
            child(values, rows, blocks)
        else:
            held = np.flatnonzero(flags)
            child([values[i] for i in held], held if rows is None else rows[held], blocks)

    return split


def _unrolled(length: int, child: Split) -> Split:
    steps = np.arange(length)

    def split(values: Sequence[Any], rows: Rows, blocks: List[Block]) -> None:
        for value in values:
            if type(value) is not list or len(value) != length:
                raise Misfit
        below = None if rows is None else (rows[:, None] * length + steps).reshape(-1)
        child(list(chain.from_iterable(values)), below, blocks)

    return split


def _places(node: Positional, splits: List[Split]) -> Split:
    parts = [(itemgetter(place), split) for place, split in enumerate(splits)]
    expected = (node.kind, node.fields, len(splits))

    def split(values: Sequence[Any], rows: Rows, blocks: List[Block]) -> None:
        for value in values:
            if not isinstance(value, (list, tuple)) or kind_of(type(value)) + (len(value),) != expected:
                raise Misfit
        for get, child in parts:
            child(list(map(get, values)), rows, blocks)

    return split


def _dict(node: Mapping, splits: List[Split]) -> Split:
    expected, num_keys = _TYPES[node.kind], len(splits)
    parts = [(itemgetter(key), split) for key, split in zip(node.keys, splits)]

    def split(values: Sequence[Any], rows: Rows, blocks: List[Block]) -> None:
        for value in values:
            if type(value) is not expected or len(value) != num_keys:
                raise Misfit
        try:
            for get, child in parts:
                child(list(map(get, values)), rows, blocks)
        except KeyError as e:
            raise Misfit from e

    return split


def _tree(node: Mapping, splits: List[Split]) -> Split:
    expected, num_keys = _TYPES[node.kind], len(splits)
    parts = list(zip(node.keys, splits))

    def stored(value: Any) -> Any:
        if type(value) is expected:
            value = value._detach()
        if type(value) is not TreeStorage or value.size() != num_keys:
            raise Misfit
        return value

    def split(values: Sequence[Any], rows: Rows, blocks: List[Block]) -> None:
        stores = [stored(value) for value in values]
        try:
            for key, child in parts:
                child([store.get(key) for store in stores], rows, blocks)
        except KeyError as e:
            raise Misfit from e

    return split
