"""
A small CartPole A2C pipeline of DI-engine's own parts, unmodified, for tests of workers. What each worker saw is
appended as JSON lines to the file named by --trace.
"""

import argparse
import json
import os

import gym
from ding.config import compile_config
from ding.envs import BaseEnvManagerV2, DingEnvWrapper
from ding.framework import ding_init, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import (
    CkptSaver,
    StepCollector,
    gae_estimator,
    interaction_evaluator,
    termination_checker,
    trainer,
)
from ding.model import VAC
from ding.policy import A2CPolicy
from ding.utils import set_pkg_seed
from ditk import logging
from dizoo.classic_control.cartpole.config.cartpole_a2c_config import create_config, main_config

parser = argparse.ArgumentParser()
parser.add_argument('--trace', required=True)
parser.add_argument('--max-train-iter', type=int)
options = parser.parse_args()


def trace(**record):
    with open(options.trace, 'a') as out:
        out.write(json.dumps({'pid': os.getpid(), **record}) + '\n')


def watch(ctx):
    if ctx.total_step < 3:
        trace(event='collected', obs=[round(float(each), 4) for each in ctx.trajectories[0].obs])


def main():
    logging.getLogger().setLevel(logging.INFO)
    main_config.exp_name = 'tiny_a2c'
    main_config.env.update(collector_env_num=2, evaluator_env_num=1, n_evaluator_episode=1, stop_value=1e9)
    main_config.policy.model.encoder_hidden_size_list = [16, 64]
    main_config.policy.collect.n_sample = 16
    main_config.policy.learn.batch_size = 8
    main_config.policy.eval.evaluator.eval_freq = 20
    cfg = compile_config(main_config, create_cfg=create_config, auto=True, save_cfg=True)
    ding_init(cfg)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        envs = [
            BaseEnvManagerV2([lambda: DingEnvWrapper(gym.make('CartPole-v0')) for _ in range(n)], cfg.env.manager)
            for n in (2, 1)
        ]
        set_pkg_seed(cfg.seed, use_cuda=False)
        policy = A2CPolicy(cfg.policy, model=VAC(**cfg.policy.model))
        task.use(interaction_evaluator(cfg, policy.eval_mode, envs[1]))
        task.use(StepCollector(cfg, policy.collect_mode, envs[0]))
        task.use(watch)
        task.use(gae_estimator(cfg, policy.collect_mode))
        task.use(trainer(cfg, policy.learn_mode, log_freq=100))
        task.use(CkptSaver(policy, 'tiny_a2c', train_freq=200))
        task.use(termination_checker(max_train_iter=options.max_train_iter))
        task.run()
        trace(
            event='end',
            env_step=task.ctx.env_step,
            train_iter=task.ctx.train_iter,
            evaluations=int(task.ctx.last_eval_iter),
        )


if __name__ == '__main__':
    main()
