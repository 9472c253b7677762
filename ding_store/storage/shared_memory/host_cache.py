"""A wrapper around a store that keeps the payloads of one host in memory-mapped files."""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from contextlib import suppress
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Set, Tuple

from ding_store.errors import ConfigError, CorruptPayload, StoreClosed, StoreError, StoreUnavailable
from ding_store.storage.base import OLDEST, Arrays, Buffer, Entry, EntryId, Header, Store, StoreInfo, StreamInfo, Value
from ding_store.storage.client import Client
from ding_store.storage.encoding.compression import AUTO
from ding_store.storage.encoding.framing import MAX_BYTES, corrupt_entry, decode_entry
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.protocol import Download, Remote, StoredEntry, fetch_own
from ding_store.storage.shared_memory.cache_dir import CacheDir, Found, open_cache_dir
from ding_store.storage.shared_memory.ring import RingReader
from ding_store.storage.shared_memory.rings import Rings, crc_of
from ding_store.storage.shared_memory.shared_values import HostValues
from ding_store.storage.shared_memory.stream_downloads import StreamCopies
from ding_store.storage.shared_memory.transports import Resolver, unpack

logger = logging.getLogger(__name__)


#: Time that close() waits for the keeper thread. The keeper's wait for news ends at once when the store is closed.
_JOIN_S = 10.0
#: Time that close() waits for a thread that waits for free space.
_PUBLISH_S = 1.0
#: Time that a reader waits for the writer of a value on another host: the next version replaces a missed one.
_VALUE_PATIENCE_S = 30.0


class HostCache(Store):
    """
    Overview:
        A store that puts payloads into rings of this host while all readers of a stream are on this host. Readers map
        the rings. Otherwise payloads go through Redis: before the first reader is known, and without a directory for
        the files. The wrapped store orders and announces everything. The cache can be pickled if the wrapped store can,
        and reopens itself after ``fork``.
    Arguments:
        - store (:obj:`Client`): The wrapped store, which ``close`` closes as well.
        - directory (:obj:`Optional[str]`): Place of the host cache. By default chosen by free space.
        - max_bytes (:obj:`Optional[int]`): Maximum size of the host cache. By default half of the free space, at most 8
          GiB.
        - patience_s (:obj:`Optional[float]`): Time that a reader waits for the writer of an entry on another host. By
          default the store's value.
        - checked (:obj:`bool`): Write a checksum with each entry in a ring.
    """

    def __init__(
        self,
        store: Client,
        directory: Optional[str] = None,
        max_bytes: Optional[int] = None,
        patience_s: Optional[float] = None,
        checked: bool = False,
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f'host_cache_bytes ({max_bytes}) must be >= 1')
        self.store = store
        self.run = store.run
        self._directory = None if directory is None else os.path.abspath(directory)
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._checked = checked
        self._is_over = False
        self._fork_lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Create everything that belongs to one process."""
        # Different servers may have runs of the same name.
        name = f'{self.run}-{zlib.crc32(self.address.encode()):08x}'
        self._cache = _opened(name, self._directory, self._max_bytes)
        self._copies = StreamCopies(self._cache, self._limit_of) if self._cache is not None else None
        self._resolver = Resolver(self.store, self._follow, self._complain, self._patience_s, self._fetch)
        self._values = HostValues(self.store, self._cache, _VALUE_PATIENCE_S)
        self._lock = threading.Lock()
        self._rings: Dict[str, Rings] = {}
        self._files: Dict[str, RingReader] = {}
        self._readers: Dict[str, Set[Tuple[str, bool]]] = {}  # stream -> (name, durable) registered with this host
        self._is_blind = self._cache is None  # This process cannot read the host's files.
        self._closed = threading.Event()
        self._keeper: Optional[threading.Thread] = None
        self._tidied_at = time.monotonic()
        # Set last: until then other threads of a forked child wait, and all they find belongs to the parent process.
        self._pid = os.getpid()

    @property
    def host(self) -> str:
        """Identity of this process's host cache, or '' without one."""
        return '' if self._cache is None or self._is_blind else self._cache.host

    @property
    def address(self) -> str:
        return self.store.address

    @property
    def writer(self) -> str:
        return self.store.writer

    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId:
        self._enter()
        payload = self._payload(stream, header, arrays)
        try:
            return self.store.append_payload(stream, payload, timeout_s)
        finally:
            if not payload.is_kept:
                payload.release()  # Rings free space in order, so an unreleased payload blocks its ring for good.

    def read(self, stream: str, after: EntryId = OLDEST, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        self._enter()
        return self._resolver.read(stream, after, max_entries, timeout_s)

    def register(self, stream: str, reader: str, durable: bool = True, start: str = 'oldest') -> EntryId:
        self._enter()
        place = self.store.register_at(stream, reader, durable, start, self.host)
        if self._copies is not None and self.host:
            with self._lock:
                self._readers.setdefault(stream, set()).add((reader, durable))
            self._copies.join(stream, reader, place)
        return place

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        self._enter()
        self.store.ack(stream, reader, entry_id, wait)
        self._note_ack(stream, reader, entry_id)

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None:
        self._enter()
        self.store.advance(stream, reader, entry_id, name, header)
        self._note_ack(stream, reader, entry_id)

    def flush(self) -> None:
        self._enter()
        self.store.flush()

    def close_for_writing(self) -> None:
        self.store.close_for_writing()

    @property
    def is_away(self) -> bool:
        return self.store.is_away

    def nonblocking(self) -> ContextManager[None]:
        return self.store.nonblocking()

    def forget(self, stream: str, reader: str) -> bool:
        self._enter()
        with self._lock:
            left = {one for one in self._readers.pop(stream, ()) if one[0] != reader}
            if left:
                self._readers[stream] = left
        if self._copies is not None:
            self._copies.leave(stream, reader)
        return self.store.forget(stream, reader)

    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        self._enter()
        return self._values.put(name, header, arrays, expected_version)

    def set_start_version(self, name: str, version: int) -> None:
        self.store.set_start_version(name, version)

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        self._enter()
        return self._values.get(name, newer_than, timeout_s)

    def add(self, counter: str, amount: int = 0) -> int:
        return self.store.add(counter, amount)

    def delete(self, name: str) -> bool:
        self._enter()
        self._values.drop(name)
        existed = self.store.delete(name)
        if self._copies is not None:
            self._copies.drop(name)
        with self._lock:
            rings = self._rings.pop(name, None)
        if rings is not None:
            rings.close(unlink=True)
        self._drop_removed()
        return existed

    def info(self) -> StoreInfo:
        return self.store.info()

    def stream_info(self, stream: str) -> Optional[StreamInfo]:
        return self.store.stream_info(stream)

    def retire(self, last: Sequence[str] = ()) -> None:
        self._is_over = True
        self.store.retire(last)

    def close(self) -> None:
        """
        Overview:
            Close the store and remove this process's files. First put our unacknowledged ring entries, and the newest
            versions of our values, into the wrapped store for later readers.
        """
        if self._pid == os.getpid() and not self._closed.is_set():
            self._closed.set()
            self.close_for_writing()
            with self.store.leaving():
                is_published = self._publish()
                are_values_published = self._is_over or self._values.publish()
                self.store.close()
            for rings in self._rings.values():
                rings.close(unlink=is_published)
            self._values.close(unlink=are_values_published, join_s=_JOIN_S)
            if self._keeper is not None and self._keeper is not threading.current_thread():
                self._keeper.join(_JOIN_S)
            if self._copies is not None:
                self._copies.close()
            if self._cache is not None:
                self._cache.close(self._is_over)
            # The mappings are part of reference cycles, which would keep their descriptors open until the garbage
            # collector runs.
            self._rings, self._files = {}, {}
        self.store.close()

    def tidy(self) -> int:
        """
        Overview:
            Remove files of this run that are no longer needed: files of exited processes whose content is acked or
            replaced, and downloads that no process of this host needs.
        Returns:
            - num_removed (:obj:`int`): Number of files removed.
        """
        if self._cache is None:
            return 0
        try:
            orphans = self._cache.orphans()
            streams = self.store.info().streams if orphans else {}
            done = [found.path for found in orphans if self._values.is_done(found) or _is_done(found, streams)]
            done += self._cache.dead_files() + (self._copies.done() if self._copies is not None else [])
            self._cache.remove(done)
        except (OSError, StoreError) as e:
            logger.info('the host cache could not be tidied: %s', e)
            return 0
        return len(done)

    def __reduce__(self) -> Tuple[Callable[..., HostCache], Tuple[Any, ...]]:
        return HostCache, (self.store, self._directory, self._max_bytes, self._patience_s, self._checked)

    def _enter(self) -> None:
        if self._pid != os.getpid():
            with self._fork_lock:
                if self._pid != os.getpid():
                    self._begin()
        if self._closed.is_set():
            raise StoreClosed(f'the store of run {self.run!r} was closed')
        if self.store.is_nonblocking:
            return
        if time.monotonic() - self._tidied_at >= self.store.own_writer.check_every_s:
            self._tidied_at = time.monotonic()
            with self.store.nonblocking():  # The caller's own request waits for a server that is away.
                self.tidy()
            self._drop_deleted()
            self._drop_removed()

    def _drop_deleted(self) -> None:
        """Close the rings of streams whose state the writer has dropped."""
        writer = self.store.own_writer
        with self._lock:
            for stream in [stream for stream in self._rings if not writer.has_stream_writer(stream)]:
                if self._rings[stream].retire():
                    del self._rings[stream]

    # Writing

    def _payload(self, stream: str, header: Header, arrays: Arrays) -> Payload:
        if self._cache is not None and self.store.own_writer.host_of(stream) == self._cache.host:
            rings = self._rings_of(stream, self._cache)
            self._start_keeper()  # Started first: a packed payload keeps its place in a ring until it is acked.
            packed = rings.pack(header, arrays)
            if packed is not None:
                return packed
        return self.store.own_writer.encoded(stream, header, arrays)

    def _rings_of(self, stream: str, cache: CacheDir) -> Rings:
        with self._lock:
            if stream not in self._rings:
                writer = self.store.own_writer
                options = writer.options_of(stream)
                limit = options.max_pending_bytes
                note = {'run': self.run, 'stream': stream, 'writer': self.writer}
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
        with suppress(StoreUnavailable), self.store.nonblocking():
            self.store.own_writer.ask_for_acks(stream, wait_s)

    def _publish(self) -> bool:
        if not self._rings or self._is_over:
            return True
        try:
            if self.store.own_writer.publish(_PUBLISH_S):
                return True
            reason = 'another thread is appending'
        except StoreError as e:
            reason = str(e)
        logger.warning('closed with entries that only this host can read, so their files stay: %s', reason)
        return False

    def _start_keeper(self) -> None:
        if self._keeper is None:
            with self._lock:
                if self._keeper is None and not self._closed.is_set():
                    keeper = threading.Thread(target=self._keep, name='ding-store-host-plane', daemon=True)
                    keeper.start()
                    self._keeper = keeper  # Set after the start: close() may join it at any moment.

    def _keep(self) -> None:
        """Backfill what readers on other hosts request, even while no thread of this process calls the store."""
        pid = self._pid
        while not self._closed.is_set() and pid == os.getpid():
            try:
                writer = self.store.own_writer
                known = writer.transports(list(self._rings))
                if not known:  # all were deleted
                    self._closed.wait(min(1.0, writer.check_every_s))
                self.store.wait_for_transports(known, writer.check_every_s)
                for stream in known:
                    writer.check_stream(stream, wait_s=1.0)
            except StoreClosed:
                return
            except Exception as e:  # noqa: BLE001 - for example no memory: the thread must go on for later requests
                level = logging.INFO if isinstance(e, StoreError) else logging.WARNING
                logger.log(level, 'backfills of entries wait for the store: %s', e or type(e).__name__)
                self._closed.wait(1.0)

    # Reading

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

    def _note_ack(self, stream: str, reader: str, entry_id: EntryId) -> None:
        if self._copies is not None:
            self._copies.note_ack(stream, reader, entry_id)

    def _limit_of(self, stream: str) -> int:
        return self.store.own_writer.options_of(stream).max_pending_bytes

    def _file(self, name: str) -> Optional[RingReader]:
        found = self._files.get(name)
        if found is None and self._cache is not None:
            try:
                found = RingReader(self._cache.path_of(name))
            except (OSError, CorruptPayload) as e:
                if not isinstance(e, FileNotFoundError):
                    logger.info('a file of this host cannot be mapped: %s', e)
                return None
            self._drop_removed()
            with self._lock:
                self._files[name] = found
        return found

    def _drop_removed(self) -> None:
        """Drop mappings of removed files, which would keep their memory."""
        with self._lock:
            self._files = {key: file for key, file in self._files.items() if os.path.exists(file.path)}
        self._values.drop_removed()

    def _complain(self, stream: str, record: StoredEntry) -> None:
        if self.host and unpack(record.payload).host == crc_of(self.host):
            logger.warning('the host cache was deleted or cannot be read: this process now reads through Redis')
            self._is_blind = True  # From now on this process counts as a host without files.
            if self._copies is not None:
                self._copies.close()
        if self._is_blind:
            self._say_blind()
        self.store.want(stream)

    def _say_blind(self) -> None:
        """Register this host's readers again, without a host. Repeat it if the server was away at the first try."""
        with self._lock:
            readers = [(stream, *one) for stream, known in self._readers.items() for one in known]
        for stream, reader, durable in readers:
            self.store.register_at(stream, reader, durable)
            with self._lock:
                self._readers[stream] = self._readers.get(stream, set()) - {(reader, durable)}


def _guard(file: RingReader, start: int) -> Callable[[], bool]:
    return lambda: file.is_valid(start)


def _opened(run: str, directory: Optional[str], max_bytes: Optional[int]) -> Optional[CacheDir]:
    try:
        return open_cache_dir(run, directory, max_bytes)
    except (OSError, ConfigError) as e:
        logger.warning('no host cache, so everything goes through Redis: %s', e)
        return None


def _is_done(found: Found, streams: Dict[str, StreamInfo]) -> bool:
    stream = streams.get(found.note.get('stream', ''))
    # A stream that the server lacks may be another server's, or may reappear when the server has loaded its data.
    number = stream.numbers.get(found.note.get('writer', '')) if stream else None
    return stream is not None and number is not None and number <= stream.floor
