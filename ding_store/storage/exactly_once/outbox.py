"""The writer's side of exactly-once: one stream of one writer, its numbers, and copies of what is not acked.

The server remembers per writer the last sequence it accepted, and refuses to accept any out of turn. So whatever was
lost, a reply, the newest entries or everything, the writer brings the server up to date by sending again, in order,
what it still holds. ``lua/append.lua`` and ``memory.py`` are the two servers.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Callable, Deque, NamedTuple, Optional, Sequence, Tuple, Union

from ding_store.errors import ServerFull, StoreClosed, StoreDenied, StoreError, StoreUnavailable

logger = logging.getLogger(__name__)

#: The server's verdicts on an announcement.
OK = 'OK'  # accepted, or already known: ``number`` is its place
STALE = 'STALE'  # the stream's epoch is another: this is its state now, announce again
GAP = 'GAP'  # entries before this one are missing: announce from ``last + 1``
FULL = 'FULL'  # no room; wait for the room stream to pass ``freed``
PLANE = 'PLANE'  # a reference came on a plane that is no more: announce again on this one
CODEC = 'CODEC'  # there are readers, or may be, who cannot decompress it: announce the payload as it was
FORGOTTEN = 'FORGOTTEN'  # this writer is not known: it was silent while many others came and went

#: Writers that have not left are known to the server while it holds an entry of theirs; of the others it keeps at least
#: so many, those with the newest entries, and at most twice as many. It drops a writer that leaves with its last entry.
MAX_SILENT_WRITERS = 512

#: A bytes-like payload on the wire plane may always come.
WIRE = -1

#: Verdicts without progress, one after another: a server that lives answers one STALE and then OK.
MAX_REFUSED = 100


class AppendRequest(NamedTuple):
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
    size: int = 0  # of the payload, also where only a reference to it is announced
    transport: int = WIRE  # on which this reference is good
    readers: str = ''  # that the server may have forgotten: those of a verdict
    codec: str = ''  # of the payload, if it is good only while all readers have it
    told: str = ''  # "<last>:<number>" of the last verdict of this epoch: a server that has less lost it
    admission: int = 0  # that the server gave this writer; 0: none
    listed: int = 0  # that of the verdict which told of the readers last


#: How often runs of this name ended, as far as the server remembers: all of its data was put aside; the stream was
#: deleted since then. What grows was no loss.
Ends = Tuple[int, int]


class AppendReply(NamedTuple):
    status: str
    epoch: str  # '': there is no such stream
    number: int  # of the entry announced; of this writer's last one for STALE, GAP and sequence 0
    last: int  # this writer's last accepted sequence
    floor: int  # entries up to here are trimmed: nobody needs their copies
    freed: int
    num_dropped: int
    transport: int = 0
    host: str = ''  # that all readers are on: references to its files may be announced; '': the wire plane
    wanted: int = 0  # entries up to here must be readable over the wire
    ends: Ends = (0, 0)  # only good where ``epoch`` is another than was announced
    readers: Optional[str] = ''  # in the server's words: see ``lua/stream.lua``; None: as they were
    chain: str = ''  # up to the entry announced, if it was accepted now
    admission: int = 0  # of this writer to the stream
    listed: int = 0  # grows when the readers change


class FreedCapacity(NamedTuple):
    """What the server says, without being asked, to those who wait for room."""

    counter: int  # of what made room
    epoch: str
    floor: int  # entries of this epoch up to here are trimmed
    chain: str = ''  # up to there


class Backfill(NamedTuple):
    """What a writer sends after an entry that it had announced as a reference."""

    stream: str
    epoch: str
    sequence: int
    number: int  # of the entry, or an upper bound of it
    payload: bytes


class Payload:
    """
    Overview:
        The bytes of an entry that is not acked: on the wire plane themselves. Subclasses keep them where processes of
        one host find them.
    """

    is_kept = False  # by an outbox: it says when to release
    codec = ''  # that all readers must have

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def on_wire(self) -> bytes:
        return self._data

    def reference(self, host: str) -> Optional[bytes]:
        """What leads processes of ``host`` to the bytes; None if nothing does."""
        return None

    def expand(self) -> None:
        """Be without ``codec`` from now on."""

    def release(self) -> None:
        """Nobody will ask for the bytes again."""


@dataclass
class Item:
    """An entry that is not acked. ``number`` is its place in this epoch, or an upper bound of it; 0: not announced."""

    sequence: int
    payload: Payload
    number: int = 0
    chain: str = ''  # up to this entry, if it is known
    accepted: bool = False  # a server has had it: no limit applies when it comes again
    uncertain: bool = False  # a reply was lost: a server may have had it
    is_referenced: bool = False  # a server may hold a reference to it
    filled_epoch: str = ''  # where it was filled


class Refused(StoreError):
    """Inside the package: the server has no room for the first item in the queue."""

    def __init__(self, freed: int) -> None:
        super().__init__(freed)
        self.freed = freed


class Outbox:
    """
    Overview:
        Not thread-safe: its writer holds a lock around every method.
    Arguments:
        - announce (:obj:`Callable`): One round trip to the server; raises StoreUnavailable when the reply was lost.
        - fill (:obj:`Optional[Callable]`): The same; needed where payloads have references.
        - start (:obj:`int`): The first entry's sequence is the one behind it.
    """

    def __init__(
        self,
        stream: str,
        announce: Callable[[AppendRequest], AppendReply],
        max_pending_bytes: int = 0,
        drop_oldest: bool = False,
        backfill: Optional[Callable[[Backfill], None]] = None,
        start: int = 0,
    ) -> None:
        self.stream = stream
        self.epoch = ''
        self._told = ''  # what we know of ourselves from the server, in this epoch
        self._released = start  # the highest sequence of those that were let go
        self.num_dropped = 0
        self.transport = 0
        self.host = ''
        self.freed = 0  # the stream's counter of what made room, as we last heard
        self.admission = 0  # that we have to the stream; 0: none
        self._announce = announce
        self._fill = backfill
        self._ends: Ends = (0, 0)  # before the epoch that we last heard of
        #: The epoch that we bring entries into, and the ends before it.
        self._written: Tuple[str, Ends] = ('', (0, 0))
        #: Readers, as we last heard; and those that a server which lost its memory is to know again.
        self._readers = self._forgotten = ''
        self._listed = 0  # of ``_readers``
        self._limit = max_pending_bytes
        self._drop_oldest = drop_oldest
        self._sent: Deque[Item] = deque()  # accepted in this epoch, in order
        self._queue: Deque[Item] = deque()  # behind them, in order: to be announced

    def __len__(self) -> int:
        return len(self._sent) + len(self._queue)

    @property
    def codecs(self) -> Sequence[str]:
        """What all readers can decompress, as we last heard; none before the first reader is known."""
        return self._readers.partition('\n')[0].split()

    @property
    def queued_bytes(self) -> int:
        return sum(item.payload.size for item in self._queue)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def is_over(self) -> bool:
        """
        Whether the stream that we wrote to was deleted since: the server lost nothing. It says so. One that only lacks
        what we wrote has lost it, in whatever life: a flush is no end of a run.
        """
        epoch, ends = self._written
        return self.epoch != epoch != '' and self._ends > ends

    @property
    def has_written(self) -> bool:
        """Whether entries were brought into the stream as it was when we heard of it last."""
        return self._written[0] != ''

    @property
    def num_left(self) -> int:
        """Entries that wait for the server; where the epoch is over, those of which it never said that it has them."""
        return sum(not (item.accepted and self.is_over) for item in self._queue)

    @property
    def has_references(self) -> bool:
        return any(item.is_referenced for item in [*self._sent, *self._queue])

    @property
    def may_leave(self) -> bool:
        """Whether the server has to know nothing more of this writer once it does not hold any entry of it."""
        are_there = all(not one.is_referenced or one.filled_epoch == self.epoch for one in [*self._sent, *self._queue])
        return self.admission > 0 and are_there

    @property
    def sequence(self) -> int:
        """The newest item's."""
        newest = [items[-1].sequence for items in (self._sent, self._queue) if items]
        return max([self._released, *newest])

    def add(self, payload: Union[Payload, bytes]) -> Item:
        item = Item(self.sequence + 1, payload if isinstance(payload, Payload) else Payload(payload))
        try:
            item.payload.is_kept = True
            self._queue.append(item)
        except BaseException:  # as by a signal, before or behind it
            item.payload.is_kept = bool(self._queue) and self._queue[-1] is item
            raise
        return item

    def withdraw(self, item: Item) -> bool:
        """Take the newest item back, so that its sequence is free again; refused if a server may have seen it."""
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
            Announce all that is queued, in order; who does it as the last thing (``is_last``) leaves it where the epoch
            that he wrote to ``is_over``: what is there now may be the next run of this name.
        Raises:
            - Refused: The server has no room for the next one.
        """
        num_refused = 0
        while not (is_last and self.is_over):
            if self.epoch:
                self._written = self.epoch, self._ends
            if not self._queue:
                return
            item = self._queue[0]
            reply = self._send(item)
            if reply.status == CODEC:
                item.payload.expand()
            num_refused = 0 if reply.status == OK else num_refused + 1
            if num_refused > MAX_REFUSED:
                raise StoreError(f'the server contradicts itself about {self.stream!r}: {reply}')
            if reply.status == OK:
                item.accepted, item.number, item.chain = True, reply.number, reply.chain
                # Twice in the one rather than in neither, where a signal comes in between.
                if not self._sent or self._sent[-1].sequence < item.sequence:
                    self._sent.append(item)
                if self._queue and self._queue[0] is item:
                    self._queue.popleft()
            # Also when there is no room: there may be none before what is wanted of us can be read, and acked.
            self._learn(reply)
            if reply.status == FULL:
                raise Refused(reply.freed)

    def check(self) -> None:
        """Ask for the stream's state; what a server forgot is queued again, what was acked is let go."""
        self._learn(self._announce(self._announcement(None)))

    def let_all_go(self) -> None:
        """The stream was deleted: what the server had accepted is gone with it."""
        while self._sent:
            self._let_go(self._sent[0].number)

    def hear(self, freed: FreedCapacity) -> bool:
        """Let go what was acked in our epoch, if the last of it is ours; returns whether something was."""
        newest = next((item for item in self._sent if item.number >= freed.floor), None)
        # A number alone would not do: a server whose data became older gives it to another entry.
        if freed.epoch != self.epoch or newest is None or not freed.chain or newest.chain != freed.chain:
            return False
        self.freed = max(self.freed, freed.counter)
        return self._let_go(freed.floor)

    def backfill(self, upto: Optional[int] = None) -> None:
        """Make what was announced as a reference readable over the wire: entries up to a number, or all."""
        for item in self._sent:
            if upto is not None and item.number > upto:
                break
            if item.is_referenced and item.filled_epoch != self.epoch and self._fill is not None:
                self._fill(Backfill(self.stream, self.epoch, item.sequence, item.number, item.payload.on_wire()))
                item.filled_epoch = self.epoch

    def _send(self, item: Item) -> AppendReply:
        known_epoch, lost_before, item.uncertain = self.epoch, item.uncertain, True
        said = self._announcement(item)
        item.is_referenced |= said.transport != WIRE
        try:
            reply = self._announce(said)
        except StoreError as e:
            if e.has_no_effect:
                item.uncertain = lost_before
                raise
            # An earlier try, whose reply was lost, may have come through; or this one, as far as its script got.
            found = self._state_after(e)
            if found is None:
                raise
            reply = found
            if reply.status == OK and reply.last < item.sequence:
                item.uncertain = lost_before or e.was_lost
                raise
        # STALE may answer a second try whose first one was accepted by a server that then lost its memory.
        item.uncertain = lost_before or (reply.status in (STALE, FORGOTTEN) and known_epoch != '')
        return reply

    def _state_after(self, error: StoreError) -> Optional[AppendReply]:
        """The stream's state, asked of a server that refused something; None where it does not answer that."""
        is_away = isinstance(error, StoreUnavailable) and not isinstance(error, StoreDenied)
        if not is_away and not isinstance(error, StoreClosed):
            with suppress(StoreError):
                return self._announce(self._announcement(None))
        return None

    def _announcement(self, item: Optional[Item]) -> AppendRequest:
        base = self._sent[0].sequence if self._sent else self._queue[0].sequence if self._queue else self.sequence + 1
        if item is None:
            said = AppendRequest(self.stream, self.epoch, 0, base, readers=self._forgotten, told=self._told)
            return said._replace(admission=self.admission, listed=self._listed)
        limit = 0 if item.accepted else self._limit
        reference = item.payload.reference(self.host) if self.host else None
        data, transport = (item.payload.on_wire(), WIRE) if reference is None else (reference, self.transport)
        payload = (data, limit, self._drop_oldest, item.payload.size, transport)
        known = (self._forgotten, item.payload.codec, self._told, self.admission, self._listed)
        return AppendRequest(self.stream, self.epoch, item.sequence, base, *payload, *known)

    def _learn(self, reply: AppendReply) -> None:
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
        self._told = f'{reply.last}:{reply.number}' if reply.last else ''
        self.transport, self.host, self.freed = reply.transport, reply.host, reply.freed
        self.admission = reply.admission
        if is_changed:
            self._forgotten = '' if self.is_over else self._forgotten or self._readers
        elif self.epoch:
            self._forgotten = ''  # Every verdict within an epoch comes behind what was said with it.
        if not self._forgotten and reply.readers is not None:
            self._readers, self._listed = reply.readers, reply.listed
        self._let_go(reply.floor)
        if is_changed and self.is_over:
            self._drop_accepted()
        if reply.wanted > reply.floor:
            try:
                self.backfill(reply.wanted)
            except ServerFull as e:
                # The next verdict asks for it again, and what else we have to say may find room, or make some.
                logger.info('stream %r waits for memory: %s', self.stream, e)

    def _begin_anew(self) -> None:
        """The server drops a writer once all that it accepted of it is acked. It is to admit us once more."""
        self.let_all_go()
        self.epoch, self.admission, self._written = '', 0, ('', (0, 0))
        self._told = self._readers = self._forgotten = ''
        self._listed = 0

    def _let_go(self, floor: int) -> bool:
        is_any = False
        while self._sent and self._sent[0].number <= floor:
            self._released = max(self._released, self._sent[0].sequence)
            self._sent[0].payload.release()  # Before: a signal in between lets it be done twice.
            self._sent.popleft()
            is_any = True
        return is_any

    def _drop_accepted(self) -> None:
        """What the stream had was deleted with it, whether it was read or not: it must not come into the next run's."""
        for item in [*self._sent, *self._queue]:
            if item.accepted:
                self._released = max(self._released, item.sequence)
                item.payload.release()
        self._sent, self._queue = deque(), deque(item for item in self._queue if not item.accepted)

    def _requeue(self, reply: AppendReply) -> None:
        """Split anew what is held: up to the server's ``last`` it has them, the rest must be announced again."""
        items = [*self._sent, *self._queue]
        sent = deque(item for item in items if item.sequence <= reply.last)
        queue = deque(item for item in items if item.sequence > reply.last)
        self._sent, self._queue = sent, queue
        for item in self._sent:
            # Sequences and numbers grow together: the last one's number is no less than this one's.
            item.accepted, item.number, item.chain = True, reply.number, ''
