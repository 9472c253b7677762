"""URLs of stores: what they name, and which part of them may be shown."""

from __future__ import annotations

import os
import re
from typing import List, Mapping, Optional
from urllib.parse import SplitResult, parse_qs, urlsplit

from ding_store.errors import ConfigError
from ding_store.storage.options import ALL_OPTIONS, REDIS_OPTIONS

_WITH_USERS = ('redis', 'rediss', 'unix')
#: What a query may hold, besides what begins with ssl_. All else would change what a store relies on.
_QUERY = ('db', 'username', 'password', 'client_name')


def scheme_of(url: str) -> str:
    return url.partition(':')[0].lower() if ':' in url else ''


def address_of(url: str) -> str:
    """The URL without user, password and query: fit for messages, even where the URL itself is malformed."""
    scheme, separator, rest = url.partition('://')
    if not separator:
        return f'{scheme_of(url)}://...'
    before, *behind = re.split('[?#]', rest)
    if scheme.lower() == 'embedded':
        return url
    if scheme == 'unix' and rest.startswith('/'):
        return f'{scheme}://{before}'
    if '@' in ''.join(behind):
        return f'{scheme}://...'  # Of a password, or of a query? What is on either side may be a secret.
    return f'{scheme}://{before.rpartition("@")[2]}'


def check_url(url: str) -> None:
    """
    Raises:
        - ConfigError: It cannot be taken apart, or holds our options: those are keyword arguments, which redis-py would
          not know, and other processes not see.
    """
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
            f'the URL of {address_of(url)} cannot be taken apart: percent-encode what is special in user and password, '
            'for example "/" as %2F, "#" as %23, "?" as %3F, "[" as %5B'
        )
    _refuse_options(parts.query, url)
    if scheme_of(url) in _WITH_USERS:
        _check_rest(url, parts, parse_qs(parts.query, keep_blank_values=True))


def _refuse_options(query: str, url: str) -> None:
    ours = sorted(set(parse_qs(query, keep_blank_values=True)) & set(ALL_OPTIONS))
    if ours:
        raise ConfigError(f'pass {", ".join(ours)} as keyword arguments, not in the URL of {address_of(url)}')


def _check_rest(url: str, parts: SplitResult, query: Mapping[str, List[str]]) -> None:
    """Of a Redis server's URL: redis-py passes over what it does not understand. No error shows what is in a query."""
    if parts.fragment or url.endswith('#'):
        raise ConfigError(f'the URL of {address_of(url)} has a "#": percent-encode it as %23, or leave it out')
    has_tls = scheme_of(url) == 'rediss'
    if any(not (name in _QUERY or (has_tls and name.startswith('ssl_'))) for name in query):
        raise ConfigError(
            f'the query of the URL of {address_of(url)} is malformed: it may hold {", ".join(_QUERY)}, and with '
            f'rediss:// ssl_...; how a store waits is set by keyword arguments: {", ".join(REDIS_OPTIONS)}'
        )
    path = '' if scheme_of(url) == 'unix' else parts.path.strip('/')
    numbers = [*([path] if path else []), *query.get('db', [])]
    if len(numbers) > 1 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError(
            f'the URL of {address_of(url)} names no database: behind the host comes one number, as in '
            'redis://host:6379/0; name the run with run='
        )


def root_of(url: str) -> Optional[str]:
    """
    Overview:
        Absolute path of the directory that an ``embedded://`` URL names; None for every other URL.

        What follows ``embedded://`` is a path as the file system has it, not a URL's: ``#``, ``?`` and ``%`` stand for
        themselves. A first ``~`` is the user's home.
    """
    if scheme_of(url) != 'embedded':
        return None
    return os.path.abspath(os.path.expanduser(url.partition('://')[2] or '.ding_store'))


def directory_of(url: str, run: str) -> Optional[str]:
    """Absolute path of the directory of a run's embedded server; None for servers that others started."""
    root = root_of(url)
    return None if root is None else os.path.join(root, run)


def embedded_url(root: str) -> str:
    """The URL of the embedded stores of the runs in a directory; the inverse of ``root_of``."""
    return f'embedded://{os.path.abspath(root)}'
