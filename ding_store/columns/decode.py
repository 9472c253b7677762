"""Turns columns into elements. A schema is compiled once into joiners, one per node, each of which handles all rows."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from functools import lru_cache
from keyword import iskeyword
from math import prod
from typing import Any, Callable, Dict, List, Sequence, Tuple
from typing import Mapping as MappingType

import numpy as np
from easydict import EasyDict
from treevalue import TreeValue
from treevalue.tree.common import TreeStorage

from ding_store.errors import SchemaMismatch

from .infer import MAPPING_TYPES
from .leaves import TENSOR_DTYPES, Shape, as_tensor
from .nodes import (
    TREE_KINDS,
    Leaf,
    Node,
    Nothing,
    Optional,
    Positional,
    Unrolled,
    children,
    column_name,
    leaf_names,
    presence_name,
)
from .ragged import Ragged

Columns = MappingType[str, np.ndarray]
#: (columns, number of rows) -> a value per row. Steps of time axes above the node count as rows.
Join = Callable[[Columns, int], Sequence[Any]]
#: The values of a container's children -> the container.
Make = Callable[[Tuple[Any, ...]], Any]


def joiner(node: Node, path: str = '', lead: Shape = (), tree: str = '') -> Join:
    """Compile a node. ``lead`` are the time axes above it, ``tree`` is the kind of treetensor that holds it."""
    if isinstance(node, Leaf):
        return _leaf(node, column_name(path), lead)
    if isinstance(node, Nothing):
        return lambda columns, n: [None] * (n * prod(lead))
    if isinstance(node, Optional):
        return _optional(node, path, lead, joiner(node.node, path, lead, tree))
    if isinstance(node, Unrolled):
        return _unrolled(node.length, joiner(node.item, path, lead + (node.length,)))
    inner = node.kind if node.kind in TREE_KINDS else ''
    joins = [joiner(child, place, lead, inner) for place, child in children(node, path)]
    return _container(_maker(node, tree), joins, prod(lead))


def column_of(columns: Columns, name: str, node: Leaf, shape: Shape) -> np.ndarray:
    """
    Overview:
        Return a checked column. Copy a read-only one, since torch cannot protect a tensor from writes. Convert one of
        an older schema with a narrower kind of number.
    """
    column, dtype = columns.get(name), node.storage
    if column is None:
        raise SchemaMismatch(f'column {name!r} is missing among {sorted(columns)}')
    if column.dtype != dtype and may_widen(node, column.dtype) and column.shape[1:] == shape:
        return column.astype(dtype)
    if column.dtype != dtype or column.shape[1:] != shape:
        found = f'{column.dtype} {column.shape[1:]}'
        raise SchemaMismatch(f'column {name!r}: expected {dtype} {shape} per row, got {found}')
    return column if column.flags.writeable else column.copy()


def ragged_of(columns: Columns, name: str) -> Ragged:
    """Return the values of a ragged leaf. Raises SchemaMismatch if there are only their lengths."""
    found: Any = columns.get(name)
    if not isinstance(found, Ragged):
        raise SchemaMismatch(f'column {name!r}: the values of a ragged leaf are missing')
    return found


def may_widen(node: Leaf, dtype: np.dtype) -> bool:
    """Return whether a column of this dtype may be of this leaf, from before the schema widened its numbers."""
    return node.kind != 'tensor' and not node.shape and dtype.kind in 'iuf' and np.can_cast(dtype, node.storage, 'safe')


def is_there(columns: Columns, names: Sequence[str]) -> bool:
    return any(name in columns for name in names)


def _leaf(node: Leaf, name: str, lead: Shape) -> Join:
    shape, num_steps = lead + node.shape, prod(lead)
    views = _views(node)
    if node.is_ragged:
        return lambda columns, n: views(ragged_of(columns, name).rows)

    def join(columns: Columns, n: int) -> Sequence[Any]:
        column = column_of(columns, name, node, shape)
        return views(column.reshape((n * num_steps,) + node.shape) if lead else column)

    return join


def _views(node: Leaf) -> Callable[[Any], Sequence[Any]]:
    if node.kind == 'tensor':
        stored = TENSOR_DTYPES[node.dtype]
        if node.is_ragged:
            return lambda rows: [as_tensor(row, stored) for row in rows]
        return lambda column: as_tensor(column, stored).unbind(0)
    if node.kind == 'array':
        if node.is_ragged:
            return list
        return lambda column: [column[i, ...] for i in range(len(column))]
    return list if node.kind == 'scalar' else np.ndarray.tolist


def _optional(node: Optional, path: str, lead: Shape, child: Join) -> Join:
    name, names, num_steps = presence_name(path, lead), leaf_names(node, path), prod(lead)

    def join(columns: Columns, n: int) -> Sequence[Any]:
        presence = columns.get(name)
        if not is_there(columns, names) and (presence is None or not presence.any()):
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


def _container(make: Make, joins: List[Join], num_steps: int) -> Join:
    def join(columns: Columns, n: int) -> Sequence[Any]:
        if not joins:
            return [make(()) for _ in range(n * num_steps)]
        return list(map(make, zip(*[child(columns, n) for child in joins])))

    return join


def _maker(node: Any, tree: str) -> Make:
    if isinstance(node, Positional):
        return sequence_maker(node)
    if node.kind not in TREE_KINDS:
        return mapping_maker(node.kind, node.keys)
    # Making trees from storage costs half a microsecond, making them from dicts up to milliseconds. A dict inside stays
    # a dict, while ``create_storage`` would make a tree of it.
    keys = node.keys
    if tree == node.kind:
        return lambda values: TreeStorage(dict(zip(keys, values)))
    kind = next(kind for kind, name in MAPPING_TYPES.items() if name == node.kind)
    return lambda values: tree_of(kind, TreeStorage(dict(zip(keys, values))))


def tree_of(kind: Any, storage: TreeStorage) -> Any:
    """Return ``kind(storage)`` in half the time, without the metaclass and two constructors of a treetensor."""
    tree = TreeValue.__new__(kind, storage)
    TreeValue.__init__(tree, storage)
    return tree


def mapping_maker(kind: str, keys: Tuple[Any, ...]) -> Make:
    if kind == 'EasyDict':
        return lambda values: _easy_dict(dict(zip(keys, values)))
    made = OrderedDict if kind == 'OrderedDict' else dict
    return lambda values: made(zip(keys, values))


def _easy_dict(items: Dict[Any, Any]) -> EasyDict:
    # EasyDict's own setters would rebuild the containers that they receive.
    made = EasyDict()
    dict.update(made, items)
    vars(made).update(items)
    return made


def sequence_maker(node: Positional) -> Make:
    if not node.is_namedtuple:
        return list if node.kind == 'list' else tuple
    kind = _namedtuple_type(node.kind, node.fields)
    return lambda values: tuple.__new__(kind, values)


@lru_cache(maxsize=256)
def _namedtuple_type(kind: str, fields: Tuple[str, ...]) -> Any:
    """
    Overview:
        Return the namedtuple that 'module:Name' names if this process has loaded it. Else make one with that name and
        these fields. Nothing is imported or called, since the name may be from another process.
    """
    module, _, name = kind.partition(':')
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, '_fields', None) == fields:
        return found
    short = name.rpartition('.')[2]
    valid = short if short.isidentifier() and not iskeyword(short) else 'Row'
    made: Any = namedtuple(valid, fields, rename=True)  # type: ignore[misc]
    # Its elements must fit the schema again.
    made.__module__, made.__qualname__ = module, name
    return made
