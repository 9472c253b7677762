"""The store of a run: streams, values and counters that its processes share."""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
import uuid
from dataclasses import replace
from types import TracebackType
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Sequence, Type

from ding_store.errors import ConfigError, NotEnoughSpace, StoreClosed, StoreError, StoreTimeout
from ding_store.storage.base import (
    OLDEST,
    START,
    Arrays,
    Entry,
    EntryId,
    Header,
    StoreInfo,
    StreamInfo,
    Value,
    put_id_of,
)
from ding_store.storage.client import LEAVE_S, Client
from ding_store.storage.encoding.framing import INLINE_BYTES, encode_pieces
from ding_store.storage.objects.objects import Objects
from ding_store.storage.options import HostOptions, StoreOptions, check_name
from ding_store.storage.protocol import Decided, Server, conflict
from ding_store.storage.shared_memory.cache_dir import CacheDir, Found, cache_name, open_cache_dir
from ding_store.storage.shared_memory.host_streams import HostStreams
from ding_store.storage.shared_memory.shared_values import HostValues

logger = logging.getLogger(__name__)

NO_HOST_CACHE = HostOptions(host_plane='off')

#: Time that a reader waits for the writer of a value on another host: the next version replaces a missed one.
_VALUE_PATIENCE_S = 30.0


class Store:
    """
    Overview:
        The place where the processes of a run share streams of entries, named values and counters.
        All methods may be called from several threads. Every wait has a deadline. When it passes, a method that writes
        raises StoreTimeout, and a method that reads returns nothing new.

        Delivery. A writer is one open store in one process. It numbers its entries per stream. It keeps each entry
        until every durable reader has acked it, or retention has dropped it. If the server lost entries, the writer
        sends them again, in order, before anything new. A reader skips the sequence numbers that it has seen: see
        ``exactly_once.reader.Reader``.
        If a server lost its memory, a writer also sends it the durable readers of its last reply. From then on the
        server keeps entries for all of them.
        Two cases are not covered. Entries of a writer that exited before the server lost them are lost. With several
        durable readers, one may ack an entry after the loss, before any writer has sent the list of readers. The others
        then miss that entry.

        Shared memory. Payloads are in files that all processes of a host map, while all readers of a stream are on one
        host. Otherwise, and without a directory for the files, they go through the server. The server orders and
        announces everything.
        A child that was forked opens the store anew, and is a new writer.
    Arguments:
        - open_server (:obj:`Callable`): Returns the server for a writer's id.
        - host (:obj:`HostOptions`): Use, place and size of the host cache.
        - connect (:obj:`bool`): True: connect now. False: connect on the first use.
    Raises (any method):
        - StoreUnavailable: The server is unreachable, and did not return within ``reconnect_timeout_s``.
        - StoreClosed: The store was closed.
    """

    #: No other process can open the store.
    is_private = False

    def __init__(
        self,
        run: str,
        open_server: Callable[[str], Server],
        options: StoreOptions,
        host: HostOptions = NO_HOST_CACHE,
        connect: bool = True,
    ) -> None:
        self.run = run
        self._open_server = open_server
        self._stream_options = options
        directory = None if host.host_cache_dir is None else os.path.abspath(host.host_cache_dir)
        self._host_options = replace(host, host_cache_dir=directory)
        self._is_over = False
        self._is_closed = False
        self._objects: Optional[Objects] = None
        self._objects_cache: Optional[CacheDir] = None  # for a store without a host cache
        self._fork_lock = threading.Lock()
        self._begin(connect)

    def _begin(self, connect: bool = False) -> None:
        """Create everything that belongs to one process."""
        self.client = client = Client(self.run, self._open_server, self._stream_options)
        if connect:
            client.server.connect()
        self._cache = _opened(cache_name(self.run, self.address), self._host_options)
        self._streams = HostStreams(client, self._cache, self._host_options.host_checksum)
        self._values = HostValues(client, self._cache, _VALUE_PATIENCE_S)
        self._decisions: Dict[str, _Decision] = {}
        self._tidied_at = time.monotonic()
        # Set last: until then other threads of a forked child wait, and all they find belongs to the parent process.
        self._pid = os.getpid()

    def _enter(self, looks_around: bool = True) -> Client:
        """Check that the store is open, reopen it after a fork, and regularly remove files. Return the client."""
        if self._is_closed:
            raise StoreClosed(f'the store of run {self.run!r} at {self.address} was closed')
        if self._pid != os.getpid():
            with self._fork_lock:
                if self._pid != os.getpid():
                    self._begin()
        if looks_around and self._cache is not None and not self.client.availability.is_nonblocking:
            self._tidy_in_time()
        return self.client

    def _server(self) -> Server:
        """Return the server for one command, after the same checks, and after sending again what it lost."""
        return self._enter().enter()

    def _tidy_in_time(self) -> None:
        if time.monotonic() - self._tidied_at < self.client.check_every_s:
            return
        self._tidied_at = time.monotonic()
        with self.client.availability.nonblocking():  # The caller's own request waits for a server that is away.
            self.tidy()
        self._streams.drop_deleted()
        self._drop_removed()

    @property
    def address(self) -> str:
        return self.client.server.address

    @property
    def writer(self) -> str:
        """Id of this store as a writer, unique to this process."""
        return self.client.server.writer

    @property
    def host(self) -> str:
        """Identity of this process's host cache, or '' without one."""
        return self._streams.host

    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId:
        """
        Overview:
            Append one entry. It is durable when this returns. One writer's entries are stored in order, at most once.
        Arguments:
            - header (:obj:`Mapping`): JSON-able.
            - arrays (:obj:`Mapping`): numpy arrays of a fixed-size dtype, copied before this returns. Their lengths may
              differ: a store does not check rows. The learner checks chunks against their schema.
            - timeout_s (:obj:`Optional[float]`): Seconds to wait for room in a full stream with overflow 'block'. If
              another thread is appending and does not wait for room, a shorter timeout becomes one second.
        Raises:
            - AppendUnsettled: The entry may still arrive: the server may have it, or is unreachable. The writer keeps
              the entry and sends it in a later call, once the server is back or has room. Do not append it again: that
              would double it. ``__cause__`` is the reason. After any error below, the entry never arrives:
            - StoreTimeout: overflow is 'block', and no room was made in time.
            - StreamFull: This one entry is larger than the limit.
            - ServerFull: The server is at its maxmemory.
            - NotEnoughSpace: This one entry is larger than a server accepts.
            - StoreError: The server refused it for a lasting reason. The message names the fix.
            One exception: if another thread closes the store during the append, StoreClosed is raised. The server may
            then have the entry.
        """
        check_name('stream', stream)
        client = self._enter()
        payload = self._streams.payload(stream, header, arrays)
        try:
            return client.append(stream, payload, timeout_s)
        finally:
            if not payload.is_kept:
                payload.release()  # Rings free space in order, so an unreleased payload blocks its ring for good.

    def read(self, stream: str, after: EntryId = OLDEST, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        """
        Overview:
            Return the next entries after ``after``, in order. Wait up to ``timeout_s`` for the first one. If ``after``
            is of a past epoch, start at the oldest entry of the current one. Most callers need
            ``exactly_once.reader.Reader`` instead.
        Returns:
            - entries (:obj:`list`): At most ``max_entries``. Empty if none came in time.
        Raises:
            - CorruptPayload: The first of these entries is not what was written. ``entry_id`` is its id, so that the
              caller can continue behind it.
        """
        check_name('stream', stream)
        self._enter()
        return self._streams.read(stream, after, max_entries, timeout_s)

    def register(self, stream: str, reader: str, durable: bool = True, start: str = 'oldest') -> EntryId:
        """
        Overview:
            Register a reader, and return the entry after which it continues. A registered reader continues behind its
            last ack. A new one starts at the oldest entry still held (``start='oldest'``) or behind the newest
            (``start='now'``). Retention waits for the acks of durable readers. Before the first durable reader
            registers, nothing is trimmed. Ephemeral readers hold no entries.
        """
        check_name('reader', reader)
        if start not in START:
            raise ConfigError(f'start ({start!r}) must be one of {", ".join(START)}')
        check_name('stream', stream)
        self._enter()
        return self._streams.register(stream, reader, durable, start)

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        """
        Overview:
            Acknowledge all entries up to and including ``entry_id``. Entries that all durable readers have acked are
            trimmed. An ack of a past epoch or of an unregistered reader changes nothing.
        Arguments:
            - wait (:obj:`bool`): False: a store may send the ack without waiting for its reply. Its next ``ack``,
              ``advance``, ``read``, ``register``, ``forget``, ``delete`` or ``flush`` waits for the reply and raises
              its errors, and ``close`` logs them. Until then the stream may not show the ack.
        """
        check_name('stream', stream)
        self._server().ack(stream, reader, entry_id, wait)
        self._streams.note_ack(stream, reader, entry_id)

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None:
        """
        Overview:
            Call ``ack``, then ``put(name, header, {})``. A reader uses this to publish its position after each entry.
            A store over Redis waits for both only at the first ``advance`` of a value, and for a header that does not
            fit into one message. Otherwise it returns when both are sent. The reply is read by the calls that
            ``ack`` names. ``close`` completes what is open if the server is reachable, and otherwise logs a warning.
            Within one epoch, the value's version grows at least as much as the entry's number.
        Raises:
            - StoreError: An error of this call, or of an earlier one whose reply this call reads.
        """
        check_name('stream', stream)
        check_name('value', name)
        server = self._server()
        server.versions.follow(name, entry_id)
        server.advance(stream, reader, entry_id, name, header)
        self._streams.note_ack(stream, reader, entry_id)

    def flush(self) -> None:
        """
        Overview:
            Wait until every ``advance`` is done. Send once more the entries that a full stream refused
            (AppendUnsettled), without waiting for room. Call this before you wait for a process that waits for them.
        Raises:
            - StoreError: The errors of ``ack`` and ``put``.
        """
        self._enter().flush()

    def close_for_writing(self) -> None:
        """
        Overview:
            Declare that this process appends nothing more. From now on, it sends nothing to a stream that was deleted
            since, because its name may belong to the next run. An append to such a stream raises StoreClosed. Entries
            that the server lost are still sent again.
        """
        self.client.close_for_writing()

    @property
    def is_away(self) -> bool:
        """
        True if a call made now would wait for an unreachable server. Reading it sends nothing and does not reconnect:
        other calls do, in any thread. With several servers, True if any of them is unreachable.
        """
        return self._pid == os.getpid() and self.client.availability.is_away()

    def is_away_for(self, name: str) -> bool:
        """Like ``is_away``, for the server of this stream, value or counter alone."""
        return self._pid == os.getpid() and self.client.server.availability_of(name).is_away()

    def nonblocking(self) -> ContextManager[None]:
        """
        Overview:
            Return a context in which this thread's calls do not wait for an unreachable server. They raise
            StoreUnavailable at once. If the server becomes unreachable during a call, the call may have taken effect.
            Other threads reconnect, send lost entries again and clean up. A server that hangs counts as unreachable
            after ``socket_timeout_s``.
        """
        return self.client.availability.nonblocking()

    def forget(self, stream: str, reader: str) -> bool:
        """
        Overview:
            Remove a reader for good, and return whether it was registered. Entries that only this reader still needed
            are trimmed. If it was the last durable reader, all entries are trimmed.
        """
        check_name('stream', stream)
        client = self._enter()
        self._streams.leave(stream, reader)
        return client.enter().unregister_reader(stream, reader)

    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        """
        Overview:
            Publish a new version of a value. It becomes visible whole or not at all, and replaces the previous one.
        Arguments:
            - expected_version (:obj:`Optional[int]`): Publish only if the value is at this version now. 0: only if it
              does not exist. A version that ``get`` or ``put`` returned must also be of the same put.
        Returns:
            - version (:obj:`ValueVersion`): 1, 2, 3, ... It grows as long as this store is open or the server
              has its memory.
        Raises:
            - VersionConflict: The value is at another version. Nothing was written.
        """
        self._enter()
        return self._values.put(name, header, arrays, expected_version)

    def decide(self, name: str, header: Header, expected_version: Optional[int] = None) -> int:
        """
        Overview:
            Put a value without arrays that is to survive a failover: a decision. This waits until ``min_replicas``
            replicas of the server have it. If they do not have it in half a second, a warning is logged, and the
            decision counts all the same. Call ``uphold`` regularly, to decide the same again if the server lost it.
        Returns:
            - version (:obj:`ValueVersion`): As ``put`` returns it.
        Raises:
            - VersionConflict: The value is at another version. Nothing was written.
        """
        check_name('value', name)
        payload = encode_pieces(header, {})
        if payload.num_bytes > INLINE_BYTES:
            raise NotEnoughSpace(
                f'decision {name!r} has {payload.num_bytes} bytes, and the limit is {INLINE_BYTES}. Put them into '
                'another value.'
            )
        server = self._server()
        decided = server.decide(name, payload, expected_version)
        if decided.num_replicas < server.min_replicas:
            logger.warning(
                'decision %r is on %d of %d replicas (min_replicas) of %s: a failover now may lose it',
                *(name, decided.num_replicas, server.min_replicas, self.address),
            )
        self._decisions[name] = _Decision(header, decided, put_id_of(expected_version))
        return decided.version

    def uphold(self, name: str) -> bool:
        """
        Overview:
            Check the last decision of this store on a value. Decide the same again if the server lost it, or went back
            to the version that it had replaced.
        Returns:
            - stands (:obj:`bool`): False: a process has deleted it, or this store has decided nothing.
        Raises:
            - VersionConflict: Another process has put the value since. Its version counts.
        """
        decision = self._decisions.get(name)
        if decision is None:
            return False
        found, known = self._enter().get(name), decision.decided.version
        if found is not None and not found.version.is_of_another_put(known):
            return True
        if found is None and self._is_same_memory(name, decision.decided.generation):
            self._decisions.pop(name, None)
            return False
        if found is not None and (decision.replaced == '' or found.version.put_id != decision.replaced):
            self._decisions.pop(name, None)
            raise conflict(name, found.version, known)
        logger.warning('%s has lost the decision %r of this process, which decides it again', self.address, name)
        self.decide(name, decision.header, 0 if found is None else found.version)
        return True

    def _is_same_memory(self, name: str, generation: str) -> bool:
        """Return whether the server of a value has lost nothing since it was of this generation."""
        server = self._server()
        return server.keeps_data or server.generation(name) == generation

    def set_start_version(self, name: str, version: int) -> None:
        """
        Overview:
            Give this store's next versions of a value numbers above ``version``, even if the server lost the value. A
            writer calls this after a restart. It sends nothing.
        """
        check_name('value', name)
        self._enter(looks_around=False).server.versions.raise_to(name, version)

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        """
        Overview:
            Return the newest version of a value if it is newer than ``newer_than``. Otherwise wait for one up to
            ``timeout_s``, and return None if none came. A server that lost its memory counts from 1 again, so a version
            *below* ``newer_than`` also counts as newer. The same number counts as newer if another put made it. For
            that, ``newer_than`` must be a version that ``get`` or ``put`` returned.
        """
        check_name('value', name)
        self._enter()
        return self._values.get(name, newer_than, timeout_s)

    def wait_for_version(
        self, name: str, version: int, timeout_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """
        Overview:
            Wait until a value has this version or a later one, for ``timeout_s`` at most. It may return sooner. Call
            ``get`` afterwards. In contrast to a wait in ``get``, earlier versions do not wake this process, so that
            a thousand processes may wait for versions of their own. A server that lost its memory may begin below.
        Arguments:
            - is_over (:obj:`Callable`): Called about every half second in this thread. True: return.
        Returns:
            - is_there (:obj:`bool`): True: the value had such a version. False: it had none, or this returned sooner.
        """
        check_name('value', name)
        self._enter()
        return self.client.wait_for_version(name, version, timeout_s, is_over)

    def shared_memory(self, name: str, num_bytes: int, fill: Callable[[memoryview], None]) -> memoryview:
        """
        Overview:
            Map memory of this host that all processes of the run read and write, without locks or announcements. The
            first caller creates it. It lasts until the last process of the run on this host has closed its store.
            A mapping stays valid after that.
        Arguments:
            - num_bytes (:obj:`int`): Size, the same in all processes.
            - fill (:obj:`Callable`): Called with the new memory, zeros, before any other process sees it.
        Raises:
            - ConfigError: There is no host cache (``memory://``, or host_plane 'off'), or the memory has another size.
            - NotEnoughSpace: The host cache has no room for it.
        """
        check_name('shared memory', name)
        self._enter()
        if self._cache is None:
            raise ConfigError(
                f'shared memory {name!r} needs the host cache, which {self.address} lacks here. Open embedded:// or '
                "redis:// with host_plane='auto'."
            )
        return self._cache.shared_memory(name, num_bytes, fill)

    def objects(self, **options: Any) -> Objects:
        """
        Overview:
            Return the run's objects: immutable arrays that all processes of the run get by reference. Call it once in
            each process that puts or gets them. The same store returns the same ``Objects``.
        Arguments:
            - options: The fields of ``ObjectOptions``. The first process of a host decides. Later ones need give none.
        Raises:
            - ConfigError: An option is wrong, or differs from the first process's, or there is no host cache
              (host_plane 'off').
        """
        self._enter()
        with self._fork_lock:
            if self._objects is None:
                self._objects = Objects(self, self._enter_objects, options)
        self._objects.check_options(options)
        return self._objects

    def _enter_objects(self) -> CacheDir:
        """Check that the store is open, and return the cache in which it keeps objects."""
        self._enter()
        if self._cache is not None:
            return self._cache
        if self.is_private:
            if self._objects_cache is None:
                self._objects_cache = open_cache_dir(f'memory-{uuid.uuid4().hex}')
            return self._objects_cache
        raise ConfigError(
            f"objects need the host cache, which {self.address} lacks here. Open it with host_plane='auto', and see "
            'its warning if it has no cache all the same.'
        )

    def add(self, counter: str, amount: int = 0) -> int:
        """
        Overview:
            Add to a counter, which begins at 0, and return its new value. Use counters only for display. If a reply is
            lost, an amount may be added twice, and counters are lost with the server's memory. Exact counts travel in
            entry headers.
        """
        check_name('counter', counter)
        amount = operator.index(amount)  # accepts numpy integers
        return self._server().add(counter, amount)

    def delete(self, name: str) -> bool:
        """
        Overview:
            Delete the stream, value and counter of this name, and return whether there was one. A stream also loses its
            readers: a reader that continues must register again.
        """
        check_name('stream', name)
        client = self._enter()
        self._values.drop(name)
        existed = client.delete(name)
        self._streams.drop(name)
        self._drop_removed()
        return existed

    def info(self) -> StoreInfo:
        """Return what the store holds now."""
        return self._server().info()

    def stream_info(self, stream: str) -> Optional[StreamInfo]:
        """Return what one stream holds now, or None if there is no such stream."""
        check_name('stream', stream)
        return self._server().stream_info(stream)

    def clear(self, last: Sequence[str] = ()) -> None:
        """Delete everything of this run, the names in ``last`` after all others."""
        _delete_all(self.info(), self.delete, last)

    def retire(self, last: Sequence[str] = ()) -> None:
        """
        Overview:
            Clear the run, which is over for good. A server that only serves this run then exits with its last user,
            without waiting ``grace_s``. Call this in the last process of a run, right before ``close``.
        """
        client = self._enter(looks_around=False)
        self._is_over = True
        known = client.enter().info()
        _delete_all(known, client.delete, last)
        client.server.retire({*known.streams, *known.values, *known.counters})

    def close(self) -> None:
        """
        Overview:
            Release connections, threads and files. First put our unacknowledged entries in rings, and the newest
            versions of our values, into the server for later readers. Entries and values stay in the store. May be
            called twice.
        """
        was_closed, self._is_closed = self._is_closed, True
        if was_closed or self._pid != os.getpid():
            return
        client = self.client
        if self._objects is not None:
            self._objects.stop()
        client.close_for_writing()
        with client.availability.leaving(LEAVE_S):
            are_entries_published = self._streams.finish(self._is_over)
            are_values_published = self._is_over or self._values.publish()
            client.close()
        self._streams.close(unlink=are_entries_published)
        self._values.close(unlink=are_values_published)
        if self._objects is not None:
            self._objects.close()
        if self._cache is not None:
            self._cache.close(self._is_over)
        if self._objects_cache is not None:
            self._objects_cache.close(is_over=True)

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
            streams = self.client.enter().info().streams if orphans else {}
            done = [found.path for found in orphans if self._values.is_done(found) or _is_done(found, streams)]
            done += self._cache.dead_files() + self._streams.done()
            self._cache.remove(done)
        except StoreTimeout as e:  # another process tidies it, or writes to it
            logger.debug('the host cache was not tidied: %s', e)
            return 0
        except (OSError, StoreError) as e:
            logger.info('the host cache could not be tidied: %s', e)
            return 0
        return len(done)

    def _drop_removed(self) -> None:
        """Drop mappings of removed files, which would keep their memory."""
        self._streams.drop_removed()
        self._values.drop_removed()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()


class _Decision(NamedTuple):
    header: Header
    decided: Decided
    replaced: str  # id of the put that it replaced. '' if there was none, or it is unknown


def _delete_all(info: StoreInfo, delete: Callable[[str], bool], last: Sequence[str]) -> None:
    names = dict.fromkeys([*info.streams, *info.values, *info.counters])
    for name in [name for name in names if name not in last] + [name for name in last if name in names]:
        delete(name)


def _opened(run: str, host: HostOptions) -> Optional[CacheDir]:
    if host.host_plane == 'off':
        return None
    try:
        return open_cache_dir(run, host.host_cache_dir, host.host_cache_bytes)
    except (OSError, ConfigError) as e:
        logger.warning('no host cache, so everything goes through Redis: %s', e)
        return None


def _is_done(found: Found, streams: Dict[str, StreamInfo]) -> bool:
    stream = streams.get(found.note.get('stream', ''))
    # A stream that the server lacks may be another server's, or may reappear when the server has loaded its data.
    number = stream.numbers.get(found.note.get('writer', '')) if stream else None
    return stream is not None and number is not None and number <= stream.floor
