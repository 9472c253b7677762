"""Reads and writes values in a Redis server, in the keys that lua/value.lua describes."""

from __future__ import annotations

import itertools
import threading
import uuid
from contextlib import suppress
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

from ding_store.errors import CorruptPayload, ServerFull, StoreError, StoreUnavailable, VersionConflict
from ding_store.storage.base import ValueVersion, put_id_of
from ding_store.storage.encoding.framing import INLINE_BYTES, Pieces
from ding_store.storage.encoding.value_parts import SentParts, ValuePart, is_good
from ding_store.storage.protocol import LOOK_S, Decided, Moved, StartVersions, Version, conflict
from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.keys import RunKeys
from ding_store.storage.redis.parts import MAX_TRIES, VANISHED, ReadReplica, read_parts, write_parts
from ding_store.storage.redis.resp import entries_of, fields_of
from ding_store.storage.redis.scripts import Argument, Command
from ding_store.storage.redis.server_session import Before, ServerSession

#: Reply to a put that may be a late one of a crashed writer. A running writer puts once more.
ASKED = 2
#: Most repetitions of a put for that reason. Other writers may be faster each time.
MAX_ASKED = 10
#: How long a decision waits for replicas. One that lags longer gets it later, if its primary lives.
REPLICAS_MS = 500

T = TypeVar('T')
PutOnce = Callable[..., Any]


class RedisValues:
    """
    Overview:
        The values of one run, for one process. Thread-safe.
    Arguments:
        - writer (:obj:`str`): The writer's id.
        - versions (:obj:`StartVersions`): The versions that this writer counts on from.
        - read_replica (:obj:`ReadReplica`): Reads what a replica has.
    """

    def __init__(
        self, connection: Connection, keys: RunKeys, writer: str, versions: StartVersions, read_replica: ReadReplica
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._writer = writer
        self._num_puts = itertools.count(1)
        self._versions = versions
        self._read_replica = read_replica
        self._seen: Dict[str, str] = {}  # value -> token of its newest version in the server's last reply
        self._sent: Dict[str, SentParts] = {}
        self._lock = threading.Lock()

    def put(
        self,
        name: str,
        payload: Optional[Pieces],
        reference: bytes,
        expected_version: Optional[int],
        put_once: Optional[PutOnce] = None,
    ) -> Tuple[ValueVersion, bool]:
        """
        Overview:
            Return the new version, and True if the server had no version before.
        Arguments:
            - put_once (:obj:`Optional[Callable]`): Runs the script, instead of ``_run``, for a payload without parts.
        """
        expected = -1 if expected_version is None else int(expected_version)
        if expected_version is not None and expected_version < 0:  # The server takes a negative one for any version.
            raise VersionConflict(f'value {name!r} cannot be at version {expected_version}')
        expected_token = put_id_of(expected_version)
        newest = self._versions.of(name)

        def publish(place: Argument, keys: Argument, before: Optional[Before]) -> Any:
            seen = self._seen.get(name, '') if num_asked < MAX_ASKED else '*'
            known = self._writer, next(self._num_puts), seen if expected_version is None else expected_token
            if put_once is not None:
                return put_once(token, newest, expected, place, keys, reference, *known)
            return self._run('put', name, token, newest, expected, place, keys, reference, *known, before=before)

        done, num_asked = ASKED, 0
        try:
            while done == ASKED:
                # Each attempt has its own token, because another thread may put this value between two attempts.
                token = uuid.uuid4().hex
                reply = self._publish('put', name, payload, token, publish, lambda reply: int(reply[0]))
                done, version, before, put_id = _reply(reply)
                self._seen[name] = put_id
                num_asked += 1
        except StoreUnavailable:
            # A server with this version may lose it. Skip its number, so that no other content ever gets it.
            self._versions.raise_to(name, max(newest, self._versions.of(name)) + 1)
            raise
        if not done:
            raise conflict(name, version, expected)
        self._versions.raise_to(name, version)
        return ValueVersion(version, put_id), before == 0

    def decide(
        self, name: str, payload: Pieces, expected_version: Optional[int], min_replicas: int
    ) -> Tuple[Decided, bool]:
        """Put a payload without parts, and wait for replicas. Return what ``put`` returns, with their number."""
        num_replicas, generation = 0, ''

        def put_once(*arguments: Argument) -> Any:
            nonlocal num_replicas, generation

            def command(session: ServerSession) -> Tuple[Any, int, str]:
                reply, reached = session.run_replicated(
                    'put', self._keys.of_value(name), arguments, min_replicas, REPLICAS_MS
                )
                return reply, reached, session.generation.run_id

            reply, num_replicas, generation = self._connection.call(f'decide {name!r}', command)
            return reply

        version, is_first = self.put(name, payload, b'', expected_version, put_once)
        return Decided(version, num_replicas, generation), is_first

    def has_seen(self, name: str) -> bool:
        """True if the token of the newest version is known. Without it the server would not accept a put at first."""
        return name in self._seen

    def put_command(self, name: str, payload: bytes) -> Command:
        """Return the command that puts a payload without parts, whatever the value's version is."""
        known = self._writer, next(self._num_puts), self._seen.get(name, '')
        newest = self._versions.of(name)
        return Command('put', self._keys.of_value(name), (uuid.uuid4().hex, newest, -1, payload, '', '', *known))

    def note(self, name: str, reply: Any) -> Tuple[bool, bool]:
        """Read the reply to ``put_command``. Return if it published, and if the server had no version before."""
        done, version, before, self._seen[name] = _reply(reply)
        if done == ASKED:
            return False, False
        self._versions.raise_to(name, version)
        return True, before == 0

    def newest(self, name: str, newer_than: int, or_filled: bool) -> Optional[Version]:
        """Return the newest version if it is newer. Older ones are not transferred."""
        value, meta, _ = self._keys.of_value(name)

        def command(session: ServerSession) -> Any:
            if newer_than > 0:
                ((version, token),) = session.ask(('HMGET', meta, 'version', 'token'))
                if version is None:
                    return []
                stored = ValueVersion(int(version), (token or b'').decode())
                if not (or_filled or stored.is_of_another_put(newer_than)):
                    return []
            found = fields_of(session.ask(('XREVRANGE', value, '+', '-', 'COUNT', 1))[0])
            is_unfilled = bool(found) and found[0][0].endswith(b'-0')
            return [] if is_unfilled and not _number(found[0]).is_of_another_put(newer_than) else found

        return _version(self._connection.call(f'get {name!r}', command))

    def next(self, name: str, newer_than: int, or_filled: bool, block_ms: int) -> Optional[Version]:
        key, after = self._keys.of(name, 'value'), _known(newer_than, or_filled)
        command = ('XREAD', 'COUNT', 1, 'BLOCK', block_ms, 'STREAMS', key, after)
        found = self._connection.wait(f'get {name!r}', lambda session: session.ask(command)[0])
        return _version(fields_of(entries_of(found)))

    def wait_for_version(self, name: str, version: int, block_ms: int, is_over: Callable[[], bool]) -> bool:
        """See ``Server.wait_for_version``. The server compares the ids, and wakes those whose version has come."""
        before = f'{version - 1}-18446744073709551615' if version > 0 else '0-0'
        command = ('XREAD', 'BLOCK', block_ms, 'STREAMS', self._keys.of(name, 'value'), before)
        return bool(self._connection.wait(f'wait for {name!r}', lambda session: session.wait(command, is_over, LOOK_S)))

    def fetch(self, name: str, wanted: Sequence[Tuple[ValuePart, memoryview]], moved: Moved) -> bool:
        parts = [(f'{self._part_key(name, part.token)}{part.number}'.encode(), target) for part, target in wanted]
        left = self._read_replica(parts, moved, lambda number: is_good(*wanted[number]))
        if not left:
            return True

        def read(session: ServerSession) -> bool:
            with session.borrowed() as connection:
                is_whole = True
                for number, is_there in zip(left, read_parts(connection, [parts[number] for number in left], moved)):
                    is_whole &= is_there
                    if is_whole and not is_good(*wanted[number]):
                        raise CorruptPayload(f'get {name!r}: the checksum of a part does not match')
                return is_whole

        return bool(self._connection.call(f'get {name!r}', read))

    def backfill(self, name: str, version: int, payload: Pieces) -> bool:
        token = put_id_of(version)

        def backfill(place: Argument, keys: Argument, before: Optional[Before]) -> Any:
            return self._run('fill_value', name, int(version), place, keys, token, before=before)

        return bool(self._publish('backfill', name, payload, uuid.uuid4().hex, backfill, int))

    def want(self, name: str) -> None:
        self._connection.call(f'request {name!r}', lambda session: session.run('want_value', self._keys.of_value(name)))

    def wait_for_requests(self, known: Mapping[str, str], block_ms: int) -> Dict[str, str]:
        keys, after = [self._keys.of(name, 'wants') for name in known], [last or '0-0' for last in known.values()]
        wait: Tuple[Argument, ...] = ('XREAD', 'COUNT', 1, 'BLOCK', block_ms, 'STREAMS', *keys, *after)
        (news,) = self._connection.wait('wait for requests', lambda session: session.ask(wait)) or (None,)
        if news:
            latest = {key.decode(): entries[-1][0].decode() for key, entries in news}
            return {name: latest.get(key, last) for (name, last), key in zip(known.items(), keys)}

        # XREAD finds no request in a server that lost its memory and whose clock was set back. Its ids are lower now.
        commands = [('XREVRANGE', key, '+', '-', 'COUNT', 1) for key in keys]
        newest = self._connection.call('wait for requests', lambda session: session.ask(*commands))
        return {name: found[0][0].decode() if found else '' for name, found in zip(known, newest)}

    def delete(self, name: str) -> bool:
        keys = self._keys.of_value(name)
        with self._lock:
            self._sent.pop(name, None)
            self._seen.pop(name, None)
        return bool(self._connection.call(f'delete {name!r}', lambda session: _delete(session, *keys)))

    def _publish(
        self,
        what: str,
        name: str,
        payload: Optional[Pieces],
        token: str,
        publish: Callable[[Argument, Argument, Optional[Before]], T],
        reply_of: Callable[[T], int],
    ) -> T:
        """
        Overview:
            Publish a payload in one round trip: ``publish(payload, '', None)``. For a large one it is
            ``publish(list of parts, their keys, before)``, where ``before`` sends the parts that changed. Publish once
            more, with all parts, if some are missing.
        Arguments:
            - reply_of (:obj:`Callable`): Reads a reply. 1: it was published. 0: it never will be. -1: parts are
              missing. ``ASKED``: not yet, and another attempt can use the parts that are there now.
        """
        if payload is None or payload.num_bytes <= INLINE_BYTES:
            return publish(payload.sealed() if payload is not None else b'', '', None)
        with self._lock:
            sent = self._sent.setdefault(name, SentParts(lambda token: self._part_key(name, token)))
        with self._connection.held(sent.lock):
            try:
                for _ in range(MAX_TRIES):
                    reply = publish(
                        lambda: sent.parts.pack(),
                        lambda: sent.keys,
                        lambda connection: write_parts(connection, sent.changed(payload, token), payload.num_bytes),
                    )
                    verdict = reply_of(reply)
                    if verdict == ASKED:
                        sent.keep()
                    else:
                        sent.flush(verdict > 0)
                    if verdict == 0:
                        self._drop_parts(name, sent.keys_of(token))
                    if verdict >= 0:
                        return reply
                raise ServerFull(f'{what} {name!r}: {VANISHED}')
            except ServerFull:
                self._drop_parts(name, sent.keys + sent.keys_of(token))  # those of earlier attempts included
                raise

    def _drop_parts(self, name: str, keys: str) -> None:
        """Delete the parts of a refused payload. Parts that cannot be deleted now expire later."""
        with suppress(StoreError):
            self._run('drop_parts', name, keys)

    def _run(self, script: str, name: str, *arguments: Argument, before: Optional[Before] = None) -> Any:
        keys = self._keys.of_value(name)
        return self._connection.call(
            f'{script} {name!r}', lambda session: session.run(script, keys, *arguments, before=before)
        )

    def _part_key(self, name: str, token: str) -> str:
        return self._keys.of(f'{name}/{token}', 'part:')


def _reply(reply: Any) -> Tuple[int, int, int, str]:
    done, version, before, token = reply
    return int(done), int(version), int(before), token.decode()


def _known(newer_than: int, or_filled: bool) -> str:
    """Return the last id that is not new. Id "<version>-1" is version "<version>-0" with its payload backfilled."""
    if newer_than <= 0:
        return '0-0'
    return f'{newer_than}-0' if or_filled else f'{newer_than}-18446744073709551615'


def _version(raw: List[Any]) -> Optional[Version]:
    for redis_id, fields in raw:
        version = _number((redis_id, fields))
        return Version(version, fields.get(b'p', b''), fields.get(b'r', b''), b'w' in fields)
    return None


def _number(raw: Tuple[bytes, Dict[bytes, bytes]]) -> ValueVersion:
    redis_id, fields = raw
    return ValueVersion(int(redis_id.partition(b'-')[0]), fields.get(b't', b'').decode(errors='replace'))


def _delete(session: ServerSession, value: str, meta: str, wants: str) -> int:
    known, existed = session.ask(('HMGET', meta, 'parts', 'parts_before'), ('DEL', value, meta, wants))
    parts = {key for keys in known if keys for key in keys.split()}
    if parts:
        session.ask(('UNLINK', *parts))
    return int(existed)
