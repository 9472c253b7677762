"""The server of a run in Redis: commands over one connection. keys.py lists the Redis keys that they use."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ding_store.errors import StoreError
from ding_store.storage.base import EntryId, Header, StoreInfo, StreamInfo, ValueVersion
from ding_store.storage.encoding.framing import INLINE_BYTES, MAX_BYTES, Pieces, encode_pieces
from ding_store.storage.encoding.value_parts import ValuePart
from ding_store.storage.options import RedisOptions
from ding_store.storage.protocol import (
    PATIENCE_S,
    AppendReply,
    AppendRequest,
    Backfill,
    Backfilled,
    Decided,
    Fetch,
    FreedCapacity,
    Moved,
    Server,
    StoredEntry,
    Version,
    fetch_own,
    unwatched,
)
from ding_store.storage.redis.appends import RedisAppends
from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.entries import RedisEntries
from ding_store.storage.redis.groups import Group
from ding_store.storage.redis.info import read_counters, read_memory, read_stream, read_streams, read_values
from ding_store.storage.redis.keys import RunKeys, generation_key
from ding_store.storage.redis.notifications import RedisNotifications
from ding_store.storage.redis.parts import Parts
from ding_store.storage.redis.replicas import Replicas
from ding_store.storage.redis.scripts import Command
from ding_store.storage.redis.server_session import ServerSession
from ding_store.storage.redis.unanswered import Unanswered
from ding_store.storage.redis.values import RedisValues

#: Longest wait for a higher version of a value, before a look at the version that there is.
_TRUST_S = 0.5


class RedisServer(Server):
    """
    Overview:
        The commands of one writer to a Redis server. It connects with the first one.
    Arguments:
        - url (:obj:`str`): URL of a server or of its sentinels. Unused if there is a directory.
        - directory (:obj:`Optional[str]`): The directory of the embedded server. None for another server.
        - group (:obj:`Optional[Group]`): The names of the run that this server has, if it is a node of a cluster.
    Attributes:
        - connection (:obj:`Connection`): The connection on which every command goes.
        - keys (:obj:`RunKeys`): The names of the run's keys.
    """

    max_payload_bytes = MAX_BYTES

    def __init__(
        self,
        url: str,
        directory: Optional[str],
        run: str,
        writer: str,
        options: RedisOptions,
        group: Optional[Group] = None,
    ) -> None:
        super().__init__(writer)
        self._run_name = run
        self._directory = directory
        tag = '' if group is None else group.tag
        self.connection = Connection(url, directory, options, generation_key(run, tag), group)
        self.availability = self.connection
        self.connection.after_reconnect = self._restore
        self.address = self.connection.address
        self.patience_s = max(PATIENCE_S, 1.5 * options.reconnect_timeout_s)
        self.keeps_data = directory is not None  # in its append-only file
        self.min_replicas = options.min_replicas
        self.keys = RunKeys(self.connection, run, tag)
        self._appends = RedisAppends(self.connection, self.keys, writer)
        self._replicas = Replicas(self.connection)
        self._parts = Parts(self.connection, self._replicas.read)
        self._entries = RedisEntries(self.connection, self.keys, self._parts)
        self._notifications = RedisNotifications(self.connection, self.keys)
        self._values = RedisValues(self.connection, self.keys, writer, self.versions, self._replicas.read)
        self._unanswered = Unanswered(self.connection)

    def connect(self) -> None:
        """Connect now, within ``connect_timeout_s``."""
        self.connection.connect()
        self.advice = self.connection.advice

    def _restore(self) -> None:
        """Restore names and entries before the next command: the new server may have lost its memory."""
        self.keys.doubt_list()
        self.after_reconnect()

    def append(self, request: AppendRequest) -> AppendReply:
        return self._appends.send_request(request)

    def backfill(self, request: Backfill) -> None:
        self._appends.backfill(request)

    def leave(self, stream: str, admission: int) -> None:
        self._appends.leave(stream, admission)

    def wait_for_capacity(self, stream: str, freed: int, timeout_s: float) -> Optional[FreedCapacity]:
        return self._notifications.wait_for_capacity(stream, freed, max(1, _ms(timeout_s)))

    def wait_for_transports(self, known: Mapping[str, int], timeout_s: float) -> None:
        self._notifications.wait_for_transports(known, max(1, _ms(timeout_s)))

    def read(
        self, stream: str, after: EntryId, max_entries: int, timeout_s: float = 0.0, fetch: Fetch = fetch_own
    ) -> List[StoredEntry]:
        self._unanswered.flush()
        return self._entries.read(stream, after, max_entries, _ms(timeout_s), fetch)

    def read_backfill(self, stream: str, entry: StoredEntry, fetch: Optional[Fetch] = None) -> Backfilled:
        return self._entries.read_backfill(stream, entry, fetch)

    def request_backfills(self, stream: str) -> None:
        self._run('want', stream)

    def register_reader(
        self, stream: str, reader: str, durable: bool = True, start: str = 'oldest', host: str = ''
    ) -> EntryId:
        self.keys.list_name('stream', stream, again=True)
        epoch, number, chain = self._run('register', stream, reader, 'd' if durable else 'e', start, host, '')
        return EntryId(epoch.decode(), number).chained(chain.decode())

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        arguments = (entry_id.epoch, reader, entry_id.number, entry_id.chain)
        if wait:
            self._run('ack', stream, *arguments)
            return
        self._unanswered.send(
            f'ack {stream!r}',
            lambda session: [self.keys.command(session, 'ack', stream, arguments)],
            lambda replies: None,
            lambda: self._ack(stream, arguments),
        )

    def unregister_reader(self, stream: str, reader: str) -> bool:
        return bool(self._run('forget', stream, reader))

    def put(
        self, name: str, payload: Optional[Pieces], reference: bytes = b'', expected_version: Optional[int] = None
    ) -> ValueVersion:
        self._list_value(name, expected_version)
        version, is_first = self._values.put(name, payload, reference, expected_version)
        if is_first:
            self.keys.list_name('value', name, again=True)  # A server that lost its memory lost the list as well.
        return version

    def decide(self, name: str, payload: Pieces, expected_version: Optional[int] = None) -> Decided:
        self._list_value(name, expected_version)
        decided, is_first = self._values.decide(name, payload, expected_version, self.min_replicas)
        if is_first:
            self.keys.list_name('value', name, again=True)
        return decided

    def _list_value(self, name: str, expected_version: Optional[int]) -> None:
        """Put a value on the list of names, unless it is there: a version to replace was listed when it was put."""
        if not expected_version:
            self.keys.list_name('value', name)

    def generation(self, name: str) -> str:
        return self.connection.call(f'generation of {name!r}', lambda session: session.generation.run_id)

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0, or_filled: bool = False) -> Optional[Version]:
        # Mostly a higher version comes soon, and no look is needed. But a wait returns only higher versions, and a
        # server that lost its memory may have a lower one. So a short wait ends with a look: one more round trip.
        first_s = min(timeout_s, _TRUST_S)
        found = self._values.next(name, newer_than, or_filled, _ms(first_s)) if first_s > 0 else None
        found = found or self._values.newest(name, newer_than, or_filled)
        if found is None and timeout_s > first_s:
            found = self._values.next(name, newer_than, or_filled, _ms(timeout_s - first_s))
        return found

    def wait_for_version(
        self, name: str, version: int, timeout_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        return self._values.wait_for_version(name, version, max(1, _ms(timeout_s)), is_over)

    def fetch_parts(self, name: str, wanted: Sequence[Tuple[ValuePart, memoryview]], moved: Moved = unwatched) -> bool:
        return self._values.fetch(name, wanted, moved)

    def backfill_version(self, name: str, version: int, payload: Pieces) -> bool:
        return self._values.backfill(name, version, payload)

    def request_version(self, name: str) -> None:
        self._values.want(name)

    def wait_for_requests(self, known: Mapping[str, str], timeout_s: float) -> Dict[str, str]:
        return self._values.wait_for_requests(known, max(1, _ms(timeout_s)))

    def add(self, counter: str, amount: int) -> int:
        keys = [self.keys.counters]
        what = f'add to {counter!r}'
        return int(self.connection.call(what, lambda session: session.run('add', keys, counter, amount)))

    def delete(self, name: str) -> bool:
        existed = bool(self._run('delete', name))
        values = self._values.delete(name)
        numbers = self.connection.call(f'delete {name!r}', lambda session: self.keys.delist(session, name))
        return bool(existed or values or numbers)

    def info(self) -> StoreInfo:
        def read(session: ServerSession) -> StoreInfo:
            streams, values = read_streams(session, self.keys), read_values(session, self.keys)
            server, counters = session.generation.server, read_counters(session, self.keys)
            memory = read_memory(session)
            return StoreInfo(self.address, self._run_name, server, streams, values, counters, memory)

        return self.connection.call('info', read)

    def stream_info(self, stream: str) -> Optional[StreamInfo]:
        return self.connection.call('info', lambda session: read_stream(session, self.keys, stream))

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None:
        """
        Send both commands in one message. Wait for their replies only at the first ``advance`` of a value, and for a
        header that does not fit into one message.
        """
        acked = entry_id.epoch, reader, entry_id.number, entry_id.chain
        self._announce(
            f'advance {reader!r} in {stream!r}',
            name,
            encode_pieces(header, {}),
            lambda session: [self.keys.command(session, 'ack', stream, acked)],
            lambda: self._ack(stream, acked),
            lambda: self.ack(stream, reader, entry_id),
        )

    def announce(self, name: str, header: Header) -> None:
        """Like ``advance``, without the ack."""
        self._announce(
            f'put {name!r}', name, encode_pieces(header, {}), lambda session: [], lambda: None, self._unanswered.flush
        )

    def _announce(
        self,
        what: str,
        name: str,
        payload: Pieces,
        first: Callable[[ServerSession], List[Command]],
        first_again: Callable[[], None],
        first_and_wait: Callable[[], None],
    ) -> None:
        """
        Overview:
            Put a value without a wait, behind other commands in the same message.
        Arguments:
            - first (:obj:`Callable`): Returns those commands.
            - first_again (:obj:`Callable`): Sends them once more, and waits for their replies.
            - first_and_wait (:obj:`Callable`): Sends them behind all that has no reply yet, if this put must wait.
        """
        if payload.num_bytes > INLINE_BYTES or not self._values.has_seen(name):
            first_and_wait()
            self.put(name, payload)
            return
        self.keys.list_name('value', name)

        def commands(session: ServerSession) -> List[Command]:
            return [*first(session), self._values.put_command(name, payload.sealed())]

        def note(replies: List[Any]) -> None:
            is_published, is_first = self._values.note(name, replies[-1])
            if not is_published:
                self.put(name, payload)
            elif is_first:
                self.keys.list_name('value', name, again=True)  # A server that lost its memory lost the list as well.

        def again() -> None:
            first_again()
            self.put(name, payload)

        self._unanswered.send(what, commands, note, again)

    def flush(self) -> None:
        self._unanswered.flush()

    def finish(self) -> Optional[StoreError]:
        return self._unanswered.finish()

    def close(self) -> None:
        self.settle()
        self.disconnect()

    def settle(self) -> None:
        """Send what has no reply yet, for the last time."""
        self._unanswered.close()

    def disconnect(self) -> None:
        self.connection.close()
        self._replicas.close()

    def retire(self, names: Set[str]) -> None:
        if self._directory is None:
            self.connection.call('retire', lambda session: self.keys.delete(session, names))
            return
        from ding_store.storage.embedded.private_server import mark_finished  # Only embedded servers need this.

        self.connection.end()
        mark_finished(self._directory, min(30.0, max(1.0, self.connection.reconnect_timeout_s)))

    def _ack(self, stream: str, arguments: Tuple[str, str, int, str]) -> None:
        self.connection.call(f'ack {stream!r}', lambda session: self.keys.run(session, 'ack', stream, arguments))

    def _run(self, script: str, stream: str, *arguments: Any) -> Any:
        self._unanswered.flush()
        what = f'{script} {stream!r}'
        return self.connection.call(what, lambda session: self.keys.run(session, script, stream, arguments))


def _ms(timeout_s: float) -> int:
    """Return the milliseconds of a wait: 0 only for no wait, which Redis takes for an endless one."""
    return max(1, int(timeout_s * 1000)) if timeout_s > 0 else 0
