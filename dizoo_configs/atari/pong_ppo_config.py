"""Pong, PPO off-policy: the differences from Qbert's."""

import copy

from ding_store import enable
from dizoo_configs.atari import qbert_ppo_config as qbert

main_config, create_config = copy.deepcopy((qbert.main_config, qbert.create_config))
main_config.exp_name = 'pong_ppo_seed0'
main_config.env.update(env_id='PongNoFrameskip-v4', stop_value=20)
enable(main_config, create_config)
