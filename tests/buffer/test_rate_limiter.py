"""RateLimiter: who waits for whom, deadlines, and that two sides never wait for each other."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ding_store.buffer import StoreBuffer
from ding_store.buffer.rate_limiter import RateLimiter
from ding_store.errors import ConfigError, SchemaMismatch, StoreTimeout


def test_no_sample_before_the_minimal_size() -> None:
    limiter = RateLimiter(3, timeout_s=0)
    limiter.await_can_insert()
    limiter.await_can_insert()
    with pytest.raises(StoreTimeout, match='2 rows of at least 3'):
        limiter.await_can_sample()
    limiter.await_can_insert()
    limiter.await_can_sample()
    assert limiter.state() == {'num_inserts': 3, 'num_samples': 1}


def test_the_ratio_holds_within_the_tolerance() -> None:
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
        dict(min_size_to_sample=1, max_sample=0),
        dict(min_size_to_sample=1, timeout_s=-1),
        dict(min_size_to_sample=1, samples_per_insert=4, error_buffer=float('nan')),
    ],
)
def test_bad_settings(arguments: dict) -> None:
    with pytest.raises(ConfigError):
        RateLimiter(**arguments)


def test_what_can_deadlock_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match=r'error_buffer \(40\) must be at least 64 .*=4, max_insert=16 and .*=64'):
        RateLimiter(100, samples_per_insert=4, error_buffer=40, max_insert=16, max_sample=64)
    RateLimiter(100, samples_per_insert=4, error_buffer=64, max_insert=16, max_sample=64)
    with pytest.raises(ConfigError, match=r'min_size_to_sample \(100\) must be at most the size of the buffer \(50\)'):
        StoreBuffer(50, limiter=RateLimiter(100))
    with pytest.raises(TypeError, match='65 rows at once are more than max_sample'):
        RateLimiter(1, max_sample=64).await_can_sample(65)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_one_side_can_always_go_on(data: Any) -> None:
    ratio = data.draw(st.sampled_from([0.1, 0.5, 1.0, 3.0, 8.0]))
    max_insert, max_sample = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    least = max(max_insert * ratio, float(max_sample))
    size = data.draw(st.integers(1, 20))
    limiter = RateLimiter(size, ratio, least, max_insert, max_sample, timeout_s=0)
    for _ in range(60):
        num_inserts, num_samples = data.draw(st.integers(1, max_insert)), data.draw(st.integers(1, max_sample))
        gone_on = 0
        for wait, count in ((limiter.await_can_insert, num_inserts), (limiter.await_can_sample, num_samples)):
            try:
                wait(count)
                gone_on += 1
            except StoreTimeout:
                pass
        assert gone_on
        if limiter.num_inserts > size:
            difference = (limiter.num_inserts - size) * ratio - limiter.num_samples
            assert abs(difference) <= least + 1e-9


def test_two_threads_keep_to_the_ratio() -> None:
    limiter = RateLimiter(20, samples_per_insert=2, error_buffer=20, max_sample=8, timeout_s=30)
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
    thread.join(30)
    assert not thread.is_alive()
    assert not errors
    # Only one count may have moved between the sample and the look at the counts.
    assert min(differences) >= -20
    assert max(differences) <= 20
    assert limiter.state() == {'num_inserts': 400, 'num_samples': 97 * 8}


def test_a_waiting_sample_is_woken() -> None:
    limiter = RateLimiter(2, timeout_s=30)
    buffer = StoreBuffer(10, limiter=limiter)
    buffer.push({'x': torch.zeros(1)})
    got = []
    thread = threading.Thread(target=lambda: got.append(buffer.sample_batch(1)))
    thread.start()
    buffer.push({'x': torch.ones(1)})
    thread.join(30)
    assert len(got) == 1


def test_what_fails_is_not_counted() -> None:
    buffer = StoreBuffer(10, limiter=RateLimiter(1, max_insert=5, max_sample=9, timeout_s=0))
    buffer.extend_elements([{'x': torch.zeros(2)}] * 4)
    with pytest.raises(SchemaMismatch):
        buffer.push({'x': torch.zeros(3)})
    with pytest.raises(ValueError, match='There are less than 9'):
        buffer.sample(9)
    buffer.extend({'x': np.zeros((5, 2), np.float32)})
    assert len(buffer.sample(3)) == 3
    assert buffer.limiter.state() == {'num_inserts': 9, 'num_samples': 3}


def test_counts_go_on() -> None:
    limiter = RateLimiter(1, timeout_s=0)
    limiter.load_state({'num_inserts': 5, 'num_samples': 2})
    limiter.await_can_sample()
    assert limiter.state() == {'num_inserts': 5, 'num_samples': 3}
    with pytest.raises(ConfigError, match='num_samples'):
        limiter.load_state({'num_inserts': 5, 'num_samples': -1})
