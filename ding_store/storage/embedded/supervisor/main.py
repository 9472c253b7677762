"""How a supervisor begins: detached, the only one, on files that the last one has let go of."""

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

#: How often to look whether the lock is free, or another supervisor serves.
LOOK_AGAIN_S = 0.02


def become_supervisor(files: RunFiles, binary: str, grace_s: float, until: float) -> Optional[Supervisor]:
    """
    Overview:
        Wait for whoever is starting, then for whoever is stopping, and listen; None when another one already serves.
    Raises:
        - TimeoutError: The lock stays with someone who does not listen here.
    """
    with deadline(until - time.monotonic()):
        start_lock = take_lock(files.start_lock)
        lock = _take_lock_unless_served(files)
        if lock is None:
            return None
    stale = files.socket_path()  # of one that was killed: we have its lock, so that it and its redis are gone
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
    """One that lives may have lost its sockets to a cleaner of /tmp: it is there again when it has made new ones."""
    while not is_served(files):
        lock = try_lock(files.lock)
        if lock is not None:
            return lock
        time.sleep(LOOK_AGAIN_S)
    return None


def raise_file_limit() -> None:
    """There is a descriptor for each member, and redis has several connections to each."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: List[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--dir', required=True)
    parser.add_argument('--binary', required=True)
    parser.add_argument('--grace-s', type=float, required=True)
    parser.add_argument('--until', type=float, required=True)  # of the monotonic clock, which is the host's
    parser.add_argument('--report', type=int, required=True)
    asked = parser.parse_args(arguments)
    if os.fork():  # init is the supervisor's parent: no starter has to reap it, or kills it with its own children
        os._exit(0)
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the starter's survives exec
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
    with contextlib.suppress(BrokenPipeError):  # the starter did not wait for us
        os.write(asked.report, json.dumps(answer).encode() + b'\n')
    os.close(asked.report)
    if supervisor is not None:
        supervisor.serve()
