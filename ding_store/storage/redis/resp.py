"""Redis commands as bytes. Large buffers are sent without the copies that redis-py makes."""

from __future__ import annotations

import importlib
import socket
import ssl
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar

import redis

from ding_store.storage.base import Buffer

#: More buffers than this are joined first. One system call accepts at most 1024.
_MAX_BUFFERS = 256

#: A larger last argument is sent without a copy.
_COPIED_BYTES = 4 << 10
_EMPTY = b'$0\r\n\r\n'

T = TypeVar('T')


def _packer() -> Any:
    try:
        return importlib.import_module('hiredis').pack_command
    except (ImportError, AttributeError):  # slower without hiredis, or with an old one
        return None


_PACK_COMMAND = _packer()


def pieces(arguments: Sequence[Any]) -> List[bytes]:
    """Return a command as ``pack`` makes it, in pieces. A large last argument is a piece, without a copy."""
    last = arguments[-1]
    if not isinstance(last, bytes) or len(last) <= _COPIED_BYTES:
        return [pack(arguments)]
    return [b'%b$%d\r\n' % (pack((*arguments[:-1], b''))[: -len(_EMPTY)], len(last)), last, b'\r\n']


def pack(arguments: Sequence[Any]) -> bytes:
    """Encode a command of bytes, strings and integers."""
    if _PACK_COMMAND is not None:
        return bytes(_PACK_COMMAND(arguments))
    items = [one if isinstance(one, bytes) else str(one).encode() for one in arguments]
    return b''.join([b'*%d\r\n' % len(items), *(b'$%d\r\n%b\r\n' % (len(item), item) for item in items)])


def entries_of(reply: Any) -> List[Any]:
    """Return the entries in a reply to XREAD, from RESP2 or RESP3: ids, each with a list of names and values."""
    streams = reply.values() if isinstance(reply, dict) else (entries for _, entries in reply or ())
    return [entry for entries in streams for entry in entries]


def fields_of(entries: Sequence[Any]) -> List[Tuple[bytes, Dict[bytes, bytes]]]:
    """Return entries with their names and values as dicts."""
    return [(redis_id, dict(zip(pairs[::2], pairs[1::2]))) for redis_id, pairs in entries]


def send(connection: Any, buffers: Sequence[Buffer]) -> None:
    """Send all buffers, with one system call if they fit into the socket's buffer: the server then wakes up once."""
    sock = connection._sock
    if sock is None or isinstance(sock, ssl.SSLSocket) or len(buffers) > _MAX_BUFFERS:
        connection.send_packed_command([b''.join(buffers)], check_health=False)
        return
    sent, rest = checked(sock.sendmsg, buffers), []
    for buffer in buffers:
        if sent < len(buffer):
            rest.append(memoryview(buffer)[sent:])
        sent = max(0, sent - len(buffer))
    if rest:
        connection.send_packed_command(rest, check_health=False)


def refusal(connection: Any, num_replies: int) -> Optional[redis.ResponseError]:
    """Read that many replies, errors included. Return the first error among them."""
    first = None
    for _ in range(num_replies):
        try:
            connection.read_response()
        except redis.ResponseError as e:
            first = first or e
    return first


def received(what: T) -> T:
    if not what:
        raise redis.ConnectionError('Connection closed by server.')
    return what


def checked(work: Callable[..., T], *arguments: Any) -> T:
    """Call a socket's method, and raise redis-py's errors for those of the socket."""
    try:
        return work(*arguments)
    except socket.timeout as e:
        raise redis.TimeoutError('Timeout at the socket') from e
    except OSError as e:
        raise redis.ConnectionError(f'Error at the socket: {e}') from e
