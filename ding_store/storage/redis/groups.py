"""A run in a Redis cluster: groups of names, each in one hash slot, and the nodes that have the slots.

A slot is what a cluster moves from one node to another. All keys of a group are in one slot: streams with the parts of
their entries, values, and the list of names. So a script finds all that it needs, and everything of a group moves, is
replicated and is lost together.
"""

from __future__ import annotations

import binascii
import functools
import itertools
import logging
import threading
from dataclasses import replace
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

import redis

from ding_store.storage.redis.replies import ReplyKind, meaning_of, text_of
from ding_store.storage.redis.server_checks import is_tls_error, make_client, wake
from ding_store.storage.redis.server_session import ServerSession
from ding_store.storage.urls import ClusterUrl, address_of

logger = logging.getLogger(__name__)

NUM_SLOTS = 16384
#: Number of groups of a run. All processes of all runs must use the same.
NUM_GROUPS = 12
#: Group -> the twelfth of the slots that it is in. The first groups are on different nodes of a cluster of 2 to 4
#: primaries with equal ranges, so partitions 0, 1, 2, ... are.
_TWELFTHS = (0, 8, 5, 10, 3, 6, 1, 9, 4, 7, 2, 11)
#: Limit of the time to connect to one node, and of its reply.
ASK_S = 0.5


def slot_of(tag: str) -> int:
    """Return the slot of all keys with a hash tag."""
    return binascii.crc_hqx(tag.encode(), 0) % NUM_SLOTS


@functools.lru_cache(4096)
def tag_of(run: str, group: int) -> str:
    """Return the hash tag of a group's keys: the first one, counted from 0, in its part of the slots."""
    tags = (f'{run}/{group}/{number}' for number in itertools.count())
    return next(tag for tag in tags if slot_of(tag) * NUM_GROUPS // NUM_SLOTS == _TWELFTHS[group])


class SlotRange(NamedTuple):
    """Slots, with the addresses of their primary and of its replicas."""

    first: int
    last: int
    primary: str
    replicas: Tuple[str, ...]


class ClusterNodes:
    """
    Overview:
        The nodes of the cluster of a ``redis+cluster://`` or ``rediss+cluster://`` URL, as the nodes describe it.
        Thread-safe.
    Attributes:
        - ranges (:obj:`List[SlotRange]`): The slots, by the last reply of a node. Empty before.
        - failures (:obj:`Dict[str, str]`): Node -> why it did not reply when it was asked last.
        - closed (:obj:`threading.Event`): Set when the store is closed.
    """

    def __init__(self, url: str) -> None:
        self.url = ClusterUrl.parse(url)
        self.address = address_of(url)
        self.ranges: List[SlotRange] = []
        self.failures: Dict[str, str] = {}
        self._hosts = list(self.url.hosts)  # The next one to ask is the first.
        self._lock = threading.Lock()
        self._advice: FrozenSet[str] = frozenset()
        self.closed = threading.Event()
        self._sessions: Dict[str, ServerSession] = {}  # by the node's URL

    def session_at(self, url: str, make: Callable[[], ServerSession]) -> ServerSession:
        """
        Overview:
            Return the session with a node, which all groups there share: each has few commands, so connections of its
            own would be idle.
        Arguments:
            - make (:obj:`Callable`): Connects, and returns a new session.
        """
        with self._lock:
            found = self._sessions.get(url)
        if found is not None and not found.is_hung_up():
            return found
        if found is not None:
            found.close()
        made = make()
        if made.generation.is_in_key:  # The key is one group's, which may leave the node.
            return made
        with self._lock:
            found = self._sessions.get(url)
            if found is None or found.is_hung_up():
                found = self._sessions[url] = made
        if found is not made:  # Another group was faster.
            made.close()
        return found

    def close(self) -> None:
        """Close all sessions. Threads that wait for a reply wake up, and do not connect again."""
        self.closed.set()
        for session in list(self._sessions.values()):
            wake(session.client)
            session.close()

    def find(self) -> List[SlotRange]:
        """
        Overview:
            Return the slots, as the first node that knows any describes them. Each call begins with another node: one
            that is cut off from the others describes a cluster of the past.
        Raises:
            - redis.RedisError: No node describes the cluster.
        """
        errors: List[redis.RedisError] = []
        with self._lock:
            hosts = list(self._hosts)
        for host in hosts:
            with self._lock:
                self._hosts.sort(key=host.__eq__)  # It is the last one now.
            try:
                ranges = self.ask(host)
            except redis.RedisError as e:
                errors.append(e)
                self.failures[host] = text_of(e)
                continue
            if not ranges:  # It has left the cluster, or has not joined it yet.
                self.failures[host] = 'it knows no slots'
                continue
            self.failures.pop(host, None)
            self._note(ranges)
            return ranges
        for error in errors:
            if is_tls_error(error) or meaning_of(error).answer is not ReplyKind.RECONNECT:
                raise error
        raise redis.ConnectionError(f'no node describes the cluster: {self.reasons}')

    def ask(self, host: str) -> List[SlotRange]:
        """Return the slots, as one node describes them."""
        own = host.rpartition(':')[0]
        found = self.execute(host, 'CLUSTER', 'SLOTS')
        return sorted(
            SlotRange(int(first), int(last), _address(primary, own), tuple(_address(one, own) for one in replicas))
            for first, last, primary, *replicas in found
        )

    def execute(self, host: str, *words: str) -> Any:
        """Send a command to one node. Return its reply."""
        client: Any = make_client(self.url.node_url(host), lambda connection: connection.on_connect(), ASK_S)
        client.response_callbacks.clear()
        try:
            return client.execute_command(*words)
        finally:
            client.connection_pool.disconnect()

    @property
    def reasons(self) -> str:
        return ', '.join(f'{host}: {failure}' for host, failure in sorted(self.failures.copy().items()))

    def is_news(self, advice: str) -> bool:
        """Return True for an advice that no group got before: most nodes give the same."""
        is_news, self._advice = advice not in self._advice, self._advice | {advice}
        return is_news

    def _note(self, ranges: List[SlotRange]) -> None:
        """Remember the slots and the nodes. Nodes that left are not asked again, except those of the URL."""
        nodes = {node for each in ranges for node in (each.primary, *each.replicas)}
        with self._lock:
            self.ranges = ranges
            known = {*self.url.hosts, *nodes}
            self._hosts = [host for host in self._hosts if host in known]
            # New nodes are asked before the one that has just replied.
            self._hosts[-1:-1] = sorted(nodes.difference(self._hosts))


class Group:
    """
    Overview:
        One group of a run's names, and the node that has its slot.
    Attributes:
        - tag (:obj:`str`): The hash tag of its keys.
        - server_url (:obj:`str`): URL of the node that was found last. '' before.
        - closed (:obj:`threading.Event`): That of ``ClusterNodes``.
        - guard (:obj:`Tuple[str, ...]`): A key of this slot that no command ever writes, for each script. While a node
            gives up the slot key by key, it refuses commands with keys that it does not have. So no script runs then,
            although the keys that it declares may all be there: parts, which it does not declare, may be gone.
    """

    def __init__(self, nodes: ClusterNodes, run: str, number: int) -> None:
        self.tag = tag_of(run, number)
        self.slot = slot_of(self.tag)
        self.server_url = ''
        self.guard = (f'ding:{{{self.tag}}}:guard',)
        self.is_news, self.closed = nodes.is_news, nodes.closed
        self._nodes = nodes

    def find_primary(self) -> str:
        """
        Overview:
            Return the URL of the node that has the slot. The first call does not ask the nodes again if another group
            has asked: a node that no longer has the slot says so.
        Raises:
            - redis.RedisError: No node replies, or the slot has no node.
        """
        node = self.node_in(self._nodes.ranges) if not self.server_url else None
        node = node or self.node_in(self._nodes.find())
        if node is None:
            raise redis.ConnectionError(f'no node has slot {self.slot}')
        url = self._nodes.url.node_url(node)
        if url != self.server_url:
            logger.info('slot %d of %s is on %s', self.slot, self._nodes.address, node)
        self.server_url = url
        return url

    def session_at(self, url: str, make: Callable[[], ServerSession]) -> ServerSession:
        """Return the session with a node for this group: see ``ClusterNodes.session_at``."""
        return replace(self._nodes.session_at(url, make), guard=self.guard)

    def node_in(self, ranges: List[SlotRange]) -> Optional[str]:
        """Return the primary that has the slot, or None."""
        return next((each.primary for each in ranges if each.first <= self.slot <= each.last), None)

    def find_replicas(self, again: bool) -> List[str]:
        """Return the URLs of the replicas that the node of the slot has, by the last or another look at the cluster."""
        ranges = self._nodes.find() if again else self._nodes.ranges
        replicas = next((each.replicas for each in ranges if each.first <= self.slot <= each.last), ())
        return list(map(self._nodes.url.node_url, replicas))

    def explain_away(self) -> str:
        """Return what to do if the node cannot be reached."""
        if not self.server_url:
            return f'the node of slot {self.slot} is not known, because no node of {self._nodes.address} replies'
        return (
            f'{address_of(self.server_url)}, which has slot {self.slot} of {self._nodes.address}, cannot be reached. '
            'Start it or a replica of it, and look for the reason with "ding-store doctor --store URL"'
        )


def _address(node: List[Any], own: str) -> str:
    """Return a node's address as it is written in URLs. ``own``: host of the node that gave it, if that names none."""
    host = (node[0] or b'').decode()
    if host in ('', '?'):
        host = own
    elif ':' in host:
        host = f'[{host}]'
    return f'{host}:{int(node[1])}'
