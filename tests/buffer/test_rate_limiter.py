"""RateLimiter: who waits for whom, deadlines, and that two sides never wait for each other."""

import contextlib
import threading
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from ding.data.buffer import DequeBuffer
from examples import MORE
from hypothesis import given, settings
from hypothesis import strategies as st

from ding_store.buffer import Fifo, Fresh, Lifo, MaxHeap, Prioritized, Shuffled, StoreBuffer, Uniform, limited
from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.errors import ConfigError, NotEnoughData, SchemaMismatch, StoreTimeout


def test_sample_before_the_minimal_size_times_out() -> None:
    limiter = RateLimiter(3, timeout_s=0)
    limiter.await_can_insert()
    limiter.await_can_insert()
    with pytest.raises(StoreTimeout, match='2 rows of at least 3'):
        limiter.await_can_sample()
    limiter.await_can_insert()
    limiter.await_can_sample()
    assert limiter.state() == {'num_inserts': 3, 'num_samples': 1}


def test_ratio_holds_within_the_tolerance() -> None:
    limiter = RateLimiter(10, samples_per_insert=2, error_buffer=8, max_sample=4, timeout_s=0)
    for _ in range(14):
        limiter.await_can_insert()
    with pytest.raises(StoreTimeout, match='insert 1 rows'):
        limiter.await_can_insert()
    for _ in range(4):
        limiter.await_can_sample(4)
    with pytest.raises(StoreTimeout, match='sample 4 rows'):
        limiter.await_can_sample(4)
    limiter.await_can_insert()


@pytest.mark.parametrize(
    'arguments',
    [
        dict(min_size_to_sample=0),
        dict(min_size_to_sample=1, samples_per_insert=0),
        dict(min_size_to_sample=1, samples_per_insert=-1.0),
        dict(min_size_to_sample=1, samples_per_insert=float('nan')),
        dict(min_size_to_sample=1, samples_per_insert=float('inf')),
        dict(min_size_to_sample=1, samples_per_insert='2'),
        dict(min_size_to_sample=1, samples_per_insert=4, error_buffer='9'),
        dict(min_size_to_sample=1, timeout_s=None),
        dict(min_size_to_sample=1, max_sample=0),
        dict(min_size_to_sample=1, timeout_s=-1),
        dict(min_size_to_sample=1, samples_per_insert=4, error_buffer=float('nan')),
    ],
)
def test_limiter_invalid_settings_are_refused(arguments: dict) -> None:
    with pytest.raises(ConfigError):
        RateLimiter(**arguments)


def test_limiter_that_can_deadlock_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r'error_buffer \(40\) must be at least 64 .*=4, .*_insert=16 and .*=64'):
        RateLimiter(100, samples_per_insert=4, error_buffer=40, max_insert=16, max_sample=64)
    RateLimiter(100, samples_per_insert=4, error_buffer=64, max_insert=16, max_sample=64)
    with pytest.raises(ConfigError, match=r'min_size_to_sample \(100\) must be at most the size of the buffer \(50\)'):
        StoreBuffer(50, limiter=RateLimiter(100))
    with pytest.raises(ConfigError, match=r'max_sample \(64\) must be at most the size of the buffer \(50\)'):
        StoreBuffer(50, limiter=RateLimiter(1, max_sample=64))
    for sampler in (Fifo(), limited(Uniform(), max_times_sampled=1), limited(Fifo(times=2), max_times_sampled=1)):
        with pytest.raises(ConfigError, match=r'samples_per_insert \(2\) must be at most 1'):
            StoreBuffer(50, sampler=sampler, limiter=RateLimiter(8, 2, 16, max_sample=8))
    buffer = StoreBuffer(100, limiter=RateLimiter(50, 2, 20))
    with pytest.raises(ConfigError, match='samples_per_insert'):
        buffer.view(Fifo())
    buffer.view(Fifo(times=2))
    for size in (10, 0):
        with pytest.raises(TypeError, match=r'min_size_to_sample \(50\) must be at most|size \(0\)') as raised:
            buffer.resize(size)
        assert not isinstance(raised.value, ValueError)
    assert buffer.size == 100
    with pytest.raises(TypeError, match='65 rows at once are more than max_sample'):
        RateLimiter(1, max_sample=64).await_can_sample(65)


def can_deadlock(least: int, ratio: float, error: int, max_insert: int, batch: int, times: Optional[int]) -> bool:
    """
    Whether the largest insert and the largest batch can wait for each other, by looking at all states: rows inserted
    and rows sampled; of a queue that gives each row once what was sampled cannot come again. Inserts never wait where
    there is no batch.
    """
    seen, left = set(), [(0, 0)]
    while left:
        state = inserts, samples = left.pop()
        if state in seen or inserts > least + batch + 2 * max_insert + 12:
            continue
        seen.add(state)
        difference = (inserts - least) * ratio - samples
        available = inserts if times is None else inserts - samples
        moves = [
            (inserts + count, samples)
            for count in range(1, max_insert + 1)
            if inserts < least or available < batch or difference + count * ratio <= error
        ]
        is_stuck = (inserts + max_insert, samples) not in moves
        for count in range(1, batch + 1):
            if inserts >= least and difference - count >= -error and available >= count:
                moves.append((inserts, samples + count))
        if is_stuck and (inserts, samples + batch) not in moves:
            return True
        left += moves
    return False


@settings(max_examples=100 * MORE, deadline=None)
@given(
    least=st.integers(1, 8),
    ratio=st.integers(1, 4),
    error=st.integers(1, 40),
    max_insert=st.integers(1, 4),
    batch=st.integers(1, 10),
    is_queue=st.booleans(),
)
def test_limiter_is_refused_exactly_if_it_can_deadlock(
    least: int, ratio: int, error: int, max_insert: int, batch: int, is_queue: bool
) -> None:
    refused = False
    try:
        limiter = RateLimiter(least, ratio, error, max_insert, batch)
        StoreBuffer(100, sampler=Fifo() if is_queue else None, limiter=limiter)
    except ConfigError:
        refused = True
    stuck = can_deadlock(least, ratio, error, max_insert, batch, 1 if is_queue else None)
    # What the limiter alone refuses it does whatever the sampler is.
    assert refused == stuck or (is_queue and refused)


@settings(max_examples=70 * MORE, deadline=None)
@given(
    least=st.integers(1, 8),
    quarters=st.integers(1, 12),
    error=st.integers(1, 16),
    max_insert=st.integers(1, 4),
    batch=st.integers(1, 10),
)
def test_limiter_fractional_ratio_that_deadlocks_is_refused(
    least: int, quarters: int, error: int, max_insert: int, batch: int
) -> None:
    try:
        RateLimiter(least, quarters / 4, error, max_insert, batch)
    except ConfigError:
        return
    assert not can_deadlock(least, quarters / 4, error, max_insert, batch, None)


def test_minimal_size_below_the_batch_keeps_the_ratio() -> None:
    buffer = StoreBuffer(100, limiter=RateLimiter(1, 8, error_buffer=64, max_sample=64, timeout_s=0))
    for i in range(64):
        buffer.push({'x': torch.tensor([float(i)])})
    for _ in range(7):
        with pytest.raises(StoreTimeout, match='insert 1 rows'):
            buffer.push({'x': torch.zeros(1)})
        buffer.sample_batch(64)
    # (64 - 1) * 8 - 7 * 64 = 56: within the tolerance from here on.
    buffer.push({'x': torch.zeros(1)})
    with pytest.raises(StoreTimeout, match='insert 1 rows'):
        buffer.push({'x': torch.zeros(1)})


def steps(count: int) -> dict:
    """Of four environments in turn, whose episodes are of 8 steps."""
    i = np.arange(count)
    return {'x': i, 'env': i % 4, 'done': i // 4 % 8 == 7}


def of_a_queue(buffer: StoreBuffer) -> Callable[[], Any]:
    queue = buffer.view(Fifo())
    return lambda: queue.sample_batch(8)


@pytest.mark.parametrize(
    'made',
    [
        of_a_queue,
        lambda buffer: lambda: buffer.sample_sequences(8, 20, 'env', done=None),
        lambda buffer: lambda: buffer.sample_episodes(8, 'env'),
        lambda buffer: lambda: buffer.sample(3, groupby='parity', unroll_len=5),
        lambda buffer: lambda: buffer.sample_batch(8, sample_range=slice(0, -20)),
    ],
)
def test_sample_that_finds_too_few_rows_permits_inserts(made: Any) -> None:
    buffer = StoreBuffer(400, seed=0, limiter=RateLimiter(1, 1, 4, max_sample=8, timeout_s=0))
    sample, columns, num_samples = made(buffer), steps(300), 0

    def insert() -> None:
        i = buffer.table.next_row
        buffer.extend({name: values[i : i + 1] for name, values in columns.items()}, meta={'parity': i % 3})

    def insert_all() -> None:
        while buffer.table.next_row < 300:
            insert()

    for _ in range(200):
        with contextlib.suppress(StoreTimeout):
            insert()
        with contextlib.suppress(StoreTimeout, NotEnoughData):
            sample()
            num_samples += 1
    assert num_samples > 5
    # As soon as samples come, inserts wait for them again.
    with pytest.raises(StoreTimeout, match='insert 1 rows'):
        insert_all()


def test_shortage_permits_one_insert() -> None:
    limiter = RateLimiter(2, 1, 4, max_sample=4, timeout_s=0)
    limiter.load_state({'num_inserts': 6, 'num_samples': 0})

    def sample_too_much() -> None:
        with pytest.raises(NotEnoughData), limiter.sampling(4):
            raise NotEnoughData

    def insert() -> None:
        with limiter.inserting(1):
            pass

    sample_too_much()
    with contextlib.suppress(SchemaMismatch), limiter.inserting(1):
        raise SchemaMismatch  # Which inserts nothing, and counts for nothing.
    insert()
    with pytest.raises(StoreTimeout, match='insert 1 rows'):
        insert()
    sample_too_much()
    with limiter.sampling(1):
        pass
    with pytest.raises(StoreTimeout, match='insert 1 rows'):
        insert()


def tolerance(ratio: float, max_insert: int, batch: int) -> float:
    """The least that is accepted."""
    return (max_insert * ratio + batch) / 2


SAMPLERS = {
    'uniform': lambda times: Uniform(0),
    'fifo': lambda times: Fifo(times),
    'fresh': lambda times: Fresh(5, 0),
    'limited shuffled': lambda times: limited(Shuffled(0), max_times_sampled=times),
    'limited heap': lambda times: limited(MaxHeap(), max_times_sampled=times),
    'limited lifo': lambda times: limited(Lifo(), max_times_sampled=times),
    'limited': lambda times: limited(Prioritized(seed=0), max_times_sampled=times),
    'limited fifo': lambda times: limited(Fifo(times), max_times_sampled=times),
    'aged': lambda times: limited(Uniform(0), max_times_sampled=times, max_age=2, version='x'),
}


@settings(max_examples=15 * MORE, deadline=None)
@given(data=st.data())
def test_insert_or_sample_can_always_proceed(data: Any) -> None:
    times = data.draw(st.integers(1, 4))
    sampler = SAMPLERS[data.draw(st.sampled_from(sorted(SAMPLERS)))](times)
    most = sampler.max_times or times
    ratio = data.draw(st.sampled_from([ratio for ratio in (0.1, 0.5, 1.0, 3.0) if ratio <= most]))
    max_insert, batch, least = (data.draw(st.integers(1, 9)) for _ in range(3))
    error = tolerance(ratio, max_insert, batch)
    limiter = RateLimiter(least, ratio, error, max_insert, batch, timeout_s=0)
    # A small buffer: rows leave without being sampled, too.
    buffer = StoreBuffer(max(least, batch) + data.draw(st.integers(0, 20)), sampler=sampler, limiter=limiter)
    for i in range(40):
        if buffer.count() and data.draw(st.integers(0, 9)) == 0:
            buffer.delete([item.index for item in list(buffer)[:: data.draw(st.integers(1, 3))]])
        gone_on = 0
        try:
            buffer.extend({'x': np.full(data.draw(st.integers(1, max_insert)), i)})
            gone_on += 1
        except StoreTimeout:
            pass
        try:
            buffer.sample_batch(batch)
            gone_on += 1
        except (StoreTimeout, NotEnoughData):
            pass
        assert gone_on


@settings(max_examples=50 * MORE, deadline=None)
@given(data=st.data())
def test_ratio_stays_within_the_tolerance_for_any_requests(data: Any) -> None:
    ratio = data.draw(st.sampled_from([0.1, 0.5, 1.0, 3.0, 8.0]))
    max_insert, max_sample, size = (data.draw(st.integers(1, 9)) for _ in range(3))
    error = tolerance(ratio, max_insert, max_sample)
    # With what the first inserts may make it, which do not wait before there is a batch.
    most = max(error, (max(0, max_sample - size) + max_insert - 1) * ratio)
    limiter = RateLimiter(size, ratio, error, max_insert, max_sample, timeout_s=0)
    for _ in range(60):
        for wait, count in ((limiter.await_can_insert, max_insert), (limiter.await_can_sample, max_sample)):
            with contextlib.suppress(StoreTimeout):
                wait(data.draw(st.integers(1, count)))
        if limiter.num_inserts > size:
            difference = (limiter.num_inserts - size) * ratio - limiter.num_samples
            assert -error - 1e-9 <= difference <= most + 1e-9


def test_ratio_holds_between_two_threads() -> None:
    limiter = RateLimiter(20, samples_per_insert=2, error_buffer=20, max_sample=8, timeout_s=60)
    buffer = StoreBuffer(1000, seed=0, limiter=limiter)
    differences, errors = [], []

    def collect() -> None:
        try:
            for i in range(400):
                buffer.push({'x': torch.tensor([float(i)])})
        except BaseException as e:  # noqa: BLE001  raised again below, in the test's own thread
            errors.append(e)

    thread = threading.Thread(target=collect)
    thread.start()
    for _ in range(97):
        assert len(buffer.sample_batch(8).rows) == 8
        state = limiter.state()
        differences.append((state['num_inserts'] - 20) * 2 - state['num_samples'])
    thread.join(60)
    assert not thread.is_alive()
    assert not errors
    # Only one count may have moved between the sample and the look at the counts.
    assert min(differences) >= -20
    assert max(differences) <= 20
    assert limiter.state() == {'num_inserts': 400, 'num_samples': 97 * 8}


def test_waiting_sample_is_woken() -> None:
    limiter = RateLimiter(2, timeout_s=60)
    buffer = StoreBuffer(10, limiter=limiter)
    buffer.push({'x': torch.zeros(1)})
    got = []
    thread = threading.Thread(target=lambda: got.append(buffer.sample_batch(1)))
    thread.start()
    buffer.push({'x': torch.ones(1)})
    thread.join(60)
    assert len(got) == 1


def test_failed_push_or_sample_is_not_counted() -> None:
    buffer = StoreBuffer(10, limiter=RateLimiter(1, max_insert=5, max_sample=9, timeout_s=0))
    buffer.extend_elements([{'x': torch.zeros(2)}] * 4)
    with pytest.raises(SchemaMismatch):
        buffer.push({'x': torch.zeros(3)})
    with pytest.raises(ValueError, match='There are less than 9'):
        buffer.sample(9)
    buffer.extend({'x': np.zeros((5, 2), np.float32)})
    assert len(buffer.sample(3)) == 3
    assert buffer.limiter.state() == {'num_inserts': 9, 'num_samples': 3}


def test_limiter_continues_loaded_counts() -> None:
    limiter = RateLimiter(1, timeout_s=0)
    limiter.load_state({'num_inserts': 5, 'num_samples': 2})
    limiter.await_can_sample()
    assert limiter.state() == {'num_inserts': 5, 'num_samples': 3}
    with pytest.raises(TypeError, match='num_samples'):
        limiter.load_state({'num_inserts': 5, 'num_samples': -1})


def saved_with_a_limiter(directory: Path, num_samples: int = 0) -> str:
    """A buffer of 50 rows, 8 of each sample's; its save."""
    buffer = StoreBuffer(100, limiter=loop_limiter())
    for i in range(50):
        buffer.push({'x': torch.tensor([float(i)])})
        if i >= 10:
            buffer.sample_batch(2)
    for _ in range(num_samples):
        buffer.sample_batch(2)
    buffer.save_data(str(directory / 'saved'))
    return str(directory / 'saved')


def loop_limiter(ratio: float = 2) -> RateLimiter:
    return RateLimiter(10, ratio, error_buffer=10, max_sample=8, timeout_s=0)


def go_on(buffer: StoreBuffer) -> None:
    """A loop of one thread, in which nothing may wait."""
    for i in range(30):
        buffer.push({'x': torch.tensor([float(i)])})
        if buffer.count() > 10:
            buffer.sample_batch(int(buffer.limiter.samples_per_insert))


def test_limiter_restored_buffer_samples_at_once(tmp_path: Path) -> None:
    buffer = StoreBuffer(100, limiter=loop_limiter())
    buffer.load_data(saved_with_a_limiter(tmp_path))
    assert len(buffer.sample_batch(8).rows) == 8
    buffer.push({'x': torch.zeros(1)})
    go_on(buffer)


def test_limiter_restored_counts_are_those_saved(tmp_path: Path) -> None:
    buffer = StoreBuffer(100, limiter=loop_limiter())
    buffer.load_data(saved_with_a_limiter(tmp_path, num_samples=5))
    # The saved buffer had used up its tolerance: the next sample waits for an insert, as there.
    with pytest.raises(StoreTimeout, match='sample 8 rows'):
        buffer.sample_batch(8)
    assert buffer.limiter.state() == {'num_inserts': 50, 'num_samples': 90}


def rows_without_counts(directory: Path) -> dict:
    """Ways for rows to come to a buffer uncounted: it has 50 of them, and a limiter."""

    def filled(**settings: Any) -> StoreBuffer:
        buffer = StoreBuffer(100, **settings)
        buffer.extend_elements([{'x': torch.zeros(1)}] * 50)
        return buffer

    def loaded(kind: Any) -> StoreBuffer:
        other = kind(100)
        for _ in range(50):
            other.push({'x': torch.zeros(1)})
        other.save_data(str(directory / 'other.hkl'))
        buffer = StoreBuffer(100, limiter=loop_limiter())
        buffer.load_data(str(directory / 'other.hkl'))
        return buffer

    def limited_later() -> StoreBuffer:
        buffer = filled()
        buffer.limiter = loop_limiter()
        return buffer

    def reopened(before: Any) -> StoreBuffer:
        path = str(directory / 'path')
        buffer = StoreBuffer(100, path=path, limiter=before)
        buffer.extend_elements([{'x': torch.zeros(1)}] * 9)
        for _ in range(41):
            buffer.push({'x': torch.zeros(1)})
            if before is not None and buffer.count() > 10:
                buffer.sample_batch(int(before.samples_per_insert))
        buffer.close()
        return StoreBuffer(100, path=path, limiter=loop_limiter())

    def shrunk() -> StoreBuffer:
        filled().save_data(str(directory / 'large'))
        buffer = StoreBuffer(20, limiter=loop_limiter())
        buffer.load_data(str(directory / 'large'))
        return buffer

    def kept_later() -> StoreBuffer:
        filled(path=str(directory / 'later')).close()
        buffer = StoreBuffer(100, limiter=loop_limiter())
        buffer.keep_in(str(directory / 'later'))
        return buffer

    return {
        'a save without counts': lambda: loaded(StoreBuffer),
        "DequeBuffer's save": lambda: loaded(DequeBuffer),
        'a limiter that comes later': limited_later,
        'a path without a limiter': lambda: reopened(None),
        'a path with a higher ratio': lambda: reopened(RateLimiter(10, 5, 60, max_insert=9, max_sample=8, timeout_s=0)),
        'a path with a lower ratio': lambda: reopened(RateLimiter(10, 1, 60, max_insert=9, max_sample=8, timeout_s=0)),
        'a longer save': shrunk,
        'a path that is joined later': kept_later,
    }


@pytest.mark.parametrize('way', rows_without_counts(Path()))
def test_limiter_of_rows_without_counts_restarts(way: str, tmp_path: Path) -> None:
    buffer = rows_without_counts(tmp_path)[way]()
    assert len(buffer.sample_batch(8).rows) == 8
    buffer.push({'x': torch.zeros(1)})
    go_on(buffer)
    buffer.close()


def test_limiter_of_a_cleared_buffer_restarts() -> None:
    buffer = StoreBuffer(100, limiter=loop_limiter())
    for _ in range(3):
        go_on(buffer)
        buffer.clear()
        assert buffer.limiter.state() == {'num_inserts': 0, 'num_samples': 0}
