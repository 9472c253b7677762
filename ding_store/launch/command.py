"""A command that starts its own processes, as ``ditask`` does: run as it stands, and ended with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from typing import Iterator, List, Sequence, Tuple

from ding_store.errors import ConfigError
from ding_store.middleware.last_checkpoint import SAVE_S, is_saving
from ding_store.parent_death import end_with

_PR_SET_CHILD_SUBREAPER = 36
#: How long a command may take to end after it was told to, before all of its processes are made to.
LEAVE_S = 10.0
#: How long processes that were killed may take to be gone.
KILL_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(command: Sequence[str], leave_s: float = LEAVE_S) -> int:
    """
    Overview:
        Run a command to its end. A signal that ends this process is handed on, and what is left of the command's
        processes ``leave_s`` later, or when told once more, is killed: workers that ignore signals, too. While one of
        them writes its last checkpoint, ``leave_s`` does not begin. Those of another session (the embedded server's,
        which ends by itself) are not touched.
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
    patience = _Patience(leave_s)
    while child.poll() is None or (patience.was_told and any(_descendants())):
        # Once told to end, its processes may do so without a word to us, which are no children of ours: look again.
        told = signal.sigtimedwait([*heard, signal.SIGCHLD], 0.2 if patience.was_told else 3600.0)
        if told is not None and told.si_signo != signal.SIGCHLD:
            if not patience.was_told:
                sys.stderr.write('ding-store: interrupted: ending the command (once more to kill it)\n')
                if told.si_pid:  # one of a terminal has reached the command, too
                    child.send_signal(told.si_signo)
            patience.tell()
        if patience.has_ended():
            left = _kill_all()
            if left:
                sys.stderr.write(f'ding-store: cannot be killed, and left alone: processes {left}\n')
                return 128 + signal.SIGKILL
            child.wait()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


class _Patience:
    """With a command that was told to end: ``leave_s``, which do not begin before a last checkpoint is written."""

    def __init__(self, leave_s: float) -> None:
        self._leave_s = leave_s
        self._ends = self._saving_ends = math.inf
        self._is_saving = self.was_told = False

    def tell(self) -> None:
        """The second time it ends at once."""
        now = time.monotonic()
        self._ends, self._saving_ends = (now, now) if self.was_told else (now + self._leave_s, now + SAVE_S)
        self.was_told = True

    def has_ended(self) -> bool:
        now = time.monotonic()
        if self.was_told and now < self._saving_ends and any(map(is_saving, _descendants())):
            if not self._is_saving:
                sys.stderr.write('ding-store: waiting for the last checkpoint, which is still being written\n')
            self._is_saving, self._ends = True, now + self._leave_s
        return now >= self._ends


def _start(command: Sequence[str], mask: set) -> subprocess.Popen:
    parent = os.getpid()

    def enter() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        end_with(parent)

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
            except OSError:  # it is gone, or another user's, which /proc may hide (hidepid)
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
