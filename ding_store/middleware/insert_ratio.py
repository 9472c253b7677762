"""Samples-per-insert ratio of the learner's loop: decides when it inserts a chunk and when it trains."""

from __future__ import annotations

import sys
from typing import Any, List, Optional

from ditk import logging

from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, NotEnoughData, StoreTimeout
from ding_store.middleware.read_ahead import ReadAhead
from ding_store.storage.base import Entry

#: After this many iterations without an insert and without training, the loop is in a deadlock.
_MAX_IDLE = 100


class InsertRatio(RateLimiter):
    """
    Overview:
        A rate limiter for a loop that inserts and samples in one thread, where neither may wait for the other. The loop
        calls ``may_insert`` before it inserts a chunk. A sample that is not allowed raises NotEnoughData, which all
        fetchers handle.
    """

    _is_over = False

    def end(self) -> None:
        """Allow every insert from now on, because the run is over and its last chunks must go into the replay."""
        with self._changed:
            self._is_over, self.max_insert = True, sys.maxsize

    def may_insert(self, num_rows: int) -> bool:
        with self._changed:
            return self._can_insert(num_rows)

    def may_sample(self) -> bool:
        """Return True if a whole batch may be sampled now."""
        with self._changed:
            return self._can_sample(self.max_sample)

    def _count_sample(self, num_rows: int, timeout_s: Optional[float], counted: List[int]) -> None:
        """Count a sample without waiting. Raise NotEnoughData if so many rows may not be sampled now."""
        try:
            super()._count_sample(num_rows, 0.0, counted)
        except StoreTimeout as e:
            raise NotEnoughData(str(e)) from e

    def _can_insert(self, num_rows: int) -> bool:
        return self._is_over or super()._can_insert(num_rows)


def ratio_of(config: StoreConfig, cfg: Any) -> Optional[InsertRatio]:
    """
    Overview:
        Return a limiter for the config's ratio and the policy's batch size. Return None if the config has neither
        ``samples_per_insert`` nor ``min_size_to_sample``.
    Raises:
        - ConfigError: ``error_buffer`` is smaller than one batch, or than one row's samples.
    """
    samples_per_insert = config.samples_per_insert
    if samples_per_insert is None and config.min_size_to_sample == 1:
        return None  # before cfg.policy.learn is read: a cfg for a pusher alone need not have it
    batch_size = cfg.policy.learn.batch_size // config.num_learners
    if samples_per_insert is not None and config.error_buffer is not None and config.error_buffer < batch_size:
        raise ConfigError(
            f'store.error_buffer ({config.error_buffer:g}) must be at least policy.learn.batch_size ({batch_size}). '
            'Raise it, or no batch could ever be sampled.'
        )
    tolerance = float('inf') if config.error_buffer is None else config.error_buffer
    # A batch needs at least ``batch_size`` rows, so inserts must not be stopped before there are so many.
    least = max(-(-config.min_size_to_sample // config.num_learners), batch_size)
    largest = sys.maxsize if samples_per_insert is None else max(1, int(tolerance / samples_per_insert))
    return InsertRatio(least, samples_per_insert, tolerance, largest, batch_size, timeout_s=0.0)


def warn_of_no_ratio(config: StoreConfig, reason: str) -> None:
    """Log a warning if the config sets a ratio or a minimum size, which have no effect here because of ``reason``."""
    if config.samples_per_insert is not None or config.min_size_to_sample > 1:
        logging.warning(f'ding_store: store.samples_per_insert and min_size_to_sample are ignored: {reason}')


class RatioReadAhead:
    """
    Overview:
        Hands out the chunks of a read-ahead one by one, when the ratio allows their insert. A chunk that must wait
        stays unacknowledged in the stream. Collectors then stop at their maximum lead, and the learner trains.
    """

    def __init__(self, read_ahead: ReadAhead, ratio: InsertRatio) -> None:
        self.ratio = ratio
        self._read_ahead = read_ahead
        self._held: Optional[Entry] = None
        self._train_iter = -1
        self._may_train = False
        self._num_idle = 0

    @property
    def is_holding(self) -> bool:
        """True while a chunk that was taken from the read-ahead waits until it may be inserted."""
        return self._held is not None

    def begin(self, train_iter: int) -> None:
        """Begin an iteration. ``take`` does not wait for a chunk if the last one trained and a batch may be sampled."""
        self._may_train = self._train_iter not in (-1, train_iter) and self.ratio.may_sample()
        self._train_iter = train_iter

    def take(self, timeout_s: float) -> Optional[List[Entry]]:
        """
        Overview:
            Return the next chunk if it may be inserted.
        Returns:
            - entries (:obj:`Optional[list]`): One chunk. Empty: train on the rows in the replay. None: no chunk came in
              time.
        Raises:
            - StoreTimeout: The policy does not train, and no chunk may be inserted before it does.
        """
        if self._held is None:
            taken = self._read_ahead.take(1, 0.0 if self._may_train else timeout_s)
            if not taken:
                return [] if self._may_train else None
            self._held = taken[0]
            self._check_size(num_elements(taken[0]))
        if not self.ratio.may_insert(num_elements(self._held)):
            self._count_idle()
            return []
        self._num_idle = 0
        return self.rest()

    def rest(self) -> List[Entry]:
        """Return the held chunk, if there is one, and hold it no longer."""
        held, self._held = self._held, None
        return [] if held is None else [held]

    def _check_size(self, num_rows: int) -> None:
        ratio = self.ratio
        if ratio.samples_per_insert is not None and num_rows > ratio.max_insert:
            raise ConfigError(
                f'store.error_buffer ({ratio.error_buffer:g}) must be at least '
                f'{num_rows * ratio.samples_per_insert:g}: '
                f'chunks of {num_rows} elements at store.samples_per_insert={ratio.samples_per_insert:g}'
            )

    def _count_idle(self) -> None:
        self._num_idle = 0 if self._may_train else self._num_idle + 1
        if self._num_idle > _MAX_IDLE:
            raise StoreTimeout(
                f'no chunk may be inserted before the policy trains, and it has not in {_MAX_IDLE} iterations: '
                f'{self.ratio}. Raise store.error_buffer, or lower store.samples_per_insert.'
            )


def num_elements(entry: Entry) -> int:
    """Return how many buffer elements a chunk makes, where an episode is one. 0: malformed, as ``check`` will find."""
    header = entry.header
    lengths, rows = header.get('lengths'), header.get('rows')
    if header.get('kind') == 'episodes':
        return len(lengths) if isinstance(lengths, list) else 0
    return rows if isinstance(rows, int) else 0
