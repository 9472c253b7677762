"""The streams of a run, as one process of a host writes and reads them: in mapped files, or through the server."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple

from ding_store.errors import CorruptPayload, StoreClosed, StoreError, StoreUnavailable
from ding_store.storage.base import Arrays, Buffer, Entry, EntryId, Header
from ding_store.storage.client import Client
from ding_store.storage.encoding.compression import AUTO
from ding_store.storage.encoding.framing import MAX_BYTES, corrupt_entry, decode_entry
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.protocol import Download, Remote, StoredEntry, fetch_own
from ding_store.storage.shared_memory.cache_dir import CacheDir
from ding_store.storage.shared_memory.ring import RingReader
from ding_store.storage.shared_memory.rings import Rings, crc_of
from ding_store.storage.shared_memory.stream_downloads import StreamCopies
from ding_store.storage.shared_memory.transports import Resolver, unpack

logger = logging.getLogger(__name__)

#: Time that close() waits for the keeper thread. The keeper's wait for news ends at once when the client is closed.
_JOIN_S = 10.0
#: Time that finish() waits for a thread that waits for free space.
_PUBLISH_S = 1.0


class HostStreams:
    """
    Overview:
        The streams of one run. Payloads are in rings of this host while all readers of a stream are on this host.
        Readers map the rings. Otherwise payloads go through the server: before the first reader is known, and without a
        host cache.
    Arguments:
        - cache (:obj:`Optional[CacheDir]`): The host cache. If None, all payloads go through the server.
        - checked (:obj:`bool`): Write a checksum with each entry in a ring.
    """

    def __init__(self, client: Client, cache: Optional[CacheDir], checked: bool) -> None:
        self._client = client
        self._cache = cache
        self._checked = checked
        self._copies = StreamCopies(cache, self._limit_of) if cache is not None else None
        self._resolver = Resolver(client, self._follow, self._complain, self._fetch)
        self._lock = threading.Lock()
        self._rings: Dict[str, Rings] = {}
        self._files: Dict[str, RingReader] = {}
        self._readers: Dict[str, Set[Tuple[str, bool]]] = {}  # stream -> (name, durable) registered with this host
        self._is_blind = cache is None  # This process cannot read the host's files.
        self._closed = threading.Event()
        self._keepers: Dict[int, threading.Thread] = {}  # number of a server -> the thread that waits for it

    @property
    def host(self) -> str:
        """Identity of this process's host cache, or '' without one."""
        return '' if self._cache is None or self._is_blind else self._cache.host

    def drop(self, stream: str) -> None:
        """Remove this host's files of a stream that was deleted."""
        if self._copies is not None:
            self._copies.drop(stream)
        with self._lock:
            rings = self._rings.pop(stream, None)
        if rings is not None:
            rings.close(unlink=True)

    def drop_deleted(self) -> None:
        """Close the rings of streams whose state the writer has dropped."""
        writer = self._client.own_writer
        with self._lock:
            for stream in [stream for stream in self._rings if not writer.has_stream_writer(stream)]:
                if self._rings[stream].retire():
                    del self._rings[stream]

    def drop_removed(self) -> None:
        """Drop mappings of removed files, which would keep their memory."""
        with self._lock:
            self._files = {key: file for key, file in self._files.items() if os.path.exists(file.path)}

    def done(self) -> List[str]:
        """Return the downloads that no process of this host needs any more."""
        return self._copies.done() if self._copies is not None else []

    def finish(self, is_over: bool) -> bool:
        """
        Overview:
            Stop the keepers, and send the payloads that only this host can read, unless the run is over. Call it right
            before the client is closed.
        Returns:
            - done (:obj:`bool`): Whether the files can go.
        """
        self._closed.set()
        if not self._rings or is_over:
            return True
        try:
            if self._client.own_writer.publish(_PUBLISH_S):
                return True
            reason = 'another thread is appending'
        except StoreError as e:
            reason = str(e)
        logger.warning('closed with entries that only this host can read, so their files stay: %s', reason)
        return False

    def close(self, unlink: bool) -> None:
        """Close after the client was closed, which wakes the keepers."""
        for rings in self._rings.values():
            rings.close(unlink)
        for keeper in self._keepers.values():
            if keeper is not threading.current_thread():
                keeper.join(_JOIN_S)
        if self._copies is not None:
            self._copies.close()
        # The mappings are part of reference cycles, which would keep their descriptors open until the garbage
        # collector runs.
        self._rings, self._files = {}, {}

    # Writing

    def payload(self, stream: str, header: Header, arrays: Arrays) -> Payload:
        """Return an entry's bytes, in a ring if that is the stream's transport and there is room."""
        if self._cache is not None and self._client.own_writer.host_of(stream) == self._cache.host:
            rings = self._rings_of(stream, self._cache)
            self._start_keeper(stream)  # Started first: a packed payload keeps its place in a ring until it is acked.
            packed = rings.pack(header, arrays)
            if packed is not None:
                return packed
        return self._client.own_writer.encoded(stream, header, arrays)

    def _rings_of(self, stream: str, cache: CacheDir) -> Rings:
        with self._lock:
            if stream not in self._rings:
                writer = self._client.own_writer
                options = writer.options_of(stream)
                limit = options.max_pending_bytes
                note = {'run': self._client.run, 'stream': stream, 'writer': self._client.server.writer}
                # A region may waste nearly its own length at the end of the ring.
                self._rings[stream] = Rings(
                    cache,
                    note,
                    limit + limit // 4,
                    min(limit, MAX_BYTES),
                    lambda wait_s: self._ask_for_acks(stream, wait_s),
                    # The bytes must be the same in each backfill, so that parts that were sent before stay valid.
                    None if options.compression == AUTO else options.compression,
                    self._checked,
                )
            return self._rings[stream]

    def _ask_for_acks(self, stream: str, wait_s: float) -> None:
        """Ask which entries are acked. If the server is away, do not wait: the append waits, and keeps its entry."""
        with suppress(StoreUnavailable), self._client.server.availability_of(stream).nonblocking():
            self._client.own_writer.ask_for_acks(stream, wait_s)

    def _start_keeper(self, stream: str) -> None:
        shard = self._client.server.shard_of(stream)
        if shard not in self._keepers:
            with self._lock:
                if shard not in self._keepers and not self._closed.is_set():
                    name = 'ding-store-host-plane'
                    keeper = threading.Thread(target=self._keep, args=(shard,), name=name, daemon=True)
                    keeper.start()
                    self._keepers[shard] = keeper  # Set after the start: close() may join it at any moment.

    def _keep(self, shard: int) -> None:
        """
        Backfill what readers on other hosts request of the streams of one server, even while no thread of this process
        calls the store.
        """
        while not self._closed.is_set():
            try:
                writer, server = self._client.own_writer, self._client.server
                known = writer.transports([stream for stream in list(self._rings) if server.shard_of(stream) == shard])
                if not known:  # all were deleted
                    self._closed.wait(min(1.0, writer.check_every_s))
                self._client.enter().wait_for_transports(known, writer.check_every_s)
                for stream in known:
                    writer.check_stream(stream, wait_s=1.0)
            except StoreClosed:
                return
            except Exception as e:  # noqa: BLE001 - for example no memory: the thread must go on for later requests
                level = logging.INFO if isinstance(e, StoreError) else logging.WARNING
                logger.log(level, 'backfills of entries wait for the store: %s', e or type(e).__name__)
                self._closed.wait(1.0)

    # Reading

    def read(self, stream: str, after: EntryId, max_entries: int, timeout_s: float) -> List[Entry]:
        return self._resolver.read(stream, after, max_entries, timeout_s)

    def register(self, stream: str, reader: str, durable: bool, start: str) -> EntryId:
        place = self._client.enter().register_reader(stream, reader, durable, start, self.host)
        if self._copies is not None and self.host:
            with self._lock:
                self._readers.setdefault(stream, set()).add((reader, durable))
            self._copies.join(stream, reader, place)
        return place

    def leave(self, stream: str, reader: str) -> None:
        """Note that a reader of this process is about to be removed."""
        with self._lock:
            left = {one for one in self._readers.pop(stream, ()) if one[0] != reader}
            if left:
                self._readers[stream] = left
        if self._copies is not None:
            self._copies.leave(stream, reader)

    def note_ack(self, stream: str, reader: str, entry_id: EntryId) -> None:
        if self._copies is not None:
            self._copies.note_ack(stream, reader, entry_id)

    def _follow(self, stream: str, record: StoredEntry) -> Optional[Entry]:
        """Return a reference's entry in place. None if its file is not on this host, or its bytes were overwritten."""
        reference = unpack(record.payload)
        file = self._file(reference.file)
        if file is None:
            return None
        try:
            view = file.view(reference.start, reference.length)
            reference.check_head(view)
            guard = _guard(file, reference.start)
            entry = decode_entry(stream, record.id, record.writer, record.sequence, view, guard)
        except CorruptPayload as e:
            if not file.is_valid(reference.start):
                return None
            raise corrupt_entry(stream, record.id, f'in {file.path!r}: {e}', record.writer, record.sequence) from e
        return entry if entry.validate() else None

    def _fetch(self, stream: str, wanted: Sequence[Remote], download: Download) -> List[Optional[Buffer]]:
        fetch = self._copies.fetch if self._copies is not None else fetch_own
        return fetch(stream, wanted, download)

    def _limit_of(self, stream: str) -> int:
        return self._client.own_writer.options_of(stream).max_pending_bytes

    def _file(self, name: str) -> Optional[RingReader]:
        found = self._files.get(name)
        if found is None and self._cache is not None:
            try:
                found = RingReader(self._cache.path_of(name))
            except (OSError, CorruptPayload) as e:
                if not isinstance(e, FileNotFoundError):
                    logger.info('a file of this host cannot be mapped: %s', e)
                return None
            self.drop_removed()
            with self._lock:
                self._files[name] = found
        return found

    def _complain(self, stream: str, record: StoredEntry) -> None:
        if self.host and unpack(record.payload).host == crc_of(self.host):
            logger.warning('the host cache was deleted or cannot be read: this process now reads through Redis')
            self._is_blind = True  # From now on this process counts as a host without files.
            if self._copies is not None:
                self._copies.close()
        if self._is_blind:
            self._say_blind()
        self._client.enter().request_backfills(stream)

    def _say_blind(self) -> None:
        """Register this host's readers again, without a host. Repeat it if the server was away at the first try."""
        with self._lock:
            readers = [(stream, *one) for stream, known in self._readers.items() for one in known]
        for stream, reader, durable in readers:
            self._client.enter().register_reader(stream, reader, durable)
            with self._lock:
                self._readers[stream] = self._readers.get(stream, set()) - {(reader, durable)}


def _guard(file: RingReader, start: int) -> Callable[[], bool]:
    return lambda: file.is_valid(start)
