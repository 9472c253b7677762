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
        The nodes of a Redis cluster. Names of a run are in groups, and each group is a server of the router: it has
        connections of its own, and follows its slot from node to node.
    Arguments:
        - url (:obj:`str`): Names some nodes of the cluster.
    """

    def __init__(self, url: str, run: str, writer: str, options: RedisOptions) -> None:
        self._nodes = ClusterNodes(url)
        self._groups = [Group(self._nodes, run, number) for number in range(NUM_GROUPS)]
        super().__init__(run, [RedisServer(url, None, run, writer, options, group) for group in self._groups])
        self.address = address_of(url)

    def _host_of(self, number: int) -> object:
        return self._groups[number].node_in(self._nodes.ranges)
