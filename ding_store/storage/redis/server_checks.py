"""Checks that a Redis server can hold a store without losing data, and the making of its redis-py client."""

from __future__ import annotations

import inspect
import os
import re
import secrets
import select
import socket
import ssl
import threading
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple
from urllib.parse import parse_qsl, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ding_store.errors import ConfigError, StoreUnsuitable
from ding_store.storage.urls import address_of

MIN_VERSION = (6, 2)  # for XTRIM MINID and exclusive ranges
_GENERATION_LIFE_S = 7 * 86400
_SET_POLICY = (
    'Set it to noeviction: `redis-cli config set maxmemory-policy noeviction`, or in the parameter group or the '
    'console of a managed service.'
)

# Protocol 3 has replies of other shapes. Old versions of redis-py have no such argument and use protocol 2.
_PROTOCOL: Dict[str, Any] = {'protocol': 2} if 'protocol' in inspect.signature(redis.Redis.__init__).parameters else {}
_TCP: Dict[str, Any] = {'socket_keepalive': True}
_FILES = ('ssl_ca_certs', 'ssl_ca_path', 'ssl_certfile', 'ssl_keyfile')


def make_client(url: str, connected: Callable[[Any], None], socket_timeout_s: float) -> redis.Redis:
    """
    Overview:
        Make a client. It connects with its first command.
    Arguments:
        - connected (:obj:`Callable`): Called with every new connection. Must call the connection's ``on_connect()``.
        - socket_timeout_s (:obj:`float`): Time without a reply after which the server counts as lost. Every command
          must block for less.
    Raises:
        - ConfigError: The URL is malformed.
    """
    tcp = {} if url.startswith('unix:') else {**_TCP, 'socket_connect_timeout': min(5.0, socket_timeout_s)}
    try:
        pool = redis.ConnectionPool.from_url(
            url,
            socket_timeout=socket_timeout_s,
            # ``Connection`` handles a lost connection: the store must resend its entries before any other command.
            retry=Retry(NoBackoff(), 0),
            max_connections=10_000,
            redis_connect_func=connected,
            **tcp,
            **_PROTOCOL,
        )
        pool.make_connection()
    except (TypeError, ValueError) as e:
        raise ConfigError(f'the URL of {address_of(url)} is malformed: {e}') from e
    return redis.Redis(connection_pool=pool)


def check_files(url: str) -> None:
    """
    Overview:
        Check that this process can read the certificate files that a URL with TLS names. Call it before the first
        connection only: redis-py's own error comes late and names no file. Later a missing file may be one that is
        being replaced.
    Raises:
        - ConfigError: This process cannot read one of them.
    """
    for name, path in parse_qsl(urlsplit(url).query) if url.startswith('rediss') else ():
        if name in _FILES and not os.access(path, os.R_OK):
            # Name no path: errors show nothing of a URL's query.
            raise ConfigError(f'cannot read the {name} in the URL of {address_of(url)}. Check its path and its rights.')


class ServerGeneration:
    """
    Overview:
        Makes sure that all connections of a session lead to the same server generation. Scripts receive its
        ``run_id``, and compare it with the one stored in the stream.
    Arguments:
        - in_cluster (:obj:`bool`): Whether the server must be a node of a cluster, or none.
        - key (:obj:`str`): A key of the run. Its random value is the run id if INFO has none, and with ``in_key``. Each
          new connection keeps it for a week. A server that lost its memory has lost it as well.
    Attributes:
        - run_id (:obj:`str`): Random id of one server process. '' before the first connection.
        - server (:obj:`str`): The server's name and version.
        - is_in_key (:obj:`bool`): Whether the run id is the value of the key.
        - advice (:obj:`str`): What should be changed in the server. '': nothing.
        - num_ends (:obj:`int`): How often data in the embedded server's directory was put aside after a run ended.
    """

    def __init__(self, address: str, num_ends: int, key: str, in_key: bool = False, in_cluster: bool = False) -> None:
        self.run_id = ''
        self.server = ''
        self.is_in_key = False
        self.advice = ''
        self.num_ends = num_ends
        self._address = address
        self._key, self._in_key, self._in_cluster = key, in_key, in_cluster
        self._lock = threading.Lock()

    def greet(self, connection: Any) -> None:
        """
        Overview:
            Check the server at the other end of a new connection.
        Raises:
            - StoreUnsuitable: The server would lose data.
            - redis.RedisError: The server cannot be used yet, or is another one than before.
        """
        try:
            self._greet(connection)
        except BaseException:
            connection.disconnect()  # The pool would lend it out, because it looks connected.
            raise

    def _greet(self, connection: Any) -> None:
        connection.on_connect()
        facts = facts_of(_ask(connection, 'INFO'))
        server = examine(facts, self._address, self._in_cluster)
        run_id = '' if self._in_key else facts.get('run_id', '')
        if not re.fullmatch('[0-9a-f]{40}', run_id):
            self.is_in_key = True
            run_id = self._in_its_key(connection)
        with self._lock:
            if self.run_id not in ('', run_id):
                raise redis.ConnectionError('the server restarted, or another one replaced it')
            self.run_id, self.server, self.advice = run_id, server, advice_on(facts, self._address)

    def _in_its_key(self, connection: Any) -> str:
        """Return the value of the key. Set it if the server has none."""
        found = _ask(connection, 'GET', self._key)
        if found is None:  # A server at its maxmemory refuses SET, but not the rest.
            _ask(connection, 'SET', self._key, secrets.token_hex(20), 'NX', 'EX', _GENERATION_LIFE_S)
            found = _ask(connection, 'GET', self._key)
        _ask(connection, 'EXPIRE', self._key, _GENERATION_LIFE_S)
        return found.decode() if isinstance(found, bytes) else str(found or '')


def _ask(connection: Any, *command: Any) -> Any:
    connection.send_command(*command)
    return connection.read_response()


def facts_of(reply: Any) -> Dict[str, str]:
    """Return the fields of a reply to INFO."""
    text = reply.decode() if isinstance(reply, bytes) else str(reply)
    lines = (line.partition(':') for line in text.splitlines() if ':' in line)
    return {name: fact for name, _, fact in lines}


def examine(facts: Mapping[str, str], address: str, in_cluster: bool = False) -> str:
    """
    Overview:
        Return the server's name and version from its INFO, after checking that it can keep data.
    Raises:
        - StoreUnsuitable: The server cannot. The message names the fix.
        - redis.RedisError: Not yet: it is loading its data, or is a replica that may become the primary.
    """
    if facts.get('redis_mode') == 'sentinel':
        raise StoreUnsuitable(
            f'{address} is a Redis Sentinel, which keeps no data. Use redis+sentinel://HOST:PORT/{_primary_in(facts)} '
            'with the addresses of all sentinels.'
        )
    version = facts.get('redis_version', '')
    if _numbers(version) < MIN_VERSION:
        needed = '.'.join(map(str, MIN_VERSION))
        raise StoreUnsuitable(f'{address} is Redis {version or "of unknown version"}. At least {needed} is needed.')
    policy = facts.get('maxmemory_policy', 'noeviction')
    if not policy.startswith(('noeviction', 'volatile-')):
        raise StoreUnsuitable(f'{address} would evict experience: its maxmemory-policy is {policy}. {_SET_POLICY}')
    if facts.get('role') == 'active-replica':
        raise StoreUnsuitable(
            f'{address} is an active replica of KeyDB: two servers would number entries alike. Turn active-replica off.'
        )
    if facts.get('cluster_enabled', '0') != '0' and not in_cluster:
        raise StoreUnsuitable(
            f'{address} is part of a Redis cluster. Use redis+cluster:// with the addresses of its nodes.'
        )
    if facts.get('loading', '0') != '0':
        raise redis.exceptions.BusyLoadingError('loading:1')
    if facts.get('role') == 'slave':
        primary = f'{facts.get("master_host", "")}:{facts.get("master_port", "")}'
        raise redis.exceptions.ReadOnlyError(f'its primary is {primary}')
    return f'{"valkey" if "valkey_version" in facts else "redis"} {facts.get("valkey_version", version)}'


def advice_on(facts: Mapping[str, str], address: str) -> str:
    """Return what should be changed in a server that can be used as it is, or ''."""
    policy = facts.get('maxmemory_policy', 'noeviction')
    if policy == 'noeviction':
        return ''
    return (
        f'the maxmemory-policy of {address} is {policy}. Nothing that counts is lost: the store sets a time to live '
        f'only for data that can be sent again. But a large entry may have to be sent several times. {_SET_POLICY}'
    )


def _primary_in(facts: Mapping[str, str]) -> str:
    """Return the primary's name in the INFO of a sentinel: master0:name=mymaster,status=ok,address=..."""
    found = re.match('name=([^,]*)', facts.get('master0', ''))
    return found[1] if found else 'NAME'


def speaks_plainly(url: str, timeout_s: float = 2.0) -> bool:
    """True if a Redis server replies there without TLS. A server that needs TLS closes such a connection at once."""
    try:
        with _dialled(url, timeout_s) as plain:
            plain.sendall(b'PING\r\n')
            return plain.recv(16).startswith((b'+PONG', b'-NOAUTH', b'-DENIED'))
    except OSError:
        return False


def speaks_tls(url: str, timeout_s: float = 2.0) -> bool:
    """True if a server there replies with TLS, whatever its certificate. One without TLS closes the connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _dialled(url, timeout_s) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def _dialled(url: str, timeout_s: float) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or 'localhost', parts.port or 6379), timeout_s)


def is_tls_error(error: Optional[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def wake(client: redis.Redis) -> None:
    """
    Overview:
        End the calls that wait for a reply in other threads. This shuts down only the sockets, which any thread may do.
        ``pool.disconnect`` would also reset the parsers that those threads are using.
    """
    pool: Any = client.connection_pool
    busy: List[Any] = list(getattr(pool, '_in_use_connections', ()))
    for connection in busy:
        sock = getattr(connection, '_sock', None)
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # Its own thread has closed it.
    pool.disconnect(inuse_connections=False)


def has_hung_up(connection: Any) -> bool:
    """True if the other end has closed the connection, as far as this host's kernel has noticed."""
    sock = getattr(connection, '_sock', None)
    if sock is None:
        return False
    poll = select.poll()
    try:
        poll.register(sock, select.POLLRDHUP)
    except (OSError, ValueError):
        return False  # Its own thread has closed it.
    return bool(poll.poll(0))


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(map(int, re.findall(r'\d+', version)[:2]))
