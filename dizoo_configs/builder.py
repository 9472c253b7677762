"""Builder of the mains: what each of them needs around its algorithm's loop."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Dict, Tuple

from ding.envs import get_vec_env_setting
from ding.framework import task
from ding.framework.middleware import online_logger, termination_checker
from ding.framework.task import VoidMiddleware

from dizoo_configs.command import ENV_MANAGERS, Options


def make_envs(cfg: Any, create_config: Any) -> Tuple[Any, Any]:
    """
    Make the environments of a config.

    Returns:
        - collector_env, evaluator_env: Env managers. They start their environments at the first use.
    Raises:
        - FileNotFoundError: The game is missing and this process would play it. The text has the fix.
    """
    settings: Dict[str, Any] = copy.deepcopy(cfg.env)
    env, collector_cfgs, evaluator_cfgs = get_vec_env_setting(settings)
    if hasattr(env, 'need_game') and not (task.router.is_active and _role() == task.role.LEARNER):
        env.need_game()
    manager = ENV_MANAGERS[create_config.env_manager.type]
    return (
        manager([partial(env, cfg=each) for each in collector_cfgs], cfg.env.manager),
        manager([partial(env, cfg=each) for each in evaluator_cfgs], cfg.env.manager),
    )


def take_role() -> None:
    task.add_role(_role())


def _role() -> Any:
    """Return the role by node id, as in DI-engine's examples: 0 learns, 1 evaluates, the others collect."""
    roles = {0: task.role.LEARNER, 1: task.role.EVALUATOR}
    return roles.get(task.router.node_id, task.role.COLLECTOR)


def use_logger(train_show_freq: int) -> None:
    """
    Use DI-engine's online_logger with a copy of the outputs. It pops the newest from ``ctx.train_output``. Plain
    DI-engine's prioritized replay then finds no priorities there (``IndexError: pop from empty list``).
    """
    log = online_logger(train_show_freq=train_show_freq)
    if isinstance(log, VoidMiddleware):
        return

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
