"""One redis-server process, and PINGs to it."""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import socket
import subprocess
from typing import Callable, List, Optional

_PR_SET_PDEATHSIG = 1


class Server:
    """
    Overview:
        A redis-server process on a unix socket. It inherits the run's lock, and may run a moment longer than its
        supervisor. So no other process opens the same append-only file before it has exited.
    """

    def __init__(self, binary: str, directory: str, socket_path: str, lock: int) -> None:
        self.socket_path = socket_path
        self.was_ready = False
        self._process = subprocess.Popen(
            [binary, *_options(directory, socket_path)],
            stdin=subprocess.DEVNULL,
            cwd='/',
            pass_fds=[lock],
            preexec_fn=_die_with(os.getpid(), ctypes.CDLL(None)),
        )
        self.pid = self._process.pid

    def exit_status(self) -> Optional[int]:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ping(self) -> Optional[socket.socket]:
        """Send a PING on a new connection. Return the connection, None if redis does not listen yet."""
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # There is no free descriptor at the moment.
            return None
        connection.setblocking(False)
        try:
            connection.connect(self.socket_path)
            connection.send(b'PING\r\n')
        except OSError:  # No socket, no listener, or its queue is full: the caller tries again.
            connection.close()
            return None
        return connection


class PingResult(enum.Enum):
    """The outcome of a PING."""

    READY = enum.auto()
    LOADING = enum.auto()  # It is running, and reading its append-only file.
    NONE = enum.auto()


def read_answer(connection: socket.socket) -> PingResult:
    """Read the reply from a connection that is ready to be read."""
    try:
        words = connection.recv(64)
    except OSError:
        return PingResult.NONE
    if words.startswith(b'+PONG'):
        return PingResult.READY
    return PingResult.LOADING if words.startswith(b'-LOADING') else PingResult.NONE


def _die_with(supervisor: int, libc: ctypes.CDLL) -> Callable[[], None]:
    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != supervisor:  # The supervisor exited before the call above.
            os._exit(1)

    return prepare


def _options(directory: str, socket_path: str) -> List[str]:
    options = {
        'port': '0',
        'unixsocket': socket_path,
        'unixsocketperm': '600',
        'dir': directory,
        'daemonize': 'no',
        'logfile': '',
        'save': '',
        'appendonly': 'yes',
        'appendfsync': 'everysec',
        'aof-load-truncated': 'yes',
        'maxmemory-policy': 'noeviction',
    }
    return [word for name, value in options.items() for word in (f'--{name}', value)]
