"""
# Atari R2D2 through the store

Install the extra: `scripts/setup.sh --extra atari`. One process, Pong. `--config qbert_r2d2` is Qbert:

> python3 -u dizoo_configs/atari/atari_r2d2_main.py

One machine, with one learner, one evaluator and two collectors as separate processes:

> ding-store run --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/atari/atari_r2d2_main.py

Several machines, with a Redis server that all of them reach. Run the first command on the learner's machine, the second
on each of the others:

> ding-store run --store redis://learner-host:6379 --run pong_r2d2 --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/atari/atari_r2d2_main.py
> ding-store join --store redis://learner-host:6379 --run pong_r2d2 --role collector -- python3 -u dizoo_configs/atari/atari_r2d2_main.py

One machine, with processes that DI-engine starts:

> ditask --package . --main dizoo_configs.atari.atari_r2d2_main.main --parallel-workers 4 --topology mesh

DI-engine's config pipeline, in one process:

> ding -m serial -c dizoo_configs/atari/pong_r2d2_config.py -s 0

DI-engine's R2D2 example samples single steps and groups them, so it has no priorities of sequences and no overlaps.
Here elements are sequences with the recurrent state before each step, as in DI-engine's config pipeline.

With `--checkpoint`, a learner that crashes resumes from its last checkpoint. If all processes were killed, run the same
command again to resume.

The flag is `main_config.store`. With `enable=False` or `--stock`, this is plain DI-engine on the same elements.

Plain DI-engine, with processes that it starts itself:

> python3 -u dizoo_configs/atari/atari_r2d2_main.py --stock --parallel-workers 4
"""  # noqa: E501

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
    run(main, options(main, CONFIGS, can_checkpoint=True))
