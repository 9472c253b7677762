"""Rows that are about to be overwritten in place, as one record: so that a crash in the middle can be repeated."""

from __future__ import annotations

import json
from typing import Dict, Mapping, Tuple

import numpy as np

from ding_store.buffer.arrays import Array


def encode(rows: Array, columns: Mapping[str, Array]) -> bytes:
    """Row numbers ``(n,)`` and what they will be in these columns, ``(n, *shape)``."""
    head = [len(rows), [[name, array.dtype.str, list(array.shape)] for name, array in columns.items()]]
    text = json.dumps(head).encode()
    parts = [len(text).to_bytes(4, 'little'), text, rows.astype('<i8').tobytes()]
    return b''.join(parts + [array.tobytes() for array in columns.values()])


def decode(record: bytes) -> Tuple[Array, Dict[str, Array]]:
    end = 4 + int.from_bytes(record[:4], 'little')
    num_rows, described = json.loads(record[4:end])
    rows = np.frombuffer(record, '<i8', num_rows, end).astype(np.int64)
    end += 8 * num_rows
    columns = {}
    for name, dtype, shape in described:
        count = int(np.prod(shape))
        columns[name] = np.frombuffer(record, dtype, count, end).reshape(shape)
        end += columns[name].nbytes
    return rows, columns
