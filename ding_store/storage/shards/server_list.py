"""The list of a run's servers. All processes must use the same one, or they would look for a name in other places."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Collection, List, Optional, Sequence, Set

from ding_store.errors import ConfigError, CorruptPayload, StoreError, StoreUnavailable, VersionConflict
from ding_store.storage.encoding.framing import decode, encode_pieces
from ding_store.storage.protocol import Server
from ding_store.storage.shards.placement import shard_of
from ding_store.storage.store import Store

#: The value with the list, on each server. No name that a caller may use has an "@".
NAME = '@servers'


class ServerList:
    """
    Overview:
        The list that this process uses, and the one that the run's servers hold. Servers are compared by their
        addresses as text.
    Attributes:
        - published: Numbers of the servers that have the list, as far as this process knows.
    """

    def __init__(self, run: str, servers: Sequence[Server]) -> None:
        self._run, self._servers = run, servers
        self._addresses = [server.address for server in servers]
        self.published: Set[int] = set()

    def check(self, away: Collection[int] = ()) -> bool:
        """
        Overview:
            Compare the list with the one that the servers hold. If none of them has one, check that the names that
            they hold are on the right server. This writes nothing.
        Arguments:
            - away (:obj:`Collection[int]`): Numbers of the servers that cannot be asked.
        Returns:
            - has_list (:obj:`bool`): True: one of them has this list.
        Raises:
            - ConfigError: The run uses another list.
        """
        servers = {number: server for number, server in enumerate(self._servers) if number not in away}
        has_list = [self._has_list(server) for server in servers.values()]
        if any(has_list):
            return True
        for number, server in servers.items():
            info = server.info()
            for name in (*info.streams, *info.values, *info.counters):
                if name == NAME:  # another process has put it since
                    self._has_list(server)
                elif shard_of(name, len(self._servers)) != number:
                    raise ConfigError(
                        f'run {self._run!r} has {name!r} on {server.address}, where processes with the servers '
                        f'{" ".join(self._addresses)} do not look for it. Use the servers of the processes that wrote '
                        'it, in their order, or name another run.'
                    )
        return False

    def publish(self, number: int) -> None:
        """
        Put the list on a server that is about to be written to, and on the others if they are not away. One server
        alone needs no list: its names are where processes that use its URL look for them.
        """
        if len(self._servers) == 1:
            self.published.add(number)
            return
        self._put(number)
        for other in {*range(len(self._servers))} - self.published:
            with suppress(StoreUnavailable), self._servers[other].availability.nonblocking():
                self._put(other)

    def _put(self, number: int) -> None:
        server = self._servers[number]
        if not self._has_list(server):
            try:
                server.put(NAME, encode_pieces({'servers': self._addresses}, {}), b'', 0)
            except VersionConflict:  # another process was faster
                self._has_list(server)
        self.published.add(number)

    def _has_list(self, server: Server) -> bool:
        """Return whether a server has the list. Raise ConfigError if it has another one."""
        found = read_list(server)
        if found not in (None, self._addresses):
            raise ConfigError(other_list(self._run, found, self._addresses))
        return found is not None


def read_list(server: Server) -> Optional[List[str]]:
    """Return the addresses in the list that a server holds for its run, or None if it holds none."""
    found = server.get(NAME)
    if found is None:
        return None
    try:
        servers = decode(found.payload)[0]['servers']
    except (CorruptPayload, KeyError):
        servers = None
    return list(map(str, servers)) if isinstance(servers, list) else [json.dumps(servers)]


def check_alone(store: Store) -> None:
    """
    Overview:
        Check that a run is not on several servers, in a process that has opened one of them.
    Raises:
        - ConfigError: Other processes of the run use a list of servers. The store is closed.
    """
    server, found = store.client.server, None
    with suppress(StoreError):  # The process's first command raises it.
        found = read_list(server)
    if found not in (None, [server.address]):
        store.close()
        raise ConfigError(other_list(store.run, found, [server.address]))


def other_list(run: str, found: Optional[Sequence[str]], own: Sequence[str]) -> str:
    """Return the error for a process whose list is not the one of the run."""
    return (
        f'run {run!r} is on the servers {" ".join(found or ())}, and this process names {" ".join(own)}. Use the same '
        'URLs in the same order in all processes of a run, or name another run.'
    )
