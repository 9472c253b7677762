"""
# CartPole DQN through the store

One process:

> python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py

`--help` lists the options, and the commands for several processes and machines. `--config cartpole_dqn_per` samples by
priority.

In the style of GORILA (Nair et al. 2015), each worker collects, has its own replay and computes gradients:

> ding-store run --roles worker=2 -- python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py --config cartpole_gorila
"""

import gym
from ding.envs import DingEnvWrapper
from ding.framework import task
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator
from ding.model import DQN
from ding.policy import DQNPolicy

from ding_store.middleware.trajectories import nstep_returns
from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = [f'dizoo_configs.cartpole.{name}_config' for name in ('cartpole_dqn', 'cartpole_dqn_per', 'cartpole_gorila')]


def make_env() -> DingEnvWrapper:
    return DingEnvWrapper(gym.make('CartPole-v0'))


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0], make_env) as loop:
        cfg, parts = loop.cfg, loop.parts
        model = DQN(**cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = DQNPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        if cfg.policy.nstep > 1:
            task.use(nstep_returns(cfg))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=10, save_freq=100)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
