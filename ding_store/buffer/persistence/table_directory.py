"""
A table's directory: its files, and the order of writes that lets the table survive its process.

    lock         locked (flock) by the process that has the table open
    header       JSON and its checksum: version, capacity, columns and their files, schema; replaced as a whole
    rows         per slot the row number, or a negative one: mapped, the very array that the index works on
    marks        per slot a checksum of the row number, see ``row_checksums``; mapped
    NNN.column   one column, by slot; mapped
    commit       the next row number, and the note of the caller: two records in turn, see ``commits``
    metas        journal of (row numbers, meta), of which the last one of a row counts
    packed       elements of varying size; columns hold their extents: see ``packed``
    redo         the rows that are being overwritten in place, if any
    NAME.values  a number per row, each with the row number; mapped, see ``slot_values``: priorities, uses
    NAME.record  a dict that is replaced as a whole, like the note of a commit: a queue's place, a limiter's counts

All data by row number belong to a generation, which the header names. When all rows are replaced at once, row numbers
may repeat. The files ``rows``, ``marks``, ``metas`` and ``NAME.values`` of generation 1 are then named ``rows.1`` and
so on.

A kill and damage leave different traces. A row checksum is stored before its row number. Journals and commit records
contain the point up to which they are whole. Values have their own checksums. Damage is repaired if only one original
is possible. If rows or metas would be lost, the table is refused. Unknown priorities and counts are reported by
``findings``. Bytes of columns have no checksum. Each packed element has one.

The states of a slot. The arrow names what is stored, in this order by one thread:

    FREE      --- payload ---> FREE      nothing refers to the payload yet
    FREE      --- meta ------> FREE      a meta of a row that is not live is ignored
    FREE      --- checksum --> FREE      the checksum of a free slot is ignored
    FREE      --- row number > WRITTEN   its number is not below the next row: a crash makes it FREE again
    WRITTEN   --- commit ----> LIVE      one record makes all rows of a push live, together with the note
    LIVE      --- -1 --------> FREE      deleted; or evicted, which is stored before the first byte of its successor

    LIVE --- redo record ---> LIVE, to be overwritten --- payload ---> --- no redo record ---> LIVE
             a crash from here on                         repeats this

Commits do not include the state of samplers. Only priorities that come with new rows are stored before the rows are
LIVE. Later priorities, use counts and a queue's place are stored before the call that changes them returns.
Values of a row that moves to another slot are stored before its number. A kill may therefore count a batch that no
thread received. But no row is sampled more often than its limit, and a queue returns no row twice. The number of rows
that the rate limiter admitted follows from the commit. The limiter stores only the start of its count.

Delete all rows (``clear``): the header first names the first valid row, then the row numbers are erased. Replace all
rows (``load_data``), the columns, or the capacity: new files are complete before the header names them. Old files are
removed after the header stopped naming them.

A kill therefore leaves only what a restart repairs. Files that no header names are removed. Files longer than the
capacity are cut. If a row is in two slots, because it was copied, the second slot is freed. Rows from the next row on,
or before the first valid row, are freed. If a push is killed, the rows that it evicted are lost: the oldest, and at
most as many as were pushed.

A kill loses nothing that was stored, because the pages belong to the kernel. A power cut may lose any of them, in any
order. With ``fsync=True`` every step above is on the disk before the next one begins. The state of samplers is on the
disk with the next push. ``tests/disk.py`` models a disk that loses its power.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Optional

import numpy as np

from ding_store import private_files
from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.commits import FILE_BYTES, CommitFile, CommitRecord
from ding_store.buffer.persistence.journal import MIN_BYTES, Journal, reserve
from ding_store.buffer.persistence.row_checksums import RowChecksums
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.persistence.table_header import (
    COLUMN_FILE,
    StoredColumn,
    TableHeader,
    prepare_header,
    read_header,
    write_header,
)
from ding_store.errors import ConfigError, CorruptPayload, FormatMismatch, StoreClosed, TableLocked
from ding_store.power_cuts import sync_directory, sync_file, sync_path
from ding_store.storage.shared_memory.mapped_files import OwnerLock, claim

logger = logging.getLogger(__name__)

_OURS = ('rows', 'marks', 'commit', 'metas', 'redo', 'packed')
_TEMPORARY = re.compile(r'(header|metas)(\.\d+)?\.new')
_OF_GENERATION = re.compile(r'(?:rows|marks|metas|[\w-]+\.values)(?:\.(\d+))?')


class TableDirectory:
    """
    Overview:
        A table's directory, opened exclusively by this process. It is created if there is none.
    Arguments:
        - path (:obj:`str`): The directory.
        - capacity (:obj:`int`): The capacity of the table.
        - fsync (:obj:`bool`): Whether the table also survives power cuts.
    Raises:
        - TableLocked: It is open already, in this process or another.
        - FormatMismatch: Another version of this package wrote it.
        - ConfigError: It has another capacity.
        - CorruptPayload: A file is truncated, or another program wrote it. Nothing was changed.
    """

    def __init__(self, path: str, capacity: int, fsync: bool = False) -> None:
        self.path = private_files.directory(path)
        self.fsync = fsync
        self._values: Dict[str, SlotValues] = {}
        self._records: Dict[str, CommitRecord] = {}
        #: Damage found since the directory was opened.
        self._damage: List[str] = []
        _refuse_foreign(self.path)
        self._claim = _claim(self.path)
        with ExitStack() as undo:
            undo.callback(self._claim.close)
            header = read_header(self.file('header'))
            if header is None:
                _refuse_columns(self.path)
                header = self._begin(capacity)
            self.header = header
            self._check(capacity)
            self._numbers_region = _map(self._current('rows'), 8 * capacity)
            self._commits = CommitFile(_map(self.file('commit'), FILE_BYTES), self.file('commit'), fsync)
            self.numbers: Array = np.frombuffer(self._numbers_region, np.int64)[:capacity]
            self._marks = RowChecksums(_map(self._current('marks'), 8 * capacity), capacity)
            self.metas = Journal(self._current('metas'), fsync)
            undo.callback(self.metas.close)
            self.redo = Journal(self.file('redo'), fsync)
            undo.callback(self.redo.close)
            self._recover()
            if fsync:
                self._sync_all()
            undo.pop_all()

    @property
    def next_row(self) -> int:
        return max(self._commits.next_row, self.header.next_row)

    @property
    def generation(self) -> int:
        """Number of times that all rows were replaced at once."""
        return self.header.generation

    @property
    def num_skipped(self) -> int:
        """Number of row numbers that no inserted row had, because a replacement of all rows skipped them."""
        return self.header.num_skipped

    @property
    def note(self) -> Optional[Dict[str, Any]]:
        return self._commits.note

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def new_column_file(self, taken: List[str]) -> str:
        """Return a name that no file has."""
        number = 0
        while f'{number:03d}.column' in taken or os.path.exists(self.file(f'{number:03d}.column')):
            number += 1
        return f'{number:03d}.column'

    def is_open(self) -> bool:
        """Return False in a forked child and after ``close``, where writes would damage the table."""
        return self._claim.descriptor >= 0

    def check_open(self) -> None:
        """
        Overview:
            Check that the directory is open in this process.
        Raises:
            - StoreClosed: The directory is not open, see ``is_open``.
        """
        if not self.is_open():
            raise StoreClosed(
                f'the table in {self.path!r} is closed, or this is a forked process, which may only read. Change it '
                'in the process that opened it, or open it again.'
            )

    def mark(self, slots: Array, first_row: int) -> None:
        """
        Store the checksums of rows that are about to be in these slots, numbered from ``first_row``. With ``fsync``
        they are then on the disk.
        """
        self._marks.put_run(slots, first_row)
        if self.fsync:
            # After a power cut an old checksum with a new row number would look like a damaged row number.
            self._marks.sync()

    def report(self, finding: str) -> None:
        """Log damage that makes some values unknown. ``findings`` returns it while the directory is open."""
        self._damage.append(finding)
        logger.warning('%s. The table continues without it.', finding)

    def commit(self, next_row: int, note: Optional[bytes] = None) -> None:
        self._commits.commit(next_row, note)
        if self.fsync:
            self._commits.flush()

    def values(self, name: str) -> SlotValues:
        """Return the file of values by row with this name."""
        if name not in self._values:
            path = self._current(f'{name}.values')
            self._values[name] = SlotValues(path, self.header.capacity, self.is_open, self.report)
            self._sync_names()
        return self._values[name]

    def record(self, name: str, of_rows: bool = True) -> CommitRecord:
        """Return the record with this name. With ``of_rows`` its value becomes invalid when all rows are replaced."""
        if name not in self._records:
            path = self.file(f'{name}.record')
            generation = (lambda: self.generation) if of_rows else (lambda: 0)
            self._records[name] = CommitRecord(_map(path, FILE_BYTES), path, self.is_open, generation, self.fsync)
            self._sync_names()
        return self._records[name]

    def remove_record(self, name: str) -> None:
        """Remove the record with this name, if there is one."""
        self._records.pop(name, None)
        with suppress(FileNotFoundError):
            os.unlink(self.file(f'{name}.record'))

    def sync_kept(self) -> None:
        """Write the state of samplers to the disk."""
        for values in self._values.values():
            values.sync()
        for record in self._records.values():
            record.sync()

    def sync_numbers(self) -> None:
        if self.fsync:
            self._numbers_region.flush()

    def describe(self, columns: List[StoredColumn], info: Any) -> None:
        """Store these columns and the information of the table's owner. Then remove all files that no header names."""
        self.prepare(columns, info)()

    def prepare(self, columns: List[StoredColumn], info: Any) -> Callable[[], None]:
        """
        Overview:
            Prepare ``describe``. The returned function completes it and needs no more space.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        header = replace(self.header, columns=columns, info=info)
        commit = prepare_header(self.file('header'), header, self.fsync)

        def describe() -> None:
            commit()
            self.header = header
            self._remove_orphans()

        return describe

    def replacing(
        self, columns: List[StoredColumn], info: Any, rows: Array, next_row: int, metas: Iterable[bytes]
    ) -> Callable[[], None]:
        """
        Overview:
            Prepare new columns, like ``prepare``, and new rows that replace all others. A kill leaves the old rows or
            the new ones.
        Arguments:
            - rows (:obj:`np.ndarray`): Row numbers in the first slots. Earlier rows may have had the same numbers.
            - next_row (:obj:`int`): The lowest number for the next row.
            - metas (:obj:`Iterable[bytes]`): The encoded metas of the rows.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        next_row = max(next_row, self.next_row)
        num_skipped = self.header.num_skipped + next_row - self.next_row
        generation, capacity = self.generation + 1, self.header.capacity
        header = TableHeader(capacity, columns, info, generation, next_row, num_skipped)
        with ExitStack() as undo:
            undo.callback(self._remove_other_generations)
            numbers = _new_numbers(self._current('rows', generation), capacity)
            np.frombuffer(numbers, np.int64)[: len(rows)] = rows
            marks = _new_marks(self._current('marks', generation), capacity)
            marks.put(np.arange(len(rows)), rows)
            journal = self.metas.prepare(metas, self._current('metas', generation))
            undo.callback(journal.close)
            values = {
                name: self.values(name).successor(self._current(f'{name}.values', generation))
                for name in self._value_files()
            }
            if self.fsync:
                numbers.flush()
                marks.sync()
                for each in values.values():
                    each.sync()
            commit = prepare_header(self.file('header'), header, self.fsync)
            undo.pop_all()

        def replace_all() -> None:
            commit()
            self.header = header
            self._numbers_region, self.numbers = numbers, np.frombuffer(numbers, np.int64)[:capacity]
            self._marks = marks
            self.metas.move_to(journal)
            for name, each in values.items():
                self._values[name].become(each)
            self._remove_orphans()

        return replace_all

    def resizing(self, capacity: int) -> Callable[[], Array]:
        """
        Overview:
            Reserve space for another capacity. The column files must be large enough already.
        Returns:
            - resize (:obj:`Callable`): Switches to the capacity and returns the row numbers by slot. It needs no more
              space. Before a shrink, all rows beyond the capacity must have moved.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        old = self.header.capacity
        for name in self._value_files():
            self.values(name).grow(capacity)
        region, marks = self._numbers_region, self._marks
        if capacity > old:
            region = _map(self._current('rows'), 8 * capacity)
            marks = RowChecksums(_map(self._current('marks'), 8 * capacity), capacity)
        numbers: Array = np.frombuffer(region, np.int64)[:capacity]
        numbers[old:] = EMPTY
        if self.fsync:
            region.flush()
        header = replace(self.header, capacity=capacity)
        commit = prepare_header(self.file('header'), header, self.fsync)

        def resize() -> Array:
            commit()
            self.header, self._numbers_region, self.numbers, self._marks = header, region, numbers, marks
            return numbers

        return resize

    def move_values(self, source: Array, target: Array) -> None:
        """Copy checksums and values of rows to the slots to which the rows are about to move."""
        self._marks.put(target, self.numbers[source])
        if self.fsync:
            self._marks.sync()
        for name in self._value_files():
            self.values(name).move(source, target)

    def findings(self, next_row: int, numbers: Array, columns: List[StoredColumn]) -> List[str]:
        """Return the differences between the files and the table in memory."""
        committed = max(self._commits.next_row, self.header.next_row)
        try:
            is_same = read_header(self.file('header')) == self.header
        except (CorruptPayload, FormatMismatch):
            is_same = False
        checks = {
            'the header is not that of the table': is_same,
            'the columns of the header are not those of the table': self.header.columns == columns,
            # A push that failed has used row numbers that were never committed.
            'the commit record is behind or ahead': numbers.max(initial=EMPTY) < committed <= next_row,
            'row numbers are kept elsewhere': numbers is self.numbers or not self.is_open(),
            'an update was not finished': self.redo.end == MIN_BYTES,
        }
        found = [what for what, holds in checks.items() if not holds]
        if self.is_open():
            found += self._marks.findings(numbers)
            files = [self._commits.findings, self.metas.findings, self.redo.findings]
            files += [values.findings for values in self._values.values()]
            files += [record.findings for record in self._records.values()]
            for findings in files:
                found += findings()
        return self._damage + found

    def clear(self) -> None:
        """
        Overview:
            Delete all present rows. Their numbers stay in the file, but are ignored from now on.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        # Use the committed number, not that of the index. After a failed push the index is ahead, and the next process
        # will assign these numbers again.
        self._replace(replace(self.header, first_row=self.next_row))

    def close(self) -> None:
        """Release the directory for other processes."""
        if self.is_open():
            self.metas.close()
            self.redo.close()
            if self.fsync:
                self._numbers_region.flush()
                self.sync_kept()
            self._claim.close()

    def _replace(self, header: TableHeader) -> None:
        write_header(self.file('header'), header, self.fsync)
        self.header = header

    def _begin(self, capacity: int) -> TableHeader:
        """Create all files. The header is last, because it makes the directory a table."""
        self.header = TableHeader(capacity)
        self._remove_orphans()
        for name in os.listdir(self.path):
            if name in _OURS or name.endswith(('.values', '.record')):
                os.unlink(self.file(name))
        numbers = _new_numbers(self.file('rows'), capacity)
        marks = _new_marks(self.file('marks'), capacity)
        metas = Journal(self.file('metas'), self.fsync)
        metas.sync()
        metas.close()
        commits = _map(self.file('commit'), FILE_BYTES)
        CommitFile.begin(commits)
        if self.fsync:
            numbers.flush()
            marks.sync()
            commits.flush()
        self._replace(self.header)
        return self.header

    def _check(self, capacity: int) -> None:
        """Check all that can be checked without changing a file."""
        if self.header.capacity != capacity:
            raise ConfigError(
                f'{self.path!r} holds a table of capacity {self.header.capacity}, not {capacity}. Open it with that '
                'size and call resize(), or name another directory.'
            )
        needed = {os.path.basename(self._current('rows')): 8 * capacity, 'commit': FILE_BYTES}
        needed[os.path.basename(self._current('marks'))] = 8 * capacity
        needed[os.path.basename(self._current('metas'))] = MIN_BYTES
        for column in self.header.columns:
            row_bytes = np.dtype(column.dtype).itemsize * int(np.prod(column.shape))
            needed.update({column.file: row_bytes * capacity} if row_bytes else {})
        for name, num_bytes in needed.items():
            check_size(self.file(name), num_bytes)

    def _recover(self) -> None:
        """
        Complete what a kill interrupted. It may be killed at any point and repeated. Damage is refused before the first
        change.
        """
        repaired = self._marks.repaired(self.numbers, self.header.first_row, self.next_row, self._current('rows'))
        self._commits.repair()
        self._remove_orphans()
        numbers, live = self.numbers, np.flatnonzero(repaired != EMPTY)
        changed = np.flatnonzero(numbers != repaired)
        numbers[changed] = repaired[changed]
        self._marks.put(live, numbers[live])
        # A row in two slots was copied from one to the other. The first slot is the copy, and stays.
        first = np.unique(numbers[live], return_index=True)[1]
        numbers[np.delete(live, first)] = EMPTY

    def _current(self, name: str, generation: Optional[int] = None) -> str:
        """Return the path of a file with data by row number. Each generation has its own file."""
        generation = self.generation if generation is None else generation
        return self.file(f'{name}.{generation}' if generation else name)

    def _sync_all(self) -> None:
        """Sync all files and names. An earlier process may have written without a sync."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    sync_file(entry.path)
        sync_path(self.path)

    def _sync_names(self) -> None:
        if self.fsync:
            sync_directory(self.path)

    def _value_files(self) -> List[str]:
        end = os.path.basename(self._current('.values'))
        return [name[: -len(end)] for name in os.listdir(self.path) if name.endswith(end)]

    def _remove_orphans(self) -> None:
        named = {column.file for column in self.header.columns}
        for name in os.listdir(self.path):
            if _TEMPORARY.fullmatch(name) or (COLUMN_FILE.fullmatch(name) and name not in named):
                os.unlink(self.file(name))
        self._remove_other_generations()

    def _remove_other_generations(self) -> None:
        for name in os.listdir(self.path):
            found = _OF_GENERATION.fullmatch(name)
            if found is not None and int(found[1] or 0) != self.generation:
                os.unlink(self.file(name))


def check_size(path: str, num_bytes: int) -> None:
    """
    Overview:
        Check that a file has at least ``num_bytes`` bytes.
    Raises:
        - CorruptPayload: The file is missing, or too short.
    """
    there = os.path.getsize(path) if os.path.exists(path) else -1
    if there < num_bytes:
        found = 'is missing' if there < 0 else f'has {there} bytes'
        raise CorruptPayload(f'{path!r} {found}, but {num_bytes} bytes are needed. Restore the directory from a copy.')


def _refuse_foreign(directory: str) -> None:
    names = os.listdir(directory)
    theirs = sorted(name for name in names if name in (*_OURS, 'header') or COLUMN_FILE.fullmatch(name))
    if theirs and 'lock' not in names:
        raise ConfigError(f'{directory!r} is not the directory of a table, but has files {theirs}. Name another one.')
    for name in names:
        # Each file is checked again when it is opened. This check comes before any change.
        if name in theirs or name.endswith(('.values', '.record')):
            private_files.check_file(os.path.join(directory, name))


def _refuse_columns(directory: str) -> None:
    """Refuse column files without a header. A new table writes its header first, so the header was lost."""
    columns = sorted(name for name in os.listdir(directory) if COLUMN_FILE.fullmatch(name))
    if columns:
        raise CorruptPayload(
            f'{os.path.join(directory, "header")!r} is missing, but there are columns {columns}: the table cannot be '
            'read without it. Restore it, or remove the directory to start again.'
        )


def _claim(directory: str) -> OwnerLock:
    path = os.path.join(directory, 'lock')
    private_files.touch(path)
    held = claim(path)
    if held is None:
        raise TableLocked(f'the table in {directory!r} is open already, in this process or another. Close it there.')
    return held


def _new_numbers(path: str, capacity: int) -> mmap.mmap:
    """Create the file of row numbers, with all slots free."""
    region = _map(path, 8 * capacity)
    np.frombuffer(region, np.int64)[:] = EMPTY
    return region


def _new_marks(path: str, capacity: int) -> RowChecksums:
    return RowChecksums(_map(path, 8 * capacity), capacity)


def _map(path: str, num_bytes: int) -> mmap.mmap:
    """
    Map a file with at least ``num_bytes``, and reserve its space. On a full disk a write to a hole would raise SIGBUS.
    """
    descriptor = private_files.opener(path, os.O_RDWR | os.O_CREAT)
    try:
        reserve(descriptor, path, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
