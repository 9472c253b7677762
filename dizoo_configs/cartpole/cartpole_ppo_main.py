"""
# CartPole PPO (on-policy) through the store

One process:

> python3 -u dizoo_configs/cartpole/cartpole_ppo_main.py

`--help` lists the options, and the commands for several processes and machines.

The learner has no replay to keep. When it resumes from a checkpoint, it receives the data of its last iteration again.
"""

import gym
from ding.envs import DingEnvWrapper
from ding.framework import task
from ding.framework.middleware import StepCollector, gae_estimator, interaction_evaluator, multistep_trainer
from ding.model import VAC
from ding.policy import PPOPolicy

from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = ['dizoo_configs.cartpole.cartpole_ppo_config']


def make_env() -> DingEnvWrapper:
    return DingEnvWrapper(gym.make('CartPole-v0'))


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0], make_env) as loop:
        cfg = loop.cfg
        model = VAC(**cfg.policy.model)
        policy = PPOPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(gae_estimator(cfg, policy.collect_mode))
        task.use(multistep_trainer(policy.learn_mode, log_freq=50))
        loop.run(policy, show_freq=10, save_freq=100)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
