"""The two transports of a payload: inside the entry through Redis, or in a memory-mapped file of one host.

An entry on the shared-memory transport holds a *reference* to its payload. A reader that cannot follow the reference
requests a *backfill*: the writer then puts the payload into the store as well. Only the server has a list of all
readers, so the server decides which transport a stream uses. When the transport changes, the server refuses references
of the old one. It also reports the last entry that the writers must backfill.

Values have no such list. After the first reader that cannot map a value's slot has called ``request_version``, the
writer sends this and all later versions through Redis as well.
"""

from __future__ import annotations

import logging
import struct
import time
import zlib
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ding_store.errors import ConfigError, CorruptPayload
from ding_store.storage.base import Buffer, Entry, EntryId
from ding_store.storage.client import Client
from ding_store.storage.encoding.framing import corrupt_entry, decode_entry, up_to_corrupt
from ding_store.storage.protocol import GONE, LOST, WAITING, Fetch, StoredEntry, fetch_own

logger = logging.getLogger(__name__)

_REFERENCE = struct.Struct('<4s16sIQQII')
_MAGIC = b'DGH\x01'


class Reference(NamedTuple):
    """Place of a payload in a ring, with a checksum of its first bytes that shows if the file was replaced."""

    file: str  # 32 hexadecimal digits
    host: int  # checksum of the host's name: shows whether the file should be on this host
    start: int
    length: int
    head_bytes: int
    head_crc: int

    def pack(self) -> bytes:
        return _REFERENCE.pack(_MAGIC, bytes.fromhex(self.file), *self[1:])

    def check_head(self, view: memoryview) -> None:
        if zlib.crc32(view[: self.head_bytes]) != self.head_crc:
            raise CorruptPayload(f'{self.file} has other bytes at {self.start} than were written')


def is_reference(payload: Buffer) -> bool:
    return bytes(payload[:4]) == _MAGIC


def unpack(payload: bytes) -> Reference:
    _, file, *numbers = _REFERENCE.unpack(payload)
    return Reference(file.hex(), *numbers)


#: Limit on the total wait for one entry, in multiples of ``Server.patience_s``, however often connections are lost or
#: the server restarts.
MAX_PATIENCES = 5
#: Number of requests to ended writers that are kept before they are removed.
SPARE_ASKED = 64


Follow = Callable[[str, StoredEntry], Optional[Entry]]


class Asked(NamedTuple):
    """A backfill request to one writer, for all entries up to a number."""

    epoch: str
    upto: int  # number of the last entry that was requested
    since: float  # time of the request, or of the writer's latest backfill since
    num_sessions: int  # our sessions at that time: without a server no writer can backfill
    begun: float  # time of the first request or of the latest backfill, across sessions and epochs
    sequence: int  # of the first entry that was requested, by its writer's count: the same in all epochs. -1: it came

    def is_of(self, entry_id: EntryId) -> bool:
        return self.epoch == entry_id.epoch and entry_id.number <= self.upto


class Resolver:
    """
    Overview:
        Turns records into entries: follows references on this host, or waits for a backfill.
    Arguments:
        - follow (:obj:`Optional[Callable]`): Returns the entry of a reference, if this process can map its file.
        - complain (:obj:`Optional[Callable]`): Called with a stream and a record whose reference cannot be followed.
        - fetch (:obj:`Callable`): Downloads payloads that the server holds outside the records.
    """

    def __init__(
        self,
        client: Client,
        follow: Optional[Follow] = None,
        complain: Optional[Callable[[str, StoredEntry], None]] = None,
        fetch: Fetch = fetch_own,
    ) -> None:
        self._client = client
        self._fetch = fetch
        self._follow = follow
        self._complain = complain or (lambda stream, record: client.enter().request_backfills(stream))
        self._asked: Dict[Tuple[str, str], Asked] = {}  # by stream and writer
        self._max_asked = SPARE_ASKED  # at this many, remove those that are no longer needed

    def read(self, stream: str, after: EntryId, max_entries: int, timeout_s: float) -> List[Entry]:
        if max_entries < 1:
            raise ConfigError(f'max_entries ({max_entries}) must be >= 1')
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            records = self._client.read(stream, after, max_entries, left, self._fetch)
            entries = self._entries(stream, records, deadline)
            if entries or time.monotonic() >= deadline:
                return entries

    def _entries(self, stream: str, records: List[StoredEntry], deadline: float) -> List[Entry]:
        """Return the entries that can be read, up to the first that cannot. Wait only for the first entry."""
        return up_to_corrupt(self._readable(stream, records, deadline))

    def _readable(self, stream: str, records: List[StoredEntry], deadline: float) -> Iterator[Entry]:
        is_first = True
        for record in records:
            entry = self._entry(stream, record) or self._awaited(stream, record, deadline if is_first else 0.0)
            if entry is not None:
                is_first = False
                yield entry
            elif not is_first or self._fate_of(stream, record) != GONE:
                return

    def _entry(self, stream: str, record: StoredEntry) -> Optional[Entry]:
        if not is_reference(record.payload):
            return decode_entry(stream, *record)
        if len(record.payload) != _REFERENCE.size:
            raise corrupt_entry(stream, record.id, 'it is not a whole reference', record.writer, record.sequence)
        return self._follow(stream, record) if self._follow else None

    def _awaited(self, stream: str, record: StoredEntry, deadline: float) -> Optional[Entry]:
        since = self._asked_since(stream, record)
        until = min(deadline, since + self._client.server.patience_s)
        payload = self._client.wait_for_backfill(stream, record, max(0.0, until - time.monotonic()), self._fetch)
        if payload is not None:
            self._note_backfill(stream, record)
            return decode_entry(stream, *record._replace(payload=payload))
        return self._lost(stream, record) if self._is_lost(stream, record) else None

    def _fate_of(self, stream: str, record: StoredEntry) -> str:
        return self._client.enter().read_backfill(stream, record).fate

    def _asked_since(self, stream: str, record: StoredEntry) -> float:
        """Return when the entry was requested from its writer. Send a request now if there was none."""
        asked = self._asked.get((stream, record.writer))
        num_sessions = self._client.server.availability_of(stream).num_sessions
        since = begun = time.monotonic()
        if asked is not None and asked.is_of(record.id) and asked.num_sessions == num_sessions:
            return asked.since
        if asked is not None and (asked.is_of(record.id) or asked.sequence == record.sequence):
            begun = asked.begun
            since = min(since, begun + (MAX_PATIENCES - 1) * self._client.server.patience_s)
        if self._fate_of(stream, record) == WAITING:
            newest = self._newest_of(stream, record)
            asked = Asked(record.id.epoch, newest, since, num_sessions, begun, record.sequence)
            self._complain(stream, record)
            self._asked[stream, record.writer] = asked
            if len(self._asked) > self._max_asked:
                self._forget_gone()
        return since

    def _forget_gone(self) -> None:
        """Remove requests whose stream ended or has another epoch, or whose writer the server dropped."""
        infos = {stream: self._client.enter().stream_info(stream) for stream in {stream for stream, _ in self._asked}}
        for (stream, writer), asked in list(self._asked.items()):
            info = infos.get(stream)
            if info is None or asked.epoch != info.epoch or writer not in info.writers:
                self._asked.pop((stream, writer), None)
        self._max_asked = 2 * len(self._asked) + SPARE_ASKED

    def _newest_of(self, stream: str, record: StoredEntry) -> int:
        """Return the number of the writer's newest entry. Any later entry shows that the writer is running."""
        info = self._client.enter().stream_info(stream)
        if info is None or info.epoch != record.id.epoch:
            return record.id.number
        return max(record.id.number, info.numbers.get(record.writer, 0))

    def _note_backfill(self, stream: str, record: StoredEntry) -> None:
        asked = self._asked.get((stream, record.writer))
        if asked is not None and asked.is_of(record.id):
            now = time.monotonic()
            self._asked[stream, record.writer] = asked._replace(since=now, begun=now, sequence=-1)

    def _is_lost(self, stream: str, record: StoredEntry) -> bool:
        found = self._fate_of(stream, record)
        # Request again: the server may have been away since.
        return found == LOST or (
            found == WAITING and time.monotonic() - self._asked_since(stream, record) >= self._client.server.patience_s
        )

    def _lost(self, stream: str, record: StoredEntry) -> Entry:
        logger.info('the payload of entry %d of %r by writer %s is lost', record.id.number, stream, record.writer)
        return Entry(stream, record.id, record.writer, record.sequence, {}, {}, is_lost=True)
