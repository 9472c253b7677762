"""Advantage estimator of the learner, for experience on its way into a replay (off-policy PPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, Optional

from ding.data import Buffer
from ding.framework import task
from ding.framework.middleware.functional import advantage_estimator
from ditk import logging

from ding_store.buffer.store_buffer import StoreBuffer
from ding_store.middleware.ingest_plan import Pusher
from ding_store.middleware.plain_parts import stock

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

stock_estimator = stock(advantage_estimator.gae_estimator)


def gae_estimator(cfg: Any, policy: Any, buffer_: Optional[Buffer] = None) -> Callable:
    """
    Overview:
        Create the middleware that estimates advantages from the policy's values, in place of DI-engine's
        ``gae_estimator``. It pushes all steps of a chunk into the buffer at once, with the consumer offset. After a
        kill the buffer has all of them or none.
    Input of ctx:
        - trajectories (:obj:`List`): Steps with ``obs``, ``next_obs``, ``reward``, ``done``.
        - trajectory_end_idx (:obj:`List[int]`): Indices of the last steps of trajectories that were cut off.
    Output of ctx:
        - train_data: All steps, if there is no ``buffer_``.
    """
    if not isinstance(buffer_, StoreBuffer) or (task.router.is_active and not task.has_role(task.role.LEARNER)):
        return stock_estimator(cfg, policy, buffer_)
    return AdvantagePusher(cfg, policy, buffer_)


class AdvantagePusher(Pusher):
    """Estimates the advantages of a chunk's steps, and pushes the steps at once. ``gae_estimator`` makes it."""

    def __init__(self, cfg: Any, policy: Any, buffer_: StoreBuffer) -> None:
        super().__init__(buffer_)
        self._pushed = _Pushed()
        self._estimate = stock_estimator(cfg, policy, self._pushed)

    def __call__(self, ctx: OnlineRLContext) -> None:
        note, meta = self.replay.take_note(), self.replay.meta
        if ctx.trajectories:
            self._estimate(ctx)
        ctx.trajectories = None
        elements = self._pushed.take()
        metas = None if meta is None else [dict(meta) for _ in elements]
        self.replay.buffer.extend_elements(elements, metas, commit=note)

    def push_columns(self) -> None:
        logging.info('ding_store: advantages are estimated from elements, so each chunk becomes ctx.trajectories')


class _Pushed:
    """Stands in for the buffer, and collects the elements that DI-engine's estimator pushes one by one."""

    def __init__(self) -> None:
        self._elements: List[Any] = []

    def push(self, element: Any) -> None:
        self._elements.append(element)

    def take(self) -> List[Any]:
        elements, self._elements = self._elements, []
        return elements
