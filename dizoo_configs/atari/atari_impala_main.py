"""
# Atari IMPALA through the store

Install the extra: `scripts/setup.sh --extra atari`. One process, Pong:

> python3 -u dizoo_configs/atari/atari_impala_main.py

`--help` lists the options, and the commands for several processes and machines. `--config qbert_impala` is Qbert.

Trajectories wait in a queue, and the learner trains on each of them once. `--set policy.other.replay_buffer.max_use=3
--set policy.other.replay_buffer.sampler=auto` uses each up to three times, in random order. A checkpoint keeps the use
counts. Plain DI-engine's buffer has no queue order.

DI-engine's config pipeline, in one process:

> ding -m serial -c dizoo_configs/atari/pong_impala_config.py -s 0
"""

from ding.framework import task
from ding.framework.middleware import StepCollector, interaction_evaluator
from ding.model import VAC
from ding.policy import IMPALAPolicy

from ding_store.middleware.trajectories import Unroller
from dizoo_configs.builder import count_in_steps, start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = ['dizoo_configs.atari.pong_impala_config', 'dizoo_configs.atari.qbert_impala_config']


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg, parts = loop.cfg, loop.parts
        length = cfg.policy.unroll_len
        count_in_steps(cfg, length)
        model = VAC(**cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = IMPALAPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(Unroller(length))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=100, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
