"""
# SMAC 3s5z QMIX through the store

In StarCraft II, with the extra `smac` and the game (see starcraft_env.py). One process:

> python3 -u dizoo_configs/smac/smac_3s5z_qmix_main.py

On SMAX, with only the extra `smax`:

> python3 -u dizoo_configs/smac/smac_3s5z_qmix_main.py --config smax_3s5z_qmix

`--help` lists the options, and the commands for several processes and machines. All of them also take `--config
smax_3s5z_qmix`. With the flag off, this is plain DI-engine, except for the policy: its transitions are trees of tensors
(policies.py).

An element is a sequence of `collect.unroll_len` steps. Collectors cut the sequences, so that entries hold what the
learner replays.
"""

from ding.framework import task
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator
from ding.model import QMix

from ding_store.middleware.trajectories import Unroller
from dizoo_configs.builder import count_in_steps, start
from dizoo_configs.command import DEFAULTS, Options, options, run
from dizoo_configs.smac.policies import TaskQMIXPolicy

CONFIGS = ['dizoo_configs.smac.smac_3s5z_qmix_config', 'dizoo_configs.smac.smax_3s5z_qmix_config']


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg, parts = loop.cfg, loop.parts
        length = cfg.policy.collect.unroll_len
        count_in_steps(cfg, length)
        model = QMix(**cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = TaskQMIXPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(Unroller(length))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=10, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
