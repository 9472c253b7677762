"""Waits for other members of a run, and calls that do not wait for a server that is away."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional

from ding_store.errors import StoreDenied, StoreTimeout, StoreUnavailable
from ding_store.run.foreign import fields_of
from ding_store.run.lease import FIELDS, SINGLE_ROLES, role_lease
from ding_store.run.members import Members
from ding_store.storage.base import put_id_of
from ding_store.storage.store import Store

#: How often a wait checks the task's finish flag. A change in the store ends the wait at once.
SLICE_S = 0.5
#: How often an idle learner looks whether the server still has its progress and weights.
LOOK_EVERY_S = 1.0
#: The rest of this value's name is a role. A launcher puts it again and again while a process that it started again has
#: not joined the run.
STARTING = 'starting/'


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


class Peer(NamedTuple):
    """A member of the role that a process waits for: the one that joined last."""

    title: str
    state: str  # of its last report. 'left' if its lease was released


class PeerWatch:
    """
    Overview:
        Watches whether the members of a role still report themselves. It compares reports, not clocks: a member is
        silent if its report number is the same in two looks. A role of one process has a lease, which its owner renews
        with each report. Then a look reads only the lease: a thousand collectors may wait for one learner.
    Arguments:
        - store (:obj:`Store`): The run's store.
        - role (:obj:`str`): The role that a wait depends on.
        - timeout_s (:obj:`float`): How long the role may be silent, ``store.peer_timeout_s``.
        - has_reported (:obj:`Callable`): Returns False while this process's own last report has not arrived.
        - is_server_full (:obj:`Callable`): Returns True while the server is at its maxmemory and accepts no reports.
    """

    def __init__(
        self,
        store: Store,
        role: str,
        timeout_s: float,
        has_reported: Callable[[], bool],
        is_server_full: Callable[[], bool],
    ) -> None:
        self._store, self._role, self._timeout_s = store, role, timeout_s
        self._has_reported, self._is_server_full = has_reported, is_server_full
        self._members = Members(store)
        self._beats: Dict[str, int] = {}
        self._renewal: Any = None
        self._starting: Any = None  # version of ``STARTING`` at the last look
        self._peer: Optional[Peer] = None
        self._moved_at = time.monotonic()

    def look(self) -> str:
        """Return a text for the warning. Raise StoreTimeout if the role was seen and has been silent for too long."""
        is_there = moved = is_starting = False
        with best_effort(self._store):
            moved = self._look_at_lease() if self._role in SINGLE_ROLES else self._look_at_reports()
            is_starting = not moved and self._is_starting()
            is_there = True
        if not is_there:
            self._moved_at = time.monotonic()  # no member can report now
            return '; the store is away'
        if self._is_server_full():
            self._moved_at = time.monotonic()  # others cannot report either
            return '; the server is at its maxmemory'
        if not self._has_reported():
            self._moved_at = time.monotonic()  # if our own report does not arrive, theirs do not either
            return '; the server takes no reports'
        peer = self._peer
        if peer is None:
            return f'; no {self._role} has joined yet'
        now = time.monotonic()
        if moved:
            self._moved_at = now
            return ''
        if is_starting:
            self._moved_at = now
            return f'; the {self._role} is being started again'
        silent, limit = now - self._moved_at, self._timeout_s
        if silent >= limit:
            raise StoreTimeout(
                f'{peer.title} is {peer.state if peer.state != "alive" else "silent"} and was not started again within '
                f'{limit:.0f} s (store.peer_timeout_s). Start the run again to continue: its data is kept.'
            )
        return f'; {peer.title} has gone silent, start it again within {limit - silent:.0f} s and the run goes on'

    def _look_at_reports(self) -> bool:
        """Return whether a member of the role has reported since the last look."""
        peers = self._members.refresh().of(self._role)
        moved = any(peer.state == 'alive' and peer.beat != self._beats.get(peer.id) for peer in peers)
        self._beats = {peer.id: peer.beat for peer in peers}
        self._peer = Peer(peers[-1].title, peers[-1].state) if peers else None
        return moved

    def _is_starting(self) -> bool:
        """Return whether a launcher has reported since the last look that it is starting the role again."""
        value = self._store.get(f'{STARTING}{self._role}')
        before, self._starting = self._starting, None if value is None else (value.version, put_id_of(value.version))
        return self._starting is not None and self._starting != before

    def _look_at_lease(self) -> bool:
        """Return whether the owner of the role's lease has renewed it since the last look."""
        value = self._store.get(role_lease(self._role))
        fields = fields_of(value, FIELDS)
        if value is None or fields is None or fields['is_starting']:
            return False  # The server may have lost it, and then its owner puts it again.
        renewal, is_released = (value.version, put_id_of(value.version)), fields['is_released']
        moved = renewal != self._renewal and not is_released
        self._renewal = renewal
        self._peer = Peer(fields['title'], 'left' if is_released else 'alive')
        return moved
