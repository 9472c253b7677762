"""Names, dtypes and shapes of columns, and checks of arrays against them."""

from __future__ import annotations

from math import prod
from typing import Any, Collection, Dict, Mapping, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.errors import ConfigError, SchemaMismatch

#: One value of a column: its dtype and shape.
ColumnSpec = Tuple[np.dtype[Any], Tuple[int, ...]]
#: Name -> values ``(n, *shape)``.
Columns = Mapping[str, Array]


def spec_bytes(spec: ColumnSpec) -> int:
    dtype, shape = spec
    return np.dtype(dtype).itemsize * prod(shape)


def checked_specs(columns: Mapping[str, ColumnSpec]) -> Dict[str, ColumnSpec]:
    """Return the specs in a uniform form. Raises ConfigError if a dtype has no fixed size."""
    specs: Dict[str, ColumnSpec] = {}
    for name, (dtype, shape) in columns.items():
        dtype = np.dtype(dtype)
        if dtype.hasobject or dtype.itemsize == 0:
            raise ConfigError(f'column {name!r} has dtype {dtype}, which has no fixed size. Use another dtype.')
        specs[name] = (dtype, tuple(int(size) for size in shape))
    return specs


def check_columns(
    specs: Mapping[str, ColumnSpec],
    columns: Columns,
    num_rows: Optional[int] = None,
    partial: bool = False,
    narrowed: Collection[str] = (),
) -> int:
    """
    Overview:
        Compare arrays with the columns of a table before anything is written.
    Arguments:
        - specs (:obj:`Mapping`): Name -> dtype and shape of the table's columns.
        - num_rows (:obj:`Optional[int]`): The length that all must have. By default they must be equally long.
        - partial (:obj:`bool`): Whether columns may be missing.
        - narrowed (:obj:`Collection[str]`): Names of float32 columns that are passed as bytes.
    Returns:
        - num_rows (:obj:`int`): Their length.
    Raises:
        - SchemaMismatch: A column is missing, unknown, or of another dtype, shape or length.
    """
    if columns.keys() != specs.keys():
        unknown, missing = set(columns) - set(specs), set(specs) - set(columns)
        if unknown or (missing and not partial):
            raise SchemaMismatch(f'columns differ from the table: unknown {sorted(unknown)}, missing {sorted(missing)}')
    for name in narrowed:
        if name not in columns or columns[name].dtype != np.uint8:
            raise not_narrowed(name, columns)
    for name, values in columns.items():
        dtype, shape = specs[name]
        if name in narrowed and dtype == np.float32:
            dtype = values.dtype
        elif name in narrowed:
            raise SchemaMismatch(f'{name}: expected {dtype}, but uint8 can only stand for float32')
        num_rows = len(values) if num_rows is None and values.ndim else num_rows
        if values.dtype != dtype or values.shape != (num_rows, *shape):
            raise SchemaMismatch(
                f'{name}: expected {dtype} of shape ({num_rows}, *{shape}), '
                f'got {values.dtype} of shape {values.shape}'
            )
    return num_rows or 0


def not_narrowed(name: str, columns: Columns) -> SchemaMismatch:
    found = f'it is {columns[name].dtype}' if name in columns else f'the columns are {sorted(columns)}'
    return SchemaMismatch(f'{name}: narrowed columns must be uint8, which stands for float32, but {found}')
