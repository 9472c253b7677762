"""
# Atari R2D2 through the store

Install the extra: `scripts/setup.sh --extra atari`. One process, Pong:

> python3 -u dizoo_configs/atari/atari_r2d2_main.py

`--help` lists the options, and the commands for several processes and machines. `--config qbert_r2d2` is Qbert.

DI-engine's R2D2 example samples single steps and groups them, so it has no priorities of sequences and no overlaps.
Here elements are sequences with the recurrent state before each step, as in DI-engine's config pipeline. With the flag
off, this is plain DI-engine on the same elements.

DI-engine's config pipeline, in one process:

> ding -m serial -c dizoo_configs/atari/pong_r2d2_config.py -s 0
"""

from ding.framework import task
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator
from ding.model import DRQN
from ding.policy import R2D2Policy

from ding_store.middleware.trajectories import Unroller
from dizoo_configs.builder import count_in_steps, start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = ['dizoo_configs.atari.pong_r2d2_config', 'dizoo_configs.atari.qbert_r2d2_config']


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg, parts = loop.cfg, loop.parts
        length = cfg.policy.burnin_step + cfg.policy.learn_unroll_len
        count_in_steps(cfg, length)
        model = DRQN(**cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = R2D2Policy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(Unroller(length, cfg.policy.collect.overlap, cfg.policy.nstep, cfg.policy.discount_factor))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=100, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
