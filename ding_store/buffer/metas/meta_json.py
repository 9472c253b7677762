"""Metas as JSON with tags for types that JSON lacks. There is no pickle, so that no code in a table's files is run."""

from __future__ import annotations

import base64
import json
from typing import Any, Mapping, Tuple

import numpy as np
import torch

from ding_store.buffer.array_types import Array
from ding_store.errors import CorruptPayload, SchemaMismatch

_PLAIN = (type(None), bool, int, float, str)


def encode(rows: Array, meta: Mapping[Any, Any]) -> bytes:
    """
    Overview:
        Encode a record: these rows have this meta.
    Raises:
        - SchemaMismatch: The meta holds a value that cannot be stored.
    """
    return len(rows).to_bytes(4, 'little') + rows.astype('<i8').tobytes() + json.dumps(_pack(dict(meta))).encode()


def decode(record: bytes) -> Tuple[Array, Any]:
    """
    Overview:
        Return rows and meta of a record.
    Raises:
        - CorruptPayload: The record was not written by ``encode``.
    """
    end = 4 + 8 * int.from_bytes(record[:4], 'little')
    try:
        rows, meta = np.frombuffer(record[4:end], '<i8').astype(np.int64), _unpack(json.loads(record[end:]))
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise CorruptPayload(f'a record of metas holds no meta: {e}') from e
    if len(rows) * 8 + 4 != end or (rows < 0).any() or not isinstance(meta, dict):
        raise CorruptPayload(f'a record of metas holds no meta: {record[end:]!r:.80}')
    return rows, meta


def _pack(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return {'dict': [[_pack(key), _pack(each)] for key, each in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(each) for each in value]}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {'scalar': _pack_array(np.asarray(value))}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {'array': _pack_array(value)}
    if type(value) is torch.Tensor and value.dtype is not torch.bfloat16:
        return {'tensor': _pack_array(value.detach().cpu().numpy())}
    raise SchemaMismatch(
        f'a meta holds {value!r:.80} of type {type(value).__name__}: with a path, metas may hold only numbers, '
        'strings, None, arrays, tensors, and dicts, lists and tuples of them'
    )


def _unpack(packed: Any) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == 'dict':
        return {_unpack(key): _unpack(each) for key, each in value}
    if kind in ('list', 'tuple'):
        return (list if kind == 'list' else tuple)(map(_unpack, value))
    array = _unpack_array(value)
    if kind == 'tensor':
        return torch.from_numpy(array)
    return array[()] if kind == 'scalar' else array


def _pack_array(array: Array) -> Any:
    return [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _unpack_array(packed: Any) -> Array:
    dtype, shape, text = packed
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
