"""
What a schema is made of: an immutable tree of nodes that says how one element is built.

    Leaf        an array or scalar: one column
    Nothing     always None: no column
    Optional    None in some elements: a presence column, and the columns of what it holds otherwise
    Mapping     dict, EasyDict, treetensor ...: fixed keys
    Positional  list, tuple, namedtuple: fixed length, a node per place
    Unrolled    a list of T items that are built alike: their leaves get a leading time axis
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Tuple, Union

import numpy as np

from ding_store.errors import SchemaMismatch

from .leaves import LEAF_KINDS, PYTHON_DTYPES, TENSOR_DTYPES, Shape

Key = Union[str, int]


class NotColumnar(SchemaMismatch):
    """An element holds something that is no array, scalar, None or known container, so columns cannot hold it."""


@dataclass(frozen=True)
class Leaf:
    kind: str
    dtype: str
    shape: Shape

    @property
    def storage(self) -> np.dtype:
        return TENSOR_DTYPES[self.dtype].numpy if self.kind == 'tensor' else np.dtype(self.dtype)

    def __str__(self) -> str:
        if self.kind in PYTHON_DTYPES:
            return self.kind
        return f'{self.dtype} {self.shape}'


@dataclass(frozen=True)
class Nothing:
    def __str__(self) -> str:
        return 'None'


@dataclass(frozen=True)
class Optional:
    node: 'Node'

    def __str__(self) -> str:
        return f'{self.node} or None'


@dataclass(frozen=True)
class Mapping:
    kind: str
    items: Tuple[Tuple[Key, 'Node'], ...]

    @property
    def keys(self) -> Tuple[Key, ...]:
        return tuple(key for key, _ in self.items)

    def __str__(self) -> str:
        return f'{self.kind} with keys {sorted(map(str, self.keys))}'


@dataclass(frozen=True)
class Positional:
    kind: str
    items: Tuple['Node', ...]
    fields: Tuple[str, ...] = ()  # of a namedtuple, whose kind is 'module:Name'

    def __str__(self) -> str:
        return f'{self.kind} of length {len(self.items)}'


@dataclass(frozen=True)
class Unrolled:
    length: int
    item: 'Node'

    def __str__(self) -> str:
        return f'list of length {self.length}'


Node = Union[Leaf, Nothing, Optional, Mapping, Positional, Unrolled]

NOTHING = Nothing()

MAPPING_KINDS = ('dict', 'OrderedDict', 'EasyDict', 'treetensor.torch', 'treetensor.numpy')
TREE_KINDS = ('treetensor.torch', 'treetensor.numpy')


def child_path(path: str, key: Key) -> str:
    """
    Overview:
        Path of a child, which is the name of its column: 'obs/agent_state'. Keys that hold one of our signs are escaped
        as in JSON pointers, and int keys marked, so that no two leaves share a name.
    """
    if isinstance(key, int):
        name = f'#{key}'
    else:
        name = key.replace('~', '~0').replace('/', '~1').replace('#', '~2').replace('?', '~3') or '~'
    return f'{path}/{name}' if path else name


def place_path(path: str, place: int) -> str:
    return f'{path}/{place}' if path else str(place)


def presence_path(path: str) -> str:
    return f'{path}?'


def leaf_names(node: Node, path: str = '') -> List[str]:
    """The columns of the leaves under a node, presence columns aside."""
    if isinstance(node, Leaf):
        return [path or '~~']
    if isinstance(node, Optional):
        return leaf_names(node.node, path)
    if isinstance(node, Unrolled):
        return leaf_names(node.item, path)
    return [name for child_place, child in children(node, path) for name in leaf_names(child, child_place)]


def children(node: Node, path: str) -> List[Tuple[str, Node]]:
    if isinstance(node, Mapping):
        return [(child_path(path, key), child) for key, child in node.items]
    if isinstance(node, Positional):
        return [(place_path(path, place), child) for place, child in enumerate(node.items)]
    return []


def mismatch(path: str, expected: Any, actual: Any) -> SchemaMismatch:
    """The error of a leaf or container at ``path``; names its Python type where dtype and shape do not tell."""
    what = 'leaf' if isinstance(expected, Leaf) and isinstance(actual, Leaf) else 'element at'
    if isinstance(expected, Leaf) and isinstance(actual, Leaf) and expected.kind != actual.kind:
        expected, actual = (
            f'{leaf.kind} {leaf}' if leaf.kind not in PYTHON_DTYPES else leaf for leaf in (expected, actual)
        )
    return SchemaMismatch(f'{what} {path!r}: expected {expected}, got {actual}')


def merge(one: Node, other: Node, path: str = '') -> Node:
    """
    Overview:
        The node that fits whatever fits one or the other: None beside anything makes it optional.
    Raises:
        - SchemaMismatch: There is none; names the path, what ``one`` expects and what ``other`` is.
    """
    if one == other:
        return one
    if isinstance(one, (Nothing, Optional)) or isinstance(other, (Nothing, Optional)):
        return _merge_optional(one, other, path)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return _merge_mappings(one, other, path)
    if isinstance(one, Unrolled) and isinstance(other, Unrolled) and one.length == other.length:
        return Unrolled(one.length, merge(one.item, other.item, path))
    one, other = _as_places(one, other), _as_places(other, one)
    if isinstance(one, Positional) and isinstance(other, Positional):
        return _merge_places(one, other, path)
    raise mismatch(path, one, other)


def _merge_optional(one: Node, other: Node, path: str) -> Node:
    held = [node.node if isinstance(node, Optional) else node for node in (one, other)]
    known = [node for node in held if not isinstance(node, Nothing)]
    return Optional(known[0] if len(known) == 1 else merge(known[0], known[1], path))


def _merge_mappings(one: Mapping, other: Mapping, path: str) -> Mapping:
    theirs = dict(other.items)
    if one.kind != other.kind or set(one.keys) != set(theirs):
        raise mismatch(path, one, other)
    return Mapping(one.kind, tuple((key, merge(node, theirs[key], child_path(path, key))) for key, node in one.items))


def _merge_places(one: Positional, other: Positional, path: str) -> Positional:
    if (one.kind, one.fields, len(one.items)) != (other.kind, other.fields, len(other.items)):
        raise mismatch(path, one, other)
    pairs = enumerate(zip(one.items, other.items))
    return Positional(one.kind, tuple(merge(a, b, place_path(path, i)) for i, (a, b) in pairs), one.fields)


def _as_places(node: Node, beside: Node) -> Node:
    """A list of nothing but None has no columns yet, and so may still become a list whose items differ."""
    if isinstance(node, Unrolled) and isinstance(beside, Positional) and not leaf_names(node.item):
        return Positional('list', (node.item,) * node.length)
    return node


def to_json(node: Node) -> Any:
    """A node as JSON: a list that begins with its type."""
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
        The node that ``to_json`` wrote. The data may come from anywhere: every part of it is checked, none is run.
    Raises:
        - SchemaMismatch: It is no schema.
    """
    try:
        node = _READERS[data[0]](*data[1:])
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise SchemaMismatch(f'no schema of elements: {str(data)[:200]!r} ({e!r})') from e
    return node


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _read_leaf(kind: str, dtype: str, shape: List[int]) -> Leaf:
    _expect(kind in LEAF_KINDS, 'kind of leaf')
    if kind == 'tensor':
        _expect(dtype in TENSOR_DTYPES, 'dtype')
    else:
        _expect(np.dtype(dtype).kind in 'biufc', 'dtype')
    _expect(all(type(size) is int and size >= 0 for size in shape), 'shape')
    return Leaf(kind, dtype, tuple(shape))


def _read_mapping(kind: str, items: List[Any]) -> Mapping:
    _expect(kind in MAPPING_KINDS, 'kind of mapping')
    _expect(all(type(key) in (str, int) for key, _ in items) and len({key for key, _ in items}) == len(items), 'keys')
    return Mapping(kind, tuple((key, from_json(node)) for key, node in items))


def _read_places(kind: str, items: List[Any], fields: List[str]) -> Positional:
    _expect(isinstance(kind, str) and all(isinstance(name, str) and name.isidentifier() for name in fields), 'fields')
    _expect(kind in ('list', 'tuple') or len(fields) == len(items), 'namedtuple')
    return Positional(kind, tuple(map(from_json, items)), tuple(fields))


def _read_unrolled(length: int, item: Any) -> Unrolled:
    _expect(type(length) is int and length >= 2, 'length')
    return Unrolled(length, from_json(item))


_READERS = {
    'leaf': _read_leaf,
    'none': lambda: NOTHING,
    'optional': lambda node: Optional(from_json(node)),
    'unrolled': _read_unrolled,
    'places': _read_places,
    'mapping': _read_mapping,
}
