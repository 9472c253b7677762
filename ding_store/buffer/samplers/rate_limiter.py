"""A limiter that makes samples and inserts of threads wait to keep a ratio, like Reverb's rate limiter."""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

from ding_store.buffer.arguments import integer
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.persistence.commits import CommitRecord
from ding_store.buffer.samplers.base import Sampler, is_within
from ding_store.errors import ConfigError, NotEnoughData, StoreTimeout

#: Tolerance for ratios such as 0.1. Without it, rounding could make both sides wait at the same point.
_ROUNDING = 1e-9


class RateLimiter:
    """
    Overview:
        Keeps ``num_inserts * samples_per_insert - num_samples`` within ``error_buffer`` of its value when sampling
        begins, ``min_size_to_sample * samples_per_insert``. Inserts wait above that range, samples below it. See
        Reverb, Cassirer et al. 2021, section 3.3.

        Inserts never wait before the table has ``min_size_to_sample`` rows and the rows of a batch. If
        ``min_size_to_sample`` is below ``max_sample``, sampling therefore begins above the range, and inserts wait
        until samples have caught up. A sample may find too few rows in a view's queue, sequences or groups. Then the
        next insert does not wait, because more such samples could not let it in.

        There is no polling. Each change wakes the threads that wait for it.
    Arguments:
        - min_size_to_sample (:obj:`int`): The number of rows before the first sample.
        - samples_per_insert (:obj:`Optional[float]`): Rows sampled per row inserted. None: no ratio, only the minimal
          size counts.
        - error_buffer (:obj:`float`): The tolerance, in sampled rows.
        - max_insert (:obj:`int`): The largest number of rows inserted at once.
        - max_sample (:obj:`int`): The largest number of rows sampled at once: the batch size.
        - timeout_s (:obj:`float`): The default limit of a wait, in seconds.
    Raises:
        - ConfigError: A number is out of range, or both sides could wait for each other for ever.
    """

    def __init__(
        self,
        min_size_to_sample: int,
        samples_per_insert: Optional[float] = None,
        error_buffer: float = math.inf,
        max_insert: int = 1,
        max_sample: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        ratio = samples_per_insert
        if ratio is not None and not (is_within(ratio, 0) and 0 < ratio < math.inf):
            raise ConfigError(f'samples_per_insert ({samples_per_insert!r}) must be a number > 0')
        if not is_within(timeout_s, 0):
            raise ConfigError(f'timeout_s ({timeout_s!r}) must be >= 0')
        if not is_within(error_buffer, 0):
            raise ConfigError(f'error_buffer ({error_buffer!r}) must be a number >= 0')
        self.min_size_to_sample = integer('min_size_to_sample', min_size_to_sample, 1)
        self.samples_per_insert = samples_per_insert
        self.error_buffer, self.timeout_s = float(error_buffer), timeout_s
        self.max_insert, self.max_sample = integer('max_insert', max_insert, 1), integer('max_sample', max_sample, 1)
        self._check_deadlock()
        self.num_inserts = self.num_samples = 0
        self._lock = hold_over_forks(threading.RLock())
        self._changed = threading.Condition(self._lock)
        self._size: Callable[[], int] = lambda: self.num_inserts
        self._sampler: Optional[Sampler] = None
        self._record: Optional[CommitRecord] = None
        self._next_row: Callable[[], int] = lambda: 0
        self._first_row = 0
        #: The value of ``num_inserts`` when the last sample found too few rows. None: it found enough.
        self._short_at: Optional[int] = None

    def attach(self, size: Callable[[], int], capacity: int, sampler: Optional[Sampler] = None) -> None:
        """
        Overview:
            Count the rows of a table. Deleted rows do not count for the minimal size.
        Arguments:
            - sampler (:obj:`Optional[Sampler]`): The sampler, which may limit how often it returns a row.
        Raises:
            - ConfigError: The table is too small for ``min_size_to_sample`` or ``max_sample``, or the sampler cannot
              keep the ratio.
        """
        problem = self.problem_of_capacity(capacity)
        if problem is not None:
            raise ConfigError(problem)
        if sampler is not None:
            self.check_sampler(sampler)
        with self._changed:
            self._size, self._sampler = size, sampler
            if not self._is_possible():
                self._reset()

    def problem_of_capacity(self, capacity: int) -> Optional[str]:
        """Return the reason if samples would wait for ever on a table of this size, else None."""
        for name, least in (('min_size_to_sample', self.min_size_to_sample), ('max_sample', self.max_sample)):
            if least > capacity:
                return (
                    f'{name} ({least}) must be at most the size of the buffer ({capacity}): samples '
                    f'would wait for ever. Make it smaller, or the buffer larger.'
                )
        return None

    def check_sampler(self, sampler: Sampler) -> None:
        """
        Raises:
            - ConfigError: The sampler returns a row fewer than ``samples_per_insert`` times.
        """
        times = sampler.max_times
        if self.samples_per_insert is not None and times is not None and self.samples_per_insert > times:
            raise ConfigError(
                f'samples_per_insert ({self.samples_per_insert:g}) must be at most {times}: the sampler returns each '
                f'row at most {times} times, so both sides would wait for ever. Lower it, or raise the limit of uses.'
            )

    def keep(self, record: CommitRecord, next_row: Callable[[], int]) -> None:
        """
        Overview:
            Restore the recorded counts, and record them from now on. Inserts are recorded as row numbers, because rows
            and their count are then one commit. Row numbers that a failed push used up count in the next process.
        Arguments:
            - next_row (:obj:`Callable`): Returns the number of the next row.
        """
        with self._changed:
            self._record, self._next_row = record, next_row
            found = record.value
            if found is not None:
                try:
                    self.num_inserts = next_row() - int(found['first_row'])
                    self.num_samples = int(found['num_samples'])
                except (KeyError, TypeError, ValueError, OverflowError) as e:
                    raise record.damaged(e) from e
            self._count_on()

    def begin_anew(self) -> None:
        """Reset the counts to the start of sampling, with the rows that the table has now."""
        with self._changed:
            self._reset()
            self._begin_counting()
            self._changed.notify_all()

    def await_can_insert(self, num_rows: int = 1, timeout_s: Optional[float] = None) -> None:
        """
        Overview:
            Wait until so many rows may be inserted, and count them.
        Raises:
            - StoreTimeout: The wait took too long. Nothing was counted.
            - TypeError: ``num_rows`` exceeds ``max_insert``, so the wait might never end.
        """
        self._count_insert(num_rows, timeout_s, [0])

    def _count_insert(self, num_rows: int, timeout_s: Optional[float], counted: List[int]) -> None:
        """Set ``counted[0]`` to the number that the caller must take back after an error."""
        _check_within('max_insert', num_rows, self.max_insert)
        with self._changed:
            self._wait(lambda: self._can_insert(num_rows), f'insert {num_rows} rows', timeout_s)
            self.num_inserts += num_rows
            counted[0] = num_rows
            self._changed.notify_all()

    def await_can_sample(self, num_rows: int = 1, timeout_s: Optional[float] = None) -> None:
        """
        Overview:
            Wait until so many rows may be sampled, and count them.
        Raises:
            - StoreTimeout: The wait took too long. Nothing was counted.
            - TypeError: ``num_rows`` exceeds ``max_sample``, so the wait might never end.
        """
        self._count_sample(num_rows, timeout_s, [0])

    def _count_sample(self, num_rows: int, timeout_s: Optional[float], counted: List[int]) -> None:
        _check_within('max_sample', num_rows, self.max_sample)
        with self._changed:
            self._wait(lambda: self._can_sample(num_rows), f'sample {num_rows} rows', timeout_s)
            self.num_samples += num_rows
            counted[0] = num_rows
            self._put_on_record()
            self._changed.notify_all()

    @contextmanager
    def inserting(self, num_rows: int) -> Iterator[None]:
        """Surround an insert. If it fails, it is not counted. If it succeeds, waiting threads are woken."""
        counted = [0]
        try:
            self._count_insert(num_rows, None, counted)
            yield
        except BaseException:
            self._take_back(num_inserts=counted[0])
            raise
        self.wake()

    @contextmanager
    def sampling(self, num_rows: int) -> Iterator[None]:
        """Surround a sample. If it fails, it is not counted. If it lacks rows, the next insert does not wait."""
        counted = [0]
        try:
            self._count_sample(num_rows, None, counted)
            yield
        except BaseException as e:
            self._take_back(num_samples=counted[0], is_short=isinstance(e, NotEnoughData))
            raise
        with self._changed:
            self._short_at = None
        self.wake()  # Limits may have deleted rows.

    def wake(self) -> None:
        """Wake all waiting threads, after the number of rows has changed."""
        with self._changed:
            self._changed.notify_all()

    def state(self) -> Dict[str, int]:
        """Return the counts, to continue with the same rows later."""
        with self._changed:
            return {'num_inserts': self.num_inserts, 'num_samples': self.num_samples}

    def load_state(self, state: Mapping[str, int]) -> None:
        """
        Overview:
            Restore a ``state``. Counts that do not fit the table's rows or these settings begin anew. Otherwise rows
            that came uncounted, or another ratio, could make samples or inserts wait for ever.
        """
        counts = {name: state.get(name) for name in ('num_inserts', 'num_samples')}
        num_inserts, num_samples = (integer(name, value, 0, TypeError) for name, value in counts.items())
        with self._changed:
            self.num_inserts, self.num_samples = num_inserts, num_samples
            self._short_at = None
            self._count_on()
            self._changed.notify_all()

    def __deepcopy__(self, memo: Dict[int, Any]) -> RateLimiter:
        """Return a limiter with the same settings and counts, without a table."""
        twin = type(self)(
            self.min_size_to_sample,
            self.samples_per_insert,
            self.error_buffer,
            self.max_insert,
            self.max_sample,
            self.timeout_s,
        )
        memo[id(self)] = twin
        twin.load_state(self.state())
        return twin

    def _check_deadlock(self) -> None:
        if self.samples_per_insert is None:
            return
        # The largest insert waits while the difference exceeds ``above``, the largest sample while it is less than
        # ``below``. Between the two both would wait. Reverb's condition, for steps of one, is stricter. With a whole
        # ratio the difference is whole.
        above = self.error_buffer - self.max_insert * self.samples_per_insert
        below = self.max_sample - self.error_buffer
        is_whole = float(self.samples_per_insert).is_integer() and math.isfinite(above)
        # Before the table has the minimal size and the rows of a batch, no insert waits.
        if math.floor(above) + 1 < below if is_whole else above + _ROUNDING < below:
            least = (self.max_insert * self.samples_per_insert + self.max_sample) / 2
            raise ConfigError(
                f'error_buffer ({self.error_buffer:g}) must be at least {least:g} with '
                f'samples_per_insert={self.samples_per_insert:g}, min_size_to_sample={self.min_size_to_sample}, '
                f'max_insert={self.max_insert} and max_sample={self.max_sample}: '
                'inserts and samples could wait for each other for ever'
            )

    def _difference(self) -> float:
        assert self.samples_per_insert is not None
        return (self.num_inserts - self.min_size_to_sample) * self.samples_per_insert - self.num_samples

    def _can_insert(self, num_rows: int) -> bool:
        if self.samples_per_insert is None or self.num_inserts + num_rows <= self.min_size_to_sample:
            return True
        if self._difference() + num_rows * self.samples_per_insert <= self.error_buffer + _ROUNDING:
            return True
        if self._short_at == self.num_inserts:
            return True
        # Rows left through limits, deletes, or without being sampled: no batch is possible before more rows come.
        return self._size() < self.min_size_to_sample or self._num_left() < self.max_sample

    def _num_left(self) -> int:
        num_left = None if self._sampler is None else self._sampler.num_left()
        return self._size() if num_left is None else num_left

    def _can_sample(self, num_rows: int) -> bool:
        if self._size() < self.min_size_to_sample:
            return False
        return self.samples_per_insert is None or self._difference() - num_rows >= -self.error_buffer - _ROUNDING

    def _wait(self, is_allowed: Callable[[], bool], what: str, timeout_s: Optional[float]) -> None:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not is_allowed():
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeout(
                    f'the rate limiter did not let a call {what} within {timeout_s:g} s: {self}. '
                    'Check that samples and inserts go on, or raise timeout_s.'
                )
            self._changed.wait(left)

    def _count_on(self) -> None:
        """Continue with these counts, or reset them if no sequence of inserts and samples leads to them."""
        if not self._is_possible():
            self._reset()
        self._begin_counting()

    def _is_possible(self) -> bool:
        if self.samples_per_insert is None:
            return True  # Nothing waits for a count.
        size = self._size()
        if self.num_inserts < size:
            return False  # Rows came uncounted: from a file, or before there was a limiter.
        if size < self.min_size_to_sample:
            return True
        most = (max(0, self.max_sample - self.min_size_to_sample) + self.max_insert - 1) * self.samples_per_insert
        return -self.error_buffer - _ROUNDING <= self._difference() <= max(self.error_buffer, most) + _ROUNDING

    def _reset(self) -> None:
        """Set the difference to 0, or to its value before there are enough rows to sample."""
        self.num_inserts, self._short_at = self._size(), None
        num_beyond = max(0, self.num_inserts - self.min_size_to_sample)
        self.num_samples = round(num_beyond * (self.samples_per_insert or 0))

    def _begin_counting(self) -> None:
        """Count inserts from this row number on."""
        self._first_row = self._next_row() - self.num_inserts
        self._put_on_record()

    def _put_on_record(self) -> None:
        if self._record is not None:
            self._record.put({'first_row': self._first_row, 'num_samples': self.num_samples})

    def _take_back(self, num_inserts: int = 0, num_samples: int = 0, is_short: bool = False) -> None:
        with self._changed:
            self.num_inserts -= num_inserts
            self.num_samples -= num_samples
            if is_short:
                self._short_at = self.num_inserts
            self._put_on_record()
            self._changed.notify_all()

    def __repr__(self) -> str:
        return (
            f'RateLimiter({self._size()} rows of at least {self.min_size_to_sample}, {self.num_inserts} inserts, '
            f'{self.num_samples} samples, {self.samples_per_insert} per insert, tolerance {self.error_buffer:g})'
        )


def _check_within(name: str, num_rows: int, limit: int) -> None:
    # Not a ConfigError, which is a ValueError: DI-engine's fetcher takes a ValueError for a lack of data.
    if num_rows > limit:
        raise TypeError(
            f'{num_rows} rows at once are more than {name} ({limit}). Create the limiter with {name}={num_rows}.'
        )
