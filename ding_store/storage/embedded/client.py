"""Starts a run's supervisor, and sends it requests."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Optional

from ding_store import private_files
from ding_store.errors import StoreError, StoreUnavailable
from ding_store.storage.embedded.binary import PathLike, find_server, server_version
from ding_store.storage.embedded.local_tmp import with_local_tmp
from ding_store.storage.embedded.supervisor.run_files import RunFiles, connect_control

_logger = logging.getLogger(__name__)
_LOG_LINES, _MAX_LOG_BYTES, _FULL_DISK_BYTES = 8, 1 << 20, 1 << 16
_LOADING_S = 10.0  # longest time between two bytes from a supervisor whose redis loads its data
_SLACK_S = 2.0  # extra time for a supervisor to report that its time is over
# Not `-m`: that would import ding_store.storage, and numpy with it. The end of sys.path hides no other module.
_BOOT = 'import sys; sys.path.append(sys.argv[1]); from supervisor.main import main; main(sys.argv[2:])'


def run_files(directory: PathLike) -> RunFiles:
    """
    Overview:
        Return the paths in a run's directory, which need not exist.
    Raises:
        - ForeignFile: The directory exists, but another user owns it or all users may write to it.
    """
    path = os.path.expanduser(directory)
    if os.path.lexists(path):
        private_files.check_directory(path)
    return RunFiles(os.path.realpath(path))


def ask(files: RunFiles, action: str, until: float) -> Optional[Dict[str, Any]]:
    """Send the supervisor a request. Return its answer, None if no supervisor runs or it is just stopping."""
    with translate_errors(files):
        connection = connect_control(files, _left(until))
        if connection is None:
            return None
        with connection:
            line = _exchange(connection, action, until)
    if not line.endswith(b'\n'):
        return None
    answer: Dict[str, Any] = json.loads(line)
    if 'error' in answer:
        raise StoreUnavailable(explain(files, answer['error']))
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
            if part.isspace() and not line:
                _logger.info('the embedded server is loading the data that the last run left')
            line += part
            if line.isspace():  # It is running, and will either be ready or exit.
                until = max(until, time.monotonic() + _LOADING_S)
    except (ConnectionResetError, BrokenPipeError):  # It is stopping.
        return b''
    return line


def start_supervisor(files: RunFiles, grace_s: float, until: float) -> None:
    """Start a supervisor. Return when one listens or has listened, this one or another process's."""
    if time.monotonic() >= until:
        raise StoreUnavailable(explain(files, 'it ended after each start'))
    binary = find_server()
    _check_data_fits(files, binary)
    reader, writer = os.pipe()
    try:
        try:
            launcher = _spawn(files, binary, grace_s, until, writer)
        finally:
            os.close(writer)
        report = _read_line(reader, until + _SLACK_S)
        launcher.kill()  # It has forked the supervisor and exited, unless it hangs.
        launcher.wait()
    finally:
        os.close(reader)
    if not report.endswith(b'\n'):
        raise StoreUnavailable(explain(files, 'its supervisor crashed or did not answer in time'))
    error = json.loads(report).get('error')
    if error:
        raise StoreUnavailable(explain(files, error))


def _spawn(files: RunFiles, binary: Path, grace_s: float, until: float, report: int) -> subprocess.Popen[bytes]:
    arguments = {
        '--dir': files.directory,
        '--binary': str(binary),
        '--grace-s': str(grace_s),
        '--until': str(until),
        '--report': str(report),
    }
    package = str(Path(__file__).absolute().parent)
    command: List[str] = [sys.executable, '-I', '-S', '-c', _BOOT, package]
    with translate_errors(files), _open_log(files) as log:
        return subprocess.Popen(
            [*command, *(word for pair in arguments.items() for word in pair)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[report],
            start_new_session=True,  # keeps Ctrl-C in this terminal away from it
            cwd='/',
            env=with_local_tmp(),
        )


def _open_log(files: RunFiles) -> IO[bytes]:
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(files.log) > _MAX_LOG_BYTES:
            os.replace(files.log, files.log + '.1')
    return open(files.log, 'ab', opener=private_files.opener)


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
    """Raise StoreUnavailable if redis 7 wrote the data: redis 6 would ignore it and start empty."""
    newer = os.path.join(files.directory, 'appendonlydir')
    if os.path.isdir(newer) and not os.path.exists(files.finished) and server_version(binary) < (7,):
        raise StoreUnavailable(f'{newer} was written by redis 7 or newer. Install it, as {binary} is older.')


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.001)


@contextlib.contextmanager
def translate_errors(files: RunFiles) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except socket.timeout as e:
        raise StoreUnavailable(explain(files, 'it did not answer in time')) from e
    except OSError as e:
        raise StoreUnavailable(f'embedded server of {files.directory}: {e}. Choose a writable local directory.') from e


def explain(files: RunFiles, reason: str) -> str:
    text = f'embedded server of {files.directory}: {reason}.'
    with contextlib.suppress(OSError):
        if shutil.disk_usage(files.directory).free < _FULL_DISK_BYTES:
            text += ' Its disk is full. Free space, or choose another directory.'
        with open(files.log, errors='replace', opener=private_files.opener) as log:
            lines = log.readlines()[-_LOG_LINES:]
        text += f' {files.log} ends:\n' + ''.join(f'  {line}' for line in lines)
    return text
