"""The three ways of enabling the store give every policy the batches of DI-engine's own buffers, and its losses."""

import contextlib
import copy
import functools
import importlib
import inspect
from typing import Any, Callable, Dict, List, Tuple

import gym
import numpy as np
import pytest
from ding.config import compile_config
from ding.envs import BaseEnv, BaseEnvManager, BaseEnvTimestep
from ding.policy import create_policy
from ding.utils import ENV_REGISTRY, set_pkg_seed
from ding.utils.data import default_collate, timestep_collate
from ding.worker import create_buffer, create_serial_collector
from easydict import EasyDict
from same_batches import is_same

import ding_store
from ding_store.config import as_store

CARTPOLE, PENDULUM, PTZ = (
    f'classic_control.{name}.config.{name}_' if name != 'ptz' else 'petting_zoo.config.ptz_simple_spread_'
    for name in ('cartpole', 'pendulum', 'ptz')
)
RECURRENT = dict(burnin_step=2, learn_unroll_len=8)
#: Every policy that trains from a replay: a config of dizoo, and what is changed in its policy. Left out are those that
#: DI-engine 0.5.3 cannot train: MASAC, and IMPALA with continuous actions in the config pipeline.
POLICIES: Dict[str, Tuple[str, Dict[str, Any]]] = {
    **{
        name: (f'{CARTPOLE}{name}_config', {})
        for name in ('dqn', 'c51', 'qrdqn', 'iqn', 'fqf', 'rainbow', 'sqn', 'sql')
    },
    **{name: (f'{CARTPOLE}{name}_config', {}) for name in ('mdqn', 'dqn_stdim', 'ppo_offpolicy', 'ppg', 'dqfd')},
    **{name: (f'{CARTPOLE}{name}_config', RECURRENT) for name in ('r2d2', 'ngu')},
    'r2d3': ('box2d.lunarlander.config.lunarlander_r2d3_ppoexpert_config', RECURRENT),
    'r2d2_gtrxl': (f'{CARTPOLE}r2d2_gtrxl_config', {}),
    **{name: (f'{CARTPOLE}{name}_config', dict(unroll_len=4)) for name in ('acer', 'impala')},
    'discrete_sac': (f'{CARTPOLE}sac_config', {}),
    **{name: (f'{PENDULUM}{name}_config', {}) for name in ('bdq', 'sac', 'sqil_sac', 'ddpg', 'td3', 'd4pg')},
    'td3_vae': ('box2d.lunarlander.config.lunarlander_cont_td3_vae_config', {}),
    'pdqn': ('gym_hybrid.config.gym_hybrid_pdqn_config', {}),
    **{name: (f'{PTZ}{name}_config', {}) for name in ('qmix', 'wqmix', 'collaq', 'qtran', 'coma', 'madqn')},
    **{name: (f'{PTZ}{name}_config', {}) for name in ('atoc', 'maddpg')},
}
B = 4
#: Keys that DI-engine's 'advanced' adds, too: which elements they are.
IDS = ('replay_unique_id', 'replay_buffer_idx')


@ENV_REGISTRY.register('three_ways')
class RandomEnv(BaseEnv):
    """Random numbers in the shapes that a policy's model wants; episodes of 7 to 12 steps."""

    config: Dict[str, Any] = {}
    observation_space = action_space = reward_space = gym.spaces.Discrete(2)

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg
        self._random = np.random.RandomState(0)

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        self._random = np.random.RandomState(seed)

    def reset(self) -> Any:
        self._left = self._random.randint(7, 13)
        return self._obs()

    def step(self, action: Any) -> BaseEnvTimestep:
        self._left -= 1
        done = self._left == 0
        info = {'eval_episode_return': 0.0} if done else {}
        return BaseEnvTimestep(self._obs(), self._random.rand(1).astype(np.float32), done, info)

    def _obs(self) -> Any:
        shapes = self._cfg.shapes
        if 'obs' in shapes and len(shapes) == 1:
            return self._array(shapes['obs'])
        obs = {name: self._array(shape) for name, shape in shapes.items() if name != 'prev_action'}
        if 'action_mask' in obs:
            obs['action_mask'] = np.ones_like(obs['action_mask'])
        if 'prev_action' in shapes:
            obs['prev_action'] = np.array(self._random.randint(2))
        return obs

    def _array(self, shape: Any) -> np.ndarray:
        return self._random.rand(*shape).astype(np.float32)

    def close(self) -> None:
        pass

    def __repr__(self) -> str:
        return 'RandomEnv'


def shapes_of(name: str, model: Any) -> Dict[str, Any]:
    """What an observation is made of."""
    agents = model.get('agent_num', model.get('n_agent', 5 if name == 'maddpg' else 0))
    if name == 'ngu':
        return dict(obs=(model.obs_shape,), prev_action=(), prev_reward_extrinsic=(1,))
    obs = model.get('agent_obs_shape', model.get('obs_shape'))
    if name == 'atoc':
        return dict(obs=(agents, obs))
    if not agents:
        return dict(obs=(obs,) if isinstance(obs, int) else tuple(obs))
    glob = model.get('global_obs_shape')
    if name == 'coma':
        obs, glob = obs.agent_state, obs.global_state
    actions = model.action_shape if isinstance(model.action_shape, int) else model.action_shape[0]
    is_specific = name in ('madqn', 'maddpg')
    shapes = dict(
        agent_state=(agents, obs),
        global_state=(agents, glob) if is_specific else (glob,),
        action_mask=(agents, actions),
    )
    if name == 'collaq':
        shapes.update(agent_alone_state=(agents, model.alone_obs_shape), agent_alone_padding_state=(agents, obs))
    return shapes


def configs_of(name: str) -> Tuple[EasyDict, EasyDict]:
    """A stock config, small, on random observations."""
    module, changes = POLICIES[name]
    found = importlib.import_module(f'dizoo.{module}')
    main, create = copy.deepcopy(found.main_config), copy.deepcopy(found.create_config)
    main.env = EasyDict(
        shapes=shapes_of(name, main.policy.model),
        collector_env_num=2,
        evaluator_env_num=2,
        stop_value=0,
        n_evaluator_episode=1,
    )
    main.policy.cuda = False
    main.policy.learn.batch_size = B
    main.policy.update(changes)
    main.policy.collect.update(env_num=2)
    if main.policy.collect.get('unroll_len', 1) > 1:
        main.policy.collect.unroll_len = 6
    create.env = EasyDict(type='three_ways')
    create.env_manager = EasyDict(type='base')
    return main, create


def compiled(main: EasyDict, create: EasyDict) -> EasyDict:
    main, create = copy.deepcopy(main), copy.deepcopy(create)
    create.policy.type += '_command'
    return compile_config(main, create_cfg=create, auto=True, save_cfg=False, seed=0)


def buffers_of(main: EasyDict, create: EasyDict) -> Dict[str, Any]:
    """What ``create_buffer`` is given, by the flag, by the two keys, and by ``ding-store run``."""
    flag = copy.deepcopy(main), copy.deepcopy(create)
    flag[0].store = dict(enable=True)
    assert ding_store.enable(*flag)
    keys = copy.deepcopy(main), copy.deepcopy(create)
    two_keys = EasyDict(type='store', import_names=['ding_store.buffer'])
    has_two = create.policy.type == 'ppg_offpolicy'
    keys[1].replay_buffer = EasyDict(policy=two_keys, value=two_keys) if has_two else two_keys
    found = {way: compiled(*pair).policy.other.replay_buffer for way, pair in (('flag', flag), ('keys', keys))}
    found['run'] = EasyDict(as_store(compiled(main, create).policy.other.replay_buffer))
    return {way: cfg.policy if has_two else cfg for way, cfg in found.items()}


def collected(name: str, cfg: EasyDict) -> List[Any]:
    """What a collector of DI-engine gives the replay."""
    policy = create_policy(cfg.policy, enable_field=['learn', 'collect'])
    manager = BaseEnvManager([functools.partial(RandomEnv, cfg.env)] * 2, EasyDict(BaseEnvManager.default_config()))
    manager.seed(0)
    collector = create_serial_collector(
        cfg.policy.collect.collector, env=manager, policy=policy.collect_mode, exp_name='collector'
    )
    takes_eps = 'eps' in inspect.signature(policy._forward_collect).parameters
    size = dict(n_episode=8) if cfg.policy.collect.get('n_episode') else dict(n_sample=2 * B)
    elements = collector.collect(**size, train_iter=0, policy_kwargs=dict(eps=0.5) if takes_eps else {})
    collector.close()
    for i, element in enumerate(elements):  # as the entries of these policies do
        if name == 'dqfd':
            element['is_expert'] = i % 2
        if name == 'r2d3':
            element['is_expert'] = [i % 2] * len(element['obs'])
    return elements


def collations(elements: List[Any]) -> List[Callable]:
    """The functions of DI-engine that can collate such elements."""
    found = []
    for collate in (default_collate, functools.partial(default_collate, cat_1dim=False), timestep_collate):
        with contextlib.suppress(TypeError, KeyError):
            collate(copy.deepcopy(elements))
            found.append(collate)
    return found


@pytest.mark.parametrize('name', POLICIES)
def test_three_ways_give_the_batches_of_plain_ding(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main, create = configs_of(name)
    cfg = compiled(main, create)
    set_pkg_seed(0, use_cuda=False)
    elements = collected(name, cfg)
    assert len(elements) >= B

    def trained(data: Any) -> Any:
        set_pkg_seed(1, use_cuda=False)
        if name == 'td3_vae':
            for element in data:
                element.update(warm_up=False, rl_phase=True, vae_phase=False)
        if name == 'ppg':
            data = dict(policy=data, value=copy.copy(data))
        return create_policy(cfg.policy, enable_field=['learn', 'collect']).learn_mode.forward(data)

    def sampled(buffer: Any) -> Any:
        np.random.seed(2)
        return buffer.sample(B, 0)

    buffers = {way: create_buffer(buffer_cfg) for way, buffer_cfg in buffers_of(main, create).items()}
    for buffer in buffers.values():
        buffer.push(copy.deepcopy(elements), cur_collector_envstep=0)
    rows = [each['replay_unique_id'] for each in sampled(buffers['flag'])]
    plain = [{**copy.deepcopy(elements[row]), 'IS': 1.0, 'priority_IS': 1.0} for row in rows]
    collates = collations(plain)
    batches, outputs = [collate(copy.deepcopy(plain)) for collate in collates], trained(plain)
    for way, buffer in buffers.items():
        for collate, expected in zip(collates, batches):
            batch = collate(sampled(buffer))
            assert is_same({key: batch[key] for key in batch if key not in IDS}, expected), way
        assert is_same(trained(sampled(buffer)), outputs), way
        if name == 'r2d3':  # its entry adds a batch of its own buffer and one of the expert's
            both = buffer.sample(B // 2, 0) + buffer.sample(B // 2, 0)
            rows = [each['replay_unique_id'] for each in both]
            listed = [{**copy.deepcopy(elements[row]), 'IS': 1.0, 'priority_IS': 1.0} for row in rows]
            assert is_same(trained(both), trained(listed)), way
        buffer.close()
