"""
# SMAC 3s5z MASAC through the store

In StarCraft II, with the extra `smac` and the game (see starcraft_env.py). One process:

> python3 -u dizoo_configs/smac/smac_3s5z_masac_main.py

On SMAX, with only the extra `smax`:

> python3 -u dizoo_configs/smac/smac_3s5z_masac_main.py --config smax_3s5z_masac

`--help` lists the options, and the commands for several processes and machines. All of them also take `--config
smax_3s5z_masac`. With the flag off, this is plain DI-engine, except for the model, which its policy can call
(policies.py).
"""

from ding.framework import task
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator
from ding.model import create_model
from ding.policy import DiscreteSACPolicy

from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = ['dizoo_configs.smac.smac_3s5z_masac_config', 'dizoo_configs.smac.smax_3s5z_masac_config']


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg, parts = loop.cfg, loop.parts
        model = create_model(cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = DiscreteSACPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=10, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
