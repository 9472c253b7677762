"""
A table's directory: its files, and the order of writes that lets the table survive its process.

    lock         locked (flock) by the process that has the table open
    header       JSON and its checksum: version, capacity, columns and their files, schema; replaced as a whole
    rows         per slot the row number, or a negative one: mapped, the very array that the index works on
    marks        per slot a checksum of the row number, see ``row_checksums``; mapped
    NNN.column   one column, by slot; or frames that columns share, or hashes of such frames, by number; mapped
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

A column that shares frames holds their numbers. How many rows refer to a frame is not stored: it is counted on
opening, from the references of LIVE rows. A frame that none of them refers to is FREE. The states of a frame:

    FREE --- bytes, then hash --> FREE   nothing refers to the frame yet
    FREE --- reference ---------> FREE   the row that refers to it is not LIVE yet
    FREE --- commit of a row ---> USED   other rows may come to refer to the frame as well
    USED --- -1 of its last row > FREE   this is stored before the first byte of the next frame in this place

An update gives up the frames of its rows, and writes the new ones, after the redo record, which holds whole values. A
crash from then on may leave these rows with wrong frames, until the redo record is repeated. No other row has them.
A crash may also leave a wrong hash. Frames are shared only after their bytes were compared, so equal frames may then be
kept twice, and nothing else happens.

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

With ``fsync=True`` a push waits for the disk once per file that it changes, and for ``rows`` once more if rows leave:

    packed       else a live row names bytes that are not there
    rows         -1 of evicted rows; else an evicted row is live with the payload of its successor
    NNN.column   each of them; else a live row has a payload of earlier rows
    metas        if there are new ones; else a live row has no meta
    marks        else an evicted row comes back: a new number that differs from its number in one bit would count as
                 that number, damaged
    rows         the new row numbers; else the commit, and its note, are valid without the rows
    commit       else the call returns before its rows last

Each wait has its own file, except for those of ``rows``, which the payload separates. So one wait less needs one file
less: its data must be in a file that is synced anyway.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Optional

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.commits import FILE_BYTES, CommitFile, CommitRecord
from ding_store.buffer.persistence.directory_files import DirectoryFiles
from ding_store.buffer.persistence.journal import MIN_BYTES, Journal, map_file
from ding_store.buffer.persistence.kept_state import KeptState
from ding_store.buffer.persistence.row_numbers import RowNumbers
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.persistence.table_header import (
    StoredColumn,
    TableHeader,
    prepare_header,
    read_header,
    write_header,
)
from ding_store.errors import CorruptPayload, FormatMismatch, StoreClosed


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
        self._files = DirectoryFiles(path, fsync)
        self.path, self.fsync = self._files.path, fsync
        lock = self._claim = self._files.claim()
        # Not ``is_open`` of this object: a cycle of references would keep a dropped table open.
        self._kept = KeptState(self._files, lambda: lock.descriptor >= 0, fsync)
        with ExitStack() as undo:
            undo.callback(self._claim.close)
            header = read_header(self.file('header'))
            if header is None:
                self._files.refuse_columns()
                header = self._begin(capacity)
            self._files.header = header
            self._files.check(header, capacity)
            self._rows = RowNumbers(self._current('rows'), self._current('marks'), capacity, fsync)
            self._commits = CommitFile(map_file(self.file('commit'), FILE_BYTES), self.file('commit'), fsync)
            self.metas = Journal(self._current('metas'), fsync)
            undo.callback(self.metas.close)
            self.redo = Journal(self.file('redo'), fsync)
            undo.callback(self.redo.close)
            self._recover()
            if fsync:
                self._files.sync_all()
            undo.pop_all()

    @property
    def header(self) -> TableHeader:
        """The header as it is on the disk."""
        return self._files.header

    @property
    def numbers(self) -> Array:
        """The row numbers by slot."""
        return self._rows.numbers

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
        return self._files.file(name)

    def new_column_file(self, taken: List[str]) -> str:
        """Return a name that no file has."""
        return self._files.new_column_file(taken)

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
        self._rows.mark(slots, first_row)

    def mark_one(self, slot: int, row: int) -> None:
        """Store the checksum of one row, like ``mark``."""
        self._rows.mark_one(slot, row)

    def commit(self, next_row: int, note: Optional[bytes] = None) -> None:
        self._commits.commit(next_row, note)
        if self.fsync:
            self._commits.flush()

    def values(self, name: str) -> SlotValues:
        """Return the file of values by row with this name."""
        return self._kept.values(name)

    def record(self, name: str, of_rows: bool = True) -> CommitRecord:
        """Return the record with this name. With ``of_rows`` its value becomes invalid when all rows are replaced."""
        return self._kept.record(name, of_rows)

    def remove_record(self, name: str) -> None:
        """Remove the record with this name, if there is one."""
        self._kept.remove_record(name)

    def sync_kept(self) -> None:
        """Write the state of samplers to the disk."""
        self._kept.sync()

    def sync_numbers(self) -> None:
        if self.fsync:
            self._rows.flush()

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
            self._files.header = header
            self._files.remove_orphans(header)

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
            undo.callback(lambda: self._files.remove_other_generations(self.generation))
            paths = self._current('rows', generation), self._current('marks', generation)
            numbers = RowNumbers.create(*paths, capacity, self.fsync)
            numbers.fill(rows)
            journal = self.metas.prepare(metas, self._current('metas', generation))
            undo.callback(journal.close)
            replace_values = self._kept.replacing(generation)
            if self.fsync:
                numbers.sync()
            commit = prepare_header(self.file('header'), header, self.fsync)
            undo.pop_all()

        def replace_all() -> None:
            commit()
            self._files.header = header
            self._rows = numbers
            self.metas.move_to(journal)
            replace_values()
            self._files.remove_orphans(header)

        return replace_all

    def resizing(self, capacity: int, columns: List[StoredColumn]) -> Callable[[], Array]:
        """
        Overview:
            Reserve space for another capacity. The column files must be large enough already.
        Arguments:
            - columns (:obj:`List[StoredColumn]`): The columns as they are then.
        Returns:
            - resize (:obj:`Callable`): Switches to the capacity and returns the row numbers by slot. It needs no more
              space. Before a shrink, all rows beyond the capacity must have moved.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        self._kept.grow(capacity)
        rows = self._rows.resized(capacity)
        if self.fsync:
            rows.flush()
        header = replace(self.header, capacity=capacity, columns=columns)
        commit = prepare_header(self.file('header'), header, self.fsync)

        def resize() -> Array:
            commit()
            self._files.header, self._rows = header, rows
            return rows.numbers

        return resize

    def move_values(self, source: Array, target: Array) -> None:
        """Copy checksums and values of rows to the slots to which the rows are about to move."""
        self._rows.mark_moved(source, target)
        self._kept.move(source, target)

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
            found += self._rows.findings()
            files = [self._commits.findings, self.metas.findings, self.redo.findings, self._kept.findings]
            for findings in files:
                found += findings()
        return self._kept.damage + found

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
                self._rows.flush()
                self.sync_kept()
            self._claim.close()

    def _replace(self, header: TableHeader) -> None:
        write_header(self.file('header'), header, self.fsync)
        self._files.header = header

    def _begin(self, capacity: int) -> TableHeader:
        """Create all files. The header is last, because it makes the directory a table."""
        self._files.header = TableHeader(capacity)
        self._files.remove_orphans(self.header)
        self._files.remove_all()
        numbers = RowNumbers.create(self.file('rows'), self.file('marks'), capacity, self.fsync)
        metas = Journal(self.file('metas'), self.fsync)
        metas.sync()
        metas.close()
        commits = map_file(self.file('commit'), FILE_BYTES)
        CommitFile.begin(commits)
        if self.fsync:
            numbers.sync()
            commits.flush()
        self._replace(self.header)
        return self.header

    def _recover(self) -> None:
        """
        Complete what a kill interrupted. It may be killed at any point and repeated. Damage is refused before the first
        change.
        """
        repaired = self._rows.repaired(self.header.first_row, self.next_row)
        self._commits.repair()
        self._files.remove_orphans(self.header)
        self._rows.restore(repaired)

    def _current(self, name: str, generation: Optional[int] = None) -> str:
        """Return the path of a file with data by row number."""
        return self._files.of_generation(name, self.generation if generation is None else generation)
