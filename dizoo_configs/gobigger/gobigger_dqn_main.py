"""
# GoBigger DQN through the store

Install the extra: `scripts/setup.sh --extra gobigger`. One process (`--help` lists the options of all commands below):

> python3 -u dizoo_configs/gobigger/gobigger_dqn_main.py

One machine, with one learner, one evaluator and two collectors as separate processes:

> ding-store run --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/gobigger/gobigger_dqn_main.py

Another collector for a running job on this machine:

> ding-store join --role collector -- python3 -u dizoo_configs/gobigger/gobigger_dqn_main.py

Several machines, with a Redis server that all of them reach. Run the first command on the learner's machine, the second
on each of the others. With `join --wait` these may start first:

> ding-store run --store redis://learner-host:6379 --run gobigger --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/gobigger/gobigger_dqn_main.py
> ding-store join --store redis://learner-host:6379 --run gobigger --role collector -- python3 -u dizoo_configs/gobigger/gobigger_dqn_main.py

With `--checkpoint`, a learner that crashes resumes from its last checkpoint. If all processes were killed, run the same
command again to resume.

The flag is `main_config.store`. With `enable=False` or `--stock`, this is plain DI-engine, with its own
prioritized replay.

Plain DI-engine, with processes that it starts itself:

> python3 -u dizoo_configs/gobigger/gobigger_dqn_main.py --stock --parallel-workers 4
"""  # noqa: E501

from ding.framework import task
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator
from ding.model import create_model

from dizoo_configs.builder import start
from dizoo_configs.command import DEFAULTS, Options, options, run
from dizoo_configs.gobigger.gobigger_policy import GoBiggerDQNPolicy

CONFIGS = ['dizoo_configs.gobigger.gobigger_dqn_config']


def main(given: Options = DEFAULTS) -> None:
    with start(given, CONFIGS[0]) as loop:
        cfg, parts = loop.cfg, loop.parts
        model = create_model(cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = GoBiggerDQNPolicy(cfg.policy, model=model)

        loop.use_exchangers(model)
        task.use(interaction_evaluator(cfg, policy.eval_mode, loop.evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, loop.collector_env))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        loop.run(policy, show_freq=10, save_freq=1000)


if __name__ == '__main__':
    run(main, options(main, CONFIGS, can_checkpoint=True))
