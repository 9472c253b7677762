"""The learner's loop at a ratio of samples to inserts: what it takes from the stream, and when it trains."""

from __future__ import annotations

import sys
from typing import Any, List, Optional

from ditk import logging

from ding_store.buffer.sampling.rate_limiter import RateLimiter
from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, NotEnoughData, StoreTimeout
from ding_store.middleware.read_ahead import ReadAhead
from ding_store.storage.base import Entry

#: So many iterations in which nothing was taken and nothing was trained are a deadlock.
_MAX_IDLE = 100


class InsertRatio(RateLimiter):
    """
    Overview:
        A rate limiter for a loop that inserts and samples in one thread, where neither may wait for the other: the loop
        asks before it takes a chunk, and a sample that is not allowed is a shortage, which all fetchers know.
    """

    _is_over = False

    def end(self) -> None:
        """The run is over: what was collected until now may be inserted, whatever the ratio."""
        with self._changed:
            self._is_over, self.max_insert = True, sys.maxsize

    def may_insert(self, num_rows: int) -> bool:
        with self._changed:
            return self._can_insert(num_rows)

    def may_sample(self) -> bool:
        """Whether a whole batch may be sampled."""
        with self._changed:
            return self._can_sample(self.max_sample)

    def _count_sample(self, num_rows: int, timeout_s: Optional[float], counted: List[int]) -> None:
        """Never waits; raises NotEnoughData where so many rows may not be sampled now."""
        try:
            super()._count_sample(num_rows, 0.0, counted)
        except StoreTimeout as e:
            raise NotEnoughData(str(e)) from e

    def _can_insert(self, num_rows: int) -> bool:
        return self._is_over or super()._can_insert(num_rows)


def pace_of(config: StoreConfig, cfg: Any) -> Optional[InsertRatio]:
    """
    Overview:
        What the flag's block says of the ratio, for a policy's batches; None: nothing.
    Raises:
        - ConfigError: The tolerance is smaller than one batch, or one row's samples.
    """
    ratio = config.samples_per_insert
    if ratio is None and config.min_size_to_sample == 1:
        return None  # without a look at the policy: a pusher needs no learner's settings
    batch_size = cfg.policy.learn.batch_size
    if ratio is not None and config.error_buffer is not None and config.error_buffer < batch_size:
        raise ConfigError(
            f'store.error_buffer ({config.error_buffer:g}) must be at least policy.learn.batch_size ({batch_size}): '
            'no batch could ever be sampled'
        )
    tolerance = float('inf') if config.error_buffer is None else config.error_buffer
    # Fewer rows make no batch, whatever the ratio, and inserts must not end before there are so many.
    least = max(config.min_size_to_sample, batch_size)
    largest = sys.maxsize if ratio is None else max(1, int(tolerance / ratio))
    return InsertRatio(least, ratio, tolerance, largest, batch_size, timeout_s=0.0)


def warn_of_no_pace(config: StoreConfig, reason: str) -> None:
    """What the flag's block says of the ratio has no effect, if it says anything."""
    if config.samples_per_insert is not None or config.min_size_to_sample > 1:
        logging.warning(f'ding_store: store.samples_per_insert and min_size_to_sample are ignored: {reason}')


class RatioReadAhead:
    """
    Overview:
        Hands out the chunks of a feed one by one, as the pace lets them in. One that may not be inserted yet stays
        unacked in the stream: collectors are no further ahead of it than they may be, and the learner trains.
    """

    def __init__(self, read_ahead: ReadAhead, pace: InsertRatio) -> None:
        self.pace = pace
        self._read_ahead = read_ahead
        self._held: Optional[Entry] = None
        self._train_iter = -1
        self._may_train = False
        self._num_idle = 0

    @property
    def is_holding(self) -> bool:
        """Whether a chunk was taken from the feed, and not let in yet."""
        return self._held is not None

    def begin(self, train_iter: int) -> None:
        """An iteration begins: what is waited for in it depends on whether the last one trained."""
        self._may_train = self._train_iter not in (-1, train_iter) and self.pace.may_sample()
        self._train_iter = train_iter

    def take(self, timeout_s: float) -> Optional[List[Entry]]:
        """
        Returns:
            - entries (:obj:`Optional[list]`): One, or none: train on what there is. None: nothing came in time.
        Raises:
            - StoreTimeout: The policy does not train on what there is, and no more may be inserted before it does.
        """
        if self._held is None:
            taken = self._read_ahead.take(1, 0.0 if self._may_train else timeout_s)
            if not taken:
                return [] if self._may_train else None
            self._held = taken[0]
            self._check_size(num_elements(taken[0]))
        if not self.pace.may_insert(num_elements(self._held)):
            self._count_idle()
            return []
        self._num_idle = 0
        return self.rest()

    def rest(self) -> List[Entry]:
        """The chunk that was taken from the feed, and is held until it may be inserted."""
        held, self._held = self._held, None
        return [] if held is None else [held]

    def _check_size(self, num_rows: int) -> None:
        pace = self.pace
        if pace.samples_per_insert is not None and num_rows > pace.max_insert:
            raise ConfigError(
                f'store.error_buffer ({pace.error_buffer:g}) must be at least {num_rows * pace.samples_per_insert:g}: '
                f'chunks of {num_rows} elements at store.samples_per_insert={pace.samples_per_insert:g}'
            )

    def _count_idle(self) -> None:
        self._num_idle = 0 if self._may_train else self._num_idle + 1
        if self._num_idle > _MAX_IDLE:
            raise StoreTimeout(
                f'nothing is inserted before the policy trains, and it has not in {_MAX_IDLE} iterations: {self.pace}; '
                'raise store.error_buffer, or lower store.samples_per_insert'
            )


def num_elements(entry: Entry) -> int:
    """What a chunk is in the buffer: of episodes each is one. 0: this is no chunk, which who takes it will find."""
    header = entry.header
    lengths, rows = header.get('lengths'), header.get('rows')
    if header.get('kind') == 'episodes':
        return len(lengths) if isinstance(lengths, list) else 0
    return rows if isinstance(rows, int) else 0
