"""
A pipeline whose collectors write down what they see and do in their first iterations: ``first_chunks.py LOG``. The
first one collects at random; all that the env says is by chance, of its own, numpy's, Python's and torch's generator.
"""

import copy
import json
import os
import random
import sys
import time

import gym
import numpy as np
import torch
from ding.config import compile_config
from ding.data import DequeBuffer
from ding.envs import BaseEnv, BaseEnvManagerV2, BaseEnvTimestep
from ding.framework import ding_init, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import ContextExchanger, StepCollector, data_pusher
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.utils import set_pkg_seed
from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

RANDOM, CHUNKS = 64, 3


class Lottery(BaseEnv):
    """Keeps a generator, as SMAX and GoBigger do, and seeds numpy's, as dizoo's envs do."""

    observation_space = gym.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    reward_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)

    def __init__(self):
        self.own = np.random.RandomState(0)

    def seed(self, seed, dynamic_seed=True):
        self.own = np.random.RandomState(seed)
        np.random.seed(seed)

    def reset(self):
        return self.draw()

    def step(self, action):
        return BaseEnvTimestep(self.draw(), np.zeros(1, np.float32), False, {})

    def close(self):
        pass

    def __repr__(self):
        return 'Lottery()'

    def draw(self):
        return np.array([self.own.rand(), np.random.rand(), random.random(), float(torch.rand(()))], np.float32)


def collector():
    """The compiled config, and what collects."""
    config = copy.deepcopy(main_config)
    config.exp_name = 'first_chunks'
    config.policy.collect.n_sample = 8
    config.policy.learn.batch_size = 8
    cfg = compile_config(config, seed=0, create_cfg=create_config, auto=True, save_cfg=False)
    env = BaseEnvManagerV2([Lottery] * 2, cfg.env.manager)
    set_pkg_seed(cfg.seed, use_cuda=False)
    model = DQN(**cfg.policy.model)
    policy = DQNPolicy(cfg.policy, model=model)
    return cfg, StepCollector(cfg, policy.collect_mode, env, random_collect_size=RANDOM)


def chunk(ctx):
    """Its observations, a column for each generator, and its actions."""
    columns = zip(*(step.obs.tolist() for step in ctx.trajectories))
    return [*map(list, columns), [int(step.action) for step in ctx.trajectories]]


def main(log):
    def write_down(**what):
        with open(log, 'a') as out:
            out.write(json.dumps({'pid': os.getpid(), **what}) + '\n')

    def written(key):
        with open(log) as lines:
            return sum(key in json.loads(line) for line in lines if line.endswith('\n'))  # the last may be half there

    def begin(ctx):
        if ctx.total_step == 0:
            write_down(began=True)

    def end(ctx):
        if ctx.total_step < CHUNKS:
            write_down(step=ctx.total_step, chunk=chunk(ctx))

    def wait_for_both(ctx):
        # A collector that comes when others have collected enough at random explores no more.
        deadline = time.monotonic() + 150
        while written('began') < 2:
            assert time.monotonic() < deadline, 'no second collector'
            time.sleep(0.02)
        task.finish = written('chunk') == 2 * CHUNKS

    with task.start(async_mode=False, ctx=OnlineRLContext()):
        collects = task.router.node_id != 0
        task.add_role(task.role.COLLECTOR if collects else task.role.LEARNER)
        task.use(ContextExchanger(skip_n_iter=1))
        cfg, made = collector()
        ding_init(cfg)
        if collects:
            task.use(begin)
        task.use(explore)
        task.use(made)
        task.use(end if collects else wait_for_both)
        task.use(data_pusher(cfg, DequeBuffer(size=1000)))
        task.run()


def explore(ctx):
    ctx.collect_kwargs['eps'] = 0.5


if __name__ == '__main__':
    main(sys.argv[1])
