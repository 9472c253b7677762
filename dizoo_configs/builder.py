"""
Builder of the mains: what a process of a job needs around its algorithm's loop.

A main calls ``start``, puts its middleware into DI-engine's task, and calls ``TrainingLoop.run``.
"""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
from ding.config import compile_config
from ding.envs import get_vec_env_setting
from ding.framework import ding_init, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware import online_logger, termination_checker
from ding.framework.task import VoidMiddleware
from ding.utils import set_pkg_seed
from ditk import logging

from ding_store.middleware import Pipeline, pipeline
from ding_store.middleware.plain_saver import stock_saver
from dizoo_configs.command import ENV_MANAGERS, Options


@contextmanager
def start(given: Options, config: str, make_env: Optional[Callable[[], Any]] = None) -> Iterator[TrainingLoop]:
    """
    Overview:
        Prepare this process for its loop: compile the config, start DI-engine's task, make the environments, seed all
        random generators and, in a job of several processes, take this one's role.
    Arguments:
        - given (:obj:`Options`): The options of the command line.
        - config (:obj:`str`): Module of the config, if the options name no other.
        - make_env (:obj:`Optional[Callable]`): Makes one environment. None: the config's own, ``create_config.env``.
    Raises:
        - ConfigError: The options do not fit the config.
        - FileNotFoundError: The game is missing and this process would play it. The text has the fix.
    Examples:
        >>> with start(given, 'dizoo_configs.cartpole.cartpole_dqn_config') as loop:
        >>>     model = DQN(**loop.cfg.policy.model)
        >>>     loop.use_exchangers(model)
        >>>     task.use(...)
        >>>     loop.run(policy, show_freq=10, save_freq=100)
    """
    logging.getLogger().setLevel(logging.INFO)
    main_config, create_config = given.configs(config)
    parts = pipeline(main_config)
    is_first = task.router.node_id == 0
    cfg = compile_config(main_config, seed=given.seed, create_cfg=create_config, auto=True, save_cfg=is_first)
    ding_init(cfg)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        collector_env, evaluator_env = _make_envs(cfg, create_config, make_env)
        set_pkg_seed(cfg.seed, use_cuda=cfg.policy.cuda)
        if task.router.is_active:
            task.add_role(_role())
        yield TrainingLoop(cfg, parts, collector_env, evaluator_env, given)


@dataclass(frozen=True)
class TrainingLoop:
    """
    Overview:
        What the middleware of a main's loop is made from.
    Arguments:
        - cfg (:obj:`EasyDict`): The compiled config.
        - parts (:obj:`Pipeline`): ding_store's middleware and buffers, or DI-engine's own with the flag off.
        - collector_env, evaluator_env (:obj:`BaseEnvManagerV2`): They start their environments at the first use.
        - given (:obj:`Options`): The options of the command line.
    """

    cfg: Any
    parts: Pipeline
    collector_env: Any
    evaluator_env: Any
    given: Options

    def use_exchangers(self, model: torch.nn.Module) -> None:
        """In a job of several processes, exchange experience and the weights of ``model`` with the others."""
        if task.router.is_active:
            task.use(self.parts.ContextExchanger(skip_n_iter=1))
            task.use(self.parts.ModelExchanger(model))

    def run(self, policy: Any, show_freq: int, save_freq: int) -> None:
        """
        Overview:
            Add the middleware that every loop ends with, and run the loop. It ends at the config's stop value, or at a
            limit of the options.
        Arguments:
            - policy (:obj:`Policy`): The policy to save.
            - show_freq (:obj:`int`): Train iterations from one line of the log to the next.
            - save_freq (:obj:`int`): Train iterations from one of DI-engine's checkpoints to the next. Those from which
              a run resumes (``--checkpoint``) are apart, and choose their own moments.
        """
        use_logger(show_freq)
        task.use(stock_saver(policy, self.cfg.exp_name, train_freq=save_freq))
        task.use(self.parts.Checkpointer(policy))
        use_end(self.given)
        task.run()


def count_in_steps(cfg: Any, length: int) -> None:
    """
    Overview:
        Make a compiled config count samples in steps, where DI-engine counts sequences. Use it where collectors cut
        sequences (``Unroller``): these are the replay's elements, and nothing groups steps after it.
    Arguments:
        - length (:obj:`int`): Number of steps in a sequence.
    """
    cfg.policy.collect.update(n_sample=cfg.policy.collect.n_sample * length, unroll_len=1)


def use_logger(show_freq: int) -> None:
    """
    Use DI-engine's online_logger with a copy of the outputs. It pops the newest from ``ctx.train_output``. Plain
    DI-engine's prioritized replay then finds no priorities there (``IndexError: pop from empty list``).
    """
    log = online_logger(train_show_freq=show_freq)
    if isinstance(log, VoidMiddleware):
        return

    @functools.wraps(log)  # it stays a logger, which also runs in iterations without data
    def _logger(ctx: Any) -> None:
        outputs = ctx.train_output
        ctx.train_output = list(outputs) if isinstance(outputs, list) else outputs
        log(ctx)
        ctx.train_output = outputs

    task.use(_logger)


def use_end(given: Options) -> None:
    """Make the learner end the run at the limits of the options."""
    learns = not task.router.is_active or task.has_role(task.role.LEARNER)
    if learns and (given.max_env_step or given.max_train_iter):
        task.use(
            termination_checker(max_env_step=given.max_env_step or None, max_train_iter=given.max_train_iter or None)
        )


def _make_envs(cfg: Any, create_config: Any, make_env: Optional[Callable[[], Any]]) -> List[Any]:
    """Return the env managers of collector and evaluator."""
    manager = ENV_MANAGERS[create_config.env_manager.type]
    if make_env is not None:
        counts = (cfg.env.collector_env_num, cfg.env.evaluator_env_num)
        return [manager([make_env] * count, cfg.env.manager) for count in counts]
    settings: Dict[str, Any] = copy.deepcopy(cfg.env)
    env, *env_cfgs = get_vec_env_setting(settings)
    if hasattr(env, 'need_game') and not (task.router.is_active and _role() == task.role.LEARNER):
        env.need_game()
    return [manager([functools.partial(env, cfg=each) for each in cfgs], cfg.env.manager) for cfgs in env_cfgs]


def _role() -> Any:
    """Return the role by node id, as in DI-engine's examples: 0 learns, 1 evaluates, the others collect."""
    roles = {0: task.role.LEARNER, 1: task.role.EVALUATOR}
    return roles.get(task.router.node_id, task.role.COLLECTOR)
