"""Infers the node that describes an element."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache, reduce
from typing import Any, Dict, Iterable, List, Tuple

import numpy as np
import torch
import treetensor.numpy as tnp
import treetensor.torch as ttorch
from easydict import EasyDict
from treevalue.tree.common import TreeStorage

from ding_store.errors import SchemaMismatch

from .leaves import PLAIN_ARRAYS, PYTHON_DTYPES, TENSOR_NAMES
from .merge import NotColumnar, merge
from .nodes import NOTHING, TREE_KINDS, Key, Leaf, Mapping, Node, Positional, Unrolled, child_path, place_path

#: Containers with keys. Subclasses are refused, since they would come back as another type.
MAPPING_TYPES: Dict[Any, str] = {
    dict: 'dict',
    OrderedDict: 'OrderedDict',
    EasyDict: 'EasyDict',
    ttorch.Tensor: 'treetensor.torch',
    tnp.ndarray: 'treetensor.numpy',
}

_INT64 = np.iinfo(np.int64)


def infer(value: Any, path: str = '', tree: str = '') -> Node:
    """
    Overview:
        Describe an element or a part of one. ``tree`` is the kind of the treetensor that directly holds it, if any.
    Raises:
        - NotColumnar: It holds something that columns cannot. Names its path and type.
    """
    if value is None:
        return NOTHING
    if isinstance(value, torch.Tensor):
        return _tensor(value, path)
    if isinstance(value, (np.ndarray, np.generic)):
        return _array(value, path)
    if type(value) in (bool, int, float):
        return _scalar(value, path)
    if type(value) in MAPPING_TYPES or (tree and type(value) is TreeStorage):
        return _mapping(value, path, tree)
    if isinstance(value, (list, tuple)):
        return _sequence(value, path)
    raise refusal(value, path, 'leave it out of the element, or turn it into an array')


def merge_all(nodes: Iterable[Node], widen: bool = True) -> Node:
    return reduce(lambda one, other: merge(one, other, widen=widen), nodes)


def refusal(value: Any, path: str, advice: str) -> NotColumnar:
    kind = f'{type(value).__module__}.{type(value).__qualname__}'.replace('builtins.', '')
    return NotColumnar(f'leaf {path!r}: columns cannot hold a {kind}: {advice}')


def _tensor(value: torch.Tensor, path: str) -> Leaf:
    if value.dtype not in TENSOR_NAMES or value.layout is not torch.strided:
        raise refusal(value, path, f'its dtype is {value.dtype}, its layout {value.layout}; make it a plain dense one')
    return Leaf('tensor', TENSOR_NAMES[value.dtype], tuple(value.shape))


def _array(value: Any, path: str) -> Leaf:
    is_array = isinstance(value, np.ndarray)
    if value.dtype.kind not in 'biufc' or (is_array and type(value) not in PLAIN_ARRAYS):
        raise refusal(value, path, f'its dtype is {value.dtype}; use a plain array of numbers or bools')
    dtype = value.dtype.name if value.dtype.isnative else value.dtype.str
    return Leaf('array' if is_array else 'scalar', dtype, tuple(value.shape))


def _scalar(value: Any, path: str) -> Leaf:
    kind = type(value).__name__
    if kind == 'int' and not _INT64.min <= value <= _INT64.max:
        raise refusal(value, path, f'{value} does not fit in 64 bits')
    return Leaf(kind, PYTHON_DTYPES[kind], ())


def _mapping(value: Any, path: str, tree: str) -> Mapping:
    kind = MAPPING_TYPES.get(type(value), tree)
    items = _items(value)
    for key, _ in items:
        if type(key) not in (str, int):
            raise refusal(value, path, f'its key {key!r} is neither str nor int')
    inner = kind if kind in TREE_KINDS else ''
    return Mapping(kind, tuple((key, infer(item, child_path(path, key), inner)) for key, item in items))


def _items(value: Any) -> List[Tuple[Key, Any]]:
    if isinstance(value, dict):
        return list(dict.items(value))  # an EasyDict may have a key 'items'
    # Subtrees of a tree come as storage, which saves making objects.
    storage = value if type(value) is TreeStorage else value._detach()
    return list(storage.iter_items())


def _sequence(value: Any, path: str) -> Node:
    if type(value) is list and len(value) >= 2:
        try:
            items = [infer(item, path) for item in value]
            # Numbers in a list keep their kinds, one leaf each. Numbers of steps share one column.
            widen = not any(isinstance(item, Leaf) for item in items)
            return Unrolled(len(value), merge_all(items, widen))
        except NotColumnar:
            raise
        except SchemaMismatch:
            pass  # The items differ: each has its columns.
    sequence_type: Any = type(value)
    kind, fields = kind_of(sequence_type)
    if not kind:
        raise refusal(value, path, 'a subclass would come back as another type; use a list, tuple or namedtuple')
    return Positional(kind, tuple(infer(item, place_path(path, i)) for i, item in enumerate(value)), fields)


@lru_cache(maxsize=256)
def kind_of(sequence_type: type) -> Tuple[str, Tuple[str, ...]]:
    """Return kind and fields of a sequence type, as in ``Positional``. The kind is '' if it cannot be rebuilt."""
    if sequence_type in (list, tuple):
        return sequence_type.__name__, ()
    fields = getattr(sequence_type, '_fields', None)
    if not issubclass(sequence_type, tuple) or not isinstance(fields, tuple):
        return '', ()
    return f'{sequence_type.__module__}:{sequence_type.__qualname__}', fields
