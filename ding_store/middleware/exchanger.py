"""What the sides of the exchange of experience share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generator, Optional

from ding.framework import task
from ditk import logging

from ding_store.errors import StoreError
from ding_store.middleware.ending import is_failing
from ding_store.middleware.ingest_plan import IngestPlan
from ding_store.middleware.run_session import RunSession

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

STREAM = 'experience'


class Exchanger:
    """What the sides of the exchange share: membership, and the end of the run."""

    role = ''
    #: Whether a failure of one process of this role is the end of the run.
    is_vital = True

    def __init__(self, session: RunSession, skip_n_iter: int) -> None:
        self._session = session
        self._skip_n_iter = skip_n_iter
        self._ingest_plan: Optional[IngestPlan] = None
        router = task.router
        address = getattr(getattr(router, '_mq', None), 'listen_to', None)
        self._member = session.join(self.role, router.node_id, address, router.node_id - (router.local_id or 0))
        self._closed_for_writing = False
        task.on('finish', lambda value: session.finish('another member of the mesh finished'))
        task.stop = self._stop

    def _end(self, reason: str) -> None:
        task.finish = True

    def _stop(self) -> None:
        """
        In place of ``task.stop``, which makes all processes of the mesh finish, also when it was an exception that
        brought this one here: the run must not pass for one that ended in order.
        """
        del task.stop  # from here on the class's own again
        if not is_failing():
            if self._ingest_plan is not None:
                self._close_for_writing(task.ctx)
            task.stop()
            return
        ends_the_run = self.is_vital and not self._session.is_started_again
        try:
            self._session.leave(failed=True)
        except StoreError as lost:
            logging.warning(f'ding_store: nobody could be told that this process failed: {lost}')
        was_active = task.router.is_active
        task.router.is_active = was_active and ends_the_run
        try:
            task.stop()
        finally:
            task.router.is_active = was_active

    def __call__(self, ctx: OnlineRLContext) -> Generator:
        if self._ingest_plan is None:
            self._ingest_plan = IngestPlan(task, self)
            self._begin(ctx, self._ingest_plan)
            self._session.on_finish(self._end)  # not before this side is complete: the end may have come already
        self._ingest_plan.idle = not self._receive(ctx)
        yield
        if not self._ingest_plan.idle:
            self._send(ctx)
        if task.finish:
            self._close_for_writing(ctx)

    def _begin(self, ctx: OnlineRLContext, plan: IngestPlan) -> None:
        """The pipeline is complete, and about to run for the first time."""

    def _close_for_writing(self, ctx: OnlineRLContext) -> None:
        if not self._closed_for_writing:
            self._closed_for_writing = True
            self._session.finish(self._reason(ctx))
            self._leave(ctx)

    def _receive(self, ctx: OnlineRLContext) -> bool:
        """Wait for what this role needs and put it into ctx. False: the run ends, there is nothing to work on."""
        raise NotImplementedError

    def _send(self, ctx: OnlineRLContext) -> None:
        raise NotImplementedError

    def _reason(self, ctx: OnlineRLContext) -> str:
        return f'{self.role} finished at env step {ctx.env_step}, train iteration {ctx.train_iter}'

    def _leave(self, ctx: OnlineRLContext) -> None:
        """The last iteration is over."""
