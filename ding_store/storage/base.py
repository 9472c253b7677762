"""Abstract base class of stores, and the types of their entries and values.

A store moves named numpy arrays and JSON-able headers. It handles no trees and no tensors.
"""

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

#: Policies for an append to a full stream: wait, or drop the oldest entries to make room.
OVERFLOW = ('block', 'drop_oldest')

#: Start positions of a new reader: at the oldest entry still held, or behind the newest.
START = ('oldest', 'now')


#: Entry numbers fit into this many bits. Ids that Redis makes from its clock, in milliseconds, do not.
NUMBER_BITS = 40


class _Place(NamedTuple):
    epoch: str
    number: int


class EntryId(_Place):
    """
    Overview:
        Place of an entry in its stream. Numbers are dense (1, 2, 3, ...) within one epoch, whatever the server's clock
        does. A new epoch begins at each restart of the server, at any other loss of entries, and when the stream is
        deleted. Its numbers continue behind the last entry that is left. After a total loss they begin at 1.
    Attributes:
        - chain (:obj:`str`): A hash of all entries up to this one. It shows whether a server still has them. '' if it
          is unknown, as in an id built from another id. Comparisons ignore it.
    """

    chain: str = ''

    def chained(self, chain: str) -> EntryId:
        """Return the same place with this chain."""
        place = EntryId(*self)
        place.chain = chain
        return place


class ValueVersion(int):
    """
    Overview:
        Number of a value's version, with the id of the put that made it. A server that goes back in time gives a number
        twice. The id tells the two versions apart, if a caller passes on the version that ``get`` or ``put`` returned.
        Comparisons ignore the id.
    Attributes:
        - put_id (:obj:`str`): Random id of the put. '' if it is unknown.
    """

    put_id: str = ''

    def __new__(cls, number: int, put_id: str = '') -> ValueVersion:
        version = super().__new__(cls, number)
        version.put_id = put_id
        return version

    def is_of_another_put(self, known: int) -> bool:
        """Return whether ``known`` is another number, or the number of another put."""
        known_id = put_id_of(known)
        return self != known or (known_id != '' and known_id != self.put_id)


def put_id_of(version: Optional[int]) -> str:
    """Return the id of the put that made a version. '' for a plain number, or None."""
    return version.put_id if isinstance(version, ValueVersion) else ''


#: Before the oldest entry of any epoch.
OLDEST = EntryId('', 0)


@dataclass(frozen=True)
class Entry:
    """
    Overview:
        One append, as a reader receives it. ``arrays`` are read-only views. They are valid until the entry is acked or
        dropped by retention. If no durable reader holds the entry, copy the arrays, then call ``validate``.
    """

    stream: str
    id: EntryId
    writer: str
    sequence: int  # 1, 2, 3, ... per writer: readers skip duplicates by it
    header: Header
    arrays: Arrays
    guard: Optional[Callable[[], bool]] = field(default=None, repr=False, compare=False)
    is_lost: bool = False  # header and arrays cannot be recovered, and are empty

    def validate(self) -> bool:
        """Return whether ``arrays`` were intact until now. If not, discard what was read from them."""
        return self.guard is None or self.guard()


@dataclass(frozen=True)
class Value:
    """One version of a named value. ``arrays`` are read-only."""

    name: str
    version: int  # a ValueVersion if a store returned it; pass it to ``get`` unchanged
    header: Header
    arrays: Arrays


@dataclass
class StreamInfo:
    """
    Overview:
        State of a stream. ``last`` is the number of the newest entry of this epoch. ``floor`` is the number of the
        newest entry that was trimmed or dropped. The stream holds ``last - floor`` entries.
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
    host: str = ''  # all readers are on it: payloads go through its shared memory; '': through Redis


@dataclass
class StoreInfo:
    """State of a store, for people and for ``ding-store status``."""

    address: str
    run: str
    server: str
    streams: Dict[str, StreamInfo] = field(default_factory=dict)
    values: Dict[str, int] = field(default_factory=dict)  # name -> newest version
    counters: Dict[str, int] = field(default_factory=dict)


class Store(ABC):
    """
    Overview:
        The place where the processes of a run share streams of entries, named values and counters.
        All methods may be called from several threads. Every wait has a deadline. When it passes, a method that writes
        raises StoreTimeout, and a method that reads returns nothing new.

        Delivery. A writer is one open store in one process. It numbers its entries per stream. It keeps each entry
        until every durable reader has acked it, or retention has dropped it. If the server lost entries, the writer
        sends them again, in order, before anything new. A reader skips the sequence numbers that it has seen: see
        ``exactly_once.reader.Reader``.
        If a server lost its memory, a writer also sends it the durable readers of its last reply. From then on the
        server keeps entries for all of them.
        Two cases are not covered. Entries of a writer that exited before the server lost them are lost. With several
        durable readers, one may ack an entry after the loss, before any writer has sent the list of readers. The others
        then miss that entry.
    Raises (any method):
        - StoreUnavailable: The server is unreachable, and did not return within ``reconnect_timeout_s``.
        - StoreClosed: The store was closed.
    """

    run: str

    @abstractmethod
    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId:
        """
        Overview:
            Append one entry. It is durable when this returns. One writer's entries are stored in order, at most once.
        Arguments:
            - header (:obj:`Mapping`): JSON-able.
            - arrays (:obj:`Mapping`): numpy arrays of a fixed-size dtype, copied before this returns. Their lengths may
              differ: a store does not check rows. The learner checks chunks against their schema.
            - timeout_s (:obj:`Optional[float]`): Seconds to wait for room in a full stream with overflow 'block'. If
              another thread is appending and does not wait for room, a shorter timeout becomes one second.
        Raises:
            - AppendUnsettled: The entry may still arrive: the server may have it, or is unreachable. The writer keeps
              the entry and sends it in a later call, once the server is back or has room. Do not append it again: that
              would double it. ``__cause__`` is the reason. After any error below, the entry never arrives:
            - StoreTimeout: overflow is 'block', and no room was made in time.
            - StreamFull: This one entry is larger than the limit.
            - ServerFull: The server is at its maxmemory.
            - NotEnoughSpace: This one entry is larger than a server accepts.
            - StoreError: The server refused it for a lasting reason. The message names the fix.
            One exception: if another thread closes the store during the append, StoreClosed is raised. The server may
            then have the entry.
        """

    @abstractmethod
    def read(self, stream: str, after: EntryId = OLDEST, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        """
        Overview:
            Return the next entries after ``after``, in order. Wait up to ``timeout_s`` for the first one. If ``after``
            is of a past epoch, start at the oldest entry of the current one. Most callers need
            ``exactly_once.reader.Reader`` instead.
        Returns:
            - entries (:obj:`list`): At most ``max_entries``. Empty if none came in time.
        Raises:
            - CorruptPayload: The first of these entries is not what was written. ``entry_id`` is its id, so that the
              caller can continue behind it.
        """

    @abstractmethod
    def register(self, stream: str, reader: str, durable: bool = True, start: str = 'oldest') -> EntryId:
        """
        Overview:
            Register a reader, and return the entry after which it continues. A registered reader continues behind its
            last ack. A new one starts at the oldest entry still held (``start='oldest'``) or behind the newest
            (``start='now'``). Retention waits for the acks of durable readers. Before the first durable reader
            registers, nothing is trimmed. Ephemeral readers hold no entries.
        """

    @abstractmethod
    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        """
        Overview:
            Acknowledge all entries up to and including ``entry_id``. Entries that all durable readers have acked are
            trimmed. An ack of a past epoch or of an unregistered reader changes nothing.
        Arguments:
            - wait (:obj:`bool`): False: a store may send the ack without waiting for its reply. Its next ``ack``,
              ``advance``, ``read``, ``register``, ``forget``, ``delete`` or ``flush`` waits for the reply and raises
              its errors, and ``close`` logs them. Until then the stream may not show the ack.
        """

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None:
        """
        Overview:
            Call ``ack``, then ``put(name, header, {})``. A reader uses this to publish its position after each entry.
            A store over Redis waits for both only at the first ``advance`` of a value, and for a header that does not
            fit into one message. Otherwise it returns when both are sent. The reply is read by the calls that
            ``ack`` names. ``close`` completes what is open if the server is reachable, and otherwise logs a warning.
        Raises:
            - StoreError: An error of this call, or of an earlier one whose reply this call reads.
        """
        self.ack(stream, reader, entry_id)
        self.put(name, header, {})

    def flush(self) -> None:  # noqa: B027 - there is nothing to do unless ``advance`` is overridden
        """
        Overview:
            Wait until every ``advance`` is done. Send once more the entries that a full stream refused
            (AppendUnsettled), without waiting for room. Call this before you wait for a process that waits for them.
        Raises:
            - StoreError: The errors of ``ack`` and ``put``.
        """

    def close_for_writing(self) -> None:  # noqa: B027 - a store that never sends again has nothing to do
        """
        Overview:
            Declare that this process appends nothing more. From now on, it sends nothing to a stream that was deleted
            since, because its name may belong to the next run. An append to such a stream raises StoreClosed. Entries
            that the server lost are still sent again.
        """

    @property
    def is_away(self) -> bool:
        """
        True if a call made now would wait for an unreachable server. Reading it sends nothing and does not reconnect:
        other calls do, in any thread.
        """
        return False

    def nonblocking(self) -> ContextManager[None]:
        """
        Overview:
            Return a context in which this thread's calls do not wait for an unreachable server. They raise
            StoreUnavailable at once. If the server becomes unreachable during a call, the call may have taken effect.
            Other threads reconnect, send lost entries again and clean up. A server that hangs counts as unreachable
            after ``socket_timeout_s``.
        """
        return nullcontext()

    @abstractmethod
    def forget(self, stream: str, reader: str) -> bool:
        """
        Overview:
            Remove a reader for good, and return whether it was registered. Entries that only this reader still needed
            are trimmed. If it was the last durable reader, all entries are trimmed.
        """

    @abstractmethod
    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        """
        Overview:
            Publish a new version of a value. It becomes visible whole or not at all, and replaces the previous one.
        Arguments:
            - expected_version (:obj:`Optional[int]`): Publish only if the value is at this version now. 0: only if it
              does not exist. A version that ``get`` or ``put`` returned must also be of the same put.
        Returns:
            - version (:obj:`ValueVersion`): 1, 2, 3, ... It grows as long as this store is open or the server
              has its memory.
        Raises:
            - VersionConflict: The value is at another version. Nothing was written.
        """

    @abstractmethod
    def set_start_version(self, name: str, version: int) -> None:
        """
        Overview:
            Give this store's next versions of a value numbers above ``version``, even if the server lost the value. A
            writer calls this after a restart. It sends nothing.
        """

    @abstractmethod
    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        """
        Overview:
            Return the newest version of a value if it is newer than ``newer_than``. Otherwise wait for one up to
            ``timeout_s``, and return None if none came. A server that lost its memory counts from 1 again, so a version
            *below* ``newer_than`` also counts as newer. The same number counts as newer if another put made it. For
            that, ``newer_than`` must be a version that ``get`` or ``put`` returned.
        """

    @abstractmethod
    def add(self, counter: str, amount: int = 0) -> int:
        """
        Overview:
            Add to a counter, which begins at 0, and return its new value. Use counters only for display. If a reply is
            lost, an amount may be added twice, and counters are lost with the server's memory. Exact counts travel in
            entry headers.
        """

    @abstractmethod
    def delete(self, name: str) -> bool:
        """
        Overview:
            Delete the stream, value and counter of this name, and return whether there was one. A stream also loses its
            readers: a reader that continues must register again.
        """

    @abstractmethod
    def info(self) -> StoreInfo:
        """Return what the store holds now."""

    @abstractmethod
    def close(self) -> None:
        """Release connections, threads and files. Entries and values stay in the store. May be called twice."""

    def clear(self, last: Sequence[str] = ()) -> None:
        """Delete everything of this run, the names in ``last`` after all others."""
        info = self.info()
        names = dict.fromkeys([*info.streams, *info.values, *info.counters])
        for name in [name for name in names if name not in last] + [name for name in last if name in names]:
            self.delete(name)

    def stream_info(self, stream: str) -> Optional[StreamInfo]:
        """Return what one stream holds now, or None if there is no such stream."""
        return self.info().streams.get(stream)

    def retire(self, last: Sequence[str] = ()) -> None:
        """
        Overview:
            Clear the run, which is over for good. A server that only serves this run then exits with its last user,
            without waiting ``grace_s``. Call this in the last process of a run, right before ``close``.
        """
        self.clear(last)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()
