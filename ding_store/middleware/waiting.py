"""Waiting for others of a run, and not waiting for a server that is away."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Dict, Iterator

from ding_store.errors import StoreDenied, StoreTimeout, StoreUnavailable
from ding_store.middleware.members import Members
from ding_store.storage.base import Store

if TYPE_CHECKING:
    from ding_store.middleware.run_session import RunSession

#: Waits look at the task's own finish flag this often; news from the store wakes them at once.
SLICE_S = 0.5


@contextmanager
def best_effort(store: Store) -> Iterator[None]:
    """
    Overview:
        For what a loop says to the store while it has better to do than to wait for it: where the server is away, or
        goes away meanwhile, the rest of the block is left out. Whoever uses this says it again later.
    """
    try:
        with store.nonblocking():
            yield
    except StoreUnavailable as error:  # which the connection has logged
        if isinstance(error, StoreDenied) or isinstance(error.__cause__, StoreDenied):
            raise  # later would be no better


class PeerWatch:
    """
    Overview:
        Whether a role that a wait depends on is still reporting itself. Compares reports, not clocks: a member whose
        report number has not moved between two looks is silent.
    """

    def __init__(self, session: RunSession, role: str) -> None:
        self._session = session
        self._role = role
        self._members = Members(session.store)
        self._beats: Dict[str, int] = {}
        self._moved_at = time.monotonic()

    def look(self) -> str:
        """A text for the warning. Raises StoreTimeout once the role was seen and has been silent for too long."""
        own, is_there = self._session.member, False
        own_beat = own.beat if own is not None else 0
        with best_effort(self._session.store):
            self._members.refresh()
            is_there = True
        if not is_there:
            self._moved_at = time.monotonic()  # nobody can report now
            return '; the store is away'
        if self._session.is_server_full:
            self._moved_at = time.monotonic()  # others cannot report either
            return '; the server is at its maxmemory'
        known = self._members.by_id.get(own.id) if own is not None else None
        if own is not None and (known is None or known.beat < own_beat):
            self._moved_at = time.monotonic()  # nor can they where our own report does not come through
            return '; the server takes no reports'
        peers = self._members.of(self._role)
        if not peers:
            return f'; no {self._role} has joined yet'
        moved = any(p.state == 'alive' and p.beat != self._beats.get(p.id) for p in peers)
        self._beats = {p.id: p.beat for p in peers}
        now = time.monotonic()
        if moved:
            self._moved_at = now
            return ''
        silent, limit = now - self._moved_at, self._session.config.peer_timeout_s
        last = max(peers, key=lambda p: p.beat)
        if silent >= limit:
            raise StoreTimeout(
                f'{last.title} is {last.state if last.state != "alive" else "silent"} and was not started again within '
                f'{limit:.0f} s (store.peer_timeout_s); the run is kept, start it again to go on'
            )
        return f'; {last.title} has gone silent, start it again within {limit - silent:.0f} s and the run goes on'
