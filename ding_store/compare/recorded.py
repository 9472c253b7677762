"""Elements of real environments: those of dizoo_configs, played at random for some hundred steps."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np

from ding_store.compare.rows import Columns, Row
from ding_store.compare.worker import Worker, WorkerFailed
from ding_store.errors import ConfigError

#: Row -> (config of the environment that makes its observations, name to show).
SOURCES = {
    'dqn': ('atari.qbert_dqn_config', 'ALE Qbert'),
    'ppo': ('atari.qbert_ppo_config', 'ALE Qbert'),
    'r2d2': ('atari.qbert_r2d2_config', 'ALE Qbert'),
    'impala': ('atari.qbert_impala_config', 'ALE Qbert'),
    'sac': ('mujoco.hopper_sac_config', 'Hopper-v5'),
    'qmix': ('smac.smax_3s5z_qmix_config', 'SMAX 3s5z'),
    'masac': ('smac.smax_3s5z_masac_config', 'SMAX 3s5z'),
    'gobigger': ('gobigger.gobigger_dqn_config', 'GoBigger'),
}
#: Number of transitions or sequences of a row that are played. Tables hold them again and again.
NUM_ELEMENTS, NUM_SEQUENCES = 200, 16


def recorded(rows: List[Row], directory: str, timeout_s: float, say: Any) -> List[Row]:
    """
    Overview:
        Return the rows with elements of their environments, stored in files of this directory. If a row's extra is not
        installed, its elements stay synthetic, and ``why_synthetic`` gives the reason.
    Raises:
        - ConfigError: An environment fails.
    """
    worker = Worker('ding_store.compare.recorded:Recorder', directory, timeout_s=timeout_s)
    made: List[Row] = []
    try:
        for row in rows:
            say(f'{row.name}: playing {SOURCES[row.name][1]}')
            made.append(worker.call('record', row))
        return made
    except WorkerFailed as error:
        row = rows[len(made)]
        text = f'--elements real: {SOURCES[row.name][1]} cannot be played for {row.name}; use --elements synthetic'
        raise ConfigError(f'{text}\n{error}\n{error.log}'.rstrip()) from error
    finally:
        worker.close()


class Recorder:
    """Recorder in another process, which alone imports the environments."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def record(self, row: Row) -> Row:
        config, title = SOURCES[row.name]
        try:
            env = _make_env(config)
            obs = env.reset()  # some environments import their extra only here
        except ModuleNotFoundError as error:
            is_ours = str(error.name).split('.')[0] == 'dizoo_configs'  # no extra installs it
            return replace(row, why_synthetic='only a checkout has dizoo_configs' if is_ours else str(error))
        steps = list(_played(env, obs, NUM_SEQUENCES * row.steps if row.steps else NUM_ELEMENTS))
        env.close()
        path = str(Path(self._directory, f'{row.name}.npz'))
        columns = _columns(row, steps)
        np.savez(path, **{name.replace('/', '|'): column for name, column in columns.items()})
        return row.of_file(path, title)


def _make_env(config: str) -> Any:
    from ding.envs import get_vec_env_setting
    from easydict import EasyDict

    module = importlib.import_module(f'dizoo_configs.{config}')
    cfg = EasyDict(copy.deepcopy({**module.main_config.env, **module.create_config.env}))
    make, collector_cfgs, _ = get_vec_env_setting(cfg)
    env = make(collector_cfgs[0])
    env.seed(0)
    return env


def _played(env: Any, obs: Any, num_steps: int) -> Iterator[Dict[str, Any]]:
    rng = np.random.default_rng(0)
    env.action_space.seed(0)
    for _ in range(num_steps):
        action = np.asarray(env.action_space.sample())
        if isinstance(obs, dict) and 'action_mask' in obs:
            action = np.array([rng.choice(np.flatnonzero(mask)) for mask in obs['action_mask']])
        timestep = env.step(action)
        # StepCollector's keys. For a team, _as_leaf reduces action and reward to the row's shape.
        yield {'obs': obs, 'next_obs': timestep.obs, 'action': action, 'reward': timestep.reward, 'done': timestep.done}
        obs = env.reset() if timestep.done else timestep.obs


def _columns(row: Row, steps: List[Dict[str, Any]]) -> Columns:
    """
    Return the row's leaves. Those that were played are real. Those that networks and collectors add are random: logits,
    values, recurrent states.
    """
    count = len(steps)
    lead = (count // row.steps, row.steps) if row.steps else (count,)
    made: Columns = {}
    kinds = {name.split('/')[0] for name in row.leaves}
    for kind in ('obs', 'next_obs'):
        if kind in kinds:
            for path in _paths(steps[0][kind], kind):
                column = np.stack([_at(step, path) for step in steps]).astype(np.float32)
                made[path] = column.reshape(*lead, *column.shape[1:])
    for name, (dtype, shape) in _others(row):
        if name in steps[0]:
            values = [_as_leaf(np.asarray(step[name]), shape) for step in steps]
            made[name] = np.stack(values).astype(dtype).reshape(*lead, *shape)
        else:
            made[name] = replace(row, leaves={name: (dtype, shape)}).columns(lead[0])[name]
    return made


def _others(row: Row) -> List[Tuple[str, Tuple[type, Tuple[int, ...]]]]:
    return [(name, leaf) for name, leaf in row.leaves.items() if name.split('/')[0] not in ('obs', 'next_obs')]


def _paths(value: Any, path: str) -> List[str]:
    if not isinstance(value, dict):
        return [path]
    return [each for key, child in value.items() for each in _paths(child, f'{path}/{key}')]


def _at(value: Any, path: str) -> Any:
    for key in path.split('/'):
        value = value[key]
    return value


def _as_leaf(value: np.ndarray, shape: Tuple[int, ...]) -> np.ndarray:
    """Return as many values as the row has: repeat a single one, or reduce players to their mean or the first."""
    size = int(np.prod(shape))
    if value.size == size:
        return value.reshape(shape)
    if value.size == 1:
        return np.full(shape, value.reshape(()))
    one = value.mean() if value.dtype.kind == 'f' else value.reshape(-1)[0]
    return np.full(shape, one)
