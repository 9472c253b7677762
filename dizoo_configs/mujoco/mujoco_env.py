"""DI-engine's MuJoCo environment on gymnasium's tasks: type 'mujoco_gymnasium'. Imports without the extra."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import gym
import numpy as np
from ding.utils import ENV_REGISTRY
from dizoo.mujoco.envs.mujoco_env import MujocoEnv as StockMujocoEnv

from dizoo_configs.extras import need


class ClassicGym(gym.Env):
    """
    Overview:
        A gymnasium environment with gym 0.25's interface: ``reset`` returns the observation, ``step`` four values.
    Arguments:
        - env_id (:obj:`str`): e.g. 'Hopper-v5'.
    """

    def __init__(self, env_id: str) -> None:
        need('mujoco', 'mujoco')
        self._env = need('gymnasium', 'mujoco').make(env_id, disable_env_checker=True)
        self.observation_space = box(self._env.observation_space)
        self.action_space = box(self._env.action_space)
        self._pending_seed: Optional[int] = None

    def seed(self, seed: Optional[int] = None) -> None:
        self._pending_seed = seed
        self.action_space.seed(seed)

    def reset(self, **kwargs: Any) -> np.ndarray:
        seed, self._pending_seed = self._pending_seed, None
        return self._env.reset(seed=seed)[0]

    def step(self, action: np.ndarray) -> Tuple[np.ndarray, float, bool, Dict[str, Any]]:
        obs, reward, terminated, truncated, info = self._env.step(action)
        if truncated:
            info['TimeLimit.truncated'] = not terminated
        return obs, reward, terminated or truncated, info

    def render(self, mode: str = 'rgb_array') -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


def box(space: Any) -> gym.spaces.Box:
    """Return gymnasium's space as gym's."""
    return gym.spaces.Box(space.low, space.high, space.shape, space.dtype)


@ENV_REGISTRY.register('mujoco_gymnasium')
class MujocoEnv(StockMujocoEnv):
    """
    Overview:
        DI-engine's MujocoEnv with its wrappers on gymnasium's task, because gym 0.25's tasks need mujoco-py or models
        that MuJoCo 3 cannot read. Hopper: observations (11,) float32, actions (3,) in [-1, 1].
    Arguments:
        - cfg (:obj:`EasyDict`): ``env_id``, e.g. 'Hopper-v5'.
    Raises:
        - ModuleNotFoundError: The extra ``mujoco`` is not installed. The text has the command that installs it.
    """

    def __init__(self, cfg: Any) -> None:
        need('mujoco', 'mujoco')
        need('imageio', 'mujoco')  # gym and gymnasium import it even without rendering
        super().__init__(cfg)

    def _make_env(self) -> gym.Env:
        env_id = self._cfg.env_id
        if env_id not in gym.envs.registry:
            gym.register(
                env_id, entry_point=ClassicGym, kwargs={'env_id': env_id}, order_enforce=False, disable_env_checker=True
            )
        return super()._make_env()
