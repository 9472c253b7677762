"""The server's side of one stream of a store in memory. Tests compare the Lua scripts with it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Dict, NamedTuple, Set

from ding_store.storage import protocol
from ding_store.storage.base import EntryId, StreamInfo
from ding_store.storage.exactly_once.chain import link
from ding_store.storage.protocol import WIRE, AppendReply, AppendRequest, Backfill


@dataclass
class LogEntry:
    """An entry as the server keeps it."""

    writer: str
    sequence: int
    payload: bytes  # or a reference to it
    size: int
    chain: str


class Known(NamedTuple):
    """A writer's last accepted entry, and the number of its admission to the stream."""

    sequence: int
    number: int
    admission: int


_UNKNOWN = Known(0, 0, 0)


@dataclass
class Log:
    """
    Overview:
        The server's side of one stream. Public methods correspond to the Lua scripts, and are as atomic.
        Held entries have the numbers ``floor + 1 .. last``.
    """

    epoch: str = ''
    last: int = 0
    floor: int = 0
    pending_bytes: int = 0
    num_dropped: int = 0
    freed: int = 0
    chain: str = ''  # up to the newest entry
    floor_chain: str = ''  # up to floor
    deleted: bool = False
    num_ends: int = 0
    records: Dict[int, LogEntry] = field(default_factory=dict)
    writers: Dict[str, Known] = field(default_factory=dict)
    leaving: Set[str] = field(default_factory=set)  # writers that append no more
    num_admitted: int = 0
    num_swept: int = 0  # writers that were dropped because they were silent
    readers: Dict[str, int] = field(default_factory=dict)
    durable: Dict[str, bool] = field(default_factory=dict)
    hosts: Dict[str, str] = field(default_factory=dict)  # reader -> its host
    forgotten: Set[str] = field(default_factory=set)  # readers that were removed
    transport: int = 0
    host: str = ''
    wanted: int = 0
    bases: Dict[str, int] = field(default_factory=dict)  # writer -> the lowest sequence that it still held
    filled: Dict[int, bytes] = field(default_factory=dict)

    def handle_request(self, writer: str, request: AppendRequest) -> AppendReply:
        """Append an entry, or return why not: see ``lua/append.lua``."""
        known = self.writers.get(writer, _UNKNOWN)
        last, number, admission = known
        if request.sequence == 0 and writer in self.writers:
            self.bases[writer] = request.base
        if request.epoch != self.epoch:
            return self._reply(protocol.STALE, known if writer in self.writers else self._admit(writer))
        if request.last_reply and self._is_older(writer, *map(int, request.last_reply.split(':'))):
            self.begin_epoch()
            return self._reply(protocol.STALE, known if writer in self.writers else self._admit(writer))
        if request.admission != admission:
            return self._reply(protocol.FORGOTTEN, known)
        self._bring_back(request.readers)
        if request.sequence == 0 or request.sequence <= last:
            return self._reply(protocol.OK, known)
        if request.sequence > max(last + 1, request.base):
            return self._reply(protocol.GAP, known)
        if request.transport not in (WIRE, self.transport):
            return self._reply(protocol.PLANE, known)
        if request.max_pending_bytes and request.drop_oldest:
            self._drop_to(request.max_pending_bytes - request.size)
        if request.max_pending_bytes and self.pending_bytes + request.size > request.max_pending_bytes:
            return self._reply(protocol.FULL, known)
        self.last += 1
        self.deleted = False
        self.chain = link(self.chain, writer, request.sequence)
        self.records[self.last] = LogEntry(writer, request.sequence, request.payload, request.size, self.chain)
        self.pending_bytes += request.size
        self.writers[writer] = Known(request.sequence, self.last, admission)
        return self._reply(protocol.OK, self.writers[writer])._replace(chain=self.chain)

    def begin_epoch(self) -> None:
        self.epoch = uuid.uuid4().hex

    def behind(self, after: EntryId) -> int:
        """Return the number behind which a reader of ``after`` continues. Without that entry, a new epoch begins."""
        if after.epoch == self.epoch and not self._has(after):
            self.begin_epoch()
        return max(self.floor, after.number if after.epoch == self.epoch else 0)

    def leave(self, writer: str, admission: int) -> None:
        if admission and self.writers.get(writer, _UNKNOWN).admission == admission:
            self.leaving.add(writer)
            self._drop_left()

    def backfill(self, writer: str, request: Backfill) -> None:
        for number in range(min(request.number, self.last), self.floor, -1):
            record = self.records[number]
            if request.epoch == self.epoch and record.writer == writer and record.sequence <= request.sequence:
                if record.sequence == request.sequence:
                    self.filled[number] = request.payload
                    self.freed += 1
                return

    def register(self, reader: str, durable: bool, start: str, host: str) -> EntryId:
        self.deleted = False
        cursor = self.readers.setdefault(reader, self.floor if start == 'oldest' else self.last)
        self.durable[reader] = durable
        self.hosts[reader] = host
        self.forgotten.discard(reader)
        self._choose_transport()
        return EntryId(self.epoch, cursor).chained(self._chain_at(cursor))

    def ack(self, reader: str, entry_id: EntryId) -> None:
        self.behind(entry_id)
        number = min(entry_id.number, self.last)
        if entry_id.epoch == self.epoch and number > self.readers.get(reader, self.last):
            self.readers[reader] = number
            self._trim_acked()
            if len(self.writers) > 2 * protocol.MAX_SILENT_WRITERS:
                self._sweep()

    def forget(self, reader: str) -> bool:
        known = self.readers.pop(reader, None) is not None
        was_durable = self.durable.pop(reader, False)
        if was_durable or not known:
            self.forgotten.add(reader)
        self.hosts.pop(reader, None)
        if was_durable and True not in self.durable.values():
            self._trim(self.last)
        self._trim_acked()
        self._choose_transport()
        return known

    def delete(self) -> bool:
        """Drop the entries, but keep the writers' numbers. Without them, writers would send all entries again."""
        existed, self.deleted = not self.deleted, True
        self._trim(self.last)
        self.readers.clear()
        self.durable.clear()
        self.hosts.clear()
        self._choose_transport()
        self.num_dropped = 0
        self.num_ends += 1
        self.epoch = ''  # The next access begins a new one.
        return existed

    def info(self) -> StreamInfo:
        known = {writer: one for writer, one in self.writers.items() if one.sequence > 0}
        writers = {writer: one.sequence for writer, one in known.items()}
        return StreamInfo(
            self.epoch,
            self.last,
            self.floor,
            self.pending_bytes,
            self.num_dropped,
            dict(self.readers),
            dict(self.durable),
            writers,
            {writer: one.number for writer, one in known.items()},
            self.host,
        )

    def set_transport(self, host: str) -> None:
        self.transport, self.host, self.wanted = self.transport + 1, host, self.last
        self.freed += 1

    def _reply(self, status: str, known: Known) -> AppendReply:
        state = (self.floor, self.freed, self.num_dropped, self.transport, self.host, self.wanted)
        lines = [f'{reader}\t{self.hosts[reader]}\t' for reader, durable in self.durable.items() if durable]
        # The format is that of ``lua/stream.lua``, whose lines have codecs. These are empty.
        readers = '\n'.join(['', *lines, ''])
        reply = AppendReply(status, self.epoch, known.number, known.sequence, *state)
        return reply._replace(ends=(0, self.num_ends), readers=readers, admission=known.admission)

    def _admit(self, writer: str) -> Known:
        if len(self.writers) >= 2 * protocol.MAX_SILENT_WRITERS:
            self._sweep()
        self.num_admitted += 1
        self.writers[writer] = Known(0, 0, self.num_admitted)
        return self.writers[writer]

    def _sweep(self) -> None:
        """Drop writers whose entries are all trimmed, except for some with the newest entries."""
        silent = {writer: one for writer, one in self.writers.items() if one.number <= self.floor}
        newest = sorted(silent, key=lambda writer: silent[writer][1:], reverse=True)
        for writer in newest[protocol.MAX_SILENT_WRITERS :]:
            self.num_swept += 1
            self._drop(writer)

    def _drop_left(self) -> None:
        for writer in [one for one in self.leaving if self.writers[one].number <= self.floor]:
            self._drop(writer)

    def _drop(self, writer: str) -> None:
        del self.writers[writer]
        self.bases.pop(writer, None)
        self.leaving.discard(writer)

    def _is_older(self, writer: str, sequence: int, number: int) -> bool:
        """Return whether an entry that this writer got a reply for is missing, and was not dropped with the writer."""
        if writer not in self.writers:
            return self.num_swept == 0 or number > self.floor
        known = self.writers[writer]
        return known.sequence < sequence or (known.sequence == sequence and known.number != number)

    def _has(self, place: EntryId) -> bool:
        return not place.chain or place.number < self.floor or place.chain == self._chain_at(place.number)

    def _chain_at(self, number: int) -> str:
        if number == self.floor:
            return self.floor_chain
        return self.records[number].chain if number in self.records else ''

    def _bring_back(self, readers: str) -> None:
        for line in readers.splitlines()[1:]:
            reader, host, _ = line.split('\t')
            if reader not in self.readers and reader not in self.forgotten:
                self.register(reader, True, 'oldest', host)

    def _choose_transport(self) -> None:
        hosts = set(self.hosts.values())
        common = hosts.pop() if len(hosts) == 1 else ''
        if common != self.host:
            self.set_transport(common)

    def _trim_acked(self) -> None:
        cursors = [cursor for reader, cursor in self.readers.items() if self.durable[reader]]
        if cursors:
            self._trim(min(cursors))

    def _drop_to(self, pending_bytes: int) -> None:
        upto, pending = self.floor, self.pending_bytes
        while upto < self.last and pending > pending_bytes:
            upto += 1
            pending -= self.records[upto].size
        self.num_dropped += upto - self.floor
        self._trim(upto)

    def _trim(self, upto: int) -> None:
        self.floor_chain = self._chain_at(max(upto, self.floor))
        for number in range(self.floor + 1, upto + 1):
            self.pending_bytes -= self.records.pop(number).size
            self.filled.pop(number, None)
        if upto > self.floor:
            self.floor = upto
            self.freed += 1
            self._drop_left()
