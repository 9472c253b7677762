"""``run_command``: run a command that starts its own processes, as ``ditask`` does, and end all of them with it."""

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
from ding_store.launch.log_lines import line
from ding_store.parent_death import end_with
from ding_store.run.last_checkpoint import SAVE_S, is_saving

_PR_SET_CHILD_SUBREAPER = 36
#: Seconds from the request to end until all processes of the command are killed.
LEAVE_S = 10.0
#: Seconds that killed processes may take to disappear.
KILL_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(command: Sequence[str], leave_s: float = LEAVE_S) -> int:
    """
    Overview:
        Run a command until it ends. A signal that ends this process is passed on to the command. Processes of the
        command that are left after ``leave_s``, or at a second signal, are killed, even if they ignore signals.
        ``leave_s`` begins only after a last checkpoint that one of them writes. Processes of another session are not
        touched: the embedded server ends by itself.
    Returns:
        - code (:obj:`int`): The exit code as in a shell: 128 + signal if the command was killed.
    Raises:
        - ConfigError: There is no such command.
    """
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup, or a shell's &
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*handled, signal.SIGCHLD])
    # A subreaper adopts the orphans of the command, so that they are found among its descendants.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = _start(command, before)
    patience = _Patience(leave_s)
    while child.poll() is None or (patience.was_signalled and any(_descendants())):
        # After a request to end, grandchildren end without a SIGCHLD for this process: check again every 0.2 s.
        received = signal.sigtimedwait([*handled, signal.SIGCHLD], 0.2 if patience.was_signalled else 3600.0)
        if received is not None and received.si_signo != signal.SIGCHLD:
            if not patience.was_signalled:
                sys.stderr.write(line('interrupted: ending the command (interrupt again to kill it)\n'))
                if received.si_pid:  # a signal from a terminal has reached the command already
                    child.send_signal(received.si_signo)
            patience.tell()
        if patience.has_ended():
            left = _kill_all()
            if left:
                sys.stderr.write(line(f'cannot be killed, and left alone: processes {left}\n'))
                return 128 + signal.SIGKILL
            child.wait()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


class _Patience:
    """Deadline of a command that received a signal: ``leave_s``, which begin after a last checkpoint is written."""

    def __init__(self, leave_s: float) -> None:
        self._leave_s = leave_s
        self._ends = self._saving_ends = math.inf
        self._is_saving = self.was_signalled = False

    def tell(self) -> None:
        """Start the deadline. At the second call it is over at once."""
        now = time.monotonic()
        self._ends, self._saving_ends = (now, now) if self.was_signalled else (now + self._leave_s, now + SAVE_S)
        self.was_signalled = True

    def has_ended(self) -> bool:
        now = time.monotonic()
        if self.was_signalled and now < self._saving_ends and any(map(is_saving, _descendants())):
            if not self._is_saving:
                sys.stderr.write(line('waiting for the last checkpoint, which is still being written\n'))
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
    """Yield the processes of this session that descend from this process through any chain of parents."""
    parents = {pid: parent for pid, parent in _processes() if os.getsid(0) == _session_of(pid)}
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid() and pid != os.getpid():
            yield pid


def _processes() -> Iterator[Tuple[int, int]]:
    """Yield (process, its parent) for all processes that run."""
    for name in os.listdir('/proc'):
        if name.isdigit():
            try:
                with open(f'/proc/{name}/stat') as file:
                    state, parent = file.read().rpartition(')')[2].split()[:2]
            except OSError:  # the process ended, or another user's, which /proc may hide (hidepid)
                continue
            if state not in 'ZX':
                yield int(name), int(parent)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


def _kill_all() -> List[int]:
    """Kill all descendants until none is left, and return those left at the deadline. A victim may have forked."""
    deadline = time.monotonic() + KILL_S
    while pids := list(_descendants()):
        if time.monotonic() >= deadline:
            return pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return []
