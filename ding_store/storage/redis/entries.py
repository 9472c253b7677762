"""Reads a stream's entries from a Redis server, with as few commands as possible."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ding_store.errors import CorruptPayload, NotEnoughSpace
from ding_store.storage.base import NUMBER_BITS, Buffer, EntryId
from ding_store.storage.encoding.framing import corrupt_entry, up_to_corrupt
from ding_store.storage.exactly_once.chain import link
from ding_store.storage.protocol import FILLED, GONE, OVER, Backfilled, Fetch, StoredEntry, fate, fetch_own
from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.keys import RunKeys
from ding_store.storage.redis.parts import Parts, unpack
from ding_store.storage.redis.server_session import ServerSession

#: One read stops to fetch parts after this many bytes, but fetches one entry at least.
MAX_READ_BYTES = 64 << 20
#: Longest wait for entries of the known epoch, before the reader checks the stream's epoch.
_TRUST_MS = 1000

Raw = List[Any]  # an id, then a list of names and values in turn


class RedisEntries:
    """
    Overview:
        Reads entries as the server holds them. Thread-safe.
    Arguments:
        - parts (:obj:`Parts`): Fetches payloads that are in parts.
    """

    def __init__(self, connection: Connection, keys: RunKeys, parts: Parts) -> None:
        self._connection = connection
        self._keys = keys
        self._parts = parts
        self._known: Dict[str, Tuple[str, str]] = {}  # stream -> its epoch, the server's run_id

    def read(
        self, stream: str, after: EntryId, max_entries: int, block_ms: int, fetch: Fetch = fetch_own
    ) -> List[StoredEntry]:
        """Return the next entries as ``Store.read`` does, or none. The wait may end before or after ``block_ms``."""
        epoch, raw = self._next(stream, after, max_entries, min(block_ms, _TRUST_MS))
        return up_to_corrupt(self._whole(stream, (_record(stream, epoch, one) for one in raw), fetch))

    def read_backfill(self, stream: str, record: StoredEntry, fetch: Optional[Fetch] = None) -> Backfilled:
        """
        Overview:
            Read the state of an entry that was a reference, or whose parts are missing.
        Raises:
            - CorruptPayload: The backfilled payload is in parts, but the bytes that name them are malformed.
        """
        meta, number = self._keys.of(stream, 'meta'), record.id.number
        payload_of = ('HGET', self._keys.of(stream, 'filled'), number)
        size_of = ('HGET', self._keys.of(stream, 'sizes'), number)

        def command(session: ServerSession) -> Any:
            # A server at its maxmemory refuses transactions. Instead ``known`` is read twice: every change shows in it.
            known = ('HMGET', meta, 'epoch', 'floor', 'room', f'b:{record.writer}')
            begun, payload, size, ended = session.ask(known, payload_of, size_of, known)
            while begun != ended:
                begun, payload, size, ended = session.ask(known, payload_of, size_of, known)
            return payload, size, begun

        payload, size, (epoch, floor, freed, base) = self._connection.call(f'read {stream!r}', command)
        chain = (size or b'').partition(b':')[2].decode()
        is_held = number > int(floor or 0)
        is_another = bool(chain and record.id.chain) and chain != record.id.chain
        if is_held and size is None:  # A server that went back in time does not have the entry yet.
            is_another = not self._is_there(stream, record)
        is_over = is_another or epoch != record.id.epoch.encode()
        how = fate(is_over, is_held, payload is not None, record.sequence, int(base or 0))
        if how != FILLED:
            return Backfilled(None, how, int(freed or 0))
        record = record._replace(payload=payload)
        _bytes_in_parts(stream, record)  # Raises an error that names the entry if these bytes are malformed.
        if fetch is not None:
            _, (payload,) = self._fetched(stream, [record], fetch)
            how = how if payload is not None else self._since_gone(stream, record)
            return Backfilled(payload, how, int(freed or 0))
        are_there = self._parts.are_there(stream, payload)
        return Backfilled(None, how if are_there else self._since_gone(stream, record), int(freed or 0))

    def _is_there(self, stream: str, record: StoredEntry) -> bool:
        """Return whether the stream has an entry of this number. Another program may have written it."""
        of_number = ('XRANGE', self._keys.of(stream, 'log'), record.id.number, record.id.number)
        (found,) = self._connection.call(f'read {stream!r}', lambda session: session.ask(of_number))
        return bool(found)

    def _since_gone(self, stream: str, record: StoredEntry) -> str:
        """Return GONE or OVER for an entry that was there a moment ago."""
        known = ('HGET', self._keys.of(stream, 'meta'), 'epoch')
        (epoch,) = self._connection.call(f'read {stream!r}', lambda session: session.ask(known))
        return GONE if epoch == record.id.epoch.encode() else OVER

    def _next(self, stream: str, after: EntryId, max_entries: int, block_ms: int) -> Tuple[str, List[Raw]]:
        """
        Overview:
            Return the epoch and the next entries. One command does if they continue ``after`` in its epoch. If not,
            read the stream's epoch and the entries that it holds.
        """
        begin = time.monotonic()
        log = self._keys.of(stream, 'log')

        def trusting(session: ServerSession) -> Any:
            if self._known.get(stream) != (after.epoch, session.generation.run_id):
                return None
            return session.ask(_xread(log, after.number, max_entries, block_ms))[0]

        raw = _entries_of(self._connection.wait(f'read {stream!r}', trusting))
        if raw and _are_of(raw, after.epoch) and _is_behind(raw[0], after):
            return after.epoch, raw
        epoch, number, raw = self._held(stream, after, max_entries)
        left_ms = block_ms - int(1000 * (time.monotonic() - begin))
        if raw or left_ms <= 0:
            return epoch, raw
        command = _xread(log, number, max_entries, left_ms)
        raw = _entries_of(self._connection.wait(f'read {stream!r}', lambda session: session.ask(command)[0]))
        # Entries of another epoch are not returned: the caller then reads that epoch from its oldest entry.
        is_good = _are_of(raw, epoch) and (epoch != after.epoch or not raw or _is_behind(raw[0], after))
        return epoch, raw if is_good else []

    def _held(self, stream: str, after: EntryId, max_entries: int) -> Tuple[str, int, List[Raw]]:
        """Return the epoch, the number to continue after, and the entries after that, all from one moment."""
        meta, log = self._keys.of(stream, 'meta'), self._keys.of(stream, 'log')

        def held_after(number: int) -> Tuple[EntryId, List[Raw]]:
            state = ('HMGET', meta, 'epoch', 'last', 'chain')
            entries = ('XRANGE', log, f'({_behind(number)}', '+', 'COUNT', max_entries)

            def command(session: ServerSession) -> Tuple[EntryId, List[Raw]]:
                # A server at its maxmemory refuses transactions. Read the epoch twice instead: no epoch ever returns.
                begun, raw, ended = session.ask(state, entries, state)
                while begun[0] != ended[0]:
                    begun, raw, ended = session.ask(state, entries, state)
                epoch, last, chain = (found or b'' for found in begun)
                self._known[stream] = (epoch.decode(), session.generation.run_id)
                return EntryId(epoch.decode(), int(last or 0)).chained(chain.decode()), raw

            found: Tuple[EntryId, List[Raw]] = self._connection.call(f'read {stream!r}', command)
            return found

        number = after.number
        newest, raw = held_after(number)
        if number and newest.epoch == after.epoch and not _leads_on(after, newest, raw):
            what = f'read {stream!r}'
            self._connection.call(what, lambda session: self._keys.run(session, 'renew', stream, (after.epoch,)))
            newest, raw = held_after(number)
        if number and newest.epoch != after.epoch:
            number = 0
            newest, raw = held_after(number)
        return newest.epoch, number, raw

    def _whole(self, stream: str, records: Iterator[StoredEntry], fetch: Fetch) -> Iterator[StoredEntry]:
        """Yield the records with their payloads joined from parts, up to ``MAX_READ_BYTES``."""
        held, corrupt = _up_to(records, stream, MAX_READ_BYTES)
        if not held:
            if corrupt is not None:
                raise corrupt
            return
        found, payloads = self._fetched(stream, held, fetch)
        for record, payload in zip(found, payloads):
            if payload is not None:
                yield record._replace(payload=payload)
                continue
            how = self.read_backfill(stream, record).fate
            if how == OVER:
                return
            if how != GONE:
                raise corrupt_entry(stream, record.id, 'parts of it are missing', record.writer, record.sequence)
        if corrupt is not None and len(found) == len(held):
            raise corrupt

    def _fetched(
        self, stream: str, records: List[StoredEntry], fetch: Fetch
    ) -> Tuple[List[StoredEntry], List[Optional[Buffer]]]:
        """
        Overview:
            Fetch as many payloads as there is memory for, at least one. Return the records and the payloads. None
            stands for a payload with missing parts.
        Raises:
            - NotEnoughSpace: There is no memory for the first payload, and its parts have the size that it states.
        """
        for count in (len(records), 1):
            with suppress(MemoryError):
                return records[:count], self._parts.fetch(stream, records[:count], fetch)
        record = records[0]
        if self._parts.are_whole(stream, record.payload):
            raise NotEnoughSpace(
                f'entry {record.id.number} of {stream!r} has {_bytes_in_parts(stream, record)} bytes, and this process '
                'cannot allocate them. Give it more memory, or append less at a time.'
            )
        return [record], [None]


def _xread(key: str, number: int, count: int, block_ms: int) -> Tuple[Any, ...]:
    block = ('BLOCK', block_ms) if block_ms > 0 else ()
    return ('XREAD', 'COUNT', count, *block, 'STREAMS', key, _behind(number))


def _entries_of(reply: Any) -> List[Raw]:
    """Return the entries in a reply to XREAD of one stream, from RESP2 or RESP3."""
    if not reply:
        return []
    entries: List[Raw] = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
    return entries


def _are_of(raw: List[Raw], epoch: str) -> bool:
    wanted = epoch.encode()
    return all(dict(zip(fields[::2], fields[1::2])).get(b'e') == wanted for _, fields in raw)


def _leads_on(after: EntryId, newest: EntryId, raw: List[Raw]) -> bool:
    """True if a server with these entries after ``after`` still has the entries before them."""
    if raw:
        return _is_behind(raw[0], after)
    # Without a chain, the id may be one that another program's entry got from the server's clock.
    return not after.chain or newest.number > after.number or newest.chain == after.chain


def _is_behind(first: Raw, after: EntryId) -> bool:
    """False if an entry has the number after ``after``, but its chain shows that other entries came before it."""
    fields = dict(zip(first[1][::2], first[1][1::2]))
    if not after.chain or _number(first[0]) != after.number + 1 or b'c' not in fields:
        return True
    try:
        return bool(fields[b'c'] == link(after.chain, fields[b'w'].decode(), int(fields[b's'])).encode())
    except (KeyError, ValueError):
        return True  # Another program wrote this entry.


def _up_to(
    records: Iterator[StoredEntry], stream: str, max_bytes: int
) -> Tuple[List[StoredEntry], Optional[CorruptPayload]]:
    """Return the records to fetch at once, and the error of the record after them if that one is corrupt."""
    held: List[StoredEntry] = []
    num_bytes = 0
    try:
        for record in records:
            num_bytes += _bytes_in_parts(stream, record)
            held.append(record)
            if num_bytes >= max_bytes:
                break
    except CorruptPayload as e:
        return held, e
    return held, None


def _bytes_in_parts(stream: str, record: StoredEntry) -> int:
    try:
        where = unpack(record.payload)
    except CorruptPayload as e:
        raise corrupt_entry(stream, record.id, str(e), record.writer, record.sequence) from e
    return where.num_bytes if where is not None else 0


def _behind(number: int) -> str:
    """Return the highest Redis id with this number. An entry of another program may have an id up to that."""
    return f'{number}-18446744073709551615' if number else '0-0'


def _number(redis_id: bytes) -> int:
    return int(redis_id.partition(b'-')[0])


def _record(stream: str, epoch: str, raw: Raw) -> StoredEntry:
    redis_id, pairs = raw
    place, fields = EntryId(epoch, _number(redis_id)), dict(zip(pairs[::2], pairs[1::2]))
    if place.number >> NUMBER_BITS:
        raise corrupt_entry(stream, place, 'another program wrote it: its number is too large')
    try:
        place = place.chained(fields.get(b'c', b'').decode())
        return StoredEntry(place, fields[b'w'].decode(), int(fields[b's']), fields[b'p'])
    except (KeyError, ValueError) as e:
        raise corrupt_entry(stream, place, f'another program wrote it ({type(e).__name__})') from e
