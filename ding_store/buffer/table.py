"""Rows in memory-mapped columns. Knows names, dtypes and shapes of columns, and nothing of trees or of sampling."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple, TypeVar, Union

import numpy as np

from ding_store.buffer.arrays import Array
from ding_store.buffer.choices import as_rows, by_rows
from ding_store.buffer.regions import ColumnSpec, Regions
from ding_store.buffer.rows import RowIndex
from ding_store.errors import ConfigError, SchemaMismatch

Columns = Mapping[str, Array]
T = TypeVar('T')

#: A read that raced with a writer is redone so often before it makes the writers wait.
_OPTIMISTIC_READS = 3


class Table:
    """
    Overview:
        A struct of arrays ``[capacity, *shape]`` that holds the newest rows. Any number of threads may read and write:
        writers take turns, readers never wait for them (a row's number is looked at before and after it is copied, and
        a copy that raced is redone).
    Arguments:
        - columns (:obj:`Mapping`): Name -> (dtype, shape of one element). May be empty, for rows kept elsewhere.
        - capacity (:obj:`int`): The number of rows; the oldest leave when there are more.
        - path (:obj:`Optional[str]`): Directory for the columns' files; None for a private table.
    Raises:
        - ConfigError: ``capacity`` is no positive integer, a dtype is not of fixed size, or ``path`` holds a table.
    """

    def __init__(self, columns: Mapping[str, ColumnSpec], capacity: int, path: Optional[str] = None) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise ConfigError(f'capacity ({capacity!r}) must be an integer >= 1')
        self.capacity = int(capacity)
        self.index = RowIndex(self.capacity)
        self._regions = Regions(self.capacity, path)
        self.write_lock = threading.RLock()
        self._num_updates = 0
        self._num_used = 0  # Slots from this one on were never written.
        self._regions.add(_checked_specs(columns))

    @property
    def specs(self) -> Dict[str, ColumnSpec]:
        """Name -> (dtype, shape of one element)."""
        return {name: (column.dtype, column.shape[1:]) for name, column in self.columns.items()}

    def __len__(self) -> int:
        return self.index.count

    @property
    def columns(self) -> Dict[str, Array]:
        """The columns themselves, by slot; for readers within ``read``."""
        return self._regions.columns

    @property
    def row_bytes(self) -> int:
        """Payload bytes of one row."""
        return self._regions.row_bytes

    @property
    def next_row(self) -> int:
        """The row number that the next row will have."""
        return self.index.next_row

    def extend(self, columns: Columns) -> Array:
        """
        Overview:
            Add rows: a copy per column. Of more rows than the capacity only the last are kept.
        Arguments:
            - columns (:obj:`Mapping`): Name -> array ``(n, *shape)`` for exactly the columns of the table.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers ``(n,)``, int64.
        Raises:
            - SchemaMismatch: A column is missing, unknown, or of another dtype, shape or length; nothing was added.
            - NotEnoughSpace: The disk is full; nothing was added.
        """
        num_rows = self._check(columns)
        skipped = max(0, num_rows - self.capacity)
        with self.writing(num_rows - skipped, skipped) as (slots, rows):
            self._store(slots, columns, skipped)
        return np.arange(rows[-1] + 1 - num_rows, rows[-1] + 1) if skipped else rows

    @contextmanager
    def writing(self, num_rows: int, skipped: int = 0) -> Iterator[Tuple[Array, Array]]:
        """
        Overview:
            Write new rows in place: yields their slots, which the caller fills, and their row numbers. They become
            visible on leaving. A SchemaMismatch says that nothing was written: the table is as it was. After any other
            exception the rows never become visible, but those that made room for them are gone.
        """
        with self.write_lock:
            with self.index.lock:
                first = self.index.next_row + skipped
                used = max(self._num_used, min(self.capacity, self.index.count + num_rows))
                self._regions.reserve(used)
                self._num_used = used
                slots, evicted = self.index.allocate(num_rows)
            try:
                yield slots, np.arange(first, first + num_rows, dtype=np.int64)
            except SchemaMismatch:
                with self.index.lock:
                    self.index.restore(slots, evicted)
                raise
            with self.index.lock:
                self.index.publish(slots, skipped)

    def gather(self, rows: Array, out: Optional[Mapping[str, Array]] = None) -> Dict[str, Array]:
        """
        Overview:
            Read rows by row number, in the order asked; one gather per column, O(len(rows)).
        Arguments:
            - rows (:obj:`np.ndarray`): Row numbers ``(B,)``.
            - out (:obj:`Optional[Mapping]`): Arrays ``(B, *shape)`` to fill; fresh ones by default.
        Raises:
            - RowGone: A row left the table, or never existed; names the first.
        """
        return self.read(by_rows(rows), lambda slots: self.take(slots, out))[1]

    def read(self, choose: Callable[[RowIndex], Array], copy: Callable[[Array], T]) -> Tuple[Array, T]:
        """
        Overview:
            Copy rows that no writer touched meanwhile.
        Arguments:
            - choose (:obj:`Callable`): RowIndex -> slots of live rows; called with the index locked, and again after
              a race.
            - copy (:obj:`Callable`): Slots -> what was copied from them; called without any lock.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers of the slots.
            - copied: What the last ``copy`` returned.
        """
        for _ in range(_OPTIMISTIC_READS):
            with self.index.lock:
                slots = choose(self.index)
                rows, num_updates = self.index.row_of_slot[slots], self._num_updates
            copied = copy(slots)
            # The row number guards against a new row in the slot, the count against new data in the row. Both are
            # changed before the first byte is, and whoever reads them here has the interpreter's lock.
            if num_updates == self._num_updates and (self.index.row_of_slot[slots] == rows).all():
                return rows, copied
        with self.write_lock:
            with self.index.lock:
                slots = choose(self.index)
            return self.index.row_of_slot[slots], copy(slots)

    def take(self, slots: Array, out: Optional[Mapping[str, Array]] = None) -> Dict[str, Array]:
        """Copy slots of all columns, whatever they hold: only right as the ``copy`` of a ``read``."""
        columns = self.columns
        if out is None:
            return {name: column.take(slots, 0, None, 'clip') for name, column in columns.items()}
        # Without mode='clip' numpy fills a buffer of its own first: 2-5 times slower.
        return {name: columns[name].take(slots, 0, array, 'clip') for name, array in out.items()}

    def update(self, rows: Array, columns: Columns) -> Array:
        """
        Overview:
            Overwrite rows, in all columns or in some. Rows that are gone are passed over.
        Arguments:
            - columns (:obj:`Mapping`): Name -> array ``(len(rows), *shape)``.
        Returns:
            - found (:obj:`np.ndarray`): Which rows were there, bool.
        """
        wanted = as_rows(rows)
        self._check(columns, len(wanted), partial=True)
        # The lock of the index is held, too, so that no reader begins in the middle of it.
        with self.write_lock, self.index.lock:
            self._num_updates += 1
            slots, found = self.index.find(wanted)
            for name, values in columns.items():
                self.columns[name][slots[found]] = values[found]
        return found

    def delete(self, rows: Array) -> Array:
        """
        Overview:
            Take rows out; O(len(rows)). Rows that are gone already are passed over.
        Returns:
            - slots (:obj:`np.ndarray`): The slots that became free.
        """
        with self.write_lock, self.index.lock:
            slots, found = self.index.find(np.unique(as_rows(rows)))
            freed = slots[found]
            self.index.remove(freed)
        return freed

    def clear(self) -> None:
        """Take all rows out. Row numbers are not used again."""
        with self.write_lock, self.index.lock:
            self.index.clear()

    def contains(self, rows: Array) -> Array:
        """Which rows are in the table, bool."""
        with self.index.lock:
            return self.index.find(as_rows(rows))[1]

    def rows_by_age(self) -> Array:
        """Row numbers of all live rows, oldest first."""
        with self.index.lock:
            return self.index.row_of_slot[self.index.slots_by_age()]

    def add_columns(self, columns: Mapping[str, ColumnSpec], fill: Optional[Mapping[str, Any]] = None) -> None:
        """
        Overview:
            Widen the schema. Rows that are there get ``fill[name]``, or zeros.
        Raises:
            - ConfigError: The table has a column of this name.
        """
        specs = _checked_specs(columns)
        with self.write_lock:
            doubled = sorted(set(specs) & set(self.columns))
            if doubled:
                raise ConfigError(f'the table has the columns {doubled} already')
            self._regions.add(specs)
            for name, value in (fill or {}).items():
                self.columns[name][: self._num_used] = value

    def replace_columns(self, columns: Mapping[str, ColumnSpec]) -> None:
        """Take all rows out, and have these columns from now on instead. Row numbers go on growing."""
        specs = _checked_specs(columns)
        with self.write_lock:
            self.clear()
            self._regions.clear()
            self._num_used = 0
            self._regions.add(specs)

    def close(self) -> None:
        """Release the files; the table is empty after it."""
        with self.write_lock:
            self.clear()
            self._regions.close()

    def _store(self, slots: Array, columns: Columns, skipped: int) -> None:
        target = _as_slice(slots)
        for name, column in self.columns.items():
            column[target] = columns[name][skipped:]

    def _check(self, columns: Columns, num_rows: Optional[int] = None, partial: bool = False) -> int:
        """Compare arrays with the schema before anything is written; returns their length."""
        unknown, missing = set(columns) - set(self.columns), set(self.columns) - set(columns)
        if unknown or (missing and not partial):
            raise SchemaMismatch(f'columns differ from the table: unknown {sorted(unknown)}, missing {sorted(missing)}')
        for name, values in columns.items():
            column = self.columns[name]
            num_rows = len(values) if num_rows is None and values.ndim else num_rows
            if values.dtype != column.dtype or values.shape != (num_rows, *column.shape[1:]):
                raise SchemaMismatch(
                    f'{name}: expected {column.dtype} of shape ({num_rows}, *{column.shape[1:]}), '
                    f'got {values.dtype} of shape {values.shape}'
                )
        return num_rows or 0


def is_run(slots: Array) -> bool:
    """Whether slots are consecutive and in order: they grow, and by as much as their number says."""
    num_slots = len(slots)
    if num_slots <= 1:
        return num_slots == 1
    return bool(slots[-1] - slots[0] == num_slots - 1 and (slots[1:] > slots[:-1]).all())


def _as_slice(slots: Array) -> Union[slice, Array]:
    """Consecutive slots as a slice, which is one copy instead of one per row."""
    return slice(int(slots[0]), int(slots[0]) + len(slots)) if is_run(slots) else slots


def _checked_specs(columns: Mapping[str, ColumnSpec]) -> Dict[str, ColumnSpec]:
    specs: Dict[str, ColumnSpec] = {}
    for name, (dtype, shape) in columns.items():
        dtype = np.dtype(dtype)
        if dtype.hasobject or dtype.itemsize == 0:
            raise ConfigError(f'column {name!r} has dtype {dtype}, which is not of a fixed size')
        specs[name] = (dtype, tuple(int(size) for size in shape))
    return specs
