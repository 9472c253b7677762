"""Output of benchmarks: results, and one line of progress that each result replaces."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write a progress line to stderr. On a terminal it replaces the line before it."""
    if sys.stderr.isatty():
        sys.stderr.write(f'\r\x1b[K{text}')
    elif text:
        sys.stderr.write(f'{text}\n')


def show(text: str) -> None:
    """Write a result to stdout at once."""
    say('')
    sys.stdout.write(f'{text}\n')
    sys.stdout.flush()
