"""n-step returns of rewards that are of no dimension, or no tensors."""

import pytest

torch = pytest.importorskip('torch')
pytest.importorskip('ding')

from ding_store.errors import ConfigError  # noqa: E402
from ding_store.middleware.trajectories import add_returns  # noqa: E402


def steps(rewards):
    done = torch.tensor(False)
    return [{'reward': reward, 'done': done, 'next_obs': torch.zeros(2)} for reward in rewards]


def test_nstep_returns_of_scalar_rewards_equal_vector_ones() -> None:
    scalars = steps(torch.tensor(float(i)) for i in range(4))
    ones = steps(torch.tensor([float(i)]) for i in range(4))
    for episode in (scalars, ones):
        add_returns(episode, 3, 0.9)
    for scalar, one in zip(scalars, ones):
        assert torch.equal(scalar['reward'], one['reward'])
    assert scalars[0]['reward'].tolist() == [0.0, 1.0, 2.0]


def test_nstep_returns_of_rewards_not_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match='a reward is a float'):
        add_returns(steps([1.0, 2.0]), 2, 0.9)
