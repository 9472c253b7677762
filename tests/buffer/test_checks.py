"""Integers may be numpy's or a tensor's, as they come out of configs and shapes; nothing else passes for one."""

import numpy as np
import pytest
import torch

from ding_store.buffer import Fifo, RateLimiter, StoreBuffer, Uniform, limited


def filled(every=6, **options):
    """Episodes of so many steps."""
    buffer = StoreBuffer(10, **options)
    groups, steps = np.zeros((6, 1), np.int64), np.arange(6).reshape(6, 1)
    buffer.extend(
        {'x': np.arange(12, dtype=np.float32).reshape(6, 2), 'env': groups, 'done': steps % every == every - 1}
    )
    return buffer


def grouped():
    buffer = StoreBuffer(10)
    for step in range(3):
        buffer.push({'x': torch.ones(2)}, meta={'g': step // 3})
    return buffer


TAKES = {
    'capacity': lambda n: len(StoreBuffer(n).table.index.row_of_slot),
    'resize': lambda n: filled().resize(n),
    'sample': lambda n: len(filled().sample(n)),
    'batch': lambda n: len(filled().sample_batch(n).rows),
    'length': lambda n: filled().sample_sequences(2, n, groupby='env').rows.shape,
    'burn in': lambda n: filled().sample_sequences(2, 1, groupby='env', burn_in=n).rows.shape,
    'overlap': lambda n: filled().sample_sequences(1, 3, groupby='env', overlap=n).rows.shape,
    'longest': lambda n: len(filled(every=2).sample_episodes(1, groupby='env', max_length=n).lengths),
    'uses': lambda n: filled(sampler=limited(Uniform(), max_times_sampled=n)).sample_batch(2).rows.shape,
    'age': lambda n: limited(Uniform(), max_age=n).max_age,
    'times': lambda n: Fifo(n).max_times,
    'prefetch': lambda n: filled(prefetch=n).sample_batch(2).rows.shape,
    'least': lambda n: RateLimiter(n).min_size_to_sample,
    'unrolled': lambda n: [len(steps) for steps in grouped().sample(1, groupby='g', unroll_len=n)],
    'at once': lambda n: RateLimiter(1, max_insert=n, max_sample=n).max_insert,
}


@pytest.mark.parametrize('number', [np.int64(2), np.uint8(2), torch.tensor(2), np.array(2)])
@pytest.mark.parametrize('name', TAKES)
def test_integers_of_any_type_are_accepted(name, number):
    found, expected = TAKES[name](number), TAKES[name](2)
    assert found == expected
    assert type(found) is type(expected)


NO_INTEGERS = [2.0, True, np.bool_(True), '2', -1, np.array([2]), np.array([2, 3]), torch.tensor(2.0)]
NO_INTEGERS += [np.array(True), torch.tensor(True), torch.tensor([2])]


@pytest.mark.parametrize('number', NO_INTEGERS)
@pytest.mark.parametrize('name', TAKES)
def test_non_integer_is_refused_by_name(name, number):
    with pytest.raises((TypeError, ValueError), match=r'\w+ \(.*\) must be an integer >= [01]'):
        TAKES[name](number)


@pytest.mark.parametrize('number', [False, 0.0, torch.tensor(False)])
def test_non_integer_zero_is_refused_by_name(number):
    with pytest.raises(TypeError, match='size'):
        filled().sample(number, indices=['0'])
    with pytest.raises(TypeError, match='unroll_len'):
        grouped().sample(1, groupby='g', unroll_len=number)
