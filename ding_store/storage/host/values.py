"""Values on the host plane: their bytes in slots of a mmap file, their announcement, and who reads which, in the store.

A put copies the arrays into a slot, then announces the version in the store with a *reference* to that slot: so a
version is seen whole or not at all, whenever its writer dies. Readers of this host lease the slot and read in place.
Who cannot (another host, no host cache, the file is gone) asks the writer to *fill* the version: to put the payload
into the store as well. From the first such question on all versions of this value are filled, by a thread; the next put
waits for a fill that is under way, so that readers elsewhere get versions however fast they come. A writer that is
closed fills what only this host can read. One that is killed leaves its newest version in its file: readers of this
host go on reading it, others get PayloadLost until somebody puts the next one.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
import zlib
from contextlib import ExitStack, contextmanager
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from ding_store.errors import (
    CorruptPayload,
    PayloadLost,
    ServerFull,
    StoreClosed,
    StoreError,
    StoreTimeout,
    VersionConflict,
)
from ding_store.storage.base import Arrays, Buffer, Header, Value
from ding_store.storage.host.cache_dir import CacheDir, Found
from ding_store.storage.host.planes import PlanedStore, Version
from ding_store.storage.host.slots import Slot, SlotReader, SlotWriter
from ding_store.storage.host.value_copies import HostCopies, fetch_payload
from ding_store.storage.options import check_name
from ding_store.storage.wire.encoding import Pieces, decode, decode_value, encode_pieces
from ding_store.storage.wire.value_parts import PartList, unpack

logger = logging.getLogger(__name__)

#: Smaller values travel in their announcement, to all hosts alike.
SLOTS_FROM_BYTES = 32 << 10
#: Slots have room for a value that grows by this much before a new file is needed.
_SPARE = 1 / 8
#: So often another version is looked for when one was replaced while it was fetched, however short the time is.
_MIN_TRIES = 5
#: A file that could not be made is tried again after so many versions went over the wire instead.
_RETRY_AFTER = 100

_REFERENCE = struct.Struct('<4s16sIQQII')
_MAGIC = b'DGV\x01'


class SlotReference(NamedTuple):
    """Where a version is; the first bytes have a checksum, against files that were mixed up."""

    file: str  # 32 hexadecimal digits
    slot: int
    stamp: int
    length: int
    head_bytes: int
    head_crc: int

    def pack(self) -> bytes:
        return _REFERENCE.pack(_MAGIC, bytes.fromhex(self.file), *self[1:])

    @classmethod
    def unpack(cls, packed: bytes) -> SlotReference:
        """
        Raises:
            - CorruptPayload: It is no reference.
        """
        if len(packed) != _REFERENCE.size or not packed.startswith(_MAGIC):
            raise CorruptPayload('it is no whole reference')
        _, file, *numbers = _REFERENCE.unpack(packed)
        return cls(file.hex(), *numbers)


class ValueResolver:
    """
    Overview:
        Makes values of versions: references are followed on this host, or waited for over the wire.
    Arguments:
        - follow (:obj:`Optional[Callable]`): The value of a version that is in a slot, if this process can map it.
        - fetch (:obj:`Optional[Callable]`): The payload that is in parts, None if one is missing; by default into
          memory of this process's own.
        - patience_s (:obj:`float`): How long a writer may take to fill a version before it counts as lost.
    """

    def __init__(
        self,
        store: PlanedStore,
        follow: Optional[Callable[[str, Version], Optional[Value]]] = None,
        patience_s: float = 30.0,
        fetch: Optional[Callable[[str, PartList], Optional[Buffer]]] = None,
    ) -> None:
        self._store = store
        self._follow = follow
        self._fetch = fetch or (lambda name, listed: fetch_payload(store, name, listed))
        self._patience_s = patience_s
        self._wanted: Dict[
            str, Tuple[int, float]
        ] = {}  # value -> version that we asked for, and until when it may come
        self._too_fast: Set[str] = set()  # values of which versions were replaced while we fetched them

    def get(self, name: str, newer_than: int, timeout_s: float) -> Optional[Value]:
        """
        Overview:
            None also where versions are replaced faster than they can be fetched, again and again until the time is
            over, with one warning.
        Raises:
            - PayloadLost: There is a newer version, which nobody has made readable for us in time.
        """
        end = deadline = time.monotonic() + timeout_s
        known, missed, num_tries = newer_than, (0, False), 0
        while True:
            left = max(0.0, deadline - time.monotonic())
            found = self._store.get_version(name, known, left, or_filled=known != newer_than)
            if found is None and known != newer_than:
                raise PayloadLost(_lost(name, known))
            if found is None or found.version == newer_than:
                return None
            value = self._value(name, found)
            if value is not None:
                self._too_fast.discard(name)
                return value
            seen = found.version, bool(found.payload)
            is_on_its_way = found.is_coming and not found.payload
            is_over = num_tries >= _MIN_TRIES and time.monotonic() >= end
            if seen != missed and not is_on_its_way and not is_over:
                missed, num_tries = seen, num_tries + 1  # It was replaced while we fetched it: look again.
                continue
            if seen == missed and found.payload:
                raise CorruptPayload(f'version {found.version} of value {name!r}: parts of it are missing')
            if found.payload:
                self._warn_too_fast(name)
                return None
            known = found.version
            deadline = max(deadline, self._ask(name, known, found.is_coming))

    def _value(self, name: str, found: Version) -> Optional[Value]:
        value = self._follow(name, found) if self._follow is not None and found.reference else None
        return self._over_the_wire(name, found) if value is None and found.payload else value

    def _over_the_wire(self, name: str, found: Version) -> Optional[Value]:
        try:
            listed = unpack(found.payload)
            payload = found.payload if listed is None else self._fetch(name, listed)
        except CorruptPayload as e:
            raise CorruptPayload(f'version {found.version} of value {name!r}: {e}') from e
        # The checksums of parts were looked at.
        return None if payload is None else decode_value(name, found.version, payload, verify=listed is None)

    def _warn_too_fast(self, name: str) -> None:
        if name not in self._too_fast:
            self._too_fast.add(name)
            logger.warning('value %r: versions are replaced faster than we can fetch them: put it less often', name)

    def _ask(self, name: str, version: int, is_coming: bool) -> float:
        asked, until = self._wanted.get(name, (0, 0.0))
        if asked != version:
            until = time.monotonic() + self._patience_s
            self._wanted[name] = version, until
            if not is_coming:
                self._store.want_version(name)
        return until


def _lost(name: str, version: int) -> str:
    return (
        f'version {version} of value {name!r} is in a file of another host, or one that was removed, and its writer '
        'does not send it: it was killed, or cannot reach the store; the next version that is put will be readable'
    )


class ValueSlots:
    """
    Overview:
        One writer's slots of one value. Thread-safe.
    """

    def __init__(self, store: PlanedStore, cache: CacheDir, name: str) -> None:
        self._store = store
        self._cache = cache
        self._name = name
        self._lock = threading.Lock()
        # Who holds it is the next to get the lock: else a put may follow a put, and a fill wait for ever.
        self._next = threading.Lock()
        self._file: Optional[SlotWriter] = None
        self._old: List[SlotWriter] = []  # too small; the newest version may still be in them
        self._newest: Optional[Tuple[int, Slot, List[int]]] = None  # that we announced, and the lengths of its pieces
        self._num_refused = 0
        self._is_in_doubt = False  # whether the last announcement, of which no reply came, was one

    def put(self, payload: Pieces, announce: Callable[[bytes], int]) -> Optional[int]:
        """The version that ``announce(reference)`` returns; None where no slot is to be had, and it was not called."""
        with self._in_turn():
            if self._is_in_doubt:
                self._look()
            file = self._file_for(payload.num_bytes)
            slot = file.write(payload.buffers) if file is not None else None
            if file is None or slot is None:
                return None
            try:
                version = announce(_reference(file, slot, payload.buffers))
            except (VersionConflict, ServerFull):
                file.discard(slot)
                raise
            except StoreError:
                self._is_in_doubt = True
                raise
            file.confirm(slot)
            self._newest = version, slot, payload.lengths
            while self._old:
                self._old.pop().close()
            return version

    def fill(self) -> None:
        """Put the newest version's payload into the store, if it is ours and not there yet."""
        with self._in_turn():
            found = self._store.get_version(self._name, 0)
            if found is not None and self._newest is not None and not found.payload:
                version, slot, lengths = self._newest
                if version == found.version:
                    self._store.fill_version(self._name, version, Pieces([slot.payload], lengths))

    def close(self, unlink: bool) -> None:
        with self._in_turn():
            for file in [*self._old, self._file]:
                if file is not None:
                    file.close(unlink)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        with ExitStack() as turn:
            with self._store.held(self._next):
                turn.enter_context(self._store.held(self._lock))
            yield

    def _look(self) -> None:
        """Which slot was announced last: the others that may have been are free."""
        found = self._store.get_version(self._name, 0)
        reference = SlotReference.unpack(found.reference) if found is not None and found.reference else None
        if self._file is not None:
            is_here = reference is not None and _name_of(self._file) == reference.file
            self._file.keep(reference.slot if reference is not None and is_here else None)
        self._is_in_doubt = False

    def _file_for(self, num_bytes: int) -> Optional[SlotWriter]:
        file = self._file
        if file is not None and num_bytes <= file.slot_bytes and os.path.exists(file.path):
            return file
        self._num_refused += 1
        if self._num_refused % _RETRY_AFTER != 1:
            return None
        try:
            new = self._cache.create_slots(int(num_bytes * (1 + _SPARE)), self._name)
        except OSError as e:
            if self._num_refused == 1:
                logger.warning('value %r goes over the wire: %s', self._name, e)
            if isinstance(e, StoreTimeout):
                self._num_refused = _RETRY_AFTER  # It may go on at any moment, and until then to ask costs no wait.
            return None
        self._num_refused = 0
        if file is not None:
            self._old.append(file)
        self._file = new
        return new


def _reference(file: SlotWriter, slot: Slot, parts: List[Buffer]) -> bytes:
    head = bytes(parts[0]) + bytes(parts[1])
    return SlotReference(_name_of(file), slot.number, slot.stamp, len(slot.payload), len(head), zlib.crc32(head)).pack()


def _name_of(file: SlotWriter) -> str:
    return os.path.basename(file.path).split('.')[0]


class HostValues:
    """
    Overview:
        The values of one run as one process of a host writes and reads them.
    Arguments:
        - cache (:obj:`Optional[CacheDir]`): None: everything goes over the wire.
        - patience_s (:obj:`float`): How long the writer of a value on another host is waited for.
    """

    def __init__(self, store: PlanedStore, cache: Optional[CacheDir], patience_s: float) -> None:
        self._store = store
        self._cache = cache
        self._copies = HostCopies(store, cache) if cache is not None else None
        fetch = self._copies.fetch if self._copies is not None else None
        self._resolver = ValueResolver(store, self._follow, patience_s, fetch)
        self._lock = threading.Lock()
        self._own: Dict[str, ValueSlots] = {}
        self._files: Dict[str, SlotReader] = {}
        self._closed = threading.Event()
        self._filler: Optional[threading.Thread] = None

    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        check_name('value', name)
        is_large = sum(array.nbytes for array in arrays.values() if hasattr(array, 'nbytes')) >= SLOTS_FROM_BYTES
        if self._cache is None or not is_large:
            return self._store.put(name, header, arrays, expected_version)
        payload = encode_pieces(header, arrays)
        version = self._slots(name, self._cache).put(
            payload, lambda reference: self._store.put_version(name, None, reference, expected_version)
        )
        if version is None:
            return self._store.put_version(name, payload, b'', expected_version)
        self._start_filler()
        return version

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        return self._resolver.get(name, newer_than, timeout_s)

    def drop(self, name: str) -> None:
        """The value was deleted."""
        with self._lock:
            slots = self._own.pop(name, None)
        if slots is not None:
            slots.close(unlink=True)
        if self._copies is not None:
            self._copies.drop(name)

    def is_done(self, found: Found) -> bool:
        """Whether a dead writer's file is needed no more: what a server does not know it may know again."""
        if not found.note.get('value'):
            return False
        newest = self._store.get_version(found.note['value'], 0)
        if newest is None:
            return False
        is_there = newest.reference and SlotReference.unpack(newest.reference).file in found.path
        return bool(newest.payload) or not is_there

    def publish(self) -> bool:
        """Fill all that only this host can read. Returns whether that is done."""
        try:
            for slots in list(self._own.values()):
                slots.fill()
        except StoreError as e:
            logger.warning('closed with values that only this host can read, in files that stay: %s', e)
            return False
        return True

    def close(self, unlink: bool, join_s: float) -> None:
        """After the store was closed, which wakes the thread."""
        self._closed.set()
        for slots in list(self._own.values()):
            slots.close(unlink)
        if self._filler is not None and self._filler is not threading.current_thread():
            self._filler.join(join_s)

    def _slots(self, name: str, cache: CacheDir) -> ValueSlots:
        with self._lock:
            if name not in self._own:
                self._own[name] = ValueSlots(self._store, cache, name)
            return self._own[name]

    def _start_filler(self) -> None:
        if self._filler is None:
            with self._lock:
                if self._filler is None and not self._closed.is_set():
                    filler = threading.Thread(target=self._fill, name='ding-store-values', daemon=True)
                    filler.start()
                    self._filler = filler  # Not before: close() may join it at any moment.

    def _fill(self) -> None:
        """Fill what readers elsewhere want, also while nobody here calls us."""
        pid = os.getpid()
        known: Dict[str, str] = {}
        while not self._closed.is_set() and pid == os.getpid():
            try:
                known = {name: known.get(name, '') for name in list(self._own)}
                wanted = self._store.wait_for_wants(known, self._store.own_writer.check_every_s)
                for name in [name for name, token in wanted.items() if token != known[name]]:
                    slots = self._own.get(name)
                    if slots is not None:  # and not deleted meanwhile
                        slots.fill()
                known = wanted
            except StoreClosed:
                return
            except StoreError as e:
                logger.info('values wait for the store: %s', e)
                self._closed.wait(1.0)

    def _follow(self, name: str, found: Version) -> Optional[Value]:
        """The value in place; None if its file is not on this host, or its slot has other bytes by now."""
        reference = SlotReference.unpack(found.reference)
        try:
            payload = self._file(reference.file).lease(reference.slot, reference.stamp)
        except (OSError, CorruptPayload) as e:
            if not isinstance(e, FileNotFoundError):
                logger.info('value %r: a file of this host cannot be mapped: %s', name, e)
            return None
        if payload is None:
            return None
        try:
            if len(payload) != reference.length or zlib.crc32(payload[: reference.head_bytes]) != reference.head_crc:
                raise CorruptPayload(f'slot {reference.slot} has other bytes than were written')
            return Value(name, found.version, *decode(payload, verify=False))
        except CorruptPayload as e:
            raise CorruptPayload(f'version {found.version} of value {name!r}: in {reference.file!r}: {e}') from e

    def _file(self, file: str) -> SlotReader:
        found = self._files.get(file)
        if found is None:
            if self._cache is None:
                raise FileNotFoundError(f'{file}: there is no host cache here')
            found = SlotReader(self._cache.slots_path_of(file))
            with self._lock:
                # Mappings of removed files keep their memory.
                self._files = {key: old for key, old in self._files.items() if os.path.exists(old.path)}
                self._files[file] = found
        return found
