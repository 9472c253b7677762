"""Pickled chunks, for elements that columns cannot hold. Only with ``store.allow_pickle``."""

from __future__ import annotations

import io
import pickle
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.storage.base import Array, Entry
from ding_store.storage.encoding.framing import corrupt_entry

#: Stands in a header for the schema, and names the entry's only array.
PICKLED = 'pickle'
#: Header field: key of an element -> number that the reader adds to that leaf.
OFFSETS = 'offsets'
_REFUSED = (
    'its elements are pickled. Set store.allow_pickle=True to accept them: every process that can write to the store '
    'can then run code here'
)


def pickled(elements: Sequence[Any], offsets: Dict[str, int]) -> Tuple[Dict[str, Any], Dict[str, Array]]:
    """
    Overview:
        Pickle elements into one array.
    Arguments:
        - offsets (:obj:`Dict[str, int]`): Key of an element -> number that the reader adds. The elements here stay
          unchanged.
    Returns:
        - header, arrays: The fields to add to the chunk's header, and the entry's arrays.
    """
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(list(elements))
    return {'schema': PICKLED, OFFSETS: offsets}, {PICKLED: np.frombuffer(data.getbuffer(), np.uint8)}


class _Pickler(pickle.Pickler):
    """Pickles tensors as CPU tensors, because the reader's host may have no such GPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != 'cpu':
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def is_pickled(entry: Entry) -> bool:
    return bool(entry.header.get('schema') == PICKLED)


def what_is_wrong(entry: Entry, is_allowed: bool) -> str:
    """Return why a pickled entry is refused, or '' if it is not. This runs no code from the entry."""
    if not is_allowed:
        return _REFUSED
    array, offsets = entry.arrays.get(PICKLED), entry.header.get(OFFSETS)
    if not isinstance(offsets, dict) or not all(type(offset) is int for offset in offsets.values()):
        return f'{OFFSETS} ({offsets!r}) are not integers'
    is_bytes = array is not None and array.dtype == np.uint8 and array.ndim == 1
    return '' if is_bytes and entry.header['rows'] else 'it has no pickled elements'


def unpickled(entry: Entry) -> List[Any]:
    """
    Overview:
        Unpickle an entry's elements. This runs code that its writer chose, so call ``what_is_wrong`` first.
    Raises:
        - CorruptPayload: The bytes cannot be unpickled here, or are no list of elements.
    """
    try:
        elements = pickle.loads(entry.arrays[PICKLED].tobytes())  # noqa: S301 the user allowed it
    except Exception as e:  # noqa: BLE001 - a pickled class's code may raise anything
        reason = f'it cannot be unpickled here: {type(e).__name__}: {e}'
        raise corrupt_entry(entry.stream, entry.id, reason, entry.writer, entry.sequence) from e
    if not isinstance(elements, list) or len(elements) != entry.header['rows']:
        reason = 'its pickled object is not a list of its elements'
        raise corrupt_entry(entry.stream, entry.id, reason, entry.writer, entry.sequence)
    return elements


def add_offsets(elements: List[Any], entry: Entry) -> List[Any]:
    """Add the header's offsets to unpickled elements, in place."""
    for element in elements:
        for name, offset in entry.header[OFFSETS].items():
            if isinstance(element, (dict, ttorch.Tensor)) and name in element:
                element[name] = element[name] + offset
    return elements
