"""Preparation of reads from a disk: rows that are not in memory are prefetched, or read past the page cache."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager, suppress
from typing import Dict, Iterable, Iterator, Mapping, Tuple

from ding_store import free_space
from ding_store.buffer.array_types import Array
from ding_store.buffer.table.cold import ColdColumn
from ding_store.buffer.table.column_files import ColumnFile

#: Rows of at least this size are prefetched from a file before a copy. A smaller row needs only a page or two anyway.
LARGE_ROW_BYTES = 64 << 10
#: Number of prefetched reads after a read found pages missing. The next read checks again without prefetching.
_ADVISED_READS = 64


class DiskReads:
    """
    Overview:
        Watches reads of large rows in files. If reads find pages missing, it prepares later reads. If the table is
        larger than memory, ``cold`` then names its columns for direct reads. Otherwise the kernel prefetches all rows
        at once, because a plain copy waits for one stretch of a row after the other.
    Arguments:
        - files (:obj:`Dict`): The files of the columns by name. They may change.
    """

    def __init__(self, files: Dict[str, ColumnFile]) -> None:
        self._files = files
        self._num_advised = 0
        # With the columns to which they belong: these may be replaced while another thread opens their files.
        self._cold: Tuple[Mapping[str, Array], Mapping[str, ColdColumn]] = {}, {}
        #: Memory available before the first column used any.
        self._memory = free_space.available_memory()

    def cold(self, columns: Mapping[str, Array]) -> Mapping[str, ColdColumn]:
        """Return large columns by name that must be read through direct reads at present."""
        if self._num_advised <= 0:
            return {}
        of, cold = self._cold
        return cold if of is columns else {}

    def forget(self) -> None:
        """Release the columns, because they were replaced."""
        self._cold = {}, {}

    @contextmanager
    def watched(self, columns: Mapping[str, Array], slots: Array) -> Iterator[None]:
        """Return a context for a copy of these slots."""
        # Another thread may add columns or close files meanwhile. The prefetch is only advice and may come too late.
        files = {name: file for name, file in list(self._files.items()) if file.row_bytes >= LARGE_ROW_BYTES}
        if not files:
            yield
            return
        cold = self.cold(columns)
        if self._num_advised > 0:
            self._num_advised -= 1
            if not cold:
                self._advise(files.values(), slots)
        before = _num_disk_faults() + _num_misses(cold)
        yield
        if _num_disk_faults() + _num_misses(cold) > before:
            self._num_advised = _ADVISED_READS
            if not cold and self._is_larger_than_memory():
                self._open_cold(columns, files)

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

    def _open_cold(self, columns: Mapping[str, Array], files: Mapping[str, ColumnFile]) -> None:
        # Fails if the file system has no direct reads, or if the file is closed by now.
        with suppress(KeyError, OSError):
            self._cold = columns, {name: ColdColumn(columns[name], file.fd) for name, file in files.items()}


def _num_misses(cold: Mapping[str, ColdColumn]) -> int:
    return sum(column.num_misses for column in cold.values())


def _num_disk_faults() -> int:
    """Return how often this thread waited for a page that was not in memory."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
