"""
Store and stock agree: transitions recorded in real environments go into DequeBuffer and into StoreBuffer, DI-engine's
fetcher and ours take the same rows out of them, and DI-engine's policies find the same losses, update after update.
"""

import copy
from types import SimpleNamespace
from typing import Any, Dict, List

import gym
import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from ding.envs import BaseEnvTimestep
from ding.framework.middleware.functional import gae_estimator
from ding.framework.middleware.functional.data_processor import offpolicy_data_fetcher
from ding.policy import DQNPolicy, IMPALAPolicy, PPOOffPolicy, PPOPolicy, R2D2Policy, SACPolicy
from ding.utils import set_pkg_seed
from easydict import EasyDict
from needs import CUDA

from ding_store.middleware.chunks import ChunkDecoder, ChunkWriter
from ding_store.middleware.replay import data_fetcher, data_pusher
from ding_store.middleware.replay_settings import ReplaySettings
from ding_store.middleware.trajectories import Unroller, add_returns, pieces
from ding_store.storage import open_store

UPDATES = 12
HIDDEN = [16, 16]
CARTPOLE = dict(obs_shape=4, action_shape=2, encoder_hidden_size_list=HIDDEN)
HEADS = dict(actor_head_hidden_size=16, critic_head_hidden_size=16)


def config(policy: Any, **changes: Any) -> Any:
    cfg = EasyDict(copy.deepcopy(policy.default_config()))
    cfg.cuda = CUDA
    for key, value in changes.items():
        if isinstance(value, dict) and key in cfg:
            cfg[key].update(value)
        else:
            cfg[key] = value
    cfg.learn.batch_size = 8
    cfg.collect.unroll_len = 1
    cfg.other = EasyDict(replay_buffer=dict(replay_buffer_size=1000))
    return EasyDict(policy=cfg)


def record(mode: Any, env_id: str, num_steps: int, **kwargs: Any) -> Any:
    """What a StepCollector has collected after ``num_steps`` of one environment."""
    env, made, episode = gym.make(env_id), [], 0
    obs = env.reset(seed=0)
    for _ in range(num_steps):
        obs = torch.from_numpy(np.asarray(obs, np.float32))
        output = mode.forward({0: obs}, **kwargs)[0]
        action = output['action'].numpy()
        discrete = isinstance(env.action_space, gym.spaces.Discrete)
        next_obs, reward, done, info = env.step(int(action) if discrete else action.reshape(-1))
        timestep = BaseEnvTimestep(
            torch.from_numpy(np.asarray(next_obs, np.float32)),
            torch.tensor([float(reward)]),
            torch.tensor(bool(done)),
            info,
        )
        step = ttorch.as_tensor(mode.process_transition(obs, output, timestep))
        step.env_data_id = torch.tensor([episode])
        made.append(step)
        obs = next_obs
        if done:
            mode.reset([0])
            obs, episode = env.reset(), episode + 1
    return SimpleNamespace(trajectories=made, trajectory_end_idx=[num_steps - 1])


def dqn(nstep: int = 1, **changes: Any) -> Any:
    return config(DQNPolicy, model=CARTPOLE, nstep=nstep, discount_factor=0.97, **changes), DQNPolicy


def sac() -> Any:
    model = dict(obs_shape=3, action_shape=1, twin_critic=True, action_space='reparameterization', **HEADS)
    return config(SACPolicy, model=model), SACPolicy


def r2d2(**changes: Any) -> Any:
    cfg = config(R2D2Policy, model=CARTPOLE, nstep=2, burnin_step=2, learn_unroll_len=6, **changes)
    cfg.policy.collect.env_num = 1
    cfg.policy.eval.env_num = 1
    return cfg, R2D2Policy


def impala() -> Any:
    return config(IMPALAPolicy, model=dict(CARTPOLE, **HEADS), unroll_len=8), IMPALAPolicy


def ppo() -> Any:
    model = dict(CARTPOLE, action_space='discrete', **HEADS)
    return config(PPOOffPolicy, model=model, action_space='discrete'), PPOOffPolicy


PRIORITY = dict(priority=True, priority_IS_weight=True)
PLAIN = dict(priority=False, priority_IS_weight=False)
CASES = {
    'dqn': (dqn, {}, 'CartPole-v0', dict(eps=0.5)),
    'dqn 3-step': (lambda: dqn(nstep=3), {}, 'CartPole-v0', dict(eps=0.5)),
    'dqn per': (lambda: dqn(nstep=3, **PRIORITY), {}, 'CartPole-v0', dict(eps=0.5)),
    'sac': (sac, {}, 'Pendulum-v1', {}),
    'r2d2': (lambda: r2d2(**PLAIN), {}, 'CartPole-v0', dict(eps=0.5)),
    'r2d2 per': (lambda: r2d2(**PRIORITY), {}, 'CartPole-v0', dict(eps=0.5)),
    'impala': (impala, {}, 'CartPole-v0', {}),
    'ppo off-policy': (ppo, {}, 'CartPole-v0', {}),
}


def elements(cfg: Any, collected: Any, policy: Any) -> List[Any]:
    """What the pipelines make of the steps before they push them."""
    name = type(policy).__name__
    if name == 'R2D2Policy':
        Unroller(length=8, overlap=4, nstep=cfg.policy.nstep, gamma=cfg.policy.discount_factor)(collected)
    elif name == 'IMPALAPolicy':
        Unroller(length=8)(collected)
    elif name == 'PPOOffPolicy':
        pushed: List[Any] = []
        gae_estimator(cfg, policy.collect_mode, SimpleNamespace(push=pushed.append))(collected)
        return pushed
    elif cfg.policy.get('nstep', 1) > 1:
        for piece in pieces(collected):
            add_returns(piece, cfg.policy.nstep, cfg.policy.discount_factor)
    return collected.trajectories


def made(cfg: Any, kind: Any) -> Any:
    set_pkg_seed(0, use_cuda=CUDA)
    return kind(cfg.policy)


def own(element: Any) -> Any:
    return element.clone() if isinstance(element, ttorch.Tensor) else copy.deepcopy(element)


class Side:
    """One learner: its buffer, its fetcher and its policy."""

    def __init__(self, cfg: Any, kind: Any, buffer_: Any, fetcher: Any, pushed: List[Any], moves: bool) -> None:
        self.policy, self.ctx = made(cfg, kind), SimpleNamespace(train_data=None, train_output=None)
        self.policy._cuda = moves or CUDA  # What it does with batches for a GPU, it does with its device: the CPU.
        data_pusher(cfg, buffer_)(SimpleNamespace(trajectories=[own(each) for each in pushed], episodes=None))
        self.fetch = fetcher(cfg, buffer_, self.policy)

    def update(self, seed: int) -> Dict[str, Any]:
        np.random.seed(seed)
        generator = self.fetch(self.ctx)
        if generator is not None:
            next(generator, None)
        assert self.ctx.train_data is not None, 'too little data'
        torch.manual_seed(seed)  # SAC draws actions
        self.ctx.train_output = self.policy.learn_mode.forward(self.ctx.train_data)
        if generator is not None:
            next(generator, None)
        return self.ctx.train_output


def loss(output: Dict[str, Any]) -> float:
    return float(torch.as_tensor(output['total_loss']).detach())


@pytest.mark.parametrize('moves', [False, True])
@pytest.mark.parametrize('case', CASES)
def test_same_data_give_the_same_batches_and_losses(case: str, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, _, env_id, kwargs = CASES[case]
    cfg, kind = make()
    first = made(cfg, kind)
    pushed = elements(cfg, record(first.collect_mode, env_id, 250, **kwargs), first)
    settings = ReplaySettings.of(cfg)

    from ding_store.buffer import StoreBuffer

    store_buffer, stock_buffer = settings.store(StoreBuffer), settings.stock()
    ours = Side(cfg, kind, store_buffer, lambda c, b, p: data_fetcher(c, b, p.learn_mode), pushed, moves)
    theirs = Side(cfg, kind, stock_buffer, lambda c, b, p: offpolicy_data_fetcher(c, b), pushed, moves)
    if not settings.priority:
        same_draws(store_buffer, stock_buffer, monkeypatch)
    for seed in range(UPDATES):
        found, expected = ours.update(seed), theirs.update(seed)
        assert loss(found) == pytest.approx(loss(expected), rel=1e-5, abs=1e-7), seed
        if settings.priority:
            np.testing.assert_allclose(found['priority'], expected['priority'], rtol=1e-4, atol=1e-6)
    for name, value in theirs.policy.learn_mode.state_dict()['model'].items():
        torch.testing.assert_close(ours.policy.learn_mode.state_dict()['model'][name], value, rtol=1e-4, atol=1e-6)


def same_draws(store_buffer: Any, stock_buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform samplers draw differently: DI-engine's reads the rows that ours drew. Priorities need no help."""
    drawn: List[List[str]] = []
    indices = [item.index for item in stock_buffer.storage]

    def noting(read: Any) -> Any:
        def sample(size: int) -> Any:
            batch = read(size)
            drawn.append([indices[row] for row in batch.rows])
            return batch

        return sample

    for name in ('sample_batch', 'sample_time_major'):
        monkeypatch.setattr(store_buffer, name, noting(getattr(store_buffer, name)))
    read_stock = stock_buffer.sample
    monkeypatch.setattr(stock_buffer, 'sample', lambda size: read_stock(indices=drawn[-1]))


def test_ppo_on_policy_learns_from_collected_data() -> None:
    """Nothing is replayed: what collectors sent and what the learner gets are the same, and so are the losses."""
    model = dict(CARTPOLE, action_space='discrete', **HEADS)
    cfg = config(PPOPolicy, model=model, action_space='discrete')
    collected = record(made(cfg, PPOPolicy).collect_mode, 'CartPole-v0', 100)
    with open_store('memory://', run='ppo') as store:
        ChunkWriter(store, 'experience').write(collected.trajectories, {})
        (entry,) = store.read('experience')
        arrived = SimpleNamespace(trajectories=ChunkDecoder().elements(entry), trajectory_end_idx=[99])
    losses = []
    for ctx in (collected, arrived):
        policy = made(cfg, PPOPolicy)
        gae_estimator(cfg, policy.collect_mode)(ctx)
        set_pkg_seed(0, use_cuda=CUDA)
        losses.append([output['total_loss'] for output in policy.learn_mode.forward(ctx.train_data)])
    assert len(losses[0]) > 10
    assert losses[1] == losses[0]


def test_nstep_returns_bootstrap_from_the_nth_state() -> None:
    """Against the definition, over an episode's end and over the border between two environments."""
    collected = record(made(*dqn()).collect_mode, 'CartPole-v0', 60, eps=1.0)
    collected.trajectory_end_idx = [24, 59]
    steps = [own(step) for step in collected.trajectories]
    ends = [i for i, step in enumerate(steps) if step.done or i in (24, 59)]
    assert any(bool(steps[i].done) for i in ends)
    for piece in pieces(collected):
        add_returns(piece, 3, 0.9)
    for i, step in enumerate(collected.trajectories):
        last = min(i + 2, next(end for end in ends if end >= i))
        rewards = [float(each.reward) for each in steps[i : last + 1]]
        assert step.reward.tolist() == rewards + [0.0] * (3 - len(rewards))
        assert float(step.value_gamma) == pytest.approx(0.9 ** len(rewards))
        assert bool(step.done) == bool(steps[last].done)
        assert torch.equal(step.next_obs, steps[last].next_obs)
        assert torch.equal(step.obs, steps[i].obs)


@pytest.mark.parametrize(('overlap', 'nstep'), [(0, None), (5, None), (7, 2)])
def test_sequences_cover_each_episode(overlap: int, nstep: Any) -> None:
    collected = record(made(*r2d2(**PLAIN)).collect_mode, 'CartPole-v0', 120, eps=1.0)
    steps = [own(step) for step in collected.trajectories]
    unroller, made_of_it = Unroller(8, overlap, nstep, 0.9), []
    for begin in range(0, 120, 13):  # as iterations bring them
        ctx = SimpleNamespace(trajectories=collected.trajectories[begin : begin + 13], trajectory_end_idx=[])
        unroller(ctx)
        made_of_it += ctx.trajectories
    assert all(len(values) == 8 for sequence in made_of_it for values in sequence.values())
    open_episode = int(steps[-1].env_data_id)
    for episode in range(open_episode):
        obs = [step.obs for step in steps if int(step.env_data_id) == episode]
        mine = [sequence for sequence in made_of_it if int(sequence['env_data_id'][0]) == episode]
        begins = []
        for sequence in mine:
            begin = next(i for i in range(len(obs)) if torch.equal(obs[i], sequence['obs'][0]))
            begins.append(begin)
            length = min(8, len(obs) - begin)
            assert all(torch.equal(a, b) for a, b in zip(obs[begin : begin + length], sequence['obs']))
            assert all(bool(done) for done in sequence['done'][length:]), 'nothing follows the end'
            assert all(not each.any() for each in sequence['obs'][length:])
        regular = list(range(0, max(len(obs) - 7, 1), 8 - overlap))
        assert begins[: len(regular)] == regular
        assert begins[-1] == max(len(obs) - 8, 0), 'the last sequence ends with the episode'
        assert bool(mine[-1]['done'][min(8, len(obs)) - 1])
