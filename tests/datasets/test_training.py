"""Offline training of DI-engine from a data set: the same as from DI-engine's own format on the same rows."""

from copy import deepcopy

import gym
import pytest
import torch
import treetensor.torch as ttorch
from easydict import EasyDict

from ding_store.datasets import DataSet, DataSetWriter, export
from ding_store.errors import ConfigError

pytest.importorskip('h5py')


def steps_of(env_id, num_rows):
    """Steps of random play, as DI-engine's collectors make them."""
    env = gym.make(env_id)
    env.action_space.seed(0)
    obs, episode, found = env.reset(seed=0), 0, []
    is_discrete = hasattr(env.action_space, 'n')
    while len(found) < num_rows:
        action = env.action_space.sample()
        following, reward, done, _ = env.step(action)
        found.append(
            ttorch.Tensor(
                {
                    'obs': torch.as_tensor(obs).float(),
                    'next_obs': torch.as_tensor(following).float(),
                    'action': torch.tensor([action]) if is_discrete else torch.as_tensor(action) / 2,
                    'reward': torch.tensor([float(reward)]),
                    'done': torch.tensor(bool(done)),
                    'env_data_id': torch.tensor([episode]),
                }
            )
        )
        obs = env.reset() if done else following
        episode += int(done)
    env.close()
    return found


@pytest.fixture(scope='module')
def data_sets(tmp_path_factory):
    """The directory of data sets of CartPole and Pendulum, with a file of DI-engine's format beside each."""
    path = tmp_path_factory.mktemp('data_sets')
    for name, env_id in (('cartpole', 'CartPole-v0'), ('pendulum', 'Pendulum-v1')):
        with DataSetWriter(str(path / name), segment_bytes=20_000) as writer:
            writer.append_elements(steps_of(env_id, 400))
        export(DataSet(path / name), str(path / f'{name}.hdf5'), 'hdf5')
    return path


def configs(algorithm, path, kind):
    if algorithm == 'cql':
        from dizoo.classic_control.cartpole.config.cartpole_cql_config import create_config, main_config
    elif algorithm == 'bc':
        from dizoo.classic_control.cartpole.config.cartpole_bc_config import create_config, main_config
    elif algorithm == 'continuous cql':
        from dizoo.classic_control.pendulum.config.pendulum_cql_config import create_config, main_config
    else:
        from dizoo.classic_control.pendulum.config.pendulum_td3_bc_config import create_config, main_config
    main, create = deepcopy(main_config), deepcopy(create_config)
    name = 'cartpole' if algorithm in ('cql', 'bc') else 'pendulum'
    main.exp_name = f'{algorithm}_{kind}'
    main.import_names = ['ding_store.datasets']
    main.env.evaluator_env_num = main.env.n_evaluator_episode = 1
    main.policy.eval.evaluator.eval_freq = 1
    main.policy.cuda = False
    main.policy.nstep = 1
    main.policy.learn.batch_size = 32
    main.policy.learn.train_epoch = 1
    main.policy.collect = EasyDict(main.policy.get('collect', {}))  # BC's has none
    main.policy.collect.data_type = kind
    main.policy.collect.data_path = str(path / (name if kind == 'store' else f'{name}.hdf5'))
    return main, create


@pytest.mark.parametrize(
    'algorithm', ['cql', 'td3_bc', *(pytest.param(name, marks=pytest.mark.long) for name in ('bc', 'continuous cql'))]
)
def test_serial_offline_trains_the_same_model_from_both_formats(data_sets, tmp_path, monkeypatch, algorithm):
    from ding.entry import serial_pipeline_offline

    monkeypatch.chdir(tmp_path)
    models = []
    for kind in ('hdf5', 'store'):
        main, create = configs(algorithm, data_sets, kind)
        if algorithm == 'td3_bc':  # DI-engine's float32 mean of all rows differs from ours in its last bits
            main.env.norm_obs.use_norm = False
        torch.manual_seed(0)
        policy, _ = serial_pipeline_offline((main, create), seed=0)
        models.append(policy._model.state_dict())
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_normalized_observations_are_those_of_ding_engine(data_sets):
    from ding.data import create_dataset

    found = []
    for kind in ('hdf5', 'store'):
        main, _ = configs('td3_bc', data_sets, kind)
        dataset = create_dataset(main)
        batch = [dataset[i] for i in range(20)] if kind == 'hdf5' else dataset.__getitems__(range(20))
        found.append(torch.stack([torch.as_tensor(each['obs']) for each in batch]))
        assert torch.as_tensor(dataset.mean).shape == (3,)
    assert torch.allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize('is_ours', [True, False])
def test_task_pipeline_trains_bc_by_both_fetchers(data_sets, is_ours):
    from ding.config import compile_config
    from ding.data import create_dataset
    from ding.framework import task
    from ding.framework.context import OfflineRLContext
    from ding.framework.middleware import trainer
    from ding.framework.middleware.functional.data_processor import offline_data_fetcher as stock
    from ding.policy import BehaviourCloningPolicy
    from dizoo.classic_control.cartpole.config.cartpole_bc_config import create_config, main_config

    from ding_store.middleware.offline import offline_data_fetcher

    main, create = deepcopy(main_config), deepcopy(create_config)
    main.policy.collect = EasyDict(data_type='store', data_path=str(data_sets / 'cartpole'))
    main.policy.learn.batch_size = 32
    cfg = compile_config(main, create_cfg=create, auto=True, save_cfg=False)
    cfg.import_names = ['ding_store.datasets']
    seen = []
    with task.start(async_mode=False, ctx=OfflineRLContext()):
        policy = BehaviourCloningPolicy(cfg.policy)
        task.use((offline_data_fetcher if is_ours else stock)(cfg, create_dataset(cfg)))
        task.use(lambda ctx: seen.append((ctx.train_epoch, len(ctx.train_data))))
        task.use(trainer(cfg, policy.learn_mode))
        task.run(max_step=26)
        assert task.ctx.train_iter == 26
        assert task.ctx.trained_env_step == 800
    assert [size for _, size in seen] == 2 * ([32] * 12 + [16])
    if is_ours:  # DI-engine's own forgets the epoch
        assert [epoch for epoch, _ in seen] == [0] * 13 + [1] * 13


def test_pipeline_uses_our_fetcher_for_data_sets_alone(data_sets):
    from ding_store.middleware import pipeline

    parts = pipeline({'exp_name': 'x', 'store': {'enable': True, 'url': 'memory://'}})
    cfg = EasyDict(seed=0, policy=dict(learn=dict(batch_size=4)))
    ctx = EasyDict(trained_env_step=0, train_epoch=0)
    parts.offline_data_fetcher(cfg, DataSet(data_sets / 'cartpole'))(ctx)
    assert ctx.train_data.obs.shape == (4, 4)
    parts.offline_data_fetcher(cfg, [{'obs': 1}] * 8)(ctx)
    assert ctx.train_data == [{'obs': 1}] * 4


def test_config_without_path_or_with_windows_is_refused(data_sets):
    from ding.data import create_dataset

    collect = dict(data_type='store')
    with pytest.raises(ConfigError, match='needs policy.collect.data_path'):
        create_dataset(EasyDict(policy=dict(collect=collect)))
    collect['data_path'] = str(data_sets / 'cartpole')
    with pytest.raises(ConfigError, match='no windows of steps'):
        create_dataset(EasyDict(policy=dict(collect=collect), dataset=dict(context_len=8)))
