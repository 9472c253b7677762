"""The seam: what a store is, and nothing about how. Arrays and JSON-able headers only; no trees, no tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Callable, ContextManager, Dict, List, Mapping, NamedTuple, Optional, Sequence, Type, Union

import numpy as np

Header = Mapping[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array]
Buffer = Union[bytes, bytearray, memoryview]

#: What a full stream does with an append: wait, make room by dropping the oldest entries, or refuse.
OVERFLOW = ('block', 'drop_oldest')

#: Where a new reader starts: at the oldest entry still held, or behind the newest.
START = ('oldest', 'now')


#: Entries have numbers that fit into so many bits; what a server's clock gives, in milliseconds, does not.
NUMBER_BITS = 40


class _Place(NamedTuple):
    epoch: str
    number: int


class EntryId(_Place):
    """
    Overview:
        Place of an entry in its stream. Numbers are dense (1, 2, 3, ...) within one epoch of the stream, whatever the
        server's clock does. A new epoch begins whenever the server may have lost entries, so at each of its restarts,
        and when the stream is deleted; it goes on behind the last entry that is left: with 1 after a total loss.
    Attributes:
        - chain (:obj:`str`): A hash of all entries up to this one: whether a server still has them shows by it. ''
          where it is not known, as in an id made of another. Ids of one place are equal, whatever is known of them.
    """

    chain: str = ''

    def chained(self, chain: str) -> EntryId:
        place = EntryId(*self)
        place.chain = chain
        return place


class ValueVersion(int):
    """
    Overview:
        Number of a value's version that also knows which put made it. A server that goes back in time gives a number
        twice: ``get`` and ``put`` tell the two apart by a number that they returned themselves. Equal numbers are
        equal, whatever put made them, and a plain number is compared as that.
    Attributes:
        - put_id (:obj:`str`): Random, of one put; '' where it is not known.
    """

    put_id: str = ''

    def __new__(cls, number: int, put_id: str = '') -> ValueVersion:
        version = super().__new__(cls, number)
        version.put_id = put_id
        return version

    def is_of_another_put(self, known: int) -> bool:
        """Whether ``known`` is another number, or the number of another put."""
        known_id = getattr(known, 'put_id', '')
        return self != known or (known_id != '' and known_id != self.put_id)


#: Before the oldest entry of any epoch.
OLDEST = EntryId('', 0)


@dataclass(frozen=True)
class Entry:
    """
    Overview:
        One append, as a reader sees it. ``arrays`` are read-only views, valid until the entry is acked, or dropped by
        retention. Who does not hold entries up (an ephemeral reader, or none) copies, and then asks ``validate``.
    """

    stream: str
    id: EntryId
    writer: str
    sequence: int  # 1, 2, 3, ... of its writer: what makes delivery exactly-once
    header: Header
    arrays: Arrays
    guard: Optional[Callable[[], bool]] = field(default=None, repr=False, compare=False)
    is_lost: bool = False  # its payload is gone for good, header and all: there is only the fact that it was

    def validate(self) -> bool:
        """Whether all that was read of ``arrays`` until now was the entry's; if not, it is to be thrown away."""
        return self.guard is None or self.guard()


@dataclass(frozen=True)
class Value:
    """One version of a named value; ``arrays`` are read-only."""

    name: str
    version: int  # as read from a store a ValueVersion, to be passed on to ``get`` as it is
    header: Header
    arrays: Arrays


@dataclass
class StreamInfo:
    """
    Overview:
        What a stream holds now. ``last`` is the number of the newest entry of this epoch, ``floor`` that of the newest
        entry that was trimmed or dropped, so that ``last - floor`` entries are held.
    """

    epoch: str = ''
    last: int = 0
    floor: int = 0
    pending_bytes: int = 0
    num_dropped: int = 0
    readers: Dict[str, int] = field(default_factory=dict)  # name -> number of the last acked entry
    durable: Dict[str, bool] = field(default_factory=dict)
    writers: Dict[str, int] = field(default_factory=dict)  # writer -> last sequence accepted in this epoch
    numbers: Dict[str, int] = field(default_factory=dict)  # writer -> number of that entry
    host: str = ''  # that all readers are on: the host plane; '': the wire plane


@dataclass
class StoreInfo:
    """What a store holds now, for people and for ``ding-store status``."""

    address: str
    run: str
    server: str
    streams: Dict[str, StreamInfo] = field(default_factory=dict)
    values: Dict[str, int] = field(default_factory=dict)  # name -> newest version
    counters: Dict[str, int] = field(default_factory=dict)


class Store(ABC):
    """
    Overview:
        Where the processes of a run share data: streams of entries, named values, counters.
        All methods may be called from several threads. Every wait has a deadline; a deadline that passes raises
        StoreTimeout where the caller asked for an effect, and returns nothing new where it asked for news.

        Delivery. A writer (one open store in one process) numbers its entries per stream, and keeps each until every
        durable reader has acked it (or retention dropped it). When the server forgot some or all of them, it announces
        them again, in order, before anything new. A reader skips sequences it has seen: see ``reader.Reader``.
        A writer also tells a server that lost its memory which durable readers it had, as it last heard: what one of
        them acks then is kept for the others. What this does not cover: entries of a writer that is gone when the
        server forgets them; and, with several durable readers, what one acks after that, before a writer that knew of
        the others has announced anything.
    Raises (any method):
        - StoreUnavailable: The server is away, and did not return within the store's ``reconnect_timeout_s``.
        - StoreClosed: After close().
    """

    run: str

    @abstractmethod
    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId:
        """
        Overview:
            Append one entry: durable when it returns, in this writer's order, at most once.
        Arguments:
            - header (:obj:`Mapping`): JSON-able.
            - arrays (:obj:`Mapping`): The columns; numpy arrays of a fixed-size dtype, copied before returning. Their
              lengths may differ: the store does not know rows. A learner checks chunks against their schema.
            - timeout_s (:obj:`Optional[float]`): How long a full stream with overflow 'block' may be waited for. Behind
              another thread's append that waits for no room it may take its turn a second later.
        Raises:
            - AppendUnsettled: The entry may still arrive: the server may have it, or is away. It is kept, and announced
              by whatever this store does when the server is back, or has room: appending it once more would double it.
              The error's ``__cause__`` says why. After any other error the entry never arrives:
            - StoreTimeout: overflow is 'block' and no room was made in time.
            - StreamFull: This one entry is larger than the limit.
            - ServerFull: The server is at its maxmemory.
            - NotEnoughSpace: This one entry is larger than a server takes.
            - StoreError: The server refused it for a reason that does not pass; the message names the fix.
            But where another thread closes the store during the append (StoreClosed), the server may have the entry.
        """

    @abstractmethod
    def read(self, stream: str, after: EntryId = OLDEST, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        """
        Overview:
            The next entries after ``after``, in order; waits up to ``timeout_s`` for the first one. An ``after`` of a
            past epoch means: from the oldest entry of this one. Most callers want ``reader.Reader`` instead.
        Returns:
            - entries (:obj:`list`): At most ``max_entries``; empty when none came in time.
        Raises:
            - CorruptPayload: The first of these entries is not what was written; ``entry_id`` says which it is, so that
              the caller can go on behind it.
        """

    @abstractmethod
    def register(self, stream: str, reader: str, durable: bool = True, start: str = 'oldest') -> EntryId:
        """
        Overview:
            Make a reader known, and return the entry after which it continues: where it had acked, or for a new one
            the oldest entry still held (``start='oldest'``) or the newest (``start='now'``). Retention waits for the
            acks of durable readers, and for the first of them to come; ephemeral readers hold nothing up.
        """

    @abstractmethod
    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        """
        Overview:
            This reader is done with all entries up to and with ``entry_id``; what all durable readers acked is
            trimmed. An ack of a past epoch or of a reader not registered changes nothing.
        Arguments:
            - wait (:obj:`bool`): False: it is sent, and its reply looked at by the next ack, read or close, which also
              raises the errors. Until then the stream may not show it.
        """

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None:
        """
        Overview:
            ``ack`` and then ``put(name, header, {})``, for a reader that tells others after each entry how far it has
            come. May return before that is done; others see it as soon as it is. ``close`` does it where the server is
            there, and warns where it is not.
        Raises:
            - StoreError: What this one, or the one before it, met with; see ``flush``.
        """
        self.ack(stream, reader, entry_id)
        self.put(name, header, {})

    def flush(self) -> None:  # noqa: B027 - nothing is left to do where ``advance`` is not overridden
        """
        Overview:
            Return when all that ``advance`` was told is done, and what a full stream did not take (AppendUnsettled) was
            announced once more, without a wait for room. To be called before waiting for those who wait for it.
        Raises:
            - StoreError: As ``ack`` and ``put``.
        """

    def close_for_writing(self) -> None:  # noqa: B027 - a store that never announces again has nothing to leave
        """
        Overview:
            This process has appended its last. From now on a stream that was deleted is left alone, and an append to it
            raises StoreClosed: its run may be over, and its name the next one's. What is lost is announced again.
        """

    @property
    def is_away(self) -> bool:
        """
        Whether a call made now would wait for a server that was lost. Asks nobody, and brings nothing back: other calls
        do, in whatever thread.
        """
        return False

    def nonblocking(self) -> ContextManager[None]:
        """
        Overview:
            Within it, calls of this thread wait for no server that is away: they raise StoreUnavailable at once, also
            where it goes away during the call; whether it was done is then not known. Other threads bring the server
            back, and what calls do in passing (announce again, tidy) is left to theirs. A server that hangs is away
            after ``socket_timeout_s``.
        """
        return nullcontext()

    @abstractmethod
    def forget(self, stream: str, reader: str) -> bool:
        """
        Overview:
            Drop a reader for good: what only it was waited for is trimmed, so all that is held where it was the last
            durable one. Returns whether it was known.
        """

    @abstractmethod
    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        """
        Overview:
            Publish a new version of a value: it becomes visible whole or not at all, and replaces the last one.
        Arguments:
            - expected_version (:obj:`Optional[int]`): Only when the value is at this version now; 0: does not exist.
              One that ``get`` or ``put`` returned also has to be of the same put.
        Returns:
            - version (:obj:`ValueVersion`): 1, 2, 3, ...; grows for as long as this writer or the server lives.
        Raises:
            - VersionConflict: The value is at another version; nothing was written.
        """

    @abstractmethod
    def set_start_version(self, name: str, version: int) -> None:
        """
        Overview:
            What this store puts of a value has versions above this one from now on, also where the server has forgotten
            it: for a writer that was started again. Asks no server.
        """

    @abstractmethod
    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        """
        Overview:
            The newest version of a value if it is newer than ``newer_than``, else wait for one up to ``timeout_s``.
            A server that lost its memory counts from 1 again: a version *below* ``newer_than`` is news, too. So is
            another put's version of the same number, where ``newer_than`` is the version of a value as it was read.
        """

    @abstractmethod
    def add(self, counter: str, amount: int = 0) -> int:
        """
        Overview:
            Add to a counter, which begins at 0, and return its new value. Only for what is shown: it may be added twice
            when a reply is lost, and is lost with the server's memory. What must be exact travels in entry headers.
        """

    @abstractmethod
    def delete(self, name: str) -> bool:
        """
        Overview:
            Delete the stream, value and counter of this name. Returns whether there was one. A stream also loses its
            readers: one that goes on has to register again.
        """

    @abstractmethod
    def info(self) -> StoreInfo:
        """What the store holds now."""

    @abstractmethod
    def close(self) -> None:
        """Release connections, threads and files; entries and values stay in the store. May be called twice."""

    def clear(self, last: Sequence[str] = ()) -> None:
        """Delete everything of this run; names in ``last`` after all others."""
        info = self.info()
        names = dict.fromkeys([*info.streams, *info.values, *info.counters])
        for name in [name for name in names if name not in last] + [name for name in last if name in names]:
            self.delete(name)

    def stream_info(self, stream: str) -> Optional[StreamInfo]:
        """What one stream holds now; None if there is no such stream."""
        return self.info().streams.get(stream)

    def retire(self, last: Sequence[str] = ()) -> None:
        """
        Overview:
            The run is over for good: clear it. A server that only serves this run then goes with its last user, without
            its grace. For the last process of a run to call, right before close().
        """
        self.clear(last)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()
