"""``ShardedServer``: several servers, each by itself."""

from __future__ import annotations

from typing import Collection, Sequence, Set

from ding_store.storage.base import StoreInfo
from ding_store.storage.protocol import Server
from ding_store.storage.shards.router import Router
from ding_store.storage.shards.server_list import NAME, ServerList


class ShardedServer(Router):
    """
    Overview:
        Several servers, each by itself. The run keeps the list of them on each, so that all its processes use the same.
    """

    def __init__(self, run: str, servers: Sequence[Server]) -> None:
        super().__init__(run, servers)
        self._list = ServerList(run, self._servers)

    def _is_begun(self, away: Collection[int]) -> bool:
        return self._list.check(away)

    def info(self) -> StoreInfo:
        found = super().info()
        found.values.pop(NAME, None)
        return found

    def retire(self, names: Set[str]) -> None:
        for number, server in enumerate(self._servers):
            server.retire({NAME, *(name for name in names if self.shard_of(name) == number)})

    def _writing(self, name: str) -> Server:
        number = self.shard_of(name)
        if number not in self._list.published:
            self._list.publish(number)
        return self._servers[number]

    def _restore(self, number: int) -> None:
        """Restore the list as well."""
        self._list.published.discard(number)
        super()._restore(number)
