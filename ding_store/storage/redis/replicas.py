"""Reads parts of large payloads from a replica, so that the primary does not send them to each host.

A part never changes under its key. So a replica has it as it is, or does not have it yet. All that decides is still
asked of the primary: which entries and versions there are, and which parts they have.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Any, Callable, List, Optional, Sequence

import redis

from ding_store.storage.encoding.framing import Part
from ding_store.storage.protocol import Moved
from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.parts import read_parts
from ding_store.storage.redis.replies import ReplyKind, meaning_of, text_of
from ding_store.storage.redis.server_checks import make_client, wake
from ding_store.storage.redis.server_session import lent
from ding_store.storage.urls import address_of

logger = logging.getLogger(__name__)

#: Limit of the time to connect to a replica, and of each wait for its bytes. The primary has all of them.
_PATIENCE_S = 1.0
#: How long only the primary is read, after a replica failed or none was found. The pause doubles with each failure.
PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0


class Replicas:
    """
    Overview:
        The replicas of one server, of which this process reads one, chosen at random. Thread-safe.
    Arguments:
        - connection (:obj:`Connection`): The connection to the primary. Names the replicas.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._client: Optional[redis.Redis] = None
        self._address = ''
        self._chosen_in = 0  # session of the primary: after a failover, another server is the replica
        self._not_before = 0.0
        self._pause_s = PAUSE_S  # after the next failure
        self._has_failed = False
        self._has_warned = False
        self._is_closed = False

    def read(
        self, parts: Sequence[Part], moved: Moved, is_right: Callable[[int], bool] = lambda number: True
    ) -> List[int]:
        """
        Overview:
            Read parts into their memory. Return the numbers of those that must be read from the primary. For a
            non-blocking call these are all: it must not connect, nor wait for a replica that does not reply.
        Arguments:
            - is_right (:obj:`Callable`): Called with the number of each part that was read. False: it is damaged.
        """
        left = dict.fromkeys(range(len(parts)))
        client = None if self._connection.is_nonblocking else self._chosen()
        if client is not None:
            try:
                with lent(client) as connection:
                    for number, is_there in enumerate(read_parts(connection, parts, moved)):
                        if is_there and is_right(number):
                            del left[number]
                self._pause_s = PAUSE_S
            except redis.RedisError as e:
                self._put_aside(client, e)
        return list(left)

    def close(self) -> None:
        """Close the connections. Threads that wait for a replica go on with the primary."""
        with self._lock:
            client, self._client, self._is_closed = self._client, None, True
        if client is not None:
            wake(client)

    def _chosen(self) -> Optional[redis.Redis]:
        """Return a client of the replica to read, or None if none is known."""
        with self._lock:
            if self._chosen_in != self._connection.num_sessions:
                self._chosen_in, self._pause_s = self._connection.num_sessions, PAUSE_S
                self._forget(pause_s=0.0)
            if self._client is None and not self._is_closed and time.monotonic() >= self._not_before:
                self._not_before = time.monotonic() + PAUSE_S
                self._choose()
            return self._client

    def _choose(self) -> None:
        try:
            urls = self._connection.find_replicas(self._has_failed)
        except redis.RedisError as e:
            logger.debug('the replicas of %s are not known: %s', self._connection.address, text_of(e))
            return
        self._has_failed = True  # until the next one is found
        if urls:
            url = random.choice(urls)
            self._has_failed, self._address = False, address_of(url)
            self._client = make_client(url, self._greet, _PATIENCE_S)
            logger.info('large payloads are read from the replica %s', self._address)

    def _greet(self, connection: Any) -> None:
        connection.on_connect()
        if self._connection.in_cluster:  # A replica there sends clients to its primary unless they say this.
            connection.send_command('READONLY')
            connection.read_response()

    def _put_aside(self, client: redis.Redis, error: redis.RedisError) -> None:
        """Read only the primary for a while. Warn once if the user can act: the replica denies, or fails again."""
        with self._lock:
            if self._client is not client:
                return  # Another thread put it aside first.
            self._has_failed = True
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._forget(pause_s)
            fix = ''
            if meaning_of(error).answer is ReplyKind.DENIED:
                fix = f'. {meaning_of(error).fix}'
            elif pause_s > PAUSE_S:
                fix = '. Let this host reach its address and port, or set store_options=dict(read_replicas=False)'
            level = logging.WARNING if fix and not self._has_warned else logging.INFO
            self._has_warned = self._has_warned or bool(fix)
        logger.log(level, 'the replica %s is not read for %d s: %s%s', self._address, pause_s, text_of(error), fix)

    def _forget(self, pause_s: float) -> None:
        self._not_before = time.monotonic() + pause_s
        if self._client is not None:
            self._client.connection_pool.disconnect(inuse_connections=False)
        self._client = None
