"""Rotating slots of a value: a file with a few places for its versions. One writer writes each version to a free one.

offset  size
0       8     magic
8       8     slot_bytes
16      8     of shared slots: number of the slot that was written last, counted from 1; 0: none
64      8     bytes of the value's name
72      ...   the value's name
2048+k*16     of slot k, 8 bytes each: stamp (0: nothing whole is in it), length
4096+k*slot_bytes  slot k

The file does not record which slot holds which version. Announcements do, by slot and *stamp*, a number that is unique
for each write to a file. A reader *leases* a slot: it takes a shared lock on the slot's byte of the lock range. The
lock ends with the lease or with the process. Then the reader reads the stamp. If that is the announced one, the bytes
are whole and stay unchanged. The writer locks a slot exclusively before it writes. It skips slots that it cannot lock
and slots that may be announced. The stamp is 0 from before the first byte is written until after the last.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Set

import numpy as np

from ding_store import private_files
from ding_store.compiled import FAR_BYTES, join_past_caches, load_for
from ding_store.errors import ConfigError, CorruptPayload, NotEnoughSpace
from ding_store.storage.base import Buffer
from ding_store.storage.shared_memory.mapped_files import (
    PAGE,
    OwnerLock,
    Words,
    aligned,
    allocate,
    created,
    map_read_only,
    range_lock,
    reopened,
)

MAGIC = b'DSSLOT\x00\x02'
MAX_SLOTS = 60  # as many as have words in the first page
_NAME_AT, _MAX_NAME = 64, 1024
_STAMP = [256 + 2 * slot for slot in range(MAX_SLOTS)]  # words; the length follows each
_NEWEST = 2  # a word
_LEASES = 1 << 59  # slot k's lock is this byte + k, behind the end of any file


@dataclass(frozen=True, eq=False)
class Slot:
    """A version in a slot. The writer may use ``payload`` in place until it writes to the slot again."""

    number: int
    stamp: int
    payload: memoryview


class SlotWriter:
    """
    Overview:
        The writing side of slots. Not thread-safe. It starts with two slots, so that the announced version stays while
        the next one is written.
    Arguments:
        - slot_bytes (:obj:`int`): Size of the largest version that fits.
        - name (:obj:`str`): Name of the value, for a process that finds the file after the writer's exit.
        - max_slots (:obj:`int`): Maximum number of slots. Slots are added while readers hold leases on the others.
        - has_capacity (:obj:`Callable`): Returns whether the file may grow by this many bytes.
    Raises:
        - NotEnoughSpace: The file system has no room for two slots.
    """

    def __init__(
        self,
        path: str,
        slot_bytes: int,
        name: str = '',
        max_slots: int = 8,
        has_capacity: Callable[[int], bool] = lambda num_bytes: True,
    ) -> None:
        if not 2 <= max_slots <= MAX_SLOTS:
            raise ConfigError(f'max_slots ({max_slots}) must be 2 to {MAX_SLOTS}')
        if slot_bytes < 1:
            raise ConfigError(f'slot_bytes ({slot_bytes}) must be >= 1')
        self._claim = create_slots(path, slot_bytes, name)
        self._open(path, max_slots, has_capacity)

    def _open(self, path: str, max_slots: int, has_capacity: Callable[[int], bool]) -> None:
        self.path = path
        self.max_slots = max_slots
        self._has_capacity = has_capacity
        self._pid = os.getpid()
        self._stamp = 0
        self._announced: Set[int] = set()  # slots that may hold the newest version
        self._file = OwnerLock(private_files.opener(path, os.O_RDWR))
        head = mmap.mmap(self._file.descriptor, PAGE)
        self.slot_bytes = _slot_bytes(head, os.fstat(self._file.descriptor).st_size, path)
        self._words = Words(head, path)
        self._buffers: List[memoryview] = []
        self._map_all()
        load_for(self.slot_bytes)

    def _map_all(self) -> None:
        """Map all slots that exist by now."""
        num_slots = (os.fstat(self._file.descriptor).st_size - PAGE) // self.slot_bytes
        self._buffers += [self._map(slot) for slot in range(len(self._buffers), num_slots)]

    def write(self, parts: List[Buffer]) -> Optional[Slot]:
        """
        Overview:
            Copy a version into a slot, to be announced. Call ``confirm`` or ``discard`` with the outcome. Until then
            this slot and the one that was announced before are not written.
        Returns:
            - slot (:obj:`Optional[Slot]`): None if all slots are leased and there may be no more.
        """
        length = sum(len(part) for part in parts)
        if length > self.slot_bytes:
            raise ConfigError(f'a version of {length} bytes does not fit into slots of {self.slot_bytes}')
        number = self._take()
        if number is None:
            return None
        try:
            self._fill(number, parts, length)
        finally:
            range_lock(self._file.descriptor, fcntl.F_UNLCK, _LEASES + number)
        self._announced.add(number)
        return Slot(number, self._stamp, self._buffers[number][:length])

    def confirm(self, slot: Slot) -> None:
        """Record that this slot holds the newest version. Slots of earlier versions may be written again."""
        self._announced = {slot.number}

    def keep(self, number: Optional[int]) -> None:
        """Record which slot of those in doubt was announced last. None: none of them."""
        self._announced = set() if number is None else {number}

    def discard(self, slot: Slot) -> None:
        """Record that this slot was not announced and will not be."""
        self._announced.discard(slot.number)

    def close(self, unlink: bool = True) -> None:
        """Release the file and, by default, remove it. Leases of readers stay valid."""
        if unlink and self._pid == os.getpid():
            # The cache directory was deleted, or is no longer ours: then the file stays.
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._claim.close()
        self._file.close()

    def _take(self) -> Optional[int]:
        """Lock a slot that is neither leased nor announced: a reader always finds the newest version."""
        for slot in range(len(self._buffers)):
            if slot not in self._announced and range_lock(self._file.descriptor, fcntl.F_WRLCK, _LEASES + slot):
                return slot
        return self._add() if len(self._buffers) < self.max_slots and self._has_capacity(self.slot_bytes) else None

    def _add(self) -> Optional[int]:
        slot = len(self._buffers)
        try:
            allocate(self._file.descriptor, PAGE + slot * self.slot_bytes, self.slot_bytes, self.path)
        except NotEnoughSpace:
            return None
        range_lock(self._file.descriptor, fcntl.F_WRLCK, _LEASES + slot)
        self._buffers.append(self._map(slot))
        return slot

    def _map(self, slot: int) -> memoryview:
        offset = PAGE + slot * self.slot_bytes
        return memoryview(mmap.mmap(self._file.descriptor, self.slot_bytes, offset=offset))

    def _fill(self, number: int, parts: List[Buffer], length: int) -> None:
        self._begin(number)
        target, at = np.frombuffer(self._buffers[number], np.uint8), 0
        if length >= FAR_BYTES:
            join_past_caches(target, parts)
        else:
            for part in parts:
                # numpy releases the interpreter lock during the copy.
                np.copyto(target[at : at + len(part)], np.frombuffer(part, np.uint8))
                at += len(part)
        self._words[_STAMP[number] + 1] = length
        self._end(number)

    def _begin(self, number: int) -> None:
        self._words[_STAMP[number]] = 0

    def _end(self, number: int) -> None:
        self._stamp += 1
        self._words[_STAMP[number]] = self._stamp


def create_slots(path: str, slot_bytes: int, name: str) -> OwnerLock:
    """
    Overview:
        Create a locked file with two empty slots.
    Raises:
        - NotEnoughSpace: The file system has no room for two slots.
    """
    slot_bytes, text = aligned(slot_bytes, PAGE), name.encode()[:_MAX_NAME]
    with created(path, PAGE + 2 * slot_bytes) as (mapping, held):
        struct.pack_into('<8sQ', mapping, 0, MAGIC, slot_bytes)
        struct.pack_into(f'<Q{len(text)}s', mapping, _NAME_AT, len(text), text)
    return held


class SharedSlots(SlotWriter):
    """
    Overview:
        Slots that several processes write in turn, each while it holds a lock of its caller. The caller chooses a stamp
        that identifies the bytes. Nothing is announced: readers search for the stamp. Not thread-safe.
    """

    def __init__(self, path: str, has_capacity: Callable[[int], bool]) -> None:
        self._open(path, max_slots=8, has_capacity=has_capacity)

    @property
    def is_current(self) -> bool:
        """True if the file is still the one at its path."""
        return _is_at(self.path, self._file)

    def contents(self) -> Dict[int, memoryview]:
        """Return the content of each slot that is whole, in place and valid until this process writes to the slot."""
        self._map_all()
        found = {}
        for slot, buffer in enumerate(self._buffers):
            if self._words[_STAMP[slot]]:
                found[slot] = buffer[: self._words[_STAMP[slot] + 1]]
        return found

    def fill(self, stamp: int, length: int, write: Callable[[int, memoryview], bool]) -> bool:
        """
        Overview:
            Call ``write(slot, its bytes)``. If it returns True, the bytes are whole and get the stamp.
        Returns:
            - done (:obj:`bool`): False if ``write`` failed, or if all slots are leased and there may be no more.
        """
        self._map_all()
        # The slot that was written last holds the newest version, for readers that come late.
        self._announced = {self._words[_NEWEST] - 1}
        number = self._take()
        if number is None:
            return False
        try:
            self._begin(number)
            if not write(number, self._buffers[number][:length]):
                return False
            self._words[_STAMP[number] + 1] = length
            self._words[_STAMP[number]] = stamp
            self._words[_NEWEST] = number + 1
            return True
        finally:
            range_lock(self._file.descriptor, fcntl.F_UNLCK, _LEASES + number)

    def close(self, unlink: bool = False) -> None:
        self._file.close()


def _slot_bytes(head: Any, num_bytes: int, path: str) -> int:
    """
    Raises:
        - CorruptPayload: A file of ``num_bytes`` cannot have such slots.
    """
    slot_bytes: int = struct.unpack_from('<Q', head, 8)[0]
    if not slot_bytes or slot_bytes % PAGE or num_bytes < PAGE + 2 * slot_bytes:
        raise CorruptPayload(f'{path!r} has slots of {slot_bytes} bytes in a file of {num_bytes}')
    return slot_bytes


def _is_at(path: str, file: OwnerLock) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.descriptor))
    except FileNotFoundError:
        return False


class _Leased(np.ndarray[Any, np.dtype[Any]]):
    """
    Overview:
        Bytes of a leased slot, which all views of them keep alive. numpy lets a view refer to the base of its array
        instead, but not past an array over a mapping.
    """


class SlotReader:
    """
    Overview:
        A read-only mapping of slots. Thread-safe. Leased bytes stay valid after ``close`` and after the file is
        removed.
    Raises:
        - FileNotFoundError: The file is gone.
        - CorruptPayload: The file is not a file of slots.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = OwnerLock(private_files.opener(path))
        mapping = map_read_only(self._file.descriptor, MAGIC, path)
        self.slot_bytes = _slot_bytes(mapping, len(mapping), path)
        self._words = Words(mapping, path)
        # The garbage collector may end a lease in a thread that holds this lock, between any two steps.
        self._lock = threading.RLock()
        self._slots: Dict[int, memoryview] = {}
        self._leased: List[int] = []  # slots, one item for each lease
        self._pid = os.getpid()

    def lease(self, slot: int, stamp: int) -> Optional[memoryview]:
        """
        Overview:
            Return the bytes of a slot in place, or None if other bytes are in it by now. They stay unchanged while a
            view of them exists in this process.
        """
        held = reopened(self._file.descriptor)
        is_whole = 0 <= slot < MAX_SLOTS and range_lock(held.descriptor, fcntl.F_RDLCK, _LEASES + slot)
        if not is_whole or self._words[_STAMP[slot]] != stamp:
            held.close()
            return None
        length = self._words[_STAMP[slot] + 1]
        if length > self.slot_bytes or PAGE + (slot + 1) * self.slot_bytes > os.fstat(held.descriptor).st_size:
            held.close()
            raise CorruptPayload(f'{self.path!r} has no {length} bytes in slot {slot}')
        with self._lock:
            payload = _Leased(length, np.uint8, self._mapped(slot)[:length])
            self._leased.append(slot)
        weakref.finalize(payload, self._end_lease, slot, held).atexit = False
        return payload.data

    @property
    def is_current(self) -> bool:
        """True if the file is still the one at its path."""
        return _is_at(self.path, self._file)

    def find(self, stamp: int) -> Optional[memoryview]:
        """Lease the slot that has this stamp, see ``lease``."""
        for slot in range(MAX_SLOTS):
            if self._words[_STAMP[slot]] == stamp:
                return self.lease(slot, stamp)
        return None

    def close(self) -> None:
        self._file.close()

    def _end_lease(self, slot: int, held: OwnerLock) -> None:
        held.close()
        if self._pid != os.getpid():
            return  # A forked child has no leases here, and a thread that it lacks may have held the lock.
        with self._lock:
            self._leased.remove(slot)
            if self._leased and slot not in self._leased:
                # A reader that uses newer versions in place moves from slot to slot, and needs no mapping of old ones.
                # A reader that copies has no lease now, and will read this slot again.
                self._slots.pop(slot, None)

    def _mapped(self, slot: int) -> memoryview:
        found = self._slots.get(slot)
        if found is None:
            offset = PAGE + slot * self.slot_bytes
            found = memoryview(mmap.mmap(self._file.descriptor, self.slot_bytes, prot=mmap.PROT_READ, offset=offset))
            self._slots[slot] = found
        return found


def value_of(path: str) -> str:
    """Return the value's name in a file of slots, whose writer may have exited. Return '' if there is none."""
    with open(path, 'rb', opener=private_files.opener) as file:
        head = file.read(PAGE)
    if len(head) < PAGE or not head.startswith(MAGIC):
        return ''
    (size,) = struct.unpack_from('<Q', head, _NAME_AT)
    return head[_NAME_AT + 8 : _NAME_AT + 8 + min(size, _MAX_NAME)].decode('utf-8', 'replace')
