"""The protocol of a store and its server: the commands of a ``Server``, and the data that they carry.

There is one client, ``client.py``, and there are three servers. ``redis/server.py`` sends the commands to a Redis
server, where Lua scripts run them. ``memory/server.py`` runs them in this process, and is the oracle of the tests.
``shards/router.py`` passes each command on to one of several servers.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from ding_store.errors import StoreError, VersionConflict
from ding_store.storage.base import Buffer, EntryId, Header, StoreInfo, StreamInfo, ValueVersion
from ding_store.storage.encoding.framing import Pieces, encode_pieces
from ding_store.storage.encoding.value_parts import ValuePart

#: Statuses of the server's reply to an append.
OK = 'OK'  # accepted now or earlier: ``number`` is its place
STALE = 'STALE'  # the stream has another epoch: send again with the state of this reply
GAP = 'GAP'  # entries before this one are missing: send again from ``last + 1``
FULL = 'FULL'  # no room: wait until the stream's counter of freed entries passes ``freed``
PLANE = 'PLANE'  # the reference is for a past transport: send again for the one in this reply
FORGOTTEN = 'FORGOTTEN'  # the server dropped this writer, which was silent while many others came and went

#: The server keeps a writer while it holds an entry of it. A writer that left is dropped with its last entry. Among
#: the others, the server keeps those with the newest entries: at least this many, and at most twice as many.
MAX_SILENT_WRITERS = 512

#: The transport of a payload in bytes: the server accepts it at any time.
WIRE = -1


class AppendRequest(NamedTuple):
    """
    Overview:
        A writer's request to append one entry. ``base`` is the lowest sequence that the writer still holds: it never
        sends one below. With sequence 0, the request appends nothing and returns the stream's state.
    """

    stream: str
    epoch: str
    sequence: int
    base: int
    payload: bytes = b''
    max_pending_bytes: int = 0  # 0: no limit, for entries that were accepted once
    drop_oldest: bool = False
    size: int = 0  # bytes of the payload, also if only a reference to it is sent
    transport: int = WIRE  # number of the transport that this reference is for
    readers: str = ''  # durable readers that the server may have lost, from an earlier reply
    last_reply: str = ''  # "<last>:<number>" of the last reply of this epoch: a server that has less lost entries
    admission: int = 0  # number that the server gave this writer; 0: none
    listed: int = 0  # ``listed`` of the last reply with readers


#: Two counts of ended runs of this name. First: all data of the server was put aside. Second: the stream was
#: deleted since then. If a count grew, missing entries are not lost: they ended with their run.
Ends = Tuple[int, int]


class AppendReply(NamedTuple):
    """The server's reply to an ``AppendRequest``: a status and the stream's state."""

    status: str
    epoch: str  # '': there is no such stream
    number: int  # of the entry sent; for STALE, GAP and sequence 0 of this writer's last one
    last: int  # this writer's last accepted sequence
    floor: int  # entries up to here are trimmed: their copies can go
    freed: int
    num_dropped: int
    transport: int = 0
    host: str = ''  # all readers are on it: references to its files are accepted; '': only payloads
    wanted: int = 0  # entries up to here must be readable through Redis
    ends: Ends = (0, 0)  # valid only if ``epoch`` differs from that of the request
    readers: Optional[str] = ''  # in the format of ``lua/stream.lua``; None: unchanged
    chain: str = ''  # up to the entry sent, if it was accepted now
    admission: int = 0  # number of this writer's admission to the stream
    listed: int = 0  # grows when the readers change


class FreedCapacity(NamedTuple):
    """The server's notification to writers that wait for room."""

    counter: int  # grows with everything that makes room
    epoch: str
    floor: int  # entries of this epoch up to here are trimmed
    chain: str = ''  # up to there


class Backfill(NamedTuple):
    """The payload of an entry that a writer had sent as a reference."""

    stream: str
    epoch: str
    sequence: int
    number: int  # of the entry, or an upper bound of it
    payload: bytes


class StoredEntry(NamedTuple):
    """An entry as the server has it: ``payload`` may be a reference."""

    id: EntryId
    writer: str
    sequence: int
    payload: Buffer


class Remote(NamedTuple):
    """A payload that the server holds outside the entry's record. ``place`` is unique to its bytes."""

    id: EntryId
    place: bytes
    num_bytes: int


#: Called each time bytes arrive, so that waiting processes see the progress of a download.
Moved = Callable[[], None]
#: Downloads payloads, each into its buffer. Returns False for each payload of which a part is missing.
Download = Callable[[Sequence[Remote], Sequence[memoryview], Moved], List[bool]]
#: Returns the payloads of entries of a stream with the help of a download. None if parts are missing.
Fetch = Callable[[str, Sequence[Remote], Download], List[Optional[Buffer]]]


def unwatched() -> None:
    """Do nothing: no other process waits for these bytes."""


def fetch_own(stream: str, wanted: Sequence[Remote], download: Download) -> List[Optional[Buffer]]:
    """Download payloads into this process's own memory."""
    payloads = [np.empty(one.num_bytes, np.uint8).data for one in wanted]
    are_whole = download(wanted, payloads, unwatched)
    return [payload.toreadonly() if is_whole else None for payload, is_whole in zip(payloads, are_whole)]


class Version(NamedTuple):
    """A version of a value as the server has it: its payload, a reference to a slot on some host, or both."""

    version: ValueVersion
    payload: bytes  # or the list of its parts; b'' if the server has no payload
    reference: bytes  # b'' if it is in no slot
    is_coming: bool = False  # a reader requested the payload before


class Decided(NamedTuple):
    """The version that a server gave to a decision."""

    version: ValueVersion
    num_replicas: int  # replicas that had it when the wait for them ended
    generation: str  # see ``Server.generation``


def conflict(name: str, version: int, expected: int) -> VersionConflict:
    """Return the error of a put that expected another version than the newest one."""
    why = ' as it was read: the server went back in time' if version == expected else ''
    return VersionConflict(f'value {name!r} is at version {version}, not at {expected}{why}')


#: States of an entry that holds a reference.
FILLED = 'FILLED'  # its payload is in the store
WAITING = 'WAITING'  # its writer may still backfill it
LOST = 'LOST'  # the entry exists, but its writer no longer has the payload
GONE = 'GONE'  # trimmed or dropped: the reader continues with the entry after it
OVER = 'OVER'  # its epoch is over: if it was not acked, its writer appends it again before later entries


def fate(is_over: bool, is_held: bool, is_filled: bool, sequence: int, base: int) -> str:
    """Return the state of an entry. ``base`` is the lowest sequence number that its writer still holds."""
    if is_over:
        return OVER
    if not is_held:
        return GONE
    if is_filled:
        return FILLED
    return LOST if sequence < base else WAITING


class Backfilled(NamedTuple):
    """The state of an entry that was appended as a reference."""

    payload: Optional[Buffer]  # if it was backfilled
    fate: str  # FILLED, WAITING, LOST, GONE or OVER
    freed: int  # the stream's counter of freed capacity: it grows with every backfill


#: Interval in which a wait for a version looks whether it is over. It sends nothing.
LOOK_S = 0.5
#: Time that a writer has to backfill an entry. It must exceed ``RedisOptions.reconnect_timeout_s``, the time that a
#: writer tries to reach the server: an entry that counts as lost is skipped even if its payload comes later.
PATIENCE_S = 90.0


class Availability:
    """
    Overview:
        The ways in which calls wait for a server. This class is for a server that is always there. The connection to
        a Redis server overrides all of it.
    """

    num_sessions = 0  # connections to the server so far: it grows after each outage, when the server may lack entries

    @property
    def is_nonblocking(self) -> bool:
        """True if this thread is inside ``nonblocking``."""
        return False

    def is_away(self) -> bool:
        """Return whether a call made now would wait for the server. Asking sends nothing."""
        return False

    def nonblocking(self) -> ContextManager[None]:
        """See ``Store.nonblocking``."""
        return nullcontext()

    def one_wait(self) -> ContextManager[None]:
        """Make all calls and lock waits of this thread share one deadline while the server is away."""
        return nullcontext()

    def leaving(self, limit_s: float) -> ContextManager[None]:
        """Wait ``limit_s`` in all for a server that is away, beginning with the first wait."""
        return nullcontext()

    def held(self, lock: ContextManager[Any]) -> ContextManager[Any]:
        """Hold a lock. Inside ``nonblocking``, do not wait for a holder that waits for the server."""
        return lock

    def reach(self, what: str, patience_s: float) -> None:
        """Connect within ``patience_s`` if the connection is lost."""

    def has_hung(self, error: StoreError) -> bool:
        """Return whether a call with this error has waited for a server that is connected, and silent."""
        return False


class StartVersions:
    """The versions that a writer counts on from, by value. Thread-safe."""

    def __init__(self) -> None:
        self._versions: Dict[str, int] = {}
        self._places: Dict[str, Tuple[EntryId, int]] = {}  # of the last ``follow``, and the version that it gave
        self._lock = threading.Lock()

    def of(self, name: str) -> int:
        return self._versions.get(name, 0)

    def raise_to(self, name: str, version: int) -> None:
        """Set the version to count on from. It never falls: of two threads that put, the first may return last."""
        with self._lock:
            self._versions[name] = max(int(version), self.of(name))

    def follow(self, name: str, entry_id: EntryId) -> None:
        """
        Overview:
            Let the value's next version grow with the entries' numbers: between two calls of one epoch by as much as
            the number, or by more. Then a process can wait for the version of an entry by ``wait_for_version``.
        """
        with self._lock:
            version = entry_id.number
            if name in self._places:
                place, version = self._places[name]
                is_same_epoch = place.epoch == entry_id.epoch
                growth = max(0, entry_id.number - place.number) if is_same_epoch else 1
                version = max(version, self.of(name)) + growth
            self._places[name] = entry_id, version
            self._versions[name] = max(version - 1, self.of(name))


class Server(ABC):
    """
    Overview:
        The server of a run, as one writer uses it. It holds the run's streams, values and counters. A new object is
        needed after a ``fork``. All methods may be called from several threads.

        Each command takes effect at one moment between others, or not at all. Exceptions are named. A command may be
        repeated after an error: its docstring says what the second one does. A server numbers the entries of a stream
        1, 2, 3, ... It begins a new epoch when it has lost entries. Names of streams, values and readers were checked
        by the caller. The longest ``timeout_s`` is ``check_every_s``: clients wait in slices.
    Arguments:
        - writer (:obj:`str`): The writer's id, unique to one open store and process.
    Attributes:
        - address (:obj:`str`): The server's address for messages, without passwords.
        - availability (:obj:`Availability`): The ways to wait for the server.
        - after_reconnect (:obj:`Callable`): Called by the first command after a reconnect: the server may have lost its
          memory, so the writer must send its unacked entries again.
        - versions (:obj:`StartVersions`): ``put`` gives higher versions than these.
        - patience_s (:obj:`float`): Seconds that a reader waits for a writer's backfill.
        - max_payload_bytes (:obj:`int`): Maximum size of a payload.
        - keeps_data (:obj:`bool`): Whether a restarted server still has the entries that it accepted.
        - min_replicas (:obj:`int`): Replicas that ``decide`` waits for.
        - advice (:obj:`str`): What should be changed in the server, which works as it is. '': nothing.
    Raises (any command):
        - StoreUnavailable: Transient. The server was unreachable for ``reconnect_timeout_s``. The command may have
          taken effect.
        - StoreClosed: ``close`` was called. The command may have taken effect.
        - ServerFull: The server is at its maxmemory. The command may succeed later.
        - StoreError: Any other refusal is lasting. The message names the fix.
    """

    address: str
    patience_s: float = PATIENCE_S
    max_payload_bytes: int = sys.maxsize
    keeps_data: bool = False
    min_replicas: int = 0
    advice: str = ''

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.availability = Availability()
        self.after_reconnect: Callable[[], None] = lambda: None
        self.versions = StartVersions()

    def connect(self) -> None:  # noqa: B027 - a server that is always there has nothing to do
        """Connect now, instead of with the first command."""

    # Names, where each has one of several servers

    def shard_of(self, name: str) -> int:
        """Return the number of the server that has this name. Names of one number share a server."""
        return 0

    def availability_of(self, name: str) -> Availability:
        """Return the ways to wait for the server that has this name."""
        return self.availability

    def apart(self, name: str) -> ContextManager[None]:
        """
        Run a block that concerns this name, in a call that may concern another one. If the name has another server,
        which is away, do not wait for it: skip the rest of the block. With one server, this does nothing.
        """
        return nullcontext()

    # Streams, as writers use them

    @abstractmethod
    def append(self, request: AppendRequest) -> AppendReply:
        """
        Overview:
            Append one entry of this writer, or return why not. With sequence 0, only return the stream's state. A
            repeated request appends nothing and gets OK. The payload may be sent before the request, outside the
            moment of the append.
        Raises:
            - StoreError: If ``has_no_effect`` is set, the entry was not appended.
        """

    @abstractmethod
    def backfill(self, request: Backfill) -> None:
        """Add the payload to an entry of this writer that is a reference. Do nothing if it is not held."""

    @abstractmethod
    def leave(self, stream: str, admission: int) -> None:
        """Note that this writer appends no more. The server drops it once the stream holds none of its entries."""

    @abstractmethod
    def wait_for_capacity(self, stream: str, freed: int, timeout_s: float) -> Optional[FreedCapacity]:
        """
        Return the server's notification once the counter of freed capacity exceeds ``freed``. Return None if it did not
        within ``timeout_s``, or sooner.
        """

    @abstractmethod
    def wait_for_transports(self, known: Mapping[str, int], timeout_s: float) -> None:
        """Return when the transport of one of these streams is not the known one, when the time is over, or sooner."""

    # Streams, as readers use them

    @abstractmethod
    def read(
        self, stream: str, after: EntryId, max_entries: int, timeout_s: float = 0.0, fetch: Fetch = fetch_own
    ) -> List[StoredEntry]:
        """
        Overview:
            Return the next entries after ``after``, in order. Wait up to ``timeout_s`` for the first one, or shorter.
            If ``after`` is of a past epoch, or the server has another entry there, start at the oldest entry held.
        Arguments:
            - fetch (:obj:`Callable`): Downloads payloads that the server holds outside the entries.
        Raises:
            - CorruptPayload: The first of these entries was written by another program, or is damaged.
        """

    @abstractmethod
    def read_backfill(self, stream: str, entry: StoredEntry, fetch: Optional[Fetch] = None) -> Backfilled:
        """Return the state of an entry that is a reference. With ``fetch``, also its payload if it was backfilled."""

    @abstractmethod
    def request_backfills(self, stream: str) -> None:
        """Request that the writers backfill all references that they have appended until now."""

    @abstractmethod
    def register_reader(
        self, stream: str, reader: str, durable: bool = True, start: str = 'oldest', host: str = ''
    ) -> EntryId:
        """
        Overview:
            Register a reader, or change its kind and its host. Return the entry after which it continues. A repeated
            call returns the same.
        Arguments:
            - host (:obj:`str`): The host whose files the reader can map. '': none.
        """

    @abstractmethod
    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        """
        Overview:
            Move a reader's cursor forward to ``entry_id``, and trim what all durable readers have acked. Do nothing if
            the cursor is there already, the epoch is over, or the reader is not registered.
        Arguments:
            - wait (:obj:`bool`): If false, this may return before the command took effect. Then ``flush`` waits for it.
        """

    @abstractmethod
    def unregister_reader(self, stream: str, reader: str) -> bool:
        """Remove a reader, and trim what only it still needed. Return whether it was registered."""

    # Values

    @abstractmethod
    def put(
        self, name: str, payload: Optional[Pieces], reference: bytes = b'', expected_version: Optional[int] = None
    ) -> ValueVersion:
        """
        Overview:
            Publish a new version of a value, from an encoded payload, a reference to it, or both. Its number is above
            the newest version and above ``versions``. The payload may be sent before, but becomes visible at one
            moment. After an error, a repeated call publishes another version.
        Raises:
            - VersionConflict: The value is not at ``expected_version``. Nothing was published.
        """

    def decide(self, name: str, payload: Pieces, expected_version: Optional[int] = None) -> Decided:
        """
        Overview:
            Put a value that is to survive a failover. Then wait, but not for long, until ``min_replicas`` replicas of
            the server have it. This is for a server without replicas.
        Arguments:
            - payload (:obj:`Pieces`): At most ``INLINE_BYTES``.
        Raises:
            - VersionConflict: The value is not at ``expected_version``. Nothing was published.
        """
        return Decided(self.put(name, payload, b'', expected_version), self.min_replicas, self.generation(name))

    @abstractmethod
    def generation(self, name: str) -> str:
        """
        Return a text that changes whenever the server of this name may have lost values. Only this process compares it.
        """

    @abstractmethod
    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0, or_filled: bool = False) -> Optional[Version]:
        """
        Overview:
            Return the newest version if it is of another put than ``newer_than``. Otherwise wait for one up to
            ``timeout_s``, or shorter.
        Arguments:
            - or_filled (:obj:`bool`): Also return ``newer_than`` once it has a payload.
        """

    @abstractmethod
    def wait_for_version(
        self, name: str, version: int, timeout_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """
        Overview:
            Return once the value has this version or a later one, when the time is over, or sooner. Earlier versions
            cost this process nothing.
        Arguments:
            - is_over (:obj:`Callable`): Called every ``LOOK_S`` in this thread. If it returns True, this returns.
        Returns:
            - is_there (:obj:`bool`): True: the value had such a version. False: it had none, or this returned sooner.
        """

    @abstractmethod
    def fetch_parts(self, name: str, wanted: Sequence[Tuple[ValuePart, memoryview]], moved: Moved = unwatched) -> bool:
        """Download parts of a version into their buffers and verify their checksums. Return False if one is missing."""

    @abstractmethod
    def backfill_version(self, name: str, version: int, payload: Pieces) -> bool:
        """Add the payload to a version that is only a reference. Return False if it is no longer the newest version."""

    @abstractmethod
    def request_version(self, name: str) -> None:
        """Request that the value's writer backfills its newest version and all later ones."""

    @abstractmethod
    def wait_for_requests(self, known: Mapping[str, str], timeout_s: float) -> Dict[str, str]:
        """
        Overview:
            Return a token for each value that changes whenever a backfill of its newest version is requested. Wait for
            a token that differs from the known one. The call may return sooner without a change.
        """

    # Everything else

    @abstractmethod
    def add(self, counter: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and return its new value. A repeated call adds again."""

    @abstractmethod
    def delete(self, name: str) -> bool:
        """
        Overview:
            Delete the stream, the value and the counter of this name, one after another. Return whether there was one.
            The writers' sequences are kept, so that writers do not send all entries again.
        """

    @abstractmethod
    def info(self) -> StoreInfo:
        """Return what the run holds. Each stream, value and counter is read at a moment of its own."""

    @abstractmethod
    def close(self) -> None:
        """Release connections. Threads that wait in a command raise StoreClosed. May be called twice."""

    def stream_info(self, stream: str) -> Optional[StreamInfo]:
        """Return what one stream holds, or None if there is no such stream."""
        return self.info().streams.get(stream)

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None:
        """Call ``ack`` and put a value without arrays. Like ``ack``, this may return before they took effect."""
        self.ack(stream, reader, entry_id)
        self.put(name, encode_pieces(header, {}))

    def announce(self, name: str, header: Header) -> None:
        """Put a value without arrays. Like ``ack``, this may return before it took effect."""
        self.put(name, encode_pieces(header, {}))

    def flush(self) -> None:  # noqa: B027 - there is nothing to do unless ``ack`` or ``advance`` return early
        """Wait until every ``ack`` and ``advance`` took effect. Raise their errors."""

    def finish(self) -> Optional[StoreError]:
        """Like ``flush``, right before ``close`` and without waiting for a server that is away. Return the error."""
        return None

    def retire(self, names: Set[str]) -> None:  # noqa: B027 - a server that ends with this process has nothing to do
        """Delete what is left of a run that is over, and let a server that only serves this run exit."""
