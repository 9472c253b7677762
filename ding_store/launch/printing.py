"""Output of commands that survives the end of its reader."""

from __future__ import annotations

import os
from typing import Any


def print_to(out: Any, text: str) -> None:
    """
    Overview:
        Write a text at once. If its reader is gone (``| head``, a closed terminal), drop this and all later output. A
        run must not end because no process reads its output.
    """
    try:
        out.write(text)
        out.flush()
    except OSError:
        discard(out)


def printable(text: str) -> str:
    """
    Overview:
        Return the text with every control character but line ends and tabs escaped. Any process that can write to a
        store may have put terminal escape codes into the texts that it holds.
    """
    return ''.join(c if c.isprintable() or c in '\n\t' else c.encode('unicode_escape').decode() for c in text)


def discard(out: Any) -> None:
    """Drop the stream's buffered and later output. The interpreter flushes the stream at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out.fileno())
    os.close(nowhere)
