"""Requests of a writer to a Redis server: append, backfill and leave. Large payloads go in parts."""

from __future__ import annotations

from typing import Any, Optional

from ding_store.errors import ServerFull
from ding_store.storage.base import Buffer
from ding_store.storage.protocol import FULL, MAX_SILENT_WRITERS, STALE, WIRE, AppendReply, AppendRequest, Backfill
from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.keys import RunKeys
from ding_store.storage.redis.parts import is_large, place_of, publish_in_parts
from ding_store.storage.redis.server_session import Before, ServerSession

#: From this size on, a writer checks for free capacity before it sends the parts. Smaller ones are sent at once, and
#: take room in the server until they are dropped if the stream is full.
ASK_BYTES = 4 << 20

#: Statuses for payloads in parts. They never reach an outbox.
ROOM = 'ROOM'  # there is capacity, send the parts
NO_PARTS = 'NO PARTS'  # parts are missing, or have expired


class RedisAppends:
    """
    Overview:
        Sends the requests of one writer. Thread-safe.
    Arguments:
        - writer (:obj:`str`): The writer's id.
    """

    def __init__(self, connection: Connection, keys: RunKeys, writer: str) -> None:
        self._connection = connection
        self._keys = keys
        self._writer = writer

    def send_request(self, request: AppendRequest) -> AppendReply:
        if request.sequence > 0:
            self._keys.list_name('stream', request.stream)
        if len(request.payload) >= ASK_BYTES:
            reply = self._append(request, b'', -1, '', None)
            if reply.status != ROOM:
                return reply
        what, key = f'append to {request.stream!r}', self._part_key(request.stream, request.sequence, request.payload)
        try:
            reply = publish_in_parts(
                what,
                key,
                request.payload,
                lambda *place: self._append(request, *place),
                lambda one: one.status == NO_PARTS,
            )
        except ServerFull:
            # The append of an earlier attempt, whose reply was lost, may have succeeded. Its entry owns the parts then.
            if (
                key
                and self._append(request._replace(sequence=0, transport=WIRE), b'', 0, '', None).last < request.sequence
            ):
                self._drop_parts(what, key, request.payload)
            raise
        if reply.status == FULL and key:
            self._drop_parts(what, key, request.payload)
        return reply

    def backfill(self, request: Backfill) -> None:
        known = (request.epoch, self._writer, request.sequence, request.number)
        what, key = f'backfill {request.stream!r}', self._part_key(request.stream, request.sequence, request.payload)

        def backfill(place: bytes, num_parts: int, key: str, before: Optional[Before]) -> Any:
            arguments = (*known, num_parts, key, place)
            return self._connection.call(
                what, lambda session: self._keys.run(session, 'fill', request.stream, arguments, before)
            )

        try:
            publish_in_parts(what, key, request.payload, backfill, lambda reply: reply < 0)
        except ServerFull:
            if key:
                backfill(b'', place_of(key, request.payload).num_parts, key, None)
            raise

    def _drop_parts(self, what: str, key: str, payload: bytes) -> None:
        """Delete the parts of a refused payload: they would only take up room."""
        keys = place_of(key, payload).keys
        self._connection.call(what, lambda session: session.ask(('UNLINK', *keys)))

    def _part_key(self, stream: str, sequence: int, payload: bytes) -> str:
        if not is_large(payload):
            return ''
        # The checksum is in the key: a sequence that was taken back may be used again for another payload.
        return self._keys.of(f'{stream}/{self._writer}', f'{sequence}:{payload[4:8].hex()}:part:')

    def _append(
        self, request: AppendRequest, payload: Buffer, num_parts: int, key: str, before: Optional[Before]
    ) -> AppendReply:
        arguments = (
            request.epoch,
            self._writer,
            request.sequence,
            request.base,
            request.size,
            request.max_pending_bytes,
            int(request.drop_oldest),
            '' if request.transport == WIRE else request.transport,
            num_parts,
            key,
            request.readers,
            '',  # compression that all readers must have: a reader without the codec raises an error instead
            request.last_reply,
            request.admission,
            request.listed,
            MAX_SILENT_WRITERS,
            payload,
        )

        def run(session: ServerSession) -> Any:
            reply = self._keys.run(session, 'append', request.stream, arguments, before)
            return session.generation.num_ends, reply

        num_runs, (status, epoch, host, *numbers) = self._connection.call(f'append to {request.stream!r}', run)
        if status == STALE.encode():
            self._keys.doubt_stream(request.stream)  # The list may lack it.
        number, last, floor, freed, dropped, transport, wanted, num_ends, admission, listed, readers, chain = numbers
        known = (number, last, floor, freed, dropped, transport)
        return AppendReply(
            status.decode(),
            epoch.decode(),
            *known,
            host.decode(),
            wanted,
            (num_runs, num_ends),
            None if readers is None else readers.decode(),
            chain.decode(),
            admission,
            listed,
        )

    def leave(self, stream: str, admission: int) -> None:
        arguments = (self._writer, admission)
        self._connection.call(f'leave {stream!r}', lambda session: self._keys.run(session, 'leave', stream, arguments))
