"""Talking to a run's supervisor, and starting one."""

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
from ding_store.storage.embedded.supervisor.run_files import RunFiles, connect_control

_logger = logging.getLogger(__name__)
_LOG_LINES, _MAX_LOG_BYTES, _FULL_DISK_BYTES = 8, 1 << 20, 1 << 16
_LOADING_S = 10.0  # between signs of life of a redis that loads its data
_SLACK_S = 2.0  # for a supervisor that ran out of time to say why
# Not `-m`: that would import ding_store.storage, and numpy with it. At the end of sys.path it can shadow nothing.
_BOOT = 'import sys; sys.path.append(sys.argv[1]); from supervisor.main import main; main(sys.argv[2:])'


def run_files(directory: PathLike) -> RunFiles:
    """
    Raises:
        - ForeignFile: There is such a directory, but not of this user alone.
    """
    path = os.path.expanduser(directory)
    if os.path.lexists(path):
        private_files.check_directory(path)
    return RunFiles(os.path.realpath(path))


def ask(files: RunFiles, action: str, until: float) -> Optional[Dict[str, Any]]:
    """The supervisor's answer; None when none runs or it is just going."""
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
            if line.isspace():  # it lives, and will either be ready or die
                until = max(until, time.monotonic() + _LOADING_S)
    except (ConnectionResetError, BrokenPipeError):  # it is going
        return b''
    return line


def start_supervisor(files: RunFiles, grace_s: float, until: float) -> None:
    """Returns when a supervisor listens, ours or another's; or did so a moment ago."""
    if time.monotonic() >= until:
        raise StoreUnavailable(explain(files, 'it ended again and again'))
    binary = find_server()
    _check_data_fits(files, binary)
    reader, writer = os.pipe()
    try:
        try:
            launcher = _spawn(files, binary, grace_s, until, writer)
        finally:
            os.close(writer)
        report = _read_line(reader, until + _SLACK_S)
        launcher.kill()  # it forked the supervisor and ended long ago, unless it hangs
        launcher.wait()
    finally:
        os.close(reader)
    if not report.endswith(b'\n'):
        raise StoreUnavailable(explain(files, 'its supervisor died or did not answer in time'))
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
            start_new_session=True,  # Ctrl-C in our terminal is not for it
            cwd='/',
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
    """Redis 6 does not see what redis 7 wrote, and would begin empty without a word."""
    newer = os.path.join(files.directory, 'appendonlydir')
    if os.path.isdir(newer) and not os.path.exists(files.finished) and server_version(binary) < (7,):
        raise StoreUnavailable(f'{newer} was written by redis 7 or newer, which {binary} cannot read: install one')


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
        raise StoreUnavailable(f'embedded server of {files.directory}: {e}: choose a writable local directory') from e


def explain(files: RunFiles, reason: str) -> str:
    text = f'embedded server of {files.directory}: {reason}.'
    with contextlib.suppress(OSError):
        if shutil.disk_usage(files.directory).free < _FULL_DISK_BYTES:
            text += ' Its disk is full: make room, or choose another directory.'
        with open(files.log, errors='replace', opener=private_files.opener) as log:
            lines = log.readlines()[-_LOG_LINES:]
        text += f' {files.log} ends:\n' + ''.join(f'  {line}' for line in lines)
    return text
