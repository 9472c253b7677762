"""
# Atari IMPALA through the store

Install the extra: `scripts/setup.sh --extra atari`. One process, Pong. `--config qbert_impala` is Qbert:

> python3 -u dizoo_configs/atari/atari_impala_main.py

One machine, with one learner, one evaluator and two collectors as separate processes:

> ding-store run --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/atari/atari_impala_main.py

Several machines, with a Redis server that all of them reach. Run the first command on the learner's machine, the second
on each of the others:

> ding-store run --store redis://learner-host:6379 --run pong_impala --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/atari/atari_impala_main.py
> ding-store join --store redis://learner-host:6379 --run pong_impala --role collector -- python3 -u dizoo_configs/atari/atari_impala_main.py

One machine, with processes that DI-engine starts:

> ditask --package . --main dizoo_configs.atari.atari_impala_main.main --parallel-workers 4 --topology mesh

DI-engine's config pipeline, in one process:

> ding -m serial -c dizoo_configs/atari/pong_impala_config.py -s 0

Trajectories wait in a queue, and the learner trains on each of them once. `--set policy.other.replay_buffer.max_use=3
--set policy.other.replay_buffer.sampler=auto` uses each up to three times, in random order.

With `--checkpoint`, a learner that crashes resumes from its last checkpoint, with the use counts of its replay. If all
processes were killed, run the same command again to resume.

The flag is `main_config.store`. With `enable=False` or `--stock`, this is plain DI-engine, whose buffer has no
queue order.

Plain DI-engine, with processes that it starts itself:

> python3 -u dizoo_configs/atari/atari_impala_main.py --stock --parallel-workers 4
"""  # noqa: E501

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
    run(main, options(main, CONFIGS, can_checkpoint=True))
