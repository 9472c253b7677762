"""Writing DI-engine's total_config.py in a process beside the script, which a launcher waits for at its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, List, Optional

from ding_store.gc_freeze import leave_out_for_good

#: Seconds that the launcher waits. Formatting a config takes seconds, and more on a busy machine.
WRITE_S = 60.0
_PR_SET_NAME = 15


def write_beside(save: Callable[[Any, str], None], config: Any, path: str, launcher: Optional[str] = None) -> None:
    """
    Overview:
        Call ``save(config, path)`` in another process while the caller continues. Otherwise the learner would delay
        every other process. An error is written to ``path`` with the suffix ``.error``.
    Arguments:
        - launcher (:obj:`Optional[str]`): Pid of the command that waits for it, see ``wait_until_written``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        # Before the second fork: the process that writes has the name before the caller continues.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, _name(launcher or '').encode(), 0, 0, 0)
        if os.fork() == 0:  # a grandchild: the caller never has to wait for it
            # Never collect the parent's garbage here: nng aborts if a process closes another's sockets.
            leave_out_for_good()
            os.nice(19)  # a second of formatting, at the moment when every role begins
            _let_go()
            save(config, path)
    except BaseException:  # noqa: BLE001 - no caller can catch it, so write it down
        Path(f'{path}.error').write_text(traceback.format_exc())
    finally:
        os._exit(0)


def wait_until_written(timeout_s: float = WRITE_S) -> List[int]:
    """
    Overview:
        Wait for the configs that processes of this launcher write. If the launcher is the first process of a container,
        the kernel kills what still runs when it ends.
    Returns:
        - pids (:obj:`List[int]`): Processes that are still writing after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while pids := _writers(_name(str(os.getpid()))):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                try:
                    if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                        return pids
                finally:
                    os.close(descriptor)
    return []


def _name(launcher: str) -> str:
    return f'config {launcher}'[:15]  # Linux keeps 15 bytes of a name


def _writers(name: str) -> List[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):  # the process ended, or is another user's
            if Path('/proc', pid, 'comm').read_text().rstrip('\n') == name and not _is_dead(pid):
                found.append(int(pid))
    return found


def _is_dead(pid: str) -> bool:
    return Path('/proc', pid, 'stat').read_text().rpartition(')')[2].split()[0] in 'ZX'


def _let_go() -> None:
    """Close inherited descriptors: this process may outlive the script, and readers wait for the end of its output."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    # List the open ones: the limit may be a thousand million, and Python 3.9 tries one by one.
    for name in os.listdir('/proc/self/fd'):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))
