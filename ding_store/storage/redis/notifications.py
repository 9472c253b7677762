"""What a stream tells those who wait: of room, and of its planes. Each is a Redis stream of one entry."""

from __future__ import annotations

from typing import AbstractSet, Any, Callable, Dict, List, Mapping, Optional, Tuple

import redis

from ding_store.storage.base import NUMBER_BITS
from ding_store.storage.exactly_once.outbox import FreedCapacity
from ding_store.storage.redis.scripts import Argument
from ding_store.storage.redis.server_session import ServerSession

#: Of what lua/stream.lua tells.
_FIELDS = {'room': {b'e', b'f', b'c'}, 'planes': {b'h'}}

Told = Tuple[int, Dict[bytes, bytes]]  # the counter's number, and fields


class RedisNotifications:
    """
    Overview:
        Thread-safe.
    Arguments:
        - wait (:obj:`Callable`): Runs a command that blocks with a ``ServerSession``; None when it had to reconnect.
        - key (:obj:`Callable`): ``(stream, part)``: the key of a part.
        - run (:obj:`Callable`): ``(session, script, stream, arguments)``.
    """

    def __init__(
        self,
        wait: Callable[[str, Callable[[ServerSession], Any]], Any],
        key: Callable[[str, str], str],
        run: Callable[[ServerSession, str, str, Tuple[Any, ...]], Any],
    ) -> None:
        self._wait = wait
        self._key = key
        self._run = run

    def wait_for_capacity(self, stream: str, counter: int, block_ms: int) -> Optional[FreedCapacity]:
        """What is said when the counter of what made room grows; None when it did not."""
        for number, fields in self._notifications('room', {stream: counter}, block_ms):
            epoch, chain = (fields[name].decode(errors='replace') for name in (b'e', b'c'))
            return FreedCapacity(number, epoch, int(fields[b'f']), chain)
        return None

    def wait_for_transports(self, known: Mapping[str, int], block_ms: int) -> None:
        """See ``TransportStore.wait_for_transports``."""
        self._notifications('planes', known, block_ms)

    def _notifications(self, part: str, known: Mapping[str, int], block_ms: int) -> List[Told]:
        """What comes behind the numbers known of some streams, if all of it is ours: else it is told anew."""
        if not known:
            self._wait(
                f'wait for {part}', lambda session: session.ask(('EXISTS', 'ding:'))
            )  # which notices that it ended
            return []
        keys, places = (self._key(stream, part) for stream in known), (f'{number}-0' for number in known.values())
        command: Tuple[Argument, ...] = ('XREAD', 'BLOCK', block_ms, 'STREAMS', *keys, *places)

        def wait(session: ServerSession) -> List[Told]:
            try:
                found = [_told(raw, _FIELDS[part]) for raw in _entries(session.ask(command)[0])]
            except (ValueError, redis.ResponseError) as e:
                if isinstance(e, redis.ResponseError) and not str(e).startswith('WRONGTYPE'):
                    raise
                # Somebody else wrote there: it would be news to all who wait, again and again.
                for stream in known:
                    self._run(session, 'tell', stream, ())
                return []
            return found

        return self._wait(f'wait for {part}', wait) or []


def _entries(reply: Any) -> List[Any]:
    """Of an XREAD, in RESP2 or 3: ids with a list of names and values."""
    streams = reply.values() if isinstance(reply, dict) else (entries for _, entries in reply or ())
    return [entry for entries in streams for entry in entries]


def _told(raw: Any, names: AbstractSet[bytes]) -> Told:
    redis_id, pairs = raw
    number, fields = int(redis_id.partition(b'-')[0]), dict(zip(pairs[::2], pairs[1::2]))
    if number >> NUMBER_BITS or fields.keys() != names or not fields.get(b'f', b'0').isdigit():
        raise ValueError(f'{redis_id} is none of ours')
    return number, fields
