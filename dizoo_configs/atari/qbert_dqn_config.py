"""Qbert, DQN with 3-step returns: the differences from Pong's."""

import copy

from ding_store import enable
from dizoo_configs.atari import pong_dqn_config as pong

main_config, create_config = copy.deepcopy((pong.main_config, pong.create_config))
main_config.exp_name = 'qbert_dqn_seed0'
main_config.env.update(env_id='QbertNoFrameskip-v4', stop_value=30000)
main_config.policy.collect.n_sample = 100
main_config.policy.other.eps.decay = 1000000
main_config.policy.other.replay_buffer.replay_buffer_size = 400000
enable(main_config, create_config)
