"""The ways to wait for several servers."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import Callable, ContextManager, Iterator, Sequence

from ding_store.errors import StoreError
from ding_store.storage.protocol import Availability


class ShardedAvailability(Availability):
    """
    Overview:
        The ways to wait for calls that may concern any of several servers. A caller that knows the name that it waits
        for uses the availability of one server, see ``Server.availability_of``. Locks and counts of sessions belong to
        one server, so ``held`` and ``num_sessions`` are not here.
    """

    def __init__(self, parts: Sequence[Availability]) -> None:
        self._parts = tuple(parts)

    @property
    def is_nonblocking(self) -> bool:
        return any(part.is_nonblocking for part in self._parts)

    def is_away(self) -> bool:
        """Return whether a call would wait for any of the servers."""
        return any(part.is_away() for part in self._parts)

    def nonblocking(self) -> ContextManager[None]:
        return self._in_all(lambda part: part.nonblocking())

    def one_wait(self) -> ContextManager[None]:
        return self._in_all(lambda part: part.one_wait())

    def leaving(self, limit_s: float) -> ContextManager[None]:
        return self._in_all(lambda part: part.leaving(limit_s))

    def reach(self, what: str, patience_s: float) -> None:
        """Try to connect to each server that is away. Raise the first error after all were tried."""
        call_all([functools.partial(part.reach, what, patience_s) for part in self._parts if part.is_away()])

    def has_hung(self, error: StoreError) -> bool:
        return any(part.has_hung(error) for part in self._parts)

    @contextmanager
    def _in_all(self, enter: Callable[[Availability], ContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(enter(part))
            yield


def call_all(calls: Sequence[Callable[[], object]]) -> None:
    """Make all calls, also if some fail. Then raise the first error."""
    first = None
    for call in calls:
        try:
            call()
        except StoreError as error:
            first = first or error
    if first is not None:
        raise first
