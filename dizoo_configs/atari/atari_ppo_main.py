"""
# Atari PPO (off-policy) through the store

Install the extra: `scripts/setup.sh --extra atari`. One process, Qbert:

> python3 -u dizoo_configs/atari/atari_ppo_main.py

`--help` lists the options, and the commands for several processes and machines. `--config pong_ppo` is Pong.

The learner estimates advantages and pushes them into its replay, which uses a step at most `max_use` times. A
checkpoint keeps the use counts.

DI-engine's config pipeline, in one process:

> ding -m serial -c dizoo_configs/atari/qbert_ppo_config.py -s 0
"""

from ding.framework import task
from ding.framework.middleware import StepCollector, interaction_evaluator
from ding.model import VAC
from ding.policy import PPOOffPolicy

from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = ['dizoo_configs.atari.qbert_ppo_config', 'dizoo_configs.atari.pong_ppo_config']


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg, parts = loop.cfg, loop.parts
        model = VAC(**cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = PPOOffPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(parts.gae_estimator(cfg, policy.collect_mode, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=100, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
