"""URLs of stores: their checks, their parts, and the form that may be shown in messages."""

from __future__ import annotations

import os
import re
from typing import List, Mapping, NamedTuple, Optional, Tuple
from urllib.parse import SplitResult, parse_qs, urlsplit

from ding_store.config import split_urls
from ding_store.errors import ConfigError
from ding_store.storage.options import ALL_OPTIONS, REDIS_OPTIONS

#: Schemes of URLs that name sentinels. The sentinels name the server.
_WITH_SENTINELS = ('redis+sentinel', 'rediss+sentinel')
#: Schemes of URLs that name several servers, each by itself.
_WITH_SHARDS = ('redis+shards', 'rediss+shards')
#: Schemes of URLs that name some nodes of a cluster. Those know the others.
_WITH_CLUSTER = ('redis+cluster', 'rediss+cluster')
_WITH_USERS = ('redis', 'rediss', 'unix', *_WITH_SENTINELS, *_WITH_SHARDS, *_WITH_CLUSTER)
#: Schemes of URLs that may be in a list of several.
_IN_LISTS = ('redis', 'rediss', 'unix', *_WITH_SENTINELS)
#: Names allowed in a query, besides those that begin with ssl_. Any other would change what a store relies on.
_QUERY = ('db', 'username', 'password', 'client_name')
#: A host name, an IPv4 address, or an IPv6 address in brackets, with or without a port.
_HOST = re.compile(r'([\w.-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?', re.ASCII)
_PRIMARY_NAME = re.compile(r'[\w.-]+', re.ASCII)
_PORT, _SENTINEL_PORT = 6379, 26379


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case, or '' if it has none. A list of URLs has the scheme of shards."""
    if len(split_urls(url)) > 1:
        return _WITH_SHARDS[0]
    return url.partition(':')[0].lower() if ':' in url else ''


def address_of(url: str) -> str:
    """
    Return the URL without user, password and query, for messages. It also works for malformed URLs. For several
    servers, return the addresses of all.
    """
    if names_several(url):
        return ' '.join(map(address_of, servers_of(url)))
    scheme, separator, rest = url.partition('://')
    if not separator:
        return f'{scheme_of(url)}://...'
    before, *behind = re.split('[?#]', rest)
    if scheme.lower() == 'embedded':
        return url
    if scheme == 'unix' and rest.startswith('/'):
        return f'{scheme}://{before}'
    if '@' in ''.join(behind):
        return f'{scheme}://...'  # The "@" may belong to a password or to a query: both sides may hold a secret.
    return f'{scheme}://{before.rpartition("@")[2]}'


def check_url(url: str) -> None:
    """
    Overview:
        Refuse a URL that is malformed or holds options of this package. They are keyword arguments: redis-py would not
        know them.
    Raises:
        - ConfigError: The URL is refused. The message names the fix.
    """
    if names_several(url):
        _check_several(url)
        return
    scheme, separator, rest = url.partition('://')
    if not separator:
        raise ConfigError(f'the URL that begins with "{scheme_of(url)}:" has no "//": write {scheme_of(url)}://...')
    if scheme.lower() == 'embedded':
        _refuse_options(rest.partition('?')[2], url)
        return
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    has_user = '@' in rest and scheme_of(url) in _WITH_USERS and not rest.startswith('/')
    if parts is None or (has_user and '@' not in parts.netloc):
        raise ConfigError(
            f'the URL of {address_of(url)} cannot be parsed. In user and password, percent-encode special characters, '
            'for example "/" as %2F, "#" as %23, "?" as %3F, "[" as %5B.'
        )
    _refuse_options(parts.query, url)
    if scheme_of(url) in _WITH_USERS:
        _check_rest(url, parts, parse_qs(parts.query, keep_blank_values=True))


def names_several(url: str) -> bool:
    """True for a list of URLs, and for a URL of shards, even if that names one server."""
    return scheme_of(url) in _WITH_SHARDS


def servers_of(url: str) -> List[str]:
    """Return the URL of each server that a URL or a list of URLs names, in order. It also works for malformed URLs."""
    return [server for one in split_urls(url) for server in (_shards(one) if scheme_of(one) in _WITH_SHARDS else [one])]


def _shards(url: str) -> List[str]:
    """Return the URL of each server. All have the same user, password, database and query."""
    scheme, _, rest = url.partition('://')
    authority, before_path, path = re.split('([/?#]|$)', rest, maxsplit=1)
    user, at, hosts = authority.rpartition('@')
    return [f'{scheme.partition("+")[0]}://{user}{at}{host}{before_path}{path}' for host in hosts.split(',')]


def _check_several(url: str) -> None:
    for one in split_urls(url):
        if scheme_of(one) not in (*_IN_LISTS, *_WITH_SHARDS):
            raise ConfigError(
                f'the list of servers has {address_of(one)}. Use only URLs of {", ".join(_IN_LISTS)} in it, or one URL '
                'alone.'
            )
        if scheme_of(one) in _WITH_SHARDS and not all(_HOST.fullmatch(host) for host in _hosts_of(one)):
            raise ConfigError(
                f'the URL of {address_of(one)} is malformed. Separate the addresses of the servers by commas, as in '
                'redis+shards://host1:6379,host2:6379. In user and password, percent-encode special characters.'
            )
    servers = servers_of(url)
    for server in servers:
        check_url(server)
    addresses = list(map(address_of, servers))
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f'the list of servers has {address} twice. Name each server once.')


def _hosts_of(url: str) -> List[str]:
    authority = re.split('[/?#]', url.partition('://')[2], maxsplit=1)[0]
    return authority.rpartition('@')[2].split(',')


def _refuse_options(query: str, url: str) -> None:
    ours = sorted(set(parse_qs(query, keep_blank_values=True)) & set(ALL_OPTIONS))
    if ours:
        raise ConfigError(f'pass {", ".join(ours)} as keyword arguments, not in the URL of {address_of(url)}')


def _check_rest(url: str, parts: SplitResult, query: Mapping[str, List[str]]) -> None:
    """Check fragment, query and database number: redis-py ignores what it cannot parse. Errors quote no query."""
    if parts.fragment or url.endswith('#'):
        raise ConfigError(f'the URL of {address_of(url)} has a "#": percent-encode it as %23, or leave it out')
    has_tls = scheme_of(url).startswith('rediss')
    if any(not (name in _QUERY or (has_tls and name.startswith('ssl_'))) for name in query):
        raise ConfigError(
            f'the query of the URL of {address_of(url)} is malformed. Use only {", ".join(_QUERY)}, and with '
            f'rediss:// ssl_... names. Pass timeouts as keyword arguments: {", ".join(REDIS_OPTIONS)}.'
        )
    path = '' if scheme_of(url) == 'unix' else parts.path.strip('/')
    if has_sentinels(url):
        _check_sentinels(url, parts, path)
        path = ''
    if names_cluster(url):
        _check_cluster(url, parts, path, query)
    numbers = [*([path] if path else []), *query.get('db', [])]
    if len(numbers) > 1 or not all(number.isascii() and number.isdigit() for number in numbers):
        example = 'redis+sentinel://host:26379/mymaster?db=0' if has_sentinels(url) else 'redis://host:6379/0'
        raise ConfigError(
            f'the URL of {address_of(url)} names no database. Write one number, as in {example}, and name the run '
            'with run=.'
        )


def _check_sentinels(url: str, parts: SplitResult, name: str) -> None:
    if not all(_HOST.fullmatch(host) for host in _addresses(parts)):
        raise ConfigError(
            f'the URL of {address_of(url)} is malformed. Separate the addresses of the sentinels by commas, as in '
            'redis+sentinel://host1:26379,host2:26379,host3:26379/mymaster.'
        )
    if not _PRIMARY_NAME.fullmatch(name):
        raise ConfigError(
            f'the URL of {address_of(url)} names no primary. Write its name in "sentinel monitor" behind the hosts, as '
            'in redis+sentinel://host:26379/mymaster.'
        )


def _check_cluster(url: str, parts: SplitResult, path: str, query: Mapping[str, List[str]]) -> None:
    if not all(_HOST.fullmatch(host) for host in _addresses(parts)):
        raise ConfigError(
            f'the URL of {address_of(url)} is malformed. Separate the addresses of the nodes by commas, as in '
            'redis+cluster://host1:6379,host2:6379,host3:6379.'
        )
    if path or 'db' in query:
        raise ConfigError(f'the URL of {address_of(url)} names a database. A cluster has only one: leave it out.')


def _addresses(parts: SplitResult) -> List[str]:
    return parts.netloc.rpartition('@')[2].split(',')


def _with_ports(parts: SplitResult, port: int) -> Tuple[str, ...]:
    matches = [_HOST.fullmatch(host) for host in _addresses(parts)]
    return tuple(f'{match[1]}:{match[2] or port}' for match in matches if match)


def has_sentinels(url: str) -> bool:
    """True if the URL names sentinels, which know the server."""
    return scheme_of(url) in _WITH_SENTINELS


class SentinelUrl(NamedTuple):
    """
    Overview:
        The parts of a ``redis+sentinel://`` URL.
    Attributes:
        - hosts: Host and port of each sentinel, as they are written in URLs.
        - primary: The primary's name in the sentinels.
        - scheme: Scheme of the server's URL: redis or rediss.
        - user: User and password of the server, as they are written in URLs, with the "@".
        - query: The query of the server's URL.
    """

    hosts: Tuple[str, ...]
    primary: str
    scheme: str
    user: str
    query: str

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Split a URL that ``check_url`` has accepted."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition('@')
        return cls(
            _with_ports(parts, _SENTINEL_PORT),
            parts.path.strip('/'),
            parts.scheme.partition('+')[0],
            user + at,
            parts.query,
        )

    def server_url(self, host: str, port: int) -> str:
        """Return the URL of the server at an address that a sentinel named."""
        address = f'[{host}]:{port}' if ':' in host else f'{host}:{port}'
        return f'{self.scheme}://{self.user}{address}' + (f'?{self.query}' if self.query else '')


def names_cluster(url: str) -> bool:
    """True if the URL names nodes of a cluster."""
    return scheme_of(url) in _WITH_CLUSTER


class ClusterUrl(NamedTuple):
    """
    Overview:
        The parts of a ``redis+cluster://`` URL.
    Attributes:
        - hosts: Host and port of each node that is named, as they are written in URLs.
        - scheme: Scheme of a node's URL: redis or rediss.
        - user: User and password of all nodes, as they are written in URLs, with the "@".
        - query: The query of a node's URL.
    """

    hosts: Tuple[str, ...]
    scheme: str
    user: str
    query: str

    @classmethod
    def parse(cls, url: str) -> ClusterUrl:
        """Split a URL that ``check_url`` has accepted."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition('@')
        return cls(_with_ports(parts, _PORT), parts.scheme.partition('+')[0], user + at, parts.query)

    def node_url(self, address: str) -> str:
        """Return the URL of the node at an address."""
        return f'{self.scheme}://{self.user}{address}' + (f'?{self.query}' if self.query else '')


def root_of(url: str) -> Optional[str]:
    """
    Overview:
        Return the absolute path of the directory that an ``embedded://`` URL names, or None for any other URL.

        The text behind ``embedded://`` is a file system path, not a URL path: ``#``, ``?`` and ``%`` stand for
        themselves. A first ``~`` is the user's home.
    """
    if scheme_of(url) != 'embedded':
        return None
    return os.path.abspath(os.path.expanduser(url.partition('://')[2] or '.ding_store'))


def directory_of(url: str, run: str) -> Optional[str]:
    """Return the absolute path of the directory of a run's embedded server, or None for any other server."""
    root = root_of(url)
    return None if root is None else os.path.join(root, run)


def embedded_url(root: str) -> str:
    """Return the URL of the embedded stores in a directory. The inverse of ``root_of``."""
    return f'embedded://{os.path.abspath(root)}'
