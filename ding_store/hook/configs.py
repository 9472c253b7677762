"""DI-engine's total_config.py, written by a process beside the script; a launcher waits for it before it ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, List

#: Set by launchers: the process that waits for what is still being written.
ENV_LAUNCHER = 'DING_STORE_LAUNCHER'
#: How long it waits. Formatting a config takes seconds, and more on a busy machine.
WRITE_S = 60.0
_PR_SET_NAME = 15


def write_beside(save: Callable[[Any, str], None], config: Any, path: str) -> None:
    """
    Overview:
        Call ``save(config, path)`` in a process of its own, while the caller goes on: the learner would keep every
        other process waiting. An error is written to ``path`` with the suffix ``.error``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        # Before the second fork: when the caller goes on, the process that writes has the name already.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, _name(os.environ.get(ENV_LAUNCHER, '')).encode(), 0, 0, 0)
        if os.fork() == 0:  # a grandchild: the caller never has to wait for it
            gc.freeze()  # what the parent left for the collector is its own: nng aborts who closes others' sockets
            os.nice(19)  # a second of formatting, just when every role begins
            _let_go()
            save(config, path)
    except BaseException:  # noqa: BLE001 - nobody is there to catch it; what is left is to say it
        Path(f'{path}.error').write_text(traceback.format_exc())
    finally:
        os._exit(0)


def wait_until_written(timeout_s: float = WRITE_S) -> List[int]:
    """
    Overview:
        Wait for the configs that processes of this launcher write. If the launcher is the first process of a container,
        what still runs at its end is killed.
    Returns:
        - pids (:obj:`List[int]`): Processes that still write after ``timeout_s``.
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
    return f'config {launcher}'[:15]  # what Linux keeps of a name


def _writers(name: str) -> List[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):  # it is gone, or another user's
            if Path('/proc', pid, 'comm').read_text().rstrip('\n') == name and not _is_dead(pid):
                found.append(int(pid))
    return found


def _is_dead(pid: str) -> bool:
    return Path('/proc', pid, 'stat').read_text().rpartition(')')[2].split()[0] in 'ZX'


def _let_go() -> None:
    """Close what this process inherited: it may outlive the script, and others wait for the end of its output."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    # Not up to the limit: it may be a thousand million, and Python 3.9 tries one by one.
    for name in os.listdir('/proc/self/fd'):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
