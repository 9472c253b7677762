"""Numbers of bytes as text."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """Return a number of bytes with its unit, in powers of 1000."""
    for unit in ('B', 'KB', 'MB', 'GB'):
        if num_bytes < 1000 or unit == 'GB':
            break
        num_bytes /= 1000
    return f'{num_bytes:.3g} {unit}'
