"""
# CartPole DQN through the store

One process (`--help` lists the options, for all that follows too):

> python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py

One machine, one learner, one evaluator and two collectors as processes of their own:

> ding-store run --roles learner=1,evaluator=1,collector=2 -- python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py

The same, started by DI-engine:

> ditask --package . --main dizoo_configs.cartpole.cartpole_dqn_main.main --parallel-workers 4 --topology mesh

Another collector for a running job, on this host or another (there, with the `redis://` URL of the job's store);
a job that DI-engine started has the run `cartpole_dqn_seed0`, by its exp_name, and needs `--run cartpole_dqn_seed0`:

> ding-store join --role collector -- python3 -u dizoo_configs/cartpole/cartpole_dqn_main.py

With `--checkpoint` at the end of these commands a learner that is killed goes on from its last checkpoint, and so does
the same command after everything was killed.

The flag is `main_config.store`; with `enable=False` this is stock DI-engine.
"""

import argparse

import gym
from ding.config import compile_config
from ding.envs import BaseEnvManagerV2, DingEnvWrapper
from ding.framework import ding_init, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import CkptSaver, StepCollector, eps_greedy_handler, interaction_evaluator, online_logger
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.utils import set_pkg_seed
from ditk import logging

from ding_store.middleware.pipeline import pipeline
from dizoo_configs.cartpole.cartpole_dqn_config import create_config, main_config


def main(seed: int = 0, checkpoint: bool = False) -> None:
    logging.getLogger().setLevel(logging.INFO)
    main_config.store.checkpoint = main_config.store.get('checkpoint', False) or checkpoint
    parts = pipeline(main_config)
    cfg = compile_config(main_config, seed=seed, create_cfg=create_config, auto=True, save_cfg=task.router.node_id == 0)
    ding_init(cfg)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        collector_env = BaseEnvManagerV2(
            env_fn=[lambda: DingEnvWrapper(gym.make('CartPole-v0')) for _ in range(cfg.env.collector_env_num)],
            cfg=cfg.env.manager,
        )
        evaluator_env = BaseEnvManagerV2(
            env_fn=[lambda: DingEnvWrapper(gym.make('CartPole-v0')) for _ in range(cfg.env.evaluator_env_num)],
            cfg=cfg.env.manager,
        )

        set_pkg_seed(cfg.seed, use_cuda=cfg.policy.cuda)

        model = DQN(**cfg.policy.model)
        buffer_ = parts.DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
        policy = DQNPolicy(cfg.policy, model=model)

        if task.router.is_active:
            if task.router.node_id == 0:
                task.add_role(task.role.LEARNER)
            elif task.router.node_id == 1:
                task.add_role(task.role.EVALUATOR)
            else:
                task.add_role(task.role.COLLECTOR)
            task.use(parts.ContextExchanger(skip_n_iter=1))
            task.use(parts.ModelExchanger(model))

        task.use(interaction_evaluator(cfg, policy.eval_mode, evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, collector_env))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        task.use(online_logger(train_show_freq=10))
        task.use(CkptSaver(policy, cfg.exp_name, train_freq=100))
        task.use(parts.Checkpointer(policy))
        task.run()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='CartPole DQN through the store; see the top of this file.')
    parser.add_argument('-s', '--seed', type=int, default=0)
    parser.add_argument('--checkpoint', action='store_true', help='survive the death of any process')
    main(**vars(parser.parse_args()))
