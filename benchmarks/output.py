"""What benchmarks print: results, and one line of progress that they replace."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """What is being measured: to stderr, in place of what was said before where that is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f'\r\x1b[K{text}')
    elif text:
        sys.stderr.write(f'{text}\n')


def show(text: str) -> None:
    """A result: to stdout at once."""
    say('')
    sys.stdout.write(f'{text}\n')
    sys.stdout.flush()
