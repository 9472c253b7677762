"""``ClusterServer``: the nodes of a Redis cluster."""

from __future__ import annotations

from ding_store.storage.options import RedisOptions
from ding_store.storage.redis.groups import NUM_GROUPS, ClusterNodes, Group
from ding_store.storage.redis.server import RedisServer
from ding_store.storage.shards.router import Router
from ding_store.storage.urls import address_of


class ClusterServer(Router):
    """
    Overview:
        The nodes of a Redis cluster. Names of a run are in groups, and each group is a server of the router: it follows
        its slot from node to node. Groups on one node share their connections.
    Arguments:
        - url (:obj:`str`): Names some nodes of the cluster.
    """

    def __init__(self, url: str, run: str, writer: str, options: RedisOptions) -> None:
        self._nodes = ClusterNodes(url)
        self._groups = [Group(self._nodes, run, number) for number in range(NUM_GROUPS)]
        self._of_groups = [RedisServer(url, None, run, writer, options, group) for group in self._groups]
        super().__init__(run, self._of_groups)
        self.address = address_of(url)

    def close(self) -> None:
        for server in self._of_groups:
            server.settle()
        self._nodes.close()  # Then a thread of one group does not connect again when another group's is woken.
        for server in self._of_groups:
            server.disconnect()

    def _host_of(self, number: int) -> object:
        return self._groups[number].node_in(self._nodes.ranges)
