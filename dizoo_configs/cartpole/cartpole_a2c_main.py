"""
# CartPole A2C and A3C, trained by workers

One process:

> python3 -u dizoo_configs/cartpole/cartpole_a2c_main.py

Two workers, each of which collects and trains. `--config cartpole_a2c` steps with the mean of all gradients (A2C),
`cartpole_a3c` with each worker's as they come (A3C):

> ding-store run --roles worker=2 -- python3 -u dizoo_configs/cartpole/cartpole_a2c_main.py --config cartpole_a3c

`--help` lists the options, and the commands for several processes and machines.
"""

import gym
from ding.envs import DingEnvWrapper
from ding.framework import task
from ding.framework.middleware import StepCollector, gae_estimator, interaction_evaluator, trainer
from ding.model import VAC
from ding.policy import A2CPolicy

from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = ['dizoo_configs.cartpole.cartpole_a2c_config', 'dizoo_configs.cartpole.cartpole_a3c_config']


def make_env() -> DingEnvWrapper:
    return DingEnvWrapper(gym.make('CartPole-v0'))


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0], make_env) as loop:
        cfg = loop.cfg
        model = VAC(**cfg.policy.model)
        policy = A2CPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(gae_estimator(cfg, policy.collect_mode))
        task.use(trainer(cfg, policy.learn_mode, log_freq=50))
        loop.run(policy, show_freq=50, save_freq=500)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
