"""Waits for other members of a run, and calls that do not wait for a server that is away."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, Optional

from ding_store.errors import StoreDenied, StoreTimeout, StoreUnavailable
from ding_store.run.members import Member, Members
from ding_store.storage.store import Store

#: How often a wait checks the task's finish flag. A change in the store ends the wait at once.
SLICE_S = 0.5
#: How often an idle learner looks whether the server still has its progress and weights.
LOOK_EVERY_S = 1.0


@contextmanager
def best_effort(store: Store) -> Iterator[None]:
    """
    Overview:
        Run a block of store calls without waiting for a server that is away. If the server is away or goes away, skip
        the rest of the block. The caller must repeat the calls later.
    Raises:
        - StoreUnavailable: The server refuses this client, as StoreDenied says, so a later call would fail as well.
    """
    try:
        with store.nonblocking():
            yield
    except StoreUnavailable as error:  # logged by the connection
        if isinstance(error, StoreDenied) or isinstance(error.__cause__, StoreDenied):
            raise  # a retry would be refused as well


class PeerWatch:
    """
    Overview:
        Watches whether the members of a role still report themselves. It compares reports, not clocks: a member is
        silent if its report number is the same in two looks.
    Arguments:
        - store (:obj:`Store`): The run's store.
        - role (:obj:`str`): The role that a wait depends on.
        - timeout_s (:obj:`float`): How long the role may be silent, ``store.peer_timeout_s``.
        - own_member (:obj:`Callable`): Returns this process's own member, None before its first report.
        - is_server_full (:obj:`Callable`): Returns True while the server is at its maxmemory and accepts no reports.
    """

    def __init__(
        self,
        store: Store,
        role: str,
        timeout_s: float,
        own_member: Callable[[], Optional[Member]],
        is_server_full: Callable[[], bool],
    ) -> None:
        self._store, self._role, self._timeout_s = store, role, timeout_s
        self._own_member, self._is_server_full = own_member, is_server_full
        self._members = Members(store)
        self._beats: Dict[str, int] = {}
        self._moved_at = time.monotonic()

    def look(self) -> str:
        """Return a text for the warning. Raise StoreTimeout if the role was seen and has been silent for too long."""
        own, is_there = self._own_member(), False
        own_beat = own.beat if own is not None else 0
        with best_effort(self._store):
            self._members.refresh()
            is_there = True
        if not is_there:
            self._moved_at = time.monotonic()  # no member can report now
            return '; the store is away'
        if self._is_server_full():
            self._moved_at = time.monotonic()  # others cannot report either
            return '; the server is at its maxmemory'
        known = self._members.by_id.get(own.id) if own is not None else None
        if own is not None and (known is None or known.beat < own_beat):
            self._moved_at = time.monotonic()  # if our own report does not arrive, theirs do not either
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
        silent, limit = now - self._moved_at, self._timeout_s
        last = peers[-1]  # the one that joined last, which may have been started in place of another one
        if silent >= limit:
            raise StoreTimeout(
                f'{last.title} is {last.state if last.state != "alive" else "silent"} and was not started again within '
                f'{limit:.0f} s (store.peer_timeout_s). Start the run again to continue: its data is kept.'
            )
        return f'; {last.title} has gone silent, start it again within {limit - silent:.0f} s and the run goes on'
