"""Patches: new values of some leaves of many rows."""

from __future__ import annotations

from typing import Any, Collection, Dict, Mapping, Optional, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.packet_file import SPECS
from ding_store.buffer.elements.raw_columns import PRESENCE
from ding_store.buffer.table.row_choices import as_rows, to_row
from ding_store.buffer.table.specs import Columns, ColumnSpec, check_columns
from ding_store.errors import SchemaMismatch


def patched_rows(rows: Any) -> Array:
    """Return row numbers ``(n,)`` of integers or of index strings. Raises TypeError for anything else."""
    numbers = np.asarray(rows)
    if numbers.dtype.kind == 'U' and numbers.ndim == 1:
        return np.array([to_row(index) for index in numbers.tolist()], np.int64)
    return as_rows(numbers)


def patch_columns(patch: Any) -> Dict[str, Array]:
    """
    Overview:
        Return the columns of a patch: a mapping of leaf paths, or a tree of arrays or tensors.
    Raises:
        - SchemaMismatch: A value is not an array.
    """
    columns: Dict[str, Array] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, ttorch.Tensor):
            value = value.json()
        if isinstance(value, Mapping):
            for key, child in value.items():
                add(f'{path}/{key}' if path else str(key), child)
            return
        try:
            columns[path] = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        except (TypeError, ValueError) as e:
            raise SchemaMismatch(f'patch: {path!r} is no array: {e}. Pass an array or a tensor (n, *leaf).') from e

    add('', patch)
    return columns


def check_patch(
    columns: Columns,
    specs: Mapping[str, ColumnSpec],
    num_rows: int,
    newer_than: Optional[str] = None,
    ragged: Collection[str] = (),
) -> None:
    """
    Arguments:
        - ragged (:obj:`Collection[str]`): Names of ragged leaves, which cannot be patched.
    Raises:
        - SchemaMismatch: A column is unknown, or of another dtype, shape or length. Or rows may lack it. Or
          ``newer_than`` is no column of one integer per row.
    """
    if ragged:
        specs = {name: spec for name, spec in specs.items() if name not in ragged and name not in SPECS}
        for name in sorted(set(ragged) & set(columns)):
            raise SchemaMismatch(f'patch: {name!r} is ragged. Replace whole elements with update().')
    check_columns(specs, columns, num_rows, partial=True)
    optional = {name.rstrip(PRESENCE) for name in specs if name.endswith(PRESENCE)}
    for name in columns:
        parts = name.split('/')
        paths = ['/'.join(parts[:end]) for end in range(1, len(parts) + 1)]
        if name.endswith(PRESENCE) or any(path in optional for path in paths):
            raise SchemaMismatch(f'patch: {name!r} is None in some rows. Replace whole elements with update().')
    if newer_than is None:
        return
    if newer_than not in columns:
        raise SchemaMismatch(f'newer_than ({newer_than!r}) must be a leaf of the patch: {sorted(columns)}')
    values = columns[newer_than]
    if values.dtype.kind not in 'iu' or values.size != num_rows:
        raise SchemaMismatch(
            f'newer_than ({newer_than!r}) must be a leaf of one integer per row, not {values.dtype} of shape '
            f'{values.shape[1:]}'
        )


def choose_rows(rows: Array, found: Array, versions: Optional[Tuple[Array, Array]]) -> Tuple[Array, Array]:
    """
    Overview:
        Decide which rows of a patch are written, as if they were written one after the other.
    Arguments:
        - found (:obj:`np.ndarray`): Which rows are in the table, bool.
        - versions (:obj:`Optional[Tuple]`): The versions of the patch and those in the table, both ``(n,)``. A row is
          written if its version grows.
    Returns:
        - written (:obj:`np.ndarray`): Which rows are written, bool.
        - last (:obj:`np.ndarray`): The places of the last values of each row that is written, ``(m,)``.
    """
    written = found.copy()
    if versions is not None:
        newest: Dict[int, int] = {}
        new, old = (each.tolist() for each in versions)
        for place in np.flatnonzero(found).tolist():
            row = int(rows[place])
            written[place] = new[place] > newest.setdefault(row, old[place])
            newest[row] = max(newest[row], new[place])
    places = np.flatnonzero(written)
    backwards = places[::-1]
    return written, backwards[np.unique(rows[backwards], return_index=True)[1]]
