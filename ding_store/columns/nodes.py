"""The nodes of a schema: an immutable tree that describes how one element is built.

Leaf        an array or scalar: one column; of a ragged leaf, the column holds lengths
Nothing     always None: no column
Optional    None in some elements: a presence column, and the columns of the other elements
Mapping     dict, EasyDict, treetensor ...: fixed keys
Positional  list, tuple, namedtuple: fixed length, a node per place
Unrolled    a list of T >= 2 items with the same structure: their leaves get a leading time axis
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple, Union

import numpy as np

from .leaves import PYTHON_DTYPES, TENSOR_DTYPES, Shape

Key = Union[str, int]

TREE_KINDS = ('treetensor.torch', 'treetensor.numpy')
MAPPING_KINDS = ('dict', 'OrderedDict', 'EasyDict') + TREE_KINDS


@dataclass(frozen=True)
class Leaf:
    kind: str
    dtype: str  # logical dtype: ``storage`` is the dtype of a tensor's column
    shape: Shape

    @property
    def storage(self) -> np.dtype:
        return TENSOR_DTYPES[self.dtype].numpy if self.kind == 'tensor' else np.dtype(self.dtype)

    @property
    def is_ragged(self) -> bool:
        """True if the first dimension differs between elements. It is -1 then, see ``ragged``."""
        return bool(self.shape) and self.shape[0] < 0

    def __str__(self) -> str:
        if self.is_ragged:
            return f'{self.dtype} (any, {", ".join(map(str, self.shape[1:]))})'
        return self.kind if self.kind in PYTHON_DTYPES else f'{self.dtype} {self.shape}'


@dataclass(frozen=True)
class Nothing:
    def __str__(self) -> str:
        return 'None'


@dataclass(frozen=True)
class Optional:
    node: Node

    def __str__(self) -> str:
        return f'{self.node} or None'


@dataclass(frozen=True)
class Mapping:
    kind: str
    items: Tuple[Tuple[Key, Node], ...]

    @property
    def keys(self) -> Tuple[Key, ...]:
        return tuple(key for key, _ in self.items)

    def __str__(self) -> str:
        return f'{self.kind} with keys {sorted(self.keys, key=str)}'


@dataclass(frozen=True)
class Positional:
    kind: str  # 'list', 'tuple', or 'module:Name' of a namedtuple
    items: Tuple[Node, ...]
    fields: Tuple[str, ...] = ()  # of a namedtuple

    @property
    def is_namedtuple(self) -> bool:
        return ':' in self.kind

    def __str__(self) -> str:
        fields = f' with fields {list(self.fields)}' if self.fields else ''
        return f'{self.kind} of length {len(self.items)}{fields}'


@dataclass(frozen=True)
class Unrolled:
    length: int
    item: Node

    def __str__(self) -> str:
        return f'list of length {self.length}'


Node = Union[Leaf, Nothing, Optional, Mapping, Positional, Unrolled]

NOTHING = Nothing()


def child_path(path: str, key: Key) -> str:
    """
    Overview:
        Return the path of a mapping's child, such as 'obs/agent_state'. Special characters in keys are escaped as in
        JSON pointers, and int keys are marked. No two leaves share a path.
    """
    if isinstance(key, int):
        return _below(path, f'#{key}')
    return _below(path, key.replace('~', '~0').replace('/', '~1').replace('#', '~2').replace('?', '~3') or '~')


def place_path(path: str, place: int) -> str:
    return _below(path, str(place))


def _below(path: str, name: str) -> str:
    return f'{path}/{name}' if path else name


def column_name(path: str) -> str:
    """Return the name of a leaf's column: its path, unless the whole element is that leaf."""
    return path or '~~'


def presence_name(path: str, lead: Shape) -> str:
    """
    Overview:
        Return the name of an optional node's presence column. It holds 1 in the rows and steps that have a value, 0 for
        None. The name depends on the time axes above: a list may be optional, and so may its items, which share its
        path.
    """
    return path + '?' * (1 + len(lead))


def children(node: Union[Mapping, Positional], path: str) -> List[Tuple[str, Node]]:
    """Return paths and nodes of a container's children, in order."""
    if isinstance(node, Mapping):
        return [(child_path(path, key), child) for key, child in node.items]
    return [(place_path(path, place), child) for place, child in enumerate(node.items)]


def leaf_names(node: Node, path: str = '') -> List[str]:
    """Return the names of the columns of the leaves under a node, without presence columns."""
    if isinstance(node, Leaf):
        return [column_name(path)]
    if isinstance(node, Nothing):
        return []
    if isinstance(node, Optional):
        return leaf_names(node.node, path)
    if isinstance(node, Unrolled):
        return leaf_names(node.item, path)
    return [name for place, child in children(node, path) for name in leaf_names(child, place)]
