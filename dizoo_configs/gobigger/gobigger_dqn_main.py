"""
# GoBigger DQN through the store

Install the extra: `scripts/setup.sh --extra gobigger`. One process:

> python3 -u dizoo_configs/gobigger/gobigger_dqn_main.py

`--help` lists the options, and the commands for several processes and machines. With the flag off, this is plain
DI-engine, with its own prioritized replay.
"""

from ding.framework import task
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator
from ding.model import create_model

from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run
from dizoo_configs.gobigger.gobigger_policy import GoBiggerDQNPolicy

CONFIGS = ['dizoo_configs.gobigger.gobigger_dqn_config']


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg, parts = loop.cfg, loop.parts
        model = create_model(cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = GoBiggerDQNPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=10, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
