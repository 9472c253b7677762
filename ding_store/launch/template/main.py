"""
Train a DQN on the environment of env.py: in one process, or in one process per role. The README has the commands.
"""

from ding.config import compile_config
from ding.envs import BaseEnvManagerV2, DingEnvWrapper
from ding.framework import ding_init, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import StepCollector, eps_greedy_handler, interaction_evaluator, online_logger
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.utils import set_pkg_seed
from ditk import logging
from easydict import EasyDict
from env import Reach

from ding_store.middleware import pipeline

main_config = EasyDict(
    exp_name='my_project',  # directory of DI-engine's logs, TensorBoard files and checkpoints
    store=dict(enable=True),  # the settings of ding_store. With enable=False, this is plain DI-engine
    env=dict(
        collector_env_num=4,  # environments in each collector
        evaluator_env_num=4,
        n_evaluator_episode=20,  # episodes of one evaluation
        stop_value=0.7,  # the run ends when the mean return of an evaluation is this high
    ),
    policy=dict(  # DQNPolicy lists all keys and their defaults
        cuda=False,
        model=dict(obs_shape=2, action_shape=3, encoder_hidden_size_list=[64, 64]),  # as in env.py
        discount_factor=0.95,
        learn=dict(update_per_collect=4, batch_size=64, learning_rate=0.002),
        collect=dict(n_sample=16),  # steps that a collector sends at once: one chunk
        eval=dict(evaluator=dict(eval_freq=100)),  # train iterations between two evaluations
        other=dict(
            eps=dict(type='linear', start=1.0, end=0.1, decay=2000),  # share of random actions, over env steps
            replay_buffer=dict(replay_buffer_size=10000),  # steps
        ),
    ),
)
create_config = EasyDict(env_manager=dict(type='base'), policy=dict(type='dqn'))


def make_envs(number: int, cfg: EasyDict) -> BaseEnvManagerV2:
    """Return environments that are stepped together. DingEnvWrapper turns a gymnasium environment into DI-engine's."""
    return BaseEnvManagerV2([lambda: DingEnvWrapper(Reach()) for _ in range(number)], cfg.env.manager)


def main() -> None:
    logging.getLogger().setLevel(logging.INFO)  # logs show evaluations and losses
    parts = pipeline(main_config)  # the parts of ding_store, or those of DI-engine
    is_first = task.router.node_id == 0
    cfg = compile_config(main_config, create_cfg=create_config, auto=True, save_cfg=is_first)
    ding_init(cfg)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        # The same program runs in each process. Each makes all parts, and its role decides which of them act.
        collector_env = make_envs(cfg.env.collector_env_num, cfg)
        evaluator_env = make_envs(cfg.env.evaluator_env_num, cfg)
        set_pkg_seed(cfg.seed, use_cuda=cfg.policy.cuda)
        model = DQN(**cfg.policy.model)
        buffer_ = parts.DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
        policy = DQNPolicy(cfg.policy, model=model)

        if task.router.is_active:  # several processes: the node id gives the role
            roles = {0: task.role.LEARNER, 1: task.role.EVALUATOR}
            task.add_role(roles.get(task.router.node_id, task.role.COLLECTOR))
            task.use(parts.ContextExchanger(skip_n_iter=1))  # experience: from collectors to the learner
            task.use(parts.ModelExchanger(model))  # weights: from the learner to the others

        # One iteration runs these in turn, until the evaluator has seen the stop value.
        task.use(interaction_evaluator(cfg, policy.eval_mode, evaluator_env))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, collector_env))
        task.use(parts.data_pusher(cfg, buffer_))
        task.use(parts.OffPolicyLearner(cfg, policy.learn_mode, buffer_))
        task.use(online_logger(train_show_freq=100))
        task.use(parts.CkptSaver(policy, cfg.exp_name, train_freq=500))  # saves, and resumes with --checkpoint
        task.run()


if __name__ == '__main__':
    main()
