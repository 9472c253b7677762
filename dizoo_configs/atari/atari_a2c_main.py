"""
# Pong A2C and A3C, trained by workers

Install the extra: `scripts/setup.sh --extra atari`. One process:

> python3 -u dizoo_configs/atari/atari_a2c_main.py

Four workers, each of which collects and trains. `--config pong_a2c` steps with the mean of all gradients (A2C),
`pong_a3c` with each worker's as they come (A3C):

> ding-store run --roles worker=4 -- python3 -u dizoo_configs/atari/atari_a2c_main.py --config pong_a3c

`--help` lists the options, and the commands for several processes and machines.
"""

from ding.framework import task
from ding.framework.middleware import StepCollector, gae_estimator, interaction_evaluator, trainer
from ding.model import VAC
from ding.policy import A2CPolicy

from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = ['dizoo_configs.atari.pong_a2c_config', 'dizoo_configs.atari.pong_a3c_config']


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg = loop.cfg
        model = VAC(**cfg.policy.model)
        policy = A2CPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(gae_estimator(cfg, policy.collect_mode))
        task.use(trainer(cfg, policy.learn_mode, log_freq=500))
        loop.run(policy, show_freq=100, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
