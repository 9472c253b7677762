"""A value's rotating slots: a file with a few places for its versions, of which one writer fills the next free one.

offset  size
0       8     magic
8       8     slot_bytes
16      8     of shared slots: which one was filled last, counted from 1; 0: none
64      8     bytes of the value's name
72      ...   the value's name
2048+k*16     of slot k, 8 bytes each: stamp (0: nothing whole is in it), length
4096+k*slot_bytes  slot k

Which slot holds which version is not said here but wherever versions are announced, by slot and *stamp*, a number that
no two fillings of a file share. A reader *leases* the slot: a shared lock on the slot's byte of the lock range, which
ends with the lease or with its process. Then it looks at the stamp: if that is the announced one, the bytes are whole,
and stay. The writer locks the slot that it is about to write exclusively, and passes over those it cannot lock and
those that may be announced; the stamp is 0 from before the first byte to behind the last.
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
MAX_SLOTS = 60  # whose words fit into the first page
_NAME_AT, _MAX_NAME = 64, 1024
_STAMP = [256 + 2 * slot for slot in range(MAX_SLOTS)]  # words; followed by the length
_NEWEST = 2  # a word
_LEASES = 1 << 59  # slot k's lock: this byte + k, behind the end of any file


@dataclass(frozen=True, eq=False)
class Slot:
    """What was written to a slot; ``payload`` is in place, for the writer's own use until it writes here again."""

    number: int
    stamp: int
    payload: memoryview


class SlotWriter:
    """
    Overview:
        Not thread-safe. Starts with two slots: the announced version stays while the next one is written.
    Arguments:
        - slot_bytes (:obj:`int`): The largest version that fits.
        - name (:obj:`str`): Of the value; who finds the file of a dead process can tell what it was.
        - max_slots (:obj:`int`): As many are made when readers hold leases on the others.
        - has_room (:obj:`Callable`): Whether the file may grow by so many bytes.
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
        self._announced: Set[int] = set()  # slots that the newest version may be in
        self._file = OwnerLock(private_files.opener(path, os.O_RDWR))
        head = mmap.mmap(self._file.descriptor, PAGE)
        self.slot_bytes = _slot_bytes(head, os.fstat(self._file.descriptor).st_size, path)
        self._words = Words(head, path)
        self._buffers: List[memoryview] = []
        self._map_all()
        load_for(self.slot_bytes)

    def _map_all(self) -> None:
        """All slots that there are by now."""
        num_slots = (os.fstat(self._file.descriptor).st_size - PAGE) // self.slot_bytes
        self._buffers += [self._map(slot) for slot in range(len(self._buffers), num_slots)]

    def write(self, parts: List[Buffer]) -> Optional[Slot]:
        """
        Overview:
            Copy a version into a slot, to be announced: ``confirm`` or ``discard`` tells what became of that. While it
            is not known, the slot is left alone, as is the one that was announced before.
        Returns:
            - slot (:obj:`Optional[Slot]`): None when all slots are leased, and there may be no more.
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
        """This slot has the newest version now; those of earlier ones may be written again."""
        self._announced = {slot.number}

    def keep(self, number: Optional[int]) -> None:
        """Of the slots whose announcement was in doubt it is this one that was announced last; None: none of them."""
        self._announced = set() if number is None else {number}

    def discard(self, slot: Slot) -> None:
        """This slot was not announced, and will not be."""
        self._announced.discard(slot.number)

    def close(self, unlink: bool = True) -> None:
        """Give the file up, and by default remove it; leases that readers have stay good."""
        if unlink and self._pid == os.getpid():
            # The cache directory was deleted under us, or is not ours any more: then the file stays.
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._claim.close()
        self._file.close()

    def _take(self) -> Optional[int]:
        """A slot that nobody leases, locked, and not announced: a reader always finds the newest version."""
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
                # numpy lets other threads of this process run meanwhile.
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
        A file of two empty slots, claimed.
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
        Slots that several processes fill in turn, each while it holds a lock of theirs. A stamp is the caller's, and
        says which bytes these are, so that nothing is announced: readers look for it. Not thread-safe.
    """

    def __init__(self, path: str, has_capacity: Callable[[int], bool]) -> None:
        self._open(path, max_slots=8, has_capacity=has_capacity)

    @property
    def is_current(self) -> bool:
        """Whether the file is still the one at its path."""
        return _is_at(self.path, self._file)

    def contents(self) -> Dict[int, memoryview]:
        """What is whole in which slot, in place, until we fill it."""
        self._map_all()
        found = {}
        for slot, buffer in enumerate(self._buffers):
            if self._words[_STAMP[slot]]:
                found[slot] = buffer[: self._words[_STAMP[slot] + 1]]
        return found

    def fill(self, stamp: int, length: int, write: Callable[[int, memoryview], bool]) -> bool:
        """
        Overview:
            ``write(slot, its bytes)`` and, if that says that they are whole, give them the stamp.
        Returns:
            - done (:obj:`bool`): False also when all slots are leased, and there may be no more.
        """
        self._map_all()
        # The one that was filled last has the newest version, for those who come late.
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
        - CorruptPayload: A file of so many bytes cannot have such slots.
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
    Bytes of a slot; all views of them keep this alive: numpy lets an array's view refer to the array that this is a
    view of instead, but not past one whose memory comes from a mapping.
    """


class SlotReader:
    """
    Overview:
        Thread-safe. What was leased stays good after ``close`` and after the file is removed.
    Raises:
        - FileNotFoundError: The file is gone. CorruptPayload: It is no file of slots.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = OwnerLock(private_files.opener(path))
        mapping = map_read_only(self._file.descriptor, MAGIC, path)
        self.slot_bytes = _slot_bytes(mapping, len(mapping), path)
        self._words = Words(mapping, path)
        # Leases also end where the garbage collector runs, so maybe in a thread that is in here, between any two steps.
        self._lock = threading.RLock()
        self._slots: Dict[int, memoryview] = {}
        self._leased: List[int] = []  # slots, as often as they are
        self._pid = os.getpid()

    def lease(self, slot: int, stamp: int) -> Optional[memoryview]:
        """
        Overview:
            What was written to a slot, in place: it stays as it is as long as a view of it lives in this process, and
            this process does. None if other bytes are in the slot by now.
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
        """Whether the file is still the one at its path."""
        return _is_at(self.path, self._file)

    def find(self, stamp: int) -> Optional[memoryview]:
        """As ``lease``, of whichever slot has this stamp."""
        for slot in range(MAX_SLOTS):
            if self._words[_STAMP[slot]] == stamp:
                return self.lease(slot, stamp)
        return None

    def close(self) -> None:
        self._file.close()

    def _end_lease(self, slot: int, held: OwnerLock) -> None:
        held.close()
        if self._pid != os.getpid():
            return  # A forked child leases nothing here, and a thread that it lacks may have held the lock.
        with self._lock:
            self._leased.remove(slot)
            if self._leased and slot not in self._leased:
                # Who holds a newer version in place goes on from slot to slot, and needs no memory for old ones. Who
                # copies has none now, and will want this slot again.
                self._slots.pop(slot, None)

    def _mapped(self, slot: int) -> memoryview:
        found = self._slots.get(slot)
        if found is None:
            offset = PAGE + slot * self.slot_bytes
            found = memoryview(mmap.mmap(self._file.descriptor, self.slot_bytes, prot=mmap.PROT_READ, offset=offset))
            self._slots[slot] = found
        return found


def value_of(path: str) -> str:
    """The name of the value whose slots these are, of a file that may be of a dead process; '' if it does not say."""
    with open(path, 'rb', opener=private_files.opener) as file:
        head = file.read(PAGE)
    if len(head) < PAGE or not head.startswith(MAGIC):
        return ''
    (size,) = struct.unpack_from('<Q', head, _NAME_AT)
    return head[_NAME_AT + 8 : _NAME_AT + 8 + min(size, _MAX_NAME)].decode('utf-8', 'replace')
