"""A process that samples a buffer with a path, in every way that is put on record, until it is killed."""

import random
from typing import Any, Callable, Iterator, List

import numpy as np
from crashes import Opened, verified
from queues import persistent_queue

from ding_store.buffer import Prioritized, RateLimiter, StoreBuffer, limited

CAPACITY = 120
MAX_CHUNK = 16
BATCH = 8
MAX_USES = 3

#: Words that the worker shares with whoever kills it: what it knows to be done. Beyond them, a word per row each: how
#: often it was sampled, whether its priority was updated, and its first priority.
PUSHED, SAMPLED, QUEUED = range(3)
USES, UPDATED, BEGAN = (k << 17 for k in (1, 2, 3))


def first_priority(rows: Any) -> Any:
    return 1.0 + rows % 97


def later_priority(rows: Any) -> Any:
    return 1000.0 + rows % 89


class Sampled(Opened):
    """A buffer whose sampler has limits and priorities, with a limiter and a queue."""

    def __init__(self, path: str) -> None:
        self.limiter = RateLimiter(1, timeout_s=0, max_insert=MAX_CHUNK, max_sample=BATCH)
        self.prioritized = Prioritized(epsilon=0.0, seed=1)
        self.limits = limited(self.prioritized, max_times_sampled=MAX_USES)
        self.buffer = StoreBuffer(CAPACITY, path=path, sampler=self.limits, limiter=self.limiter)
        self.queue = persistent_queue(self.buffer)


class SamplingWorker(Sampled):
    """Pushes with priorities, samples and updates as fast as it can."""

    def __init__(self, path: str, words: Any, seed: int) -> None:
        super().__init__(path)
        self.words, self.random = words, random.Random(seed)

    def run(self, tell: Callable[[], None]) -> None:
        tell()
        while True:
            # First: workers that are killed before they sample would fill the table, and rows would be evicted.
            while self.buffer.count() > CAPACITY // 2:
                self.sample()
            self.push()
            self.take_from_queue()

    def push(self) -> None:
        first = self.buffer.table.next_row
        rows = np.arange(first, first + self.random.randint(1, MAX_CHUNK))
        # A push without priorities gives its rows the largest one.
        priority = first_priority(rows) if self.random.random() < 0.5 else None
        self.words[BEGAN + rows] = self.prioritized.priorities.max_priority if priority is None else priority
        self.buffer.extend({'row': rows}, priority=priority)
        self.words[PUSHED] = rows[-1] + 1

    def sample(self) -> None:
        rows = self.buffer.sample_batch(BATCH, replace=True).rows
        np.add.at(self.words, USES + rows, 1)
        self.words[SAMPLED] += len(rows)
        self.buffer.update_priorities(rows, later_priority(rows))
        self.words[UPDATED + rows] = 1

    def take_from_queue(self) -> None:
        try:
            rows = self.queue.sample_batch(BATCH // 2).rows
        except ValueError:
            return
        self.words[SAMPLED] += len(rows)
        self.words[QUEUED] = rows[-1] + 1


def verify(path: str, words: Any) -> List[str]:
    """What is wrong with a buffer whose process was killed; what it had no time to say is said for it."""
    return verified(Sampled, path, lambda opened: [*_wrong_counts(opened, words), *_wrong_rows(opened, words)])


def _wrong_counts(opened: Sampled, words: Any) -> Iterator[str]:
    counts, next_row = opened.limiter.state(), opened.buffer.table.next_row
    if not words[PUSHED] <= next_row <= words[PUSHED] + MAX_CHUNK:
        yield f'next row is {next_row}, pushed were {words[PUSHED]}'
    if counts['num_inserts'] != next_row:
        yield f'the limiter counts {counts["num_inserts"]} inserts of {next_row}'
    if not words[SAMPLED] <= counts['num_samples'] <= words[SAMPLED] + BATCH:
        yield f'the limiter counts {counts["num_samples"]} samples of {words[SAMPLED]}'
    words[PUSHED], words[SAMPLED] = next_row, counts['num_samples']


def _wrong_rows(opened: Sampled, words: Any) -> Iterator[str]:
    rows = opened.buffer.table.rows_by_age()
    uses, known = opened.limits.uses_of(rows), words[USES + rows]
    if (uses < known).any() or (uses - known).sum() > BATCH:
        yield f'rows were used {known[uses != known]} times, and count {uses[uses != known]}'
    if (uses >= MAX_USES).any():
        yield f'rows {rows[uses >= MAX_USES]} are used up, and there'
    words[USES + rows] = uses
    # There is room for all: whoever is gone was used up, but for what the last batch had no time to say.
    gone = np.setdiff1d(np.arange(opened.buffer.table.next_row), rows)
    left = MAX_USES - words[USES + gone]
    if left.sum() > BATCH:
        yield f'rows {gone[left > 0]} were used {MAX_USES - left[left > 0]} times, and are gone'
    words[USES + gone] = MAX_USES
    initial, later = words[BEGAN + rows].astype(float), later_priority(rows)
    yield from _wrong_priorities(opened.prioritized.priorities.of(rows), initial, later, words[UPDATED + rows])
    yield from _wrong_queue(opened, words)


def _wrong_priorities(
    found: np.ndarray, initial: np.ndarray, later: np.ndarray, is_updated: np.ndarray
) -> Iterator[str]:
    is_later = np.isclose(found, later)
    wrong = ~(is_later | (np.isclose(found, initial) & (is_updated == 0)))
    if wrong.any():
        yield f'priorities {found[wrong]} were {initial[wrong]}, or {later[wrong]} since {is_updated[wrong]}'
    is_updated[is_later] = 1


def _wrong_queue(opened: Sampled, words: Any) -> Iterator[str]:
    rows = opened.buffer.table.rows_by_age()
    left = rows[rows >= words[QUEUED]]
    if len(left) <= BATCH // 2:
        return
    first = int(opened.queue.sample_batch(1).rows[0])
    words[SAMPLED] += 1
    if not left[0] <= first <= left[BATCH // 2]:
        yield f'the queue goes on at {first}, it should at {left[0]} or {left[BATCH // 2]}'
    words[QUEUED] = first + 1
