"""Memory of the columns: anonymous memory, or sparse files whose space is reserved before it is written."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import uuid
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from typing import Callable, ContextManager, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from ding_store import free_space, private_files
from ding_store.buffer.array_types import Array, anonymous
from ding_store.buffer.interrupts import finish
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.persistence.table_header import StoredColumn
from ding_store.buffer.table.cold import ColdColumn
from ding_store.buffer.table.page_touching import Toucher
from ding_store.buffer.table.specs import ColumnSpec, spec_bytes
from ding_store.errors import NotEnoughSpace

#: Step in which space is reserved. Reserving 64 MiB took 33 ms on tmpfs and 0.3-8 ms on ext4. On tmpfs the first touch
#: became shorter by as much: 60 + 33 ms, against 101-135 ms without a reservation.
EXTENT_BYTES = 16 << 20
#: Upper limit of a step of two pushes, which is used if two pushes are larger than ``EXTENT_BYTES``.
_MAX_AHEAD_BYTES = 64 << 20
#: Rows of at least this size are prefetched from a file before a copy. A smaller row needs only a page or two anyway.
_LARGE_ROW_BYTES = 64 << 10
#: Number of prefetched reads after a read found pages missing. The next read checks again without prefetching.
_ADVISED_READS = 64

_NOT_WATCHED = nullcontext()


class ColumnFile(NamedTuple):
    """The file of a column. ``name`` is empty if the file is unlinked."""

    fd: int
    row_bytes: int
    name: str


class ColumnMemory:
    """
    Overview:
        The columns of one table, each ``[capacity, *shape]``, mapped once and sparse. With ``table_dir=None`` they are
        private. Private columns are in anonymous memory if all fit in a share of it, and cgroup limits count. Otherwise
        they are in unlinked files, in the directory with the most free space.
    Arguments:
        - capacity (:obj:`int`): The number of rows.
        - table_dir (:obj:`Optional[TableDirectory]`): Directory of the files, or None for private columns.
    """

    def __init__(self, capacity: int, table_dir: Optional[TableDirectory] = None) -> None:
        self.capacity = capacity
        self.row_bytes = 0
        self.columns: Dict[str, Array] = {}
        self._table_dir = table_dir
        self._directory: Optional[str] = None if table_dir is None else table_dir.path
        self._files: Dict[str, ColumnFile] = {}
        self._num_reserved = 0
        #: Number of slots that the last ``reserve`` requested.
        self._num_asked = 0
        # No touching ahead in a table directory: every touched page would be written to the disk by the next sync.
        self._toucher = Toucher() if table_dir is None else None
        self._num_advised = 0
        #: Memory available before the first column used any.
        self._memory = free_space.available_memory()

    @property
    def sources(self) -> Tuple[Dict[str, Array], Mapping[str, ColdColumn]]:
        """
        ``columns``, and large columns by name that must be read through direct reads at present. This is so if recent
        reads found pages missing and the table is larger than memory.
        """
        columns = self._columns
        if self._num_advised <= 0:
            return columns, {}
        of, cold = self._cold
        return columns, cold if of is columns else {}

    @property
    def columns(self) -> Dict[str, Array]:
        """The columns, indexed by slot. A new dict whenever a column is replaced."""
        return self._columns

    @columns.setter
    def columns(self, columns: Dict[str, Array]) -> None:
        self._columns = columns
        # Tied to these columns: they may be replaced while another thread opens their files.
        self._cold: Tuple[Mapping[str, Array], Mapping[str, ColdColumn]] = columns, {}
        self.row_bytes = sum(column.itemsize * prod(column.shape[1:]) for column in columns.values())

    def add(self, specs: Mapping[str, ColumnSpec], num_used: int = 0) -> None:
        """
        Overview:
            Map more columns, with rows of zeros. If one of them fails, none is added.
        Arguments:
            - num_used (:obj:`int`): The number of slots that must be writable.
        Raises:
            - NotEnoughSpace: There is no space for the reserved rows of these columns.
        """
        if self._directory is None and not self.columns:
            self._directory = free_space.private_directory(self.capacity * sum(map(spec_bytes, specs.values())))
        added: Dict[str, Array] = {}
        files: Dict[str, ColumnFile] = {}
        try:
            for name, spec in specs.items():
                added[name] = self._map(name, spec, files)
            # Reserve from slot 0: the new files have no reserved space yet.
            self._reserve(files, 0, max(self._num_reserved, num_used))
        except BaseException:
            self._discard(files)
            raise

        def add() -> None:
            self._files.update(files)
            # Build a new dict, because readers may be iterating over the old one.
            self.columns = {**self.columns, **added}

        finish(add)

    @property
    def has_files(self) -> bool:
        """True if forked processes share the contents of the columns."""
        return bool(self._files)

    def take_back(self, names: Iterable[str]) -> None:
        """Undo ``add``: remove these columns and their files."""
        files = {name: self._files.pop(name) for name in names if name in self._files}
        self.columns = {name: array for name, array in self.columns.items() if name not in names}
        self._discard(files)

    def open(self, columns: List[StoredColumn], num_used: int) -> None:
        """
        Overview:
            Map the columns of an existing directory.
        Arguments:
            - num_used (:obj:`int`): Number of slots that may hold rows. Their space is reserved again, because a copied
              file may have holes.
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
        """Return the columns in the form of a directory's header."""
        return [
            StoredColumn(
                name, array.dtype.str, list(array.shape[1:]), self._files[name].name if name in self._files else ''
            )
            for name, array in self.columns.items()
        ]

    def replacing(
        self, name: str, spec: ColumnSpec, convert: Callable[[Array, Array], None], num_used: int
    ) -> Callable[[], None]:
        """
        Overview:
            Convert a column into a new file. The new file is complete when this returns. The returned function replaces
            the old column by the new one. It may be called again.
        Arguments:
            - convert (:obj:`Callable`): Called with some rows of the old column, and with their places in the new one.
            - num_used (:obj:`int`): Slots from this one on hold nothing.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
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
        """Remove these columns. Readers that hold their arrays can continue to read them."""
        names = set(names)
        self.columns = {name: array for name, array in self.columns.items() if name not in names}
        for name in names & set(self._files):
            os.close(self._files.pop(name).fd)

    def move(self, source: Array, target: Array) -> None:
        """Copy ``source`` slots to ``target`` slots."""
        step = max(1, EXTENT_BYTES // max(1, self.row_bytes))
        for column in self.columns.values():
            for start in range(0, len(source), step):
                column[target[start : start + step]] = column[source[start : start + step]]

    def resizing(self, capacity: int) -> Callable[[int], None]:
        """
        Overview:
            Map more or fewer slots. The returned function makes them the columns, and keeps the contents of the first
            ``num_used`` slots. It cannot fail and may be called again. Files are not truncated: a reader of a truncated
            page would be killed by SIGBUS.
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
        """Write all bytes of the files to the disk."""
        for file in self._files.values():
            os.fdatasync(file.fd)

    def reading(self, slots: Array) -> ContextManager[None]:
        """
        Overview:
            Return a context for a copy of these slots. If rows are large and reads find pages missing, it prepares
            later reads. If the table is larger than memory, ``sources`` then names its columns for direct reads.
            Otherwise the kernel prefetches all rows at once, because a plain copy waits for one stretch of a row after
            the other.
        """
        is_large = self.row_bytes >= _LARGE_ROW_BYTES and self._directory is not None
        return self._watched(slots) if is_large else _NOT_WATCHED

    @contextmanager
    def _watched(self, slots: Array) -> Iterator[None]:
        # Another thread may add columns or close files meanwhile. The prefetch is only advice and may come too late.
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
        """
        Return whether the space that the files use exceeds the memory. Files are sparse: unused rows do not count.
        """
        with suppress(OSError):
            return sum(os.fstat(file.fd).st_blocks for file in list(self._files.values())) * 512 > self._memory
        return False

    def _open_cold(self, files: Mapping[str, ColumnFile]) -> None:
        columns = self.columns
        # Fails if the file system has no direct reads, or if the file is closed by now.
        with suppress(KeyError, OSError):
            self._cold = columns, {name: ColdColumn(columns[name], file.fd) for name, file in files.items()}

    def reserve(self, num_rows: int) -> None:
        """
        Overview:
            Make the first ``num_rows`` slots writable, and some slots beyond them. A thread touches the latter in
            advance if the table is private.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing was written.
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
            # Free what each column has reserved in advance, to make room for the others.
            ahead = max(num_rows, reserved)
            for file in self._files.values():
                _free_from(file.fd, ahead * file.row_bytes)
            self._reserve(self._files, reserved, ahead)
        self._num_reserved = ahead
        if self._toucher is not None:
            self._toucher.touch(self.columns.values(), max(num_rows, reserved), ahead)

    def close(self) -> None:
        """Close the files. Readers that hold the arrays can continue to read them."""
        self._stop_touching()
        self.drop([*self.columns, *self._files])

    def discard(self) -> None:
        """Delete columns and files that no header names yet."""
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
            # Unlink it even if a signal arrives right after the call that created the file.
            with suppress(FileNotFoundError):
                os.unlink(name)
        return ColumnFile(fd, row_bytes, '')

    def _reserve(self, files: Mapping[str, ColumnFile], start: int, stop: int) -> None:
        for file in files.values():
            try:
                # Without a reservation a full disk kills the process by SIGBUS in the middle of a copy.
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
    """Return how often this thread waited for a page that was not in memory."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _free_from(fd: int, num_bytes: int) -> None:
    """Free the space of a file beyond ``num_bytes``, rounded up to a page. The length stays."""
    size = os.fstat(fd).st_size
    start = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if start < size and hasattr(mmap, 'MADV_REMOVE'):
        # Without support for holes in the file system, the space stays in use.
        with suppress(OSError), mmap.mmap(fd, size) as region:
            region.madvise(mmap.MADV_REMOVE, start)
