"""A writer's ring of payloads: a file of fixed size that many processes map and whose pages are used again.

offset  size
0       8     magic
8       8     ring_bytes
64      8     reserved   \\ positions: bytes since the ring began, never wrapping; those of position p lie at
128     8     committed  /  4096 + p % ring_bytes
192     8     bytes of the note
200     ...   note: JSON that names the ring's owner
4096    ring_bytes

A *region* is contiguous: one that would cross the end begins at the start of the file instead.

Two words guard a region. ``reserved`` advances before its first byte is overwritten, ``committed`` after the last. A
reader reads only committed bytes, copies them, and then reads ``reserved`` again. The copy is good if the writer had
not reached its first byte again by then (``reserved - start <= ring_bytes``). One word, written last, is not enough: a
reader would accept bytes that the writer is just overwriting.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections import deque
from dataclasses import dataclass
from typing import Any, Deque, Dict, Optional

from ding_store import private_files
from ding_store.errors import ConfigError, CorruptPayload
from ding_store.storage.shared_memory.mapped_files import ALIGN, PAGE, Words, aligned, created, map_read_only

MAGIC = b'DSRING\x00\x01'
RESERVED, COMMITTED = 8, 16  # words
_NOTE_AT = 192
_MAX_NOTE = PAGE - _NOTE_AT - 8


@dataclass
class Region:
    """A contiguous place in the ring. Write to ``buffer`` before ``commit``. ``start`` is the position."""

    start: int
    length: int
    buffer: memoryview
    is_released: bool = False

    @property
    def end(self) -> int:
        return self.start + aligned(self.length)


class RingWriter:
    """
    Overview:
        The writing side of a ring. Not thread-safe: reserve, write and commit one region before the next, under the
        owner's lock.
    Arguments:
        - ring_bytes (:obj:`int`): Size of the ring, rounded up to whole pages and allocated on the disk at once.
        - note (:obj:`Dict`): JSON-able description of the owner, for a process that finds the file after the owner's
          exit.
    Raises:
        - NotEnoughSpace: The file system has no room for the ring.
    """

    def __init__(self, path: str, ring_bytes: int, note: Optional[Dict[str, Any]] = None) -> None:
        if ring_bytes < 1:
            raise ConfigError(f'ring_bytes ({ring_bytes}) must be >= 1')
        self.path = path
        self.name = os.path.basename(path).split('.')[0]
        self.ring_bytes = aligned(ring_bytes, PAGE)
        text = json.dumps(note or {}).encode()
        if len(text) > _MAX_NOTE:
            raise ConfigError(f'the note of a ring has {len(text)} bytes; at most {_MAX_NOTE} fit')
        with created(path, PAGE + self.ring_bytes) as (mapping, self._claim):
            struct.pack_into('<8sQ', mapping, 0, MAGIC, self.ring_bytes)
            struct.pack_into(f'<Q{len(text)}s', mapping, _NOTE_AT, len(text), text)
        self._data = memoryview(mapping)[PAGE:]
        self._words = Words(mapping, path)
        self._head = 0  # where the next region may begin
        self._tail = 0  # bytes before it may be overwritten
        self._regions: Deque[Region] = deque()
        self._pid = os.getpid()

    @property
    def free_bytes(self) -> int:
        """Bytes that are free for regions. The largest contiguous region may be smaller."""
        return self.ring_bytes - (self._head - self._tail)

    @property
    def newest(self) -> Optional[Region]:
        return self._regions[-1] if self._regions else None

    @property
    def num_held(self) -> int:
        return len(self._regions)

    def reserve(self, length: int) -> Optional[Region]:
        """Return a region to write to, or None while there is no room for it."""
        start = self._start_of(length)
        end = start + aligned(length)
        if not self._regions:
            self._tail = start  # The bytes skipped at the end of an empty ring are free.
        if end - self._tail > self.ring_bytes:
            return None
        # First this word, then the first byte: a reader of the old bytes must be able to notice.
        self._announce_reserved(end)
        at = start % self.ring_bytes
        region = Region(start, length, self._data[at : at + length])
        self._head = end  # Set first: a signal in between leaves a gap instead of two regions in one place.
        self._regions.append(region)
        return region

    def commit(self, region: Region) -> None:
        """Mark the newest region as completely written."""
        self._words[COMMITTED] = region.end

    def release(self, region: Region) -> None:
        """Give a region's bytes back. Space becomes free in the order in which it was reserved."""
        region.is_released = True
        while self._regions and self._regions[0].is_released:
            self._tail = self._regions.popleft().end

    def close(self, unlink: bool = True) -> None:
        """Release the file and, by default, remove it. Mappings of readers stay valid."""
        if unlink and self._pid == os.getpid():
            # The cache directory was deleted, or is no longer ours: then the file stays.
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._claim.close()

    def _start_of(self, length: int) -> int:
        at = self._head % self.ring_bytes
        fits = at + length <= self.ring_bytes
        return self._head if fits else self._head + self.ring_bytes - at

    def _announce_reserved(self, end: int) -> None:
        self._words[RESERVED] = end


class RingReader:
    """
    Overview:
        A read-only mapping of a ring. Thread-safe. Views stay valid after ``close`` and after the file is removed.
    Raises:
        - FileNotFoundError: The file is gone.
        - CorruptPayload: The file is not a ring.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, 'rb', opener=private_files.opener) as file:
            mapping = map_read_only(file.fileno(), MAGIC, path)
        self.ring_bytes: int = struct.unpack_from('<Q', mapping, 8)[0]
        if not self.ring_bytes or PAGE + self.ring_bytes != len(mapping):
            raise CorruptPayload(f'{path!r} is a ring of {self.ring_bytes} bytes in a file of {len(mapping)}')
        self._data = memoryview(mapping)[PAGE:].toreadonly()
        self._words = Words(mapping, path)

    @property
    def committed(self) -> int:
        return self._words[COMMITTED]

    def view(self, start: int, length: int) -> memoryview:
        """
        Overview:
            Return the bytes of a region in place. Use them, then call ``is_valid``.
        Raises:
            - CorruptPayload: No such region was ever committed.
        """
        at = start % self.ring_bytes if start >= 0 else 0
        if start < 0 or start % ALIGN or not 0 <= length <= self.ring_bytes - at or start + length > self.committed:
            raise CorruptPayload(f'{self.path!r} holds no {length} bytes at {start}')
        return self._data[at : at + length]

    def is_valid(self, start: int) -> bool:
        """Return whether the bytes read so far of the region at ``start`` are those that were committed there."""
        return self._words[RESERVED] - start <= self.ring_bytes


def read_note(path: str) -> Dict[str, Any]:
    """Return the note of a ring, whose writer may have exited, or {} if the file has none."""
    with open(path, 'rb', opener=private_files.opener) as file:
        head = file.read(PAGE)
    if len(head) < PAGE or not head.startswith(MAGIC):
        return {}
    (size,) = struct.unpack_from('<Q', head, _NOTE_AT)
    try:
        note = json.loads(head[_NOTE_AT + 8 : _NOTE_AT + 8 + size])
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}
