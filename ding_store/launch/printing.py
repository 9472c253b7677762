"""What a command prints, also when who read it is gone."""

from __future__ import annotations

import os
from typing import Any


def print_to(out: Any, text: str) -> None:
    """
    Overview:
        Write it at once. Where who read it is gone (``| head``, a terminal that was closed), nobody does from here on,
        and who prints goes on: a run is not to end for want of a reader.
    """
    try:
        out.write(text)
        out.flush()
    except OSError:
        discard(out)


def printable(text: str) -> str:
    """
    Overview:
        The text with every control character but line ends and tabs escaped. What a store holds is shown on terminals,
        and any process that can write to the store may have put escape codes there.
    """
    return ''.join(c if c.isprintable() or c in '\n\t' else c.encode('unicode_escape').decode() for c in text)


def discard(out: Any) -> None:
    """Let go of what it still holds and of all that follows: the interpreter flushes it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out.fileno())
    os.close(nowhere)
