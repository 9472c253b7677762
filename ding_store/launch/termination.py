"""Commands that are told to end, and what they clean up."""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType
from typing import Iterator, List, Optional

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: What comes again within this time is the same one: kernel and shell both say that a terminal was closed.
_SAME_S = 1.0


@contextlib.contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """
    Overview:
        A scheduler that ends the job, and a terminal that is closed, mean what a user's Ctrl-C means:
        KeyboardInterrupt, in the main thread.
    """
    told_s = -_SAME_S

    def interrupt(number: int, frame: Optional[FrameType]) -> None:
        nonlocal told_s
        now = time.monotonic()
        if now - told_s >= _SAME_S:
            told_s = now
            raise KeyboardInterrupt

    # Of nohup's a closed terminal is to be ignored.
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """
    Overview:
        What interrupts the block comes behind it: a process that is started reads what it is to do from this one, and
        has an error of its own where that ends in the middle. For the main thread. No mask, which it would inherit.
    """
    came: List[int] = []
    heard = [number for number in (signal.SIGINT, *_SIGNALS) if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
