"""A primary, a replica and three sentinels in real processes, configured as docs/howto/sentinel.md says."""

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

HOWTO = Path(__file__).resolve().parents[1] / 'docs' / 'howto'
PASSWORD, ASK_PASSWORD = 'CHANGE-ME', 'ASK-PASSWORD'
DOWN_AFTER_S = 1.0
WAIT_S = 60.0


def config_of(name: str) -> str:
    """Return one of the page's files."""
    (text,) = re.findall(rf'^```\n# {re.escape(name)}\n(.*?)^```$', (HOWTO / 'sentinel.md').read_text(), re.M | re.S)
    return str(text)


def users() -> str:
    """Return the users of the page, and a default user that tests may use."""
    lines = [
        *re.findall('^user ding .*$', (HOWTO / 'security.md').read_text(), re.M),
        *re.findall('^user .*$', (HOWTO / 'sentinel.md').read_text(), re.M),
        'user default on nopass ~* &* +@all',
    ]
    return '\n'.join([*lines, ''])


def free_ports(count: int) -> List[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(('127.0.0.1', 0))
        return [one.getsockname()[1] for one in sockets]


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, f'not within {WAIT_S} s: {what}'
        time.sleep(0.02)


class Node:
    """A server or a sentinel. Its directory keeps its file between two starts."""

    def __init__(
        self, binary: str, directory: Path, port: int, config: str, *, is_sentinel: bool = False, **options: Any
    ) -> None:
        self.port, self.directory = port, directory
        self.address = f'127.0.0.1:{port}'
        directory.mkdir()
        file = directory / 'redis.conf'
        file.write_text(config)
        self._command = [binary, str(file), *(['--sentinel'] if is_sentinel else [])]
        self._options: Dict[str, Any] = {**options, 'password': ASK_PASSWORD} if is_sentinel else options
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._options.update(host='127.0.0.1', port=port, retry=Retry(NoBackoff(), 0), socket_timeout=2.0)
        self.client = redis.Redis(decode_responses=True, **self._options)

    def start(self, *words: str) -> None:
        self._process = subprocess.Popen([*self._command, *words], stdout=subprocess.DEVNULL)
        wait_until(self.client.ping, f'{self.directory.name} replies')

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_S)
            self._process = None
        self.client.connection_pool.disconnect()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self._process is not None


class SentinelGroup:
    """
    Overview:
        Runs within its ``with`` block. The sentinels notice a dead primary after ``DOWN_AFTER_S``.
    Arguments:
        - tls (:obj:`Any`): An ``Authority`` with certificates of 'server' and 'client': nothing goes without TLS.
    """

    def __init__(self, binary: str, num_servers: int = 2, tls: Any = None) -> None:
        self._tls = tls
        options = {} if tls is None else tls.client_options('client')
        self.directory = Path(tempfile.mkdtemp(prefix='ding'))
        ports = free_ports(num_servers + 3)
        (self.directory / 'users.acl').write_text(users())
        texts = [config_of('primary.conf'), *[config_of('replica.conf')] * (num_servers - 1)]
        self.servers = [
            Node(
                *(binary, self.directory / f'server{i}', port, self._config(text, f'server{i}', port, ports[0])),
                **options,
            )
            for i, (text, port) in enumerate(zip(texts, ports))
        ]
        self.sentinels = [
            Node(
                binary,
                self.directory / f'sentinel{i}',
                port,
                self._config(config_of('sentinel.conf'), f'sentinel{i}', port, ports[0]),
                is_sentinel=True,
                **options,
            )
            for i, port in enumerate(ports[num_servers:])
        ]

    def _config(self, text: str, name: str, port: int, primary: int) -> str:
        for pattern, new in (
            (r'^bind .*', 'bind 127.0.0.1'),
            (r'^port .*', f'port {port}' if self._tls is None else f'port 0\ntls-port {port}'),
            (r'^dir .*', f'dir {self.directory / name}'),
            (r'^aclfile .*', f'aclfile {self.directory / "users.acl"}'),
            (r'10\.0\.0\.1 6379', f'127.0.0.1 {primary}'),
            (r'(down-after-milliseconds \w+) .*', rf'\1 {DOWN_AFTER_S * 1000:.0f}'),
        ):
            text = re.sub(pattern, new, text, flags=re.M)
        extra = '' if name.startswith('sentinel') else 'repl-diskless-sync yes\nrepl-diskless-sync-delay 0\n'
        extra += '' if self._tls is None else self._tls.server_lines('server')
        return f'{text}{extra}logfile {self.directory / name}.log\n'

    def __enter__(self) -> 'SentinelGroup':
        try:
            for server in self.servers:
                server.start()
            for server in self.servers[1:]:
                self.wait_for_link(server)
            for sentinel in self.sentinels:
                sentinel.start()
            wait_until(self.is_complete, 'the sentinels know each other and the replicas')
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for node in [*self.sentinels, *self.servers]:
            node.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, user: str = f'ding:{PASSWORD}@', name: str = 'mymaster') -> str:
        scheme, query = ('redis', '') if self._tls is None else ('rediss', self._tls.query('client'))
        return f'{scheme}+sentinel://{user}{",".join(one.address for one in self.sentinels)}/{name}{query}'

    def is_complete(self) -> bool:
        """True if all sentinels see each other, and all servers but the primary as usable replicas."""
        for sentinel in self.sentinels:
            if len(sentinel.client.execute_command('SENTINEL', 'SENTINELS', 'mymaster')) != len(self.sentinels) - 1:
                return False
            replicas = self.replicas_of(sentinel)
            usable = [one for one in replicas if one['flags'] == 'slave' and one['master-link-status'] == 'ok']
            if len(usable) != len(self.servers) - 1:
                return False
        return True

    @staticmethod
    def replicas_of(sentinel: Node) -> List[Dict[str, str]]:
        found = sentinel.client.execute_command('SENTINEL', 'REPLICAS', 'mymaster')
        return [one if isinstance(one, dict) else dict(zip(one[::2], one[1::2])) for one in found]

    def primary(self) -> Node:
        """Return the server that the first sentinel that runs names."""
        for sentinel in self.sentinels:
            with contextlib.suppress(redis.RedisError):
                _, port = sentinel.client.execute_command('SENTINEL', 'GET-MASTER-ADDR-BY-NAME', 'mymaster')
                return next(one for one in self.servers if one.port == int(port))
        raise AssertionError('no sentinel names the primary')

    @staticmethod
    def wait_for_link(replica: Node) -> None:
        wait_until(lambda: replica.client.info('replication').get('master_link_status') == 'up', 'the replica has all')

    def wait_for_failover(self, former: Node) -> Node:
        wait_until(lambda: self.primary() is not former, 'the sentinels name another primary')
        return self.primary()

    def restart_as_replica(self, server: Node) -> None:
        """Start a server that was killed, as a replica of the present primary."""
        server.start('--replicaof', '127.0.0.1', str(self.primary().port))
        self.follow(server)

    def follow(self, server: Node) -> None:
        """Make a server that came back a replica at once. The sentinels would do so after 8 s."""
        primary = self.primary()
        if server is not primary:  # On a busy machine the sentinels may have replaced the primary once more.
            server.client.replicaof('127.0.0.1', primary.port)
        wait_until(self.is_complete, 'the sentinels see the replica')

    def plan_failover(self) -> None:
        """Let the sentinels move the primary, as before maintenance."""
        wait_until(lambda: self.sentinels[0].client.execute_command('SENTINEL', 'FAILOVER', 'mymaster'), 'it begins')


STOP, CONTINUE = signal.SIGSTOP, signal.SIGCONT
