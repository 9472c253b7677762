"""Atari games for gym 0.25 on today's ``ale-py``, which supports only gymnasium. Imports without ale-py."""

from __future__ import annotations

import re
from typing import Any, Dict, Optional, Tuple

import gym
import numpy as np

from dizoo_configs.extras import need

#: Emulated frames after which a game ends, at 60 a second: half an hour (Machado et al. 2018, section 3.2).
MAX_FRAMES = 108_000


class ALEGame(gym.Env):
    """
    Overview:
        One Atari game: screens (210, 160, 3) uint8, the game's own actions, no repeated action, one frame per step.
        gym calls it ``<Game>NoFrameskip-v4``.
    Arguments:
        - rom (:obj:`str`): The game's name in ale-py, e.g. 'space_invaders'.
    Raises:
        - ModuleNotFoundError: The extra ``atari`` is not installed. The text has the command that installs it.
        - ValueError: There is no such game.
    """

    metadata = {'render_modes': ['rgb_array']}

    def __init__(self, rom: str) -> None:
        ale_py = need('ale_py', 'atari')
        roms = need('ale_py.roms', 'atari')
        if rom not in roms.get_all_rom_ids():
            raise ValueError(f'no Atari game {rom!r}; ale-py has: {", ".join(sorted(roms.get_all_rom_ids()))}')
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat('repeat_action_probability', 0.0)
        self.ale.setInt('max_num_frames_per_episode', MAX_FRAMES)
        self._rom_path = str(roms.get_rom_path(rom))
        self._load(0)
        self._actions = self.ale.getMinimalActionSet()
        self._pending_seed: Optional[int] = None
        height, width = self.ale.getScreenDims()
        self.observation_space = gym.spaces.Box(0, 255, (height, width, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(len(self._actions))

    def seed(self, seed: Optional[int] = None) -> None:
        """
        Keep a seed for the next game. The emulator takes a seed only with the ROM, which takes 84 ms and restarts the
        game. DI-engine seeds before every reset, even after a lost life.
        """
        self._pending_seed = seed

    def reset(self, **kwargs: Any) -> np.ndarray:
        if self._pending_seed is not None:
            self._load(self._pending_seed % 2**31)
            self._pending_seed = None
        self.ale.reset_game()
        return self.ale.getScreenRGB()

    def step(self, action: int) -> Tuple[np.ndarray, float, bool, Dict[str, Any]]:
        reward = float(self.ale.act(self._actions[int(action)]))
        return self.ale.getScreenRGB(), reward, bool(self.ale.game_over()), {'lives': self.ale.lives()}

    def render(self, mode: str = 'rgb_array') -> np.ndarray:
        return self.ale.getScreenRGB()

    def get_action_meanings(self) -> list:
        return [action.name for action in self._actions]

    def _load(self, seed: int) -> None:
        self.ale.setInt('random_seed', seed)
        self.ale.loadROM(self._rom_path)


def register(env_id: str) -> None:
    """
    Overview:
        Register an id of the form ``<Game>NoFrameskip-v4`` with gym in this process, if it is not registered.
    Raises:
        - ValueError: The id has another form.
    """
    match = re.fullmatch(r'(\w+)NoFrameskip-v4', env_id)
    if match is None:
        raise ValueError(f'env_id ({env_id!r}) must be <Game>NoFrameskip-v4, such as PongNoFrameskip-v4')
    if env_id not in gym.envs.registry:
        rom = re.sub(r'(?<!^)(?=[A-Z])', '_', match.group(1)).lower()
        # gym's own checkers would run in every step, and support only the new API.
        gym.register(env_id, entry_point=ALEGame, kwargs={'rom': rom}, order_enforce=False, disable_env_checker=True)
