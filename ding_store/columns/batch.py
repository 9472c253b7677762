"""Columns -> one collated batch, as DI-engine's default_collate makes it of the list of elements."""

from __future__ import annotations

from math import prod
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import torch
from treevalue.tree.common import create_storage

from .decode import Columns, column_of, joiner, namedtuple_type
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

#: Which part of the columns: all rows, then one step of each time axis that became a list.
Index = Tuple[Any, ...]
#: (columns, number of rows, index, cat_1dim) -> the collated value.
Collate = Callable[[Columns, int, Index, bool], Any]

#: default_collate keeps lists under such keys of a dict.
IGNORED = 'collate_ignore'


def collator(node: Node, path: str, lead: Shape, in_tree: bool) -> Collate:
    """Compile a node; ``in_tree``: its parent is a tree, into which a mapping goes as a subtree."""
    if isinstance(node, Leaf):
        return _leaf(node, path, lead)
    if isinstance(node, Nothing):
        return lambda columns, n, index, cat: None
    if isinstance(node, Optional):
        return _optional(node, path, lead, collator(node.node, path, lead, in_tree))
    if isinstance(node, Unrolled):
        return _steps(node.length, collator(node.item, path, lead + (node.length,), False))
    if isinstance(node, Positional):
        return _places(node, [collator(child, place, lead, False) for place, child in children(node, path)])
    return _mapping(node, path, lead, in_tree)


def _leaf(node: Leaf, name: str, lead: Shape) -> Collate:
    dtype, shape = node.storage, lead + node.shape
    stored = TENSOR_DTYPES.get(node.dtype) if node.kind == 'tensor' else None
    single, widen = node.shape == (1,), node.kind == 'float'

    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        column = column_of(columns, name, dtype, shape)
        if len(index) > 1:
            column = column[index]
        if single and cat:
            column = column[..., 0]
        if stored is not None:
            return as_tensor(column, stored)
        tensor = torch.as_tensor(column if dtype.isnative else column.astype(dtype.newbyteorder('=')))
        return tensor.float() if widen else tensor

    return collate


def _optional(node: Optional, path: str, lead: Shape, child: Collate) -> Collate:
    name, names, join = presence_path(path), leaf_names(node.node, path), joiner(Optional(node.node), path, lead)

    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        presence = columns.get(name)
        if presence is None:
            return child(columns, n, index, cat) if any(leaf in columns for leaf in names) else None
        held = presence[index]
        if held.all():
            return child(columns, n, index, cat)
        if not held.any():
            return None
        places = np.arange(n * prod(lead)).reshape((n,) + lead)[index]
        return _pick(join(columns, n), places.tolist())

    return collate


def _pick(values: Any, places: Any) -> Any:
    return [_pick(values, place) for place in places] if isinstance(places, list) else values[places]


def _steps(length: int, child: Collate) -> Collate:
    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        return [child(columns, n, index + (step,), cat) for step in range(length)]

    return collate


def _places(node: Positional, parts: List[Collate]) -> Collate:
    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        values = [part(columns, n, index, cat) for part in parts]
        return tuple.__new__(namedtuple_type(node.kind, node.fields), values) if node.fields else values

    return collate


def _mapping(node: Mapping, path: str, lead: Shape, in_tree: bool) -> Collate:
    parts: Dict[Any, Collate] = {}
    for (place, child), key in zip(children(node, path), node.keys):
        if node.kind not in TREE_KINDS and str(key).startswith(IGNORED):
            parts[key] = _ignored(joiner(child, place, lead), lead)
        else:
            parts[key] = collator(child, place, lead, in_tree)
    make: Callable[[Any], Any] = create_storage if in_tree else dict
    items = list(parts.items())

    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        return make({key: part(columns, n, index, cat) for key, part in items})

    return collate


def _ignored(join: Any, lead: Shape) -> Collate:
    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        places = np.arange(n * prod(lead)).reshape((n,) + lead)[index]
        return _pick(join(columns, n), places.tolist())

    return collate
