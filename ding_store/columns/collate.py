"""Turns columns into one collated batch, equal to DI-engine's default_collate of the list of elements."""

from __future__ import annotations

from math import prod
from typing import Any, Callable, List, Sequence, Tuple
from typing import Mapping as TypingMapping
from typing import Optional as Maybe

import numpy as np
import torch
import treetensor.torch as ttorch
from treevalue.tree.common import TreeStorage, create_storage

from ding_store.errors import SchemaMismatch

from .decode import Columns, Join, column_of, is_there, joiner, ragged_of, sequence_maker, tree_of
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
    column_name,
    leaf_names,
    presence_name,
)

#: Selects a part of the columns: all rows, then one step of each time axis that became a list.
Index = Tuple[Any, ...]
#: (columns, number of rows, index, cat_1dim) -> the collated value.
Collate = Callable[[Columns, int, Index, bool], Any]

#: default_collate keeps values under keys of a dict with this prefix as a list.
IGNORED_PREFIX = 'collate_ignore'


def batcher(root: Node) -> Maybe[Callable[[Columns, int, Maybe[bool]], ttorch.Tensor]]:
    """Compile a schema, see ``Schema.decode_batch``. Return None if its elements do not make a batch that is a tree."""
    lead: Shape = ()
    index: Index = (slice(None),)
    if isinstance(root, Unrolled):  # The time axis of whole elements stays an axis.
        lead, index, root = (root.length,), index * 2, root.item
    if not isinstance(root, Mapping) or not all(isinstance(key, str) for key in root.keys):
        return None
    collate, default = _mapping(root, '', lead, True), cat_1dim_of(root)

    def batch(columns: Columns, n: int, cat_1dim: Maybe[bool]) -> ttorch.Tensor:
        return ttorch.Tensor(collate(columns, n, index, default if cat_1dim is None else cat_1dim))

    return batch


class PlainBatch:
    """
    Overview:
        Makes batches of elements that are mappings of tensors and nothing else. If columns are reused, ``views`` need
        to be made only once: ``tree(views(columns))`` equals the batch of ``batcher``.
    """

    def __init__(self, root: Mapping, names: List[str]) -> None:
        cat = cat_1dim_of(root)
        self._keys = root.keys
        #: Names of the columns, in the order of the keys.
        self.names = names
        leaves = [leaf for _, leaf in root.items if isinstance(leaf, Leaf)]
        self._shapes = [leaf.shape for leaf in leaves]
        self._is_number = [cat and shape == (1,) for shape in self._shapes]
        dtypes = [TENSOR_DTYPES[leaf.dtype].torch for leaf in leaves]
        self._leaves = [(key, dtype, torch.Size(leaf.shape)) for key, dtype, leaf in zip(root.keys, dtypes, leaves)]
        # torch delays the conjugation of complex numbers, so their bytes alone do not give the value.
        is_complex = any(dtype.is_complex for dtype in dtypes)
        self._type = None if is_complex else {'dict': dict, 'treetensor.torch': ttorch.Tensor}.get(root.kind)

    def addresses(self, element: Any) -> Maybe[Tuple[List[int], List[torch.Tensor]]]:
        """
        Overview:
            Return the addresses of an element's contiguous leaves, and the tensors that keep the memory. Return None if
            the element does not fit, or if a slower check is needed.
        """
        if type(element) is not self._type:
            return None
        stored = element if self._type is dict else element._detach()
        if (len(stored) if self._type is dict else stored.size()) != len(self._leaves):
            return None
        places, held = [], []
        try:
            for key, dtype, shape in self._leaves:
                value = stored.get(key)
                if type(value) is not torch.Tensor or value.dtype is not dtype or value.shape != shape:
                    return None
                if not (value.is_cpu and value.layout is torch.strided and value.is_contiguous()) or value.is_neg():
                    return None
                places.append(value.data_ptr())
                held.append(value)
        except KeyError:
            return None
        return places, held

    def views(self, columns: Columns) -> List[np.ndarray]:
        """Return the arrays that become tensors, in the order of the keys."""
        pairs = zip(self.names, self._is_number)
        return [columns[name][..., 0] if is_number else columns[name] for name, is_number in pairs]

    def steps(self, columns: Columns, length: int) -> List[np.ndarray]:
        """
        Overview:
            Return ``views`` for sequences of ``length`` steps, each ``(T, B, ...)``. Shape ``(1,)`` always becomes a
            number.
        """
        shapes = [() if shape == (1,) else shape for shape in self._shapes]
        size = len(columns[self.names[0]]) // length
        return [columns[name].reshape(length, size, *shape) for name, shape in zip(self.names, shapes)]

    def tree(self, views: Sequence[np.ndarray]) -> ttorch.Tensor:
        """Return the batch: a tree of tensors that share the memory of the views."""
        return tree_of(ttorch.Tensor, TreeStorage(dict(zip(self._keys, map(torch.from_numpy, views)))))

    def tree_of_tensors(self, tensors: TypingMapping[str, torch.Tensor]) -> ttorch.Tensor:
        """Return the batch of columns that are tensors by now, such as those on a GPU."""
        pairs = zip(self.names, self._is_number)
        leaves = [tensors[name][..., 0] if is_number else tensors[name] for name, is_number in pairs]
        return tree_of(ttorch.Tensor, TreeStorage(dict(zip(self._keys, leaves))))


def plain_batch(root: Node) -> Maybe[PlainBatch]:
    """Return a ``PlainBatch``, or None if elements are not mappings of tensors."""
    if not isinstance(root, Mapping) or not root.items or not all(isinstance(key, str) for key in root.keys):
        return None
    if not all(isinstance(child, Leaf) and _is_plain(child) for _, child in root.items):
        return None
    if any(_is_ignored(root, key) for key in root.keys):
        return None
    return PlainBatch(root, [column_name(place) for place, _ in children(root, '')])


def _is_plain(leaf: Leaf) -> bool:
    return leaf.kind == 'tensor' and TENSOR_DTYPES[leaf.dtype].carrier is None and not leaf.is_ragged


def cat_1dim_of(element: Mapping) -> bool:
    """Return whether DI-engine's policies collate these elements with shape ``(1,)`` as ``(B,)``."""
    action = dict(element.items).get('action')
    # Policies that learn from sequences, or from elements without an action, use the default of default_collate.
    if action is None or isinstance(action, Unrolled):
        return True
    return isinstance(action, Leaf) and action.kind in ('tensor', 'array') and action.dtype == 'int64'


def _collator(node: Node, path: str, lead: Shape, in_tree: bool) -> Collate:
    """Compile a node. ``in_tree``: the parent is a tree, so a mapping becomes part of it instead of a dict."""
    if isinstance(node, Leaf):
        return _leaf(node, column_name(path), lead)
    if isinstance(node, Nothing):
        return lambda columns, n, index, cat: None
    if isinstance(node, Optional):
        return _optional(node, path, lead, _collator(node.node, path, lead, in_tree))
    if isinstance(node, Unrolled):
        return _unrolled(node.length, _collator(node.item, path, lead + (node.length,), False))
    if isinstance(node, Positional):
        return _places(node, [_collator(child, place, lead, False) for place, child in children(node, path)])
    return _mapping(node, path, lead, in_tree and all(isinstance(key, str) for key in node.keys))


def _leaf(node: Leaf, name: str, lead: Shape) -> Collate:
    shape = lead + node.shape
    has_one, to_tensor = node.shape == (1,), _to_tensor(node)
    if node.is_ragged:
        return lambda columns, n, index, cat: to_tensor(_padded(columns, name))

    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        column = column_of(columns, name, node, shape)
        if len(index) > 1:
            column = column[index]
        return to_tensor(column[..., 0] if has_one and cat else column)

    return collate


def _padded(columns: Columns, name: str) -> np.ndarray:
    padded = ragged_of(columns, name).padded
    if padded is None:
        raise SchemaMismatch(f'column {name!r}: the values of a ragged leaf are not padded')
    return padded


def _to_tensor(node: Leaf) -> Callable[[np.ndarray], torch.Tensor]:
    if node.kind == 'tensor':
        stored = TENSOR_DTYPES[node.dtype]
        return lambda column: as_tensor(column, stored)
    if node.kind == 'float':
        return lambda column: torch.from_numpy(column).float()
    if not node.storage.isnative:
        return lambda column: torch.from_numpy(column.astype(node.storage.newbyteorder('=')))
    return torch.from_numpy


def _optional(node: Optional, path: str, lead: Shape, child: Collate) -> Collate:
    name, names, rows = presence_name(path, lead), leaf_names(node, path), _rows(joiner(node, path, lead), lead)

    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        presence = columns.get(name)
        held = is_there(columns, names) if presence is None else presence[index]
        if np.all(held):
            return child(columns, n, index, cat)
        return rows(columns, n, index, cat) if np.any(held) else None

    return collate


def _rows(join: Join, lead: Shape) -> Collate:
    """Collate to a list of rows, and of the steps that the index leaves."""

    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        places = np.arange(n * prod(lead)).reshape((n,) + lead)[index]
        return _pick(join(columns, n), places.tolist())

    return collate


def _pick(values: Sequence[Any], places: Any) -> Any:
    return [_pick(values, place) for place in places] if isinstance(places, list) else values[places]


def _unrolled(length: int, child: Collate) -> Collate:
    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        return [child(columns, n, index + (step,), cat) for step in range(length)]

    return collate


def _places(node: Positional, parts: List[Collate]) -> Collate:
    make: Any = sequence_maker(node) if node.is_namedtuple else list

    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        return make([part(columns, n, index, cat) for part in parts])

    return collate


def _mapping(node: Mapping, path: str, lead: Shape, in_tree: bool) -> Collate:
    make: Any = create_storage if in_tree else dict
    parts = [
        (
            key,
            _rows(joiner(child, place, lead), lead)
            if _is_ignored(node, key)
            else _collator(child, place, lead, in_tree),
        )
        for key, (place, child) in zip(node.keys, children(node, path))
    ]

    def collate(columns: Columns, n: int, index: Index, cat: bool) -> Any:
        return make({key: part(columns, n, index, cat) for key, part in parts})

    return collate


def _is_ignored(node: Mapping, key: Any) -> bool:
    return node.kind not in TREE_KINDS and isinstance(key, str) and key.startswith(IGNORED_PREFIX)
