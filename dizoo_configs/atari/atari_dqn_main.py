"""
# Atari DQN through the store

Install the extra: `scripts/setup.sh --extra atari`. One process, Pong:

> python3 -u dizoo_configs/atari/atari_dqn_main.py

`--help` lists the options, and the commands for several processes and machines. `--config qbert_dqn` is Qbert, `--config
pong_dqn_per` and `qbert_dqn_per` sample by priority, `pong_apex` is in the style of Ape-X.

Ape-X style (Horgan et al. 2018): each collector has its own epsilon and computes the first priorities of its
transitions. The learner trains as fast as it can. Set `policy.other.apex.num_collectors` to their number:

> ding-store run --roles learner=1,evaluator=1,collector=8 -- python3 -u dizoo_configs/atari/atari_dqn_main.py --config pong_apex

In the style of GORILA (Nair et al. 2015), each worker collects, has its own replay and computes gradients:

> ding-store run --roles worker=4 -- python3 -u dizoo_configs/atari/atari_dqn_main.py --config pong_gorila

DI-engine's config pipeline, in one process:

> ding -m serial -c dizoo_configs/atari/pong_dqn_config.py -s 0
"""  # noqa: E501

from ding.framework import task
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator
from ding.model import DQN
from ding.policy import DQNPolicy

from ding_store.middleware.trajectories import apex_epsilon, first_priorities, nstep_returns
from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run

CONFIGS = [
    f'dizoo_configs.atari.{name}_config'
    for name in ('pong_dqn', 'qbert_dqn', 'pong_dqn_per', 'qbert_dqn_per', 'pong_apex', 'pong_gorila')
]


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg, parts = loop.cfg, loop.parts
        model = DQN(**cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = DQNPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(apex_epsilon(cfg) if 'apex' in cfg.policy.other else eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(nstep_returns(cfg))
        task.use(first_priorities(cfg, model))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=100, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS))
