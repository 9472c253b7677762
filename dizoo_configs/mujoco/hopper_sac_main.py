"""
# Hopper SAC through the store

Install the extra: `scripts/setup.sh --extra mujoco`. One process:

> python3 -u dizoo_configs/mujoco/hopper_sac_main.py

`--help` lists the options, and the commands for several processes and machines.

DI-engine's config pipeline, in one process:

> ding -m serial -c dizoo_configs/mujoco/hopper_sac_config.py -s 0
"""

from ding.framework import task
from ding.framework.middleware import StepCollector, interaction_evaluator
from ding.model import ContinuousQAC
from ding.policy import SACPolicy

from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = ['dizoo_configs.mujoco.hopper_sac_config']


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg, parts = loop.cfg, loop.parts
        model = ContinuousQAC(**cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = SACPolicy(cfg.policy, model=model)
        num_random = cfg.policy.random_collect_size

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env, random_collect_size=num_random))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=100, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
