"""DI-engine's Atari environment on ``ale-py``: type 'atari_ale'. Worker processes find it by ``import_names``."""

from __future__ import annotations

from functools import partial
from typing import Any, List
from unittest import mock

import gym
from ding.envs import WarpFrameWrapper
from ding.utils import ENV_REGISTRY

from ding_store.errors import ConfigError
from dizoo_configs.atari.ale_game import register
from dizoo_configs.extras import need

try:
    from dizoo.atari.envs import atari_wrappers
    from dizoo.atari.envs.atari_env import AtariEnv as StockAtariEnv
except ModuleNotFoundError as error:
    if error.name != 'cv2':
        raise

    class StockAtariEnv:
        """
        Placeholder for DI-engine's AtariEnv if the extra is missing: the module imports, and the class names the extra.
        """

        @classmethod
        def create_collector_env_cfg(cls, cfg: Any) -> List[Any]:
            raise AssertionError(f'{need("cv2", "atari")} was missing a moment ago')

        create_evaluator_env_cfg = create_collector_env_cfg


#: Smaller frames have no pixels left after the three convolutions of DI-engine's ConvEncoder.
MIN_FRAME_SIZE = 36


@ENV_REGISTRY.register('atari_ale')
class AtariEnv(StockAtariEnv):
    """
    Overview:
        DI-engine's AtariEnv with all its wrappers on our game. Observations (4, 84, 84) float32 in [0, 1], exact
        multiples of 1/255. In training, a lost life ends an episode, and rewards are -1, 0 or 1.
    Arguments:
        - cfg (:obj:`EasyDict`): ``env_id``, e.g. 'PongNoFrameskip-v4'. ``frame_stack``. ``is_train``. ``frame_size``,
          the width and height of the resized frames, by default 84.
    Raises:
        - ModuleNotFoundError: The extra ``atari`` is not installed. The text has the command that installs it.
        - ConfigError: ``frame_size`` is not a size that DI-engine's encoder can take.
    """

    config = dict(frame_stack=4, frame_size=84, obs_plus_prev_action_reward=False)

    def __new__(cls, *args: Any, **kwargs: Any) -> AtariEnv:
        need('ale_py', 'atari')
        need('cv2', 'atari').setNumThreads(1)  # one frame is too small for threads, and there are many environments
        return super().__new__(cls)

    @classmethod
    def obs_shape(cls, cfg: Any) -> List[int]:
        """Return the shape of a model's input from an environment with this config."""
        size = cfg.get('frame_size', cls.config['frame_size'])
        return [cfg.get('frame_stack', cls.config['frame_stack']), size, size]

    def _make_env(self) -> gym.Env:
        register(self._cfg.env_id)
        size = self._cfg.get('frame_size', self.config['frame_size'])
        if not isinstance(size, int) or size < MIN_FRAME_SIZE:
            raise ConfigError(f'env.frame_size ({size!r}) must be an integer of at least {MIN_FRAME_SIZE}')
        # DI-engine's wrapping function has no argument for the size.
        with mock.patch.object(atari_wrappers, 'WarpFrameWrapper', partial(WarpFrameWrapper, size=size)):
            return super()._make_env()
