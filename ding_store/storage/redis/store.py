"""``RedisStore``, a store in a Redis server. keys.py lists the Redis keys that it uses."""

from __future__ import annotations

import operator
import os
import threading
import time
from contextlib import suppress
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Sequence, Tuple

import redis

from ding_store.errors import ConfigError, NotEnoughSpace, StoreClosed, StoreError, StoreUnavailable
from ding_store.storage.base import OLDEST, START, Arrays, Buffer, Entry, EntryId, Header, StoreInfo, StreamInfo, Value
from ding_store.storage.encoding.framing import INLINE_BYTES, MAX_BYTES, Pieces, encode_pieces
from ding_store.storage.encoding.value_parts import ValuePart
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.exactly_once.writer import Writer, writer_id
from ding_store.storage.options import ALL_OPTIONS, check_name, redis_options, refuse_rest, stream_options
from ding_store.storage.protocol import WAITING, Fetch, FreedCapacity, Moved, StoredEntry, Version, fetch_own, unwatched
from ding_store.storage.redis.appends import RedisAppends
from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.entries import RedisEntries
from ding_store.storage.redis.info import read_counters, read_stream, read_streams, read_values
from ding_store.storage.redis.keys import RunKeys
from ding_store.storage.redis.notifications import RedisNotifications
from ding_store.storage.redis.parts import Parts
from ding_store.storage.redis.scripts import Command
from ding_store.storage.redis.server_session import ServerSession
from ding_store.storage.redis.unanswered import Unanswered
from ding_store.storage.redis.values import RedisValues
from ding_store.storage.shared_memory.transports import PATIENCE_S, Resolver, TransportStore
from ding_store.storage.shared_memory.value_resolver import ValueResolver
from ding_store.storage.urls import check_url, directory_of, embedded_url, scheme_of

MAX_PAYLOAD_BYTES = MAX_BYTES
#: Time in which close() starts further attempts to reach a lost server, after a first one. No other process can resend
#: this store's unacked entries.
LEAVE_S = 5.0


class RedisStore(TransportStore):
    """
    Overview:
        A store in the server of a ``redis://``, ``rediss://``, ``unix://`` or ``embedded://`` URL. Pickles as its
        URL and options. A copy made by unpickling or ``fork`` opens its own connections and is a new writer.
    Arguments:
        - connect (:obj:`bool`): True: connect now. False: connect on the first use.
        - options: The fields of ``options.StreamOptions``, ``options.StoreOptions`` and ``options.RedisOptions``.
    """

    def __init__(self, url: str, run: str = 'default', connect: bool = True, **options: Any) -> None:
        self.run = check_name('run', run, slashes=False)
        self._url = url
        self._options = dict(options)
        check_url(url)
        self._directory = directory_of(url, run)
        self._closed = False
        self._fork_lock = threading.Lock()
        self._begin()
        if connect:
            self._connection.connect()

    def _begin(self) -> None:
        """Create the state of one process: its connections, and its writer id and sequence numbers."""
        options = dict(self._options)
        streams, server = stream_options(options), redis_options(options)
        refuse_rest(scheme_of(self._url), options, ALL_OPTIONS)
        if server.socket_timeout_s <= streams.check_every_s:
            raise ConfigError(
                f'socket_timeout_s ({server.socket_timeout_s}) must be above check_every_s ({streams.check_every_s})'
            )
        self._connection = Connection(self._url, self._directory, server)
        self.address = self._connection.address
        self.writer = writer_id()
        self._connection.after_reconnect = self._after_reconnect
        self._keys = RunKeys(self._connection, self.run)
        self._appends = RedisAppends(self._connection, self._keys, self.writer)
        self._writer = Writer(
            streams, self._appends.send_request, self._wait_for_capacity, self._appends.backfill, self._appends.leave
        )
        self.patience_s = max(PATIENCE_S, 1.5 * server.reconnect_timeout_s)
        self._resolver = Resolver(self)
        self._parts = Parts(self._connection)
        self._entries = RedisEntries(self._connection, self._keys, self._parts)
        self._notifications = RedisNotifications(self._connection, self._keys)
        self._values = RedisValues(self._connection, self._keys, self.writer)
        self._value_resolver = ValueResolver(self)
        self._unanswered = Unanswered(self._connection)
        self._pid = os.getpid()

    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId:
        check_name('stream', stream)
        self._enter(looks_around=False)
        return self.append_payload(stream, self._writer.encoded(stream, header, arrays), timeout_s)

    def append_payload(self, stream: str, payload: Payload, timeout_s: Optional[float] = None) -> EntryId:
        check_name('stream', stream)
        self.check_size(f'entry of {stream!r}', payload.size)
        self._enter(looks_around=False)
        with self._connection.one_wait():
            place = self._writer.append(stream, payload, timeout_s)
        # After the append: an append that reaches no server reports the fate of its entry and has waited enough.
        if not self.is_nonblocking:
            with suppress(StoreError), self._connection.nonblocking():
                self._writer.check()
        return place

    def read(self, stream: str, after: EntryId = OLDEST, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        return self._resolver.read(stream, after, max_entries, timeout_s)

    def read_records(
        self, stream: str, after: EntryId, max_entries: int, timeout_s: float, fetch: Fetch = fetch_own
    ) -> List[StoredEntry]:
        check_name('stream', stream)
        deadline = time.monotonic() + timeout_s
        self._enter()
        self._unanswered.flush()
        while True:
            self._enter()
            left = deadline - time.monotonic()
            block_ms = self._slice_ms(left) if left > 0 else 0
            records = self._entries.read(stream, after, max_entries, block_ms, fetch)
            if records or time.monotonic() >= deadline:
                return records

    def register(self, stream: str, reader: str, durable: bool = True, start: str = 'oldest') -> EntryId:
        return self.register_at(stream, reader, durable, start)

    def register_at(
        self, stream: str, reader: str, durable: bool = True, start: str = 'oldest', host: str = ''
    ) -> EntryId:
        check_name('reader', reader)
        if start not in START:
            raise ConfigError(f'start ({start!r}) must be one of {", ".join(START)}')
        check_name('stream', stream)
        self._enter()
        self._keys.list_name('stream', stream, again=True)
        epoch, number, chain = self._run('register', stream, reader, 'd' if durable else 'e', start, host, '')
        return EntryId(epoch.decode(), number).chained(chain.decode())

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        arguments = (entry_id.epoch, reader, entry_id.number, entry_id.chain)
        if wait:
            self._run('ack', stream, *arguments)
            return
        check_name('stream', stream)
        self._enter()
        self._unanswered.send(
            f'ack {stream!r}',
            lambda session: [self._keys.command(session, 'ack', stream, arguments)],
            lambda replies: None,
            lambda: self._ack(stream, arguments),
        )

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None:
        check_name('stream', stream)
        check_name('value', name)
        payload = encode_pieces(header, {})
        if payload.num_bytes > INLINE_BYTES or not self._values.has_seen(name):
            super().advance(stream, reader, entry_id, name, header)
            return
        self._enter()
        self._keys.list_name('value', name)
        acked = entry_id.epoch, reader, entry_id.number, entry_id.chain

        def commands(session: ServerSession) -> List[Command]:
            ack = self._keys.command(session, 'ack', stream, acked)
            return [ack, self._values.put_command(name, payload.sealed())]

        def note(replies: List[Any]) -> None:
            is_published, is_first = self._values.note(name, replies[1])
            if not is_published:
                self._publish(name, payload)
            elif is_first:
                self._keys.list_name('value', name, again=True)  # A server that lost its memory lost the list as well.

        def again() -> None:
            self._ack(stream, acked)
            self._publish(name, payload)

        self._unanswered.send(f'advance {reader!r} in {stream!r}', commands, note, again)

    def flush(self) -> None:
        self._enter()
        self._unanswered.flush()
        self._writer.flush()

    def close_for_writing(self) -> None:
        self._writer.close_for_writing()

    @property
    def is_away(self) -> bool:
        return self._pid == os.getpid() and self._connection.is_away()

    @property
    def num_sessions(self) -> int:
        return self._connection.num_sessions

    def nonblocking(self) -> ContextManager[None]:
        return self._connection.nonblocking()

    @property
    def is_nonblocking(self) -> bool:
        return self._connection.is_nonblocking

    def leaving(self) -> ContextManager[None]:
        return self._connection.leaving(LEAVE_S)

    def held(self, lock: ContextManager[Any]) -> ContextManager[Any]:
        return self._connection.held(lock)

    def forget(self, stream: str, reader: str) -> bool:
        return bool(self._run('forget', stream, reader))

    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        check_name('value', name)
        return self.put_version(name, encode_pieces(header, arrays), b'', expected_version)

    def put_version(
        self, name: str, payload: Optional[Pieces], reference: bytes, expected_version: Optional[int] = None
    ) -> int:
        check_name('value', name)
        self.check_size(f'value {name!r}', payload.num_bytes if payload is not None else 0)
        self._enter()
        return self._publish(name, payload, reference, expected_version)

    def set_start_version(self, name: str, version: int) -> None:
        check_name('value', name)
        self._enter(looks_around=False)
        self._values.set_start_version(name, version)

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        return self._value_resolver.get(name, newer_than, timeout_s)

    def get_version(
        self, name: str, newer_than: int, timeout_s: float = 0.0, or_filled: bool = False
    ) -> Optional[Version]:
        check_name('value', name)
        deadline = time.monotonic() + timeout_s
        while True:
            self._enter()
            found = self._values.newest(name, newer_than, or_filled)
            if found is None and (left := deadline - time.monotonic()) > 0:
                found = self._values.next(name, newer_than, or_filled, self._slice_ms(left))
            if found is not None or time.monotonic() >= deadline:
                return found

    def fetch_parts(self, name: str, wanted: Sequence[Tuple[ValuePart, memoryview]], moved: Moved = unwatched) -> bool:
        self._enter()
        return self._values.fetch(name, wanted, moved)

    def backfill_version(self, name: str, version: int, payload: Pieces) -> bool:
        self.check_size(f'value {name!r}', payload.num_bytes)
        self._enter()
        return self._values.backfill(name, version, payload)

    def request_version(self, name: str) -> None:
        self._enter()
        self._values.want(name)

    def wait_for_requests(self, known: Mapping[str, str], timeout_s: float) -> Dict[str, str]:
        self._enter()
        return self._values.wait_for_requests(known, self._slice_ms(timeout_s))

    def add(self, counter: str, amount: int = 0) -> int:
        check_name('counter', counter)
        amount = operator.index(amount)  # accepts numpy integers
        self._enter()
        keys = [self._keys.counters]
        return int(
            self._connection.call(f'add to {counter!r}', lambda session: session.run('add', keys, counter, amount))
        )

    def delete(self, name: str) -> bool:
        existed = bool(self._run('delete', name))
        self._writer.let_go(name)
        values = self._values.delete(name)
        numbers = self._connection.call(f'delete {name!r}', lambda session: self._keys.delist(session, name))
        return bool(existed or values or numbers)

    def info(self) -> StoreInfo:
        self._enter()
        return self._connection.call('info', self._info)

    def stream_info(self, stream: str) -> Optional[StreamInfo]:
        check_name('stream', stream)
        self._enter()
        return self._connection.call('info', lambda session: read_stream(session, self.run, stream))

    def retire(self, last: Sequence[str] = ()) -> None:
        known = self.info()
        super().retire(last)
        if self._directory is None:
            names = {*known.streams, *known.values, *known.counters}
            self._connection.call('retire', lambda session: self._keys.delete(session, names))
            return
        from ding_store.storage.embedded.private_server import mark_finished  # Only embedded servers need this.

        self._connection.end()
        mark_finished(self._directory, min(30.0, max(1.0, self._connection.reconnect_timeout_s)))

    def check_size(self, what: str, num_bytes: int) -> None:
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise NotEnoughSpace(f'{what} has {num_bytes} bytes, and the limit is {MAX_PAYLOAD_BYTES}. Split it.')

    @property
    def own_writer(self) -> Writer:
        # An append reads this before it keeps its entry. If no server is reachable then, the append must still keep it.
        self._enter(looks_around=False)
        return self._writer

    def want(self, stream: str) -> None:
        self._run('want', stream)

    def wait_for_backfill(
        self, stream: str, record: StoredEntry, timeout_s: float, fetch: Fetch = fetch_own
    ) -> Optional[Buffer]:
        deadline = time.monotonic() + timeout_s
        while True:
            self._enter()
            payload, how, freed = self._entries.state_of_backfill(stream, record, fetch)
            if how != WAITING or time.monotonic() >= deadline:
                return payload
            self._wait_for_capacity(stream, freed, deadline - time.monotonic())

    def fate_of(self, stream: str, record: StoredEntry) -> str:
        self._enter()
        return self._entries.state_of_backfill(stream, record)[1]

    def wait_for_transports(self, known: Mapping[str, int], timeout_s: float) -> None:
        self._enter()
        self._notifications.wait_for_transports(known, self._slice_ms(timeout_s))

    def close(self) -> None:
        was_closed, self._closed = self._closed, True
        if not was_closed and self._pid == os.getpid():
            self._unanswered.close(self._bring_last)
            self._connection.close()

    def __reduce__(self) -> Tuple[Callable[..., RedisStore], Tuple[Any, ...]]:
        # The path in an embedded:// URL is relative to the working directory of this process.
        url = self._url if self._directory is None else embedded_url(os.path.dirname(self._directory))
        return _reopened, (url, self.run, self._options)

    def _enter(self, looks_around: bool = True) -> None:
        """Check that the store is open, reopen it after a fork, and regularly resend entries that the server lost."""
        if self._closed:
            raise StoreClosed(f'the store at {self.address} was closed')
        if self._pid != os.getpid():
            with self._fork_lock:
                if self._pid != os.getpid():
                    self._begin()
        if looks_around and not self.is_nonblocking:
            self._writer.check()

    def _bring_last(self, error: Optional[StoreError]) -> None:
        """
        Overview:
            Resend unacked entries that the server may have lost, if it can be reached, and close the writer.
        Arguments:
            - error (:obj:`Optional[StoreError]`): The error that kept the unanswered commands from finishing, if any.
        """
        is_kept = self._directory is not None  # The server's append-only file has the entries. No need to start it.
        has_unacked = self._writer.has_unacked and not is_kept
        if has_unacked and error is None:
            error = self._ask_last()
        has_hung = error is not None and isinstance(error.__cause__, redis.TimeoutError)  # It has waited already.
        if error is not None and not (is_kept or has_hung) and self._connection.is_away():
            patience_s = min(LEAVE_S, self._connection.reconnect_timeout_s) if has_unacked else 0.0
            with suppress(StoreError):
                self._connection.reach('close', patience_s)
        with self._connection.nonblocking():
            self._writer.close(self._connection.is_away, is_kept)

    def _ask_last(self) -> Optional[StoreError]:
        """Check the writer's entries once: an idle connection may not show a lost server. Return the error, if any."""
        if self._connection.is_away():
            return StoreUnavailable(f'{self.address} is away')
        self._writer.close_for_writing()
        try:
            with self._connection.nonblocking():
                self._writer.check(now=True)
        except StoreError as e:
            return e
        return None

    def _after_reconnect(self) -> None:
        """Restore this store's names and entries before the next call: the new server may have lost its memory."""
        self._keys.doubt_list()
        self._writer.check(now=True)

    def _info(self, session: ServerSession) -> StoreInfo:
        streams, values = read_streams(session, self.run), read_values(session, self.run)
        return StoreInfo(
            self.address, self.run, session.generation.server, streams, values, read_counters(session, self.run)
        )

    def _ack(self, stream: str, arguments: Tuple[str, str, int, str]) -> None:
        self._connection.call(f'ack {stream!r}', lambda session: self._keys.run(session, 'ack', stream, arguments))

    def _publish(
        self, name: str, payload: Optional[Pieces], reference: bytes = b'', expected_version: Optional[int] = None
    ) -> int:
        self._keys.list_name('value', name)
        version, is_first = self._values.put(name, payload, reference, expected_version)
        if is_first:
            self._keys.list_name('value', name, again=True)  # A server that lost its memory lost the list as well.
        return version

    def _run(self, script: str, stream: str, *arguments: Any) -> Any:
        check_name('stream', stream)
        self._enter()
        self._unanswered.flush()
        return self._connection.call(
            f'{script} {stream!r}', lambda session: self._keys.run(session, script, stream, arguments)
        )

    def _wait_for_capacity(self, stream: str, freed: int, timeout_s: float) -> Optional[FreedCapacity]:
        self._enter()
        return self._notifications.wait_for_capacity(stream, freed, self._slice_ms(timeout_s))

    def _slice_ms(self, timeout_s: float) -> int:
        return max(1, int(min(timeout_s, self._writer.check_every_s) * 1000))


def _reopened(url: str, run: str, options: Dict[str, Any]) -> RedisStore:
    return RedisStore(url, run, connect=False, **options)
