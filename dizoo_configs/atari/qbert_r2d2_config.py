"""Qbert, R2D2: the differences from Pong's."""

import copy

from ding_store import enable
from dizoo_configs.atari import pong_r2d2_config as pong

main_config, create_config = copy.deepcopy((pong.main_config, pong.create_config))
main_config.exp_name = 'qbert_r2d2_seed0'
main_config.env.update(env_id='QbertNoFrameskip-v4', stop_value=int(1e6))
enable(main_config, create_config)
