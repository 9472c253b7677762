"""URLs of stores: their checks, their parts, and the form that may be shown in messages."""

from __future__ import annotations

import os
import re
from typing import List, Mapping, Optional
from urllib.parse import SplitResult, parse_qs, urlsplit

from ding_store.errors import ConfigError
from ding_store.storage.options import ALL_OPTIONS, REDIS_OPTIONS

_WITH_USERS = ('redis', 'rediss', 'unix')
#: Names allowed in a query, besides those that begin with ssl_. Any other would change what a store relies on.
_QUERY = ('db', 'username', 'password', 'client_name')


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case, or '' if it has none."""
    return url.partition(':')[0].lower() if ':' in url else ''


def address_of(url: str) -> str:
    """Return the URL without user, password and query, for messages. It also works for malformed URLs."""
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


def _refuse_options(query: str, url: str) -> None:
    ours = sorted(set(parse_qs(query, keep_blank_values=True)) & set(ALL_OPTIONS))
    if ours:
        raise ConfigError(f'pass {", ".join(ours)} as keyword arguments, not in the URL of {address_of(url)}')


def _check_rest(url: str, parts: SplitResult, query: Mapping[str, List[str]]) -> None:
    """Check fragment, query and database number: redis-py ignores what it cannot parse. Errors quote no query."""
    if parts.fragment or url.endswith('#'):
        raise ConfigError(f'the URL of {address_of(url)} has a "#": percent-encode it as %23, or leave it out')
    has_tls = scheme_of(url) == 'rediss'
    if any(not (name in _QUERY or (has_tls and name.startswith('ssl_'))) for name in query):
        raise ConfigError(
            f'the query of the URL of {address_of(url)} is malformed. Use only {", ".join(_QUERY)}, and with '
            f'rediss:// ssl_... names. Pass timeouts as keyword arguments: {", ".join(REDIS_OPTIONS)}.'
        )
    path = '' if scheme_of(url) == 'unix' else parts.path.strip('/')
    numbers = [*([path] if path else []), *query.get('db', [])]
    if len(numbers) > 1 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ConfigError(
            f'the URL of {address_of(url)} names no database. Write one number behind the host, as in '
            'redis://host:6379/0, and name the run with run=.'
        )


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
