"""``RedisStore``, a store in a Redis server."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Tuple

from ding_store.errors import ConfigError
from ding_store.storage.options import ALL_OPTIONS, check_name, redis_options, refuse_rest, stream_options
from ding_store.storage.protocol import Server
from ding_store.storage.redis.server import RedisServer
from ding_store.storage.store import ServerStore
from ding_store.storage.urls import check_url, directory_of, embedded_url, scheme_of


class RedisStore(ServerStore):
    """
    Overview:
        A store in the server of a ``redis://``, ``rediss://``, ``unix://`` or ``embedded://`` URL. Pickles as its
        URL and options. A copy made by unpickling or ``fork`` opens its own connections and is a new writer.
    Arguments:
        - connect (:obj:`bool`): True: connect now. False: connect on the first use.
        - options: The fields of ``options.StreamOptions``, ``options.StoreOptions`` and ``options.RedisOptions``.
    """

    server: RedisServer

    def __init__(self, url: str, run: str = 'default', connect: bool = True, **options: Any) -> None:
        check_name('run', run, slashes=False)
        self._url = url
        self._options = dict(options)
        check_url(url)
        self._directory = directory_of(url, run)
        streams, redis = stream_options(options), redis_options(options)
        refuse_rest(scheme_of(url), options, ALL_OPTIONS)
        if redis.socket_timeout_s <= streams.check_every_s:
            raise ConfigError(
                f'socket_timeout_s ({redis.socket_timeout_s}) must be above check_every_s ({streams.check_every_s})'
            )

        def open_server(writer: str) -> Server:
            return RedisServer(url, self._directory, run, writer, redis)

        super().__init__(run, open_server, streams)
        if connect:
            self.server.connect()

    def __reduce__(self) -> Tuple[Callable[..., RedisStore], Tuple[Any, ...]]:
        # The path in an embedded:// URL is relative to the working directory of this process.
        url = self._url if self._directory is None else embedded_url(os.path.dirname(self._directory))
        return _reopened, (url, self.run, self._options)


def _reopened(url: str, run: str, options: Dict[str, Any]) -> RedisStore:
    return RedisStore(url, run, connect=False, **options)
