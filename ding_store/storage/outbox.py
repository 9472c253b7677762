"""The writer's side of exactly-once: one stream of one writer, its numbers, and copies of what is not acked.

The server remembers per writer the last sequence it accepted, and refuses to accept any out of turn. So whatever was
lost, a reply, the newest entries or everything, the writer brings the server up to date by sending again, in order,
what it still holds. ``lua/append.lua`` and ``memory.py`` are the two servers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, NamedTuple, Optional

from ding_store.errors import StoreError

#: The server's verdicts on an announcement.
OK = 'OK'  # accepted, or already known: ``number`` is its place
STALE = 'STALE'  # the stream's epoch is another: this is its state now, announce again
GAP = 'GAP'  # entries before this one are missing: announce from ``last + 1``
FULL = 'FULL'  # no room; wait for the room stream to pass ``room``

#: Verdicts without progress, one after another: a server that lives answers one STALE and then OK.
MAX_REFUSED = 100


class Announcement(NamedTuple):
    """
    Overview:
        What a writer says to the server. ``base`` is the lowest sequence that the writer still holds: it will never
        send one below. Sequence 0 announces nothing, and asks for the stream's state.
    """

    stream: str
    epoch: str
    sequence: int
    base: int
    payload: bytes = b''
    max_pending_bytes: int = 0  # 0: no limit, for what had been accepted once
    drop_oldest: bool = False


class Verdict(NamedTuple):
    status: str
    epoch: str
    number: int  # of the entry announced; of this writer's last one for STALE, GAP and sequence 0
    last: int  # this writer's last accepted sequence
    floor: int  # entries up to here are trimmed: nobody needs their copies
    room: int
    num_dropped: int


@dataclass
class Item:
    """An entry that is not acked. ``number`` is its place in this epoch, or an upper bound of it; 0: not announced."""

    sequence: int
    payload: bytes
    number: int = 0
    accepted: bool = False  # a server has had it: no limit applies when it comes again
    uncertain: bool = False  # a reply was lost: a server may have had it


class Refused(StoreError):
    """Inside the package: the server has no room for the first item in the queue."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.room = room


class Outbox:
    """
    Overview:
        Not thread-safe: its writer holds a lock around every method.
    Arguments:
        - announce (:obj:`Callable`): One round trip to the server; raises StoreUnavailable when the reply was lost.
    """

    def __init__(
        self,
        stream: str,
        announce: Callable[[Announcement], Verdict],
        max_pending_bytes: int = 0,
        drop_oldest: bool = False,
    ) -> None:
        self.stream = stream
        self.epoch = ''
        self.sequence = 0
        self.num_dropped = 0
        self._announce = announce
        self._limit = max_pending_bytes
        self._drop_oldest = drop_oldest
        self._sent: Deque[Item] = deque()  # accepted in this epoch, in order
        self._queue: Deque[Item] = deque()  # behind them, in order: to be announced

    def __len__(self) -> int:
        return len(self._sent) + len(self._queue)

    @property
    def queued_bytes(self) -> int:
        return sum(len(item.payload) for item in self._queue)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def add(self, payload: bytes) -> Item:
        self.sequence += 1
        item = Item(self.sequence, payload)
        self._queue.append(item)
        return item

    def withdraw(self, item: Item) -> bool:
        """Take the newest item back, so that its sequence is free again; refused if a server may have seen it."""
        if not self._queue or self._queue[-1] is not item or item.accepted or item.uncertain:
            return False
        self._queue.pop()
        self.sequence -= 1
        return True

    def flush(self) -> None:
        """Announce all that is queued, in order. Raises Refused when the server has no room for the next one."""
        num_refused = 0
        while self._queue:
            item = self._queue[0]
            verdict = self._send(item)
            num_refused = 0 if verdict.status == OK else num_refused + 1
            if num_refused > MAX_REFUSED:
                raise StoreError(f'the server contradicts itself about {self.stream!r}: {verdict}')
            if verdict.status == FULL:
                raise Refused(verdict.room)
            if verdict.status == OK:
                item.accepted, item.number = True, verdict.number
                self._sent.append(self._queue.popleft())
            self._learn(verdict)

    def check(self) -> None:
        """Ask for the stream's state; what a server forgot is queued again, what was acked is let go."""
        self._learn(self._announce(self._announcement(None)))

    def _send(self, item: Item) -> Verdict:
        known_epoch, lost_before, item.uncertain = self.epoch, item.uncertain, True
        verdict = self._announce(self._announcement(item))
        # STALE may answer a second try whose first one was accepted by a server that then lost its memory.
        item.uncertain = lost_before or (verdict.status == STALE and known_epoch != '')
        return verdict

    def _announcement(self, item: Optional[Item]) -> Announcement:
        base = self._sent[0].sequence if self._sent else self._queue[0].sequence if self._queue else self.sequence + 1
        if item is None:
            return Announcement(self.stream, self.epoch, 0, base)
        limit = 0 if item.accepted else self._limit
        return Announcement(self.stream, self.epoch, item.sequence, base, item.payload, limit, self._drop_oldest)

    def _learn(self, verdict: Verdict) -> None:
        forgot = self._sent and self._sent[-1].sequence > verdict.last
        if forgot or verdict.status in (STALE, GAP) or verdict.epoch != self.epoch:
            self._requeue(verdict)
        self.epoch, self.num_dropped = verdict.epoch, verdict.num_dropped
        while self._sent and self._sent[0].number <= verdict.floor:
            self._sent.popleft()

    def _requeue(self, verdict: Verdict) -> None:
        """Split anew what is held: up to the server's ``last`` it has them, the rest must be announced again."""
        items = [*self._sent, *self._queue]
        self._sent = deque(item for item in items if item.sequence <= verdict.last)
        self._queue = deque(item for item in items if item.sequence > verdict.last)
        for item in self._sent:
            # Sequences and numbers grow together: the last one's number is no less than this one's.
            item.accepted, item.number = True, verdict.number
