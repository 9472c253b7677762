"""What redis-py does with more copies: large buffers are sent from where they are, and received where they stay."""

from __future__ import annotations

import re
import socket
import ssl
from typing import Any, Callable, List, Optional, Sequence, TypeVar

import numpy as np
import redis

from ding_store.storage.base import Buffer

#: The reply to XREAD that is one entry of ours: its id, e, w, s, and how long p is.
_ONE_ENTRY = re.compile(
    rb'\*1\r\n\*2\r\n\$\d+\r\n[^\r]*\r\n\*1\r\n\*2\r\n\$\d+\r\n([^\r]*)\r\n\*8\r\n'
    rb'\$1\r\ne\r\n\$\d+\r\n([^\r]*)\r\n\$1\r\nw\r\n\$\d+\r\n([^\r]*)\r\n\$1\r\ns\r\n\$\d+\r\n([^\r]*)\r\n'
    rb'\$1\r\np\r\n\$(\d+)\r\n'
)
_HEAD_BYTES = 1 << 10  # more than all of that
#: Shorter payloads are copied sooner than looked for.
_DIRECT_BYTES = 16 << 10

#: More, of one system call, are rather copied; it refuses more than 1024.
_MAX_BUFFERS = 256

T = TypeVar('T')


def send(connection: Any, buffers: Sequence[Buffer]) -> None:
    """All of them, in one system call if they fit into the socket's buffer: a server that woke up early would wait."""
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


def read_entries(connection: Any) -> Any:
    """The reply to XREAD; the payload of a single large entry is a memoryview."""
    found = _single(connection._sock)
    return found if found is not None else connection.read_response()


def _single(sock: Any) -> Optional[List[Any]]:
    """None if what comes, of which nothing was taken then, is anything else."""
    if isinstance(sock, ssl.SSLSocket):
        return None
    head = _ONE_ENTRY.match(checked(sock.recv, _HEAD_BYTES, socket.MSG_PEEK))
    if head is None or int(head[5]) < _DIRECT_BYTES:
        return None
    payload = np.empty(int(head[5]) + 2, np.uint8).data  # with the line's end
    done = checked(sock.recvmsg_into, [bytearray(head.end()), payload])[0] - head.end()
    while done < len(payload):
        done += received(checked(sock.recv_into, payload[done:]))
    fields = [b'e', head[2], b'w', head[3], b's', head[4], b'p', payload[:-2].toreadonly()]
    return [[None, [[head[1], fields]]]]


def received(what: T) -> T:
    if not what:
        raise redis.ConnectionError('Connection closed by server.')
    return what


def checked(work: Callable[..., T], *arguments: Any) -> T:
    """A call of a socket, with the errors of redis-py."""
    try:
        return work(*arguments)
    except socket.timeout as e:
        raise redis.TimeoutError('Timeout at the socket') from e
    except OSError as e:
        raise redis.ConnectionError(f'Error at the socket: {e}') from e
