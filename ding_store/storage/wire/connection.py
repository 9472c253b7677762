"""What redis-py does with more copies: large buffers are sent from where they are."""

from __future__ import annotations

import socket
import ssl
from typing import Any, Callable, Sequence, TypeVar

import redis

from ding_store.storage.base import Buffer

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
