"""Files of columns: sparse, and private ones without a name. Their space is reserved before it is written."""

from __future__ import annotations

import errno
import mmap
import os
import uuid
from contextlib import suppress
from typing import List, NamedTuple, Optional

from ding_store import private_files
from ding_store.buffer.persistence.table_directory import TableDirectory


class ColumnFile(NamedTuple):
    """The file of a column. ``name`` is empty if the file is unlinked."""

    fd: int
    row_bytes: int
    name: str

    def lengthen(self, num_rows: int) -> None:
        """Make the file long enough for this many rows, without using space."""
        if os.fstat(self.fd).st_size < num_rows * self.row_bytes:
            os.ftruncate(self.fd, num_rows * self.row_bytes)

    def reserve(self, start: int, stop: int) -> bool:
        """
        Reserve the space of these rows. Return False if there is no space. Without a reservation a full disk kills the
        process by SIGBUS in the middle of a copy.
        """
        try:
            if stop > start:
                os.posix_fallocate(self.fd, start * self.row_bytes, (stop - start) * self.row_bytes)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return False
        return True

    def free_from(self, row: int) -> None:
        """Free the space from this row on, rounded up to a page. The length stays."""
        size = os.fstat(self.fd).st_size
        start = -(-row * self.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < size and hasattr(mmap, 'MADV_REMOVE'):
            # Without support for holes in the file system, the space stays in use.
            with suppress(OSError), mmap.mmap(self.fd, size) as region:
                region.madvise(mmap.MADV_REMOVE, start)


class ColumnFiles:
    """
    Overview:
        Creates and deletes the files of columns.
    Arguments:
        - table_dir (:obj:`Optional[TableDirectory]`): The table's directory, or None for files without a name.
        - directory (:obj:`Optional[str]`): Where the files are. None: columns are in memory, without files.
    """

    def __init__(self, table_dir: Optional[TableDirectory], directory: Optional[str]) -> None:
        self.table_dir, self.directory = table_dir, directory

    def open(self, name: str, row_bytes: int) -> ColumnFile:
        """Open a file of the table's directory."""
        assert self.table_dir is not None
        return ColumnFile(private_files.opener(self.table_dir.file(name), os.O_RDWR), row_bytes, name)

    def create(self, row_bytes: int, taken: List[str]) -> ColumnFile:
        """Create an empty file. ``taken`` are names of files that no header names yet."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        if self.table_dir is not None:
            name = self.table_dir.new_column_file(taken)
            return ColumnFile(private_files.opener(self.table_dir.file(name), flags), row_bytes, name)
        assert self.directory is not None
        name = os.path.join(self.directory, f'ding-store-{uuid.uuid4().hex}.column')
        try:
            fd = private_files.opener(name, flags)
        finally:
            # Unlink it even if a signal arrives right after the call that created the file.
            with suppress(FileNotFoundError):
                os.unlink(name)
        return ColumnFile(fd, row_bytes, '')

    def delete(self, file: ColumnFile) -> None:
        os.close(file.fd)
        if self.table_dir is not None:
            os.unlink(self.table_dir.file(file.name))
