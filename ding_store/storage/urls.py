"""URLs of stores: what they name, and which part of them may be shown."""

from __future__ import annotations

import os
import re
from typing import Optional
from urllib.parse import parse_qs, unquote, urlsplit

from ding_store.errors import ConfigError
from ding_store.storage.options import ALL_OPTIONS

_WITH_USERS = ('redis', 'rediss', 'unix')


def scheme_of(url: str) -> str:
    return url.partition(':')[0].lower() if ':' in url else ''


def address_of(url: str) -> str:
    """The URL without user, password and query: fit for messages, even where the URL itself is malformed."""
    scheme, separator, rest = url.partition('://')
    if not separator:
        return f'{scheme_of(url)}://...'
    before, *behind = re.split('[?#]', rest)
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
    rest = url.partition('://')[2]
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
    ours = sorted(set(parse_qs(parts.query)) & set(ALL_OPTIONS))
    if ours:
        raise ConfigError(f'pass {", ".join(ours)} as keyword arguments, not in the URL of {address_of(url)}')


def directory_of(url: str, run: str) -> Optional[str]:
    """Of an embedded server: absolute, so that a process elsewhere, or unpickled, finds the same."""
    if scheme_of(url) != 'embedded':
        return None
    parts = urlsplit(url)
    base = unquote(parts.netloc + parts.path) or '.ding_store'
    return os.path.join(os.path.abspath(os.path.expanduser(base)), run)
