"""Values that come through Redis: one process downloads a version, and all processes of the host read it in place.

The downloaded versions of a value are in shared slots of the host cache, each stamped with what it is. A process that
does not find its stamp takes the value's lock, looks again, and downloads. If it is killed meanwhile, it loses the lock
and leaves a slot without a stamp. The list of its parts follows each payload: parts that the next version has in common
with it are copied instead of downloaded.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Dict, List, Optional, Tuple

import numpy as np

from ding_store.errors import CorruptPayload, NotEnoughSpace, StoreUnavailable
from ding_store.storage.base import Buffer
from ding_store.storage.client import Client
from ding_store.storage.encoding.framing import payload_bytes
from ding_store.storage.encoding.value_parts import PartList, ValuePart, unpack, where_known
from ding_store.storage.protocol import Moved
from ding_store.storage.shared_memory.cache_dir import CacheDir
from ding_store.storage.shared_memory.download_lock import FetchLock
from ding_store.storage.shared_memory.slots import SharedSlots, SlotReader

logger = logging.getLogger(__name__)


def fetch_payload(client: Client, name: str, listed: PartList) -> Optional[Buffer]:
    """
    Overview:
        Download a payload into this process's own memory. Return None if a part of it is missing.
    Raises:
        - NotEnoughSpace: There is no memory for it.
    """
    try:
        payload = np.empty(listed.num_bytes, np.uint8).data
    except MemoryError as e:
        raise NotEnoughSpace(
            f'value {name!r} has {listed.num_bytes} bytes, and this process has no memory for them. Give it more.'
        ) from e
    return payload.toreadonly() if client.enter().fetch_parts(name, _targets(listed, payload)) else None


class HostCopies:
    """
    Overview:
        This host's downloads of the values of a run, as one process uses them. Thread-safe.
    """

    def __init__(self, client: Client, cache: CacheDir) -> None:
        self._client = client
        self._cache = cache
        self._lock = threading.Lock()
        self._locks: Dict[str, FetchLock] = {}
        self._readers: Dict[str, SlotReader] = {}  # by value, like the writers
        self._writers: Dict[str, SharedSlots] = {}
        self._has_complained = False

    def fetch(self, name: str, listed: PartList) -> Optional[Buffer]:
        """Return the payload, in place if possible. None if a part of it is missing."""
        try:
            path = self._cache.copies_path_of(name, listed.num_bytes + len(listed.pack()))
            payload = self._find(name, path, listed)
            if payload is not None:
                return payload
            with self._lock_of(name).taken() as held:
                payload = self._find(name, path, listed)
                if payload is None and held is not None and self._download_into_slot(name, path, listed, held.touch):
                    payload = self._find(name, path, listed)
            if payload is not None:
                return payload
        except StoreUnavailable:  # also an OSError
            raise
        except (OSError, CorruptPayload) as e:
            self._complain(name, e)
        return fetch_payload(self._client, name, listed)

    def drop_removed(self) -> None:
        """Drop mappings of removed files, which would keep their memory."""
        with self._lock:
            for files in (self._readers, self._writers):
                for name in [name for name, file in files.items() if not os.path.exists(file.path)]:
                    del files[name]

    def close(self) -> None:
        with self._lock:
            self._readers.clear()
            self._writers.clear()

    def drop(self, name: str) -> None:
        """Remove the downloads of a value that was deleted."""
        with self._lock:
            for known in (self._readers, self._writers, self._locks):
                known.pop(name, None)
        try:
            self._cache.drop_copies(name)
        except OSError as e:
            self._complain(name, e)

    def _find(self, name: str, path: str, listed: PartList) -> Optional[memoryview]:
        reader = self._readers.get(name)
        if reader is None or reader.path != path or not reader.is_current:
            try:
                reader = SlotReader(path)
            except (FileNotFoundError, CorruptPayload):
                return None
            with self._lock:
                self._readers[name] = reader
        found = reader.find(listed.stamp)
        return found[: listed.num_bytes] if found is not None else None

    def _lock_of(self, name: str) -> FetchLock:
        with self._lock:
            return self._locks.setdefault(name, FetchLock(lambda: self._cache.fetch_path_of(name)))

    def _download_into_slot(self, name: str, path: str, listed: PartList, moved: Moved) -> bool:
        slots, trailer = self._slots(name, path), listed.pack()
        contents = slots.contents()
        known = where_known({slot: _listed(content) for slot, content in contents.items()})

        def write(slot: int, content: memoryview) -> bool:
            missing = []
            for offset, (part, target) in zip(listed.offsets, _targets(listed, content)):
                places = known.get(part[:2], [])
                if (slot, offset) in places:
                    continue  # Already in this slot, from an earlier version.
                sources = [contents[other][at : at + len(target)] for other, at in places if other != slot]
                if sources:
                    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(sources[0], np.uint8))
                else:
                    missing.append((part, target))
            content[listed.num_bytes :] = trailer
            return self._client.enter().fetch_parts(name, missing, moved)

        return slots.fill(listed.stamp, listed.num_bytes + len(trailer), write)

    def _slots(self, name: str, path: str) -> SharedSlots:
        found = self._writers.get(name)
        if found is None or found.path != path or not found.is_current:
            found = self._writers[name] = self._cache.open_copies(path, name)
        return found

    def _complain(self, name: str, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning('each process downloads value %r for itself: %s', name, error)


def _targets(listed: PartList, payload: memoryview) -> List[Tuple[ValuePart, memoryview]]:
    return [(part, payload[offset : offset + part.num_bytes]) for part, offset in zip(listed.parts, listed.offsets)]


def _listed(content: memoryview) -> PartList:
    """Return the parts of a slot's content. Content that is not a payload has no parts in common with any."""
    try:
        listed = unpack(bytes(content[payload_bytes(content) :]))
    except CorruptPayload:
        listed = None
    return listed if listed is not None else PartList(())
