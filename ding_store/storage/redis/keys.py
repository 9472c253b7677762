"""Names of a run's Redis keys, the list of its streams and values, and calls of the scripts on streams.

Keys of run R:  ding:{R/<stream>/0}:meta, :log, :sizes, :room, :readers, :filled, :planes   see lua/stream.lua
                ding:{R/<stream>/0}:ends                          outlives its run for a day, see lua/stream.lua
                ding:{R/<value>/0}:value, :version, :wants                see lua/value.lua
                ding:{R}:counters  hash    ding:{R}:index  set of "stream:<name>" and "value:<name>"

In a cluster, the names of a run are in groups, and a group's keys have one tag T, and so one slot, see groups.py:
ding:{T}/<stream>:meta, ding:{T}:index, and so on.
"""

from __future__ import annotations

import itertools
import uuid
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.scripts import Command
from ding_store.storage.redis.server_session import Before, ServerSession

#: A value's keys: ``value``, ``version`` (a hash) and ``wants``, see lua/value.lua.
VALUE_PARTS = ('value', 'version', 'wants')
_STREAM_PARTS = ('meta', 'log', 'sizes', 'room', 'readers', 'filled', 'planes')


def generation_key(run: str, tag: str = '') -> str:
    """Return the key whose random value stands for a server generation where INFO cannot: see ServerGeneration."""
    return f'ding:{{{tag or run}}}:generation'


class RunKeys:
    """
    Overview:
        The Redis keys of a run, for one process. Thread-safe.
    Arguments:
        - run (:obj:`str`): The run's name.
        - tag (:obj:`str`): The hash tag of all keys. '': each name has its own.
    """

    def __init__(self, connection: Connection, run: str, tag: str = '') -> None:
        self.counters = f'ding:{{{tag or run}}}:counters'
        self.index = f'ding:{{{tag or run}}}:index'
        self._generation = generation_key(run, tag)
        self._connection = connection
        self._run, self._tag = run, tag
        self._listed: Set[str] = set()
        self._of_streams: Dict[str, List[str]] = {}
        self._tokens, self._num_tokens = f'{uuid.uuid4().hex[:16]}-', itertools.count()

    def of(self, name: str, part: str) -> str:
        return f'ding:{{{self._tag}}}/{name}:{part}' if self._tag else f'ding:{{{self._run}/{name}/0}}:{part}'

    def of_value(self, name: str) -> List[str]:
        return [self.of(name, part) for part in VALUE_PARTS]

    def list_name(self, kind: str, name: str, again: bool = False) -> None:
        """Put a stream or value on the list of the run's names, once. ``again``: also if it was put there before."""
        member = f'{kind}:{name}'
        if again or member not in self._listed:
            self._connection.call('index', lambda session: session.run('index', [self.index, self.counters], member))
            self._listed.add(member)

    def doubt_list(self) -> None:
        """List every name again at its next use: the server may be another one, or have lost its memory."""
        self._listed.clear()

    def doubt_stream(self, stream: str) -> None:
        """List this stream again at its next use: it was deleted, or the server has lost its memory."""
        self._listed.discard(f'stream:{stream}')

    def delist(self, session: ServerSession, name: str) -> int:
        """Remove a deleted stream or value from the list, and delete the counter. Return the number of counters."""
        members = [f'{kind}:{name}' for kind in ('stream', 'value')]
        self._listed.difference_update(members)
        self._of_streams.pop(name, None)
        _, num_counters = session.ask(('SREM', self.index, *members), ('HDEL', self.counters, name))
        return int(num_counters)

    def delete(self, session: ServerSession, names: Iterable[str]) -> None:
        """Delete all keys of the run. ``Store.delete`` keeps the writers' numbers, but no process writes any more."""
        (members,) = session.ask(('SMEMBERS', self.index))
        for name in {*names, *(member.decode().split(':', 1)[1] for member in members)}:
            session.ask(('DEL', *(self.of(name, part) for part in _STREAM_PARTS)), ('DEL', *self.of_value(name)))
        session.ask(('DEL', self.index, self.counters, self._generation))

    def command(self, session: ServerSession, script: str, stream: str, arguments: Tuple[Any, ...]) -> Command:
        token = f'{session.generation.run_id}{self._tokens}{next(self._num_tokens):x}'
        keys = self._of_streams.get(stream)
        if keys is None:
            keys = self._of_streams[stream] = [self.of(stream, part) for part in (*_STREAM_PARTS, 'ends')]
        return Command(script, keys, (token, *arguments))

    def run(
        self,
        session: ServerSession,
        script: str,
        stream: str,
        arguments: Tuple[Any, ...],
        before: Optional[Before] = None,
    ) -> Any:
        command = self.command(session, script, stream, arguments)
        return session.run(script, command.keys, *command.arguments, before=before)
