"""Ragged leaves of chunks: their columns hold lengths, and one array holds the items of all rows."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Mapping, Sequence

import numpy as np

from ding_store.columns import Schema, ragged
from ding_store.columns.ragged import ALL, Names, Ragged, joined_items
from ding_store.errors import SchemaMismatch
from ding_store.storage.base import Array, Entry

#: Name of the array with the items of a ragged leaf. No column has such a name, see ``columns.nodes.child_path``.
_ITEMS = '~items/{name}'


def with_items(schema: Schema, columns: Mapping[str, Array], items: Mapping[str, List[Array]]) -> Dict[str, Array]:
    """
    Overview:
        Return the arrays of a chunk.
    Arguments:
        - columns, items (:obj:`Mapping`): What ``schema.encode_ragged`` returns.
    """
    joined = joined_items(schema.ragged, items)
    return {**columns, **{_ITEMS.format(name=name): array for name, array in joined.items()}}


def items_in(entry: Entry, schema: Schema) -> Dict[str, Array]:
    """Return the items of all rows of each ragged leaf of a chunk."""
    names = {name: _ITEMS.format(name=name) for name in schema.ragged}
    return {name: entry.arrays[key] for name, key in names.items() if key in entry.arrays}


def lengths_in(entry: Entry) -> Dict[str, Array]:
    """Return the columns of a chunk, with the lengths of ragged leaves."""
    begin = _ITEMS.format(name='')
    return {name: array for name, array in entry.arrays.items() if not name.startswith(begin)}


def check_items(entry: Entry, schema: Schema) -> None:
    """Raise SchemaMismatch if the items of a chunk are not those of its rows. Its columns have been checked."""
    ragged.check_items(schema.ragged, entry.arrays, items_in(entry, schema))
    others = entry.arrays.keys() - schema.columns().keys() - {_ITEMS.format(name=name) for name in schema.ragged}
    if others:
        raise SchemaMismatch(f'array {sorted(others)[0]!r} is no column, and has no items of a ragged leaf')


def ragged_columns(entry: Entry, schema: Schema) -> Dict[str, Any]:
    """Return copies of the columns of a chunk, with the arrays of ragged leaves by row. It has been checked."""
    columns: Dict[str, Any] = {name: array.copy() for name, array in lengths_in(entry).items()}
    for name in schema.ragged:
        items = entry.arrays[_ITEMS.format(name=name)].copy()
        columns[name] = Ragged(columns[name], functools.partial(_rows, items, columns[name]))
    return columns


def _rows(items: Array, lengths: Array) -> List[Array]:
    return np.split(items, np.cumsum(lengths)[:-1])


def ragged_names(replays: Sequence[Any]) -> Names:
    """Return the names of leaves that are ragged in a pipeline's replays, or 'all'."""
    if any(replay.ragged == ALL for replay in replays):
        return ALL
    return sorted({name for replay in replays for name in replay.ragged})
