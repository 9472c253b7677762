"""
DI-engine's hindsight replay on whole episodes, of its own parts (ding/example/dqn_her.py, with roles). What the
learner's buffer holds at the end is written to the file named by --trace.
"""

import argparse
import json

from ding.config import compile_config
from ding.data import DequeBuffer
from ding.envs import BaseEnvManagerV2
from ding.framework import ding_init, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import (
    ContextExchanger,
    EpisodeCollector,
    HERLearner,
    ModelExchanger,
    data_pusher,
    eps_greedy_handler,
    termination_checker,
)
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.reward_model import HerRewardModel
from ding.utils import set_pkg_seed
from dizoo.bitflip.config.bitflip_her_dqn_config import create_config, main_config
from dizoo.bitflip.envs import BitFlipEnv

parser = argparse.ArgumentParser()
parser.add_argument('--trace', required=True)
parser.add_argument('--max-train-iter', type=int, default=40)
options = parser.parse_args()


def main():
    main_config.exp_name = 'tiny_her'
    main_config.policy.model.encoder_hidden_size_list = [16, 16]
    main_config.policy.learn.update_per_collect = 5
    main_config.policy.other.her.episode_size = 8
    cfg = compile_config(main_config, create_cfg=create_config, auto=True, save_cfg=False)
    ding_init(cfg)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        env = BaseEnvManagerV2([lambda: BitFlipEnv(cfg.env) for _ in range(4)], cfg.env.manager)
        set_pkg_seed(cfg.seed, use_cuda=False)
        model = DQN(**cfg.policy.model)
        buffer_ = DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
        policy = DQNPolicy(cfg.policy, model=model)
        roles = {0: task.role.LEARNER}
        task.add_role(roles.get(task.router.node_id, task.role.COLLECTOR))
        task.use(ContextExchanger(skip_n_iter=1))
        task.use(ModelExchanger(model))
        task.use(eps_greedy_handler(cfg))
        if task.has_role(task.role.COLLECTOR):  # unlike StepCollector it does not look for itself
            task.use(EpisodeCollector(cfg, policy.collect_mode, env))
        task.use(data_pusher(cfg, buffer_))
        her = HerRewardModel(cfg.policy.other.her)
        task.use(HERLearner(cfg, policy.learn_mode, buffer_, her))
        if task.has_role(task.role.LEARNER):
            task.use(termination_checker(max_train_iter=options.max_train_iter))
        task.run()
        if task.has_role(task.role.LEARNER):
            episodes = [[bool(step.done) for step in item.data] for item in buffer_]
            ids = [{int(step.env_data_id) for step in item.data} for item in buffer_]
            with open(options.trace, 'w') as out:
                json.dump(
                    dict(
                        dones=episodes,
                        ids=[sorted(each) for each in ids],
                        env_episode=task.ctx.env_episode,
                        train_iter=task.ctx.train_iter,
                        kind=type(buffer_).__name__,
                    ),
                    out,
                )


if __name__ == '__main__':
    main()
