"""A command that starts its own processes, as ``ditask`` does: run as it stands, and ended with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Iterator, List, Optional, Sequence, Tuple

from ding_store.errors import ConfigError

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: How long a command may take to end after it was told to, before all of its processes are made to.
LEAVE_S = 10.0
#: How long processes that were killed may take to be gone.
KILL_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(command: Sequence[str], leave_s: float = LEAVE_S) -> int:
    """
    Overview:
        Run a command to its end. A signal that ends this process is handed on, and what is left of the command's
        processes ``leave_s`` later, or when told once more, is killed: workers that ignore signals, too. Those of
        another session (the embedded server's, which ends by itself) are not touched.
    Returns:
        - code (:obj:`int`): As a shell says it: 128 + signal when it was killed.
    Raises:
        - ConfigError: There is no such command.
    """
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup, or a shell's &
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*heard, signal.SIGCHLD])
    # What the command leaves without a parent becomes ours, and so is found among our descendants.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = _start(command, before)
    deadline: Optional[float] = None
    while child.poll() is None or (deadline is not None and any(_descendants())):
        # Once told to end, its processes may do so without a word to us, which are no children of ours: look again.
        told = signal.sigtimedwait([*heard, signal.SIGCHLD], 3600.0 if deadline is None else 0.2)
        if told is not None and told.si_signo != signal.SIGCHLD:
            if deadline is None:
                sys.stderr.write('ding-store: interrupted: ending the command (once more to kill it)\n')
                if told.si_pid:  # one of a terminal has reached the command, too
                    child.send_signal(told.si_signo)
            deadline = time.monotonic() + (leave_s if deadline is None else 0.0)
        if deadline is not None and time.monotonic() >= deadline:
            left = _kill_all()
            if left:
                sys.stderr.write(f'ding-store: cannot be killed, and left alone: processes {left}\n')
                return 128 + signal.SIGKILL
            child.wait()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _start(command: Sequence[str], mask: set) -> subprocess.Popen:
    parent = os.getpid()

    def enter() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked to be told
            os._exit(1)

    try:
        return subprocess.Popen(command, preexec_fn=enter)
    except FileNotFoundError as error:
        raise ConfigError(f'{command[0]!r} is no command on PATH') from error
    except OSError as error:
        raise ConfigError(f'{command[0]!r} cannot be run: {error.strerror}') from error


def _descendants() -> Iterator[int]:
    """Those that live of this session, whoever their parents are."""
    parents = {pid: parent for pid, parent in _processes() if os.getsid(0) == _session_of(pid)}
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid() and pid != os.getpid():
            yield pid


def _processes() -> Iterator[Tuple[int, int]]:
    """(process, its parent) of all that live."""
    for name in os.listdir('/proc'):
        if name.isdigit():
            try:
                with open(f'/proc/{name}/stat') as file:
                    state, parent = file.read().rpartition(')')[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state not in 'ZX':
                yield int(name), int(parent)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


def _kill_all() -> List[int]:
    """Again and again, since what is about to die may have started more; those that do not die in time."""
    deadline = time.monotonic() + KILL_S
    while pids := list(_descendants()):
        if time.monotonic() >= deadline:
            return pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return []
