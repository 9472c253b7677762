"""Rows in memory-mapped columns. Knows names, dtypes and shapes of columns, and nothing of trees or of sampling."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, Optional, Tuple, TypeVar, Union

import numpy as np

from ding_store.buffer import redo
from ding_store.buffer.arrays import Array
from ding_store.buffer.choices import as_rows, by_rows
from ding_store.buffer.commits import encode_note
from ding_store.buffer.durable import ENCODING, Home, StoredColumn
from ding_store.buffer.narrowing import gather, narrow, stored_specs, take_into, widen
from ding_store.buffer.regions import ColumnSpec, Regions
from ding_store.buffer.rows import EMPTY, RowIndex
from ding_store.errors import ConfigError, SchemaMismatch

logger = logging.getLogger(__name__)

Columns = Mapping[str, Array]
#: Slots and row numbers of rows that are about to be live.
Keep = Callable[[Array, Array], None]
T = TypeVar('T')

#: A read that raced with a writer is redone so often before it makes the writers wait.
_OPTIMISTIC_READS = 3
#: So little is copied with the index locked, some 20 us, which costs writers less than it does to look twice.
_QUICK_BYTES = 1 << 18


class Table:
    """
    Overview:
        A struct of arrays ``[capacity, *shape]`` that holds the newest rows. Any number of threads may read and write:
        writers take turns, readers never wait for them (a row's number is looked at before and after it is copied, and
        a copy that raced is redone).
    Arguments:
        - columns (:obj:`Mapping`): Name -> (dtype, shape of one element). May be empty, for rows kept elsewhere.
        - capacity (:obj:`int`): The number of rows; the oldest leave when there are more.
        - path (:obj:`Optional[str]`): Directory of a table that survives its process, see ``durable``; a table that is
          there already is gone on with. None for a private one.
        - fsync (:obj:`bool`): Whether it survives power cuts as well, at the price of some fsyncs per push.
    Raises:
        - ConfigError: ``capacity`` is no positive integer, or not that of the table in ``path``; or a dtype is not of
          fixed size.
        - SchemaMismatch: The table in ``path`` has other columns than those given, if any are.
        - TableLocked, FormatMismatch, CorruptPayload: As ``durable.Home``. Nothing was changed.
    """

    def __init__(
        self, columns: Mapping[str, ColumnSpec], capacity: int, path: Optional[str] = None, fsync: bool = False
    ) -> None:
        specs = _checked_specs(columns)
        self.write_lock = threading.RLock()
        self._num_updates = 0
        #: Name -> how many updates changed the values of this column; of those columns that somebody put here.
        self.num_changes: Dict[str, int] = {}
        self._num_used = 0  # Slots from this one on were never written.
        self._narrow: FrozenSet[str] = frozenset()
        self._specs: Optional[Tuple[Dict[str, Array], FrozenSet[str], Dict[str, ColumnSpec]]] = None
        self._watchers: List[List[Array]] = []
        self._note: Optional[Dict[str, Any]] = None
        self.home = None if path is None else Home(path, checked_capacity(capacity), fsync)
        try:
            self._open(specs, checked_capacity(capacity))
        except BaseException:
            if self.home is not None:
                self.home.close()
            raise

    def _open(self, specs: Dict[str, ColumnSpec], capacity: int) -> None:
        home = self.home
        if home is None:
            self.index = RowIndex(capacity)
        else:
            self.index = RowIndex(capacity, home.numbers, home.next_row)
            self._num_used = int(self.index.live_slots.max(initial=-1)) + 1
            self._note = home.note
        self._regions = Regions(capacity, home)
        if home is None or not home.header.columns:
            self._regions.add(specs)
            self._describe(self.info)
            return
        self._narrow = frozenset(column.name for column in home.header.columns if column.encoding)
        self._regions.open(home.header.columns)
        if specs and specs != self.specs:
            raise SchemaMismatch(f'{home.path!r} holds a table of the columns {self.specs}, not {specs}')
        self._redo(home)

    @property
    def capacity(self) -> int:
        """The number of rows that it can hold."""
        return self.index.capacity

    @property
    def info(self) -> Any:
        """What its owner said about the columns, as JSON; of a private table None."""
        return None if self.home is None else self.home.header.info

    @property
    def committed(self) -> Optional[Dict[str, Any]]:
        """The last note that was committed."""
        return self._note

    @property
    def specs(self) -> Dict[str, ColumnSpec]:
        """Name -> (dtype, shape of one element); not to be changed."""
        columns, narrow = self.columns, self._narrow
        if self._specs is None or self._specs[0] is not columns or self._specs[1] is not narrow:
            specs = {name: (self._dtype_of(name, column), column.shape[1:]) for name, column in columns.items()}
            self._specs = columns, narrow, specs
        return self._specs[2]

    @property
    def narrow(self) -> FrozenSet[str]:
        """Names of columns of float32 that are kept as bytes: see ``narrowing``."""
        return self._narrow

    @property
    def num_updates(self) -> int:
        """Grows before data of rows that are there change, or move: what was read of them before may be outdated."""
        return self._num_updates

    def __len__(self) -> int:
        return self.index.count

    @property
    def columns(self) -> Dict[str, Array]:
        """The columns themselves as they are kept, by slot; for readers within ``read``."""
        return self._regions.columns

    @property
    def row_bytes(self) -> int:
        """Payload bytes of one row."""
        return self._regions.row_bytes

    @property
    def next_row(self) -> int:
        """The row number that the next row will have."""
        return self.index.next_row

    def extend(self, columns: Columns, note: Optional[Mapping[str, Any]] = None, keep: Optional[Keep] = None) -> Array:
        """
        Overview:
            Add rows: a copy per column. Of more rows than the capacity only the last are kept.
        Arguments:
            - columns (:obj:`Mapping`): Name -> array ``(n, *shape)`` for exactly the columns of the table.
            - note (:obj:`Optional[Mapping]`): What ``committed`` is from the moment on when these rows are live.
            - keep (:obj:`Optional[Keep]`): Called before that, to put on record what is to be known of them then.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers ``(n,)``, int64.
        Raises:
            - SchemaMismatch: A column is missing, unknown, or of another dtype, shape or length; nothing was added.
            - NotEnoughSpace: The disk is full; nothing was added.
        """
        num_rows = self._check(columns)
        skipped = max(0, num_rows - self.capacity)
        with self.write_lock:
            columns = self.as_stored(columns)
            with self.writing(num_rows - skipped, skipped, note) as (slots, rows):
                self._store(slots, columns, skipped)
                if keep is not None:
                    keep(slots, rows)
        return np.arange(rows[-1] + 1 - num_rows, rows[-1] + 1) if skipped else rows

    @contextmanager
    def writing(
        self, num_rows: int, skipped: int = 0, note: Optional[Mapping[str, Any]] = None
    ) -> Iterator[Tuple[Array, Array]]:
        """
        Overview:
            Write new rows in place: yields their slots, which the caller fills, and their row numbers. They become
            visible on leaving. A SchemaMismatch says that nothing was written: the table is as it was. After any other
            exception the rows never become visible, but those that made room for them are gone.
        """
        encoded = None if note is None else encode_note(note)
        with self.write_lock:
            slots, evicted = self._allocate(num_rows, skipped)
            first = self.index.next_row + skipped
            try:
                yield slots, np.arange(first, first + num_rows, dtype=np.int64)
            except SchemaMismatch:
                with self.index.lock:
                    self.index.restore(slots, evicted)
                raise
            except BaseException:
                # Their numbers may be on record already, with a meta.
                self.index.next_row += skipped + num_rows
                raise
            self._publish(slots, skipped, note, encoded)

    def add_one(self, write: Callable[[int], None]) -> Tuple[Array, int]:
        """
        Overview:
            As ``writing`` of one row without a note, for a ``write`` that fills its slot and cannot fail.
        Returns:
            - slots (:obj:`np.ndarray`): Its slot, ``(1,)``.
            - row (:obj:`int`): Its row number.
        """
        with self.write_lock:
            slots, _ = self._allocate(1, 0)
            row = self.index.next_row
            write(int(slots[0]))
            self._publish(slots, 0)
        return slots, row

    def commit(self, note: Mapping[str, Any]) -> None:
        """
        Overview:
            Set ``committed`` without new rows.
        Raises:
            - ConfigError: JSON cannot hold it.
        """
        encoded = encode_note(note)
        with self.write_lock:
            self._commit(note, encoded)

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
                slots, numbers = choose(self.index), self.index.row_of_slot
                rows, num_updates = numbers[slots], self._num_updates
                if len(slots) * self._regions.row_bytes <= _QUICK_BYTES:
                    # Whoever changes a row that lives, or takes it away, has this lock.
                    return rows, copy(slots)
            copied = copy(slots)
            # The row number guards against a new row in the slot, the count against new data in the row, and against
            # other columns or slots. Both are changed before the first byte is, and whoever reads them here has the
            # interpreter's lock.
            if (numbers[slots] == rows).all() and num_updates == self._num_updates:
                return rows, copied
        with self.write_lock:
            with self.index.lock:
                slots = choose(self.index)
            return self.index.row_of_slot[slots], copy(slots)

    def take(self, slots: Array, out: Optional[Mapping[str, Array]] = None) -> Dict[str, Array]:
        """Copy slots of all columns, whatever they hold: only right as the ``copy`` of a ``read``."""
        columns = self.columns
        if out is None:
            fresh = {}
            for name, column in columns.items():
                is_narrow = self._dtype_of(name, column) != column.dtype
                fresh[name] = gather(column, slots, None) if is_narrow else column.take(slots, 0, None, 'clip')
            return fresh
        for name, array in out.items():
            take_into(columns[name], slots, array)
        return dict(out)

    def as_stored(self, columns: Columns) -> Columns:
        """
        Overview:
            These columns as they are kept. What was kept as bytes and cannot be any longer is widened first, and stays
            so. The caller has the lock of the writers.
        Raises:
            - NotEnoughSpace: There is no room for what is widened; nothing changed.
        """
        if not self._narrow:
            return columns
        stored = dict(columns)
        for name in self._narrow & columns.keys():
            narrowed = narrow(columns[name])
            if narrowed is None:
                self._widen(name)
            else:
                stored[name] = narrowed
        return stored

    def store(self, slots: Array, columns: Columns) -> None:
        """Fill slots of ``writing`` with what ``as_stored`` gave."""
        self._store(slots, columns, 0)

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
            for changed in self._watchers:
                changed.append(wanted)
            slots, found = self.index.find(wanted)
            held = self.as_stored({name: values[found] for name, values in columns.items()})
            with self._repeatable(wanted[found], held):
                for name, values in held.items():
                    if name in self.num_changes and (self.columns[name][slots[found]] != values).any():
                        self.num_changes[name] += 1
                    self.columns[name][slots[found]] = values
        return found

    @contextmanager
    def watching(self) -> Iterator[List[Array]]:
        """A list to which the row numbers of every ``update`` are added, before the first byte is changed."""
        changed: List[Array] = []
        with self.write_lock:
            self._watchers.append(changed)
        try:
            yield changed
        finally:
            with self.write_lock:
                self._watchers = [each for each in self._watchers if each is not changed]

    def relabel(self, rows: Array, next_row: int) -> None:
        """Give all rows other numbers, which must grow with their age; for contents that come from a file."""
        with self.write_lock, self.index.lock:
            self._check_open()
            self.index.next_row = max(next_row, self.index.next_row)
            # First: a row counts only if its number is below what is on record.
            self._commit(None, None)
            if self.home is not None:
                self.home.forget_values()
            self.index.relabel(rows, next_row)
            self._sync_numbers()

    def delete(self, rows: Array) -> Array:
        """
        Overview:
            Take rows out; O(len(rows)). Rows that are gone already are passed over.
        Returns:
            - slots (:obj:`np.ndarray`): The slots that became free.
        """
        with self.write_lock, self.index.lock:
            self._check_open()
            slots, found = self.index.find(np.unique(as_rows(rows)))
            freed = slots[found]
            self.index.remove(freed)
            self._sync_numbers()
        return freed

    def clear(self) -> None:
        """Take all rows out. Row numbers are not used again."""
        with self.write_lock, self.index.lock:
            self._check_open()
            self.index.clear()
            self._sync_numbers()

    def contains(self, rows: Array) -> Array:
        """Which rows are in the table, bool."""
        with self.index.lock:
            return self.index.find(as_rows(rows))[1]

    def rows_by_age(self) -> Array:
        """Row numbers of all live rows, oldest first."""
        with self.index.lock:
            return self.index.row_of_slot[self.index.slots_by_age()]

    def add_columns(
        self, columns: Mapping[str, ColumnSpec], fill: Optional[Mapping[str, Any]] = None, info: Any = None
    ) -> None:
        """
        Overview:
            Widen the schema. Rows that are there get ``fill[name]``, or zeros.
        Raises:
            - ConfigError: The table has a column of this name.
        """
        specs = _checked_specs(columns)
        with self.write_lock:
            self._check_open()
            doubled = sorted(set(specs) & set(self.columns))
            if doubled:
                raise ConfigError(f'the table has the columns {doubled} already')
            self._regions.add(specs)
            for name, value in (fill or {}).items():
                self.columns[name][: self._num_used] = value
            self._describe(info)

    def replace_columns(
        self, columns: Mapping[str, ColumnSpec], info: Any = None, narrow_columns: Iterable[str] = ()
    ) -> None:
        """
        Overview:
            Take all rows out, and have these columns from now on instead, some of them kept as bytes for as long as
            that is exact. Row numbers go on growing.
        """
        specs = _checked_specs(columns)
        with self.write_lock:
            self.clear()
            self._num_updates += 1
            self._regions.clear()
            self._narrow = frozenset()
            self._describe(None)
            self._num_used = 0
            self._regions.add(stored_specs(specs, narrow_columns))
            self._narrow = frozenset(narrow_columns)
            self._describe(info)

    def resize(self, capacity: int) -> Tuple[Array, Array]:
        """
        Overview:
            Have another capacity from now on: where there are more rows than that, the oldest leave. O(capacity), and
            a copy of the table where it is in memory. Files keep their length, but not the space of what is no longer
            used.
        Returns:
            - source (:obj:`np.ndarray`): Slots whose rows had to move.
            - target (:obj:`np.ndarray`): Where they live now.
        Raises:
            - ConfigError: ``capacity`` is no positive integer.
        """
        capacity = checked_capacity(capacity)
        with self.write_lock, self.index.lock:
            self._check_open()
            # Readers that are copying do it again; others wait for the lock of the index.
            self._num_updates += 1
            self.index.remove(self.index.oldest(max(0, self.index.count - capacity)))
            source, target = self.index.relocations(capacity)
            self._regions.move(source, target)
            self._sync_columns()
            self.index.relocate(source, target)
            self._sync_numbers()
            self._num_used = min(self._num_used, capacity)
            self._regions.resize(capacity, self._num_used)
            self.index.resize(self._resized_numbers(capacity, source, target), source, target)
        return source, target

    def check(self) -> List[str]:
        """
        Overview:
            What is wrong with it: for tests and post-mortems; nothing, unless memory or files were damaged.
        Returns:
            - findings (:obj:`List[str]`): One sentence each.
        """
        with self.write_lock, self.index.lock:
            found = self.index.findings()
            if self.index.count and int(self.index.live_slots.max()) >= self._num_used:
                found.append(f'a row lives in a slot beyond {self._num_used}, the last that was written')
            if any(len(column) != self.capacity for column in self.columns.values()):
                found.append(f'a column has not {self.capacity} slots')
            if self.home is not None:
                found += self.home.findings(self.index.next_row, self.index.row_of_slot, self._stored_columns())
        return found

    def close(self) -> None:
        """Release the files; the table is empty after it, but what is in ``path`` stays there."""
        with self.write_lock, self.index.lock:
            if self.home is None:
                self.index.clear()
            else:
                self._sync_columns()
                self.home.close()
                self._num_updates += 1
                # Not in place: that would be a delete of all rows, on the disk, too.
                self.index.forget()
            self._regions.close()

    def _allocate(self, num_rows: int, skipped: int) -> Tuple[Array, Array]:
        self._check_open()
        with self.index.lock:
            used = max(self._num_used, min(self.capacity, self.index.count + num_rows))
            self._regions.reserve(used)
            self._num_used = used
            slots, evicted = self.index.allocate(num_rows)
        if len(evicted):
            # Before the first byte of those who replace them.
            self._sync_numbers()
        return slots, evicted

    def _publish(
        self, slots: Array, skipped: int, note: Optional[Mapping[str, Any]] = None, encoded: Optional[bytes] = None
    ) -> None:
        """What was written to these slots is there from now on: see ``durable`` for the order."""
        self._sync_columns()
        with self.index.lock:
            self.index.publish(slots, skipped)
        self._sync_numbers()
        self._commit(note, encoded)

    def _commit(self, note: Optional[Mapping[str, Any]], encoded: Optional[bytes]) -> None:
        if self.home is not None:
            self.home.check_open()
            self.home.commit(self.index.next_row, encoded)
        if note is not None:
            self._note = dict(note)

    @contextmanager
    def _repeatable(self, rows: Array, columns: Columns) -> Iterator[None]:
        """Around overwriting rows in place: when it is killed in the middle, the next process does it again."""
        if self.home is None or not len(rows):
            yield
            return
        self.home.check_open()
        record = [redo.encode(rows, columns)]
        self.home.redo.reserve(record)
        self.home.redo.append(record)
        self.home.redo.sync()
        yield
        self._sync_columns()
        self.home.redo.clear()

    def _redo(self, home: Home) -> None:
        for record in home.redo.read():
            rows, columns = redo.decode(record)
            slots, found = self.index.find(rows)
            for name, values in columns.items():
                self.columns[name][slots[found]] = values[found]
        self._sync_columns()
        home.redo.clear()

    def _describe(self, info: Any) -> None:
        if self.home is not None:
            self.home.describe(self._stored_columns(), info)

    def _stored_columns(self) -> List[StoredColumn]:
        columns = self._regions.stored()
        for column in columns:
            column.encoding = ENCODING if column.name in self._narrow else None
        return columns

    def _widen(self, name: str) -> None:
        logger.warning(
            'column %r was kept in a quarter of its memory, as all its values were k/255; a new row has others: from '
            'now on it is kept as float32. Nothing is lost.',
            name,
        )
        self._num_updates += 1
        spec = np.dtype(np.float32), self.columns[name].shape[1:]
        self._regions.replace(name, spec, widen, self._num_used)
        self._narrow -= {name}
        self._describe(self.info)

    def _dtype_of(self, name: str, column: Array) -> np.dtype[Any]:
        """What a column's values are to everybody else."""
        # By what it is, and not by what it is called now: a reader may have the column of a moment ago.
        return np.dtype(np.float32) if name in self._narrow and column.dtype == np.uint8 else column.dtype

    def _resized_numbers(self, capacity: int, source: Array, target: Array) -> Array:
        if self.home is not None:
            return self.home.resize(capacity, source, target)
        numbers = np.full(capacity, EMPTY, np.int64)
        kept = min(capacity, self.capacity)
        numbers[:kept] = self.index.row_of_slot[:kept]
        # Whoever is copying slots and looks at the old numbers after that has to see that they are others now.
        self.index.row_of_slot[:] = EMPTY
        return numbers

    def _check_open(self) -> None:
        if self.home is not None:
            self.home.check_open()

    def _sync_numbers(self) -> None:
        if self.home is not None:
            self.home.sync_numbers()

    def _sync_columns(self) -> None:
        if self.home is not None and self.home.fsync:
            self._regions.sync()
            self.home.metas.sync()
            self.home.sync_kept()

    def _store(self, slots: Array, columns: Columns, skipped: int) -> None:
        target = _as_slice(slots)
        for name, column in self.columns.items():
            column[target] = columns[name][skipped:]

    def _check(self, columns: Columns, num_rows: Optional[int] = None, partial: bool = False) -> int:
        """Compare arrays with the schema before anything is written; returns their length."""
        specs = self.specs
        if columns.keys() != specs.keys():
            unknown, missing = set(columns) - set(specs), set(specs) - set(columns)
            if unknown or (missing and not partial):
                raise SchemaMismatch(
                    f'columns differ from the table: unknown {sorted(unknown)}, missing {sorted(missing)}'
                )
        for name, values in columns.items():
            dtype, shape = specs[name]
            num_rows = len(values) if num_rows is None and values.ndim else num_rows
            if values.dtype != dtype or values.shape != (num_rows, *shape):
                raise SchemaMismatch(
                    f'{name}: expected {dtype} of shape ({num_rows}, *{shape}), '
                    f'got {values.dtype} of shape {values.shape}'
                )
        return num_rows or 0


def checked_capacity(capacity: Any) -> int:
    """
    Raises:
        - ConfigError: It is no positive integer.
    """
    if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or capacity < 1:
        raise ConfigError(f'capacity ({capacity!r}) must be an integer >= 1')
    return int(capacity)


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
