"""Chunks of elements that no columns can hold, pickled: only where ``store.allow_pickle`` says so."""

from __future__ import annotations

import io
import pickle
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.storage.base import Array, Entry
from ding_store.storage.encoding.framing import corrupt_entry

#: In the place of a schema, and of its columns.
PICKLED = 'pickle'
#: What is to be added to leaves, by who unpickles them.
OFFSETS = 'offsets'
_REFUSED = 'its elements are pickled; store.allow_pickle=True takes them, from whoever may write to the store'


def pickled(elements: Sequence[Any], offsets: Dict[str, int]) -> Tuple[Dict[str, Any], Dict[str, Array]]:
    """
    Arguments:
        - offsets (:obj:`Dict[str, int]`): Key of an element -> what is to be added there, not to the caller's own.
    Returns:
        - header, arrays: Of the entry, besides what is in every chunk's header.
    """
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(list(elements))
    return {'schema': PICKLED, OFFSETS: offsets}, {PICKLED: np.frombuffer(data.getbuffer(), np.uint8)}


class _Pickler(pickle.Pickler):
    """Tensors become those of the CPU, as elements do that are no objects: who reads them may have no such GPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != 'cpu':
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def is_pickled(entry: Entry) -> bool:
    return bool(entry.header.get('schema') == PICKLED)


def what_is_wrong(entry: Entry, is_allowed: bool) -> str:
    """With a pickled entry, as far as that can be told without running what is in it; '' for nothing."""
    if not is_allowed:
        return _REFUSED
    array, offsets = entry.arrays.get(PICKLED), entry.header.get(OFFSETS)
    if not isinstance(offsets, dict) or not all(type(offset) is int for offset in offsets.values()):
        return f'{OFFSETS} ({offsets!r}) are none'
    is_bytes = array is not None and array.dtype == np.uint8 and array.ndim == 1
    return '' if is_bytes and entry.header['rows'] else 'it has no pickled elements'


def unpickled(entry: Entry) -> List[Any]:
    """
    Overview:
        What was pickled into an entry. This runs whatever its writer put into it: ask ``what_is_wrong`` first.
    Raises:
        - CorruptPayload: It cannot be unpickled here, or is something else.
    """
    try:
        elements = pickle.loads(entry.arrays[PICKLED].tobytes())  # noqa: S301 the user allowed it
    except Exception as e:  # noqa: BLE001 - whatever a class's own code does there
        reason = f'it cannot be unpickled here: {type(e).__name__}: {e}'
        raise corrupt_entry(entry.stream, entry.id, reason, entry.writer, entry.sequence) from e
    if not isinstance(elements, list) or len(elements) != entry.header['rows']:
        reason = 'what was pickled is no list of its elements'
        raise corrupt_entry(entry.stream, entry.id, reason, entry.writer, entry.sequence)
    return elements


def add_offsets(elements: List[Any], entry: Entry) -> List[Any]:
    """To what was unpickled, in place: what the entry's header says is to be added."""
    for element in elements:
        for name, offset in entry.header[OFFSETS].items():
            if isinstance(element, (dict, ttorch.Tensor)) and name in element:
                element[name] = element[name] + offset
    return elements
