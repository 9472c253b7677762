"""A writer's rings of one stream: the newest, which it writes to, and smaller ones with entries that are not acked."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import numpy as np

from ding_store.compiled import is_far, join_past_caches
from ding_store.errors import StoreTimeout
from ding_store.storage.base import Arrays, Buffer, Header
from ding_store.storage.encoding.framing import encode_parts, length_of, seal
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.shared_memory.cache_dir import CacheDir
from ding_store.storage.shared_memory.mapped_files import aligned
from ding_store.storage.shared_memory.ring import Region, RingWriter
from ding_store.storage.shared_memory.transports import Reference

logger = logging.getLogger(__name__)

#: Size of the first ring: a ring that stays in a processor's cache is the fastest to write and read.
FIRST_BYTES = 16 << 20
#: Time to wait for an ack before a larger ring replaces a full one: pages in use are faster than new ones.
PATIENCE_S = 0.02
#: Number of payloads that go through Redis after a ring could not be created, before the next try.
_RETRY_AFTER = 1000
#: Parts up to this total size are joined first: one more copy costs less than many small ones.
_JOINED_BYTES = 64 << 10


def crc_of(host: str) -> int:
    return zlib.crc32(host.encode())


class HostPayload(Payload):
    """The bytes of an entry in a ring."""

    _region: Optional[Region] = None

    def __init__(self, rings: Rings, ring: RingWriter, region: Region, head: Buffer) -> None:
        self.size = region.length
        self._rings = rings
        self._ring = ring
        self._reference = Reference(
            ring.name, rings.host_crc, region.start, region.length, len(head), zlib.crc32(head)
        ).pack()
        self._region = region

    def __del__(self) -> None:
        # A signal came before the payload had an owner. Space is freed in order, so this region would block its ring.
        if not self.is_kept and self._region is not None and not self._region.is_released:
            self._rings.drop(self._ring, self._region)

    def on_wire(self) -> bytes:
        assert self._region is not None
        return seal(self._region.buffer, self._rings.compression)

    def reference(self, host: str) -> Optional[bytes]:
        return self._reference if host == self._rings.host else None

    def release(self) -> None:
        if self._region is not None:
            self._rings.release(self._ring, self._region)


class Rings:
    """
    Overview:
        The rings of one writer and stream. Thread-safe. A ring that stays full for a moment is followed by one of twice
        its size, up to ``max_bytes``. Rings stay small if readers keep up.
    Arguments:
        - max_bytes (:obj:`int`): Maximum size of one ring.
        - max_entry_bytes (:obj:`int`): Larger entries are refused here. Compressed, they may still fit through Redis.
        - ask_for_acks (:obj:`Callable`): Asks the server which entries are acked, and calls ``release`` for them. Waits
          up to this many seconds for new acks.
        - compression (:obj:`Optional[str]`): Compression of payloads that must go through Redis after all.
        - checked (:obj:`bool`): Write a checksum with each payload in a ring.
    """

    def __init__(
        self,
        cache: CacheDir,
        note: Dict[str, Any],
        max_bytes: int,
        max_entry_bytes: int,
        ask_for_acks: Callable[[float], None],
        compression: Optional[str] = None,
        checked: bool = False,
    ) -> None:
        self.host: str = cache.host
        self.host_crc: int = crc_of(cache.host)
        self.compression: Optional[str] = compression
        self._checked = checked
        self._cache = cache
        self._note = note
        self._max_bytes = max_bytes
        self._max_entry_bytes = max_entry_bytes
        self._ask_for_acks = ask_for_acks
        self._lock = threading.RLock()  # ``ask_for_acks`` calls ``release``, which takes this lock.
        self._growing = threading.Lock()  # Only its holder adds a ring.
        self._rings: List[RingWriter] = []
        self._num_refused = 0
        self._dropped: Deque[Tuple[RingWriter, Region]] = deque()
        self._is_over = False

    def pack(self, header: Header, arrays: Arrays) -> Optional[HostPayload]:
        """Write an entry to a ring. Return None if there is no room, so that it must go through Redis."""
        parts = encode_parts(header, arrays, checked=self._checked)
        length = length_of(parts)
        if length > self._max_entry_bytes:
            return None
        head = bytes(parts[0]) + bytes(parts[1])
        if length <= _JOINED_BYTES:
            parts = [b''.join(parts)]
        return self._write(parts, length, head) or self._write_later(parts, length, head)

    def release(self, ring: RingWriter, region: Region) -> None:
        with self._lock:
            self._release(ring, region)

    def drop(self, ring: RingWriter, region: Region) -> None:
        """Release a region at the next write. It never waits, since the garbage collector may call it in any thread."""
        self._dropped.append((ring, region))

    def _release(self, ring: RingWriter, region: Region) -> None:
        if region.is_released:
            return
        ring.release(region)
        if ring.num_held == 0 and ring is not self._rings[-1]:
            self._rings.remove(ring)
            ring.close()

    def retire(self) -> bool:
        """Remove the files, unless they hold entries. Later entries go through Redis."""
        with self._lock:
            self._settle_dropped()
            if any(ring.num_held for ring in self._rings):
                return False
            self._is_over = True
            self.close(unlink=True)
            self._rings = []
            return True

    def _settle_dropped(self) -> None:
        while self._dropped:
            self._release(*self._dropped.popleft())

    def close(self, unlink: bool) -> None:
        with self._lock:
            for ring in self._rings:
                ring.close(unlink)

    def _write_later(self, parts: List[Buffer], length: int, head: bytes) -> Optional[HostPayload]:
        """Write after acks have made room, or to a larger ring."""
        written = None
        left_s = PATIENCE_S if self._may_wait(length) else 0.0
        deadline = time.monotonic() + left_s
        while written is None and self._rings and left_s >= 0:
            self._ask_for_acks(left_s)  # Without our lock: ``release`` may be called in other threads.
            written = self._write(parts, length, head)
            left_s = deadline - time.monotonic()
        return written or self._write_to_larger(parts, length, head)

    def _write(self, parts: List[Buffer], length: int, head: bytes) -> Optional[HostPayload]:
        with self._lock:
            self._settle_dropped()
            if not self._rings:
                return None
            ring = self._rings[-1]
            held = ring.newest
            try:
                region = ring.reserve(length)
                if region is None:
                    return None
                if is_far(length, ring.ring_bytes):
                    join_past_caches(np.frombuffer(region.buffer, np.uint8), parts)
                else:
                    at = 0
                    for part in parts:
                        region.buffer[at : at + len(part)] = part
                        at += len(part)
                ring.commit(region)
                return HostPayload(self, ring, region, head)
            except BaseException:  # for example a signal: space is freed in order, so this region would block the ring
                if ring.newest is not None and ring.newest is not held:
                    ring.release(ring.newest)
                raise

    def _write_to_larger(self, parts: List[Buffer], length: int, head: bytes) -> Optional[HostPayload]:
        # Not under the lock of ``release``: creating a file may take long while another process holds the lock of the
        # cache.
        with self._growing:
            written = self._write(parts, length, head)  # Another thread may have created a ring meanwhile.
            if written is None and self._grow(length):
                written = self._write(parts, length, head)
            return written

    def _may_wait(self, length: int) -> bool:
        """Return whether to wait for an ack: only if the rings would otherwise grow."""
        return not self._num_refused and self._can_grow(length)

    def _next_bytes(self, length: int) -> int:
        return min(max(FIRST_BYTES, 4 * aligned(length), 2 * self._newest_bytes), self._max_bytes)

    def _can_grow(self, length: int) -> bool:
        return self._next_bytes(length) > self._newest_bytes and self._next_bytes(length) >= aligned(length)

    def _grow(self, length: int) -> bool:
        if self._is_over or not self._can_grow(length) or not self._is_time_to_try():
            return False
        try:
            ring = self._cache.create_ring(self._next_bytes(length), self._note)
        except OSError as e:
            if self._num_refused == 1:
                logger.warning(
                    'stream %r: payloads without room in a ring go through Redis: %s', self._note['stream'], e
                )
            if isinstance(e, StoreTimeout):
                self._num_refused = _RETRY_AFTER  # The holder may go on at any moment. A try costs no wait.
            return False
        self._num_refused = 0
        with self._lock:
            if self._is_over:
                ring.close()
                return False
            self._rings.append(ring)
            self._drop_empty()
        return True

    @property
    def _newest_bytes(self) -> int:
        return self._rings[-1].ring_bytes if self._rings else 0

    def _is_time_to_try(self) -> bool:
        self._num_refused += 1
        return self._num_refused % _RETRY_AFTER == 1

    def _drop_empty(self) -> None:
        for ring in self._rings[:-1]:
            if ring.num_held == 0:
                self._rings.remove(ring)
                ring.close()
