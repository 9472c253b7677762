"""A record of rows that are about to be overwritten in place, so that the write can be repeated after a crash."""

from __future__ import annotations

import json
from math import prod
from typing import Dict, Iterable, Mapping, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.table_header import StoredColumn
from ding_store.errors import CorruptPayload


def encode(rows: Array, columns: Mapping[str, Array]) -> bytes:
    """Encode row numbers ``(n,)`` and the new values of these columns, ``(n, *shape)``."""
    head = [len(rows), [[name, array.dtype.str, list(array.shape)] for name, array in columns.items()]]
    text = json.dumps(head).encode()
    parts = [len(text).to_bytes(4, 'little'), text, rows.astype('<i8').tobytes()]
    return b''.join(parts + [array.tobytes() for array in columns.values()])


def decode(record: bytes, held: Iterable[StoredColumn]) -> Tuple[Array, Dict[str, Array]]:
    """
    Overview:
        Return the arguments of ``encode``.
    Arguments:
        - held (:obj:`Iterable`): The columns of the table.
    Raises:
        - CorruptPayload: The record was not written by ``encode``, or has other columns than the table.
    """
    specs = {column.name: (np.dtype(column.dtype), column.shape) for column in held}
    try:
        end = 4 + int.from_bytes(record[:4], 'little')
        num_rows, described = json.loads(record[4:end])
        rows = np.frombuffer(record, '<i8', num_rows, end).astype(np.int64)
        end += 8 * num_rows
        columns = {}
        for name, dtype, shape in described:
            if (np.dtype(dtype), shape[1:]) != specs[name] or shape[:1] != [num_rows]:
                raise ValueError(f'column {name!r} is of other elements')
            columns[name] = np.frombuffer(record, dtype, prod(shape), end).reshape(shape)
            end += columns[name].nbytes
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise CorruptPayload(f'the record of an update that was not finished cannot be read: {e}') from e
    return rows, columns
