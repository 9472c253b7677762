"""
# SMAC 3s5z QMIX through the store

In StarCraft II, with the extra `smac` and the game (see starcraft_env.py). One process (`--help` lists the options):

> python3 -u dizoo_configs/smac/smac_3s5z_qmix_main.py

On SMAX, with only the extra `smax`. All commands below also take `--config smax_3s5z_qmix`:

> python3 -u dizoo_configs/smac/smac_3s5z_qmix_main.py --config smax_3s5z_qmix

One machine, with one learner, one evaluator and two collectors as separate processes:

> ding-store run --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/smac/smac_3s5z_qmix_main.py

Another collector for a running job on this machine:

> ding-store join --role collector -- python3 -u dizoo_configs/smac/smac_3s5z_qmix_main.py

Several machines, with a Redis server that all of them reach. Run the first command on the learner's machine, the second
on each of the others. With `join --wait` these may start first:

> ding-store run --store redis://learner-host:6379 --run smac_qmix --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/smac/smac_3s5z_qmix_main.py
> ding-store join --store redis://learner-host:6379 --run smac_qmix --role collector -- python3 -u dizoo_configs/smac/smac_3s5z_qmix_main.py

With `--checkpoint`, a learner that crashes resumes from its last checkpoint. If all processes were killed, run the same
command again to resume.

The flag is `main_config.store`. With `enable=False` or `--stock`, this is plain DI-engine, except for the policy:
its transitions are trees of tensors (policies.py). An element is a sequence of `collect.unroll_len` steps. Collectors
cut the sequences, so that entries hold what the learner replays.

Plain DI-engine, with processes that it starts itself:

> python3 -u dizoo_configs/smac/smac_3s5z_qmix_main.py --stock --parallel-workers 4
"""  # noqa: E501

import copy

from ding.config import compile_config
from ding.framework import ding_init, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator, online_logger
from ding.model import QMix
from ding.utils import set_pkg_seed
from ditk import logging

from ding_store.middleware.pipeline import pipeline
from ding_store.middleware.plain_saver import stock_saver
from ding_store.middleware.trajectories import Unroller
from dizoo_configs.builder import make_envs, take_role, use_end
from dizoo_configs.command import DEFAULTS, Options, options, run
from dizoo_configs.smac.policies import TaskQMIXPolicy

CONFIGS = ['dizoo_configs.smac.smac_3s5z_qmix_config', 'dizoo_configs.smac.smax_3s5z_qmix_config']


def main(given: Options = DEFAULTS) -> None:
    logging.getLogger().setLevel(logging.INFO)
    main_config, create_config = given.configs(CONFIGS[0])
    parts = pipeline(main_config)
    is_first = task.router.node_id == 0
    cfg = compile_config(main_config, seed=given.seed, create_cfg=create_config, auto=True, save_cfg=is_first)
    ding_init(cfg)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        collector_env, evaluator_env = make_envs(cfg, create_config)

        set_pkg_seed(cfg.seed, use_cuda=cfg.policy.cuda)

        model = QMix(**cfg.policy.model)
        buffer_ = parts.replay(cfg)
        policy = TaskQMIXPolicy(cfg.policy, model=model)

        if task.router.is_active:
            take_role()
            task.use(parts.ContextExchanger(skip_n_iter=1))
            task.use(parts.ModelExchanger(model))

        task.use(interaction_evaluator(cfg, policy.eval_mode, evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, collector_env))
        task.use(Unroller(cfg.policy.collect.unroll_len))
        task.use(parts.data_pusher(cfg, buffer_))
        # DI-engine's fetcher would group steps to sequences. Here the elements are sequences already.
        of_sequences = copy.deepcopy(cfg)
        of_sequences.policy.collect.unroll_len = 1
        task.use(parts.OffPolicyLearner(of_sequences, policy.learn_mode, buffer_))
        task.use(online_logger(train_show_freq=10))
        task.use(stock_saver(policy, cfg.exp_name, train_freq=1000))
        task.use(parts.Checkpointer(policy))
        use_end(given)
        task.run()


if __name__ == '__main__':
    run(main, options(main, CONFIGS, can_checkpoint=True))
