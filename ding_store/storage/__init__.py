"""Streams, values and counters shared by the processes of a run, without DI-engine and torch.

Importing this package imports numpy, and no backend. ``open_store`` imports the backend that the URL names.
"""

from __future__ import annotations

import difflib
import importlib
import re
from typing import TYPE_CHECKING, Any, Dict, Sequence, Union

from ding_store.config import join_urls as _join_urls
from ding_store.errors import ConfigError
from ding_store.storage.base import (
    OLDEST,
    OVERFLOW,
    Arrays,
    Entry,
    EntryId,
    Header,
    StoreInfo,
    StreamInfo,
    Value,
)
from ding_store.storage.urls import names_cluster as _names_cluster
from ding_store.storage.urls import names_several as _names_several
from ding_store.storage.urls import scheme_of as _scheme_of

if TYPE_CHECKING:
    from ding_store.storage.store import Store

__all__ = [
    'OLDEST',
    'OVERFLOW',
    'Arrays',
    'Entry',
    'EntryId',
    'Header',
    'Reader',
    'Store',
    'StoreInfo',
    'StreamInfo',
    'Value',
    'open_store',
]

#: scheme -> "module:Class"
BACKENDS: Dict[str, str] = {
    'memory': 'ding_store.storage.memory.store:MemoryStore',
    'embedded': 'ding_store.storage.redis.store:RedisStore',
    'redis': 'ding_store.storage.redis.store:RedisStore',
    'rediss': 'ding_store.storage.redis.store:RedisStore',
    'redis+sentinel': 'ding_store.storage.redis.store:RedisStore',
    'rediss+sentinel': 'ding_store.storage.redis.store:RedisStore',
    'redis+cluster': 'ding_store.storage.redis.store:RedisStore',
    'rediss+cluster': 'ding_store.storage.redis.store:RedisStore',
    'redis+shards': 'ding_store.storage.redis.store:RedisStore',
    'rediss+shards': 'ding_store.storage.redis.store:RedisStore',
    'unix': 'ding_store.storage.redis.store:RedisStore',
}
#: name -> its module, which is imported when it is first used
_LAZY = {'Reader': 'ding_store.storage.exactly_once.reader', 'Store': 'ding_store.storage.store'}
_HOST_AND_PORT = re.compile(r'[A-Za-z0-9.-]+(:\d{1,5})?(/\d+)?')


def open_store(url: Union[str, Sequence[str]] = 'embedded://', run: str = 'default', **options: Any) -> Store:
    """
    Overview:
        Open the store of a run. With a server, this connects and checks the server before it returns.
    Arguments:
        - url (:obj:`str`): ``embedded://[dir]`` starts a private redis-server for this run if none is running. ``dir``
          is ``.ding_store`` by default. ``redis://[user:password@]host[:port][/db]``, ``rediss://`` and
          ``unix:///path`` connect to a server. ``redis+sentinel://[user:password@]host:port,host:port/name`` and
          ``rediss+sentinel://`` ask Redis Sentinels for the server. ``memory://`` is for this process only. A list of
          URLs, or ``redis+shards://[user:password@]host:port,host:port[/db]``, names several servers: each stream,
          value and counter is on one of them. ``redis+cluster://[user:password@]host:port,host:port`` and
          ``rediss+cluster://`` name some nodes of a Redis cluster.
        - run (:obj:`str`): Name of the training job, the same in all its processes.
        - options: The fields of ``options.StreamOptions``, and ``stream_options``, a mapping from stream names to such
          options. Stores on Redis also accept the fields of ``options.RedisOptions`` and ``options.HostOptions``.
    Raises:
        - ConfigError: Unknown scheme or option, or a bad value, or the run is on other servers. The message names the
          fix.
        - StoreUnavailable: No server answers there.
        - StoreDenied: The server refuses this client.
        - StoreUnsuitable: The server is too old, or is configured to evict data.
    """
    address = _join_urls(url)
    scheme = _scheme_of(address)
    if scheme not in BACKENDS:
        raise ConfigError(_unknown_scheme(address, scheme))
    module, name = BACKENDS[scheme].split(':')
    backend = getattr(_import(module, address), name)
    if scheme == 'memory':
        store: Store = backend(address, run, **options)
    else:
        from ding_store.storage.options import host_options

        store = backend(address, run, host=host_options(options), **options)
        if scheme != 'embedded' and not (_names_several(address) or _names_cluster(address)):
            from ding_store.storage.shards.server_list import check_alone

            check_alone(store)
    return store


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def _unknown_scheme(url: str, scheme: str) -> str:
    # Only a bare address is quoted: any other text may hold a password.
    if _HOST_AND_PORT.fullmatch(url):
        return f'the store URL {url!r} names no scheme: write redis://{url}'
    if url.startswith('/'):
        return (
            f'the store URL {url!r} names no scheme: write unix://{url} for a socket, embedded://{url} for a directory'
        )
    near = difflib.get_close_matches(scheme, BACKENDS, 1)
    hint = f'; did you mean {near[0]}://?' if near else ''
    return f'no store for the scheme {scheme!r} of the given URL; known are {", ".join(BACKENDS)}{hint}'


def _import(module: str, url: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name and e.name.split('.')[0] == 'ding_store':
            raise
        scheme = _scheme_of(url)
        raise ConfigError(f'{scheme}:// needs the package {e.name!r}: pip install "redis>=4.5" "hiredis>=3.2"') from e
