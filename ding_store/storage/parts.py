"""Payloads too large for one argument travel as keys of their own, their *parts*, several on the way at a time.

A part has a time to live until the entry or value that it belongs to is there, which takes it away: those of a writer
that was killed in between go by themselves. This is faster than redis-py's own SET and GET: the bytes are sent from
where they are, and received into where they belong.
"""

from __future__ import annotations

import socket
import struct
import zlib
from typing import Any, Callable, List, NamedTuple, Optional, TypeVar

import numpy as np
import redis

from ding_store.errors import CorruptPayload, StoreError

from .wire import Buffer

#: Larger payloads go in parts. One huge value is slow: Redis copies it around, and no two steps overlap.
INLINE_BYTES = 1 << 20
PART_BYTES = 1 << 20
#: A limit of ours, not of Redis: what one entry or value may have.
MAX_BYTES = 2_000_000_000
#: Parts on the way at once. More fill buffers, where a reply waits for all that is before it.
WINDOW = 4
#: A payload that takes longer than this, and this rate, is written again.
_LIFE_S = 600
_SLOWEST_BYTES_PER_S = 50_000
_MAX_TRIES = 5


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


def place(key: str, payload: Buffer) -> Parted:
    return Parted(key, PART_BYTES, len(payload))


def write_parts(connection: Any, where: Parted, payload: Buffer) -> None:
    """Those that are there already are left alone: a part that was long on its way must not give life's end to them."""
    view = memoryview(payload)
    life_ms = 1000 * (_LIFE_S + int(len(view) / _SLOWEST_BYTES_PER_S))
    tail = b'\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%d\r\n' % (len(str(life_ms)), life_ms)
    for number, key in enumerate(where.keys):
        part = view[number * where.part_bytes : (number + 1) * where.part_bytes]
        head = b'*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n' % (len(key), key, len(part))
        connection.send_packed_command([head, part, tail], check_health=False)
        if number >= WINDOW:
            connection.read_response()
    for _ in range(min(WINDOW, where.num_parts)):
        connection.read_response()


def read_parts(connection: Any, where: Parted) -> Optional[memoryview]:
    """None when one is missing, or is not as long as it should be."""
    keys = where.keys
    for key in keys[:WINDOW]:
        _ask(connection, key)
    payload = np.empty(where.num_bytes, np.uint8).data
    replies, is_whole = _Replies(connection), True
    for number in range(where.num_parts):
        start = number * where.part_bytes
        is_whole &= replies.receive(payload[start : start + where.part_bytes])
        if number + WINDOW < where.num_parts:
            _ask(connection, keys[number + WINDOW])
    return payload.toreadonly() if is_whole else None


Call = Callable[[str, Callable[[Any], Any]], Any]
T = TypeVar('T')


class Parts:
    """
    Overview:
        Payloads in and out, in parts where they are large.
    Arguments:
        - call (:obj:`Callable`): Runs a command with a ``Session``, again and again while the connection is lost.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    def send(
        self, what: str, key: str, payload: bytes, publish: Callable[..., T], is_refused: Callable[[T], bool]
    ) -> T:
        """
        Overview:
            ``publish(payload, 0, '')``; or for a large one, after its parts were written under ``key``,
            ``publish(place, num_parts, key)``, and both again if parts are gone by then.
        """
        if not is_large(payload):
            return publish(payload, 0, '')
        where = place(key, payload)
        for _ in range(_MAX_TRIES):
            self._call(what, lambda session: _borrowing(session, write_parts, where, payload))
            reply = publish(where.pack(), where.num_parts, key)
            if not is_refused(reply):
                return reply
        raise StoreError(
            f'{what}: parts of it vanish before they are used; is the server out of memory or its clock off?'
        )

    def fetch(self, what: str, payload: bytes) -> Optional[Buffer]:
        """The payload itself, of what an entry or value holds; None when parts are missing."""
        where = unpack(payload)
        if where is None:
            return payload
        found: Optional[Buffer] = self._call(what, lambda session: _borrowing(session, read_parts, where))
        return found


def is_large(payload: Buffer) -> bool:
    return len(payload) > INLINE_BYTES


def _borrowing(session: Any, work: Callable[..., T], *arguments: Any) -> T:
    with session.borrowed() as connection:
        return work(connection, *arguments)


def _ask(connection: Any, key: bytes) -> None:
    connection.send_packed_command([b'*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n' % (len(key), key)], check_health=False)


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
