"""Elements that DI-engine's own collectors made, through columns and back, and into its own policies."""

import gym
import pytest
import torch
import treetensor.torch as ttorch
from ding.data import DequeBuffer
from ding.envs import BaseEnvManagerV2, DingEnvWrapper
from ding.framework.context import OnlineRLContext
from ding.framework.middleware.functional import inferencer, rolloutor
from ding.framework.middleware.functional.collector import TransitionList
from ding.framework.middleware.functional.enhancer import nstep_reward_enhancer
from ding.model import DQN, DRQN, VAC
from ding.policy import DQNPolicy, PPOPolicy, R2D2Policy
from easydict import EasyDict
from element_helpers import same
from needs import CUDA

from ding_store.columns import Schema


def make_policy(kind, model, **settings):
    config = EasyDict(kind.default_config())
    config.update(cuda=CUDA, **settings)
    config.collect.env_num = 2
    return kind(config, model=model, enable_field=['learn', 'collect'])


def collect(policy, num_steps, **kwargs):
    """A few steps of two CartPole environments: transitions and episodes, as a collector hands them on."""
    manager = EasyDict(BaseEnvManagerV2.default_config())
    env = BaseEnvManagerV2([lambda: DingEnvWrapper(gym.make('CartPole-v0'))] * 2, manager)
    transitions, ctx = TransitionList(2), OnlineRLContext()
    ctx.collect_kwargs = kwargs
    steps = [inferencer(0, policy.collect_mode, env), rolloutor(policy.collect_mode, env, transitions)]
    try:
        for _ in range(num_steps):
            for step in steps:
                step(ctx)
    finally:
        env.close()
    return transitions.to_trajectories()[0], transitions.to_episodes()


@pytest.fixture(scope='module', autouse=True)
def _seed():
    torch.manual_seed(0)


def dqn_policy(nstep=1):
    model = DQN(obs_shape=4, action_shape=2, encoder_hidden_size_list=[8, 8])
    return make_policy(DQNPolicy, model, nstep=nstep, discount_factor=0.9)


def assert_roundtrip(elements):
    schema = Schema.infer(elements)
    columns = schema.encode(elements)
    assert all(map(same, elements, schema.decode(columns)))
    return schema, columns


def test_dqn_transitions_survive_columns():
    trajectories, episodes = collect(dqn_policy(), 40, eps=0.5)
    assert type(trajectories[0]) is ttorch.Tensor
    schema, columns = assert_roundtrip(trajectories)
    assert {'obs', 'next_obs', 'action', 'reward', 'done', 'collect_train_iter', 'env_data_id'} == set(columns)
    assert schema.row_bytes < 100
    assert episodes
    for episode in episodes[:2]:  # the elements of an episode buffer
        assert_roundtrip([episode])
    results = [dqn_policy().learn_mode.forward(batch) for batch in (trajectories[:1],)]
    assert results[0]['total_loss'] >= 0


@pytest.mark.parametrize('nstep', [1, 3])
def test_dqn_learns_the_same_from_a_decoded_batch(nstep):
    trajectories, _ = collect(dqn_policy(), 20, eps=0.5)
    ctx = OnlineRLContext()
    ctx.trajectories = trajectories
    if nstep > 1:
        enhance = nstep_reward_enhancer(EasyDict(policy={'nstep': nstep, 'discount_factor': 0.9}))
        ctx.trajectory_end_idx = [19, 39]
        enhance(ctx)
    elements = ctx.trajectories[:32]
    schema, columns = assert_roundtrip(elements)
    losses = []
    for batch in (elements, schema.decode(columns), schema.decode_batch(columns)):
        torch.manual_seed(1)
        policy = dqn_policy(nstep).learn_mode
        losses.append([policy.forward(batch)['total_loss'] for _ in range(3)])
    assert losses[0] == losses[1] == losses[2]


def test_ppo_transitions_survive_columns():
    sizes = {'actor_head_hidden_size': 8, 'critic_head_hidden_size': 8, 'encoder_hidden_size_list': [8, 8]}
    model = VAC(obs_shape=4, action_shape=2, action_space='discrete', **sizes)
    trajectories, _ = collect(make_policy(PPOPolicy, model, action_space='discrete'), 5)
    _, columns = assert_roundtrip(trajectories)
    assert {'logit', 'value'} <= set(columns)


def test_r2d2_sequences_survive_columns():
    """Stored as the episode buffer of the R2D2 example samples them: lists of steps, with a hidden state each."""
    model = DRQN(obs_shape=4, action_shape=2, encoder_hidden_size_list=[8, 8])
    policy = make_policy(R2D2Policy, model, burnin_step=1, learn_unroll_len=4, unroll_len=5)
    trajectories, _ = collect(policy, 12, eps=0.5)
    sequences = [trajectories[start : start + 5] for start in range(0, 10, 5)]
    schema, _ = assert_roundtrip(sequences)
    assert any(name.startswith('prev_state') for name in schema.columns())


def test_columns_of_views_do_not_keep_the_whole_batch():
    """Each obs is a view of what all environments saw; DequeBuffer holds on to all of it, a column to one row."""
    trajectories, _ = collect(dqn_policy(), 2, eps=0.5)
    buffer = DequeBuffer(size=4)
    buffer.push(trajectories[0])
    held = next(iter(buffer.storage)).data
    assert held.obs.untyped_storage().nbytes() == 2 * 4 * 4
    columns = Schema.infer([held]).encode([held])
    assert columns['obs'].nbytes == 4 * 4
