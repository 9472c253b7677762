"""Processes that end when the one that started them has, in whatever way."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # not after a fork, when another thread may hold the loader's lock


def end_with(parent: int, number: int = signal.SIGTERM) -> None:
    """
    Overview:
        Called in a process that was just started, as its ``preexec_fn`` or by itself: it gets this signal when the
        thread that started it has ended.
    Arguments:
        - parent (:obj:`int`): The process of that thread.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked to be told
        os._exit(1)
