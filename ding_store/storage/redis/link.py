"""The connection to a Redis server: kept, and made again when it is lost."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from contextlib import contextmanager, suppress
from typing import Any, Callable, Dict, Iterator, Optional, Set, Tuple, TypeVar
from urllib.parse import quote

import redis

from ding_store.errors import ServerFull, StoreClosed, StoreDenied, StoreError, StoreUnavailable
from ding_store.storage.options import RedisOptions
from ding_store.storage.redis.scripts import load_scripts
from ding_store.storage.redis.server import (
    Life,
    check_files,
    is_tls_error,
    make_client,
    speaks_plainly,
    speaks_tls,
    wake,
)
from ding_store.storage.redis.session import Session
from ding_store.storage.urls import address_of

logger = logging.getLogger(__name__)

_DENIED = (
    redis.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.AuthenticationWrongNumberOfArgsError,
    redis.exceptions.NoPermissionError,
)
# Redis 6.2 for commands and keys; Redis 7.
_DENIED_IN_SCRIPTS = ("The user executing the script can't", 'ACL failure in script')
_LOST = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ReadOnlyError)

#: In what a server says that cannot write to its disk: it refuses all writes until it can, and keeps what it has.
_STUCK = 'MISCONF'

#: So often who is hasty looks whether the server is away, while another thread holds a lock.
_LOOK_EVERY_S = 0.05

T = TypeVar('T')


class Link:
    """
    Overview:
        Thread-safe; connections are pooled, and made when first needed. ``num_sessions`` were begun so far: when it
        grows, the server was away, and may have lost its memory.
    Arguments:
        - url (:obj:`str`): ``redis://``, ``rediss://`` or ``unix://``; unused with a directory.
        - directory (:obj:`Optional[str]`): Of the embedded server, if it is one.
    """

    def __init__(self, url: str, directory: Optional[str], options: RedisOptions) -> None:
        self.address = address_of(url) if directory is None else f'embedded://{directory}'
        self.num_sessions = 0
        self._url = url
        self._directory = directory
        self._options = options
        self._scripts = load_scripts()
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # held for as long as that takes
        self._session: Optional[Session] = None
        self._haste = threading.local()
        self._opener: Optional[threading.Thread] = None
        self._closed = threading.Event()
        self._is_over = False
        self._stuck: Set[str] = set()  # calls that were refused since the server cannot write: a warning for each time
        self._waiting: Dict[int, redis.RedisError] = {}  # threads that try a call again and again -> why

    @property
    def reconnect_timeout_s(self) -> float:
        return self._options.reconnect_timeout_s

    def connect(self) -> str:
        """Connect now or say what is wrong, before long; returns the server's name and version."""
        return self.call('connect', lambda session: session.life.server, self._options.connect_timeout_s)

    def call(self, what: str, command: Callable[[Session], T], patience_s: Optional[float] = None) -> T:
        """
        Overview:
            Run ``command``, again and again while the connection is lost: it must bear being run twice.
        Raises:
            - StoreUnavailable: Not connected within ``patience_s``, by default the options' ``reconnect_timeout_s``; at
              once for who is hasty.
        """
        try:
            return self._call(what, command, self._options.reconnect_timeout_s if patience_s is None else patience_s)
        finally:
            if self._waiting:
                self._waiting.pop(threading.get_ident(), None)

    def _call(self, what: str, command: Callable[[Session], T], patience_s: float) -> T:
        deadline, delay_s = 0.0, 0.02
        while True:
            session = self._session
            try:
                session = session or self._open()
                self._check_open()
                result = command(session)
                if what in self._stuck:
                    self._stuck.clear()
                return result
            except _DENIED as e:
                raise StoreDenied(
                    f'{what}: {self.address} refuses us: {e}; check user and password in '
                    'its URL: --store, or DING_STORE_URL in the environment'
                ) from e
            except _LOST as e:
                self._drop(session, e)
                error: redis.RedisError = e
            except redis.RedisError as e:
                if _STUCK not in str(e):
                    raise self._translated(what, e) from e
                self._note_stuck(what, e)
                error = e
            if self.is_hasty:
                raise self._away(what, error) from error
            self._waiting[threading.get_ident()] = error
            deadline = deadline or self._deadline(patience_s)
            if time.monotonic() >= deadline:
                raise self._unavailable(what, error) from error
            # Spread out: all processes of a run lose their server at the same moment.
            self._closed.wait(min(delay_s, max(0.0, deadline - time.monotonic())) * random.uniform(0.5, 1.0))
            delay_s = min(1.0, delay_s * 2)

    def _deadline(self, patience_s: float) -> float:
        """Of a wait that begins now."""
        return min(time.monotonic() + patience_s, self._left_at())

    def _left_at(self) -> float:
        """When who leaves waits no more, whatever for: his time begins with the first wait."""
        if not self._is_leaving:
            return math.inf
        self._haste.until = getattr(self._haste, 'until', None) or time.monotonic() + self._haste.most_s
        return float(self._haste.until)

    @contextmanager
    def leaving(self, most_s: float) -> Iterator[None]:
        """See ``PlanedStore.leaving``."""
        self._haste.most_s, self._haste.until = most_s, None
        try:
            yield
        finally:
            self._haste.most_s = None

    def wait(self, what: str, command: Callable[[Session], T]) -> Optional[T]:
        """Run a command that blocks for news. None when it had to reconnect: look first what else is new."""
        is_tried = False

        def once(session: Session) -> Optional[T]:
            nonlocal is_tried
            was_tried, is_tried = is_tried, True
            return None if was_tried else command(session)

        return self.call(what, once)

    def is_away(self) -> bool:
        """Whether a connection was lost, and none was made since: calls wait now, or make one."""
        session = self._session
        if session is not None and session.is_hung_up():
            self._drop(session, redis.ConnectionError('the server closed the connection'))
        return self._session is None and self.num_sessions > 0

    @contextmanager
    def hasty(self) -> Iterator[None]:
        """See ``Store.hasty``."""
        was_hasty, self._haste.is_on = self.is_hasty, True
        try:
            yield
        finally:
            self._haste.is_on = was_hasty

    @property
    def is_hasty(self) -> bool:
        return getattr(self._haste, 'is_on', False)

    @property
    def _is_leaving(self) -> bool:
        return getattr(self._haste, 'most_s', None) is not None

    @contextmanager
    def held(self, lock: Any) -> Iterator[None]:
        """
        A lock that others may hold while they wait for the server: who is hasty does not wait with them, and who leaves
        no longer than for the server itself.
        """
        while not lock.acquire(timeout=_LOOK_EVERY_S if self.is_hasty or self._is_leaving else -1):
            error = next(iter(list(self._waiting.values())), None)
            if error is None and self.is_away():
                error = redis.ConnectionError('the connection was lost')
            if error is not None and (self.is_hasty or time.monotonic() >= self._left_at()):
                raise self._away('another thread waits for it', error) from error
        try:
            yield
        finally:
            lock.release()

    def lose(self, session: Session, error: redis.RedisError) -> None:
        """
        Overview:
            A reply was not read through ``call``: what it would do about that error. Who need not wait may ask again.
        """
        if isinstance(error, _LOST):
            self._drop(session, error)
            if self.is_hasty and self._session is None:
                raise self._away('a reply', error) from error

    def close(self) -> None:
        """Wakes the threads that wait for a reply; they raise StoreClosed."""
        self._closed.set()
        session = self._session
        if session is not None:
            wake(session.client)
            session.close()

    def end(self) -> None:
        """The server goes when its members have gone: it is not missed then, and nothing here brings it back."""
        self._is_over = True

    def _check_open(self, cause: Optional[BaseException] = None) -> None:
        if self._closed.is_set():
            raise StoreClosed(f'the store at {self.address} was closed') from cause

    def _open(self) -> Session:
        self._check_open()
        if self._is_over:
            raise StoreClosed(f'the run at {self.address} was retired, and is not connected to again')
        if self.is_hasty and self.num_sessions > 0:
            self._open_beside()
            raise redis.ConnectionError('the connection was lost')
        with self._opening:
            session = self._session
            if session is None:
                self._check_open()  # it was another thread's turn for long, perhaps
                url, num_ends = self._target()
                if self.num_sessions == 0:
                    check_files(url)
                life = Life(self.address, num_ends)
                client = make_client(url, lambda one: self._greet(life, one), self._options.socket_timeout_s)
                client.info('server')
                self.num_sessions += 1
                session = self._session = Session(client, self._scripts, life)
                if self._closed.is_set():
                    session.close()  # close() may have been before it
                    self._check_open()
            return session

    def _greet(self, life: Life, connection: Any) -> None:
        """A new connection, which may have taken its time: with TLS, or on a slow line."""
        life.greet(connection)
        if self._closed.is_set():
            connection.disconnect()  # close() woke only those that had one by then: this one would block
            self._check_open()

    def _open_beside(self) -> None:
        """In a thread of its own: where all are hasty, nobody else would."""
        with self._lock:
            if self._opener is None or not self._opener.is_alive():
                self._opener = threading.Thread(target=self._try_to_open, name='ding_store-reconnect', daemon=True)
                self._opener.start()

    def _try_to_open(self) -> None:
        with suppress(StoreError):  # who asks next finds out, and begins this again
            self.call('reconnect', lambda session: None)

    def _target(self) -> Tuple[str, int]:
        """Where the server is, and how often its data was put aside."""
        if self._directory is None:
            return self._url, 0
        from ding_store.storage.embedded.server import ensure_server, num_ends  # Not needed for one that others run.

        socket = ensure_server(self._directory, self._options.grace_s)
        return f'unix://{quote(socket)}', num_ends(self._directory)

    def _drop(self, session: Optional[Session], error: Exception) -> None:
        self._check_open(error)
        if session is None:
            return
        with self._lock:
            if self._session is not session:
                return  # Another thread noticed first.
            self._session = None
        level = logging.INFO if self._is_over else logging.WARNING
        logger.log(level, 'lost the connection to %s: %s', self.address, error)
        session.close()

    def _note_stuck(self, what: str, error: Exception) -> None:
        if not self._stuck:
            logger.warning('%s cannot write: %s; make room on its disk: it is waited for', self.address, _stuck(error))
        self._stuck.add(what)

    def _away(self, what: str, error: Exception) -> StoreUnavailable:
        if _STUCK in str(error):
            return StoreUnavailable(f'{what}: {self.address} cannot write: {_stuck(error)}')
        return StoreUnavailable(f'{what}: {self.address} is away: {error}')

    def _unavailable(self, what: str, error: Exception) -> StoreUnavailable:
        if _STUCK in str(error):
            return StoreUnavailable(f'{what}: {self.address} cannot write: {_stuck(error)}; make room on its disk')
        if is_tls_error(error):
            return StoreDenied(f'{what}: {self.address}: TLS failed: {error}')
        if self._url.startswith('rediss:') and speaks_plainly(self._url):
            return StoreDenied(f'{what}: {self.address} does not speak TLS: say redis://, or give it a tls-port')
        if self._url.startswith('redis:') and self.num_sessions == 0 and speaks_tls(self._url):
            return StoreDenied(f'{what}: {self.address} speaks TLS: say rediss://, and see docs/deploy.md')
        fix = 'start a redis-server there, or use embedded://'
        if self._directory is not None:
            fix = f'look for the reason in {self._directory}'
        return StoreUnavailable(f'{what}: {self.address} cannot be reached: {error}; {fix}')

    def _translated(self, what: str, error: redis.RedisError) -> StoreError:
        # No class: before Redis 7 errors inside a script have none, and before redis-py 5 this one never has.
        if 'command not allowed when used memory' in str(error):
            return ServerFull(f'{what}: {self.address} is at its maxmemory: raise it, or lower max_pending_bytes')
        if any(text in str(error) for text in _DENIED_IN_SCRIPTS):
            return StoreDenied(
                f'{what}: {self.address} refuses us: {error}; the user needs more rights: docs/deploy.md'
            )
        return StoreError(f'{what}: {self.address}: {error}')


def _stuck(error: Exception) -> str:
    """What the server says, without what a script puts around it."""
    return str(error)[str(error).index(_STUCK) :]
