"""Pong in the style of Ape-X: prioritized DQN, an epsilon per collector, first priorities from the collectors."""

import copy

from ding_store import enable
from dizoo_configs.atari import pong_dqn_per_config as per

main_config, create_config = copy.deepcopy((per.main_config, per.create_config))
main_config.exp_name = 'pong_apex_seed0'
# The learner trains without waiting for experience, and collectors do not wait for the learner.
main_config.store.update(train_ratio='free')
main_config.policy.other.apex = dict(num_collectors=8, base=0.4, alpha=7.0)
main_config.policy.learn.batch_size = 128
enable(main_config, create_config)
