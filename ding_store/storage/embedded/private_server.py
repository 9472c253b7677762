"""A private redis-server per run directory: started by whoever comes first, gone some time after its last member.

The server's own process is in ``supervisor/``; this is what its clients call.
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
        The server of a run directory. ``members`` are the process ids that keep it alive; when ``is_finished``, it
        goes with the last of them, else ``grace_s`` later.
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
        Make this process (``os.getpid()``) a member of the run directory's server, and start that if none runs. Call
        it at every connect, reconnect, and again after ``fork``; for a member it costs less than a millisecond.
    Arguments:
        - directory (:obj:`PathLike`): Made if missing, mode 0700. What a crashed run left in it is loaded again.
        - grace_s (:obj:`float`): How long a server that this call starts stays without any member.
    Returns:
        - socket (:obj:`str`): Path of the unix socket of a server that answers.
    Raises:
        - StoreUnavailable: It did not start, with the reason, or answer within ``timeout_s``; while it loads the data
          of a crashed run, it is waited for as long as that takes.
    """
    if grace_s < 0 or timeout_s <= 0:
        raise ConfigError(f'grace_s ({grace_s}) must be >= 0 and timeout_s ({timeout_s}) > 0')
    if not sys.platform.startswith('linux'):
        raise StoreUnavailable(f'embedded:// needs Linux, and this is {sys.platform}: use redis://')
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
        raise StoreUnavailable(f'the run in {files.directory} finished, but its processes {pids} have not ended') from e


def leave_server(directory: PathLike, timeout_s: float = 30.0) -> None:
    """End this process's membership before it ends itself; the last store of a process to close may call it."""
    ask(run_files(directory), 'leave', time.monotonic() + timeout_s)


def mark_finished(directory: PathLike, timeout_s: float = 30.0) -> None:
    """
    Overview:
        The run ended well: its server goes with its last member, without grace, and the next one begins empty. Until
        then members go on as before, and processes that are none wait for them in ``ensure_server``. Ends the calling
        process's own membership: call it last. The data goes to ``previous/`` when the next run starts.
    """
    files = run_files(directory)
    if not os.path.isdir(files.directory):
        return
    with translate_errors(files):
        files.write(files.finished, '')
    leave_server(files.directory, timeout_s)


def num_ends(directory: PathLike) -> int:
    """How often a run in this directory ended well, and its data was put aside for the next."""
    return run_files(directory).num_ends()


def stop_server(directory: PathLike, timeout_s: float = 30.0) -> bool:
    """
    Overview:
        Stop the server in an orderly way, whoever uses it; its data stays. Members that call ``ensure_server`` again
        start another one.
    Returns:
        - stopped (:obj:`bool`): False when none ran.
    """
    files = run_files(directory)
    until = time.monotonic() + timeout_s
    stopped = ask(files, 'stop', until) is not None
    _wait_until_gone(files, until)
    return stopped


def running(directory: PathLike, timeout_s: float = 5.0) -> Optional[ServerInfo]:
    """The server of a run directory, None when there is none; becomes no member."""
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
        Delete the server's files and data, also of the run before, and the directory if nothing else is in it.
    Returns:
        - removed (:obj:`bool`): False when there was no such directory.
    Raises:
        - StoreError: Processes still use it; names them.
    """
    files = run_files(directory)
    if not os.path.isdir(files.directory):
        return False
    info = running(directory, timeout_s)
    others = set(info.members) - {os.getpid()} if info else set()
    if others:
        raise StoreError(f'{files.directory} is in use by processes {sorted(others)}: end them first')
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
    with contextlib.suppress(OSError):  # not empty: other things are kept there
        os.rmdir(files.directory)
    return True


def _make_directory(files: RunFiles) -> None:
    with translate_errors(files):
        private_files.directory(files.directory)


@contextlib.contextmanager
def _locked(files: RunFiles) -> Iterator[None]:
    with _lock_file(files.start_lock) as start_lock, _lock_file(files.lock) as lock:
        if not (_try_lock(start_lock) and _try_lock(lock)):
            raise StoreError(f'{files.directory} is in use again: its server was started once more')
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
    """Until the last server has let go of its files, or another one serves them."""
    while _is_ending(files):
        if time.monotonic() >= until:
            raise StoreUnavailable(explain(files, held_by(files)))
        time.sleep(0.005)  # flock knows no deadline, and the process's alarm is not ours


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
