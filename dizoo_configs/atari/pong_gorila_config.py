"""Pong in the style of GORILA (Nair et al. 2015): DQN workers, each with its own replay, one parameter server."""

import copy

from easydict import EasyDict

from ding_store import enable
from dizoo_configs.atari import pong_dqn_config as dqn

main_config, create_config = copy.deepcopy((dqn.main_config, dqn.create_config))
main_config.exp_name = 'pong_gorila_seed0'
main_config.store.learners = EasyDict(sync='async', max_staleness=16)
enable(main_config, create_config)
