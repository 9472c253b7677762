"""Importance weights of several learners are those of all their rows together."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip('ding')

import torch  # noqa: E402
from easydict import EasyDict  # noqa: E402
from ranks import in_ranks  # noqa: E402

from ding_store.buffer import Prioritized, StoreBuffer  # noqa: E402
from ding_store.middleware.replay import data_fetcher  # noqa: E402

pytestmark = pytest.mark.timeout(120)

BETA, EPSILON = 0.5, 1e-9
NUM_BATCHES = 1000
PRIORITIES = [[1.0, 2.0, 3.0, 4.0], [0.5, 8.0, 8.0, 1.5, 2.0]]


def weights(rank):
    sampler = Prioritized(alpha=1.0, beta=BETA, beta_end=BETA, epsilon=EPSILON, seed=rank.rank)
    buffer_ = StoreBuffer(10, sampler=sampler)
    priorities = PRIORITIES[rank.rank]
    for i in range(len(priorities)):
        buffer_.push({'row': torch.tensor(i)})
    buffer_.update_priorities(np.arange(len(priorities)), np.array(priorities))
    policy = dict(priority=True, priority_IS_weight=True, learn=dict(batch_size=8), collect=dict(unroll_len=1))
    fetch = data_fetcher(EasyDict(policy=policy), buffer_, collate='batch')
    ctx = SimpleNamespace(train_data=None, env_step=0, env_episode=0)
    next(fetch(ctx))
    assert rank.agree(ctx, can_train=True)
    return ctx.train_data.row.tolist(), ctx.train_data.priority_IS.tolist()


def draws(rank, num_batches):
    """Return how often each row of this rank was drawn, and the sum of its weights with beta 1."""
    sampler = Prioritized(alpha=0.6, beta=1.0, beta_end=1.0, epsilon=EPSILON, seed=100 + rank.rank)
    buffer_ = StoreBuffer(10, sampler=sampler)
    priorities = PRIORITIES[rank.rank]
    for i in range(len(priorities)):
        buffer_.push({'row': torch.tensor(i)})
    buffer_.update_priorities(np.arange(len(priorities)), np.array(priorities))
    policy = dict(priority=True, priority_IS_weight=True, learn=dict(batch_size=2), collect=dict(unroll_len=1))
    fetch = data_fetcher(EasyDict(policy=policy), buffer_, collate='batch')
    ctx = SimpleNamespace(train_data=None, env_step=0, env_episode=0)
    counts, sums = np.zeros(len(priorities)), np.zeros(len(priorities))
    for _ in range(num_batches):
        next(fetch(ctx))
        assert rank.agree(ctx, can_train=True)
        np.add.at(counts, ctx.train_data.row.numpy(), 1)
        np.add.at(sums, ctx.train_data.row.numpy(), ctx.train_data.priority_IS.double().numpy())
    return counts.tolist(), sums.tolist()


def chi_square(counts, shares):
    expected = np.array(shares) * np.sum(counts)
    return float(((np.array(counts) - expected) ** 2 / expected).sum())


def test_draws_of_all_ranks_pass_a_chi_square_test():
    """Each rank draws half of a batch by the priorities of its rows. The weights make all rows count alike."""
    found = in_ranks(2, draws, NUM_BATCHES)
    masses = [np.array(several) ** 0.6 for several in PRIORITIES]
    shares = np.concatenate([each / each.sum() / 2 for each in masses])
    counts = np.concatenate([each for each, _ in found])
    assert counts.sum() == 2 * NUM_BATCHES
    assert chi_square(counts, shares) < 26.1  # 8 degrees of freedom, p = 0.001
    weighted = np.concatenate([each for _, each in found])
    # A row's sum has the deviation sqrt(count) of its count, so 4 deviations of the rarest row are this share.
    assert np.abs(weighted / weighted.mean() - 1).max() < 4 / np.sqrt(counts.min())


def test_importance_weights_are_those_of_all_rows():
    shares = [np.array(several) / sum(several) for several in PRIORITIES]
    smallest = min(each.min() for each in shares)
    for own, (rows, found) in zip(shares, in_ranks(2, weights)):
        assert len(rows) == 4
        assert np.allclose(found, (smallest / own[rows]) ** BETA, rtol=1e-5)
