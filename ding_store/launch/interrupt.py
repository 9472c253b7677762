"""Commands that are told to end, or that are killed: what they clean up, and what must not outlive them."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from typing import Iterator

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A scheduler that ends the job means what a user's Ctrl-C means: KeyboardInterrupt, in the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def die_with_starter() -> None:
    """``preexec_fn`` of a process that is killed when the thread that starts it has ended, in whatever way."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
