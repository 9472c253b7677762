"""Columns -> elements. A schema is compiled once into joiners, one per node, that make the values of all rows at once."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from functools import lru_cache
from math import prod
from typing import Any, Callable, Dict, List, Mapping as MappingType, Sequence, Tuple

import numpy as np
import treetensor.numpy as tnp
import treetensor.torch as ttorch
from easydict import EasyDict
from treevalue.tree.common import create_storage

from ding_store.errors import SchemaMismatch

from .leaves import TENSOR_DTYPES, Shape, as_tensor
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
    leaf_names,
    presence_path,
)

Columns = MappingType[str, np.ndarray]
#: (columns, number of rows) -> a value per row; time steps above the node count as rows.
Join = Callable[[Columns, int], Sequence[Any]]

TREE_TYPES: Dict[str, Any] = {'treetensor.torch': ttorch.Tensor, 'treetensor.numpy': tnp.ndarray}


def joiner(node: Node, path: str = '', lead: Shape = (), in_tree: str = '') -> Join:
    """Compile a node; ``lead`` are the time axes above it, ``in_tree`` the kind of tree it is a direct part of."""
    if isinstance(node, Leaf):
        return _leaf(node, path or '~~', lead)
    if isinstance(node, Nothing):
        return lambda columns, n: [None] * (n * prod(lead))
    if isinstance(node, Optional):
        return _optional(node, path, lead, joiner(node.node, path, lead, in_tree))
    if isinstance(node, Unrolled):
        return _unrolled(node.length, joiner(node.item, path, lead + (node.length,)))
    tree = node.kind if isinstance(node, Mapping) and node.kind in TREE_KINDS else ''
    joins = [joiner(child, place, lead, tree) for place, child in children(node, path)]
    if isinstance(node, Positional):
        return _rebuild(_maker(node), joins, prod(lead))
    if tree:
        return _rebuild(_tree_maker(node, in_tree), joins, prod(lead))
    return _rebuild(_mapping_maker(node), joins, prod(lead))


def column_of(columns: Columns, name: str, dtype: np.dtype, shape: Shape) -> np.ndarray:
    """A column, checked. Read-only ones are copied: torch cannot keep anyone from writing to a tensor of theirs."""
    try:
        column = columns[name]
    except KeyError:
        raise SchemaMismatch(f'column {name!r} is missing; there are {sorted(columns)}') from None
    if column.dtype != dtype or column.shape[1:] != shape:
        raise SchemaMismatch(
            f'column {name!r}: expected {dtype} {shape} per row, got {column.dtype} {column.shape[1:]}'
        )
    return column if column.flags.writeable else column.copy()


def _leaf(node: Leaf, name: str, lead: Shape) -> Join:
    dtype, shape, flat = node.storage, lead + node.shape, (-1,) + node.shape
    kind, num_steps = node.kind, prod(lead)

    def join(columns: Columns, n: int) -> Sequence[Any]:
        column = column_of(columns, name, dtype, shape)
        if lead:
            column = column.reshape((n * num_steps,) + flat[1:])
        if kind == 'tensor':
            return as_tensor(column, TENSOR_DTYPES[node.dtype]).unbind(0)
        if kind == 'array':
            return [column[i, ...] for i in range(len(column))]
        return list(column) if kind == 'scalar' else column.tolist()

    return join


def _optional(node: Optional, path: str, lead: Shape, child: Join) -> Join:
    names, num_steps = leaf_names(node.node, path), prod(lead)
    name = presence_path(path)

    def join(columns: Columns, n: int) -> Sequence[Any]:
        presence = columns.get(name)
        if not any(leaf in columns for leaf in names) and (presence is None or not presence.any()):
            return [None] * (n * num_steps)
        values = child(columns, n)
        if presence is None:
            return values
        return [value if held else None for value, held in zip(values, presence.reshape(-1).tolist())]

    return join


def _unrolled(length: int, child: Join) -> Join:
    def join(columns: Columns, n: int) -> Sequence[Any]:
        steps = list(child(columns, n))
        return [steps[i : i + length] for i in range(0, len(steps), length)]

    return join


def _rebuild(make: Callable[[Tuple[Any, ...]], Any], joins: List[Join], num_steps: int) -> Join:
    def join(columns: Columns, n: int) -> Sequence[Any]:
        if not joins:
            return [make(()) for _ in range(n * num_steps)]
        return [make(values) for values in zip(*(child(columns, n) for child in joins))]

    return join


def _mapping_maker(node: Mapping) -> Callable[[Tuple[Any, ...]], Any]:
    keys = node.keys
    if node.kind == 'EasyDict':
        return lambda values: _easy_dict(dict(zip(keys, values)))
    kind = OrderedDict if node.kind == 'OrderedDict' else dict
    return lambda values: kind(zip(keys, values))


def _easy_dict(items: Dict[Any, Any]) -> EasyDict:
    # Its own ways of setting a value rebuild what they are given.
    made = EasyDict()
    dict.update(made, items)
    vars(made).update(items)
    return made


def _tree_maker(node: Mapping, in_tree: str) -> Callable[[Tuple[Any, ...]], Any]:
    keys = node.keys
    # A plain dict given to create_storage would become a tree itself.
    dicts = [key for key, child in node.items if isinstance(child, Mapping) and child.kind not in TREE_KINDS]

    def storage(values: Tuple[Any, ...]) -> Any:
        items = dict(zip(keys, values))
        held = {key: items.pop(key) for key in dicts}
        made = create_storage(items)
        for key, value in held.items():
            made.set(key, value)
        return made

    if in_tree == node.kind:
        return storage
    kind = TREE_TYPES[node.kind]
    return lambda values: kind(storage(values))


def _maker(node: Positional) -> Callable[[Tuple[Any, ...]], Any]:
    if not node.fields:
        return list if node.kind == 'list' else tuple
    kind = namedtuple_type(node.kind, node.fields)
    return lambda values: tuple.__new__(kind, values)


@lru_cache(maxsize=256)
def namedtuple_type(kind: str, fields: Tuple[str, ...]) -> Any:
    """
    Overview:
        The namedtuple that 'module:Name' stands for, if this process has it loaded already; else one made here with
        that name and those fields. Nothing is imported: the name may have come from another process.
    """
    module, _, name = kind.partition(':')
    found = vars(sys.modules.get(module, object)).get(name)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, '_fields', None) == fields:
        return found
    return namedtuple(name.rpartition('.')[2] or 'Row', fields)
