"""Reads from its keys which streams, values and counters a run has in a Redis server.

No transactions here: a server at its maxmemory refuses them. All facts about a stream but its readers are in one hash.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Tuple

from ding_store.storage.base import ServerMemory, StreamInfo
from ding_store.storage.redis.keys import RunKeys
from ding_store.storage.redis.server_checks import facts_of
from ding_store.storage.redis.server_session import ServerSession

Hash = Mapping[bytes, bytes]


def read_memory(session: ServerSession) -> Dict[str, ServerMemory]:
    """Return the memory of the server by its address, or nothing if it does not say it, as some services do."""
    with session.borrowed() as connection:
        connection.send_command('INFO', 'memory')
        facts = facts_of(connection.read_response())
        host, port = getattr(connection, 'host', ''), getattr(connection, 'port', 0)
        address = getattr(connection, 'path', '') or (f'[{host}]:{port}' if ':' in host else f'{host}:{port}')
    used, limit = facts.get('used_memory', ''), facts.get('maxmemory', '')
    if not used.isdigit():
        return {}
    return {address: ServerMemory(int(used), int(limit) if limit.isdigit() and int(limit) else None)}


def read_streams(session: ServerSession, keys: RunKeys) -> Dict[str, StreamInfo]:
    names = _indexed(session, keys, 'stream')
    found = _hashes(session, *(keys.of(name, part) for name in names for part in ('meta', 'readers')))
    streams = {name: _stream(meta, readers) for name, meta, readers in zip(names, found[::2], found[1::2])}
    return {name: stream for name, stream in streams.items() if stream is not None}


def read_stream(session: ServerSession, keys: RunKeys, name: str) -> Optional[StreamInfo]:
    return _stream(*_hashes(session, keys.of(name, 'meta'), keys.of(name, 'readers')))


def read_values(session: ServerSession, keys: RunKeys) -> Dict[str, int]:
    names = _indexed(session, keys, 'value')
    versions = session.ask(*(('HGET', keys.of(name, 'version'), 'version') for name in names))
    return {name: int(version) for name, version in zip(names, versions) if version is not None}


def read_counters(session: ServerSession, keys: RunKeys) -> Dict[str, int]:
    (counters,) = _hashes(session, keys.counters)
    return {name.decode(): int(count) for name, count in counters.items()}


def _indexed(session: ServerSession, keys: RunKeys, kind: str) -> List[str]:
    (members,) = session.ask(('SMEMBERS', keys.index))
    pairs = (member.decode().split(':', 1) for member in members)
    return sorted(name for found, name in pairs if found == kind)


def _hashes(session: ServerSession, *keys: str) -> List[Hash]:
    found = session.ask(*(('HGETALL', key) for key in keys))
    return [dict(zip(pairs[::2], pairs[1::2])) for pairs in found]


def _stream(meta: Hash, readers: Hash) -> Optional[StreamInfo]:
    if b'epoch' not in meta or b'deleted' in meta:
        return None
    cursors = {field: cursor for field, cursor in readers.items() if not field.startswith((b'h:', b'c:'))}
    writers = _writers(meta)
    return StreamInfo(
        epoch=meta[b'epoch'].decode(),
        last=_int(meta, b'last'),
        floor=_int(meta, b'floor'),
        pending_bytes=_int(meta, b'total') - _int(meta, b'trimmed'),
        num_dropped=_int(meta, b'dropped'),
        readers={field[2:].decode(): int(cursor) for field, cursor in cursors.items()},
        durable={field[2:].decode(): field.startswith(b'd:') for field in cursors},
        writers={writer: sequence for writer, sequence, _ in writers},
        numbers={writer: number for writer, _, number in writers},
        host=meta.get(b'host', b'').decode(),
    )


def _writers(meta: Hash) -> List[Tuple[str, int, int]]:
    """Return the writers that have appended, with the sequence and the number of their last entry."""
    known = [(field, place.split(b':')) for field, place in meta.items() if field.startswith(b'w:')]
    return [(field[2:].decode(), int(place[0]), int(place[1])) for field, place in known if int(place[0]) > 0]


def _int(meta: Hash, field: bytes) -> int:
    return int(meta.get(field, 0))
