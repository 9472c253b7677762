"""Advantage estimator of the learner, for experience on its way into a replay (off-policy PPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, Optional

from ding.data import Buffer
from ding.framework import task
from ding.framework.middleware.functional import advantage_estimator
from ditk import logging

from ding_store.buffer.store_buffer import StoreBuffer
from ding_store.middleware.ingest_plan import PUSH_COLUMNS, REPLAY, Replay
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
    replay, pushed = Replay(buffer_), _Pushed()
    estimate = stock_estimator(cfg, policy, pushed)

    def _gae(ctx: OnlineRLContext) -> None:
        note, meta = replay.take_note(), replay.meta
        if ctx.trajectories:
            estimate(ctx)
        ctx.trajectories = None
        elements = pushed.take()
        metas = None if meta is None else [dict(meta) for _ in elements]
        buffer_.extend_elements(elements, metas, commit=note)

    def takes_no_columns() -> None:
        logging.info('ding_store: advantages are estimated from elements, so each chunk becomes ctx.trajectories')

    setattr(_gae, PUSH_COLUMNS, takes_no_columns)
    setattr(_gae, REPLAY, replay)
    return _gae


class _Pushed:
    """Stands in for the buffer, and collects the elements that DI-engine's estimator pushes one by one."""

    def __init__(self) -> None:
        self._elements: List[Any] = []

    def push(self, element: Any) -> None:
        self._elements.append(element)

    def take(self) -> List[Any]:
        elements, self._elements = self._elements, []
        return elements
