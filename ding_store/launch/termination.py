"""Signals that end a command: as KeyboardInterrupt, or delayed until the end of a block."""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType
from typing import Callable, Iterator, List, Optional

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: Signals within this time count as one: kernel and shell both send SIGHUP when a terminal is closed.
_SAME_S = 1.0


@contextlib.contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """
    Overview:
        Raise KeyboardInterrupt in the main thread at SIGTERM and SIGHUP. A scheduler that ends the job and a terminal
        that is closed then have the effect of Ctrl-C.
    """
    told_s = -_SAME_S

    def interrupt(number: int, frame: Optional[FrameType]) -> None:
        nonlocal told_s
        now = time.monotonic()
        if now - told_s >= _SAME_S:
            told_s = now
            raise KeyboardInterrupt

    # nohup sets SIGHUP to be ignored: leave that.
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_noted() -> Iterator[Callable[[], bool]]:
    """Note SIGINT, SIGTERM and SIGHUP instead of ending the block. Give a function that says whether one came."""
    came: List[int] = []
    handled = [number for number in (signal.SIGINT, *_SIGNALS) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in handled}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """
    Overview:
        Deliver a signal of this block at its end. A process that is started in the block reads its input from this
        one, and fails if this one ends in the middle. For the main thread. A signal mask would be inherited.
    """
    came: List[int] = []
    handled = [number for number in (signal.SIGINT, *_SIGNALS) if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
