"""Helpers that tests of stores share: payloads, waits and lookups."""

from __future__ import annotations

import threading
import time
from typing import Callable, Optional, Tuple

import numpy as np

from ding_store.storage.base import Arrays, Entry, Header
from ding_store.storage.store import Store

#: Deadline of every wait. Tests that pass never wait this long.
WAIT_S = 60.0


def chunk(value: int, size: int = 8) -> Arrays:
    """Return arrays that hold only ``value``, so that ``number_of`` notices a torn payload."""
    return {'x': np.full(size, value, np.int64)}


def number_of(entry: Entry) -> int:
    """Return the value of an entry made with ``chunk``, and check that the entry is not torn."""
    x = entry.arrays['x']
    assert (x == x[0]).all(), f'torn entry {entry.id}'
    return int(x[0])


def abandon(store: Store) -> None:
    """Forget the unacked entries of a store, as if its process was killed. It may still be closed."""
    store.client.own_writer._stream_writers.clear()


def found_in(store: Store) -> Optional[Tuple[Header, int]]:
    """Return header and version of the value 'news', or None."""
    value = store.get('news')
    return None if value is None else (value.header, value.version)


def eventually(true: Callable[[], bool], what: str) -> None:
    """Poll until ``true()``, for conditions that no event reports. Fail after ``WAIT_S``."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not true():
        assert time.monotonic() < deadline, f'{what}: not within {WAIT_S} s'
        pause.wait(0.005)
