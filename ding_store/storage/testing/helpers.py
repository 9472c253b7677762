"""What tests of stores have in common."""

from __future__ import annotations

import threading
import time
from typing import Callable, Optional, Tuple

import numpy as np

from ding_store.storage.base import Arrays, Entry, Header, Store

#: A deadline, not a duration.
WAIT_S = 60.0


def chunk(value: int, size: int = 8) -> Arrays:
    """A payload that tells its number, and shows when it is torn."""
    return {'x': np.full(size, value, np.int64)}


def number_of(entry: Entry) -> int:
    x = entry.arrays['x']
    assert (x == x[0]).all(), f'torn entry {entry.id}'
    return int(x[0])


def found_in(store: Store) -> Optional[Tuple[Header, int]]:
    """Header and version of the value 'news'."""
    value = store.get('news')
    return None if value is None else (value.header, value.version)


def eventually(true: Callable[[], bool], what: str) -> None:
    """Wait for something that no event tells of."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not true():
        assert time.monotonic() < deadline, f'{what}: not within {WAIT_S} s'
        pause.wait(0.005)
