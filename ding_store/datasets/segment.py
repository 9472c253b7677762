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
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.thread_pool import Threads
from ding_store.datasets.segment_log import SegmentLog, read_log
from ding_store.datasets.writer import ITEMS, LOG, ROWS
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


class _File:
    """
    An open file. Its last user closes it: if a reader still used a closed descriptor, it could read another file, which
    was opened meanwhile and got the same number.
    """

    def __init__(self, descriptor: int, alignment: int = 1) -> None:
        self.descriptor, self.alignment = descriptor, alignment

    def __del__(self) -> None:
        os.close(self.descriptor)


class Segment:
    """
    Overview:
        One segment of a data set, as it was when it was opened.
    Arguments:
        - path (:obj:`str`): Path of its files, without their endings.
    Raises:
        - CorruptPayload: Its log is damaged, or another of its files is missing or too short.
        - FormatMismatch: Another version of ding_store wrote it.
    """

    def __init__(self, path: str) -> None:
        self.name = os.path.basename(path)
        self.log: SegmentLog = read_log(path + LOG)
        self.layout = self.log.layout
        self.num_rows = self.log.num_rows
        self.rows_path, self._items_path = path + ROWS, path + ITEMS
        #: Bytes of the items of ragged leaves.
        self.item_bytes = self.log.item_bytes
        self._records: Optional[Array] = None
        self._items: Optional[Array] = None
        self._file: Optional[_File] = self._opened(self.rows_path, self.num_bytes)  # None: it was closed
        self._items_file = self._opened(self._items_path, self.item_bytes) if self.layout.schema.ragged else None
        self._direct: Optional[_File] = None  # for direct reads
        #: Flag of reads from the page cache alone. None: there are no such reads here.
        self._nowait: Optional[int] = getattr(os, 'RWF_NOWAIT', None)
        self._lock = hold_over_forks(threading.Lock())

    def _opened(self, path: str, num_bytes: int) -> _File:
        try:
            file = _File(private_files.opener(path))
        except FileNotFoundError as error:
            raise CorruptPayload(f'{path!r} is missing: segment {self.name} has no rows') from error
        size = os.fstat(file.descriptor).st_size
        if size < num_bytes:
            raise CorruptPayload(f'{path!r} has {size} bytes, and the log of segment {self.name} says {num_bytes}')
        return file

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.layout.row_bytes

    @property
    def reads_cache(self) -> bool:
        """False if rows cannot be read from the page cache alone, as a read has shown."""
        return self._nowait is not None

    @property
    def records(self) -> Array:
        """All rows, mapped and read-only."""
        with self._lock:
            file = self._checked_file()
            if self._records is None:
                if not self.num_rows:
                    return np.empty(0, self.layout.record)
                mapped = mmap.mmap(file.descriptor, self.num_bytes, prot=mmap.PROT_READ)
                self._records = np.frombuffer(mapped, self.layout.record)
            return self._records

    def items(self, places: Array, lengths: Array, size: int, is_direct: bool) -> List[Array]:
        """
        Overview:
            Return the bytes of items at these places, as read-only views of the file. ``is_direct``: begin to read all
            of them from the disk first, since page faults would read them one after another.
        Arguments:
            - lengths (:obj:`np.ndarray`): Number of items at each place.
            - size (:obj:`int`): Bytes of an item.
        Raises:
            - CorruptPayload: A place is beyond the end of the items.
        """
        is_wrong = (places < 0) | (places > self.item_bytes) | (lengths < 0)
        if size:  # A damaged length times the size may be more than an integer holds.
            is_wrong |= lengths > (self.item_bytes - places) // size
        if is_wrong.any():
            raise CorruptPayload(f'segment {self.name} is damaged: {self.rows_path!r} names items that do not exist')
        ends = (places + lengths * size).tolist()
        with self._lock:
            self._checked_file()
            file = self._items_file
            if self._items is None:
                self._items = np.empty(0, np.uint8)
                if file is not None and self.item_bytes:
                    mapped = mmap.mmap(file.descriptor, self.item_bytes, prot=mmap.PROT_READ)
                    self._items = np.frombuffer(mapped, np.uint8)
            mapped_items = self._items
        pairs = list(zip(places.tolist(), ends))
        if is_direct and file is not None:
            for begin, end in pairs:
                page_cache.load(file.descriptor, begin, end)
        return [mapped_items[begin:end] for begin, end in pairs]

    def load_ahead(self, first: int, last: int) -> None:
        """Let the kernel read rows ``first`` to ``last`` into the page cache."""
        row_bytes, file = self.layout.row_bytes, self._file
        if file is not None:
            page_cache.load(file.descriptor, first * row_bytes, last * row_bytes)

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
        with self._lock:
            file, nowait = self._checked_file(), self._nowait
        if nowait is None:
            return list(range(len(rows)))
        missing, row_bytes, preadv, descriptor = [], self.layout.row_bytes, os.preadv, file.descriptor
        target = memoryview(records.view(np.uint8).reshape(-1).data)
        starts, offsets = (places * row_bytes).tolist(), (rows * row_bytes).tolist()
        for position, (at, offset) in enumerate(zip(starts, offsets)):
            try:
                if preadv(descriptor, [target[at : at + row_bytes]], offset, nowait) < row_bytes:
                    missing.append(position)
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:  # for example on tmpfs
                    self._nowait = None
                    return [*missing, *range(position, len(rows))]
                missing.append(position)
        return missing

    def reads(self, rows: Array, records: Array, places: Array) -> List[DirectRead]:
        """
        Overview:
            Return the direct reads that bring rows to places of ``records``. Rows that are neighbours on the disk are
            read together.
        Arguments:
            - rows (:obj:`np.ndarray`): Ascending.
        """
        file = self._direct_file()
        row_bytes, alignment = self.layout.row_bytes, file.alignment
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
        into = _Target(file, self.rows_path, begins.tolist(), (places * row_bytes).tolist(), row_bytes, target)
        return [(into, *run) for run in runs]

    def _checked_file(self) -> _File:
        if self._file is None:
            raise StoreClosed(f'the data set of segment {self.name} was closed')
        return self._file

    def _direct_file(self) -> _File:
        with self._lock:
            self._checked_file()
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
        first = items_at = 0
        for commit in self.log.commits:
            if commit.item_bytes:
                found = self.items(np.array([items_at]), np.array([commit.item_bytes]), 1, False)[0]
                if checksum([found.data], found.nbytes) != commit.item_checksum:
                    raise CorruptPayload(
                        f'{self._items_path!r} is damaged: the checksum of the items of rows {first} to '
                        f'{first + commit.num_rows} is wrong'
                    )
                items_at += commit.item_bytes
            part = self.records[first : first + commit.num_rows].view(np.uint8).reshape(-1)
            if commit.num_rows and checksum([part.data], part.nbytes) != commit.checksum:
                raise CorruptPayload(
                    f'{self.rows_path!r} is damaged: the checksum of its rows {first} to {first + commit.num_rows} is '
                    'wrong'
                )
            first += commit.num_rows

    def close(self) -> None:
        """Refuse further reads. Those that run now end as usual."""
        with self._lock:
            self._records = self._direct = self._file = self._items = self._items_file = None


class _Target(NamedTuple):
    """The file of some direct reads, the place of each row in it, and its place in the memory for the rows."""

    file: _File
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
            (file, path, begins, places, row_bytes, memory), start, size, first, last = take()
        except IndexError:
            return
        bounce, descriptor = _bounce(size), file.descriptor
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


def _opened_direct(path: str) -> _File:
    """Open a file for direct reads. If its file system has none, open it for usual ones."""
    for alignment in _ALIGNMENTS:
        try:
            file = _File(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW), alignment)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break
        try:
            os.preadv(file.descriptor, [_bounce(alignment)[:alignment]], 0)
        except OSError:
            continue
        return file
    return _File(private_files.opener(path))


def _bounce(size: int) -> memoryview:
    """Return page-aligned memory of this thread, of at least ``size`` bytes."""
    found: Optional[memoryview] = getattr(_scratch, 'bounce', None)
    if found is None or len(found) < size:
        found = _scratch.bounce = memoryview(anonymous(max(size, 1 << 16)))
    return found
