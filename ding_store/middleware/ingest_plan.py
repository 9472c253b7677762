"""Ingest plan: checks the middleware after the exchanger for direct ingest, and skips it if there is no data."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from ding.framework import Task
from ditk import logging

from ding_store.middleware.insert_ratio import warn_of_no_ratio

#: Attribute of ding_store's middleware that may stand before the pusher because it uses no trajectories.
USES_NO_TRAJECTORIES = '__ding_store_harmless__'
#: Attributes of ding_store's pusher. One returns its function for whole columns, or None. The other is its ``Replay``.
PUSH_COLUMNS, REPLAY = '__ding_store_push_columns__', '__ding_store_replay__'
#: Modules of middleware that also runs in iterations without data: savers and loggers.
FINAL_MODULES = (
    'ding.framework.middleware.ckpt_handler',
    'ding.framework.middleware.functional.logger',
    'ding.framework.middleware.functional.ctx_helper',
    'ding_store.middleware.checkpoint',
)


class Replay:
    """
    Overview:
        The buffer of a pusher, and the note that the next push commits.
    Attributes:
        - note (:obj:`Optional[dict]`): Committed with the next push.
        - meta (:obj:`Optional[dict]`): The meta of the rows that are pushed next.
    """

    def __init__(self, buffer_: Any) -> None:
        self.buffer = buffer_
        self.note: Optional[Dict[str, Any]] = None
        self.meta: Optional[Dict[str, Any]] = None

    def take_note(self) -> Optional[Dict[str, Any]]:
        note, self.note = self.note, None
        return note


def replay_figures(buffer_: Any) -> Dict[str, int]:
    """Return the figures of a buffer that a learner reports. None: there is no buffer."""
    if buffer_ is None:
        return {'replay_rows': 0}
    num_bytes, size = getattr(buffer_, 'num_bytes', None), getattr(buffer_, 'size', None)
    known = {'replay_rows': buffer_.count(), 'replay_size': size, 'replay_bytes': num_bytes}
    return {name: int(figure) for name, figure in known.items() if figure is not None}


class IngestPlan:
    """
    Overview:
        Inspects the task's middleware once, when the pipeline runs for the first time and is therefore complete.
    Members:
        - push_direct (:obj:`Optional[Callable]`): Pushes columns into the buffer. None: other middleware may need
          elements.
        - idle (:obj:`bool`): True: the run ends and this iteration has no data, so skip middleware that needs data.
    """

    def __init__(self, task: Task, exchanger: Any) -> None:
        self.idle = False
        self.push_direct: Optional[Callable] = None
        self.replay: Optional[Replay] = None
        self._to_pusher: List[Callable] = []
        following = self._following(task, exchanger)
        self._choose_ingest([task._middleware[i] for i in following], exchanger)
        for i in following:
            task._middleware[i] = self._guard(task._middleware[i])

    @staticmethod
    def _following(task: Task, exchanger: Any) -> List[int]:
        kind = type(exchanger)
        for i, middleware in enumerate(task._middleware):
            if getattr(middleware, '__wrapped__', None) is kind:
                return list(range(i + 1, len(task._middleware)))
        return []  # the exchanger is called inside another middleware, so its followers are unknown

    def _choose_ingest(self, following: List[Callable], exchanger: Any) -> None:
        if exchanger.role != 'learner':
            return
        pushers = [i for i, middleware in enumerate(following) if hasattr(middleware, PUSH_COLUMNS)]
        if not pushers:
            warn_of_no_ratio(exchanger._session.config, 'no data_pusher of the store follows the exchanger')
            return
        pusher = following[pushers[0]]
        self._to_pusher = following[: pushers[0] + 1]
        self.replay = getattr(pusher, REPLAY)
        if not exchanger._session.config.direct_ingest:
            logging.info('ding_store: direct ingest is off (store.direct_ingest=False)')
            return
        between = [
            middleware for middleware in self._to_pusher[:-1] if not getattr(middleware, USES_NO_TRAJECTORIES, False)
        ]
        if between:
            names = ', '.join(getattr(middleware, '__qualname__', repr(middleware)) for middleware in between)
            logging.info(f'ding_store: experience passes {names}, so each chunk becomes ctx.trajectories for it')
            return
        self.push_direct = getattr(pusher, PUSH_COLUMNS)()

    def replay_figures(self) -> Dict[str, int]:
        """Return how many rows the pusher's buffer holds, how many it can hold, and the bytes of its rows."""
        return replay_figures(None if self.replay is None else self.replay.buffer)

    @property
    def can_push(self) -> bool:
        return bool(self._to_pusher)

    def push_through(self, ctx: Any) -> None:
        """Run the middleware up to the pusher on ``ctx``, the pusher included."""
        for middleware in self._to_pusher:
            middleware(ctx)

    def _guard(self, middleware: Callable) -> Callable:
        origin = getattr(middleware, '__wrapped__', middleware)
        if getattr(origin, '__module__', '') in FINAL_MODULES:
            return middleware

        def guarded(ctx: Any) -> Any:
            return None if self.idle else middleware(ctx)

        guarded.__dict__.update(middleware.__dict__)
        guarded.__name__ = getattr(middleware, '__name__', 'guarded')
        return guarded
