"""Numbers and names as text."""

from __future__ import annotations

from typing import Any, Optional

#: Name of a peer in records -> its name in tables and figures.
PEERS = {'stock': 'DI-engine', 'queue': 'DI-engine, Redis queue', 'store': 'ding_store'}


def size_text(num_bytes: float) -> str:
    """Return a number of bytes with its unit, in powers of 1000."""
    for unit in ('B', 'KB', 'MB', 'GB'):
        if num_bytes < 1000 or unit == 'GB':
            break
        num_bytes /= 1000
    return f'{num_bytes:.3g} {unit}'


def number(value: Any, digits: int = 3) -> str:
    """Return a number with three significant digits: 1.06k, 24.5M."""
    for limit, unit in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
        if abs(value) >= limit:
            return f'{value / (1e3 if unit == "k" else limit):.{digits}g}{unit}'
    return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.{digits}g}'


def times(value: float) -> str:
    return f'{number(value, 2 if value < 100 else 3)}x'


def percent(share: float) -> str:
    return f'{100 * max(0.0, share):.0f} %'


def seconds_text(value: float) -> str:
    if value < 1e-3:
        return f'{value * 1e6:.0f} us'
    return f'{value * 1e3:.3g} ms' if value < 1 else f'{value:.3g} s'


def elements_text(record: Any, length: Optional[int] = None) -> str:
    """Return the size and number of a record's elements: '226 KB x 17.7k'."""
    return f'{size_text(record["element_bytes"])} x {number(record["length"] if length is None else length)}'
