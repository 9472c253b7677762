"""Ragged leaves: arrays whose first dimension differs between elements."""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, List, Sequence, Set, Tuple, Union
from typing import Mapping as MappingType
from typing import Optional as Maybe

import numpy as np

from ding_store.errors import SchemaMismatch

from .leaves import Shape
from .nodes import (
    Leaf,
    Mapping,
    Node,
    Nothing,
    Optional,
    Positional,
    Unrolled,
    children,
    column_name,
)

#: The first dimension of a ragged leaf in its schema.
ANY = -1
#: Makes all leaves with a dimension ragged.
ALL = 'all'
_NO_LENGTHS: Dict[str, np.ndarray] = {}
#: Names of ragged leaves, or ALL.
Names = Union[str, Collection[str]]


class Ragged:
    """
    Overview:
        The values of a ragged leaf in several rows.
    Arguments:
        - lengths (:obj:`np.ndarray`): The first dimension of each row, ``(n,)``, int64.
        - make_rows (:obj:`Callable`): Returns the array of each row. Called when they are first read.
        - padded (:obj:`Optional[np.ndarray]`): The same as one array ``(n, longest, ...)`` with zeros behind each row.
    """

    __slots__ = ('lengths', 'padded', '_make_rows', '_rows')

    def __init__(
        self, lengths: np.ndarray, make_rows: Callable[[], List[np.ndarray]], padded: Maybe[np.ndarray] = None
    ) -> None:
        self.lengths, self.padded, self._make_rows = lengths, padded, make_rows
        self._rows: Maybe[List[np.ndarray]] = None

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], dtype: np.dtype, shape: Shape) -> Ragged:
        """Return these arrays, also padded. ``shape`` is that of one item."""
        lengths = np.array([len(each) for each in arrays], np.int64)
        padded = np.zeros((len(arrays), int(lengths.max(initial=0)), *shape), dtype)
        for row, array in zip(padded, arrays):
            row[: len(array)] = array.reshape(len(array), *shape)
        return cls(lengths, lambda: [row[:length] for row, length in zip(padded, lengths.tolist())], padded)

    @property
    def rows(self) -> List[np.ndarray]:
        """The array of each row."""
        if self._rows is None:
            self._rows = self._make_rows()
        return self._rows

    def __len__(self) -> int:
        return len(self.lengths)


class Items(List[np.ndarray]):
    """The arrays of a ragged leaf in several elements. Its column holds their lengths."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(each) for each in self], np.int64)


def joined_items(
    leaves: MappingType[str, Tuple[np.dtype, Shape]], rows: MappingType[str, Any]
) -> Dict[str, np.ndarray]:
    """
    Overview:
        Return the items of all rows of each ragged leaf as one array.
    Arguments:
        - leaves (:obj:`Mapping`): ``Schema.ragged``.
        - rows (:obj:`Mapping`): The arrays of each leaf by row, from ``Schema.encode_ragged``.
    """
    made = {}
    for name, (dtype, shape) in leaves.items():
        parts = [np.asarray(row, dtype).reshape(len(row), *shape) for row in rows.get(name, ())]
        made[name] = np.concatenate([np.empty((0, *shape), dtype), *parts])
    return made


def check_items(
    leaves: MappingType[str, Tuple[np.dtype, Shape]],
    columns: MappingType[str, np.ndarray],
    items: MappingType[str, np.ndarray],
) -> None:
    """Raise SchemaMismatch if the items of ragged leaves are not those of these rows. The columns have been checked."""
    for name, (dtype, shape) in leaves.items():
        found, lengths = items.get(name), columns[name]
        if found is None or found.dtype != dtype or found.shape[1:] != shape:
            text = 'none' if found is None else f'{found.dtype} {found.shape}'
            raise SchemaMismatch(f'items of leaf {name!r}: expected {dtype} {("any", *shape)}, got {text}')
        total = sum(lengths.tolist())  # of Python's integers, which have no limit
        if lengths.min(initial=0) < 0 or total != len(found):
            raise SchemaMismatch(f'leaf {name!r} has {len(found)} items, and its lengths have {total}')


def ragged_lengths(schema: Any, columns: Any) -> Dict[str, np.ndarray]:
    """Return the lengths of the ragged leaves of a schema, by name."""
    return {name: columns[name].lengths for name in schema.ragged} if schema.ragged else _NO_LENGTHS


def with_ragged(node: Node, names: Names, path: str = '') -> Node:
    """
    Overview:
        Return a node whose leaves of these names are ragged.
    Raises:
        - SchemaMismatch: A leaf has no dimension, or is in a list of steps.
    """
    if isinstance(node, Leaf):
        return _ragged_leaf(node, names, path)
    if isinstance(node, Optional):
        return Optional(with_ragged(node.node, names, path))
    if isinstance(node, Mapping):
        pairs = zip(node.items, children(node, path))
        return Mapping(node.kind, tuple((key, with_ragged(child, names, place)) for (key, child), (place, _) in pairs))
    if isinstance(node, Positional):
        items = tuple(with_ragged(child, names, place) for place, child in children(node, path))
        return Positional(node.kind, items, node.fields)
    if isinstance(node, Unrolled) and names != ALL:
        inside = sorted(set(names) & set(_leaves_of(node, path)))
        if inside:
            raise SchemaMismatch(
                f'leaf {inside[0]!r} cannot be ragged: it is in a list of {node.length} steps. Push steps one by one.'
            )
    return node


def check_names(node: Node, names: Names) -> None:
    """Raise SchemaMismatch if a name is not that of a leaf, or of a part that is None so far."""
    if names == ALL:
        return
    known = _leaves_of(node)
    unknown = sorted(set(names) - known)
    if unknown:
        raise SchemaMismatch(
            f'ragged ({unknown[0]!r}) is no leaf of the element. Its leaves are {sorted(known)}: name some of these.'
        )


def ragged_leaves(node: Node, path: str = '') -> Dict[str, Tuple[np.dtype, Shape]]:
    """Return the ragged leaves in the order of their columns: name -> dtype and shape of one item."""
    if isinstance(node, Leaf):
        return {column_name(path): (node.storage, node.shape[1:])} if node.is_ragged else {}
    if isinstance(node, Optional):
        return ragged_leaves(node.node, path)
    if isinstance(node, (Mapping, Positional)):
        found: Dict[str, Tuple[np.dtype, Shape]] = {}
        for place, child in children(node, path):
            found.update(ragged_leaves(child, place))
        return found
    return {}


def _ragged_leaf(leaf: Leaf, names: Names, path: str) -> Leaf:
    if names == ALL:
        return Leaf(leaf.kind, leaf.dtype, (ANY, *leaf.shape[1:])) if leaf.shape else leaf
    if column_name(path) not in names:
        return leaf
    if not leaf.shape:
        raise SchemaMismatch(f'leaf {path!r} cannot be ragged: it is {leaf}, which has no dimension that could vary.')
    return Leaf(leaf.kind, leaf.dtype, (ANY, *leaf.shape[1:]))


def _leaves_of(node: Node, path: str = '') -> Set[str]:
    """Return the names of all leaves, and of parts that are None so far."""
    if isinstance(node, (Leaf, Nothing)):
        return {column_name(path)}
    if isinstance(node, Optional):
        return _leaves_of(node.node, path)
    if isinstance(node, Unrolled):
        return _leaves_of(node.item, path)
    return {name for place, child in children(node, path) for name in _leaves_of(child, place)}
