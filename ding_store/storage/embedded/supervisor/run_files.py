"""The files in a run's directory, their locks, and the connection to the run's supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
from types import FrameType
from typing import Any, Dict, Iterator, List, Optional

from .sockets import check_peer, control_path, is_socket_path


class RunFiles:
    """
    Overview:
        The names in a run's directory:

        ====================  ======================================================================================
        ``lock``              held by the supervisor *and* its redis while either runs, contains their process ids
        ``start.lock``        held by a process that starts a supervisor
        ``socket``            path of the server's socket, while there is one
        ``server.log``        log of supervisor and redis
        ``appendonly*``       the data
        ``finished``          exists if the run finished: the next server starts empty
        ``ends``              at least the number of finished runs, by which a late process sees that its run is over
        ``previous/``         the data of the last run that finished
        ====================  ======================================================================================
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.lock = os.path.join(directory, 'lock')
        self.start_lock = os.path.join(directory, 'start.lock')
        self.pointer = os.path.join(directory, 'socket')
        self.log = os.path.join(directory, 'server.log')
        self.finished = os.path.join(directory, 'finished')
        self.ends = os.path.join(directory, 'ends')
        self.previous = os.path.join(directory, 'previous')

    def is_finished(self) -> bool:
        return os.path.exists(self.finished)

    def data(self) -> List[str]:
        """Return the append-only file of redis 6 or directory of redis 7, and the files that a killed rewrite left."""
        names = [name for name in os.listdir(self.directory) if name.startswith(('appendonly', 'temp-rewriteaof-'))]
        return [os.path.join(self.directory, name) for name in names]

    def num_ends(self) -> int:
        try:
            with open(self.ends, opener=opener) as file:
                return int(file.read())
        except (FileNotFoundError, ValueError):
            return 0

    def archive(self) -> None:
        """Move a finished run's data to ``previous/``. The mark goes last: after a crash, all of this happens again."""
        shutil.rmtree(self.previous, ignore_errors=True)
        self.write(self.ends, f'{self.num_ends() + 1}')
        os.makedirs(self.previous, mode=0o700, exist_ok=True)
        for path in self.data():
            os.replace(path, os.path.join(self.previous, os.path.basename(path)))
        os.unlink(self.finished)

    def write(self, path: str, text: str) -> None:
        """Replace a file's text. Readers see all of the new text or all of the old, even after a power cut."""
        new = f'{path}.new'
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        with open(new, 'x', opener=opener) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        # Like ``power_cuts.sync_directory``, which this package cannot import.
        directory = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def socket_path(self) -> Optional[str]:
        """Return the last server's redis socket. None if the file is missing or contains no such path of this user."""
        try:
            with open(self.pointer, opener=opener) as file:
                path = file.read().strip()
                return path if is_socket_path(path) else None
        except FileNotFoundError:
            return None

    def say_who(self, lock: int, redis_pid: int) -> None:
        holder = {'host': socket.gethostname(), 'supervisor': os.getpid(), 'redis': redis_pid}
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(holder).encode(), 0)

    def holder(self) -> Dict[str, Any]:
        """Return the process ids and host in the lock file, for messages only. The lock itself is taken by flock."""
        try:
            with open(self.lock, opener=opener) as file:
                holder = json.load(file)
        except (OSError, ValueError):
            return {}
        return holder if isinstance(holder, dict) else {}


def opener(path: str, flags: int) -> int:
    """
    Open a file as ``ding_store.private_files.opener`` does. The supervisor cannot import that: it has the standard
    library only. The process that started it has checked the run's directory.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    owner = os.fstat(descriptor).st_uid
    if owner != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f'{path} belongs to user {owner}, not to {os.geteuid()}')
    return descriptor


def connect_control(files: RunFiles, timeout_s: float) -> Optional[socket.socket]:
    """Return a connection to the run's supervisor, None if none listens. Refuse a supervisor of another user."""
    path = files.socket_path()
    if path is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(control_path(path))
        check_peer(connection, files.directory)
    except (FileNotFoundError, NotADirectoryError, ConnectionError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def is_served(files: RunFiles) -> bool:
    connection = connect_control(files, timeout_s=5.0)
    if connection is None:
        return False
    connection.close()
    return True


def take_lock(path: str) -> int:
    """Wait for an exclusive lock, within ``deadline``. The kernel releases it when its last holder exits or crashes."""
    while True:
        lock = _locked(path, fcntl.LOCK_EX)
        if lock is not None:
            return lock


def try_lock(path: str) -> Optional[int]:
    """Take the same lock without a wait. Return None if another process holds it."""
    try:
        return _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def _locked(path: str, how: int) -> Optional[int]:
    """Lock a file. Return None if remove_run() has deleted the file during the wait."""
    lock = opener(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, how)
        if _is_same_file(lock, path):
            return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def held_by(files: RunFiles) -> str:
    who = files.holder()
    return (
        f'it did not get its lock in time. Supervisor {who.get("supervisor")} and redis-server {who.get("redis")} on '
        f'host {who.get("host")!r} held it last. If they run, end them. To share a run between hosts, use redis://'
    )


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def deadline(timeout_s: float) -> Iterator[None]:
    """Raise TimeoutError in a call that blocks inside. Only for a process with one thread, as the supervisor is."""

    def expire(signum: int, frame: Optional[FrameType]) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(timeout_s, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
