"""Policies saved on a GPU go on on a CPU, and the other way round: with the losses of those that were saved."""

import copy
from typing import Any, List

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from ding.policy import DQNPolicy, PPOPolicy, SACPolicy
from ding.utils import set_pkg_seed
from easydict import EasyDict

from ding_store.checkpoint import Saver, read_state, write_state
from ding_store.checkpoint.snapshot import optimizers_of
from ding_store.middleware.policies import Policies

HEADS = dict(actor_head_hidden_size=16, critic_head_hidden_size=16)
ENCODER = dict(obs_shape=4, action_shape=2, encoder_hidden_size_list=[16, 16])
SAC_MODEL = dict(obs_shape=4, action_shape=2, action_space='reparameterization', **HEADS)
PPO_LEARN = dict(batch_size=8, value_norm=True, epoch_per_collect=1, ignore_done=False)
CASES = {
    'dqn': (DQNPolicy, dict(nstep=1, model=ENCODER)),
    'sac': (SACPolicy, dict(model=SAC_MODEL, learn=dict(auto_alpha=True))),
    'ppo': (
        PPOPolicy,
        dict(on_policy=True, action_space='discrete', model=dict(ENCODER, **HEADS), learn=PPO_LEARN),
    ),
}


def policy_of(name: str, cuda: bool) -> Any:
    kind, settings = CASES[name]
    config = EasyDict(copy.deepcopy(kind.default_config()))
    for key, value in dict(settings, cuda=cuda).items():
        if isinstance(value, dict) and key in config:
            config[key].update(value)
        else:
            config[key] = value
    if name == 'ppo':
        config.model.action_space = 'discrete'
    set_pkg_seed(0, use_cuda=False)
    return kind(config, enable_field=['learn'])


def batch_of(name: str, number: int) -> ttorch.Tensor:
    generator = torch.Generator().manual_seed(number)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made = dict(obs=draw(8, 4), next_obs=draw(8, 4), reward=draw(8, 1), done=torch.zeros(8))
    made['action'] = draw(8, 2).tanh() if name == 'sac' else torch.arange(8) % 2
    if name != 'dqn':
        made['reward'] = draw(8)
    if name == 'ppo':
        made.update(logit=draw(8, 2), value=draw(8), adv=draw(8), traj_flag=torch.zeros(8), done=torch.zeros(8) > 0)
    return ttorch.as_tensor(made)


def train(policy: Any, name: str, numbers: Any) -> List[float]:
    losses = []
    for number in numbers:
        torch.manual_seed(number)
        np.random.seed(number)
        batch = batch_of(name, number)
        if name == 'ppo':
            output = policy.learn_mode.forward(batch.cuda() if policy._cuda else batch)[-1]
        else:
            elements = [ttorch.as_tensor({key: value[i] for key, value in batch.items()}) for i in range(8)]
            output = policy.learn_mode.forward(elements)
        losses.append(float(torch.as_tensor(output['total_loss']).detach()))
    return losses


@pytest.mark.parametrize('target', ['cpu', 'cuda'])
@pytest.mark.parametrize('source', ['cpu', 'cuda'])
@pytest.mark.parametrize('name', CASES)
def test_resumed_policy_has_the_same_losses_on_any_device(name: str, source: str, target: str, tmp_path: Any) -> None:
    policy, path = policy_of(name, source == 'cuda'), str(tmp_path / 'state.pth.tar')
    train(policy, name, range(3))
    assert next(policy._model.parameters()).device.type == source
    policies = Policies()
    policies.add(policy)
    saver = Saver(optimizers_of(policy))
    assert saver.save(policies.state(), lambda state: write_state(path, state))
    expected = train(policy, name, range(5, 9))  # at once: the saver waits for no step
    saver.drain()
    assert saver.is_saved
    other, resumed = policy_of(name, target == 'cuda'), Policies()
    resumed.load(path, read_state(path), True)
    resumed.add(other)
    resumed.check_complete()
    np.testing.assert_allclose(train(other, name, range(5, 9)), expected, rtol=1e-3, atol=1e-5)
    states = [each for optimizer in optimizers_of(other) for each in optimizer.state.values()]
    moments = [value for state in states for key, value in state.items() if key != 'step']
    assert {moment.device.type for moment in moments} == {target}
