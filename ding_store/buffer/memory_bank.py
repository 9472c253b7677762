"""A memory bank: large elements of varying size by row number, of which the oldest leave first."""

from __future__ import annotations

import operator
from typing import Any, Iterator, List, Optional, Sequence

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.elements.object_elements import array_bytes
from ding_store.buffer.store_buffer import StoreBuffer
from ding_store.buffer.table.row_choices import by_rows
from ding_store.buffer.table_reader import TableReader
from ding_store.columns import Schema
from ding_store.errors import ConfigError, NotEnoughSpace, RowGone
from ding_store.free_space import format_bytes


class MemoryBank:
    """
    Overview:
        Elements such as ``{'key': key, 'value': value}``, by row number. Row numbers grow and are never used again: a
        number from earlier never leads to another element. The first dimension of each array may differ between
        elements. All else must be equal: keys, dtypes and the other dimensions.

        ``bank[row]`` returns one element, and ``del bank[row]`` deletes it. ``len``, ``in`` and iteration over the row
        numbers work as well. Threads may share a bank.
    Arguments:
        - size (:obj:`int`): The maximum number of elements. The oldest leave when there are more.
        - max_bytes (:obj:`Optional[int]`): The maximum total size of their arrays, each element rounded up to 64 bytes.
          The oldest leave when there are more. New elements need room beside them for a moment. None: there is no
          such limit.
        - path (:obj:`Optional[str]`): Directory for the bank's files. A later process that opens it continues with its
          elements, even after a kill. None keeps the elements in memory.
        - fsync (:obj:`bool`): Make the files survive power cuts.
    Raises:
        - ConfigError: ``size`` or ``max_bytes`` is not a positive integer, or ``size`` differs from that in ``path``.
        - TableLocked: Another process has ``path`` open. It may be read with ``MemoryBank.open``.
        - FormatMismatch, CorruptPayload: Another version wrote ``path``, or its files are damaged.
    """

    def __init__(
        self, size: int, max_bytes: Optional[int] = None, path: Optional[str] = None, fsync: bool = False
    ) -> None:
        self.max_bytes = None if max_bytes is None else integer('max_bytes', max_bytes, 1)
        #: The buffer that holds the elements, for samples with a sampler, saves and views.
        self.buffer = StoreBuffer(size, path=path, fsync=fsync, share_frames=False, ragged='all')
        self._elements = self.buffer._elements
        self._drop_excess()

    @staticmethod
    def open(path: str, mode: str = 'r') -> TableReader:
        """
        Overview:
            Read a bank that another process of this host may have open. The files are mapped, so all readers share one
            copy in memory. Each read copies its rows.
        Arguments:
            - mode (:obj:`str`): Only ``'r'``. To change a bank, create a ``MemoryBank`` with this path.
        Raises:
            - ConfigError: There is no bank, or another mode is given.
        """
        if mode != 'r':
            raise ConfigError(f"mode ({mode!r}) must be 'r'. To change a bank, create MemoryBank(size, path={path!r}).")
        return TableReader(path)

    @property
    def schema(self) -> Optional[Schema]:
        """The leaves of an element. None before the first element."""
        return self.buffer.schema

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements."""
        return self.buffer.num_bytes or 0

    def append(self, element: Any) -> int:
        """
        Overview:
            Add one element. Return its row number.
        Raises:
            - SchemaMismatch: The element differs from those before it in more than lengths. Nothing changed.
            - NotEnoughSpace: The disk is full, or the element is larger than ``max_bytes``. Nothing changed.
        """
        if self.max_bytes is None:
            return self._elements.add(element)
        self._check_size([element])
        with self.buffer.table.write_lock:
            row = self._elements.add(element)
            self._drop_excess()
        return row

    def extend(self, elements: Sequence[Any]) -> Array:
        """Add elements together, see ``append``. Return their row numbers ``(n,)``, int64."""
        self._check_size(elements)
        with self.buffer.table.write_lock:
            rows = self.buffer.extend_elements(elements)
            self._drop_excess()
        return rows

    def __getitem__(self, row: int) -> Any:
        """Return a copy of an element. Raises RowGone if it is not in the bank."""
        return self.gather([row])[0]

    def gather(self, rows: Any) -> List[Any]:
        """
        Overview:
            Return copies of elements, in this order. Their arrays are views of memory that one copy filled.
        Arguments:
            - rows (:obj:`Any`): Row numbers ``(n,)``.
        Raises:
            - RowGone: An element has left, was deleted, or never existed.
            - CorruptPayload: An element was damaged. The message names its row.
        """
        return self._elements.read_elements(by_rows(np.asarray(rows)))

    def gather_batch(self, rows: Any) -> Batch:
        """Return one collated batch of elements, padded to the longest. Raises the same errors as ``gather``."""
        return self.buffer.gather_batch(np.asarray(rows))

    def update(self, row: int, element: Any) -> None:
        """
        Overview:
            Replace an element, which may have other lengths. It keeps its row number and its age. The next ``append``
            checks ``max_bytes``.
        Raises:
            - RowGone: The element is not in the bank.
            - SchemaMismatch, NotEnoughSpace: See ``append``. Nothing changed.
        """
        if not self._elements.update(operator.index(row), element, None):
            raise _gone(row)

    def __delitem__(self, row: int) -> None:
        """Delete an element. Raises RowGone if it is not in the bank."""
        with self.buffer.table.write_lock:
            if row not in self:
                raise _gone(row)
            self._elements.delete(np.array([row], np.int64))

    def rows(self) -> Array:
        """Return the row numbers of all elements, oldest first, int64."""
        return self.buffer.table.rows_by_age()

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows().tolist())

    def __len__(self) -> int:
        return self.buffer.count()

    def __contains__(self, row: object) -> bool:
        return bool(self.buffer.table.contains(np.array([operator.index(row)], np.int64))[0])  # type: ignore[arg-type]

    def clear(self) -> None:
        """Delete all elements. The next element may have another schema. Row numbers continue to grow."""
        self.buffer.clear()

    def check(self) -> List[str]:
        """Return one sentence per defect in memory and files. The list is empty if nothing is damaged."""
        return self.buffer.check()

    def close(self) -> None:
        """Release memory and files. Files in ``path`` stay for another process."""
        self.buffer.close()

    def _check_size(self, elements: Sequence[Any]) -> None:
        """Raise NotEnoughSpace if elements are larger than ``max_bytes`` together."""
        if self.max_bytes is None:
            return
        num_bytes = sum(map(array_bytes, elements))
        if num_bytes > self.max_bytes:
            raise NotEnoughSpace(
                f'{len(elements)} new elements have {format_bytes(num_bytes)}, but max_bytes allows '
                f'{format_bytes(self.max_bytes)}. Use a larger max_bytes, or add fewer at once.'
            )

    def _drop_excess(self) -> None:
        """Delete the oldest elements, if all together exceed ``max_bytes``."""
        leaving = self._elements.store.rows_beyond(self.max_bytes)
        if len(leaving):
            self._elements.delete(leaving)


def _gone(row: Any) -> RowGone:
    return RowGone(f'row {row} is not in the bank: it was evicted or deleted, or never existed')
