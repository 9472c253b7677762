"""
SMAC in StarCraft II itself: dizoo's SMACEnv, as the task pipeline needs it. It takes the extra `smac` and the game,
which no package index has: Blizzard's Linux package (4.10 is what SMAC's results were made with), unpacked to
~/StarCraftII or where SC2PATH says. The maps come with DI-engine.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Dict

import numpy as np
from ding.envs import BaseEnv, BaseEnvTimestep
from ding.utils import ENV_REGISTRY
from easydict import EasyDict

from dizoo_configs.extras import need
from dizoo_configs.smac.game_protocol import importable

Observation = Dict[str, np.ndarray]


def game_class() -> type:
    """
    Overview:
        dizoo's SMACEnv.
    Raises:
        - ModuleNotFoundError: The extra is not installed, with the line that installs it.
    """
    with importable():
        need('pysc2', 'smac')
        from dizoo.smac.envs import smac_action
        from dizoo.smac.envs.smac_env import SMACEnv
    # It says np.bool and np.int, which numpy has not had since 1.24.
    smac_action.np = SimpleNamespace(**{**vars(np), 'bool': np.bool_, 'int': np.int_})
    return SMACEnv


def game_directory() -> str:
    return os.environ.get('SC2PATH', os.path.expanduser('~/StarCraftII'))


def no_game() -> FileNotFoundError:
    return FileNotFoundError(
        f"no StarCraft II in {game_directory()}.\nUnpack Blizzard's Linux package (4.10) there, or say in SC2PATH "
        'where it is.\nWithout the game there is SMAX (scripts/setup.sh --extra smax): the same command with --config '
        'smax_3s5z_qmix, or smax_3s5z_masac.'
    )


@ENV_REGISTRY.register('smac_starcraft')
class StarCraftEnv(BaseEnv):
    """
    Overview:
        A battle in StarCraft II. Observations, rewards and their meaning are those of dizoo's SMACEnv; here they are
        float32, timesteps have the four fields that DI-engine's new env managers unpack, and importing this module
        needs neither the extra nor the game.
    Shapes (3s5z, A=8 agents):
        - agent_state (:obj:`np.ndarray`): ``(A, 150)``.
        - global_state (:obj:`np.ndarray`): ``(216,)``, with ``special_global_state`` ``(A, 295)``.
        - action_mask (:obj:`np.ndarray`): ``(A, 14)``.
        - action (:obj:`np.ndarray`): ``(A,)``, int64.
        - reward (:obj:`np.ndarray`): ``(1,)``; ``info['eval_episode_return']`` is 1 for a battle that was won.
    """

    def __init__(self, cfg: EasyDict) -> None:
        self._env = game_class()(cfg)

    @staticmethod
    def need_game() -> None:
        """
        Overview:
            Look for the game before anything is started that needs it: workers would fail one by one, at length.
        Raises:
            - ModuleNotFoundError: The extra is not installed, with the line that installs it.
            - FileNotFoundError: The game is not there, with what to do about it.
        """
        game_class()
        if not os.path.isdir(os.path.join(game_directory(), 'Versions')):
            raise no_game()

    @property
    def game(self) -> Any:
        """dizoo's SMACEnv."""
        return self._env

    def reset(self) -> Observation:
        """
        Raises:
            - FileNotFoundError: The game is not there, with what to do about it.
        """
        try:
            return as_float32(self._env.reset())
        except FileNotFoundError as error:
            raise no_game() from error

    def step(self, action: np.ndarray) -> BaseEnvTimestep:
        timestep = self._env.step(action)
        if timestep.info.get('abnormal', False):
            # The game has crashed and was started again. The env manager resets an env that raised, if it may retry.
            raise RuntimeError('StarCraft II ended in the middle of a battle; it was started again')
        info = dict(timestep.info, eval_episode_return=np.array([timestep.info['eval_episode_return']], np.float32))
        reward = np.asarray(timestep.reward, np.float32).reshape(1)
        return BaseEnvTimestep(as_float32(timestep.obs), reward, bool(timestep.done), info)

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        # The game takes a seed when it is launched, and goes on from there.
        self._env.seed(seed, dynamic_seed)

    def close(self) -> None:
        # Before its first battle the game has not been launched, and pysc2 has nothing to close.
        if hasattr(self._env, '_controllers'):
            self._env.close()

    @property
    def observation_space(self) -> Any:
        return self._env._observation_space

    @property
    def action_space(self) -> Any:
        return self._env._action_space

    @property
    def reward_space(self) -> Any:
        return self._env._reward_space

    def __repr__(self) -> str:
        return f'StarCraftEnv({self._env._map_name})'


def as_float32(obs: Dict[str, Any]) -> Observation:
    # SMACEnv gives float64; what is stored is what the network reads.
    return {key: np.asarray(value, np.float32) for key, value in obs.items()}
