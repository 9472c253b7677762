"""Commands that are told to end, and what they clean up."""

from __future__ import annotations

import contextlib
import signal
from typing import Iterator


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A scheduler that ends the job means what a user's Ctrl-C means: KeyboardInterrupt, in the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
