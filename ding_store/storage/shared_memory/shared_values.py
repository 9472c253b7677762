"""Values on the shared-memory transport: bytes in slots of a memory-mapped file, announcements in the store.

A put copies the arrays into a slot, then announces the version in the store with a *reference* to that slot. Readers
therefore see a version whole or not at all, even if the writer crashes. Readers of this host lease the slot and read in
place. Other readers request a *backfill*: readers on other hosts, without a host cache, or whose file is gone. The
writer then puts the payload into the store as well. After the first request a thread backfills all later versions of
this value. The next put waits for a backfill in progress, so that readers elsewhere get versions however fast they
come. A writer that is closed backfills what only this host can read. A writer that is killed leaves its newest version
in its file. Readers of this host still read it. Other readers get PayloadLost until the next put.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from typing import Dict, Optional

from ding_store.errors import CorruptPayload, StoreClosed, StoreError
from ding_store.storage.base import Arrays, Header, Value
from ding_store.storage.client import Client
from ding_store.storage.encoding.framing import decode, encode_pieces
from ding_store.storage.options import check_name
from ding_store.storage.protocol import Version
from ding_store.storage.shared_memory.cache_dir import CacheDir, Found
from ding_store.storage.shared_memory.slots import SlotReader
from ding_store.storage.shared_memory.value_downloads import HostCopies
from ding_store.storage.shared_memory.value_resolver import ValueResolver
from ding_store.storage.shared_memory.value_slots import SlotReference, ValueSlots

logger = logging.getLogger(__name__)

#: Smaller values are part of their announcement, for all hosts alike.
SLOTS_FROM_BYTES = 32 << 10
#: Time that close() waits for the thread that backfills.
_JOIN_S = 10.0


class HostValues:
    """
    Overview:
        The values of one run, as one process of a host writes and reads them.
    Arguments:
        - cache (:obj:`Optional[CacheDir]`): The host cache. If None, all values go through Redis.
        - patience_s (:obj:`float`): Time that a reader waits for the writer of a value on another host.
    """

    def __init__(self, client: Client, cache: Optional[CacheDir], patience_s: float) -> None:
        self._client = client
        self._cache = cache
        self._copies = HostCopies(client, cache) if cache is not None else None
        fetch = self._copies.fetch if self._copies is not None else None
        self._resolver = ValueResolver(client, self._follow if cache is not None else None, patience_s, fetch)
        self._lock = threading.Lock()
        self._own: Dict[str, ValueSlots] = {}
        self._files: Dict[str, SlotReader] = {}
        self._closed = threading.Event()
        self._fillers: Dict[int, threading.Thread] = {}  # number of a server -> the thread that waits for it

    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        check_name('value', name)
        is_large = sum(array.nbytes for array in arrays.values() if hasattr(array, 'nbytes')) >= SLOTS_FROM_BYTES
        payload = encode_pieces(header, arrays)
        self._client.check_size(f'value {name!r}', payload.num_bytes)  # It may have to go through Redis later.
        if self._cache is None or not is_large:
            return self._client.enter().put(name, payload, b'', expected_version)
        slots = self._slots(name, self._cache)
        self._start_backfilling(name)  # Started first: a put without a reply may be announced all the same.
        version = slots.put(
            payload, lambda reference: self._client.enter().put(name, None, reference, expected_version)
        )
        if version is None:
            return self._client.enter().put(name, payload, b'', expected_version)
        return version

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        return self._resolver.get(name, newer_than, timeout_s)

    def drop(self, name: str) -> None:
        """Remove this host's files of a value that was deleted."""
        with self._lock:
            slots = self._own.pop(name, None)
        if slots is not None:
            slots.close(unlink=True)
        if self._copies is not None:
            self._copies.drop(name)
        self._resolver.forget(name)

    def drop_removed(self) -> None:
        """Drop mappings of removed files, which would keep their memory."""
        with self._lock:
            self._files = {key: old for key, old in self._files.items() if os.path.exists(old.path)}
        if self._copies is not None:
            self._copies.drop_removed()

    def is_done(self, found: Found) -> bool:
        """Return whether an exited writer's file can go. False if the server lacks the value: it may reappear."""
        if not found.note.get('value'):
            return False
        newest = self._client.get(found.note['value'])
        if newest is None:
            return False
        is_there = newest.reference and SlotReference.unpack(newest.reference).file in found.path
        return bool(newest.payload) or not is_there

    def publish(self) -> bool:
        """Backfill everything that only this host can read. Return whether that succeeded."""
        error: Optional[StoreError] = None
        for slots in list(self._own.values()):
            try:
                slots.backfill()
            except StoreError as e:  # Other values may have another server.
                error = error or e
        if error is not None:
            logger.warning('closed with values that only this host can read, so their files stay: %s', error)
        return error is None

    def close(self, unlink: bool) -> None:
        """Close after the client was closed, which wakes the threads."""
        self._closed.set()
        for slots in list(self._own.values()):
            slots.close(unlink)
        self._own, self._files = {}, {}
        if self._copies is not None:
            self._copies.close()
        for filler in self._fillers.values():
            if filler is not threading.current_thread():
                filler.join(_JOIN_S)

    def _slots(self, name: str, cache: CacheDir) -> ValueSlots:
        with self._lock:
            if name not in self._own:
                self._own[name] = ValueSlots(self._client, cache, name)
            return self._own[name]

    def _start_backfilling(self, name: str) -> None:
        shard = self._client.server.shard_of(name)
        if shard not in self._fillers:
            with self._lock:
                if shard not in self._fillers and not self._closed.is_set():
                    thread = threading.Thread(
                        target=self._backfill, args=(shard,), name='ding-store-values', daemon=True
                    )
                    thread.start()
                    self._fillers[shard] = thread  # Set after the start: close() may join it at any moment.

    def _backfill(self, shard: int) -> None:
        """
        Backfill what readers on other hosts request of the values of one server, even while no thread of this process
        calls the store.
        """
        pid, server = os.getpid(), self._client.server
        known: Dict[str, str] = {}
        has_warned = False
        while not self._closed.is_set() and pid == os.getpid():
            try:
                known = {name: known.get(name, '') for name in list(self._own) if server.shard_of(name) == shard}
                if not known:  # All were deleted. Redis refuses a wait for no stream.
                    self._closed.wait(1.0)
                    continue
                wanted = self._client.enter().wait_for_requests(known, self._client.check_every_s)
                for name in [name for name, token in wanted.items() if token != known[name]]:
                    slots = self._own.get(name)
                    if slots is not None:  # not deleted meanwhile
                        slots.backfill()
                known, has_warned = wanted, False
            except StoreClosed:
                return
            except Exception as e:  # noqa: BLE001 - for example no memory: the thread must go on for later requests
                if not has_warned:
                    has_warned = True
                    logger.warning(
                        'readers on other hosts get no new versions of %s: %s. The store is tried again each second.',
                        ', '.join(map(repr, known)),
                        e or type(e).__name__,
                    )
                self._closed.wait(1.0)

    def _follow(self, name: str, found: Version) -> Optional[Value]:
        """Return the value in place. None if its file is not on this host, or its slot has other bytes by now."""
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
            self.drop_removed()
            with self._lock:
                self._files[file] = found
        return found
