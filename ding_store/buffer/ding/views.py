"""DequeBuffer's public attributes ``storage`` and ``indices``, as views of a StoreBuffer."""

from __future__ import annotations

from typing import Callable, Iterator, List

import numpy as np
from ding.data.buffer import BufferedData

from ding_store.buffer.array_types import Array
from ding_store.buffer.table.row_choices import to_row
from ding_store.buffer.table.table import Table
from ding_store.errors import RowGone

#: Elements that an iteration reads at once.
_CHUNK = 256


class StorageView:
    """
    Overview:
        The elements of a buffer in the order of age.
    Arguments:
        - table (:obj:`Table`): The buffer's table.
        - get (:obj:`Callable`): Returns the element at a position in the order of age.
        - read_live (:obj:`Callable`): Returns the elements of those rows that are still in the buffer.
    """

    def __init__(
        self,
        table: Table,
        get: Callable[[int], BufferedData],
        read_live: Callable[[Array], List[BufferedData]],
    ) -> None:
        self._table, self._get, self._read_live = table, get, read_live

    @property
    def maxlen(self) -> int:
        return self._table.capacity

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, position: int) -> BufferedData:
        return self._get(position)

    def __iter__(self) -> Iterator[BufferedData]:
        """Iterate over the elements of this moment. An element that leaves the buffer before its turn is skipped."""
        rows = self._table.rows_by_age()
        for start in range(0, len(rows), _CHUNK):
            yield from self._read_live(rows[start : start + _CHUNK])


class IndexView:
    """The place of each index string, ordered by age."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def get(self, index: str) -> int:
        """
        Raises:
            - RowGone: The buffer has no such element. RowGone is a KeyError, as in DequeBuffer.
        """
        if not self.has(index):
            raise RowGone(f'index {index!r} is not in the buffer')
        return int(np.searchsorted(self._table.rows_by_age(), to_row(index)))

    def has(self, index: str) -> bool:
        return bool(self._table.contains(np.array([to_row(index)]))[0])

    def __len__(self) -> int:
        return len(self._table)
