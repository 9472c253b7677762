"""Base class of the learner's, collectors' and evaluators' exchangers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generator, Optional

from ding.framework import task
from ditk import logging

from ding_store.errors import StoreError
from ding_store.middleware.ingest_plan import IngestPlan
from ding_store.middleware.leave_on_signal import leave_on_signal
from ding_store.middleware.task_stop import before_stop, failure, is_failing, spare_mesh
from ding_store.run.recording import check_names_ragged
from ding_store.run.session import RunSession

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext


class Exchanger:
    """Base of the exchangers: joins the run as a member and handles the run's end."""

    role = ''
    #: True if the run ends when a process of this role fails.
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
        before_stop('exchanger', self._stop, self._ends_mesh)
        if self.role != 'learner':  # a learner ends at a signal, after its last checkpoint
            leave_on_signal(session)

    def _end(self, reason: str) -> None:
        task.finish = True

    def _ends_mesh(self) -> bool:
        """Return True if the other processes of the mesh finish when this one fails."""
        return self.is_vital and not self._session.is_lost and not self._session.is_started_again

    def _stop(self) -> None:
        """Finish this role's work, or report its failure to the run, before the task stops."""
        if not is_failing():
            if self._session.leaves_alone:
                self._leave_alone(task.ctx)
            elif self._ingest_plan is not None:
                self._close_for_writing(task.ctx)
            return
        try:
            self._session.leave(failed=True, reason=failure())
        except StoreError as lost:
            logging.warning(f'ding_store: the failure of this process could not be reported to the run: {lost}')

    def __call__(self, ctx: OnlineRLContext) -> Generator:
        if self._ingest_plan is None:
            if self._session.config.record is not None:
                check_names_ragged(self._session.replays)
            self._ingest_plan = IngestPlan(task, self)
            self._begin(ctx, self._ingest_plan)
            self._start_records()
            self._session.on_finish(self._end)  # last, because the run may have ended already: _end is then called now
        self._session.show_health()
        self._ingest_plan.idle = not self._receive(ctx)
        yield
        if not self._ingest_plan.idle:
            self._send(ctx)
        if task.finish:
            if self._session.is_lost:
                spare_mesh()  # to the others, "finish" says that the run has ended in order
            self._close_for_writing(ctx)
        elif self._session.leaves_alone:
            self._leave_alone(ctx)

    def _leave_alone(self, ctx: OnlineRLContext) -> None:
        """Leave a run that goes on, after all that this process has appended is delivered."""
        if not self._closed_for_writing:
            self._closed_for_writing = True
            spare_mesh()
            self._leave(ctx)
            self._session.leave(reason='it was asked to leave')
            task.finish = True

    def _begin(self, ctx: OnlineRLContext, plan: IngestPlan) -> None:
        """Prepare this side. Called once, when the pipeline is complete and about to run for the first time."""

    def _start_records(self) -> None:
        """Start to record the figures of the run. Called once, after ``_begin``."""

    def _close_for_writing(self, ctx: OnlineRLContext) -> None:
        if not self._closed_for_writing:
            self._closed_for_writing = True
            self._session.finish(self._reason(ctx))
            self._leave(ctx)

    def _receive(self, ctx: OnlineRLContext) -> bool:
        """Wait for the input of this role and put it into ctx. Return False if the run ends without input."""
        raise NotImplementedError

    def _send(self, ctx: OnlineRLContext) -> None:
        raise NotImplementedError

    def _reason(self, ctx: OnlineRLContext) -> str:
        return f'{self.role} finished at env step {ctx.env_step}, train iteration {ctx.train_iter}'

    def _leave(self, ctx: OnlineRLContext) -> None:
        """Finish this role's work for the run. Called once, after the last iteration."""
