"""Limits of DI-engine's 'advanced' buffer: the recent ratio of pushes to samples, and the staleness of elements."""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Mapping, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.store_buffer import StoreBuffer
from ding_store.config import unknown_key
from ding_store.errors import ConfigError
from ding_store.replay_config import INFINITY

#: The number of oldest elements that are checked for staleness at a time.
_CHUNK = 1024


class Throughput:
    """
    Overview:
        Counts of pushed and sampled rows that decay exponentially, like DI-engine's ThruputController but without its
        thread. After ``window_seconds`` a row counts a hundredth.
    Arguments:
        - config (:obj:`Mapping`): ``replay_buffer.thruput_controller``.
        - clock (:obj:`Callable`): Returns seconds.
    Raises:
        - ConfigError: A key is unknown, or a limit is out of range.
    """

    KEYS = ('push_sample_rate_limit', 'window_seconds', 'sample_min_limit_ratio')

    def __init__(self, config: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        for key in config:
            if key not in self.KEYS:
                raise ConfigError(unknown_key('replay_buffer.thruput_controller', str(key), list(self.KEYS)))
        limits = config.get('push_sample_rate_limit', {})
        self._min, self._max = float(limits.get('min', 0)), float(limits.get('max', math.inf))
        self._window_s = float(config.get('window_seconds', 30))
        #: The number of rows that must be in the buffer before a sample, in batch sizes.
        self.min_ratio = float(config.get('sample_min_limit_ratio', 1))
        if not 0 <= self._min <= self._max:
            raise ConfigError(f'push_sample_rate_limit ({dict(limits)}) must have 0 <= min <= max')
        if not self._window_s > 0:
            raise ConfigError(f'thruput_controller.window_seconds ({self._window_s!r}) must be > 0')
        if not self.min_ratio >= 1:
            raise ConfigError(f'thruput_controller.sample_min_limit_ratio ({self.min_ratio!r}) must be >= 1')
        self._clock, self._last = clock, clock()
        self._pushed = self._sampled = 0.0

    def can_push(self, num_rows: int) -> bool:
        """Return whether enough was sampled to push so many more rows. Always true before the first sample."""
        self._forget()
        return self._sampled < 1e-5 or (self._pushed + num_rows) / self._sampled <= self._max

    def can_sample(self, num_rows: int) -> bool:
        """Return whether enough rows were pushed to sample so many more."""
        self._forget()
        return self._min == 0 or self._pushed / (self._sampled + num_rows) >= self._min

    def pushed(self, num_rows: int) -> None:
        self._pushed += num_rows

    def sampled(self, num_rows: int) -> None:
        self._sampled += num_rows

    def _forget(self) -> None:
        now = self._clock()
        kept = 0.01 ** ((now - self._last) / self._window_s)
        self._last, self._pushed, self._sampled = now, self._pushed * kept, self._sampled * kept


def drop_stale(buffer: StoreBuffer, train_iter: int, max_staleness: float) -> None:
    """
    Delete elements that were collected at least ``max_staleness`` iterations ago. Staleness falls from the oldest to
    the newest, so it stops at the first element that is fresh enough.
    """
    if max_staleness == INFINITY:
        return
    while buffer.count():
        rows, collected = _oldest(buffer)
        stale = rows[train_iter - collected >= max_staleness]
        buffer.delete([str(row) for row in stale.tolist()])
        if not len(stale) or len(stale) < len(rows):
            return


def _oldest(buffer: StoreBuffer) -> Tuple[Array, Array]:
    """Return rows of the oldest elements and their collect iterations, infinite for elements without one."""
    index, column = buffer.table.index, buffer.table.columns.get('collect_iter')
    with index.lock:
        slots = index.oldest(_CHUNK)
        rows = index.row_of_slot[slots]
        if column is not None:
            # A sequence has one number per step. Its oldest step counts.
            return rows, column.read(slots).reshape(len(slots), -1).min(axis=1)
    items = [buffer.get_by_index(str(row)).data for row in rows.tolist()] if buffer.schema is None else []
    found = [each.get('collect_iter') if isinstance(each, dict) else None for each in items]
    return rows, np.array([INFINITY if each is None else np.min(each) for each in found or [None] * len(rows)])
