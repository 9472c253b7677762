"""Metas of new rows in columns: what happens to them just before the rows become live."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.metas.metas import MetaStore
from ding_store.buffer.table.table import Keep


def without_meta(metas: MetaStore, write: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that writes a row and drops the meta of its slot, see ``without_metas``."""

    def write_and_drop(slot: int) -> None:
        write(slot)
        metas.drop(np.array([slot]))

    return write_and_drop


def without_metas(metas: MetaStore, keep: Optional[Keep]) -> Keep:
    """
    Return a ``keep`` function that drops the metas of the slots before the new rows are live. Readers would
    otherwise take them for metas of the new rows.
    """

    def drop(slots: Array, rows: Array) -> None:
        metas.drop(slots)
        if keep is not None:
            keep(slots, rows)

    return drop


def with_meta(metas: MetaStore, rows: Array, meta: Mapping[Any, Any], keep: Optional[Keep]) -> Keep:
    """Return a ``keep`` function that gives all rows this meta before they are live."""
    records = metas.encode_shared(rows, meta)

    def keep_all(slots: Array, rows: Array) -> None:
        metas.record(records)
        metas.put_shared(slots, rows, meta)
        if keep is not None:
            keep(slots, rows)

    return keep_all
