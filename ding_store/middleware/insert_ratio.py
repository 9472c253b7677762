"""Samples-per-insert ratio of the learner's loop: decides when it inserts a chunk and when it trains."""

from __future__ import annotations

import sys
from typing import Any, Callable, List, Optional

from ditk import logging

from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, NotEnoughData, StoreTimeout
from ding_store.storage.base import Entry

#: Tolerance for ratios such as 0.1.
_ROUNDING = 1e-9
#: After this many iterations without an insert and without training, the loop is in a deadlock.
_MAX_IDLE = 100


class InsertRatio(RateLimiter):
    """
    Overview:
        A rate limiter for a loop that inserts and samples in one thread, where neither may wait for the other. The loop
        calls ``may_insert`` before it inserts a chunk, and ``grant`` for the rows that follow. A sample that is not
        allowed raises NotEnoughData, which all fetchers handle.
    """

    _is_over = False
    _granted = 0  # rows that may be inserted now

    def end(self) -> None:
        """Allow every insert from now on, because the run is over and its last chunks must go into the replay."""
        with self._changed:
            self._is_over, self.max_insert = True, sys.maxsize

    def may_insert(self, num_rows: int) -> bool:
        with self._changed:
            return self._can_insert(num_rows)

    def grant(self, num_rows: int) -> None:
        """Allow the inserts of so many rows, one after the other."""
        with self._changed:
            self._granted = num_rows

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

    def _count_insert(self, num_rows: int, timeout_s: Optional[float], counted: List[int]) -> None:
        super()._count_insert(num_rows, timeout_s, counted)
        self._granted = max(0, self._granted - num_rows)

    def _can_insert(self, num_rows: int) -> bool:
        return self._is_over or num_rows <= self._granted or self._is_in_ratio(num_rows)

    def _is_in_ratio(self, num_rows: int) -> bool:
        return super()._can_insert(num_rows)


class SharedRatio(InsertRatio):
    """
    Overview:
        The ratio of one of several learners in step. Ratio and tolerance are those of all together: the learners add
        their counts up at each agreement. So all may sample, or none, however the rows are distributed over them.

        No side waits for ever. If no batch may be sampled, or a learner has too few rows for its part of one, all
        insert. A batch that is sampled and not trained on does not count.
    Attributes:
        - num_ranks (:obj:`int`): The number of learners.
    """

    num_ranks = 1
    _pending = 0  # rows that this learner has sampled since the last agreement
    _difference_of_all: Optional[float] = None  # at the last agreement
    _num_inserts_of_all = 0.0
    _most_inserted = 0.0  # rows of all between two agreements
    _zero = 0.0  # what counts as no difference
    _is_one_short = True

    def counts(self) -> List[float]:
        """Return what ``agree`` needs, for a sum over all learners."""
        with self._changed:
            is_short = self._size() < self.min_size_to_sample or self._num_left() < self.max_sample
            is_short = is_short or self._short_at == self.num_inserts
            return [float(self.num_inserts), float(self.num_samples - self._pending), float(is_short)]

    def agree(self, is_training: bool, num_inserts: float, num_samples: float, num_short: float) -> None:
        """
        Overview:
            Go on with the sums of all learners' ``counts``. All call this with the same values.
        Arguments:
            - is_training (:obj:`bool`): All learners train on what they have sampled.
        """
        assert self.samples_per_insert is not None
        with self._changed:
            pending, self._pending = self._pending, 0
            if not is_training:
                super()._take_back(num_samples=pending)
                pending = 0
            begun = num_inserts - self.num_ranks * self.min_size_to_sample
            difference = begun * self.samples_per_insert - num_samples
            if self._difference_of_all is None:
                # A run may go on with another ratio, or with rows that came uncounted.
                self._zero = difference if abs(difference) > self.error_buffer and num_samples else 0.0
            else:
                self._most_inserted = max(self._most_inserted, num_inserts - self._num_inserts_of_all)
            self._num_inserts_of_all, self._is_one_short = num_inserts, bool(num_short)
            self._difference_of_all = difference - self._zero - pending * self.num_ranks
            self._changed.notify_all()

    def _can_sample(self, num_rows: int) -> bool:
        if self._difference_of_all is None or self._size() < self.min_size_to_sample:
            return False
        return self._difference_of_all - (self._pending + num_rows) * self.num_ranks >= -self.error_buffer - _ROUNDING

    def _is_in_ratio(self, num_rows: int) -> bool:
        if self._difference_of_all is None or self._is_one_short or not self._can_sample(self.max_sample):
            return True
        assert self.samples_per_insert is not None
        return self._difference_of_all + self._most_inserted * self.samples_per_insert <= self.error_buffer + _ROUNDING

    def _count_sample(self, num_rows: int, timeout_s: Optional[float], counted: List[int]) -> None:
        super()._count_sample(num_rows, timeout_s, counted)
        self._pending += num_rows

    def _take_back(self, num_inserts: int = 0, num_samples: int = 0, is_short: bool = False) -> None:
        super()._take_back(num_inserts, num_samples, is_short)
        self._pending = max(0, self._pending - num_samples)

    def _is_possible(self) -> bool:
        return self.num_inserts >= self._size()  # the ratio is that of all learners


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
    whole_batch = cfg.policy.learn.batch_size
    if samples_per_insert is not None and config.error_buffer is not None and config.error_buffer < whole_batch:
        raise ConfigError(
            f'store.error_buffer ({config.error_buffer:g}) must be at least policy.learn.batch_size ({whole_batch}). '
            'Raise it, or no batch could ever be sampled.'
        )
    batch_size = whole_batch // config.num_learners
    tolerance = float('inf') if config.error_buffer is None else config.error_buffer
    # A batch needs at least ``batch_size`` rows, so inserts must not be stopped before there are so many.
    least = max(-(-config.min_size_to_sample // config.num_learners), batch_size)
    largest = sys.maxsize if samples_per_insert is None else max(1, int(tolerance / samples_per_insert))
    is_shared = samples_per_insert is not None and config.num_learners > 1
    kind = SharedRatio if is_shared else InsertRatio
    ratio = kind(least, samples_per_insert, tolerance, largest, batch_size, timeout_s=0.0)
    if isinstance(ratio, SharedRatio):
        ratio.num_ranks = config.num_learners
    return ratio


def warn_of_no_ratio(config: StoreConfig, reason: str) -> None:
    """Log a warning if the config sets a ratio or a minimum size, which have no effect here because of ``reason``."""
    if config.samples_per_insert is not None or config.min_size_to_sample > 1:
        logging.warning(f'ding_store: store.samples_per_insert and min_size_to_sample are ignored: {reason}')


class RatioReadAhead:
    """
    Overview:
        Hands out chunks one by one, when the ratio allows their insert. A chunk that must wait stays unacknowledged in
        the stream. Collectors then stop at their maximum lead, and the learner trains.
    Arguments:
        - take_chunk (:obj:`Callable`): Returns the next chunk, as its parts in the partitions, when it is there within
            so many seconds.
    """

    def __init__(self, take_chunk: Callable[[float], Optional[List[Entry]]], ratio: InsertRatio) -> None:
        self.ratio = ratio
        self._take_chunk = take_chunk
        self._held: List[Entry] = []
        self._train_iter = -1
        self._may_train = False
        self._num_idle = 0

    @property
    def is_holding(self) -> bool:
        """True while a chunk that was taken from the read-ahead waits until it may be inserted."""
        return bool(self._held)

    def begin(self, train_iter: int) -> None:
        """Begin an iteration. ``take`` does not wait for a chunk if the last one trained and a batch may be sampled."""
        self._may_train = self._train_iter not in (-1, train_iter) and self.ratio.may_sample()
        self._train_iter = train_iter

    def take(self, timeout_s: float) -> Optional[List[Entry]]:
        """
        Overview:
            Return the next chunk, or as many of its parts as may be inserted.
        Returns:
            - entries (:obj:`Optional[list]`): One chunk. Empty: train on the rows in the replay. None: no chunk came in
              time.
        Raises:
            - StoreTimeout: The policy does not train, and no chunk may be inserted before it does.
        """
        if not self._held:
            taken = self._take_chunk(0.0 if self._may_train else timeout_s)
            if not taken:
                return [] if self._may_train else None
            self._held = taken
            for entry in taken:
                self._check_size(num_elements(entry))
        self.ratio.grant(0)
        num_rows = num_allowed = 0
        for entry in self._held:
            if not self.ratio.may_insert(num_rows + num_elements(entry)):
                break
            num_rows, num_allowed = num_rows + num_elements(entry), num_allowed + 1
        if not num_allowed:
            self._count_idle()
            return []
        self._num_idle = 0
        self.ratio.grant(num_rows)
        allowed, self._held = self._held[:num_allowed], self._held[num_allowed:]
        return allowed

    def rest(self) -> List[Entry]:
        """Return what is held of a chunk, and hold it no longer."""
        held, self._held = self._held, []
        return held

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
