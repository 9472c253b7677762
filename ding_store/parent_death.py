"""Ends a process when the process that started it has ended, for whatever reason."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # not after a fork, when another thread may hold the loader's lock


def end_with(parent: int, number: int = signal.SIGTERM) -> None:
    """
    Overview:
        Send this process a signal when the thread that started it has ended. Call it in a new process, or as
        ``preexec_fn``.
    Arguments:
        - parent (:obj:`int`): Id of that thread's process.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it exited before the call above
        os._exit(1)
