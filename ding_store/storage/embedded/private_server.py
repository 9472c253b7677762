"""A private redis-server per run directory. The first client starts it. It stops some time after the last one exits.

This module has the calls of the clients. The server's own process is in ``supervisor/``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from typing import IO, Any, Dict, Iterator, Optional, Tuple

from ding_store import private_files
from ding_store.errors import ConfigError, StoreError, StoreUnavailable
from ding_store.storage.embedded.binary import PathLike, find_server, server_version
from ding_store.storage.embedded.client import ask, explain, run_files, start_supervisor, translate_errors
from ding_store.storage.embedded.supervisor.run_files import RunFiles, held_by, is_served
from ding_store.storage.embedded.supervisor.sockets import remove_socket_directory

__all__ = [
    'ServerInfo',
    'ensure_server',
    'find_server',
    'leave_server',
    'mark_finished',
    'num_ends',
    'remove_run',
    'running',
    'server_version',
    'stop_server',
]


@dataclass(frozen=True)
class ServerInfo:
    """
    Overview:
        The server of a run directory. ``members`` are the ids of the client processes that keep it running. After the
        last one it stops at once if ``is_finished``, otherwise after ``grace_s``.
    """

    directory: str
    socket: str
    supervisor_pid: int
    server_pid: int
    members: Tuple[int, ...]
    is_finished: bool
    grace_s: float


def ensure_server(directory: PathLike, grace_s: float = 30.0, timeout_s: float = 30.0) -> str:
    """
    Overview:
        Make this process (``os.getpid()``) a client of the run directory's server, and start the server if none runs.
        Call it before every connect and reconnect, and again after ``fork``. For a client it costs less than 1 ms.
    Arguments:
        - directory (:obj:`PathLike`): Made if missing, mode 0700. The server loads the data that a crashed run left.
        - grace_s (:obj:`float`): How long a server that this call starts keeps running without clients.
    Returns:
        - socket (:obj:`str`): Path of the server's unix socket. The server has answered there.
    Raises:
        - StoreUnavailable: The server did not start, for the reason in the message, or did not answer within
          ``timeout_s``. While it loads a crashed run's data, this waits longer.
    """
    if grace_s < 0 or timeout_s <= 0:
        raise ConfigError(f'grace_s ({grace_s}) must be >= 0 and timeout_s ({timeout_s}) > 0')
    if not sys.platform.startswith('linux'):
        raise StoreUnavailable(f'embedded:// needs Linux, and this is {sys.platform}. Use redis://.')
    files = run_files(directory)
    until = time.monotonic() + timeout_s
    _make_directory(files)
    while True:
        answer = _join(files, until)
        if answer is not None:
            return str(answer['socket'])
        start_supervisor(files, grace_s, until)


def _join(files: RunFiles, until: float) -> Optional[Dict[str, Any]]:
    try:
        return ask(files, 'join', until)
    except StoreUnavailable as e:
        if not isinstance(e.__cause__, socket.timeout) or not files.is_finished():
            raise
        info = running(files.directory)
        pids = list(info.members) if info else []
        raise StoreUnavailable(
            f'the run in {files.directory} finished, but its processes {pids} have not ended. End them.'
        ) from e


def leave_server(directory: PathLike, timeout_s: float = 30.0) -> None:
    """Make this process no longer a client. The last store that closes in a process may call it before it exits."""
    ask(run_files(directory), 'leave', time.monotonic() + timeout_s)


def mark_finished(directory: PathLike, timeout_s: float = 30.0) -> None:
    """
    Overview:
        Mark the run as finished. Its server stops after the last client, without grace, and the next server starts
        empty. Other clients continue until then, and new ones wait in ``ensure_server``. The data moves to
        ``previous/`` when the next run starts. This also calls ``leave_server``: call it last.
    """
    files = run_files(directory)
    if not os.path.isdir(files.directory):
        return
    with translate_errors(files):
        files.write(files.finished, '')
    leave_server(files.directory, timeout_s)


def num_ends(directory: PathLike) -> int:
    """Return how often a run in this directory finished and its data was put aside."""
    return run_files(directory).num_ends()


def stop_server(directory: PathLike, timeout_s: float = 30.0) -> bool:
    """
    Overview:
        Stop the server in an orderly way, even if it has clients. Its data stays. Clients that call ``ensure_server``
        again start another server.
    Returns:
        - stopped (:obj:`bool`): False if none was running.
    """
    files = run_files(directory)
    until = time.monotonic() + timeout_s
    stopped = ask(files, 'stop', until) is not None
    _wait_until_gone(files, until)
    return stopped


def running(directory: PathLike, timeout_s: float = 5.0) -> Optional[ServerInfo]:
    """Return the server of a run directory, None if there is none. Does not make this process a client."""
    files = run_files(directory)
    answer = ask(files, 'info', time.monotonic() + timeout_s)
    if answer is None:
        return None
    return ServerInfo(
        directory=files.directory,
        socket=answer['socket'],
        supervisor_pid=answer['supervisor_pid'],
        server_pid=answer['server_pid'],
        members=tuple(answer['members']),
        is_finished=answer['finished'],
        grace_s=answer['grace_s'],
    )


def remove_run(directory: PathLike, timeout_s: float = 30.0) -> bool:
    """
    Overview:
        Delete the server's files and data, those of the run before included. Delete the directory if it is then empty.
    Returns:
        - removed (:obj:`bool`): False if there was no such directory.
    Raises:
        - StoreError: Other processes use the server. The message has their ids.
    """
    files = run_files(directory)
    if not os.path.isdir(files.directory):
        return False
    info = running(directory, timeout_s)
    others = set(info.members) - {os.getpid()} if info else set()
    if others:
        raise StoreError(f'{files.directory} is in use by processes {sorted(others)}. End them first.')
    stop_server(directory, timeout_s)
    with translate_errors(files), _locked(files):
        stale = files.socket_path()
        if stale is not None:
            remove_socket_directory(stale)
        shutil.rmtree(files.previous, ignore_errors=True)
        marks = [files.finished, files.ends, files.pointer, files.start_lock]
        halves = [f'{path}.new' for path in marks]
        for path in [*files.data(), *marks, *halves, files.log, files.log + '.1']:
            _remove(path)
        _remove(files.lock)
    with contextlib.suppress(OSError):  # not empty: it has other files
        os.rmdir(files.directory)
    return True


def _make_directory(files: RunFiles) -> None:
    with translate_errors(files):
        private_files.directory(files.directory)


@contextlib.contextmanager
def _locked(files: RunFiles) -> Iterator[None]:
    with _lock_file(files.start_lock) as start_lock, _lock_file(files.lock) as lock:
        if not (_try_lock(start_lock) and _try_lock(lock)):
            raise StoreError(f'{files.directory} is in use again: another process started its server. End it first.')
        yield


def _lock_file(path: str) -> IO[str]:
    return open(path, 'a', opener=private_files.opener)


def _try_lock(lock: IO[Any]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_until_gone(files: RunFiles, until: float) -> None:
    """Wait until the last server has released its files, or another one serves them."""
    while _is_ending(files):
        if time.monotonic() >= until:
            raise StoreUnavailable(explain(files, held_by(files)))
        time.sleep(0.005)  # flock has no timeout, and SIGALRM may belong to the application


def _is_ending(files: RunFiles) -> bool:
    with translate_errors(files):
        try:
            with open(files.lock, opener=private_files.opener) as lock:
                return not _try_lock(lock) and not is_served(files)
        except FileNotFoundError:
            return False


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
