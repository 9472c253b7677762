"""Where the columns' bytes are: anonymous memory, or sparse files whose space is reserved before it is written."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import uuid
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from ding_store import free_space, private_files
from ding_store.buffer.array_types import Array, anonymous
from ding_store.buffer.interrupts import finish
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.persistence.table_header import StoredColumn
from ding_store.buffer.table.cold import ColdColumn
from ding_store.buffer.table.page_touching import Toucher
from ding_store.errors import NotEnoughSpace

#: What one element has in a column: its dtype and shape.
ColumnSpec = Tuple[np.dtype[Any], Tuple[int, ...]]

#: Space is reserved in steps of about this much. 64 MiB took 33 ms on tmpfs, and as much less to touch then (60 + 33
#: against 101-135 ms sparse); 0.3-8 ms on ext4.
EXTENT_BYTES = 16 << 20
#: Two pushes ahead, where they are larger, but no more than this.
_MAX_AHEAD_BYTES = 64 << 20
#: Rows of a file that are read whole, ahead of being copied. Of smaller ones a page or two is all that is read anyway.
_LARGE_ROW_BYTES = 64 << 10
#: Reads with such advice after one that found pages missing, before another looks whether they are missing still.
_ADVISED_READS = 64

_NOT_WATCHED = nullcontext()


class ColumnFile(NamedTuple):
    """Where a column is; ``name`` is empty for a file that nobody else will see."""

    fd: int
    row_bytes: int
    name: str


def spec_bytes(spec: ColumnSpec) -> int:
    dtype, shape = spec
    return np.dtype(dtype).itemsize * prod(shape)


class ColumnMemory:
    """
    Overview:
        The columns of one table, each ``[capacity, *shape]``, mapped once and sparse. ``path=None`` is private: memory
        when all columns fit in a share of it (cgroup limits count), else unlinked files in the roomiest directory.
    Arguments:
        - capacity (:obj:`int`): Rows.
        - home (:obj:`Optional[TableDirectory]`): Directory of the files; None for private ones.
    """

    def __init__(self, capacity: int, table_dir: Optional[TableDirectory] = None) -> None:
        self.capacity = capacity
        self.row_bytes = 0
        self.columns: Dict[str, Array] = {}
        self._table_dir = table_dir
        self._directory: Optional[str] = None if table_dir is None else table_dir.path
        self._files: Dict[str, ColumnFile] = {}
        self._num_reserved = 0
        #: Rows that the last push asked for.
        self._num_asked = 0
        # Of a directory's files only what is written: what is synced is written to the disk.
        self._toucher = Toucher() if table_dir is None else None
        self._num_advised = 0
        #: What there was before any of the columns was in it.
        self._memory = free_space.available_memory()

    @property
    def sources(self) -> Tuple[Dict[str, Array], Mapping[str, ColdColumn]]:
        """
        ``columns``; and large ones by name, to be read so and not from there, as memory has not all that is wanted now
        and never will.
        """
        columns = self._columns
        if self._num_advised <= 0:
            return columns, {}
        of, cold = self._cold
        return columns, cold if of is columns else {}

    @property
    def columns(self) -> Dict[str, Array]:
        """By slot. Another dict whenever one of them is another."""
        return self._columns

    @columns.setter
    def columns(self, columns: Dict[str, Array]) -> None:
        self._columns = columns
        # Of these columns and no others: they may be replaced while somebody opens their files.
        self._cold: Tuple[Mapping[str, Array], Mapping[str, ColdColumn]] = columns, {}
        self.row_bytes = sum(column.itemsize * prod(column.shape[1:]) for column in columns.values())

    def add(self, specs: Mapping[str, ColumnSpec], num_used: int = 0) -> None:
        """
        Overview:
            Map more columns; their rows are zero. Nothing is added when one of them cannot be.
        Arguments:
            - num_used (:obj:`int`): So many slots at least can be written.
        Raises:
            - NotEnoughSpace: For these, and for the rows reserved so far.
        """
        if self._directory is None and not self.columns:
            self._directory = free_space.private_directory(self.capacity * sum(map(spec_bytes, specs.values())))
        added: Dict[str, Array] = {}
        files: Dict[str, ColumnFile] = {}
        try:
            for name, spec in specs.items():
                added[name] = self._map(name, spec, files)
            # Of columns that were opened nothing is known to be reserved.
            self._reserve(files, 0, max(self._num_reserved, num_used))
        except BaseException:
            self._discard(files)
            raise

        def add() -> None:
            self._files.update(files)
            # A new dict: readers may be going over the old one.
            self.columns = {**self.columns, **added}

        finish(add)

    @property
    def has_files(self) -> bool:
        """Whether a forked process shares what is in the columns."""
        return bool(self._files)

    def take_back(self, names: Iterable[str]) -> None:
        """Have columns no longer that were added last, nor their files."""
        files = {name: self._files.pop(name) for name in names if name in self._files}
        self.columns = {name: array for name, array in self.columns.items() if name not in names}
        self._discard(files)

    def open(self, columns: List[StoredColumn], num_used: int) -> None:
        """
        Overview:
            Map the columns that a directory has.
        Arguments:
            - num_used (:obj:`int`): Slots that hold something: their space is made sure of again, as a copy of a file
              may have holes.
        Raises:
            - NotEnoughSpace: A file has holes, and the disk is full.
        """
        assert self._table_dir is not None
        opened = {}
        for column in columns:
            spec = np.dtype(column.dtype), tuple(column.shape)
            if spec_bytes(spec) * self.capacity:
                fd = private_files.opener(self._table_dir.file(column.file), os.O_RDWR)
                self._files[column.name] = ColumnFile(fd, spec_bytes(spec), column.file)
            opened[column.name] = self._array(column.name, spec)
        self._reserve(self._files, 0, num_used)
        self._num_reserved = num_used
        self.columns = opened

    def stored(self) -> List[StoredColumn]:
        """The columns as a directory's header has them."""
        return [
            StoredColumn(
                name, array.dtype.str, list(array.shape[1:]), self._files[name].name if name in self._files else ''
            )
            for name, array in self.columns.items()
        ]

    def replace(self, name: str, spec: ColumnSpec, convert: Callable[[Array, Array], None], num_used: int) -> None:
        """See ``replacing``."""
        finish(self.replacing(name, spec, convert, num_used))

    def replacing(
        self, name: str, spec: ColumnSpec, convert: Callable[[Array, Array], None], num_used: int
    ) -> Callable[[], None]:
        """
        Overview:
            Keep a column in another way: a new file, complete before what is returned puts it in the old one's place,
            which may be called again.
        Arguments:
            - convert (:obj:`Callable`): (some rows as they were, where to put them as they will be).
            - num_used (:obj:`int`): The slots from this one on hold nothing.
        Raises:
            - NotEnoughSpace: Nothing changed.
        """
        files: Dict[str, ColumnFile] = {}
        try:
            made = self._map(name, spec, files)
            self._reserve(files, 0, max(self._num_reserved, num_used))
            step = max(1, EXTENT_BYTES // max(1, spec_bytes(spec)))
            for start in range(0, num_used, step):
                end = min(num_used, start + step)
                convert(self.columns[name][start:end], made[start:end])
        except BaseException:
            self._discard(files)
            raise

        olds = [self._files[name].fd] if name in self._files else []

        def replace() -> None:
            self._files.update(files)
            self.columns = {**self.columns, name: made}
            while olds:
                os.close(olds.pop())

        return replace

    def drop(self, names: Iterable[str]) -> None:
        """Have these columns no longer. Who holds them may read on."""
        names = set(names)
        self.columns = {name: array for name, array in self.columns.items() if name not in names}
        for name in names & set(self._files):
            os.close(self._files.pop(name).fd)

    def move(self, source: Array, target: Array) -> None:
        """Copy slots to other slots."""
        step = max(1, EXTENT_BYTES // max(1, self.row_bytes))
        for column in self.columns.values():
            for start in range(0, len(source), step):
                column[target[start : start + step]] = column[source[start : start + step]]

    def resizing(self, capacity: int) -> Callable[[int], None]:
        """
        Overview:
            Map more or fewer slots. When what is returned is called, which cannot fail and may be called again, there
            are so many; of these, the first so many as it is told keep what is in them. Files keep their length when
            there are fewer: somebody may be reading, whom a shorter file would kill.
        """
        for file in self._files.values():
            if os.fstat(file.fd).st_size < capacity * file.row_bytes:
                os.ftruncate(file.fd, capacity * file.row_bytes)
        made = {
            name: self._array(name, (column.dtype, column.shape[1:]), capacity=capacity)
            for name, column in self.columns.items()
        }

        def resize(num_used: int) -> None:
            self._stop_touching()
            for name, column in self.columns.items():
                if name not in self._files:
                    made[name][:num_used] = column[:num_used]
            self.capacity, self.columns = capacity, made
            self._num_reserved = min(self._num_reserved, capacity)
            for file in self._files.values():
                _free_from(file.fd, capacity * file.row_bytes)

        return resize

    def sync(self) -> None:
        """Have all bytes of files on the disk."""
        for file in self._files.values():
            os.fdatasync(file.fd)

    def reading(self, slots: Array) -> ContextManager[None]:
        """
        Overview:
            For copies of these slots. Where rows are large and reads find some that memory does not hold, ``sources``
            names the columns of a table that is larger than memory; of another the disk is let read them all at once,
            as a copy alone waits for one stretch of a row after the other.
        """
        is_large = self.row_bytes >= _LARGE_ROW_BYTES and self._directory is not None
        return self._watched(slots) if is_large else _NOT_WATCHED

    @contextmanager
    def _watched(self, slots: Array) -> Iterator[None]:
        # Another thread may be adding columns, or closing files: this is advice, and may come too late.
        files = {name: file for name, file in list(self._files.items()) if file.row_bytes >= _LARGE_ROW_BYTES}
        if not files:
            yield
            return
        _, cold = self.sources
        if self._num_advised > 0:
            self._num_advised -= 1
            if not cold:
                self._advise(files.values(), slots)
        before = _num_disk_faults() + _num_misses(cold)
        yield
        if _num_disk_faults() + _num_misses(cold) > before:
            self._num_advised = _ADVISED_READS
            if not cold and self._is_larger_than_memory():
                self._open_cold(files)

    def _advise(self, files: Iterable[ColumnFile], slots: Array) -> None:
        with suppress(OSError):
            for file in files:
                for slot in slots.tolist():
                    os.posix_fadvise(file.fd, slot * file.row_bytes, file.row_bytes, os.POSIX_FADV_WILLNEED)

    def _is_larger_than_memory(self) -> bool:
        """As far as it has rows: files are sparse."""
        with suppress(OSError):
            return sum(os.fstat(file.fd).st_blocks for file in list(self._files.values())) * 512 > self._memory
        return False

    def _open_cold(self, files: Mapping[str, ColumnFile]) -> None:
        columns = self.columns
        # A file system without direct reads, or a file that is closed by now.
        with suppress(KeyError, OSError):
            self._cold = columns, {name: ColdColumn(columns[name], file.fd) for name, file in files.items()}

    def reserve(self, num_rows: int) -> None:
        """
        Overview:
            Make sure that the first ``num_rows`` slots can be written, and some beyond them, which are touched
            meanwhile if the table is private.
        Raises:
            - NotEnoughSpace: The disk is full; nothing was written.
        """
        pushed, self._num_asked = num_rows - self._num_asked, num_rows
        reserved = self._num_reserved
        if reserved == self.capacity:
            return
        row_bytes = max(1, self.row_bytes)
        step = max(1, EXTENT_BYTES // row_bytes, min(2 * pushed, _MAX_AHEAD_BYTES // row_bytes))
        if num_rows + step // 2 <= reserved:
            return
        ahead = min(self.capacity, num_rows + step)
        try:
            self._reserve(self._files, reserved, ahead)
        except NotEnoughSpace:
            # What one column has beyond them is another's room.
            ahead = max(num_rows, reserved)
            for file in self._files.values():
                _free_from(file.fd, ahead * file.row_bytes)
            self._reserve(self._files, reserved, ahead)
        self._num_reserved = ahead
        if self._toucher is not None:
            self._toucher.touch(self.columns.values(), max(num_rows, reserved), ahead)

    def close(self) -> None:
        """Close the files. Columns stay readable for as long as somebody holds them."""
        self._stop_touching()
        self.drop([*self.columns, *self._files])

    def discard(self) -> None:
        """Be no columns, and no files: of those that nothing names yet."""
        self._stop_touching()
        files, self._files, self.columns = self._files, {}, {}
        self._discard(files)

    def _stop_touching(self) -> None:
        if self._toucher is not None:
            self._toucher.stop()

    def _map(self, name: str, spec: ColumnSpec, files: Dict[str, ColumnFile]) -> Array:
        num_bytes = self.capacity * spec_bytes(spec)
        if num_bytes and self._directory is not None:
            file = self._make_file(spec_bytes(spec), [each.name for each in files.values()])
            files[name] = file
            os.ftruncate(file.fd, num_bytes)
        return self._array(name, spec, files)

    def _array(
        self,
        name: str,
        spec: ColumnSpec,
        files: Optional[Dict[str, ColumnFile]] = None,
        capacity: Optional[int] = None,
    ) -> Array:
        dtype, shape = np.dtype(spec[0]), tuple(spec[1])
        capacity = self.capacity if capacity is None else capacity
        num_bytes = capacity * spec_bytes(spec)
        if num_bytes == 0:
            return np.zeros((capacity, *shape), dtype)
        file = (self._files if files is None else files).get(name)
        region = anonymous(num_bytes) if file is None else mmap.mmap(file.fd, num_bytes)
        return np.frombuffer(region, dtype).reshape((capacity, *shape))

    def _discard(self, files: Dict[str, ColumnFile]) -> None:
        for file in files.values():
            os.close(file.fd)
            if self._table_dir is not None:
                os.unlink(self._table_dir.file(file.name))

    def _make_file(self, row_bytes: int, taken: List[str]) -> ColumnFile:
        if self._table_dir is not None:
            name = self._table_dir.new_column_file(taken)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            return ColumnFile(private_files.opener(self._table_dir.file(name), flags), row_bytes, name)
        assert self._directory is not None
        name = os.path.join(self._directory, f'ding-store-{uuid.uuid4().hex}.column')
        try:
            fd = private_files.opener(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        finally:
            # Also when a signal comes behind the call that made it.
            with suppress(FileNotFoundError):
                os.unlink(name)
        return ColumnFile(fd, row_bytes, '')

    def _reserve(self, files: Mapping[str, ColumnFile], start: int, stop: int) -> None:
        for file in files.values():
            try:
                # Without it a full disk kills the process with SIGBUS in the middle of a copy.
                if stop > start:
                    os.posix_fallocate(file.fd, start * file.row_bytes, (stop - start) * file.row_bytes)
            except OSError as e:
                if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                assert self._directory is not None
                purpose = f'rows {start} to {stop} of a table of {self.capacity}'
                needed = (stop - start) * sum(each.row_bytes for each in files.values())
                raise free_space.not_enough_space(purpose, needed, self._directory) from e


def _num_misses(cold: Mapping[str, ColdColumn]) -> int:
    return sum(column.num_misses for column in cold.values())


def _num_disk_faults() -> int:
    """How often this thread waited for a page that memory did not hold."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _free_from(fd: int, num_bytes: int) -> None:
    """Free the space of what is behind these bytes of a file."""
    size = os.fstat(fd).st_size
    start = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if start < size and hasattr(mmap, 'MADV_REMOVE'):
        # On a file system without holes the space stays taken.
        with suppress(OSError), mmap.mmap(fd, size) as region:
            region.madvise(mmap.MADV_REMOVE, start)
