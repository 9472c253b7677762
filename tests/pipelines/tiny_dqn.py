"""
A small CartPole DQN pipeline of DI-engine's own parts, for tests of how it runs on the store. Knobs come as arguments;
what each role saw is appended as JSON lines to the file named by --trace.
"""

import argparse
import json
import os
import time

import gym
import torch
from ding.config import compile_config
from ding.data import DequeBuffer
from ding.envs import BaseEnvManagerV2, DingEnvWrapper
from ding.framework import ding_init, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import (
    CkptSaver,
    ContextExchanger,
    ModelExchanger,
    OffPolicyLearner,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    interaction_evaluator,
    nstep_reward_enhancer,
    termination_checker,
    wandb_online_logger,
)
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.utils import set_pkg_seed
from ditk import logging
from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

parser = argparse.ArgumentParser()
parser.add_argument('--trace', required=True)
parser.add_argument('--max-train-iter', type=int)
parser.add_argument('--until', metavar='FILE', help='the learner trains until it is there')
parser.add_argument('--nstep', type=int, default=0, help='put nstep_reward_enhancer into the pipeline')
parser.add_argument('--watch', action='store_true', help='a middleware of the user before the pusher')
parser.add_argument('--fail', type=int, metavar='NODE', help='this node raises in its 20th iteration')
parser.add_argument('--broken', type=int, nargs='*', default=[], metavar='NODE', help='these nodes raise at the start')
parser.add_argument('--collect-s', type=float, default=0.0, help='seconds that each collection takes longer')
parser.add_argument('--train-s', type=float, default=0.0, help='the same for an iteration of the learner')
parser.add_argument('--obs', type=int, default=4, help='columns of the observation, to make collectors differ')
parser.add_argument('--ckpt', action='store_true', help='use CkptSaver')
parser.add_argument('--wandb', action='store_true', help="use DI-engine's logger for W&B")
options = parser.parse_args()


def trace(**record):
    with open(options.trace, 'a') as out:
        out.write(json.dumps({'pid': os.getpid(), 'node': task.router.node_id, **record}) + '\n')


def watch(ctx):
    shapes = [list(t.reward.shape) for t in ctx.trajectories]
    trace(event='watch', rows=len(shapes), reward=shapes[0], env_ids=[int(t.env_data_id) for t in ctx.trajectories])


def begin(ctx):
    if ctx.total_step == 0:
        trace(event='begin', env_step=ctx.env_step, eps=ctx.collect_kwargs['eps'])


def collect_slowly(ctx):
    time.sleep(options.collect_s)


def train_slowly(ctx):
    time.sleep(options.train_s)


def wider(ctx):
    for t in ctx.trajectories:
        t.obs = torch.cat([t.obs, torch.zeros(options.obs - 4)])


def fail(ctx):
    if ctx.total_step == 20:
        raise RuntimeError('as asked for by --fail')


def until(ctx):
    if os.path.exists(options.until):
        task.finish = True


def main():
    if task.router.is_active and task.router.node_id in options.broken:
        raise RuntimeError('as asked for by --broken')
    logging.getLogger().setLevel(logging.INFO)
    main_config.exp_name = 'tiny_dqn'
    main_config.policy.model.encoder_hidden_size_list = [32, 32]
    main_config.policy.nstep = max(1, options.nstep)
    main_config.policy.eval.evaluator.eval_freq = 100
    if options.max_train_iter or options.until:
        main_config.env.stop_value = 1e9  # it ends there, and not as soon as the policy is good enough
    cfg = compile_config(main_config, create_cfg=create_config, auto=True, save_cfg=False)
    ding_init(cfg)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        envs = [
            BaseEnvManagerV2([lambda: DingEnvWrapper(gym.make('CartPole-v0')) for _ in range(n)], cfg.env.manager)
            for n in (cfg.env.collector_env_num, cfg.env.evaluator_env_num)
        ]
        set_pkg_seed(cfg.seed, use_cuda=False)
        model = DQN(**cfg.policy.model)
        buffer_ = DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
        policy = DQNPolicy(cfg.policy, model=model)
        if task.router.is_active:
            roles = {0: task.role.LEARNER, 1: task.role.EVALUATOR}
            task.add_role(roles.get(task.router.node_id, task.role.COLLECTOR))
            task.use(ContextExchanger(skip_n_iter=1))
            task.use(ModelExchanger(model))
        task.use(interaction_evaluator(cfg, policy.eval_mode, envs[1]))
        task.use(eps_greedy_handler(cfg))
        if task.router.is_active and task.has_role(task.role.COLLECTOR):
            task.use(begin)
        if options.collect_s and task.has_role(task.role.COLLECTOR):
            task.use(collect_slowly)
        task.use(StepCollector(cfg, policy.collect_mode, envs[0]))
        if options.obs != 4 and task.has_role(task.role.COLLECTOR):
            task.use(wider)
        if options.nstep:
            task.use(nstep_reward_enhancer(cfg))
        if options.watch and task.has_role(task.role.LEARNER):
            task.use(watch)
        task.use(data_pusher(cfg, buffer_))
        if not options.nstep:  # rewards enhanced on both sides, as in stock parallel mode, are no input for this policy
            task.use(OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        if options.train_s and task.has_role(task.role.LEARNER):
            task.use(train_slowly)
        if options.ckpt:
            task.use(CkptSaver(policy, 'tiny_dqn', train_freq=200))
        if options.fail == task.router.node_id:
            task.use(fail)
        if options.max_train_iter and task.has_role(task.role.LEARNER):
            task.use(termination_checker(max_train_iter=options.max_train_iter))
        if options.until and task.has_role(task.role.LEARNER):
            task.use(until)
        if options.wandb:
            task.use(wandb_online_logger(exp_config=cfg, metric_list=['total_loss'], model=model, project_name='tiny'))
        task.run()
        trace(
            event='end',
            roles=[role.value for role in task.roles],
            env_step=task.ctx.env_step,
            train_iter=task.ctx.train_iter,
            replay=buffer_.count(),
        )


if __name__ == '__main__':
    main()
