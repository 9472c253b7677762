"""
SMAX: JaxMARL's battles in the manner of SMAC, for machines without StarCraft II.

Units, health and weapons are those of the game. Physics and the opponent (a heuristic) differ, so results are SMAX
results, not SMAC results.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
from contextlib import redirect_stdout
from typing import Any, Dict, NamedTuple, Optional, Tuple

import gym
import numpy as np
from ding.envs import BaseEnv, BaseEnvTimestep
from ding.utils import ENV_REGISTRY
from easydict import EasyDict

from ding_store.private_files import own_directory
from dizoo_configs.extras import need

Observation = Dict[str, np.ndarray]


class Sizes(NamedTuple):
    """Numbers of agents, observation features, state features and actions. Constants, because JAX is imported late."""

    agents: int
    obs: int
    state: int
    actions: int


SIZES = {'3m': Sizes(3, 75, 72, 8), '2s3z': Sizes(5, 127, 120, 10), '3s5z': Sizes(8, 205, 192, 13)}


@ENV_REGISTRY.register('smac_smax')
class SMAXEnv(BaseEnv):
    """
    Overview:
        A battle of SMAX with the interface of dizoo's SMACEnv. JAX is imported at the first reset, because it
        starts threads that a fork does not survive. A subprocess env manager may make envs before it forks workers.
    Arguments:
        - cfg.map_name (:obj:`str`): One of ``SIZES``.
        - cfg.special_global_state (:obj:`bool`): True to give each agent its own global state, for MASAC: the state
          and the agent's one-hot index.
    Shapes (3s5z, A=8 agents):
        - agent_state (:obj:`np.ndarray`): ``(A, 205)``.
        - global_state (:obj:`np.ndarray`): ``(192,)``, with ``special_global_state`` ``(A, 200)``.
        - action_mask (:obj:`np.ndarray`): ``(A, 13)``.
        - action (:obj:`np.ndarray`): ``(A,)``, int64.
        - reward (:obj:`np.ndarray`): ``(1,)``, the share of the enemies' health that was taken, and 1 for the victory.
          ``info['eval_episode_return']`` is 1 for a battle that was won.
    Raises:
        - ValueError: The map is unknown.
        - ModuleNotFoundError: At the first reset, if the extra `smax` is missing. The text has the command for it.
    """

    config = dict(map_name='3s5z', special_global_state=False)

    def __init__(self, cfg: EasyDict) -> None:
        self._map = cfg.map_name
        if self._map not in SIZES:
            raise ValueError(f'env.map_name ({self._map!r}) must be one of {", ".join(SIZES)} in SMAX')
        self._special = bool(cfg.get('special_global_state', False))
        self._sizes = SIZES[self._map]
        self._random = np.random.RandomState(0)
        self._fixed: Optional[int] = None
        self._state: Any = None

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        """
        Seed the battles. With ``dynamic_seed`` every battle differs, otherwise all are the same. Both are reproducible.
        """
        self._random = np.random.RandomState(seed)
        self._fixed = None if dynamic_seed else seed

    def reset(self) -> Observation:
        if self._fixed is not None:
            self._random = np.random.RandomState(self._fixed)
        self._state, seen = battle(self._map).reset(self._key())
        return self._observation(seen)

    def step(self, action: np.ndarray) -> BaseEnvTimestep:
        action = np.asarray(action, np.int32).reshape(self._sizes.agents)
        self._state, seen, reward, done, won = battle(self._map).step(self._key(), self._state, action)
        info = {}
        if done:
            info = {'eval_episode_return': np.array([won], np.float32), 'battle_won': bool(won)}
        return BaseEnvTimestep(self._observation(seen), np.asarray(reward, np.float32).reshape(1), bool(done), info)

    def close(self) -> None:
        self._state = None

    @property
    def observation_space(self) -> gym.spaces.Dict:
        agents, obs, state, actions = self._sizes
        shapes = {
            'agent_state': (agents, obs),
            'global_state': (agents, state + agents) if self._special else (state,),
            'action_mask': (agents, actions),
        }
        return gym.spaces.Dict({k: gym.spaces.Box(-np.inf, np.inf, shape, np.float32) for k, shape in shapes.items()})

    @property
    def action_space(self) -> gym.spaces.MultiDiscrete:
        return gym.spaces.MultiDiscrete([self._sizes.actions] * self._sizes.agents)

    @property
    def reward_space(self) -> gym.spaces.Box:
        return gym.spaces.Box(0.0, 2.0, (1,), np.float32)

    def _key(self) -> np.ndarray:
        return self._random.randint(0, 2**32, size=2, dtype=np.uint32)

    def _observation(self, seen: Tuple[Any, Any, Any]) -> Observation:
        # Copy, because JAX's arrays are read-only.
        agent, state, mask = (np.array(each, np.float32) for each in seen)
        if self._special:
            count = self._sizes.agents
            state = np.concatenate([np.tile(state, (count, 1)), np.eye(count, dtype=np.float32)], axis=1)
        return {'agent_state': agent, 'global_state': state, 'action_mask': mask}

    def __repr__(self) -> str:
        return f'SMAXEnv({self._map})'


class Battle(NamedTuple):
    """Compiled functions of one map."""

    reset: Any
    step: Any


@functools.cache
def battle(map_name: str) -> Battle:
    """Return the functions of a map. All envs of this process share them, because each compilation takes seconds."""
    with redirect_stdout(io.StringIO()):  # the import prints its missing submodules
        need('jaxmarl', 'smax')
        from jaxmarl.environments.smax import map_name_to_scenario
        from jaxmarl.environments.smax.heuristic_enemy_smax_env import HeuristicEnemySMAX
    import jax
    import jax.numpy as jnp

    # A battle of 16 units is too small for an accelerator, and the learner may need the whole device.
    jax.config.update('jax_platforms', 'cpu')
    keep_compiled()
    game = HeuristicEnemySMAX(scenario=map_name_to_scenario(map_name))
    names = game.agents

    def seen(state: Any, obs: Dict[str, Any]) -> Tuple[Any, Any, Any]:
        available = game.get_avail_actions(state)
        return jnp.stack([obs[n] for n in names]), obs['world_state'], jnp.stack([available[n] for n in names])

    def reset(key: Any) -> Tuple[Any, Any]:
        obs, state = game.reset(key)
        return state, seen(state, obs)

    def step(key: Any, state: Any, action: Any) -> Tuple[Any, Any, Any, Any, Any]:
        # Do not use ``game.step``: it resets by itself, and returns the next battle's first observation at the end.
        obs, state, reward, done, _ = game.step_env(key, state, {n: action[i] for i, n in enumerate(names)})
        alive = state.state.unit_alive
        won = jnp.any(alive[: len(names)]) & ~jnp.any(alive[len(names) :])
        return state, seen(state, obs), reward[names[0]], done['__all__'], won

    return Battle(jax.jit(reset), jax.jit(step))


def keep_compiled() -> None:
    """
    Keep compiled code in the temporary directory for other processes of this user. A home directory may be shared by
    machines with other processors. If JAX has a cache already, use that.
    """
    import jax

    if jax.config.jax_compilation_cache_dir:
        return
    directory = os.path.join(tempfile.gettempdir(), f'ding-store-smax-{os.geteuid()}')
    try:
        own_directory(directory)
    except OSError:  # another user's (ForeignFile), full, or read-only
        return  # each process compiles for itself
    jax.config.update('jax_compilation_cache_dir', directory)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
