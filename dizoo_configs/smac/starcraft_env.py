"""
SMAC in StarCraft II itself: dizoo's SMACEnv, adapted to the task pipeline.

It needs the extra `smac` and the game, which no package index has. Unpack Blizzard's Linux package to ~/StarCraftII, or
to the directory in SC2PATH. Version 4.10 is the one of SMAC's results. The maps come with DI-engine.
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
        Return dizoo's SMACEnv.
    Raises:
        - ModuleNotFoundError: The extra is not installed. The text has the command that installs it.
    """
    with importable():
        need('pysc2', 'smac')
        from dizoo.smac.envs import smac_action
        from dizoo.smac.envs.smac_env import SMACEnv
    # It uses np.bool and np.int, which numpy removed in 1.24.
    smac_action.np = SimpleNamespace(**{**vars(np), 'bool': np.bool_, 'int': np.int_})
    return SMACEnv


def game_directory() -> str:
    return os.environ.get('SC2PATH', os.path.expanduser('~/StarCraftII'))


def no_game() -> FileNotFoundError:
    return FileNotFoundError(
        f"no StarCraft II in {game_directory()}.\nUnpack Blizzard's Linux package (4.10) there, or set SC2PATH "
        'to its directory.\nWithout the game, use SMAX (scripts/setup.sh --extra smax): the same command with --config '
        'smax_3s5z_qmix, or smax_3s5z_masac.'
    )


@ENV_REGISTRY.register('smac_starcraft')
class StarCraftEnv(BaseEnv):
    """
    Overview:
        A battle in StarCraft II. Observations, rewards and their meaning are those of dizoo's SMACEnv, but float32.
        Timesteps have the four fields that DI-engine's new env managers unpack. Importing this module needs neither the
        extra nor the game.
    Shapes (3s5z, A=8 agents):
        - agent_state (:obj:`np.ndarray`): ``(A, 150)``.
        - global_state (:obj:`np.ndarray`): ``(216,)``, with ``special_global_state`` ``(A, 295)``.
        - action_mask (:obj:`np.ndarray`): ``(A, 14)``.
        - action (:obj:`np.ndarray`): ``(A,)``, int64.
        - reward (:obj:`np.ndarray`): ``(1,)``. ``info['eval_episode_return']`` is 1 for a battle that was won.
    """

    def __init__(self, cfg: EasyDict) -> None:
        self._env = game_class()(cfg)

    @staticmethod
    def need_game() -> None:
        """
        Overview:
            Check that the game is there before processes start. Otherwise workers fail one by one, after long waits.
        Raises:
            - ModuleNotFoundError: The extra is not installed. The text has the command that installs it.
            - FileNotFoundError: The game is missing. The text has the fix.
        """
        game_class()
        if not os.path.isdir(os.path.join(game_directory(), 'Versions')):
            raise no_game()

    @property
    def game(self) -> Any:
        """dizoo's SMACEnv inside."""
        return self._env

    def reset(self) -> Observation:
        """
        Start a battle.

        Raises:
            - FileNotFoundError: The game is missing. The text has the fix.
        """
        try:
            return as_float32(self._env.reset())
        except FileNotFoundError as error:
            raise no_game() from error

    def step(self, action: np.ndarray) -> BaseEnvTimestep:
        timestep = self._env.step(action)
        if timestep.info.get('abnormal', False):
            # The game crashed and was restarted. The env manager resets an env that raised, if retries are allowed.
            raise RuntimeError('StarCraft II ended in the middle of a battle; it was started again')
        info = dict(timestep.info, eval_episode_return=np.array([timestep.info['eval_episode_return']], np.float32))
        reward = np.asarray(timestep.reward, np.float32).reshape(1)
        return BaseEnvTimestep(as_float32(timestep.obs), reward, bool(timestep.done), info)

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        # The game takes a seed only at its launch, and continues its random sequence from there.
        self._env.seed(seed, dynamic_seed)

    def close(self) -> None:
        # Before its first battle the game is not launched, and pysc2 has nothing to close.
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
    # SMACEnv gives float64. Store what the network reads.
    return {key: np.asarray(value, np.float32) for key, value in obs.items()}
