"""Two learners with half of each batch make the updates of one learner with the whole batch, for each algorithm."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip('ding')

from algorithms import ALGORITHMS, B, batch, parameters, use_doubles, use_row_noise  # noqa: E402
from ranks import in_ranks  # noqa: E402

from ding_store.checkpoint.snapshot import optimizers_of  # noqa: E402

pytestmark = pytest.mark.timeout(120)

#: Number of different batches. They are used in turn.
NUM_BATCHES = 5


def train(rank, name, num_updates, is_double):
    """Return the gradients of the first optimizer step, and the parameters at the end."""
    if is_double:
        use_doubles()
    torch.manual_seed(5)
    np.random.seed(5)
    use_row_noise(rank.rank, rank.num)
    policy = ALGORITHMS[name][0]()
    if rank.rank:
        with torch.no_grad():  # rank 0's parameters count
            for each in policy._model.parameters():
                each.add_(1.0)
    gradients, own = [], B // rank.num
    watch_first_step(policy, gradients)
    ctx = SimpleNamespace(env_step=0, env_episode=0)
    mine = range(rank.rank * own, (rank.rank + 1) * own)
    batches = [batch(name, number, mine) for number in range(min(num_updates, NUM_BATCHES))]
    for number in range(num_updates):
        assert rank.agree(ctx, can_train=True)
        policy.learn_mode.forward(copy.deepcopy(batches[number % NUM_BATCHES]))
    return gradients[0], parameters(policy)


def watch_first_step(policy, gradients):
    """Keep the gradients with which the first optimizer steps."""

    def keep(optimizer, *_):
        if not gradients:
            several = [each for group in optimizer.param_groups for each in group['params'] if each.grad is not None]
            gradients.append(torch.cat([each.grad.reshape(-1) for each in several]).double().cpu().numpy().copy())

    for each in optimizers_of(policy):
        each.register_step_pre_hook(keep)


@pytest.mark.parametrize('name', sorted(ALGORITHMS))
def test_two_ranks_have_the_gradients_of_one_learner(name):
    ((expected, _),) = in_ranks(1, train, name, 1, False)
    for gradients, _ in in_ranks(2, train, name, 1, False):
        assert np.abs(gradients - expected).max() <= 1e-6 * max(1.0, np.abs(expected).max())
        assert np.abs(expected).max() > 0


@pytest.mark.parametrize('num_updates', [10, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize('name', sorted(ALGORITHMS))
def test_two_ranks_have_the_parameters_of_one_learner(name, num_updates):
    ((_, expected),) = in_ranks(1, train, name, num_updates, True)
    (_, first), (_, second) = in_ranks(2, train, name, num_updates, True)
    assert (first == second).all()
    assert np.abs(first - expected).max() <= 1e-8
