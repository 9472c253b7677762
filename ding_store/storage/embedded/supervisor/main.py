"""Start of a supervisor: it detaches, takes the run's lock and listens."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import time
from typing import List, Optional

from .control import PingResult
from .loop import Supervisor
from .run_files import RunFiles, deadline, held_by, is_served, take_lock, try_lock
from .sockets import REDIS, make_socket_directory, remove_socket_directory

#: Interval of checks whether the lock is free, or another supervisor serves.
LOOK_AGAIN_S = 0.02


def become_supervisor(files: RunFiles, binary: str, grace_s: float, until: float) -> Optional[Supervisor]:
    """
    Overview:
        Wait for a process that starts a supervisor, then for a supervisor that stops, and listen. Return None if
        another supervisor serves the run.
    Raises:
        - TimeoutError: Another process keeps the lock and does not listen here.
    """
    with deadline(until - time.monotonic()):
        start_lock = take_lock(files.start_lock)
        lock = _take_lock_unless_served(files)
        if lock is None:
            return None
    stale = files.socket_path()  # Left by a killed supervisor. The lock was free, so it and its redis are gone.
    if stale is not None:
        remove_socket_directory(stale)
    if files.is_finished():
        files.archive()
    redis_socket = os.path.join(make_socket_directory(), REDIS)
    try:
        supervisor = Supervisor(files, binary, grace_s, lock, redis_socket)
    except OSError:
        remove_socket_directory(redis_socket)
        raise
    os.close(start_lock)
    return supervisor


def _take_lock_unless_served(files: RunFiles) -> Optional[int]:
    """Return the run's lock, None if a supervisor serves. A supervisor soon replaces sockets that were deleted."""
    while not is_served(files):
        lock = try_lock(files.lock)
        if lock is not None:
            return lock
        time.sleep(LOOK_AGAIN_S)
    return None


def raise_file_limit() -> None:
    """Allow as many descriptors as possible: there is one per client, and redis has several connections to each."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: List[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--dir', required=True)
    parser.add_argument('--binary', required=True)
    parser.add_argument('--grace-s', type=float, required=True)
    parser.add_argument('--until', type=float, required=True)  # on the host's monotonic clock
    parser.add_argument('--report', type=int, required=True)
    asked = parser.parse_args(arguments)
    if os.fork():  # The supervisor's parent is init, so that no starter has to reap it or kills it with its children.
        os._exit(0)
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # The starter's signal mask survives exec.
    raise_file_limit()
    files = RunFiles(asked.dir)
    answer: PingResult = {'ok': True}
    supervisor: Optional[Supervisor] = None
    try:
        supervisor = become_supervisor(files, asked.binary, asked.grace_s, asked.until)
    except TimeoutError:
        answer = {'error': held_by(files)}
    except OSError as e:
        answer = {'error': str(e)}
    with contextlib.suppress(BrokenPipeError):  # The starter did not wait.
        os.write(asked.report, json.dumps(answer).encode() + b'\n')
    os.close(asked.report)
    if supervisor is not None:
        supervisor.serve()
