"""Values in a Redis server: what ``RedisStore`` does with the keys of lua/put.lua."""

from __future__ import annotations

import uuid
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ding_store.errors import VersionConflict

from .base import Buffer
from .link import Before, Session
from .parts import Parts, publish_in_parts
from .planes import Version

#: Of a value: ``value``, ``version`` (a hash) and ``wants``, see lua/put.lua.
VALUE_PARTS = ('value', 'version', 'wants')

Call = Callable[[str, Callable[[Session], Any]], Any]


class RedisValues:
    """
    Overview:
        The values of one run, of one process.
    Arguments:
        - call (:obj:`Callable`): Runs a command with a ``Session``, again and again while the connection is lost.
        - wait (:obj:`Callable`): The same for commands that block; None when it had to reconnect.
        - key (:obj:`Callable`): Of a name and a part.
    """

    def __init__(self, call: Call, wait: Call, key: Callable[[str, str], str]) -> None:
        self._call = call
        self._wait = wait
        self._key = key
        self._parts = Parts(call)
        self._versions: Dict[str, int] = {}  # of the values that this writer put

    def put(self, name: str, payload: bytes, reference: bytes, expected_version: Optional[int]) -> Tuple[int, bool]:
        """Returns the new version, and whether it is the first one as far as the server knows."""
        expected = -1 if expected_version is None else expected_version
        token, newest, keys = uuid.uuid4().hex, self._versions.get(name, 0), self._keys(name)

        def publish(place: bytes, num_parts: int, key: str, before: Optional[Before]) -> Any:
            arguments = (token, newest, expected, place, num_parts, key, reference)
            return self._call(f'put {name!r}', lambda session: session.run('put', keys, *arguments, before=before))

        key = self._part_key(name, token)
        done, version, before = publish_in_parts(f'put {name!r}', key, payload, publish, lambda reply: reply[0] < 0)
        if not done:
            raise VersionConflict(f'value {name!r} is at version {version}, not at {expected}')
        self._versions[name] = int(version)
        return int(version), before == 0

    def newest(self, name: str, newer_than: int, or_filled: bool) -> Optional[Version]:
        """The newest version if it is news; it is not sent in vain."""
        value, meta, _ = self._keys(name)

        def command(session: Session) -> Any:
            version = session.client.hget(meta, 'version')
            if version is None or (int(version) == newer_than and not or_filled):
                return []
            found = session.client.xrevrange(value, count=1)
            return [] if found and found[0][0].decode() == f'{newer_than}-0' else found

        return _version(self._call(f'get {name!r}', command))

    def next(self, name: str, newer_than: int, or_filled: bool, block_ms: int) -> Optional[Version]:
        after = {self._key(name, 'value'): _known(newer_than, or_filled)}
        found = self._wait(f'get {name!r}', lambda session: session.client.xread(after, count=1, block=block_ms))
        return _version(found[0][1]) if found else None

    def payload_of(self, name: str, found: Version) -> Optional[Buffer]:
        return self._parts.fetch(f'get {name!r}', [found.payload])[0]

    def fill(self, name: str, version: int, payload: bytes) -> bool:
        keys = self._keys(name)

        def fill(place: bytes, num_parts: int, key: str, before: Optional[Before]) -> Any:
            arguments = (version, place, num_parts, key)
            return self._call(
                f'fill {name!r}', lambda session: session.run('fill_value', keys, *arguments, before=before)
            )

        key = self._part_key(name, uuid.uuid4().hex)
        return bool(publish_in_parts(f'fill {name!r}', key, payload, fill, lambda reply: reply < 0))

    def want(self, name: str) -> None:
        self._call(f'want {name!r}', lambda session: session.run('want_value', self._keys(name)))

    def wait_for_wants(self, known: Mapping[str, str], block_ms: int) -> Dict[str, str]:
        after = {self._key(name, 'wants'): last or '0-0' for name, last in known.items()}
        self._wait('wait for wants', lambda session: session.client.xread(after, count=1, block=block_ms))

        # A server that lost its memory, and whose clock was set back, has wants that are no news to XREAD.
        def command(session: Session) -> Any:
            pipe = session.client.pipeline(transaction=False)
            for key in after:
                pipe.xrevrange(key, count=1)
            return pipe.execute()

        newest = self._call('wait for wants', command)
        return {name: found[0][0].decode() if found else '' for name, found in zip(known, newest)}

    def delete(self, name: str) -> bool:
        keys = self._keys(name)
        return bool(self._call(f'delete {name!r}', lambda session: _delete(session, *keys)))

    def _keys(self, name: str) -> List[str]:
        return [self._key(name, part) for part in VALUE_PARTS]

    def _part_key(self, name: str, token: str) -> str:
        return self._key(f'{name}/{token}', 'part:')


def _known(newer_than: int, or_filled: bool) -> str:
    """The last id that is no news: "<version>-0" is a version, "<version>-1" the same with its payload filled in."""
    if newer_than == 0:
        return '0-0'
    return f'{newer_than}-0' if or_filled else f'{newer_than}-18446744073709551615'


def _version(raw: List[Any]) -> Optional[Version]:
    for redis_id, fields in raw:
        return Version(int(redis_id.partition(b'-')[0]), fields.get(b'p', b''), fields.get(b'r', b''))
    return None


def _delete(session: Session, value: str, meta: str, wants: str) -> int:
    known = session.client.hmget(meta, 'parts', 'parts_before')
    existed = session.client.delete(value, meta, wants)
    for num_parts, _, key in (one.partition(b':') for one in known if one):
        session.client.unlink(*(key + b'%d' % number for number in range(int(num_parts))))
    return int(existed)
