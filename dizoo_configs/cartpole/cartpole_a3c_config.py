"""CartPole A3C: A2C whose workers go on without waiting for one another (Mnih et al. 2016)."""

import copy

from easydict import EasyDict

from dizoo_configs.cartpole import cartpole_a2c_config as a2c

main_config, create_config = copy.deepcopy((a2c.main_config, a2c.create_config))
main_config.exp_name = 'cartpole_a3c_seed0'
main_config.store.learners = EasyDict(sync='async', max_staleness=8)
