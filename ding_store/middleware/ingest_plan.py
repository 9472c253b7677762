"""Ingest plan: checks the middleware after the exchanger for direct ingest, and skips it if there is no data."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, List, Optional

from ding.framework import Task
from ditk import logging

from ding_store.middleware.insert_ratio import warn_of_no_ratio
from ding_store.middleware.own_rank import own_rank
from ding_store.middleware.replay_growth import ReplayGrowth

#: Class attribute of middleware that may stand before the pusher because it uses no trajectories.
USES_NO_TRAJECTORIES = 'uses_no_trajectories'
#: Modules of middleware that also runs in iterations without data: savers and loggers.
FINAL_MODULES = (
    'ding.framework.middleware.ckpt_handler',
    'ding.framework.middleware.functional.logger',
    'ding.framework.middleware.functional.ctx_helper',
    'ding_store.middleware.checkpoint',
)


#: Module of DI-engine's trainers. Several learners agree before each of their updates.
TRAINERS = 'ding.framework.middleware.functional.trainer'


class Replay:
    """
    Overview:
        The buffer of a pusher, and the note that the next push commits.
    Attributes:
        - note (:obj:`Optional[dict]`): Committed with the next push.
        - meta (:obj:`Optional[dict]`): The meta of the rows that are pushed next.
        - growth (:obj:`Optional[ReplayGrowth]`): Makes the buffer grow with the env steps.
    """

    def __init__(self, buffer_: Any) -> None:
        self.buffer = buffer_
        self.note: Optional[Dict[str, Any]] = None
        self.meta: Optional[Dict[str, Any]] = None
        self.growth: Optional[ReplayGrowth] = None

    def take_note(self) -> Optional[Dict[str, Any]]:
        note, self.note = self.note, None
        return note


class Pusher(ABC):
    """
    Overview:
        Middleware that pushes experience into a replay.
    Attributes:
        - replay (:obj:`Replay`): The buffer, and the note that the next push commits.
    """

    #: A task keeps an object that has a name, as the ``__wrapped__`` of its middleware. Of others it keeps the class.
    __name__ = 'push'

    def __init__(self, buffer_: Any) -> None:
        self.replay = Replay(buffer_)

    @abstractmethod
    def __call__(self, ctx: Any) -> None:
        """Push the elements of ``ctx``, and commit the note with them."""

    @abstractmethod
    def push_columns(self) -> Optional[Callable]:
        """Return a function that pushes whole columns, or None if the buffer needs elements. Log which it is."""


def uses_no_trajectories(middleware: Callable) -> bool:
    """Return True if a task's middleware is an object of ding_store that leaves ``ctx.trajectories`` alone."""
    return bool(getattr(inspect.unwrap(middleware), USES_NO_TRAJECTORIES, False))


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
        following: List[Callable] = []
        is_behind = False

        def guard(middleware: Callable) -> Callable:
            nonlocal is_behind
            if is_behind:
                following.append(middleware)
                return self._guarded(middleware)
            is_behind = inspect.unwrap(middleware) is type(exchanger)
            return middleware

        # The task calls this for its middleware in order. If the exchanger is called inside another middleware, then
        # its followers are unknown.
        task.use_wrapper(guard)
        self._choose_ingest(following, exchanger)

    def _choose_ingest(self, following: List[Callable], exchanger: Any) -> None:
        if exchanger.role != 'learner':
            return
        pushers = [(i, part) for i, part in enumerate(map(inspect.unwrap, following)) if isinstance(part, Pusher)]
        if not pushers:
            warn_of_no_ratio(exchanger._session.config, 'no data_pusher of the store follows the exchanger')
            return
        place, pusher = pushers[0]
        self._to_pusher = following[: place + 1]
        self.replay = pusher.replay
        if not exchanger._session.config.direct_ingest:
            logging.info('ding_store: direct ingest is off (store.direct_ingest=False)')
            return
        between = [middleware for middleware in self._to_pusher[:-1] if not uses_no_trajectories(middleware)]
        if between:
            names = ', '.join(getattr(middleware, '__qualname__', repr(middleware)) for middleware in between)
            logging.info(f'ding_store: experience passes {names}, so each chunk becomes ctx.trajectories for it')
            return
        self.push_direct = pusher.push_columns()

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

    def _guarded(self, middleware: Callable) -> Callable:
        module, rank = getattr(inspect.unwrap(middleware), '__module__', ''), own_rank()
        if module in FINAL_MODULES:
            return middleware
        if module == TRAINERS and rank is not None:
            middleware = rank.in_step(middleware)

        @functools.wraps(middleware)
        def guarded(ctx: Any) -> Any:
            return None if self.idle else middleware(ctx)

        return guarded
