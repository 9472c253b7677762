"""Merges two nodes into one that fits the elements of both, or raises an error that names the difference."""

from __future__ import annotations

from typing import Any, Tuple
from typing import Optional as Maybe

import numpy as np

from ding_store.errors import SchemaMismatch

from .leaves import PYTHON_DTYPES
from .nodes import Leaf, Mapping, Node, Nothing, Optional, Positional, Unrolled, child_path, leaf_names, place_path

_MERGED = ' (a schema merged with that of the element would fit both)'


class VaryingLength(SchemaMismatch):
    """Two arrays differ in nothing but their first dimension. ``path`` is that of the leaf."""

    path = ''


class NotColumnar(SchemaMismatch):
    """An element holds something that is not an array, scalar, None or known container, so columns cannot hold it."""


def merge(one: Node, other: Node, path: str = '', strict: bool = False, widen: bool = True) -> Node:
    """
    Overview:
        Return the node that fits whatever fits one of two nodes. If one of them is None, the node is optional. If they
        are two kinds of numbers, it is the wider one, see ``wider``.
    Arguments:
        - strict (:obj:`bool`): Refuse what ``one`` does not fit already.
        - widen (:obj:`bool`): Accept numbers of two kinds.
    Raises:
        - SchemaMismatch: There is no such node. Names the path, what ``one`` expects there and what ``other`` is.
    """
    if one == other:
        return one
    if isinstance(one, (Nothing, Optional)) or isinstance(other, (Nothing, Optional)):
        return _merge_optional(one, other, path, strict, widen)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return _merge_mappings(one, other, path, strict, widen)
    if isinstance(one, Unrolled) and isinstance(other, Unrolled) and one.length == other.length:
        return Unrolled(one.length, merge(one.item, other.item, path, strict, widen))
    one, other = _as_places(one, other), _as_places(other, one)
    if isinstance(one, Positional) and isinstance(other, Positional):
        return _merge_places(one, other, path, strict, widen)
    made = wider(one, other) if widen else None
    if made is None:
        raise mismatch(path, one, other)
    if strict and made != one:
        raise mismatch(path, one, other, _MERGED)
    return made


def wider(one: Node, other: Node) -> Maybe[Leaf]:
    """
    Overview:
        Return the kind that holds the numbers of two kinds without loss. The kinds are Python's numbers, numpy's
        scalars, and arrays without dimensions. Integers and floats become floats. Dtypes become the larger one.
        Python's kind takes precedence over numpy's.
    Returns:
        - leaf (:obj:`Optional[Leaf]`): None if there is none: for a bool and a number, for tensors, and for arrays with
          dimensions.
    """
    if not (isinstance(one, Leaf) and isinstance(other, Leaf)) or one.shape or other.shape:
        return None
    kinds, dtypes = (one.kind, other.kind), (one.storage, other.storage)
    if 'tensor' in kinds:
        return None
    dtype = np.promote_types(*dtypes)
    if not _are_alike(dtypes, dtype):
        return None
    if any(kind in PYTHON_DTYPES for kind in kinds):
        kind = {'b': 'bool', 'i': 'int', 'f': 'float'}.get(dtype.kind, '')
        is_held = bool(kind) and np.promote_types(dtype, PYTHON_DTYPES[kind]) == PYTHON_DTYPES[kind]
        return Leaf(kind, PYTHON_DTYPES[kind], ()) if is_held else None
    return Leaf('scalar' if 'scalar' in kinds else 'array', dtype.name, ())


def _are_alike(dtypes: Tuple[np.dtype, np.dtype], promoted: np.dtype) -> bool:
    kinds = dtypes[0].kind + dtypes[1].kind
    if 'b' in kinds or 'c' in kinds:
        return kinds[0] == kinds[1]
    # Signed and unsigned integers of 64 bits have no common integer dtype.
    return 'f' in kinds or promoted.kind in 'iu'


def mismatch(path: str, expected: Node, actual: Node, hint: str = '') -> SchemaMismatch:
    """Return the error at a path. Name the kinds of leaves if dtype and shape alone do not distinguish them."""
    texts = [str(expected), str(actual)]
    if isinstance(expected, Leaf) and isinstance(actual, Leaf) and expected.kind != actual.kind:
        texts = [
            text if text in PYTHON_DTYPES else f'{leaf.kind} {text}' for leaf, text in zip((expected, actual), texts)
        ]
    what = f'leaf {path!r}' if path else 'the element'
    text = f'{what}: expected {texts[0]}, got {texts[1]}{hint}'
    if not _differ_in_length(expected, actual):
        return SchemaMismatch(text)
    error = VaryingLength(text)
    error.path = path
    return error


def _differ_in_length(one: Node, other: Node) -> bool:
    if not (isinstance(one, Leaf) and isinstance(other, Leaf)) or not (one.shape and other.shape):
        return False
    return (one.kind, one.dtype, one.shape[1:]) == (other.kind, other.dtype, other.shape[1:])


def _merge_optional(one: Node, other: Node, path: str, strict: bool, widen: bool) -> Node:
    if strict and not isinstance(one, Optional):
        raise mismatch(path, one, other, _MERGED)
    held = [node.node if isinstance(node, Optional) else node for node in (one, other)]
    known = [node for node in held if not isinstance(node, Nothing)]
    return Optional(known[0] if len(known) == 1 else merge(known[0], known[1], path, strict, widen))


def _merge_mappings(one: Mapping, other: Mapping, path: str, strict: bool, widen: bool) -> Mapping:
    theirs = dict(other.items)
    if one.kind != other.kind or set(one.keys) != set(theirs):
        raise mismatch(path, one, other)
    nodes = [(key, merge(node, theirs[key], child_path(path, key), strict, widen)) for key, node in one.items]
    return Mapping(one.kind, tuple(nodes))


def _merge_places(one: Positional, other: Positional, path: str, strict: bool, widen: bool) -> Positional:
    if (one.kind, one.fields, len(one.items)) != (other.kind, other.fields, len(other.items)):
        raise mismatch(path, one, other)
    pairs = enumerate(zip(one.items, other.items))
    nodes = [merge(mine, theirs, place_path(path, place), strict, widen) for place, (mine, theirs) in pairs]
    return Positional(one.kind, tuple(nodes), one.fields)


def _as_places(node: Node, beside: Node) -> Any:
    """Convert a list of only None: it has no columns yet, so it may still become a list whose items differ."""
    if isinstance(node, Unrolled) and isinstance(beside, Positional) and not leaf_names(node.item):
        return Positional('list', (node.item,) * node.length)
    return node
