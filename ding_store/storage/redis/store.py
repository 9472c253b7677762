"""``RedisStore``, a store in a Redis server, or in several."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Dict, List, Tuple

from ding_store.errors import ConfigError
from ding_store.storage.memory.server import Memory, MemoryServer
from ding_store.storage.options import (
    ALL_OPTIONS,
    FAILOVER_DEFAULTS,
    HostOptions,
    check_name,
    redis_options,
    refuse_rest,
    stream_options,
)
from ding_store.storage.protocol import Server
from ding_store.storage.redis.cluster import ClusterServer
from ding_store.storage.redis.server import RedisServer
from ding_store.storage.shards.router import Router
from ding_store.storage.shards.server import ShardedServer
from ding_store.storage.store import NO_HOST_CACHE, Store
from ding_store.storage.urls import (
    check_url,
    directory_of,
    embedded_url,
    has_sentinels,
    names_cluster,
    names_several,
    scheme_of,
    servers_of,
)


class RedisStore(Store):
    """
    Overview:
        A store in the server of a ``redis://``, ``rediss://``, ``unix://`` or ``embedded://`` URL, or in the primary of
        a ``redis+sentinel://`` or ``rediss+sentinel://`` URL, or in the servers of a list of such URLs, or in the nodes
        of the cluster of a ``redis+cluster://`` or ``rediss+cluster://`` URL. Pickles as its URL and options. A copy
        made by unpickling or ``fork`` opens its own connections and is a new writer.
    Arguments:
        - url (:obj:`str`): A URL, or several with spaces in between, see ``config.join_urls``.
        - connect (:obj:`bool`): True: connect now. False: connect on the first use.
        - host (:obj:`HostOptions`): Use, place and size of the host cache.
        - options: The fields of ``options.StreamOptions``, ``options.StoreOptions`` and ``options.RedisOptions``.
    """

    def __init__(
        self,
        url: str,
        run: str = 'default',
        connect: bool = True,
        host: HostOptions = NO_HOST_CACHE,
        **options: Any,
    ) -> None:
        check_name('run', run, slashes=False)
        self._url = url
        self._options = dict(options)
        check_url(url)
        if names_cluster(url) or any(map(has_sentinels, servers_of(url))):
            options = {**FAILOVER_DEFAULTS, **options}
        self._directory = directory = directory_of(url, run)
        streams, redis = stream_options(options), redis_options(options)
        refuse_rest(scheme_of(url), options, ALL_OPTIONS)
        if redis.socket_timeout_s <= streams.check_every_s:
            raise ConfigError(
                f'socket_timeout_s ({redis.socket_timeout_s}) must be above check_every_s ({streams.check_every_s})'
            )

        def open_server(writer: str) -> Server:
            if names_cluster(url):
                return ClusterServer(url, run, writer, redis)
            if names_several(url):
                return ShardedServer(run, [RedisServer(one, None, run, writer, redis) for one in servers_of(url)])
            return RedisServer(url, directory, run, writer, redis)

        super().__init__(run, open_server, streams, host, connect)

    def __reduce__(self) -> Tuple[Callable[..., RedisStore], Tuple[Any, ...]]:
        # The path in an embedded:// URL is relative to the working directory of this process.
        url = self._url if self._directory is None else embedded_url(os.path.dirname(self._directory))
        return _reopened, (url, self.run, self._host_options, self._options)


def open_to_read(url: str, run: str, **options: Any) -> Tuple[RedisStore, Callable[[], List[str]]]:
    """
    Overview:
        Open a store on several servers for a process that only reads. What a server has that cannot be reached is
        missing in it.
    Returns:
        - store (:obj:`RedisStore`): Call its methods inside ``nonblocking``.
        - look (:obj:`Callable`): Looks which servers are away. Returns why they are. Call it before each reading, in
          the same thread.
    Raises:
        - StoreUnavailable: None of the servers can be reached.
    """
    store = RedisStore(url, run, connect=False, **options)
    server = store.client.server
    assert isinstance(server, Router)
    try:
        server.connect_to_read()
    except BaseException:
        store.close()
        raise
    return store, functools.partial(server.look, lambda: MemoryServer(Memory(), run, server.writer))


def _reopened(url: str, run: str, host: HostOptions, options: Dict[str, Any]) -> RedisStore:
    return RedisStore(url, run, connect=False, host=host, **options)
