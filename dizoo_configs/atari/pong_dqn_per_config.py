"""Pong, DQN with 3-step returns and prioritized replay: the differences from uniform sampling."""

import copy

from easydict import EasyDict

from ding_store import enable
from dizoo_configs.atari import pong_dqn_config as uniform

main_config, create_config = copy.deepcopy((uniform.main_config, uniform.create_config))
main_config.exp_name = 'pong_dqn_per_seed0'
main_config.policy.update(priority=True, priority_IS_weight=True)
main_config.policy.other.replay_buffer.update(alpha=0.6, beta=0.4)
# For runs with the flag off: DI-engine's 'deque' has its own priorities, which the policy's do not reach.
create_config.replay_buffer = EasyDict(type='advanced')
enable(main_config, create_config)
