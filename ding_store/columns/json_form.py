"""Converts nodes to JSON and back. Input may come from anywhere: all of it is checked, and nothing in it is run."""

from __future__ import annotations

from reprlib import repr as short
from typing import Any, Callable, Dict, List

import numpy as np

from ding_store.errors import SchemaMismatch

from .leaves import LEAF_KINDS, PYTHON_DTYPES, TENSOR_DTYPES
from .nodes import MAPPING_KINDS, NOTHING, TREE_KINDS, Leaf, Mapping, Node, Nothing, Optional, Positional, Unrolled
from .ragged import ANY, ragged_leaves


def to_json(node: Node) -> List[Any]:
    """Return a list that begins with the node's type. Keys are values in it, so that int keys stay ints."""
    if isinstance(node, Leaf):
        return ['leaf', node.kind, node.dtype, list(node.shape)]
    if isinstance(node, Nothing):
        return ['none']
    if isinstance(node, Optional):
        return ['optional', to_json(node.node)]
    if isinstance(node, Unrolled):
        return ['unrolled', node.length, to_json(node.item)]
    if isinstance(node, Positional):
        return ['places', node.kind, [to_json(item) for item in node.items], list(node.fields)]
    return ['mapping', node.kind, [[key, to_json(item)] for key, item in node.items]]


def from_json(data: Any) -> Node:
    """
    Overview:
        Return the node that ``to_json`` wrote.
    Raises:
        - SchemaMismatch: The data are not a node.
    """
    try:
        return _read(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as e:
        raise SchemaMismatch(f'not a schema of an element: {short(data)} ({e})') from e


def _read(data: Any) -> Node:
    return _READERS[data[0]](*data[1:])


def _expect(condition: bool, what: str, value: Any) -> None:
    if not condition:
        raise ValueError(f'{what} {value!r}')


def _read_leaf(kind: str, dtype: str, shape: List[int]) -> Leaf:
    _expect(kind in LEAF_KINDS, 'unknown kind of leaf', kind)
    _expect(_is_dtype(kind, dtype), 'unknown dtype', dtype)
    is_ragged = bool(shape) and shape[0] == ANY
    _expect(all(type(size) is int and size >= 0 for size in shape[is_ragged:]), 'impossible shape', shape)
    _expect(kind in ('tensor', 'array') or not shape, 'a scalar has a shape', shape)
    return Leaf(kind, dtype, tuple(shape))


def _is_dtype(kind: str, dtype: str) -> bool:
    if kind == 'tensor':
        return dtype in TENSOR_DTYPES
    if kind in PYTHON_DTYPES:
        return dtype == PYTHON_DTYPES[kind]
    found = np.dtype(str(dtype))
    # Accept only the spelling that ``infer`` uses: equal leaves must be equal as text.
    return found.kind in 'biufc' and dtype == (found.name if found.isnative else found.str)


def _read_mapping(kind: str, items: List[Any]) -> Mapping:
    keys = [key for key, _ in items]
    _expect(kind in MAPPING_KINDS, 'unknown kind of mapping', kind)
    types = (str,) if kind in TREE_KINDS else (str, int)
    _expect(all(type(key) in types for key in keys) and len(set(keys)) == len(keys), 'impossible keys', keys)
    return Mapping(kind, tuple((key, _read(node)) for key, node in items))


def _read_places(kind: str, items: List[Any], fields: List[str]) -> Positional:
    _expect(kind in ('list', 'tuple') or ':' in kind, 'unknown kind of sequence', kind)
    _expect(len(fields) == (len(items) if ':' in kind else 0), 'wrong number of fields', fields)
    _expect(all(type(field) is str for field in fields), 'impossible fields', fields)
    return Positional(kind, tuple(map(_read, items)), tuple(fields))


def _read_optional(data: Any) -> Optional:
    node = _read(data)
    _expect(not isinstance(node, (Nothing, Optional)), 'optional twice', data)
    return Optional(node)


def _read_unrolled(length: int, item: Any) -> Unrolled:
    _expect(type(length) is int and length >= 2, 'impossible length', length)
    node = _read(item)
    _expect(not ragged_leaves(node), 'ragged leaves in a list', item)
    return Unrolled(length, node)


_READERS: Dict[str, Callable[..., Node]] = {
    'leaf': _read_leaf,
    'none': lambda: NOTHING,
    'optional': _read_optional,
    'unrolled': _read_unrolled,
    'places': _read_places,
    'mapping': _read_mapping,
}
