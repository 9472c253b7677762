"""What DI-engine's users reach for inside a DequeBuffer: ``buffer.storage`` and ``buffer.indices``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator

import numpy as np
from ding.data.buffer import BufferedData

from ding_store.buffer.table.row_choices import to_row
from ding_store.buffer.table.table import Table
from ding_store.errors import RowGone

if TYPE_CHECKING:
    from ding_store.buffer.store_buffer import StoreBuffer

#: Elements that an iteration reads at once.
_CHUNK = 256


class StorageView:
    """The elements of a buffer in the order of age."""

    def __init__(self, buffer: StoreBuffer) -> None:
        self._buffer = buffer

    @property
    def maxlen(self) -> int:
        return self._buffer.table.capacity

    def __len__(self) -> int:
        return self._buffer.count()

    def __getitem__(self, position: int) -> BufferedData:
        return self._buffer.get(position)

    def __iter__(self) -> Iterator[BufferedData]:
        """Those that are there now; of these, such as leave before their turn are passed over."""
        rows = self._buffer.table.rows_by_age()
        for start in range(0, len(rows), _CHUNK):
            yield from self._buffer._read_live(rows[start : start + _CHUNK])


class IndexView:
    """Where an index string is in the order of age."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def get(self, index: str) -> int:
        """
        Raises:
            - RowGone: There is no such element (a KeyError, as in DequeBuffer).
        """
        if not self.has(index):
            raise RowGone(f'index {index!r} is not in the buffer')
        return int(np.searchsorted(self._table.rows_by_age(), to_row(index)))

    def has(self, index: str) -> bool:
        return bool(self._table.contains(np.array([to_row(index)]))[0])

    def __len__(self) -> int:
        return len(self._table)
