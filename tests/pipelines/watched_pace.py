"""
The CartPole main (docs: dizoo_configs/cartpole), given as its arguments; after each of its learner's iterations the
counts of the rate limiter are appended to the file that PACE_TRACE names, and after each of a collector's how often it
has found the learner behind.
"""

import json
import os

from ding.framework import task

from ding_store.buffer import StoreBuffer
from ding_store.middleware.backpressure import Backpressure
from dizoo_configs.cartpole import cartpole_dqn_main as script
from dizoo_configs.command import options

record = {'waits': 0, 'limited': []}
stock_wait_within_lead, stock_limiter, stock_run = Backpressure.wait_within_lead, StoreBuffer.limiter, task.run


def wait_within_lead(self, timeout_s):
    found = stock_wait_within_lead(self, timeout_s)
    record['waits'] += found is None
    return found


def set_limiter(self, limiter):
    record['limited'].append(limiter)
    stock_limiter.fset(self, limiter)


def write(**said):
    with open(os.environ['PACE_TRACE'], 'a') as out:
        out.write(json.dumps({'node': task.router.node_id, **said}) + '\n')


def watch(ctx):
    if record['limited']:
        limiter = record['limited'][-1]
        write(size=limiter._size(), train_iter=ctx.train_iter, **limiter.state())
    else:
        write(waits=record['waits'])


def run():
    task.use(watch)
    stock_run()


Backpressure.wait_within_lead, task.run = wait_within_lead, run
StoreBuffer.limiter = stock_limiter.setter(set_limiter)
if __name__ == '__main__':
    script.main(options(script.main, script.CONFIGS))
