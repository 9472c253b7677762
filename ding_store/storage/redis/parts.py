"""Payloads that are too large for one Redis argument go in *parts*, each with its own key.

Several parts are in transit at a time. A part expires unless the script that adds its entry or value keeps it. So
the parts of a killed writer are deleted. This is faster than redis-py's SET and GET: bytes are sent without a copy, and
received into their final place.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections import deque
from typing import Any, Callable, Deque, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import redis

from ding_store.errors import CorruptPayload, ServerFull
from ding_store.storage.base import Buffer
from ding_store.storage.encoding.framing import INLINE_BYTES, MAX_BYTES, PART_BYTES, Part
from ding_store.storage.protocol import Fetch, Moved, Remote, StoredEntry, fetch_own, unwatched
from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.resp import checked, received, refusal, send
from ding_store.storage.redis.scripts import Argument

#: Maximum bytes in transit. More would only fill buffers, where each reply waits for all data before it.
WINDOW_BYTES = 4 << 20
#: Time to live of a part, plus the time for its payload at the slowest rate. A payload that takes longer is sent again.
_LIFE_S = 600
_SLOWEST_BYTES_PER_S = 50_000
MAX_TRIES = 5
VANISHED = 'its parts vanished before they were used: the server evicts them at its maxmemory, or its clock jumped.'
#: Smaller pieces are joined. A copy costs less than another system call, and the server then wakes up only once.
_JOINED_BYTES = 256 << 10


#: Buffer size for bytes that are read and thrown away.
_PASSED_BYTES = 64 << 10

#: Maximum number of parts. A corrupt place could state more, and their keys alone would fill the memory.
_MAX_PARTS = MAX_BYTES // (64 << 10)

_PLACE = struct.Struct('<4sIIQ')
_MAGIC = b'DGP\x02'
_CHECKED_FROM = 8  # The checksum covers everything after itself. The magic bytes are compared.


class Parted(NamedTuple):
    """The place of a payload in parts: their keys are ``key`` followed by a number from 0."""

    key: str
    part_bytes: int
    num_bytes: int

    @property
    def num_parts(self) -> int:
        return -(-self.num_bytes // self.part_bytes)

    @property
    def keys(self) -> List[bytes]:
        return [f'{self.key}{number}'.encode() for number in range(self.num_parts)]

    def pack(self) -> bytes:
        """Return the bytes that an entry or value holds instead of the payload."""
        body = _PLACE.pack(_MAGIC, 0, self.part_bytes, self.num_bytes)[_CHECKED_FROM:] + self.key.encode()
        return struct.pack('<4sI', _MAGIC, zlib.crc32(body)) + body


def unpack(payload: Buffer) -> Optional[Parted]:
    """
    Overview:
        Read the place of a payload's parts.
    Returns:
        - where (:obj:`Optional[Parted]`): None if ``payload`` is the payload itself.
    Raises:
        - CorruptPayload: It begins like a place, but is malformed.
    """
    if payload[:4] != _MAGIC:
        return None
    try:
        _, crc, part_bytes, num_bytes = _PLACE.unpack_from(payload)
        where = Parted(bytes(payload[_PLACE.size :]).decode(), part_bytes, num_bytes)
    except (struct.error, UnicodeDecodeError) as e:
        raise CorruptPayload('the place of its parts is malformed') from e
    is_possible = 0 < part_bytes <= MAX_BYTES and 0 < num_bytes <= MAX_BYTES and where.num_parts <= _MAX_PARTS
    if zlib.crc32(payload[_CHECKED_FROM:]) != crc or not is_possible:
        raise CorruptPayload('the place of its parts is malformed')
    return where


def place_of(key: str, payload: Buffer) -> Parted:
    return Parted(key, PART_BYTES, len(payload))


def parts_of(where: Parted, payload: Buffer) -> Iterator[Part]:
    view = memoryview(payload)
    for number, key in enumerate(where.keys):
        yield key, view[number * where.part_bytes : (number + 1) * where.part_bytes]


def write_parts(connection: Any, parts: Iterable[Tuple[bytes, Sequence[Buffer]]], num_bytes: int) -> Tuple[int, bytes]:
    """
    Overview:
        Send the parts of a payload. Parts that exist are not changed: a late command must not make them expire.
    Arguments:
        - parts (:obj:`Iterable`): The key of each part, and its bytes in any number of pieces.
        - num_bytes (:obj:`int`): Upper bound of the bytes of all parts.
    Returns:
        - num_replies (:obj:`int`): Number of replies that the caller must read before its own command's.
        - rest (:obj:`bytes`): Bytes that the caller must send before its own command, best in the same call.
    """
    life_ms = 1000 * (_LIFE_S + int(num_bytes / _SLOWEST_BYTES_PER_S))
    tail = b'\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%d\r\n' % (len(str(life_ms)), life_ms)
    on_the_way: Deque[int] = deque()
    num_ahead, rest = 0, b''
    for key, pieces in parts:
        part_bytes = sum(map(len, pieces))
        rest += b'*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n' % (len(key), key, part_bytes)
        # Parts that are waited for below have been sent whole. Only the last one may still lack its end.
        if len(rest) + part_bytes <= _JOINED_BYTES and num_ahead + part_bytes <= WINDOW_BYTES:
            rest = b''.join([rest, *pieces, tail])
        else:
            send(connection, [rest, *pieces])
            rest = tail
        on_the_way.append(part_bytes)
        num_ahead += part_bytes
        while num_ahead > WINDOW_BYTES and len(on_the_way) > 1:
            refused = refusal(connection, 1)
            num_ahead -= on_the_way.popleft()
            if refused is not None:
                send(connection, [rest])
                refusal(connection, len(on_the_way))  # No command may arrive after the payload was given up.
                raise refused
    return len(on_the_way), rest


def read_parts(connection: Any, parts: Sequence[Part], moved: Moved = unwatched) -> Iterator[bool]:
    """Read each part into its memory. Yield True when it is there, False if it is missing or has another length."""
    replies, asked, num_ahead = _Replies(connection, moved), 0, 0
    for number, (_, target) in enumerate(parts):
        upto = asked
        while upto < len(parts) and (num_ahead <= 0 or num_ahead + len(parts[upto][1]) <= WINDOW_BYTES):
            num_ahead += len(parts[upto][1])
            upto += 1
        if upto > asked:
            _ask(connection, [key for key, _ in parts[asked:upto]])
            asked = upto
        assert number < asked
        yield replies.receive(target)
        num_ahead -= len(target)


T = TypeVar('T')
#: Reads parts into their memory as far as a replica has them. Returns the numbers of the others.
ReadReplica = Callable[..., List[int]]


class Parts:
    """
    Overview:
        Fetches payloads that are in parts.
    """

    def __init__(self, connection: Connection, read_replica: ReadReplica) -> None:
        self._connection = connection
        self._read_replica = read_replica

    def fetch(self, stream: str, records: Sequence[StoredEntry], fetch: Fetch = fetch_own) -> List[Optional[Buffer]]:
        """
        Overview:
            Return the payloads of some records. None stands for a payload with missing parts.
        """
        places = [unpack(record.payload) for record in records]
        wanted = {
            Remote(record.id, bytes(record.payload), where.num_bytes): where
            for record, where in zip(records, places)
            if where is not None
        }
        if not wanted:
            return [record.payload for record in records]

        def download(remotes: Sequence[Remote], payloads: Sequence[memoryview], moved: Moved) -> List[bool]:
            parted = [wanted[one] for one in remotes]
            parts = [part for where, payload in zip(parted, payloads) for part in parts_of(where, payload)]
            left = self._read_replica(parts, moved)
            are_there = self._read(stream, [parts[number] for number in left], moved) if left else []
            missing = {number for number, is_there in zip(left, are_there) if not is_there}
            numbers = itertools.count()
            return [missing.isdisjoint([*itertools.islice(numbers, where.num_parts)]) for where in parted]

        found = iter(fetch(stream, list(wanted), download))
        return [record.payload if where is None else next(found) for record, where in zip(records, places)]

    def _read(self, stream: str, parts: Sequence[Part], moved: Moved) -> List[bool]:
        def read(connection: Any) -> List[bool]:
            return list(read_parts(connection, parts, moved))

        found: List[bool] = self._connection.call(f'read {stream!r}', lambda session: _borrowing(session, read))
        return found

    def are_whole(self, stream: str, payload: Buffer) -> bool:
        """True if the parts have the lengths that their place states. Takes the time of a fetch, but no memory."""
        where = unpack(payload)
        if where is None:
            return True
        lengths = [min(where.part_bytes, where.num_bytes - at) for at in range(0, where.num_bytes, where.part_bytes)]

        def measure(connection: Any) -> bool:
            replies = _Replies(connection, unwatched)
            for key, length in zip(where.keys, lengths):
                _ask(connection, [key])
                if replies.measure() != length:
                    return False
            return True

        return bool(self._connection.call(f'read {stream!r}', lambda session: _borrowing(session, measure)))

    def are_there(self, stream: str, payload: Buffer) -> bool:
        """True if the payload is not in parts, or all parts exist now."""
        where = unpack(payload)
        if where is None:
            return True
        count_them: Tuple[Argument, ...] = ('EXISTS', *where.keys)
        (count,) = self._connection.call(f'read {stream!r}', lambda session: session.ask(count_them))
        return bool(count == where.num_parts)


def publish_in_parts(
    what: str, key: str, payload: bytes, publish: Callable[..., T], is_refused: Callable[[T], bool]
) -> T:
    """
    Overview:
        Publish a payload in one round trip: ``publish(payload, 0, '', None)``. For a large one it is
        ``publish(place, num_parts, key, before)``, where ``before`` sends the parts on a connection. Repeat if parts
        are missing by then.
    Raises:
        - ServerFull: Parts are missing each time.
    """
    if not is_large(payload):
        return publish(payload, 0, '', None)
    where = place_of(key, payload)
    for _ in range(MAX_TRIES):
        reply = publish(
            where.pack(),
            where.num_parts,
            key,
            lambda connection: write_parts(
                connection, ((key, [part]) for key, part in parts_of(where, payload)), len(payload)
            ),
        )
        if not is_refused(reply):
            return reply
    raise ServerFull(f'{what}: {VANISHED}')


def is_large(payload: Buffer) -> bool:
    return len(payload) > INLINE_BYTES


def _borrowing(session: Any, work: Callable[..., T], *arguments: Any) -> T:
    with session.borrowed() as connection:
        return work(connection, *arguments)


def _ask(connection: Any, keys: Sequence[bytes]) -> None:
    commands = [b'*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n' % (len(key), key) for key in keys]
    connection.send_packed_command([b''.join(commands)], check_health=False)


class _Replies:
    """Reads replies to GET from the socket itself. redis-py's parser must have no bytes buffered, and gets none."""

    def __init__(self, connection: Any, moved: Moved) -> None:
        self._socket = connection._sock
        self._moved = moved
        self._ahead = b''

    def receive(self, into: memoryview) -> bool:
        """Read one reply. Return False if the key is missing, of another type, or has another length."""
        length = self._length()
        if length < 0:
            return False
        fits = length == len(into)
        if fits:
            self._fill(into)
        self._pass_over(2 if fits else length + 2)  # the end of the line
        return fits

    def measure(self) -> int:
        """Return the length of one reply, -1 if the key is missing or of another type."""
        length = self._length()
        if length >= 0:
            self._pass_over(length + 2)
        return length

    def _pass_over(self, num_bytes: int) -> None:
        nowhere = memoryview(bytearray(min(num_bytes, _PASSED_BYTES)))
        for at in range(0, num_bytes, _PASSED_BYTES):
            self._fill(nowhere[: num_bytes - at])

    def _length(self) -> int:
        while b'\r\n' not in self._ahead:
            self._ahead += self._checked(self._socket.recv, 64)
        line, _, self._ahead = self._ahead.partition(b'\r\n')
        if line.startswith(b'-WRONGTYPE'):
            return -1
        if line[:1] == b'-':
            raise redis.ResponseError(line[1:].decode('utf-8', 'replace'))
        return int(line[1:])

    def _fill(self, into: memoryview) -> None:
        done = min(len(into), len(self._ahead))
        into[:done] = self._ahead[:done]
        self._ahead = self._ahead[done:]
        while done < len(into):
            done += self._checked(self._socket.recv_into, into[done:])

    def _checked(self, receive: Callable[..., T], argument: Any) -> T:
        news = received(checked(receive, argument))
        self._moved()
        return news
