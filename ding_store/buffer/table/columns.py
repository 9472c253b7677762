"""The columns of a table. All reads and writes of their values go through this module."""

from __future__ import annotations

from dataclasses import replace
from typing import (
    Any,
    Callable,
    Collection,
    ContextManager,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.interrupts import finish
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.persistence.table_header import ENCODING, REFERENCE, StoredColumn
from ding_store.buffer.table.cold import ColdColumn
from ding_store.buffer.table.column_memory import ColumnMemory, Replacement
from ding_store.buffer.table.encodings import Column, NarrowColumn, SharedColumn, is_run
from ding_store.buffer.table.frame_pool import FramePool
from ding_store.buffer.table.frame_references import FrameReferences, narrowed_references, pool_references
from ding_store.buffer.table.frame_sharing import (
    JUDGED_ROWS,
    MIN_RATIO,
    Shared,
    opened_columns,
    pools_of,
    shared_columns,
)
from ding_store.buffer.table.narrowing import narrowed_columns, stored_specs, widened
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.specs import Columns, ColumnSpec
from ding_store.columns import Schema
from ding_store.compiled import MIN_BYTES, copy_past_caches
from ding_store.errors import CorruptPayload

#: With more runs of consecutive slots than this, one indexed copy is faster than a copy per run.
_MAX_RUNS = 4


class _Layout:
    """The columns at one time. Readers must not combine the arrays of one time with the names of another."""

    __slots__ = (
        'arrays',
        'columns',
        'memory',
        'narrow',
        'narrow_names',
        'num_frames',
        'pools',
        'row_bytes',
        'shared',
        'specs',
    )

    def __init__(self, memory: ColumnMemory, narrow_names: Collection[str], shared: Mapping[str, Shared]) -> None:
        self.memory, self.arrays, self.narrow_names, self.shared = memory, memory.columns, narrow_names, shared
        self.columns = {
            name: _column(array, name in narrow_names, shared.get(name)) for name, array in self.arrays.items()
        }
        self.specs: Dict[str, ColumnSpec] = {name: (each.dtype, each.shape) for name, each in self.columns.items()}
        self.narrow = frozenset(name for name, column in self.columns.items() if column.encoding)
        self.row_bytes = sum(column.row_bytes for column in self.columns.values())
        self.pools = pools_of(shared)
        #: The number of references that a row has to the frames of each pool.
        self.num_frames = [sum(each.num_frames for each in shared.values() if each.pool is pool) for pool in self.pools]

    def close(self) -> None:
        self.memory.close()
        for pool in self.pools:
            pool.close()


class TableColumns:
    """
    Overview:
        The columns of one table: their names and dtypes, and the values of each slot. Columns can be stored in another
        form, which only this class and ``encodings`` know. ``ColumnMemory`` holds the stored arrays. Readers need no
        lock, see ``Table.read``. Changes need the table's locks.
    Arguments:
        - capacity (:obj:`int`): The number of slots.
        - table_dir (:obj:`Optional[TableDirectory]`): Directory of the files, or None for private columns.
        - share_frames (:obj:`bool`): Whether new columns may share frames, see ``frame_sharing``.
    """

    def __init__(self, capacity: int, table_dir: Optional[TableDirectory] = None, share_frames: bool = False) -> None:
        self._table_dir, self.share_frames = table_dir, share_frames
        self._layout = _Layout(ColumnMemory(capacity, table_dir), (), {})
        #: False while rows are written whose frames are counted before they are live. If it stays False, the writer
        #: was interrupted, and ``recount`` must follow.
        self.are_frames_counted = True
        #: Sharing is judged when the next row has this number.
        self._next_judged = 0
        #: Slots from this one on were never written.
        self.num_used = 0
        #: True if the rows have packets in a private file.
        self.has_packets = False
        #: Name -> number of updates that changed this column's values, for columns that a caller registered here.
        self.num_changes: Dict[str, int] = {}

    @property
    def specs(self) -> Dict[str, ColumnSpec]:
        """Name -> (dtype, shape of one value). Do not modify it."""
        return self._layout.specs

    @property
    def current(self) -> Mapping[str, Column]:
        """The columns by name. There is a new object whenever a column is replaced."""
        return self._layout.columns

    @property
    def sources(self) -> Tuple[Mapping[str, Column], Mapping[str, ColdColumn]]:
        """``current``, and those columns that must be read from the disk at present, see ``DiskReads``."""
        layout = self._layout
        return layout.columns, layout.memory.disk_reads.cold(layout.arrays)

    @property
    def narrow(self) -> FrozenSet[str]:
        """Names of float32 columns that are stored as bytes, see ``narrowing``."""
        return self._layout.narrow

    @property
    def shared(self) -> Mapping[str, Shared]:
        """Columns that hold references to frames, by name."""
        return self._layout.shared

    @property
    def is_encoded(self) -> bool:
        """True if a column is not stored as it is."""
        return bool(self._layout.narrow or self._layout.shared)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, as if it shared no frames."""
        return self._layout.row_bytes

    def num_bytes(self, num_rows: int) -> int:
        """Return the bytes of so many rows, with each shared frame once."""
        layout = self._layout
        if not layout.shared:
            return num_rows * layout.row_bytes
        stored = sum(column.stored_bytes for column in layout.columns.values())
        return num_rows * stored + sum(pool.num_bytes for pool in layout.pools)

    @property
    def has_files(self) -> bool:
        """True if forked processes share the contents of the columns."""
        layout = self._layout
        return self.has_packets or layout.memory.has_files or any(pool.has_files for pool in layout.pools)

    @property
    def _memory(self) -> ColumnMemory:
        return self._layout.memory

    def __contains__(self, name: str) -> bool:
        return name in self._memory.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.columns)

    def __len__(self) -> int:
        return len(self._layout.columns)

    def get(self, name: str) -> Optional[Column]:
        """Return a column, or None if there is none of this name."""
        return self.current.get(name)

    def read(self, name: str, slots: Array) -> Array:
        """Return the values of one column in these slots. Raises KeyError if there is no such column."""
        return self.current[name].read(slots)

    def take(self, slots: Array, out: Optional[Mapping[str, Array]] = None) -> Dict[str, Array]:
        """Copy slots of all columns, whatever they hold. Valid only as the ``copy`` of ``Table.read``."""
        columns, cold = self.sources
        if out is None and cold:
            out = {name: np.empty((len(slots), *each.shape), each.dtype) for name, each in columns.items()}
        if out is None:
            return {name: column.read(slots) for name, column in columns.items()}
        for name, array in out.items():
            columns[name].read_into(slots, array, cold.get(name))
        return dict(out)

    def reading(self, slots: Array) -> ContextManager[None]:
        """Return a context for a copy of these slots, see ``ColumnMemory.reading``."""
        layout = self._layout
        return layout.memory.reading(layout.arrays, slots)

    def as_stored(
        self,
        columns: Mapping[str, Any],
        narrowed: Collection[str],
        replace: Callable[[str], None],
        as_references: bool = False,
    ) -> Columns:
        """
        Overview:
            Return columns in the form in which they are stored, see ``TableShape.as_stored``. References to frames
            remain if ``store`` can use them.
        Arguments:
            - replace (:obj:`Callable`): Receives the name of a column whose form cannot hold a new value. It must
              replace the column by one that can.
            - as_references (:obj:`bool`): Whether values may become references to frames, for ``store``.
        """
        if any(isinstance(values, FrameReferences) for values in columns.values()):
            columns = {name: self._as_values(name, values) for name, values in columns.items()}
        narrow = self.narrow
        if not narrow and not narrowed:
            return columns
        stored, wide, found = dict(columns), narrow.intersection(columns).difference(narrowed), {}
        if as_references:
            found = narrowed_references({name: columns[name] for name in wide.intersection(self.shared)}, self.shared)
        found.update(narrowed_columns(columns, wide.difference(found)))
        for name, values in found.items():
            if values is None:
                replace(name)
                values = np.asarray(columns[name])
            is_whole = isinstance(values, FrameReferences)
            stored[name] = values if is_whole else values.reshape(-1, *self.specs[name][1])
        for name in set(narrowed) - self.narrow:
            stored[name] = widened(columns[name])
        return stored

    def _as_values(self, name: str, values: Any) -> Any:
        """Return the values of references to frames, unless the column or its pool has such frames."""
        if not isinstance(values, FrameReferences):
            return values
        if name in self.shared:
            frames = self.shared[name].pool.frames
            is_stored = values.dtype == frames.dtype and values.frames.shape[1:] == frames.shape[1:]
        else:
            is_stored = values.dtype == self._layout.arrays[name].dtype
        return values if is_stored else np.asarray(values)

    def store(self, slots: Array, columns: Mapping[str, Any], skipped: int = 0) -> None:
        """Fill slots with columns from ``as_stored``, without their first ``skipped`` rows."""
        runs, shared = _runs(slots), self._layout.shared
        references: Dict[str, Array] = {}
        if shared:
            self.are_frames_counted = False
            given = {name: columns[name] for name in shared if isinstance(columns[name], FrameReferences)}
            references = pool_references({name: column[skipped:] for name, column in given.items()}, shared)
        for name, column in self._layout.arrays.items():
            values = columns[name][skipped:] if skipped else columns[name]
            if name in shared:
                values = references[name] if name in references else shared[name].intern(values)
            if len(runs) > _MAX_RUNS:
                column[slots] = values
                continue
            for rows, places in runs:
                part = values if len(runs) == 1 else values[rows]
                if isinstance(part, FrameReferences):
                    part.copy_to(column[places])
                elif part.nbytes < MIN_BYTES:
                    column[places] = part
                else:
                    copy_past_caches(column[places], part)

    def put(self, slot: int, values: Mapping[str, Any]) -> None:
        """Fill one slot with a value for each column. Not if ``is_encoded``."""
        for name, array in self._layout.arrays.items():
            array[slot] = values[name]

    def encode(self, slots: Array, schema: Schema, elements: Sequence[Any]) -> None:
        """
        Overview:
            Fill slots with elements, without a copy in between. Not if ``is_encoded``.
        Raises:
            - SchemaMismatch: An element has another schema. The slots may have changed.
        """
        schema.encode_into(self._layout.arrays, int(slots[0]) if is_run(slots) else slots, elements)

    def overwrite(self, slots: Array, columns: Columns) -> None:
        """Replace the values of some columns, which come from ``as_stored``. May be repeated after an interruption."""
        arrays, shared = self._layout.arrays, self._layout.shared
        for name, values in columns.items():
            if name in self.num_changes:
                before = self.read(name, slots) if name in shared else arrays[name][slots]
                self.num_changes[name] += int((before != values).any())
            if name in shared:
                self._overwrite_frames(shared[name], arrays[name], slots, values)
            else:
                arrays[name][slots] = values

    def _overwrite_frames(self, shared: Shared, references: Array, slots: Array, values: Array) -> None:
        were_counted, self.are_frames_counted = self.are_frames_counted, False
        if were_counted:
            # First, because all frames of the pool may be in use. Readers of these rows repeat their read.
            shared.pool.release(references, slots)
        references[slots] = shared.intern(values)
        self.are_frames_counted = were_counted

    def fill(self, start: int, columns: Columns) -> None:
        """
        Overview:
            Write rows to consecutive slots of columns that no reader knows yet. Slots are filled in order. Narrow
            columns may be float32 or bytes.
        Raises:
            - NotEnoughSpace: There is no space for a column that cannot stay narrow.
        """
        names = [name for name in self.narrow.intersection(columns) if columns[name].dtype == np.uint8]
        stored = self.as_stored(
            columns, names, lambda name: finish(self.replacing(name, self.specs[name], start).replace)
        )
        self.reserve_frames(len(next(iter(stored.values()), ())), stored)
        for name, values in stored.items():
            values = self.shared[name].intern(values) if name in self.shared else values
            self._layout.arrays[name][start : start + len(values)] = values

    def fill_value(self, name: str, value: Any) -> None:
        """Set all used slots of a new column to one value."""
        self._layout.arrays[name][: self.num_used] = value

    def add(self, specs: Mapping[str, ColumnSpec], narrow: Collection[str] = ()) -> None:
        """
        Overview:
            Add columns of zeros. Those in ``narrow`` are stored as bytes. If one cannot be added, none is. It may be
            called again with the others, if an exception interrupted it.
        Raises:
            - NotEnoughSpace: There is no space for the used rows of these columns.
        """
        stored, shared = stored_specs(specs, narrow), self._layout.shared
        if self.share_frames and not len(self):
            shared = shared_columns(stored, self._memory.capacity, self._table_dir)
            stored.update({name: each.reference_spec for name, each in shared.items()})
        try:
            self._memory.add(stored, self.num_used)
        except BaseException:
            for pool in pools_of({name: each for name, each in shared.items() if name in stored}):
                pool.discard()
            raise
        self._refresh({*self._layout.narrow_names, *narrow}, shared)

    def take_back(self, names: Iterable[str]) -> None:
        """Undo ``add``: remove these columns and their files."""
        names = set(names)
        self._memory.take_back(names)
        kept = {name: each for name, each in self.shared.items() if name not in names}
        for pool in self._pools_without(kept):
            pool.discard()
        self._refresh(shared=kept)

    def open(self, columns: List[StoredColumn], live_slots: Array) -> None:
        """
        Overview:
            Map the columns of an existing directory, see ``ColumnMemory.open``, and count the references to frames.
        Arguments:
            - live_slots (:obj:`np.ndarray`): The slots of all live rows.
        Raises:
            - CorruptPayload: A live row refers to a frame that does not exist.
        """
        num_used = int(live_slots.max(initial=-1)) + 1
        shared = opened_columns(columns, self._table_dir)
        files = [
            replace(column, dtype=REFERENCE.str, shape=[column.num_frames]) if column.name in shared else column
            for column in columns
        ]
        self._refresh(shared=shared)  # First, so that ``close`` closes them.
        self._memory.open(files, num_used)
        self._refresh({column.name for column in columns if column.encoding})
        self.num_used = num_used
        for column in columns:
            if column.name in shared:
                found = shared[column.name].pool.has(self._layout.arrays[column.name][live_slots]).all(1)
                if not found.all():
                    raise CorruptPayload(
                        f'{column.file!r} was damaged: column {column.name!r} of slot {live_slots[~found][0]} refers '
                        'to a frame that does not exist. Restore the directory from a copy.'
                    )
        self.recount(live_slots)
        self.reserve_frames(0)

    def stored_columns(self, capacity: int = 0) -> List[StoredColumn]:
        """Return the columns in the form of a directory's header, as they are after a resize to this capacity."""
        columns = self._memory.stored_columns()
        for column in columns:
            column.encoding = self.current[column.name].encoding
            if column.name in self.shared:
                shared = self.shared[column.name]
                dtype, shape = shared.spec
                column.dtype, column.shape, column.frames = dtype.str, list(shape), shared.pool.in_header
                needed = capacity * self._num_frames(shared.pool)
                column.frames.capacity = max(column.frames.capacity, needed)
        return columns

    def replacing(self, name: str, spec: ColumnSpec, num_rows: Optional[int] = None) -> Replacement:
        """
        Overview:
            Convert a column to a dtype that can hold all its values, or to that of its frames. The new one shares no
            frames. ``recount`` must follow its ``replace``.
        Arguments:
            - num_rows (:obj:`Optional[int]`): Slots from this one on hold nothing. By default, the used slots.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        num_rows = self.num_used if num_rows is None else num_rows
        made = self._memory.replacing(name, spec, self.current[name].decode, num_rows)
        if name in self.narrow and spec[0] == np.uint8:
            made.in_header.encoding = ENCODING

        def replace() -> None:
            made.replace()
            kept = {other: each for other, each in self.shared.items() if other != name}
            unused = self._pools_without(kept)
            self._refresh(shared=kept)
            for pool in unused:
                pool.close()

        return made._replace(replace=replace)

    def others(self) -> TableColumns:
        """Return an empty set of columns with as many slots, for ``becoming``."""
        return TableColumns(self._memory.capacity, self._table_dir, self.share_frames)

    def becoming(self, others: TableColumns) -> Callable[[], None]:
        """Return a function that replaces all columns by others, and closes the old. It may be called again."""
        former = self._layout

        def become() -> None:
            self._layout, self.num_used, self._next_judged = others._layout, others.num_used, 0
            former.close()

        return become

    def reserve(self, num_rows: int) -> None:
        """
        Overview:
            Make the first ``num_rows`` slots writable, see ``ColumnMemory.reserve``.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing was written.
        """
        num_used = num_rows if num_rows > self.num_used else self.num_used
        self._layout.memory.reserve(num_used)
        self.num_used = num_used

    def reserve_frames(self, num_rows: int, names: Optional[Collection[str]] = None) -> None:
        """
        Overview:
            Make room for the frames of so many new rows, or of new values of some columns.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing was written.
        """
        layout = self._layout
        for pool, num_frames in zip(layout.pools, layout.num_frames):
            if names is not None:
                num_frames = self._num_frames(pool, names)
            move = pool.reserve(num_rows * num_frames)
            if move is not None:
                self._use(move)

    def _use(self, move: Callable[[], None]) -> None:
        """Move the frames of a pool. Readers that hold the old ones have them for all rows that they read."""

        def use() -> None:
            move()
            self._refresh()

        finish(use)

    def move(self, source: Array, target: Array) -> None:
        """Copy ``source`` slots to ``target`` slots."""
        self._memory.move(source, target)

    def resizing(self, capacity: int) -> Callable[[], None]:
        """Return a function that changes the number of slots, see ``ColumnMemory.resizing``. It may be called again."""
        resize_arrays = self._memory.resizing(capacity)
        resize_pools = [pool.resizing(capacity * self._num_frames(pool)) for pool in self._layout.pools]

        def resize() -> None:
            self.num_used = min(self.num_used, capacity)
            for resize_pool in resize_pools:
                resize_pool()
            resize_arrays(self.num_used)
            self._refresh()

        return resize

    def sync(self) -> None:
        """Write all bytes of the files to the disk."""
        self._memory.sync()
        for pool in self._layout.pools:
            pool.sync()

    def release(self, slots: Array) -> None:
        """Give up the frames of rows that left these slots."""
        layout = self._layout
        for name, each in layout.shared.items():
            each.pool.release(layout.arrays[name], slots)

    def recount(self, slots: Array) -> None:
        """Count the references to frames anew. ``slots`` are those of all live rows. It may be called again."""
        for pool in self._layout.pools:
            pool.recount(self._references(pool, slots))
        self.are_frames_counted = True

    def useless_sharing(self, num_rows: int, next_row: int) -> List[str]:
        """
        Overview:
            Return columns whose frames hardly recur, judged now and then: each row costs a look at all its frames, and
            they may recur less in later rows.
        Arguments:
            - num_rows (:obj:`int`): The number of live rows.
            - next_row (:obj:`int`): The number of the next row.
        """
        is_due = next_row >= max(JUDGED_ROWS, self._next_judged) and num_rows >= min(JUDGED_ROWS, self._memory.capacity)
        if not self.shared or not is_due:
            return []
        self._next_judged = next_row + JUDGED_ROWS
        useless = [pool for pool in self._layout.pools if num_rows * self._num_frames(pool) < MIN_RATIO * pool.num_used]
        return [name for name, each in self.shared.items() if any(each.pool is pool for pool in useless)]

    def _num_frames(self, pool: FramePool, names: Optional[Collection[str]] = None) -> int:
        """Return the number of references that a row has to the frames of this pool, in all or in some columns."""
        shared = self.shared.items()
        return sum(each.num_frames for name, each in shared if each.pool is pool and (names is None or name in names))

    def _pools_without(self, shared: Mapping[str, Shared]) -> List[FramePool]:
        """Return the pools that none of these columns uses."""
        used = pools_of(shared)
        return [pool for pool in self._layout.pools if pool not in used]

    def _references(self, pool: FramePool, slots: Array) -> Array:
        arrays = [self._layout.arrays[name] for name, each in self.shared.items() if each.pool is pool]
        return np.concatenate([array[slots].reshape(-1) for array in arrays])

    def close(self) -> None:
        """Close the files. Readers that hold columns can continue to read them."""
        self._layout.close()
        self._refresh(shared={})

    def discard(self) -> None:
        """Delete columns and files that no header names yet."""
        self._memory.discard()
        for pool in self._layout.pools:
            pool.discard()
        self._refresh(shared={})

    def findings(self, index: RowIndex) -> List[str]:
        """Return all inconsistencies between the columns and the rows. The index is locked."""
        found = []
        if index.count and int(index.live_slots.max()) >= self.num_used:
            found.append(f'a row is in a slot beyond {self.num_used}, the last that was written')
        if any(len(array) != index.capacity for array in self._layout.arrays.values()):
            found.append(f'a column does not have {index.capacity} slots')
        for pool in self._layout.pools:
            found += pool.findings(self._references(pool, index.live_slots))
        return found

    def _refresh(
        self, narrow_names: Optional[Collection[str]] = None, shared: Optional[Mapping[str, Shared]] = None
    ) -> None:
        """Show readers the columns that the memory holds now."""
        layout = self._layout
        self._layout = _Layout(
            layout.memory,
            layout.narrow_names if narrow_names is None else narrow_names,
            layout.shared if shared is None else shared,
        )


def _column(array: Array, is_narrow: bool, shared: Optional[Shared]) -> Column:
    # The array decides as well: a column that was replaced by a wide one is still among the names.
    if shared is not None and (array.dtype, array.shape[1:]) == shared.reference_spec:
        return SharedColumn(array, shared, is_narrow)
    return NarrowColumn(array) if is_narrow and array.dtype == np.uint8 else Column(array)


def _runs(slots: Array) -> List[Tuple[slice, slice]]:
    """
    Split slots into runs that are consecutive and in order. Return a slice of the rows and a slice of the slots for
    each run. Usually all slots are one run, so that one copy serves all rows.
    """
    if not len(slots):
        return []
    if is_run(slots):
        first = slots.item(0)
        return [(slice(0, len(slots)), slice(first, first + len(slots)))]
    breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    begins, ends = [0, *breaks], [*breaks, len(slots)]
    return [(slice(b, e), slice(first, first + e - b)) for b, e, first in zip(begins, ends, slots[begins].tolist())]
