"""Qbert, IMPALA: the differences from Pong's."""

import copy

from ding_store import enable
from dizoo_configs.atari import pong_impala_config as pong

main_config, create_config = copy.deepcopy((pong.main_config, pong.create_config))
main_config.exp_name = 'qbert_impala_seed0'
main_config.env.update(env_id='QbertNoFrameskip-v4', stop_value=int(1e10))
main_config.policy.unroll_len = 32
main_config.policy.learn.update(clip_value=5, learning_rate=0.0003)
enable(main_config, create_config)
