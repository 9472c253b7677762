"""A Redis cluster of real processes, configured as docs/howto/cluster.md says. Its slots can be moved key by key."""

import contextlib
import math
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

HOWTO = Path(__file__).resolve().parents[1] / 'docs' / 'howto'
PASSWORD, REPLICA_PASSWORD = 'CHANGE-ME', 'REPLICA-PASSWORD'
NUM_SLOTS = 16384
NODE_TIMEOUT_MS = 1000
WAIT_S = 60.0
#: The nodes give up a planned failover after 5 s.
ATTEMPT_S = 6.0


def config() -> str:
    """Return the file of the page."""
    (text,) = re.findall(r'^```\n# node.conf\n(.*?)^```$', (HOWTO / 'cluster.md').read_text(), re.M | re.S)
    return str(text)


def users() -> str:
    """Return the users of the page, and a default user that tests may use."""
    (line,) = re.findall('^user ding .*$', (HOWTO / 'security.md').read_text(), re.M)
    lines = re.findall('^user .*$', (HOWTO / 'cluster.md').read_text(), re.M)
    return '\n'.join([f'{line} +cluster|slots +readonly', *lines, 'user default on nopass ~* &* +@all', ''])


def free_port() -> int:
    """Return a port that is free with the one of the cluster's bus. Both are below those that clients get."""
    for port in range(10000 + time.monotonic_ns() % 10000, 22000):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as bus:
            one.bind(('127.0.0.1', port))
            bus.bind(('127.0.0.1', port + 10000))
            return port
    raise AssertionError('no port is free')


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, f'not within {WAIT_S} s: {what}'
        time.sleep(0.02)


class Node:
    """One server of a cluster. Its directory keeps its files between two starts."""

    def __init__(self, binary: str, directory: Path, text: str, tls: Any = None) -> None:
        self.port, self.directory = free_port(), directory
        self.address = f'127.0.0.1:{self.port}'
        directory.mkdir()
        for pattern, new in (
            (r'^bind .*', 'bind 127.0.0.1'),
            (r'^port .*', f'port {self.port}' if tls is None else f'port 0\ntls-port {self.port}\ntls-cluster yes'),
            (r'^dir .*', f'dir {directory}'),
            (r'^aclfile .*', f'aclfile {directory.parent / "users.acl"}'),
            (r'^cluster-node-timeout .*', f'cluster-node-timeout {NODE_TIMEOUT_MS}'),
        ):
            assert re.search(pattern, text, re.M), pattern
            text = re.sub(pattern, new, text, flags=re.M)
        text += f'repl-diskless-sync yes\nrepl-diskless-sync-delay 0\nlogfile {directory}/redis.log\n'
        text += '' if tls is None else tls.server_lines('server')
        (directory / 'redis.conf').write_text(text)
        self._command = [binary, str(directory / 'redis.conf')]
        self._process: Optional[subprocess.Popen[bytes]] = None
        options: Dict[str, Any] = {} if tls is None else tls.client_options('client')
        options.update(host='127.0.0.1', port=self.port, retry=Retry(NoBackoff(), 0), socket_timeout=5.0, protocol=2)
        self.client = redis.Redis(decode_responses=True, **options)
        self.raw = redis.Redis(**options)
        for client in (self.client, self.raw):
            client.response_callbacks.pop('CLUSTER SLOTS', None)

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self.client.ping, f'{self.address} replies')

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_S)
            self._process = None
        for client in (self.client, self.raw):
            client.connection_pool.disconnect()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, *words: Any) -> Any:
        """Send a command about the cluster. Return its reply unchanged."""
        return self.client.execute_command(*words)

    @property
    def id(self) -> str:
        return str(self.ask('CLUSTER', 'MYID'))

    @property
    def epoch(self) -> int:
        """The version of its slots that the node claims."""
        return self._fact('cluster_my_epoch')

    @property
    def current_epoch(self) -> int:
        """The largest epoch of which the node has heard."""
        return self._fact('cluster_current_epoch')

    def _fact(self, name: str) -> int:
        facts = dict(line.split(':') for line in str(self.ask('CLUSTER', 'INFO')).split())
        return int(facts[name])


class RedisCluster:
    """
    Overview:
        Runs within its ``with`` block. The first nodes are primaries with equal ranges of slots. The others are their
        replicas, in the same order.
    Arguments:
        - tls (:obj:`Any`): An ``Authority`` with certificates of 'server' and 'client': nothing goes without TLS.
    """

    def __init__(self, binary: str, num_primaries: int = 3, num_replicas: int = 0, tls: Any = None) -> None:
        self._tls = tls
        self.directory = Path(tempfile.mkdtemp(prefix='ding'))
        (self.directory / 'users.acl').write_text(users())
        self.num_primaries = num_primaries
        self.nodes: List[Node] = []
        for number in range(num_primaries + num_replicas):
            self.nodes.append(Node(binary, self.directory / f'node{number}', config(), tls))
            self.nodes[-1].start()  # before the next port is looked for

    def __enter__(self) -> 'RedisCluster':
        try:
            self._create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def primaries(self) -> List[Node]:
        return self.nodes[: self.num_primaries]

    def _create(self) -> None:
        """Do what ``redis-cli --cluster create`` does, without its waits."""
        bounds = [number * NUM_SLOTS // self.num_primaries for number in range(self.num_primaries + 1)]
        for epoch, (node, first, end) in enumerate(zip(self.primaries, bounds, bounds[1:]), 1):
            node.ask('CLUSTER', 'SET-CONFIG-EPOCH', epoch)
            node.ask('CLUSTER', 'ADDSLOTS', *range(first, end))
        for node in self.nodes[1:]:
            self.nodes[0].ask('CLUSTER', 'MEET', '127.0.0.1', node.port)
        wait_until(self._know_each_other, 'the nodes know each other')
        for number, node in enumerate(self.nodes[self.num_primaries :]):
            node.ask('CLUSTER', 'REPLICATE', self.primaries[number % self.num_primaries].id)
        self.wait_until_whole()

    def _know_each_other(self) -> bool:
        views = [str(node.ask('CLUSTER', 'NODES')) for node in self.nodes]
        return all(view.count(' connected') == len(self.nodes) and 'handshake' not in view for view in views)

    def wait_until_whole(self) -> None:
        """Return when all nodes are up and agree, and all replicas have everything."""
        wait_until(self.is_whole, 'the cluster is whole')

    def is_whole(self) -> bool:
        views = {str(self.owners(node)) for node in self.nodes}
        for node in self.nodes:
            replication = node.client.info('replication')
            if replication['role'] == 'slave' and replication['master_link_status'] != 'up':
                return False
            if 'cluster_state:ok' not in str(node.ask('CLUSTER', 'INFO')):
                return False
        ranges = [self.unique(node.ask('CLUSTER', 'SLOTS')) for node in self.nodes]
        have_replicas = [sum(len(each) - 3 for each in one) == len(self.nodes) - self.num_primaries for one in ranges]
        return len(views) == 1 and all(have_replicas)

    @staticmethod
    def unique(ranges: List[Any]) -> List[Any]:
        """Return one range of each primary."""
        return list({each[2][1]: each for each in ranges}.values())

    def owners(self, node: Optional[Node] = None) -> List[Tuple[int, int, int]]:
        """Return the ranges of slots, each with the port of its primary, as one node sees them."""
        node = node or next(one for one in self.nodes if one.is_running)
        return sorted((first, last, primary[1]) for first, last, primary, *_ in node.ask('CLUSTER', 'SLOTS'))

    def url(self, user: str = f'ding:{PASSWORD}@', nodes: Optional[List[Node]] = None) -> str:
        scheme, query = ('redis', '') if self._tls is None else ('rediss', self._tls.query('client'))
        return f'{scheme}+cluster://{user}{",".join(one.address for one in nodes or self.nodes)}{query}'

    def node_of(self, slot: int) -> Node:
        """Return the primary that has a slot: the one that says so itself, else the one that another node names."""
        running = [node for node in self.nodes if node.is_running]
        views = [(node, port) for node in running for first, last, port in self.owners(node) if first <= slot <= last]
        # After a move, a late message of the former owner can make a third node name it for a while.
        owner = next((node for node, port in views if node.port == port), None)
        return owner or next(node for node in self.nodes if node.port == views[0][1])

    def nodes_with_slots(self) -> List[Node]:
        ports = {port for _, _, port in self.owners()}
        return [one for one in self.nodes if one.port in ports]

    def flush(self) -> None:
        for node in self.nodes_with_slots():
            node.client.flushall()

    def keys(self, pattern: str = '*') -> List[str]:
        return [key for node in self.nodes_with_slots() for key in node.client.scan_iter(pattern, count=1000)]

    def move(self, slot: int, target: Node) -> None:
        """Move a slot with all its keys."""
        for _ in self.moving(slot, target):
            pass

    @staticmethod
    def begin_to_move(slot: int, source: Node, target: Node) -> None:
        # A target that has not heard of the source's last epoch takes the same one for itself. It can then lose the
        # slot to the source while the source gives it away, and each names the other for good.
        wait_until(lambda: source.epoch <= target.current_epoch, 'the target knows the epoch of the source')
        target.ask('CLUSTER', 'SETSLOT', slot, 'IMPORTING', source.id)
        source.ask('CLUSTER', 'SETSLOT', slot, 'MIGRATING', target.id)

    def moving(self, slot: int, target: Node) -> Iterator[str]:
        """Move a slot. Yield each key that was moved, with the slot in between, and '' once all were."""
        source = self.node_of(slot)
        assert source is not target
        self.begin_to_move(slot, source, target)
        yield ''
        while True:
            keys = source.raw.execute_command('CLUSTER', 'GETKEYSINSLOT', slot, 1)
            if not keys:
                break
            source.ask('MIGRATE', '127.0.0.1', target.port, '', 0, 5000, 'KEYS', *keys)
            yield keys[0].decode()
        yield ''
        others = [one for one in self.nodes_with_slots() if one not in (source, target)]
        for node in (target, source, *others):
            node.ask('CLUSTER', 'SETSLOT', slot, 'NODE', target.id)

    def replica(self) -> Node:
        """Return the replica, or one of several."""
        return next(one for one in self.nodes if one.client.info('replication')['role'] == 'slave')

    @staticmethod
    def plan_failover(replica: Node) -> None:
        """Make a replica the primary, as before maintenance. On a busy machine the nodes may need a second attempt."""
        asked_at = -math.inf

        def has_taken_over() -> bool:
            nonlocal asked_at
            if replica.client.info('replication')['role'] == 'master':
                return True
            if time.monotonic() > asked_at + ATTEMPT_S:
                asked_at = time.monotonic()
                replica.ask('CLUSTER', 'FAILOVER')
            return False

        wait_until(has_taken_over, 'the replica is the primary')

    def pair(self) -> List[Node]:
        """Return the first primary and its replica, whichever of them is the primary now."""
        return [self.nodes[0], self.nodes[self.num_primaries]]

    def replica_of(self, primary: Node) -> Node:
        """Return the replica of a primary, or one of several."""
        ranges = self.nodes_with_slots()[0].ask('CLUSTER', 'SLOTS')
        ports = next([one[1] for one in replicas] for _, _, node, *replicas in ranges if node[1] == primary.port)
        return next(one for one in self.nodes if one.port in ports)

    def bring_back(self) -> None:
        """Start the nodes that were killed, and return when all is as it was. Slots that were moved stay there."""
        for node in self.nodes:
            if not node.is_running:
                node.start()
            node.client.config_set('cluster-require-full-coverage', 'no')
        self.wait_until_whole()
