"""Reads the rows of one segment: from a mapping of its file, or from the disk past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import deque
from concurrent.futures import Future, wait
from typing import Deque, List, NamedTuple, Optional, Tuple

import numpy as np

from ding_store import page_cache, private_files
from ding_store.buffer.array_types import Array, anonymous
from ding_store.buffer.thread_pool import Threads
from ding_store.datasets.segment_log import SegmentLog, read_log
from ding_store.datasets.writer import LOG, ROWS
from ding_store.errors import CorruptPayload, StoreClosed
from ding_store.storage.encoding.checksum import checksum

#: Reads at the same time. A disk needs several to be busy.
NUM_THREADS = 8
#: Rows with at most this many bytes between them are read together, up to this many bytes at once.
_GAP_BYTES, _MAX_READ_BYTES = 4096, 1 << 20
#: The alignments of direct reads, of which a file system accepts one.
_ALIGNMENTS = (512, 4096)

_threads = Threads(NUM_THREADS, 'ding-store-data-set')
_scratch = threading.local()


class Segment:
    """
    Overview:
        One segment of a data set, as it was when it was opened.
    Arguments:
        - path (:obj:`str`): Path of its files, without their endings.
    Raises:
        - CorruptPayload: Its log is damaged, or its file of rows is missing or too short.
        - FormatMismatch: Another version of ding_store wrote it.
    """

    def __init__(self, path: str) -> None:
        self.name = os.path.basename(path)
        self.log: SegmentLog = read_log(path + LOG)
        self.layout = self.log.layout
        self.num_rows = self.log.num_rows
        self.rows_path = path + ROWS
        try:
            self._file = private_files.opener(self.rows_path)
        except FileNotFoundError as error:
            raise CorruptPayload(f'{self.rows_path!r} is missing: segment {self.name} has no rows') from error
        size = os.fstat(self._file).st_size
        if size < self.num_bytes:
            os.close(self._file)
            raise CorruptPayload(
                f'{self.rows_path!r} has {size} bytes, and the log of segment {self.name} says {self.num_bytes}'
            )
        self._records: Optional[Array] = None
        self._direct: Optional[Tuple[int, int]] = None  # descriptor and alignment of direct reads
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.layout.row_bytes

    @property
    def records(self) -> Array:
        """All rows, mapped and read-only."""
        with self._lock:
            if self._file < 0:
                raise StoreClosed(f'the data set of segment {self.name} was closed')
            if self._records is None:
                if not self.num_rows:
                    return np.empty(0, self.layout.record)
                mapped = mmap.mmap(self._file, self.num_bytes, prot=mmap.PROT_READ)
                self._records = np.frombuffer(mapped, self.layout.record)
            return self._records

    def load_ahead(self, first: int, last: int) -> None:
        """Let the kernel read rows ``first`` to ``last`` into the page cache."""
        row_bytes = self.layout.row_bytes
        with self._lock:
            if self._file >= 0:
                page_cache.load(self._file, first * row_bytes, last * row_bytes)

    def read_into(self, rows: Array, records: Array, places: Array) -> None:
        """Copy rows to places of ``records``, from the page cache or through it."""
        # As bytes: numpy copies a row of a structured type field by field.
        kind = np.dtype((np.void, self.layout.row_bytes))
        source, target = self.records.view(kind), records.view(kind)
        if len(places) == len(target) and (places[:1] == 0).all() and (np.diff(places) == 1).all():
            np.take(source, rows, axis=0, out=target, mode='clip')
        else:
            target[places] = source[rows]

    def read_held(self, rows: Array, records: Array, places: Array) -> List[int]:
        """
        Copy those rows to places of ``records`` that are in the page cache, and return the positions of the others. A
        page fault would read what is missing a page at a time, or with megabytes around it that evict other rows.
        """
        missing, row_bytes, preadv, nowait = [], self.layout.row_bytes, os.preadv, os.RWF_NOWAIT
        target = memoryview(records.view(np.uint8).reshape(-1).data)
        starts, offsets = (places * row_bytes).tolist(), (rows * row_bytes).tolist()
        for position, (at, offset) in enumerate(zip(starts, offsets)):
            try:
                if preadv(self._file, [target[at : at + row_bytes]], offset, nowait) < row_bytes:
                    missing.append(position)
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise StoreClosed(f'the data set of segment {self.name} was closed') from error
                missing.append(position)  # It is not there, or the file system cannot tell.
        return missing

    def reads(self, rows: Array, records: Array, places: Array) -> List[DirectRead]:
        """
        Overview:
            Return the direct reads that bring rows to places of ``records``. Rows that are neighbours on the disk are
            read together.
        Arguments:
            - rows (:obj:`np.ndarray`): Ascending.
        """
        descriptor, alignment = self._direct_file()
        row_bytes = self.layout.row_bytes
        begins = rows * row_bytes
        starts = begins // alignment * alignment
        stops = -(-(begins + row_bytes) // alignment) * alignment
        apart = starts[1:] - stops[:-1] > _GAP_BYTES
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)]
        most = max(1, _MAX_READ_BYTES // row_bytes)
        firsts = [at for first, last in zip(edges, edges[1:]) for at in range(first, last, most)]
        lasts = [*firsts[1:], len(rows)]
        sizes = (stops[np.array(lasts) - 1] - starts[firsts]).tolist()
        runs = zip(starts[firsts].tolist(), sizes, firsts, lasts)
        target = memoryview(records.view(np.uint8).reshape(-1).data)
        into = _Target(descriptor, self.rows_path, begins.tolist(), (places * row_bytes).tolist(), row_bytes, target)
        return [(into, *run) for run in runs]

    def _direct_file(self) -> Tuple[int, int]:
        with self._lock:
            if self._file < 0:
                raise StoreClosed(f'the data set of segment {self.name} was closed')
            if self._direct is None:
                self._direct = _opened_direct(self.rows_path)
            return self._direct

    def verify(self) -> None:
        """
        Overview:
            Read all rows, and compare the checksums of their commits.
        Raises:
            - CorruptPayload: A checksum is wrong. The message names the segment and the first such rows.
        """
        first = 0
        for commit in self.log.commits:
            part = self.records[first : first + commit.num_rows].view(np.uint8).reshape(-1)
            if commit.num_rows and checksum([part.data], part.nbytes) != commit.checksum:
                raise CorruptPayload(
                    f'{self.rows_path!r} is damaged: the checksum of its rows {first} to {first + commit.num_rows} is '
                    'wrong'
                )
            first += commit.num_rows

    def close(self) -> None:
        with self._lock:
            self._records = None
            direct, self._direct = self._direct, None
            file, self._file = self._file, -1
        if direct is not None:
            os.close(direct[0])
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        if getattr(self, '_file', -1) >= 0:
            self.close()


class _Target(NamedTuple):
    """The file of some direct reads, the place of each row in it, and its place in the memory for the rows."""

    descriptor: int
    path: str
    begins: List[int]
    places: List[int]
    row_bytes: int
    memory: memoryview


#: One read of rows that are neighbours: its target, where it begins, its size, and the first and last row of it.
DirectRead = Tuple[_Target, int, int, int, int]


def start_reads(reads: List[DirectRead]) -> List[Future]:
    """Start reads, several at a time. Pass the result to ``finish_reads``, before their memory is used again."""
    queue = deque(reads)
    return [_threads.submit(_run_all, queue) for _ in range(min(NUM_THREADS, len(reads)))]


def finish_reads(started: List[Future]) -> None:
    """
    Overview:
        Wait for reads.
    Raises:
        - OSError: The disk could not read.
    """
    wait(started)  # all of them, even if one fails: their memory may be reused after the return
    for part in started:
        part.result()


def _run_all(reads: Deque[DirectRead]) -> None:
    """Run reads until there are none. Plain calls on local names: other threads wait for the interpreter meanwhile."""
    preadv, take = os.preadv, reads.popleft
    while True:
        try:
            (descriptor, path, begins, places, row_bytes, memory), start, size, first, last = take()
        except IndexError:
            return
        bounce = _bounce(size)
        done = preadv(descriptor, [bounce[:size]], start)
        needed = begins[last - 1] + row_bytes - start
        while done < needed:
            num_read = preadv(descriptor, [bounce[done:size]], start + done)
            if num_read == 0:
                raise OSError(errno.EIO, f'{path!r} ends at byte {start + done}')
            done += num_read
        for row in range(first, last):
            at, place = begins[row] - start, places[row]
            memory[place : place + row_bytes] = bounce[at : at + row_bytes]


def _opened_direct(path: str) -> Tuple[int, int]:
    """Return a descriptor for direct reads and their alignment. Some file systems have none: then read as usual."""
    for alignment in _ALIGNMENTS:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break
        try:
            os.preadv(descriptor, [_bounce(alignment)[:alignment]], 0)
        except OSError:
            os.close(descriptor)
        else:
            return descriptor, alignment
    return private_files.opener(path), 1


def _bounce(size: int) -> memoryview:
    """Return page-aligned memory of this thread, of at least ``size`` bytes."""
    found: Optional[memoryview] = getattr(_scratch, 'bounce', None)
    if found is None or len(found) < size:
        found = _scratch.bounce = memoryview(anonymous(max(size, 1 << 16)))
    return found
