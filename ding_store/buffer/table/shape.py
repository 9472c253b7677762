"""Changes of a table's shape: new columns, wider columns, other columns, or another number of slots."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from typing import Any, Callable, Collection, Iterable, List, Mapping, Optional, Set, Tuple

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.interrupts import finish
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.table.column_memory import Replacement
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.durability import Durability
from ding_store.buffer.table.fork_guard import ForkGuard
from ding_store.buffer.table.frame_sharing import FrameListener
from ding_store.buffer.table.reads import ConsistentReads
from ding_store.buffer.table.rows import NO_ROWS, RowIndex
from ding_store.buffer.table.specs import Columns, ColumnSpec, checked_specs, spec_bytes
from ding_store.errors import ConfigError, NotEnoughSpace
from ding_store.free_space import format_bytes

logger = logging.getLogger(__name__)

#: Receives the slots whose rows must move and their new slots. Returns the function to call when they have moved.
Moving = Callable[[Array, Array], Callable[[], None]]


class TableShape:
    """
    Overview:
        Changes the columns or the capacity of a table. It shares its parts with the table.
    """

    def __init__(
        self,
        index: RowIndex,
        columns: TableColumns,
        durability: Durability,
        guard: ForkGuard,
        reads: ConsistentReads,
        write_lock: threading.RLock,
    ) -> None:
        self._index, self._columns, self._durability, self._guard = index, columns, durability, guard
        self._reads, self._write_lock = reads, write_lock
        # One listener: a second one, kept alive by a traceback, would give up each frame twice.
        self._frame_listener = FrameListener(columns, index)
        #: Columns that go on sharing frames, because there was no space for them as they are.
        self._unconverted: Set[str] = set()
        self._listen_for_frames()

    def as_stored(
        self, columns: Mapping[str, Any], narrowed: Collection[str] = (), as_references: bool = False
    ) -> Columns:
        """
        Overview:
            Return these columns in the form in which the table stores them. If a column is stored as bytes and a new
            value does not fit, the column is widened first and stays wide. The caller holds the write lock. It must
            finish with the result before this thread calls again.
        Arguments:
            - columns (:obj:`Mapping`): Name -> array ``(n, *shape)``. A narrow column may also be the list from
              ``Schema.encode_parts``.
            - narrowed (:obj:`Collection[str]`): Names of columns that are bytes already.
            - as_references (:obj:`bool`): Whether values may become references to frames, for new rows.
        Raises:
            - NotEnoughSpace: There is no space for a widened column. Nothing changed.
        """
        return self._columns.as_stored(columns, narrowed, self._widen, as_references)

    def add_columns(
        self,
        columns: Mapping[str, ColumnSpec],
        fill: Optional[Mapping[str, Any]] = None,
        info: Any = None,
        added: Callable[[], None] = lambda: None,
        wider: Optional[Mapping[str, ColumnSpec]] = None,
    ) -> None:
        """
        Overview:
            Add columns to the schema. Existing rows get ``fill[name]``, or zeros.
        Arguments:
            - added (:obj:`Callable`): Called when the columns exist. Called again if an exception interrupts it.
            - wider (:obj:`Optional[Mapping]`): Existing columns -> dtypes that can hold all their values. They are
              converted to these dtypes. Readers see the wider columns and the effects of ``added`` together.
        Raises:
            - ConfigError: The table has a column of this name.
            - NotEnoughSpace: There is no space for a column. Nothing changed.
        """
        specs, wider_specs = checked_specs(columns), checked_specs(wider or {})
        with self._write_lock:
            self._guard.check_open()
            doubled = sorted(set(specs) & set(self._columns))
            if doubled:
                raise ConfigError(f'the table already has the columns {doubled}. Choose other names.')
            made: List[Replacement] = []
            is_begun = False

            def add() -> None:
                nonlocal is_begun
                is_begun = True
                with self._index.lock if wider_specs else nullcontext():
                    if made:
                        # Readers that copy from an old column repeat the read.
                        self._reads.repeat()
                    for each in made:
                        each.replace()
                    if made:
                        self._columns.recount(self._index.live_slots)
                    describe()
                    added()

            try:
                self._columns.add(specs)
                self._listen_for_frames()
                for name, value in (fill or {}).items():
                    self._columns.fill_value(name, value)
                known = self._columns.specs
                for name, spec in wider_specs.items():
                    if known[name] != spec:
                        made.append(self._columns.replacing(name, spec))
                # Before the first column is replaced: there may be no space for the header.
                describe = self._durability.describing([each.in_header for each in made], info)
                finish(add)
            except BaseException:
                if not is_begun:
                    for each in made:
                        each.discard()
                    self._columns.take_back(specs)
                raise

    def replace_columns(
        self,
        columns: Mapping[str, ColumnSpec],
        info: Any = None,
        narrow_columns: Iterable[str] = (),
        replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Overview:
            Delete all rows and replace the columns. Some of the new columns are stored as bytes while that is exact.
            Row numbers continue to grow. ``replaced`` has the same meaning as in ``replace``.
        """
        with self._write_lock:
            others = self.new_columns()
            others.add(checked_specs(columns), frozenset(narrow_columns))
            self.replace(others, info, replaced=replaced)

    def new_columns(self) -> TableColumns:
        """Return an empty set of columns for ``replace``. The caller holds the write lock until then."""
        self._guard.check_open()
        return self._columns.others()

    def replace(
        self,
        others: TableColumns,
        info: Any,
        rows: Array = NO_ROWS,
        next_row: int = 0,
        metas: Iterable[bytes] = (),
        cleared: Callable[[], None] = lambda: None,
        replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Overview:
            Delete all rows, and replace the columns by others that hold new rows in their first slots. All that can
            fail happens before the first change. A kill leaves the old table or the new one.
        Arguments:
            - rows (:obj:`np.ndarray`): Row numbers of the new rows, oldest first. Earlier rows may have had the same
              numbers.
            - next_row (:obj:`int`): The lowest number for the next row.
            - metas (:obj:`Iterable[bytes]`): Encoded metas of the new rows.
            - cleared (:obj:`Callable`): Called when the old rows are gone and before any new row exists. Called again
              if an exception interrupts it.
            - replaced (:obj:`Callable`): Called when the new rows exist and before any thread can read them. Called
              again if an exception interrupts it.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed, and ``others`` are discarded.
        """
        try:
            self._guard.check_open()
            commit = self._durability.replacing(others, info, rows, next_row, metas)
        except BaseException:
            others.discard()
            raise
        others.num_used = len(rows)
        become = self._columns.becoming(others)

        def replace() -> None:
            self._guard.announce()
            commit()
            # Readers that are copying repeat the read.
            self._reads.repeat()
            self._index.forget()
            cleared()
            become()
            self._listen_for_frames()
            self._index.next_row = max(next_row, self._index.next_row, self._index.promised_row)
            self._index.load(rows, self._durability.numbers)
            # The listener found no rows, in the new columns if this is a repetition.
            self._columns.recount(self._index.live_slots)
            replaced()

        with self._write_lock, self._index.lock:
            finish(replace)

    def convert(
        self, columns: Mapping[str, ColumnSpec], info: Any, slots: Array, values: Columns, converted: Callable[[], None]
    ) -> None:
        """
        Overview:
            Replace the columns and keep the rows. A kill leaves the old table or the new one.
        Arguments:
            - slots (:obj:`np.ndarray`): The slots of all live rows.
            - values (:obj:`Mapping`): The values of the new columns in these slots.
            - converted (:obj:`Callable`): Called when the columns are replaced, with the table locked.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        with self._write_lock:
            others = self.new_columns()
            try:
                others.add(checked_specs(columns))
                others.reserve(self._columns.num_used)
                others.store(slots, values)
                commit = self._durability.prepare(others, info)
            except BaseException:
                others.discard()
                raise
            become = self._columns.becoming(others)

            def convert() -> None:
                self._guard.announce()
                self._reads.repeat()
                commit()
                become()
                converted()

            with self._index.lock:
                finish(convert)

    def resize(self, capacity: int, moving: Optional[Moving] = None) -> Tuple[Array, Array]:
        """
        Overview:
            Change the capacity. If there are more rows than that, the oldest are evicted. O(capacity), plus a copy of
            the table if it is in memory. Files keep their length, but the space of unused slots is freed. If the disk
            fails after the reservation, the oldest rows are still evicted, and nothing else is lost.
        Arguments:
            - moving (:obj:`Optional[Callable]`): Receives ``source`` and ``target``. Returns a function that is called
              when the rows have moved. That function is called again if an exception interrupts it.
        Returns:
            - source (:obj:`np.ndarray`): Slots whose rows had to move.
            - target (:obj:`np.ndarray`): Their new slots.
        Raises:
            - ConfigError: ``capacity`` is not a positive integer.
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        capacity = integer('capacity', capacity, 1)
        with self._write_lock, self._index.lock:
            self._guard.check_open()
            resize_columns, resize_numbers = self._columns.resizing(capacity), self._durability.resizing(capacity)
            # Readers that are copying repeat the read. Other readers wait for the index lock.
            self._reads.repeat()
            self._guard.announce()
            self._index.remove(self._index.leaving(max(0, self._index.count - capacity)))
            # Sync before the first byte of the rows that move to the slots of the evicted ones.
            self._durability.sync_numbers()
            source, target = self._index.relocations(capacity)
            self._columns.move(source, target)
            self._durability.move_values(source, target)
            self._durability.sync_columns()
            self._durability.sync_kept()
            former, move = self._index.row_of_slot, moving and moving(source, target)
            numbers: List[Array] = []

            def resize() -> None:
                if not numbers:
                    self._index.relocate(source, target)
                    self._durability.sync_numbers()
                    numbers[:] = [resize_numbers()]
                resize_columns()
                self._index.resize(numbers[0], source, target)
                if move is not None:
                    move()
                if self._durability.numbers is None:
                    # A reader that is copying compares with the old array: it must see that its slots have changed.
                    former[:] = EMPTY

            try:
                finish(resize)
            except BaseException:
                if not numbers:
                    self._index.stay(target)
                raise
        return source, target

    def _widen(self, name: str) -> None:
        logger.warning(
            'column %r is stored as float32 from now on and takes four times its memory, because a new row has values '
            'other than k/255. Nothing is lost.',
            name,
        )
        self._convert(name, self._columns.specs[name])

    def judge_sharing(self) -> None:
        """
        Store columns whose frames hardly recur as they are. They go on sharing frames if there is no space for that.
        The caller holds the write lock.
        """
        if not self._columns.shared:
            return
        for name in self._columns.useless_sharing(self._index.count, self._index.next_row):
            if name in self._unconverted:
                continue
            spec = self._columns.shared[name].spec
            logger.info(
                'column %r shares no frames from now on: they hardly recur. It takes %s per row.',
                name,
                format_bytes(spec_bytes(spec)),
            )
            try:
                self._convert(name, spec)
            except NotEnoughSpace as e:
                self._unconverted.add(name)
                logger.warning('column %r goes on sharing frames that hardly recur: %s', name, e)

    def _convert(self, name: str, spec: ColumnSpec) -> None:
        """
        Overview:
            Replace a column by one that holds the same values, and shares no frames.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        made = self._columns.replacing(name, spec)
        try:
            describe = self._durability.describing([made.in_header], self._durability.info)
        except BaseException:
            made.discard()
            raise

        def convert() -> None:
            with self._index.lock:
                # Readers that copy from the old column repeat the read. Other readers wait for the lock.
                self._reads.repeat()
                made.replace()
                self._columns.recount(self._index.live_slots)
            describe()

        finish(convert)

    def _listen_for_frames(self) -> None:
        """Give up the frames of rows that leave from now on, if columns share frames."""
        if self._columns.shared:
            self._index.listen(self._frame_listener)
