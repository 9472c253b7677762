"""A value's rotating slots: a file with a few places for its versions, of which one writer fills the next free one.

offset  size
0       8     magic
8       8     slot_bytes
16      8     max_slots
64      8     num_slots   slots whose space is taken
128     8     newest      1 + number of the slot with the newest version; 0: none yet
192+k*64      of slot k, 8 bytes each: turn, version, length, stamp (a number of the writer's choice)
4096+k*slot_bytes  slot k

A slot's *turn* is odd while the slot is written and even after: a reader reads it before and after copying, and takes
the copy if it was the same even number. A reader that wants the bytes in place *leases* the slot: a shared lock on the
slot's byte of the lock range, which ends with the lease or with its process. The writer locks the slot that it is
about to write exclusively, and passes over those it cannot lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from ding_store.errors import ConfigError, CorruptPayload, StoreTimeout

from .mapped import PAGE, Claim, Words, aligned, allocate, created, map_read_only, range_lock, reopened
from .wire import Buffer

MAGIC = b'DSSLOT\x00\x01'
MAX_SLOTS = 60  # whose words fit into the first page
_NUM, _NEWEST = 8, 16  # words
_TURN = [24 + 8 * slot for slot in range(MAX_SLOTS)]  # followed by version, length and stamp
_LEASES = 1 << 59  # slot k's lock: this byte + k, behind the end of any file
_MAX_TRIES = 1000  # Each failed one means that the writer has published another version meanwhile.
_TRIES_BEFORE_LEASE = 3


class SlotWriter:
    """
    Overview:
        Not thread-safe. Starts with two slots: the newest version stays while the next one is written.
    Arguments:
        - slot_bytes (:obj:`int`): The largest version that fits.
        - max_slots (:obj:`int`): As many are made when readers hold leases on the others.
    Raises:
        - NotEnoughSpace: The file system has no room for two slots.
    """

    def __init__(self, path: str, slot_bytes: int, max_slots: int = 8) -> None:
        if not 2 <= max_slots <= MAX_SLOTS:
            raise ConfigError(f'max_slots ({max_slots}) must be 2 to {MAX_SLOTS}')
        if slot_bytes < 1:
            raise ConfigError(f'slot_bytes ({slot_bytes}) must be >= 1')
        self.path = path
        self.slot_bytes = aligned(slot_bytes, PAGE)
        self.max_slots = max_slots
        self.num_skipped = 0
        self._pid = os.getpid()
        with created(path, PAGE + 2 * self.slot_bytes) as (mapping, self._claim):
            struct.pack_into('<8sQQ', mapping, 0, MAGIC, self.slot_bytes, max_slots)
            self._words = Words(mapping, path)
            self._words[_NUM] = 2
        self._file = Claim(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        self._buffers: List[memoryview] = [self._map(slot) for slot in range(2)]

    def put(self, parts: List[Buffer], version: int, stamp: int = 0) -> Optional[int]:
        """
        Overview:
            Publish a version, copied from ``parts``.
        Returns:
            - slot (:obj:`Optional[int]`): None when all slots are leased, and this version was skipped, and counted.
        """
        length = sum(len(part) for part in parts)
        if length > self.slot_bytes:
            raise ConfigError(f'a version of {length} bytes does not fit into slots of {self.slot_bytes}')
        slot = self._take()
        if slot is None:
            self.num_skipped += 1
            return None
        try:
            self._write(slot, parts, (version, length, stamp))
        finally:
            range_lock(self._file.descriptor, fcntl.F_UNLCK, _LEASES + slot)
        return slot

    def close(self, unlink: bool = True) -> None:
        """Give the file up, and by default remove it; mappings and leases that readers have stay good."""
        if unlink and self._pid == os.getpid():
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass  # The cache directory was deleted under us.
        self._claim.close()
        self._file.close()

    def _take(self) -> Optional[int]:
        """A slot that nobody leases, locked, and not the newest: a reader always finds a whole version."""
        newest = self._words[_NEWEST] - 1
        for slot in range(len(self._buffers)):
            if slot != newest and range_lock(self._file.descriptor, fcntl.F_WRLCK, _LEASES + slot):
                return slot
        return self._add() if len(self._buffers) < self.max_slots else None

    def _add(self) -> Optional[int]:
        slot = len(self._buffers)
        allocate(self._file.descriptor, PAGE + slot * self.slot_bytes, self.slot_bytes, self.path)
        range_lock(self._file.descriptor, fcntl.F_WRLCK, _LEASES + slot)
        self._buffers.append(self._map(slot))
        self._words[_NUM] = slot + 1
        return slot

    def _map(self, slot: int) -> memoryview:
        offset = PAGE + slot * self.slot_bytes
        return memoryview(mmap.mmap(self._file.descriptor, self.slot_bytes, offset=offset))

    def _write(self, slot: int, parts: List[Buffer], facts: Tuple[int, int, int]) -> None:
        self._begin(slot)
        at = 0
        for part in parts:
            self._buffers[slot][at : at + len(part)] = part
            at += len(part)
        for place, fact in enumerate(facts, 1):
            self._words[_TURN[slot] + place] = fact
        self._end(slot)
        self._words[_NEWEST] = slot + 1

    def _begin(self, slot: int) -> None:
        # Odd from before the first byte; a writer that died in here left it odd already.
        self._words[_TURN[slot]] |= 1

    def _end(self, slot: int) -> None:
        self._words[_TURN[slot]] += 1


@dataclass
class Version:
    """A copy of a version; or with ``lease`` itself, in place, unchanged until ``release`` or this process's end."""

    version: int
    stamp: int
    payload: memoryview
    lease: Optional[Claim] = None

    def release(self) -> None:
        if self.lease is not None:
            self.lease.close()


class SlotReader:
    """
    Overview:
        Thread-safe. Versions that were read stay good after ``close`` and after the file is removed.
    Raises:
        - FileNotFoundError: The file is gone. CorruptPayload: It is no file of slots.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = Claim(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        mapping = map_read_only(self._file.descriptor, MAGIC, path)
        self.slot_bytes: int = struct.unpack_from('<Q', mapping, 8)[0]
        if len(mapping) < PAGE + 2 * self.slot_bytes:
            raise CorruptPayload(f'{path!r} has slots of {self.slot_bytes} bytes in a file of {len(mapping)}')
        self._words = Words(mapping, path)
        self._slots: Dict[int, memoryview] = {}

    def copy(self) -> Optional[Version]:
        """The newest version, copied; None if there is none yet. A writer that is faster than we copy is held off."""
        for _ in range(_TRIES_BEFORE_LEASE):
            slot = self._words[_NEWEST] - 1
            if slot < 0:
                return None
            copy = self._copy(slot)
            if copy is not None:
                return copy
        leased = self.lease()
        if leased is None:
            return None
        copy = Version(leased.version, leased.stamp, memoryview(bytes(leased.payload)))
        leased.release()
        return copy

    def lease(self) -> Optional[Version]:
        """The newest version in place, kept from being overwritten until its ``release``; None if there is none yet."""
        for _ in range(_MAX_TRIES):
            slot = self._words[_NEWEST] - 1
            if slot < 0:
                return None
            lease = reopened(self._file.descriptor)
            is_ours = range_lock(lease.descriptor, fcntl.F_RDLCK, _LEASES + slot)
            # Nobody writes here now; but the writer may have died in here, after it had made another one newest.
            if is_ours and self._words[_TURN[slot]] % 2 == 0:
                return self._version(slot, lease)
            lease.close()
        raise StoreTimeout(f'{self.path!r}: the writer overtook {_MAX_TRIES} attempts to lease the newest version')

    def close(self) -> None:
        self._file.close()

    def _copy(self, slot: int) -> Optional[Version]:
        turn = self._words[_TURN[slot]]
        if turn % 2:
            return None
        seen = self._version(slot)
        copy = Version(seen.version, seen.stamp, memoryview(bytes(seen.payload)))
        return copy if self._is_unchanged(slot, turn) else None

    def _is_unchanged(self, slot: int, turn: int) -> bool:
        return self._words[_TURN[slot]] == turn

    def _version(self, slot: int, lease: Optional[Claim] = None) -> Version:
        version, length, stamp = (self._words[_TURN[slot] + place] for place in (1, 2, 3))
        # Of a slot that is being written, the length may be any: what is made of it is not used then.
        payload = self._slot(slot)[: min(length, self.slot_bytes)]
        return Version(version, stamp, payload, lease)

    def _slot(self, slot: int) -> memoryview:
        if slot not in self._slots:
            offset = PAGE + slot * self.slot_bytes
            mapping = mmap.mmap(self._file.descriptor, self.slot_bytes, prot=mmap.PROT_READ, offset=offset)
            self._slots[slot] = memoryview(mapping)
        return self._slots[slot]
