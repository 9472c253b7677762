"""Waits for a stream's notifications of freed capacity and of changed transports.

Each kind of notification is a Redis stream of one entry.
"""

from __future__ import annotations

from typing import AbstractSet, Any, Dict, List, Mapping, Optional, Tuple

import redis

from ding_store.storage.base import NUMBER_BITS
from ding_store.storage.protocol import FreedCapacity
from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.keys import RunKeys
from ding_store.storage.redis.resp import entries_of
from ding_store.storage.redis.scripts import Argument
from ding_store.storage.redis.server_session import ServerSession

#: Fields of the entries that lua/stream.lua writes there.
_FIELDS = {'room': {b'e', b'f', b'c'}, 'planes': {b'h'}}

Notification = Tuple[int, Dict[bytes, bytes]]  # a counter, and fields


class RedisNotifications:
    """
    Overview:
        Waits for the notifications of streams. Thread-safe.
    """

    def __init__(self, connection: Connection, keys: RunKeys) -> None:
        self._connection = connection
        self._keys = keys

    def wait_for_capacity(self, stream: str, counter: int, block_ms: int) -> Optional[FreedCapacity]:
        """Wait until the counter of freed capacity exceeds ``counter``. Return the notification, None if none came."""
        for number, fields in self._notifications('room', {stream: counter}, block_ms):
            epoch, chain = (fields[name].decode(errors='replace') for name in (b'e', b'c'))
            return FreedCapacity(number, epoch, int(fields[b'f']), chain)
        return None

    def wait_for_transports(self, known: Mapping[str, int], block_ms: int) -> None:
        """See ``Server.wait_for_transports``."""
        self._notifications('planes', known, block_ms)

    def _notifications(self, part: str, known: Mapping[str, int], block_ms: int) -> List[Notification]:
        """Return the notifications after the known counters. If another program wrote one, rewrite all."""
        if not known:  # Redis refuses XREAD without keys. Any command notices that the server ended.
            self._connection.wait(f'wait for {part}', lambda session: session.ask(('EXISTS', 'ding:')))
            return []
        keys, places = (self._keys.of(stream, part) for stream in known), (f'{number}-0' for number in known.values())
        command: Tuple[Argument, ...] = ('XREAD', 'BLOCK', block_ms, 'STREAMS', *keys, *places)

        def wait(session: ServerSession) -> List[Notification]:
            try:
                found = [_parsed(raw, _FIELDS[part]) for raw in entries_of(session.ask(command)[0])]
            except (ValueError, redis.ResponseError) as e:
                if isinstance(e, redis.ResponseError) and not str(e).startswith('WRONGTYPE'):
                    raise
                # Another program wrote there. Its entry would wake all waiting processes again and again.
                for stream in known:
                    self._keys.run(session, 'tell', stream, ())
                return []
            return found

        return self._connection.wait(f'wait for {part}', wait) or []


def _parsed(raw: Any, names: AbstractSet[bytes]) -> Notification:
    redis_id, pairs = raw
    number, fields = int(redis_id.partition(b'-')[0]), dict(zip(pairs[::2], pairs[1::2]))
    if number >> NUMBER_BITS or fields.keys() != names or not fields.get(b'f', b'0').isdigit():
        raise ValueError(f'{redis_id} was written by another program')
    return number, fields
