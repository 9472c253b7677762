"""Payloads too large for one argument travel as keys of their own, their *parts*, several on the way at a time.

A part has a time to live until the entry or value that it belongs to is there, which takes it away: those of a writer
that was killed in between go by themselves. This is faster than redis-py's own SET and GET: the bytes are sent from
where they are, and received into where they belong.
"""

from __future__ import annotations

import socket
import struct
import zlib
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import numpy as np
import redis

from ding_store.errors import CorruptPayload, StoreError

from .base import Buffer

#: Larger payloads go in parts: Redis takes an argument of SET from the socket to where it stays, but only if it has
#: 32 KiB or more; one that goes through a script into a stream is copied four times.
INLINE_BYTES = 32 << 10
#: Huge ones are slow again: no two steps of their way overlap.
PART_BYTES = 1 << 20
#: A limit of ours, not of Redis: what one entry or value may have.
MAX_BYTES = 2_000_000_000
#: On the way at once. More only fills buffers, where each reply waits for all that is before it.
WINDOW_BYTES = 4 << 20
#: A payload that takes longer than this, at this rate, is written again.
_LIFE_S = 600
_SLOWEST_BYTES_PER_S = 50_000
_MAX_TRIES = 5
#: A copy is cheaper than one more system call, and than a server that wakes up for the first half.
_JOINED_BYTES = 256 << 10


_PLACE = struct.Struct('<4sIIQ')
_MAGIC = b'DGP\x01'


class Parted(NamedTuple):
    """Where a payload's parts are: under ``key`` with a number from 0 behind it."""

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
        """What an entry or value holds instead of the payload."""
        key = self.key.encode()
        return _PLACE.pack(_MAGIC, zlib.crc32(key), self.part_bytes, self.num_bytes) + key


def unpack(payload: bytes) -> Optional[Parted]:
    """
    Returns:
        - where (:obj:`Optional[Parted]`): None if this is the payload itself.
    Raises:
        - CorruptPayload: It looks like a place, and is none.
    """
    if payload[:4] != _MAGIC:
        return None
    try:
        _, crc, part_bytes, num_bytes = _PLACE.unpack_from(payload)
        where = Parted(payload[_PLACE.size :].decode(), part_bytes, num_bytes)
    except (struct.error, UnicodeDecodeError) as e:
        raise CorruptPayload('the place of its parts is malformed') from e
    if zlib.crc32(where.key.encode()) != crc or not 0 < part_bytes <= MAX_BYTES or not 0 < num_bytes <= MAX_BYTES:
        raise CorruptPayload('the place of its parts is malformed')
    return where


def place_of(key: str, payload: Buffer) -> Parted:
    return Parted(key, PART_BYTES, len(payload))


def write_parts(connection: Any, where: Parted, payload: Buffer) -> Tuple[int, bytes]:
    """
    Overview:
        Send a payload. Parts that are there already are left alone: one that was long on its way must not give life's
        end to them.
    Returns:
        - num_replies (:obj:`int`): How many the caller has to read before that to its own command.
        - rest (:obj:`bytes`): What the caller has to send before its own command, best together with it.
    """
    view = memoryview(payload)
    life_ms = 1000 * (_LIFE_S + int(len(view) / _SLOWEST_BYTES_PER_S))
    tail = b'\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%d\r\n' % (len(str(life_ms)), life_ms)
    num_replies, rest = 0, b''
    for number, key in enumerate(where.keys):
        part = view[number * where.part_bytes : (number + 1) * where.part_bytes]
        rest += b'*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n' % (len(key), key, len(part))
        if len(part) <= _JOINED_BYTES:
            rest = b''.join([rest, part, tail])
        else:
            connection.send_packed_command([rest, part], check_health=False)
            rest = tail
        num_replies += 1
        if num_replies * where.part_bytes > WINDOW_BYTES:
            connection.read_response()
            num_replies -= 1
    return num_replies, rest


def read_parts(connection: Any, places: Sequence[Parted]) -> List[Optional[Buffer]]:
    """None for payloads of which a part is missing, or is not as long as it should be."""
    parts = [(key, where.part_bytes) for where in places for key in where.keys]
    replies, asked, num_ahead = _Replies(connection), 0, 0
    payloads: List[Optional[Buffer]] = []
    for where in places:
        payload, is_whole = np.empty(where.num_bytes, np.uint8).data, True
        for start in range(0, where.num_bytes, where.part_bytes):
            upto = asked
            while upto < len(parts) and (num_ahead <= 0 or num_ahead + parts[upto][1] <= WINDOW_BYTES):
                num_ahead += parts[upto][1]
                upto += 1
            if upto > asked:
                _ask(connection, [key for key, _ in parts[asked:upto]])
                asked = upto
            is_whole &= replies.receive(payload[start : start + where.part_bytes])
            num_ahead -= where.part_bytes
        payloads.append(payload.toreadonly() if is_whole else None)
    return payloads


Call = Callable[[str, Callable[[Any], Any]], Any]
T = TypeVar('T')


class Parts:
    """
    Overview:
        Fetches payloads that are in parts.
    Arguments:
        - call (:obj:`Callable`): Runs a command with a ``Session``, again and again while the connection is lost.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    def fetch(self, what: str, payloads: Sequence[bytes]) -> List[Optional[Buffer]]:
        """
        Overview:
            The payloads themselves, of what entries or values hold; None where parts are missing.
        """
        places = [unpack(payload) for payload in payloads]
        wanted = [where for where in places if where is not None]
        if not wanted:
            return list(payloads)
        found = iter(self._call(what, lambda session: _borrowing(session, read_parts, wanted)))
        return [payload if where is None else next(found) for payload, where in zip(payloads, places)]


def publish_in_parts(
    what: str, key: str, payload: bytes, publish: Callable[..., T], is_refused: Callable[[T], bool]
) -> T:
    """
    Overview:
        ``publish(payload, 0, '', None)``; or for a large one ``publish(place, num_parts, key, before)``, where
        ``before`` is ``write_parts`` but for the connection: all takes one round trip. Once more if parts
        are gone when they are looked for.
    """
    if not is_large(payload):
        return publish(payload, 0, '', None)
    where = place_of(key, payload)
    for _ in range(_MAX_TRIES):
        reply = publish(where.pack(), where.num_parts, key, lambda connection: write_parts(connection, where, payload))
        if not is_refused(reply):
            return reply
    raise StoreError(f'{what}: its parts vanish before they are used: is the server out of memory, or its clock off?')


def is_large(payload: Buffer) -> bool:
    return len(payload) > INLINE_BYTES


def _borrowing(session: Any, work: Callable[..., T], *arguments: Any) -> T:
    with session.borrowed() as connection:
        return work(connection, *arguments)


def _ask(connection: Any, keys: Sequence[bytes]) -> None:
    commands = [b'*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n' % (len(key), key) for key in keys]
    connection.send_packed_command([b''.join(commands)], check_health=False)


class _Replies:
    """The replies to GETs, read from the socket itself; redis-py's parser must hold nothing, and gets nothing back."""

    def __init__(self, connection: Any) -> None:
        self._socket = connection._sock
        self._ahead = b''

    def receive(self, into: memoryview) -> bool:
        """One reply. False when there is no such key, or it does not fit exactly."""
        length = self._length()
        if length < 0:
            return False
        fits = length == len(into)
        self._fill(into if fits else memoryview(bytearray(length)))
        self._fill(memoryview(bytearray(2)))  # the line's end
        return fits

    def _length(self) -> int:
        while b'\r\n' not in self._ahead:
            self._ahead += self._checked(self._socket.recv, 64)
        line, _, self._ahead = self._ahead.partition(b'\r\n')
        if line[:1] == b'-':
            denied = line.startswith(b'-NOPERM')
            raise (redis.exceptions.NoPermissionError if denied else redis.ResponseError)(
                line[1:].decode('utf-8', 'replace')
            )
        return int(line[1:])

    def _fill(self, into: memoryview) -> None:
        done = min(len(into), len(self._ahead))
        into[:done] = self._ahead[:done]
        self._ahead = self._ahead[done:]
        while done < len(into):
            done += self._checked(self._socket.recv_into, into[done:])

    @staticmethod
    def _checked(receive: Callable[..., T], argument: Any) -> T:
        try:
            received = receive(argument)
        except socket.timeout as e:
            raise redis.TimeoutError('Timeout reading from socket') from e
        except OSError as e:
            raise redis.ConnectionError(f'Error while reading from socket: {e}') from e
        if not received:
            raise redis.ConnectionError('Connection closed by server.')
        return received
