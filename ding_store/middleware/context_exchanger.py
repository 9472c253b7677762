"""The context exchanger: sends experience to the learner, progress to collectors, and the run's end to all members."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Optional

from ding.framework import task
from ditk import logging

from ding_store.errors import ConfigError
from ding_store.middleware.backpressure import progress_of
from ding_store.middleware.collector_exchanger import CollectorExchanger
from ding_store.middleware.exchanger import Exchanger
from ding_store.middleware.learner_exchanger import LearnerExchanger
from ding_store.middleware.partitions import progress_name_of
from ding_store.run.session import RunSession

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext


def context_exchanger(session: RunSession, skip_n_iter: int = 1, storage_loader: Any = None) -> Any:
    """
    Overview:
        Create the middleware that exchanges ``ctx`` between the processes of a run through the store. It replaces
        DI-engine's ``ContextExchanger``. Create it after ``task.add_role``. Without an active router or a role it does
        nothing, as in DI-engine.
    Arguments:
        - skip_n_iter (:obj:`int`): Iterations of a collector or evaluator that start without waiting for others.
        - storage_loader: Accepted for compatibility and ignored, because messages carry no payloads.
    """
    if not task.router.is_active:
        if session.config.record is not None:
            logging.warning(
                f'ding_store: store.record ({session.config.record!r}) needs a run with roles. This process has all '
                'of them, and records nothing'
            )
        return task.void()
    if len(task.roles) == 0:
        logging.warning('The task does not have any roles defined, the context exchanger will not work.')
        return task.void()
    if session.config.url.startswith('memory:'):
        raise ConfigError(
            f'store.url ({session.config.url!r}) cannot connect several processes. Use embedded:// or redis://.'
        )
    if storage_loader is not None:
        logging.info('ding_store: storage_loader is not needed with the store and is ignored')
    for role, kind in ((task.role.LEARNER, LearnerExchanger), (task.role.COLLECTOR, CollectorExchanger)):
        if task.has_role(role):
            return kind(session, skip_n_iter)
    return FollowerExchanger(session, skip_n_iter)


class FollowerExchanger(Exchanger):
    """Middleware of an evaluator, or of any other role that only reads the learner's progress."""

    role = 'evaluator'

    def __init__(self, session: RunSession, skip_n_iter: int) -> None:
        super().__init__(session, skip_n_iter)
        self._version = 0
        self._progress = progress_name_of(0, session.num_partitions)
        self._last_eval_iter: Optional[int] = None

    def _receive(self, ctx: OnlineRLContext) -> bool:
        if ctx.total_step >= self._skip_n_iter:
            follow = functools.partial(self._follow, ctx)
            self._session.wait_for('progress of the learner', follow, 'learner', 'wait_learner')
        return not self._session.is_leaving

    def _follow(self, ctx: OnlineRLContext, timeout_s: float) -> Optional[bool]:
        value = self._session.store.get(self._progress, self._version, timeout_s)
        if value is None:
            return None
        self._version = value.version
        counts = ('train_iter', 'env_step', 'env_episode')
        progress = progress_of(value, *counts)
        if progress is None:
            return None
        for name in counts:
            setattr(ctx, name, progress[name])
        # A restarted learner is at its last checkpoint, so count the iterations until an evaluation from there.
        if ctx.train_iter < ctx.last_eval_iter:
            ctx.last_eval_iter = self._last_eval_iter = ctx.train_iter
        return True

    def _send(self, ctx: OnlineRLContext) -> None:
        if ctx.last_eval_iter != self._last_eval_iter:
            self._last_eval_iter = ctx.last_eval_iter
            value, iteration = float(ctx.last_eval_value), ctx.last_eval_iter
            self._session.figures(eval_value=value, eval_iter=iteration, eval_step=ctx.env_step)
            # The learner writes the return to TensorBoard. The run may end before the next regular report.
            self._session.report_now()
        self._session.figures(env_step=ctx.env_step, train_iter=ctx.train_iter)

    def _reason(self, ctx: OnlineRLContext) -> str:
        return (
            f'evaluator: mean return {ctx.last_eval_value:.1f} at env step {ctx.env_step}, '
            f'train iteration {ctx.train_iter}'
        )
