"""One writer's slots for one value, and the reference to a slot that the writer announces."""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from contextlib import ExitStack, contextmanager
from typing import Callable, Iterator, List, NamedTuple, Optional, Tuple

from ding_store.errors import CorruptPayload, ServerFull, StoreTimeout, VersionConflict
from ding_store.storage.base import Buffer
from ding_store.storage.client import Client
from ding_store.storage.encoding.framing import Pieces
from ding_store.storage.shared_memory.cache_dir import CacheDir
from ding_store.storage.shared_memory.slots import Slot, SlotWriter

logger = logging.getLogger(__name__)

#: Share by which a value may grow before it needs a new file.
_SPARE = 1 / 8
#: Number of versions that go through Redis after a file could not be created, before the next try.
_RETRY_AFTER = 100

_REFERENCE = struct.Struct('<4s16sIQQII')
_MAGIC = b'DGV\x01'


class SlotReference(NamedTuple):
    """Place of a version in a slot, with a checksum of its first bytes that shows if the file was replaced."""

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
            - CorruptPayload: The bytes are not a whole reference.
        """
        if len(packed) != _REFERENCE.size or not packed.startswith(_MAGIC):
            raise CorruptPayload('it is not a whole reference')
        _, file, *numbers = _REFERENCE.unpack(packed)
        return cls(file.hex(), *numbers)


class ValueSlots:
    """
    Overview:
        One writer's slots for one value. Thread-safe.
    """

    def __init__(self, client: Client, cache: CacheDir, name: str) -> None:
        self._client = client
        self._cache = cache
        self._name = name
        self._lock = threading.Lock()
        # Its holder gets the lock next. Otherwise put could follow put, and a backfill could wait for ever.
        self._next = threading.Lock()
        self._file: Optional[SlotWriter] = None
        self._old: List[SlotWriter] = []  # too small; the newest version may still be in them
        self._newest: Optional[Tuple[int, Slot, List[int]]] = None  # our announced version, slot, lengths of its pieces
        self._num_refused = 0
        self._in_doubt: Optional[Tuple[Slot, List[int]]] = None  # slot, lengths; unknown whether it was announced

    def put(self, payload: Pieces, announce: Callable[[bytes], int]) -> Optional[int]:
        """Return the version from ``announce(reference)``. None if there is no free slot, and nothing was announced."""
        with self._in_turn():
            self._look()
            file = self._file_for(payload.num_bytes)
            slot = file.write(payload.buffers) if file is not None else None
            if file is None or slot is None:
                return None
            try:
                version = announce(_reference(file, slot, payload.buffers))
                file.confirm(slot)
                self._newest = version, slot, payload.lengths
            except (VersionConflict, ServerFull):
                file.discard(slot)
                raise
            except BaseException:  # for example an interrupt while it waits for the reply
                self._in_doubt = slot, payload.lengths
                raise
            while self._old:
                self._old.pop().close()
            return version

    def backfill(self) -> None:
        """Put the newest version's payload into the store, if the version is ours and the payload is missing there."""
        with self._in_turn():
            self._look()
            found = self._client.get(self._name)
            if found is not None and self._newest is not None and not found.payload:
                version, slot, lengths = self._newest
                if not found.version.is_of_another_put(version):
                    self._client.enter().backfill_version(self._name, version, Pieces([slot.payload], lengths))

    def close(self, unlink: bool) -> None:
        with self._in_turn():
            for file in [*self._old, self._file]:
                if file is not None:
                    file.close(unlink)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        with ExitStack() as turn:
            availability = self._client.server.availability_of(self._name)
            with availability.held(self._next):
                turn.enter_context(availability.held(self._lock))
            yield

    def _look(self) -> None:
        """Find out which slot was announced last after a put without a reply, and free the others in doubt."""
        if self._in_doubt is None:
            return
        slot, lengths = self._in_doubt
        found = self._client.get(self._name)
        reference = SlotReference.unpack(found.reference) if found is not None and found.reference else None
        if self._file is not None:
            is_here = reference is not None and _name_of(self._file) == reference.file
            self._file.keep(reference.slot if reference is not None and is_here else None)
            if found is not None and reference is not None and is_here and reference.stamp == slot.stamp:
                self._newest = found.version, slot, lengths
        self._in_doubt = None

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
                logger.warning('value %r goes through Redis: %s', self._name, e)
            if isinstance(e, StoreTimeout):
                self._num_refused = _RETRY_AFTER  # The holder may go on at any moment. A try costs no wait.
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
