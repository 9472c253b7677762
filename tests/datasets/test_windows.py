"""Windows of steps for Decision Transformers: the same as DI-engine's, on the same episodes and with the same draws."""

import pickle

import numpy as np
import pytest
import torch
from ding.data import create_dataset
from ding.framework import task
from ding.framework.context import OfflineRLContext
from ding.framework.middleware import trainer
from ding.model import DecisionTransformer
from ding.policy import DTPolicy
from ding.utils.data.dataset import D4RLTrajectoryDataset
from easydict import EasyDict

from ding_store.datasets import DataSetWriter, StoreTrajectoryDataset
from ding_store.errors import ConfigError
from ding_store.middleware.offline import offline_data_fetcher

CONTEXT = 6


def steps(lengths):
    rng = np.random.default_rng(0)
    return [
        [
            {
                'obs': torch.from_numpy(rng.normal(size=4).astype(np.float32)),
                'next_obs': torch.zeros(4),
                'action': torch.tensor([int(rng.integers(2))]),
                'reward': torch.tensor([float(rng.normal())]),
                'done': torch.tensor(step == length - 1),
                'env_data_id': torch.tensor([episode]),
            }
            for step in range(length)
        ]
        for episode, length in enumerate(lengths)
    ]


def config(path, kind='store_trajectory'):
    dataset = dict(context_len=CONTEXT, rtg_scale=10.0, env_type='classic', data_dir_prefix=str(path))
    collect = dict(data_type=kind, data_path=str(path))
    return EasyDict(dataset=dataset, policy=dict(collect=collect, learn=dict(batch_size=8)))


@pytest.fixture
def episodes(tmp_path):
    """Episodes in a data set, their steps interleaved as of several environments, and in a file of DI-engine's."""
    made = steps([3, 20, 6, 11, 7, 30])
    with DataSetWriter(str(tmp_path / 'set')) as writer:
        for number in range(30):
            rows = [episode[number] for episode in made if number < len(episode)]
            writer.append_elements(rows)
    with open(tmp_path / 'dqn.pkl', 'wb') as file:
        pickle.dump([[{name: leaf.numpy() for name, leaf in one.items()} for one in episode] for episode in made], file)
    return tmp_path


def test_windows_equal_those_of_di_engine(episodes):
    ours = create_dataset(config(episodes / 'set'))
    stock = D4RLTrajectoryDataset(config(episodes / 'dqn.pkl'))
    assert isinstance(ours, StoreTrajectoryDataset)
    assert len(ours) == len(stock) == 6
    for found, expected in zip(ours.get_state_stats(), stock.get_state_stats()):
        assert np.allclose(found, expected, atol=1e-5)
    assert ours.get_max_timestep() == 30
    for seed in range(5):
        numbers = np.random.default_rng(seed).permutation(6).tolist()
        np.random.seed(seed)
        expected = [stock[number] for number in numbers]
        np.random.seed(seed)
        for one, other in zip(ours.__getitems__(numbers), expected):
            for name, mine, theirs in zip(('time', 'state', 'action', 'return', 'mask'), one, other):
                assert torch.allclose(mine.double(), theirs.double().reshape(mine.shape), atol=1e-5), name


def test_decision_transformer_trains_on_a_data_set(episodes):
    cfg = config(episodes / 'set')
    cfg.policy = EasyDict({**DTPolicy.default_config(), **cfg.policy})
    cfg.policy.update(rtg_scale=10, rtg_target=10, max_eval_ep_len=30, wt_decay=1e-4, warmup_steps=2)
    cfg.policy.update(learning_rate=1e-2, clip_grad_norm_p=0.25)
    cfg.policy.learn.update(batch_size=8)
    shape = dict(state_dim=4, act_dim=2, n_blocks=1, h_dim=8, context_len=CONTEXT, n_heads=1, drop_p=0.0)
    cfg.policy.model = EasyDict({**shape, 'continuous': False})
    dataset = create_dataset(cfg)
    cfg.policy.state_mean, cfg.policy.state_std = dataset.get_state_stats()
    model = DecisionTransformer(**cfg.policy.model)
    before = [parameter.clone() for parameter in model.parameters()]
    with task.start(async_mode=False, ctx=OfflineRLContext()):
        policy = DTPolicy(cfg.policy, model=model, enable_field=['learn'])
        task.use(offline_data_fetcher(cfg, dataset))
        task.use(trainer(cfg, policy.learn_mode))
        task.run(max_step=3)
    assert any(not torch.equal(one, other) for one, other in zip(before, model.parameters()))


def test_data_set_without_whole_episodes_is_refused(tmp_path):
    with DataSetWriter(str(tmp_path / 'cut')) as writer:
        writer.append_elements(steps([9])[0][:5])
    with pytest.raises(ConfigError, match='no whole episode'):
        create_dataset(config(tmp_path / 'cut'))
    with DataSetWriter(str(tmp_path / 'nstep')) as writer:
        writer.append_elements([{**one, 'value_gamma': torch.ones(1)} for one in steps([9])[0]])
    with pytest.raises(ConfigError, match='nstep=1'):
        create_dataset(config(tmp_path / 'nstep'))
