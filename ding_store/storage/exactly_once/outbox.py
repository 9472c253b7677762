"""One writer's entries of one stream: their sequence numbers, and copies of those that are not acked.

The server keeps, per writer, the last sequence number that it accepted, and refuses any out of turn. It may lose a
reply, the newest entries or everything. In each case the writer sends what it still holds again, in order.
``redis/lua/append.lua`` and ``memory/log.py`` are the two servers.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Callable, Deque, Optional, Tuple, Union

from ding_store.errors import ServerFull, StoreClosed, StoreDenied, StoreError, StoreUnavailable
from ding_store.storage.protocol import (
    FORGOTTEN,
    FULL,
    GAP,
    OK,
    STALE,
    WIRE,
    AppendReply,
    AppendRequest,
    Backfill,
    Ends,
    FreedCapacity,
)

logger = logging.getLogger(__name__)

#: Maximum number of replies in a row without progress. A working server answers STALE once, and then OK.
MAX_REFUSED = 100


class Payload:
    """
    Overview:
        The bytes of an unacked entry, in this process's memory. Subclasses keep them in files that all processes of the
        host can map.
    """

    is_kept = False  # an outbox holds it, and calls ``release``

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def on_wire(self) -> bytes:
        return self._data

    def reference(self, host: str) -> Optional[bytes]:
        """Return the bytes by which processes of ``host`` find the payload, or None if they cannot."""
        return None

    def release(self) -> None:
        """Release the bytes, which are not needed again."""


@dataclass
class Item:
    """An unacked entry. ``number`` is its place in this epoch, or an upper bound of it. 0: not yet accepted."""

    sequence: int
    payload: Payload
    number: int = 0
    chain: str = ''  # up to this entry, if it is known
    accepted: bool = False  # a server accepted it once: no limit applies when it is sent again
    uncertain: bool = False  # a reply was lost: a server may have accepted it
    is_referenced: bool = False  # a server may hold a reference to it
    filled_epoch: str = ''  # the epoch in which its payload was sent after a reference


class Refused(StoreError):
    """Internal error: the server has no room for the first item in the queue."""

    def __init__(self, freed: int) -> None:
        super().__init__(freed)
        self.freed = freed


class Outbox:
    """
    Overview:
        A writer's copies of the unacked entries of one stream, in order. Not thread-safe: the writer holds a lock
        around every method.
    Arguments:
        - send_request (:obj:`Callable`): Sends a request in one round trip. It raises StoreUnavailable if the reply was
          lost.
        - backfill (:obj:`Optional[Callable]`): Sends a payload in one round trip. Needed if payloads have references.
        - start (:obj:`int`): The sequence before that of the first entry.
    Attributes:
        - send_request (:obj:`Callable`): As given. A test may replace it by one that fails.
    """

    def __init__(
        self,
        stream: str,
        send_request: Callable[[AppendRequest], AppendReply],
        max_pending_bytes: int = 0,
        drop_oldest: bool = False,
        backfill: Optional[Callable[[Backfill], None]] = None,
        start: int = 0,
    ) -> None:
        self.stream = stream
        self.epoch = ''
        self._last_reply = ''  # "<last>:<number>" of the server's last reply in this epoch
        self._released = start  # the highest sequence that was released
        self.num_dropped = 0
        self.transport = 0
        self.host = ''
        self.freed = 0  # the stream's counter of freed entries, by the last reply
        self.admission = 0  # number of this writer's admission to the stream; 0: none
        self.send_request = send_request
        self._backfill = backfill
        self._ends: Ends = (0, 0)  # when the current epoch began
        #: The epoch that this writer appends to, and the counts when it began.
        self._written: Tuple[str, Ends] = ('', (0, 0))
        #: Readers of the last reply that listed them, and those to send to a server that lost its memory.
        self._readers = self._readers_to_restore = ''
        self._listed = 0  # of ``_readers``
        self._limit = max_pending_bytes
        self._drop_oldest = drop_oldest
        self._sent: Deque[Item] = deque()  # accepted in this epoch, in order
        self._queue: Deque[Item] = deque()  # behind them, in order: not yet accepted in this epoch

    def __len__(self) -> int:
        return len(self._sent) + len(self._queue)

    @property
    def queued_bytes(self) -> int:
        return sum(item.payload.size for item in self._queue)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def is_over(self) -> bool:
        """
        True if the stream that this writer appended to was deleted since, by the server's counts of ends. Without a
        higher count, missing entries were lost, as by a FLUSHALL.
        """
        epoch, ends = self._written
        return self.epoch != epoch != '' and self._ends > ends

    @property
    def has_written(self) -> bool:
        """Return whether the server accepted entries in the stream of its last reply."""
        return self._written[0] != ''

    @property
    def num_left(self) -> int:
        """Number of queued entries. After the stream was deleted, only those count that were never accepted."""
        return sum(not (item.accepted and self.is_over) for item in self._queue)

    @property
    def has_references(self) -> bool:
        return any(item.is_referenced for item in [*self._sent, *self._queue])

    @property
    def may_leave(self) -> bool:
        """True if the server can drop this writer with its last entry: all references are backfilled in this epoch."""
        are_there = all(not one.is_referenced or one.filled_epoch == self.epoch for one in [*self._sent, *self._queue])
        return self.admission > 0 and are_there

    @property
    def sequence(self) -> int:
        """The sequence of the newest item."""
        newest = [items[-1].sequence for items in (self._sent, self._queue) if items]
        return max([self._released, *newest])

    def add(self, payload: Union[Payload, bytes]) -> Item:
        item = Item(self.sequence + 1, payload if isinstance(payload, Payload) else Payload(payload))
        try:
            item.payload.is_kept = True
            self._queue.append(item)
        except BaseException:  # a signal may come before or after the item is queued
            item.payload.is_kept = bool(self._queue) and self._queue[-1] is item
            raise
        return item

    def withdraw(self, item: Item) -> bool:
        """Remove the newest item, so that its sequence is free again. Return False if a server may have seen it."""
        if not self._queue or self._queue[-1] is not item or item.accepted or item.uncertain:
            return False
        try:
            self._queue.pop()
        finally:
            item.payload.is_kept = bool(self._queue) and self._queue[-1] is item
        return True

    def flush(self, is_last: bool = False) -> None:
        """
        Overview:
            Send every queued entry, in order. With ``is_last``, send nothing if the stream was deleted since
            (``is_over``): its name may belong to the next run.
        Raises:
            - Refused: The server has no room for the next entry.
        """
        num_refused = 0
        while not (is_last and self.is_over):
            if self.epoch:
                self._written = self.epoch, self._ends
            if not self._queue:
                return
            item = self._queue[0]
            reply = self._send(item)
            num_refused = 0 if reply.status == OK else num_refused + 1
            if num_refused > MAX_REFUSED:
                raise StoreError(f'the server contradicts itself about {self.stream!r}: {reply}')
            if reply.status == OK:
                item.accepted, item.number, item.chain = True, reply.number, reply.chain
                # If a signal comes in between, the item is in both queues, not in neither.
                if not self._sent or self._sent[-1].sequence < item.sequence:
                    self._sent.append(item)
                if self._queue and self._queue[0] is item:
                    self._queue.popleft()
            # Also after FULL: there may be no room before readers can read, and ack, what this reply requests.
            self._apply_reply(reply)
            if reply.status == FULL:
                raise Refused(reply.freed)

    def check(self) -> None:
        """Request the stream's state. Entries that the server lost are queued again, and acked ones are released."""
        self._apply_reply(self.send_request(self._request_of(None)))

    def let_all_go(self) -> None:
        """Release all entries that the server had accepted, because the stream was deleted."""
        while self._sent:
            self._let_go(self._sent[0].number)

    def on_freed(self, freed: FreedCapacity) -> bool:
        """Release what was acked in this epoch, if the last acked entry is this writer's. Return whether any was."""
        newest = next((item for item in self._sent if item.number >= freed.floor), None)
        # The number alone proves nothing: a server that went back in time gives it to another entry.
        if freed.epoch != self.epoch or newest is None or not freed.chain or newest.chain != freed.chain:
            return False
        self.freed = max(self.freed, freed.counter)
        return self._let_go(freed.floor)

    def backfill(self, upto: Optional[int] = None) -> None:
        """Send the payloads of entries that were sent as references, up to a number, or of all."""
        for item in self._sent:
            if upto is not None and item.number > upto:
                break
            if item.is_referenced and item.filled_epoch != self.epoch and self._backfill is not None:
                self._backfill(Backfill(self.stream, self.epoch, item.sequence, item.number, item.payload.on_wire()))
                item.filled_epoch = self.epoch

    def _send(self, item: Item) -> AppendReply:
        known_epoch, lost_before, item.uncertain = self.epoch, item.uncertain, True
        request = self._request_of(item)
        item.is_referenced |= request.transport != WIRE
        try:
            reply = self.send_request(request)
        except StoreError as e:
            if e.has_no_effect:
                item.uncertain = lost_before
                raise
            # An earlier try whose reply was lost may have succeeded, or this one until its script failed.
            found = self._state_after(e)
            if found is None:
                raise
            reply = found
            if reply.status == OK and reply.last < item.sequence:
                item.uncertain = lost_before or e.was_lost
                raise
        # STALE may answer a second try: the first may have been accepted by a server that lost its memory since.
        item.uncertain = lost_before or (reply.status in (STALE, FORGOTTEN) and known_epoch != '')
        return reply

    def _state_after(self, error: StoreError) -> Optional[AppendReply]:
        """Request the stream's state after the server refused an entry. Return None if there is no answer."""
        is_away = isinstance(error, StoreUnavailable) and not isinstance(error, StoreDenied)
        if not is_away and not isinstance(error, StoreClosed):
            with suppress(StoreError):
                return self.send_request(self._request_of(None))
        return None

    def _request_of(self, item: Optional[Item]) -> AppendRequest:
        base = self._sent[0].sequence if self._sent else self._queue[0].sequence if self._queue else self.sequence + 1
        if item is None:
            request = AppendRequest(
                self.stream, self.epoch, 0, base, readers=self._readers_to_restore, last_reply=self._last_reply
            )
            return request._replace(admission=self.admission, listed=self._listed)
        limit = 0 if item.accepted else self._limit
        reference = item.payload.reference(self.host) if self.host else None
        data, transport = (item.payload.on_wire(), WIRE) if reference is None else (reference, self.transport)
        payload = (data, limit, self._drop_oldest, item.payload.size, transport)
        known = (self._readers_to_restore, self._last_reply, self.admission, self._listed)
        return AppendRequest(self.stream, self.epoch, item.sequence, base, *payload, *known)

    def _apply_reply(self, reply: AppendReply) -> None:
        if reply.status == FORGOTTEN:
            self._begin_anew()
            return
        forgot = self._sent and self._sent[-1].sequence > reply.last
        if forgot or reply.status in (STALE, GAP) or reply.epoch != self.epoch:
            self._requeue(reply)
        is_changed = reply.epoch != self.epoch
        if is_changed:
            self._ends = reply.ends
        self.epoch, self.num_dropped = reply.epoch, reply.num_dropped
        self._last_reply = f'{reply.last}:{reply.number}' if reply.last else ''
        self.transport, self.host, self.freed = reply.transport, reply.host, reply.freed
        self.admission = reply.admission
        if is_changed:
            self._readers_to_restore = '' if self.is_over else self._readers_to_restore or self._readers
        elif self.epoch:
            self._readers_to_restore = ''  # A reply within the epoch shows that the server has read the list.
        if not self._readers_to_restore and reply.readers is not None:
            self._readers, self._listed = reply.readers, reply.listed
        self._let_go(reply.floor)
        if is_changed and self.is_over:
            self._drop_accepted()
        if reply.wanted > reply.floor:
            try:
                self.backfill(reply.wanted)
            except ServerFull as e:
                # The next reply requests it again. Meanwhile other requests may find room, or make some.
                logger.info('stream %r waits for memory: %s', self.stream, e)

    def _begin_anew(self) -> None:
        """Reset the state after FORGOTTEN: all accepted entries are acked, and the server must admit it again."""
        self.let_all_go()
        self.epoch, self.admission, self._written = '', 0, ('', (0, 0))
        self._last_reply = self._readers = self._readers_to_restore = ''
        self._listed = 0

    def _let_go(self, floor: int) -> bool:
        is_any = False
        while self._sent and self._sent[0].number <= floor:
            self._released = max(self._released, self._sent[0].sequence)
            self._sent[0].payload.release()  # Before ``popleft``: a signal in between repeats it rather than skips it.
            self._sent.popleft()
            is_any = True
        return is_any

    def _drop_accepted(self) -> None:
        """Drop entries that the deleted stream had accepted, read or not: they must not enter the next run's stream."""
        for item in [*self._sent, *self._queue]:
            if item.accepted:
                self._released = max(self._released, item.sequence)
                item.payload.release()
        self._sent, self._queue = deque(), deque(item for item in self._queue if not item.accepted)

    def _requeue(self, reply: AppendReply) -> None:
        """Split the copies anew: the server has those up to its ``last``, and the rest must be sent again."""
        items = [*self._sent, *self._queue]
        sent = deque(item for item in items if item.sequence <= reply.last)
        queue = deque(item for item in items if item.sequence > reply.last)
        self._sent, self._queue = sent, queue
        for item in self._sent:
            # Sequences and numbers grow together, so the number of the last entry is an upper bound of this one's.
            item.accepted, item.number, item.chain = True, reply.number, ''
