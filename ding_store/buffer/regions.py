"""Where the columns' bytes are: anonymous memory, or sparse files whose space is reserved before it is written."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
from math import prod
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from ding_store.buffer import space
from ding_store.buffer.arrays import Array
from ding_store.errors import ConfigError, NotEnoughSpace

logger = logging.getLogger(__name__)

#: What one element has in a column: its dtype and shape.
ColumnSpec = Tuple[np.dtype[Any], Tuple[int, ...]]

#: Space is reserved in steps of about this much: small enough to be quick (14 ms on tmpfs), large enough to be rare.
EXTENT_BYTES = 64 << 20


def spec_bytes(spec: ColumnSpec) -> int:
    dtype, shape = spec
    return np.dtype(dtype).itemsize * prod(shape)


class Regions:
    """
    Overview:
        The columns of one table, each ``[capacity, *shape]``, mapped once and sparse. ``path=None`` is private: memory
        when all columns fit in a share of it (cgroup limits count), else unlinked files in the roomiest directory.
    Arguments:
        - capacity (:obj:`int`): Rows.
        - path (:obj:`Optional[str]`): Directory of the files; made if there is none, and must hold no table yet.
    Raises:
        - ConfigError: The directory holds a table.
    """

    def __init__(self, capacity: int, path: Optional[str] = None) -> None:
        self.capacity = capacity
        self.columns: Dict[str, Array] = {}
        self._path = path
        self._directory: Optional[str] = None
        self._files: List[Tuple[int, int]] = []  # (descriptor, bytes per row)
        self._num_reserved = 0
        if path is not None:
            self._directory = _make_directory(path)

    @property
    def row_bytes(self) -> int:
        return sum(column.itemsize * prod(column.shape[1:]) for column in self.columns.values())

    def add(self, specs: Mapping[str, ColumnSpec]) -> None:
        """
        Overview:
            Map more columns; their rows are zero. Nothing is added when one of them cannot be.
        Raises:
            - NotEnoughSpace: For the rows reserved so far.
        """
        if self._directory is None and self._path is None and not self.columns:
            self._directory = _private_directory(self.capacity * sum(map(spec_bytes, specs.values())))
        added: Dict[str, Array] = {}
        files: List[Tuple[int, int]] = []
        try:
            for name, spec in specs.items():
                added[name] = self._map(len(self.columns) + len(added), spec, files)
            self._reserve(files, 0, self._num_reserved)
        except BaseException:
            self._discard(len(self.columns), len(self.columns) + len(specs), files)
            raise
        self._files += files
        # A new dict: readers may be going over the old one.
        self.columns = {**self.columns, **added}

    def reserve(self, num_rows: int) -> None:
        """
        Overview:
            Make sure that the first ``num_rows`` slots can be written, and some beyond them.
        Raises:
            - NotEnoughSpace: The disk is full; nothing was written.
        """
        if num_rows <= self._num_reserved or not self._files:
            return
        step = max(1, EXTENT_BYTES // max(1, self.row_bytes))
        ahead = min(self.capacity, max(num_rows, self._num_reserved + step))
        try:
            self._reserve(self._files, self._num_reserved, ahead)
        except NotEnoughSpace:
            ahead = num_rows
            self._reserve(self._files, self._num_reserved, ahead)
        self._num_reserved = ahead

    def close(self) -> None:
        """Close the files. Columns stay readable for as long as somebody holds them."""
        for fd, _ in self._files:
            os.close(fd)
        self._files = []
        self.columns = {}

    def clear(self) -> None:
        """Have no columns and no files."""
        self.close()
        if self._path is None:
            self._directory = None
        else:
            for name in _column_files(self._path):
                os.unlink(name)
        self._num_reserved = 0

    def _map(self, number: int, spec: ColumnSpec, files: List[Tuple[int, int]]) -> Array:
        dtype, shape = np.dtype(spec[0]), tuple(spec[1])
        num_bytes = self.capacity * spec_bytes(spec)
        if num_bytes == 0:
            return np.zeros((self.capacity, *shape), dtype)
        if self._directory is None:
            region = _anonymous(num_bytes)
        else:
            fd = self._open(number)
            files.append((fd, spec_bytes(spec)))
            os.ftruncate(fd, num_bytes)
            region = mmap.mmap(fd, num_bytes)
        return np.frombuffer(region, dtype).reshape((self.capacity, *shape))

    def _discard(self, start: int, stop: int, files: List[Tuple[int, int]]) -> None:
        for fd, _ in files:
            os.close(fd)
        if self._path is not None:
            for number in range(start, stop):
                if os.path.exists(self._file_name(number)):
                    os.unlink(self._file_name(number))

    def _file_name(self, number: int) -> str:
        assert self._directory is not None
        return os.path.join(self._directory, f'{number:03d}.column')

    def _open(self, number: int) -> int:
        if self._path is not None:
            return os.open(self._file_name(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fd, name = tempfile.mkstemp(prefix='ding-store-', suffix='.column', dir=self._directory)
        os.unlink(name)
        return fd

    def _reserve(self, files: List[Tuple[int, int]], start: int, stop: int) -> None:
        for fd, row_bytes in files:
            try:
                # Without it a full disk kills the process with SIGBUS in the middle of a copy.
                if stop > start:
                    os.posix_fallocate(fd, start * row_bytes, (stop - start) * row_bytes)
            except OSError as e:
                if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                assert self._directory is not None
                purpose = f'rows {start} to {stop} of a table of {self.capacity}'
                needed = (stop - start) * sum(each for _, each in files)
                raise space.not_enough_space(purpose, needed, self._directory) from e


def _anonymous(num_bytes: int) -> mmap.mmap:
    # Private: forked environment workers and data loaders see the rows of the moment of the fork.
    # No reserve: the kernel would refuse a sparse table larger than its memory, though few of its pages be used.
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    if hasattr(mmap, 'MADV_HUGEPAGE'):
        try:
            # Random rows of a large table miss the TLB at every one of its small pages.
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # A kernel without huge pages.
    return region


def _private_directory(num_bytes: int) -> Optional[str]:
    """None for memory, else a directory for files that nobody else will see."""
    memory = space.available_memory()
    if num_bytes <= memory * space.MEMORY_SHARE:
        return None
    directory = space.roomiest_directory()
    free = space.free_space(directory)
    if num_bytes > free:
        logger.warning(
            'a full table takes %s, but memory has %s and %s has %s free: it can never be full. Use a smaller size.',
            *(space.format_bytes(num_bytes), space.format_bytes(memory), directory, space.format_bytes(free)),
        )
    return directory


def _make_directory(path: str) -> str:
    directory = os.path.abspath(path)
    os.makedirs(directory, exist_ok=True)
    if _column_files(directory):
        raise ConfigError(f'path ({path!r}) already holds a table; name another directory or remove it')
    return directory


def _column_files(directory: str) -> List[str]:
    return [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith('.column')]
