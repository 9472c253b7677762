"""The private directory of the sockets, with a short path, and the process at the other end of a socket."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
from typing import Iterator, Optional, Tuple

MAX_SOCKET_PATH_BYTES = 107  # size of sockaddr_un.sun_path without its final zero
CONTROL, REDIS = 'control.sock', 'redis.sock'


def make_socket_directory(temporary: Optional[str] = None) -> str:
    """
    Overview:
        Make a directory of this user alone, with a path short enough for sockets. Its name is random, because two
        containers may share /tmp and use equal names. It is not below XDG_RUNTIME_DIR, which is deleted at logout even
        if a job still runs.
    Arguments:
        - temporary (:obj:`Optional[str]`): The first choice for its parent. None: TMPDIR.
    """
    reasons = []
    for parent in _parents(temporary):
        try:
            return _make_private(parent)
        except OSError as e:
            reasons.append(str(e))
    raise OSError(f'no private directory for sockets ({"; ".join(reasons)}): set TMPDIR to a short, writable one')


def _parents(temporary: Optional[str] = None) -> Iterator[str]:
    for base in dict.fromkeys((temporary or os.environ.get('TMPDIR') or '/tmp', '/tmp', '/var/tmp', '/dev/shm')):
        yield os.path.join(os.path.abspath(base), f'ding-store-{os.geteuid()}')


def socket_directories() -> Iterator[str]:
    """Yield the directories of this user that ``make_socket_directory`` has made and no process has removed."""
    for parent in _parents():
        with contextlib.suppress(OSError):
            if os.lstat(parent).st_uid == os.geteuid():
                names = [name for name in os.listdir(parent) if re.fullmatch('[0-9a-f]{8}', name)]
                yield from sorted(os.path.join(parent, name) for name in names)


def _make_private(parent: str) -> str:
    path = os.path.join(parent, os.urandom(4).hex())
    if len(os.fsencode(os.path.join(path, CONTROL))) > MAX_SOCKET_PATH_BYTES:
        raise OSError(f'{parent} is too long a path for sockets')
    with contextlib.suppress(FileExistsError):
        os.mkdir(parent, 0o700)
    found = os.lstat(parent)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f'{parent} is not a directory of this user alone')
    os.mkdir(path, 0o700)
    return path


def remove_socket_directory(redis_socket: str) -> None:
    """Delete what make_socket_directory() and the two servers made, and nothing else: the path may come from a file."""
    if not is_socket_path(redis_socket):
        return
    directory = os.path.dirname(redis_socket)
    for name in (CONTROL, REDIS):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, name))
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def is_socket_path(path: str) -> bool:
    """True if ``make_socket_directory`` could have made the directory of this path. The path may come from a file."""
    ours = rf'/.*/ding-store-{os.geteuid()}/[0-9a-f]{{8}}/{re.escape(REDIS)}'
    return re.fullmatch(ours, path) is not None and '..' not in path.split('/')


def control_path(redis_socket: str) -> str:
    return os.path.join(os.path.dirname(redis_socket), CONTROL)


def peer(connection: socket.socket) -> Tuple[int, int]:
    """Return process id and user id of the other end, from the kernel. The process id is 0 in another namespace."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize('iII'))
    pid, uid, _ = struct.unpack('iII', credentials)
    return pid, uid


def check_peer(connection: socket.socket, directory: str) -> None:
    uid = peer(connection)[1]
    if uid != os.geteuid():
        raise PermissionError(f'the server of {directory} belongs to user {uid}, not to {os.geteuid()}')
