"""The two ways of a payload: in the entry itself (the wire plane), or in a file of the host that all readers are on.

An entry on the host plane holds a *reference*. Who cannot follow one asks the writers to *fill*: to put the payload
into the store as well. The server decides which plane a stream is on, since only it knows all readers: a change of
plane refuses references of the old one, and says up to which entry the writers must fill.
"""

from __future__ import annotations

import logging
import struct
import time
import zlib
from abc import abstractmethod
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ding_store.errors import ConfigError, CorruptPayload, VersionConflict
from ding_store.storage.base import Buffer, Entry, EntryId, Store, ValueVersion
from ding_store.storage.encoding.framing import Pieces, corrupt_entry, decode_entry, up_to_corrupt
from ding_store.storage.encoding.value_parts import ValuePart
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.exactly_once.writer import Writer

logger = logging.getLogger(__name__)

_REFERENCE = struct.Struct('<4s16sIQQII')
_MAGIC = b'DGH\x01'


class StoredEntry(NamedTuple):
    """An entry as the server has it: ``payload`` may be a reference."""

    id: EntryId
    writer: str
    sequence: int
    payload: Buffer


class Remote(NamedTuple):
    """The payload of an entry whose record only says where in the server it is; ``place`` is no other payload's."""

    id: EntryId
    place: bytes
    num_bytes: int


#: Called as often as bytes come, for those who wait for them.
Moved = Callable[[], None]
#: Gets some payloads, each to where it belongs; False for one of which a part is missing.
Download = Callable[[Sequence[Remote], Sequence[memoryview], Moved], List[bool]]
#: The payloads of some entries of a stream, which a download gets; None where parts are missing.
Fetch = Callable[[str, Sequence[Remote], Download], List[Optional[Buffer]]]


def unwatched() -> None:
    """Nobody waits for what comes."""


def fetch_own(stream: str, wanted: Sequence[Remote], download: Download) -> List[Optional[Buffer]]:
    """Payloads of this process's own."""
    payloads = [np.empty(one.num_bytes, np.uint8).data for one in wanted]
    are_whole = download(wanted, payloads, unwatched)
    return [payload.toreadonly() if is_whole else None for payload, is_whole in zip(payloads, are_whole)]


class Reference(NamedTuple):
    """Where a payload is: a region of a ring; its first bytes have a checksum, against files that were mixed up."""

    file: str  # 32 hexadecimal digits
    host: int  # checksum of the host's name: whether the file should be here
    start: int
    length: int
    head_bytes: int
    head_crc: int

    def pack(self) -> bytes:
        return _REFERENCE.pack(_MAGIC, bytes.fromhex(self.file), *self[1:])

    def check_head(self, view: memoryview) -> None:
        if zlib.crc32(view[: self.head_bytes]) != self.head_crc:
            raise CorruptPayload(f'{self.file} has other bytes at {self.start} than it had')


def is_reference(payload: Buffer) -> bool:
    return bytes(payload[:4]) == _MAGIC


def unpack(payload: bytes) -> Reference:
    _, file, *numbers = _REFERENCE.unpack(payload)
    return Reference(file.hex(), *numbers)


class Version(NamedTuple):
    """A version of a value as the server has it: over the wire, as a reference to a slot of some host, or both."""

    version: ValueVersion
    payload: bytes  # or the list of its parts; b'': not over the wire
    reference: bytes  # b'': in no slot
    is_coming: bool = False  # over the wire: somebody asked before


def conflict(name: str, version: int, expected: int) -> VersionConflict:
    """The error of a put that expected another version than ``version``, which is the newest."""
    why = ' as it was read: the server went back in time' if version == expected else ''
    return VersionConflict(f'value {name!r} is at version {version}, not at {expected}{why}')


#: How long a writer may take to fill an entry: longer than it tries to reach a server that went away
#: (``RedisOptions.reconnect_timeout_s``), since what counts as lost is not taken when it comes after all.
PATIENCE_S = 90.0
#: So many times that in all, for a writer that fills nothing while the connection is lost again and again.
MAX_PATIENCES = 5
#: So many writers may be asked for more than live before those that are gone are forgotten.
SPARE_ASKED = 64


class TransportStore(Store):
    """
    Overview:
        A store whose entries and values may hold references: what ``HostCache`` needs of the one it wraps.
    """

    address: str
    writer: str
    patience_s: float = PATIENCE_S  # as its writers are to be waited for

    @property
    def num_sessions(self) -> int:
        """Grows when the server was away."""
        return 0

    def check_size(self, what: str, num_bytes: int) -> None:  # noqa: B027 - a store without a limit takes all
        """
        Raises:
            - NotEnoughSpace: So many bytes could reach no other host.
        """

    @property
    @abstractmethod
    def own_writer(self) -> Writer:
        """The writing side of this process."""

    @property
    def is_nonblocking(self) -> bool:
        """Whether this thread is in ``nonblocking``."""
        return False

    def leaving(self) -> ContextManager[None]:
        """Calls of this thread wait some seconds in all for a server that is away: what they bring is in files, too."""
        return nullcontext()

    def held(self, lock: ContextManager[Any]) -> ContextManager[Any]:
        """Holds a lock; who is hasty does not wait for it with those who wait for the server."""
        return lock

    @abstractmethod
    def append_payload(self, stream: str, payload: Payload, timeout_s: Optional[float] = None) -> EntryId:
        """As ``append``, of what is encoded already; says by ``is_kept`` whether it will release the payload itself."""

    @abstractmethod
    def read_records(
        self, stream: str, after: EntryId, max_entries: int, timeout_s: float, fetch: Fetch = fetch_own
    ) -> List[StoredEntry]:
        """As ``read``; payloads that are elsewhere are ``fetch``'s business."""

    @abstractmethod
    def register_at(
        self, stream: str, reader: str, durable: bool = True, start: str = 'oldest', host: str = ''
    ) -> EntryId:
        """As ``register``, of a reader that can map the files of ``host``."""

    @abstractmethod
    def want(self, stream: str) -> None:
        """Ask all writers to fill what they appended as references until now."""

    @abstractmethod
    def wait_for_fill(
        self, stream: str, record: StoredEntry, timeout_s: float, fetch: Fetch = fetch_own
    ) -> Optional[Buffer]:
        """The payload that an entry was filled with, waiting for it up to ``timeout_s`` while it may come."""

    @abstractmethod
    def fate_of(self, stream: str, record: StoredEntry) -> str:
        """See ``fate``."""

    @abstractmethod
    def wait_for_transports(self, known: Mapping[str, int], timeout_s: float) -> None:
        """Return when a stream is on another plane than the known one, or when the time is over, or sooner."""

    @abstractmethod
    def put_version(
        self, name: str, payload: Optional[Pieces], reference: bytes, expected_version: Optional[int] = None
    ) -> int:
        """As ``put``, of what is encoded already, or only of a reference to it."""

    @abstractmethod
    def get_version(
        self, name: str, newer_than: int, timeout_s: float = 0.0, or_filled: bool = False
    ) -> Optional[Version]:
        """As ``get``; ``or_filled``: version ``newer_than`` is news itself once it has a payload."""

    @abstractmethod
    def fetch_parts(self, name: str, wanted: Sequence[Tuple[ValuePart, memoryview]], moved: Moved = unwatched) -> bool:
        """Parts of a version, each to where it belongs; False if one is missing. Their checksums are looked at."""

    @abstractmethod
    def fill_version(self, name: str, version: int, payload: Pieces) -> bool:
        """Add the payload to a version that is only a reference; False if that is not the newest one any more."""

    @abstractmethod
    def request_version(self, name: str) -> None:
        """Ask the writer of a value to fill its newest version, and all that follow."""

    @abstractmethod
    def wait_for_requests(self, known: Mapping[str, str], timeout_s: float) -> Dict[str, str]:
        """
        Overview:
            For each of these values a token that is another one whenever its newest version is wanted over the wire;
            waits for one that is not the known one, and returns sooner now and then.
        """


#: What became of an entry that holds a reference.
FILLED = 'FILLED'  # its payload is in the store
WAITING = 'WAITING'  # its writer may still fill it
LOST = 'LOST'  # it is there, but its writer no longer has the payload
GONE = 'GONE'  # trimmed or dropped: what is behind it comes next
OVER = 'OVER'  # of an epoch that is over: it comes again, before what was behind it, if it was not acked


def fate(is_over: bool, is_held: bool, is_filled: bool, sequence: int, base: int) -> str:
    """``base`` is the lowest sequence that the writer still holds."""
    if is_over:
        return OVER
    if not is_held:
        return GONE
    if is_filled:
        return FILLED
    return LOST if sequence < base else WAITING


Follow = Callable[[str, StoredEntry], Optional[Entry]]


class Asked(NamedTuple):
    """A writer was asked to fill what it had appended by then."""

    epoch: str
    upto: int  # the number of the last one
    since: float  # or since it filled one of them
    num_sessions: int  # of ours by then: without a server no writer fills
    begun: float  # when it was asked first, or filled one, in whichever session

    def is_of(self, entry_id: EntryId) -> bool:
        return self.epoch == entry_id.epoch and entry_id.number <= self.upto


class Resolver:
    """
    Overview:
        Makes entries of records: references are followed on this host, or waited for over the wire.
    Arguments:
        - follow (:obj:`Optional[Callable]`): The entry of a reference, if this process can map its file.
        - complain (:obj:`Optional[Callable]`): Called with a stream and a record whose reference cannot be followed.
        - patience_s (:obj:`float`): After so long without an entry filled, those that its writer was asked for count as
          lost: all of them, since a dead writer fills none. By default the store's. Counted anew when it was away, but
          no longer than ``MAX_PATIENCES`` of it in all.
        - fetch (:obj:`Callable`): Gets what is in the server, but not in the records.
    """

    def __init__(
        self,
        store: TransportStore,
        follow: Optional[Follow] = None,
        complain: Optional[Callable[[str, StoredEntry], None]] = None,
        patience_s: Optional[float] = None,
        fetch: Fetch = fetch_own,
    ) -> None:
        self._store = store
        self._fetch = fetch
        self._follow = follow
        self._complain = complain or (lambda stream, record: store.want(stream))
        self._patience_s = store.patience_s if patience_s is None else patience_s
        self._asked: Dict[Tuple[str, str], Asked] = {}  # of a stream and a writer
        self._max_asked = SPARE_ASKED  # so many are kept before it is looked which of them are needed

    def read(self, stream: str, after: EntryId, max_entries: int, timeout_s: float) -> List[Entry]:
        if max_entries < 1:
            raise ConfigError(f'max_entries ({max_entries}) must be >= 1')
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            records = self._store.read_records(stream, after, max_entries, left, self._fetch)
            entries = self._entries(stream, records, deadline)
            if entries or time.monotonic() >= deadline:
                return entries

    def _entries(self, stream: str, records: List[StoredEntry], deadline: float) -> List[Entry]:
        """What can be read of the records, up to the first one that cannot; behind that nothing is waited for."""
        return up_to_corrupt(self._readable(stream, records, deadline))

    def _readable(self, stream: str, records: List[StoredEntry], deadline: float) -> Iterator[Entry]:
        is_first = True
        for record in records:
            entry = self._entry(stream, record) or self._awaited(stream, record, deadline if is_first else 0.0)
            if entry is not None:
                is_first = False
                yield entry
            elif not is_first or self._store.fate_of(stream, record) != GONE:
                return

    def _entry(self, stream: str, record: StoredEntry) -> Optional[Entry]:
        if not is_reference(record.payload):
            return decode_entry(stream, *record)
        if len(record.payload) != _REFERENCE.size:
            raise corrupt_entry(stream, record.id, 'it is no whole reference', record.writer, record.sequence)
        return self._follow(stream, record) if self._follow else None

    def _awaited(self, stream: str, record: StoredEntry, deadline: float) -> Optional[Entry]:
        since = self._asked_since(stream, record)
        until = min(deadline, since + self._patience_s)
        payload = self._store.wait_for_fill(stream, record, max(0.0, until - time.monotonic()), self._fetch)
        if payload is not None:
            self._note_fill(stream, record)
            return decode_entry(stream, *record._replace(payload=payload))
        return self._lost(stream, record) if self._is_lost(stream, record) else None

    def _asked_since(self, stream: str, record: StoredEntry) -> float:
        """Since when its writer has been asked for it, which it is now if it was not."""
        asked = self._asked.get((stream, record.writer))
        num_sessions = self._store.num_sessions
        since = begun = time.monotonic()
        if asked is not None and asked.is_of(record.id):
            if asked.num_sessions == num_sessions:
                return asked.since
            begun = asked.begun
            since = min(since, begun + (MAX_PATIENCES - 1) * self._patience_s)
        if self._store.fate_of(stream, record) == WAITING:
            asked = Asked(record.id.epoch, self._newest_of(stream, record), since, num_sessions, begun)
            self._complain(stream, record)
            self._asked[stream, record.writer] = asked
            if len(self._asked) > self._max_asked:
                self._forget_gone()
        return since

    def _forget_gone(self) -> None:
        """Of streams that are gone, or in another epoch, and of writers that the server has dropped, nothing comes."""
        infos = {stream: self._store.stream_info(stream) for stream in {stream for stream, _ in self._asked}}
        for (stream, writer), asked in list(self._asked.items()):
            info = infos.get(stream)
            if info is None or asked.epoch != info.epoch or writer not in info.writers:
                self._asked.pop((stream, writer), None)
        self._max_asked = 2 * len(self._asked) + SPARE_ASKED

    def _newest_of(self, stream: str, record: StoredEntry) -> int:
        """The number of its writer's newest entry: a later one will be of a writer that lives."""
        info = self._store.stream_info(stream)
        if info is None or info.epoch != record.id.epoch:
            return record.id.number
        return max(record.id.number, info.numbers.get(record.writer, 0))

    def _note_fill(self, stream: str, record: StoredEntry) -> None:
        asked = self._asked.get((stream, record.writer))
        if asked is not None and asked.is_of(record.id):
            now = time.monotonic()
            self._asked[stream, record.writer] = asked._replace(since=now, begun=now)

    def _is_lost(self, stream: str, record: StoredEntry) -> bool:
        found = self._store.fate_of(stream, record)
        # Asked once more: the server may have been away meanwhile.
        return found == LOST or (
            found == WAITING and time.monotonic() - self._asked_since(stream, record) >= self._patience_s
        )

    def _lost(self, stream: str, record: StoredEntry) -> Entry:
        logger.info('the payload of entry %d of %r, of %s, is gone', record.id.number, stream, record.writer)
        return Entry(stream, record.id, record.writer, record.sequence, {}, {}, is_lost=True)
