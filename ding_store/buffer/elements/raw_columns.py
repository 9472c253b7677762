"""Columns that came without elements: how to infer their schema, and how to complete them for a wider schema."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

import numpy as np
import torch
import treetensor.torch as ttorch
from treevalue.tree.common import create_storage

from ding_store.buffer.array_types import Array
from ding_store.buffer.table.specs import ColumnSpec
from ding_store.columns import Schema
from ding_store.errors import SchemaMismatch

#: Suffix of a column that states per row whether the leaf or subtree of that name is present. Two: per step of a row.
PRESENCE = '?'


def schema_of(columns: Mapping[str, Array]) -> Schema:
    """
    Overview:
        Infer the schema of elements that are trees of tensors. Column names are paths such as ``'obs/image'``.
    Raises:
        - SchemaMismatch: There are no columns or no rows, or torch has no such dtype.
    """
    if not columns or not all(np.ndim(column) and len(column) for column in columns.values()):
        raise SchemaMismatch(f'the first columns need at least one name and one row each, got {sorted(columns)}')
    return Schema.infer([_element_of(columns, 0)])


def elements_of(columns: Mapping[str, Any]) -> List[Any]:
    """
    Overview:
        Return the rows of columns as trees of tensors. A column may be a list of arrays of different lengths.
    Raises:
        - SchemaMismatch: The columns differ in their number of rows, or torch has no such dtype.
    """
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise SchemaMismatch(f'the columns {sorted(columns)} must have the same number of rows, got {sorted(lengths)}')
    return [_element_of(columns, row) for row in range(lengths.pop())]


def _element_of(columns: Mapping[str, Any], row: int) -> ttorch.Tensor:
    tree: Dict[str, Any] = {}
    for path, column in columns.items():
        *parents, name = path.split('/')
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        try:
            place[name] = torch.as_tensor(np.array(column[row]))
        except TypeError as e:
            raise SchemaMismatch(f'column {path!r} has dtype {column[row].dtype}, which torch does not support') from e
    return ttorch.Tensor(create_storage(tree))


def complete(columns: Mapping[str, Array], specs: Mapping[str, ColumnSpec]) -> Mapping[str, Array]:
    """
    Complete columns of an older, narrower schema for the wider one. Leaves that they lack are marked as absent, the
    others as present.
    """
    if len(columns) == len(specs):
        return columns  # The table refuses columns with other names.
    missing = {name: spec for name, spec in specs.items() if name not in columns}
    optional = [name.rstrip(PRESENCE) for name in specs if name.endswith(PRESENCE)]
    if not missing or not optional:
        return columns
    num_rows = len(next(iter(columns.values())))
    made = {}
    fill = fill_values(missing, columns)
    for name, (dtype, shape) in missing.items():
        if name.endswith(PRESENCE) or any(_is_under(name, path) for path in optional):
            made[name] = np.full((num_rows, *shape), fill.get(name, 0), dtype)
    return {**columns, **made}


def as_wide(columns: Mapping[str, Array], specs: Mapping[str, ColumnSpec], schema: Schema) -> Mapping[str, Array]:
    """
    Overview:
        Convert columns to the wider dtypes of the table.
    Raises:
        - SchemaMismatch: A number would change.
    """
    made = {}
    for name, (dtype, _) in schema.columns().items():
        wanted = specs.get(name, (dtype,))[0]
        if wanted == dtype or name not in columns or columns[name].dtype != dtype:
            continue
        made[name] = columns[name].astype(wanted)
        if dtype.kind in 'iu' and not np.array_equal(made[name].astype(dtype), columns[name]):
            raise SchemaMismatch(f'column {name!r}: it has integers that {wanted} cannot represent exactly')
    return {**columns, **made} if made else columns


def fill_values(added: Mapping[str, ColumnSpec], known: Mapping[str, Any]) -> Dict[str, int]:
    """Return the values of new presence columns for older rows: 1 if a leaf below them existed already."""
    presence = [name for name in added if name.endswith(PRESENCE)]
    return {name: 1 for name in presence if any(_is_under(other, name.rstrip(PRESENCE)) for other in known)}


def _is_under(name: str, path: str) -> bool:
    return name == path or name.startswith(path + '/')
