"""CartPole's DQN; its learner writes down the priorities it begins with: ``cartpole_priorities.py LOG OPTION...``."""

import json
import os
import sys

from ding_store.middleware.consumer_offset import ConsumerOffset
from dizoo_configs.cartpole import cartpole_dqn_main as cartpole
from dizoo_configs.command import options

log, *sys.argv[1:] = sys.argv[1:]
keep_in = ConsumerOffset.keep_in


def keep_in_and_write_down(self, replay, *args):
    keep_in(self, replay, *args)
    state = {name: array.tolist() for name, array in replay.buffer.sampler.state().items()}
    with open(log, 'a') as out:
        out.write(json.dumps({'pid': os.getpid(), 'rows': replay.buffer.count(), 'state': state}) + '\n')


ConsumerOffset.keep_in = keep_in_and_write_down
cartpole.main(options(cartpole.main, cartpole.CONFIGS))
