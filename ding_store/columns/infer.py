"""An element -> the node that describes it."""

from __future__ import annotations

from collections import OrderedDict
from functools import reduce
from typing import Any, Dict, Iterable, List, Tuple

import numpy as np
import torch
import treetensor.numpy as tnp
import treetensor.torch as ttorch
from easydict import EasyDict
from treevalue import TreeValue
from treevalue.tree.common import TreeStorage

from ding_store.errors import SchemaMismatch

from .leaves import PYTHON_DTYPES, TENSOR_NAMES
from .nodes import NOTHING, Key, Leaf, Mapping, Node, NotColumnar, Positional, Unrolled, child_path, merge, place_path

#: Containers with keys. Subclasses are none of them: they would come back as something else than they were.
MAPPING_TYPES: Dict[type, str] = {
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
        Describe an element or a part of one. ``tree`` is the kind of the treetensor that it is a part of, if any.
    Raises:
        - NotColumnar: It holds something that columns cannot; names its path and type.
    """
    if value is None:
        return NOTHING
    if isinstance(value, torch.Tensor):
        return _tensor(value, path)
    if isinstance(value, (np.ndarray, np.generic)):
        return _array(value, path)
    if type(value) in (bool, int, float):
        return _scalar(value, path)
    if type(value) in MAPPING_TYPES or type(value) is TreeStorage:
        return _mapping(value, path, tree)
    if isinstance(value, (list, tuple)):
        return _places(value, path)
    raise _refusal(value, path, 'keep such data out of the element, or as an array')


def _refusal(value: Any, path: str, advice: str) -> NotColumnar:
    kind = f'{type(value).__module__}.{type(value).__qualname__}'
    return NotColumnar(f'leaf {path!r}: {kind} cannot be held in columns; {advice}')


def _tensor(value: torch.Tensor, path: str) -> Leaf:
    if value.dtype not in TENSOR_NAMES or value.layout is not torch.strided:
        raise _refusal(value, path, f'its dtype is {value.dtype}, its layout {value.layout}: make it a dense tensor')
    return Leaf('tensor', TENSOR_NAMES[value.dtype], tuple(value.shape))


def _array(value: Any, path: str) -> Leaf:
    plain = isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap)
    if value.dtype.kind not in 'biufc' or not plain:
        raise _refusal(value, path, f'its dtype is {value.dtype}: only plain arrays of numbers and bools can')
    native = value.dtype.isnative
    dtype = value.dtype.name if native else value.dtype.str
    return Leaf('array' if isinstance(value, np.ndarray) else 'scalar', dtype, tuple(value.shape))


def _scalar(value: Any, path: str) -> Leaf:
    kind = type(value).__name__
    if kind == 'int' and not _INT64.min <= value <= _INT64.max:
        raise _refusal(value, path, f'{value} does not fit in 64 bits')
    return Leaf(kind, PYTHON_DTYPES[kind], ())


def _mapping(value: Any, path: str, tree: str) -> Mapping:
    kind = MAPPING_TYPES.get(type(value), tree)
    items = pairs(value)
    for key, _ in items:
        if type(key) not in (str, int):
            raise _refusal(key, path, f'the key {key!r} is neither str nor int')
    inner = kind if kind.startswith('treetensor') else ''
    return Mapping(kind, tuple((key, infer(item, child_path(path, key), inner)) for key, item in items))


def pairs(value: Any) -> List[Tuple[Key, Any]]:
    """The items of any mapping; those of a tree that are trees themselves come as they are stored."""
    if isinstance(value, TreeValue):
        value = value._detach()
    return list(value.iter_items() if isinstance(value, TreeStorage) else value.items())


def _places(value: Any, path: str) -> Node:
    if type(value) is list and len(value) >= 2:
        try:
            return Unrolled(len(value), merge_all(infer(item, path) for item in value))
        except NotColumnar:
            raise
        except SchemaMismatch:
            pass  # Its items differ: a list of places, then.
    items = tuple(infer(item, place_path(path, place)) for place, item in enumerate(value))
    if type(value) in (list, tuple):
        return Positional(type(value).__name__, items)
    fields = getattr(type(value), '_fields', None)
    if fields is None or not isinstance(value, tuple):
        raise _refusal(value, path, 'subclasses of list and tuple would come back as something else')
    return Positional(f'{type(value).__module__}:{type(value).__qualname__}', items, tuple(fields))


def merge_all(nodes: Iterable[Node]) -> Node:
    return reduce(merge, nodes)
