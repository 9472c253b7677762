"""
# CartPole DQN through the store

One process (`--help` lists the options of all commands below). `--config cartpole_dqn_per` samples by priority:

> python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py

One machine, with one learner, one evaluator and two collectors as separate processes:

> ding-store run --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py

The same, with processes that DI-engine starts:

> ditask --package . --main dizoo_configs.cartpole.cartpole_dqn_main.main --parallel-workers 4 --topology mesh

Another collector for a running job on this machine. A job that DI-engine started takes its run's
name from exp_name, so add `--run cartpole_dqn_seed0`:

> ding-store join --role collector -- python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py

Several machines, with a Redis server that all of them reach. Run the first command on the learner's machine, the second
on each of the others. With `join --wait` these may start first:

> ding-store run --store redis://learner-host:6379 --run cartpole_dqn --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py
> ding-store join --store redis://learner-host:6379 --run cartpole_dqn --role collector -- python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py

With `--checkpoint` at the end of these commands, a learner that crashes resumes from its last checkpoint. If all
processes were killed, run the same command again to resume.

The flag is `main_config.store`. With `enable=False` or `--stock`, this is plain DI-engine.

Plain DI-engine, with processes that it starts itself:

> python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py --stock --parallel-workers 4
"""  # noqa: E501

import gym
from ding.envs import DingEnvWrapper
from ding.framework import task
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator
from ding.model import DQN
from ding.policy import DQNPolicy

from ding_store.middleware.trajectories import nstep_returns
from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = ['dizoo_configs.cartpole.cartpole_dqn_config', 'dizoo_configs.cartpole.cartpole_dqn_per_config']


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
    run(main, options(main, CONFIGS, can_checkpoint=True))
