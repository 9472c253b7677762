"""The connection to a Redis server. It reconnects when the server is lost, and retries the calls."""

from __future__ import annotations

import functools
import logging
import math
import random
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple, TypeVar
from urllib.parse import quote

import redis

from ding_store.errors import (
    ConfigError,
    ServerFull,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    StoreUnsuitable,
)
from ding_store.storage.options import RedisOptions
from ding_store.storage.protocol import Availability
from ding_store.storage.redis.groups import Group
from ding_store.storage.redis.replies import ReplyKind, code_of, is_unrun, meaning_of, text_of
from ding_store.storage.redis.scripts import load_scripts
from ding_store.storage.redis.sentinels import Sentinels, sentinels_of
from ding_store.storage.redis.server_checks import (
    ServerGeneration,
    check_files,
    is_tls_error,
    make_client,
    speaks_plainly,
    speaks_tls,
    wake,
)
from ding_store.storage.redis.server_session import ServerSession
from ding_store.storage.urls import address_of

logger = logging.getLogger(__name__)

#: The error to raise for a reply that no retry can change.
_ERRORS = {
    ReplyKind.FULL: ServerFull,
    ReplyKind.DENIED: StoreDenied,
    ReplyKind.UNSUITABLE: StoreUnsuitable,
    ReplyKind.SETTING: ConfigError,
    ReplyKind.DEFINITE: StoreError,
}

#: Deadline of the first connection, for a running server and for an embedded one that may have to start first.
_CONNECT_S, _START_S = 10.0, 30.0
#: Limits of the time that one attempt to reconnect has.
_TRY_S, _LONGEST_TRY_S = 2.0, 3600.0
#: Longest pause between two attempts. Sentinels and clusters name another primary within seconds: look more often.
_PAUSE_S, _FINDER_PAUSE_S = 1.0, 0.25

#: Interval in which a thread asks the sentinels whether another server is the primary now. The former one may go on as
#: a primary until they demote it, which takes about 10 s. What is written there meanwhile is lost.
_LOOK_AT_SENTINELS_S = 1.0
#: Interval in which a non-blocking call checks if the server is away, while another thread holds a lock.
_LOOK_EVERY_S = 0.05

T = TypeVar('T')


class Connection(Availability):
    """
    Overview:
        A pool of connections to one server, made when first needed. Thread-safe.
    Arguments:
        - url (:obj:`str`): URL of a server or of its sentinels. Unused if there is a directory.
        - directory (:obj:`Optional[str]`): The directory of the embedded server. None for another server.
        - generation_key (:obj:`str`): See ServerGeneration.
        - group (:obj:`Optional[Group]`): Finds the server, if it is a node of a cluster.
    """

    def __init__(
        self,
        url: str,
        directory: Optional[str],
        options: RedisOptions,
        generation_key: str,
        group: Optional[Group] = None,
    ) -> None:
        self.address = address_of(url) if directory is None else f'embedded://{directory}'
        self.num_sessions = 0
        self._url = url
        self._group = group
        self._finder = group or sentinels_of(url)  # None: the URL is the server's
        self._directory = directory
        self._options = options
        self._generation_key = generation_key
        self.advice = ''  # see ``Server.advice``
        self._last_run_id = ''  # of the session before
        self._lost: Optional[redis.RedisError] = None  # why the session before was lost, if that is not logged yet
        #: Called once after each reconnect, by the next call that may block: the server may have lost its memory.
        self.after_reconnect: Callable[[], None] = lambda: None
        self._num_restored = 0  # value of ``num_sessions`` at the last ``after_reconnect``
        self._scripts = load_scripts()
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # held by the thread that connects, until it has finished
        self._session: Optional[ServerSession] = None
        self._thread = threading.local()
        self._opener: Optional[threading.Thread] = None
        self._server_url = ''  # of the last session
        self._watcher: Optional[threading.Thread] = None
        self._closed = threading.Event() if group is None else group.closed
        self._is_over = False
        #: Code of a transient reply -> since when it comes, and the calls that got it. One warning covers them all.
        self._stuck: Dict[str, Tuple[float, Set[str]]] = {}
        self._away_since = 0.0  # time of the first failure since the last success, 0: no failure
        self._away_error: Optional[redis.RedisError] = None  # the last failure since the last session began
        self._waiting: Dict[int, redis.RedisError] = {}  # thread that retries a call -> its last error

    @property
    def reconnect_timeout_s(self) -> float:
        return self._options.reconnect_timeout_s

    def connect(self) -> str:
        """Connect now, within ``connect_timeout_s``. Return the server's name and version."""
        timeout_s = self._options.connect_timeout_s
        if timeout_s is None:
            timeout_s = _CONNECT_S if self._directory is None else _START_S
        return self._call('connect', lambda session: session.generation.server, timeout_s)

    def reach(self, what: str, patience_s: float) -> None:
        """See ``Availability.reach``. The limit is ``reconnect_timeout_s``. This does not call ``after_reconnect``."""
        self._call(what, lambda session: None, min(patience_s, self.reconnect_timeout_s))

    @property
    def in_cluster(self) -> bool:
        return self._group is not None

    def find_replicas(self, again: bool) -> List[str]:
        """
        Overview:
            Return the URLs of the server's replicas that may be read. None if the URL names the server itself.
        Arguments:
            - again (:obj:`bool`): The last reply to this was of no use.
        Raises:
            - redis.RedisError: They are not known now.
        """
        return self._finder.find_replicas(again) if self._finder and self._options.read_replicas else []

    def has_hung(self, error: StoreError) -> bool:
        return isinstance(error.__cause__, redis.TimeoutError)

    def call(self, what: str, command: Callable[[ServerSession], T]) -> T:
        """
        Overview:
            Run ``command``, and retry it while the connection is lost. Running it twice must do no harm. After a
            reconnect, call ``after_reconnect``.
        Raises:
            - StoreUnavailable: Not connected within ``reconnect_timeout_s``. A non-blocking call raises it at once.
        """
        result = self._call(what, command)
        if self._num_restored != self.num_sessions and not self.is_nonblocking:
            self._num_restored = self.num_sessions  # First, because ``after_reconnect`` ends up here again.
            self.after_reconnect()
        return result

    def _call(self, what: str, command: Callable[[ServerSession], T], patience_s: Optional[float] = None) -> T:
        try:
            return self._retried(what, command, self.reconnect_timeout_s if patience_s is None else patience_s)
        finally:
            if self._waiting:
                self._waiting.pop(threading.get_ident(), None)

    def _retried(self, what: str, command: Callable[[ServerSession], T], patience_s: float) -> T:
        began = self._wait_began()
        deadline, delay_s, is_lost = 0.0, 0.02, False
        while True:
            session, tried_at = self._session, time.monotonic()
            try:
                session = session or self._open(deadline or self._deadline(max(began, self._away_since), patience_s))
                self._check_open()
                result = command(session)
                self._note_success(what)
                return result
            except redis.RedisError as e:
                answer = meaning_of(e).answer
                if not answer.is_transient:
                    refusal = self._refused(what, e)
                    refusal.was_lost, refusal.has_no_effect = is_lost, not is_lost and is_unrun(e)
                    raise refusal from e
                if answer is ReplyKind.RECONNECT:
                    if session is None:
                        self._log_loss(is_harmless=False)  # The server did not reply at once.
                    self._drop(session, e)
                    is_lost = True
                    # A server that hangs was away since the request. A blocking wait shows no such thing.
                    since = self._note_away(tried_at if isinstance(e, redis.TimeoutError) else time.monotonic(), e)
                else:
                    since = self._note_stuck(what, e)
                error = e
            if self.is_nonblocking:
                raise self._away(what, error) from error
            self._waiting[threading.get_ident()] = error
            deadline = deadline or self._deadline(max(began, since), patience_s)
            if time.monotonic() >= deadline:
                raise self._unavailable(what, error) from error
            # Spread the attempts: all processes of a run lose their server at the same moment.
            self._closed.wait(min(delay_s, max(0.0, deadline - time.monotonic())) * random.uniform(0.5, 1.0))
            delay_s = min(_PAUSE_S if self._finder is None else _FINDER_PAUSE_S, delay_s * 2)

    def _wait_began(self) -> float:
        """Return when the wait began that this thread's calls share, or the current time if they share none."""
        return getattr(self._thread, 'wait_began', None) or time.monotonic()

    @contextmanager
    def one_wait(self) -> Iterator[None]:
        """Make all calls and lock waits of this thread share one deadline while the server is away."""
        was, self._thread.wait_began = getattr(self._thread, 'wait_began', None), self._wait_began()
        try:
            yield
        finally:
            self._thread.wait_began = was

    def _deadline(self, since: float, patience_s: float) -> float:
        """Return the deadline of a wait that began at ``since``. The deadline of ``leaving`` may be earlier."""
        return min(since + patience_s, self._leave_deadline())

    def _leave_deadline(self) -> float:
        """Return the deadline of ``leaving`` in this thread. Its time begins with the first wait."""
        if not self._is_leaving:
            return math.inf
        self._thread.leave_deadline = (
            getattr(self._thread, 'leave_deadline', None) or time.monotonic() + self._thread.leave_limit_s
        )
        return float(self._thread.leave_deadline)

    @contextmanager
    def leaving(self, limit_s: float) -> Iterator[None]:
        """See ``Availability.leaving``."""
        self._thread.leave_limit_s, self._thread.leave_deadline = limit_s, None
        try:
            yield
        finally:
            self._thread.leave_limit_s = None

    def wait(self, what: str, command: Callable[[ServerSession], T]) -> Optional[T]:
        """Run a blocking command. Return None after a reconnect: the caller must read the state again."""
        tried: Optional[ServerSession] = None

        def once(session: ServerSession) -> Optional[T]:
            nonlocal tried
            tried = tried or session
            return command(session) if session is tried else None

        return self._call(what, once)

    def is_away(self) -> bool:
        """True if the connection was lost, or could not be made at first. A call would now wait for the server."""
        session = self._session
        if session is not None and session.is_hung_up():
            self._drop(session, redis.ConnectionError('the server closed the connection'))
        return self._session is None and self._has_tried

    @property
    def _has_tried(self) -> bool:
        """True once a call has connected, or has failed to."""
        return self.num_sessions > 0 or self._away_since > 0

    def _why_away(self) -> redis.RedisError:
        error = self._away_error
        return redis.ConnectionError('the connection was lost' if error is None else text_of(error))

    @contextmanager
    def nonblocking(self) -> Iterator[None]:
        """See ``Store.nonblocking``."""
        was_nonblocking, self._thread.is_nonblocking = self.is_nonblocking, True
        try:
            yield
        finally:
            self._thread.is_nonblocking = was_nonblocking

    @property
    def is_nonblocking(self) -> bool:
        return getattr(self._thread, 'is_nonblocking', False)

    @property
    def _is_leaving(self) -> bool:
        return getattr(self._thread, 'leave_limit_s', None) is not None

    @contextmanager
    def held(self, lock: Any) -> Iterator[None]:
        """
        Hold a lock whose holder may be waiting for the server. A non-blocking call raises StoreUnavailable instead of
        waiting with it. Within ``leaving``, the wait ends when the deadline of ``leaving`` has passed.
        """
        with self.one_wait():
            while not lock.acquire(timeout=_LOOK_EVERY_S if self.is_nonblocking or self._is_leaving else -1):
                error = next(iter(list(self._waiting.values())), None)
                if error is None and self.is_away():
                    error = redis.ConnectionError('the connection was lost')
                if error is not None and (self.is_nonblocking or time.monotonic() >= self._leave_deadline()):
                    raise self._away('wait for a lock', error) from error
            try:
                yield
            finally:
                lock.release()

    def lose(self, session: ServerSession, error: redis.RedisError) -> None:
        """
        Overview:
            Handle the error of a reply that was read outside ``call``. Unless this raises, the caller may
            send the request again.
        """
        if meaning_of(error).answer is ReplyKind.RECONNECT:
            self._drop(session, error)
            if self.is_nonblocking and self._session is None:
                raise self._away('read a reply', error) from error

    def close(self) -> None:
        """Close all connections. Threads that wait for a reply wake up and raise StoreClosed."""
        self._closed.set()
        session = self._session
        if session is not None:
            wake(session.client)
            session.close()
        if isinstance(self._finder, Sentinels):
            self._finder.close()

    def end(self) -> None:
        """Never reconnect from now on: the run is over, and its server stops after its last client has left."""
        self._is_over = True

    def _check_open(self, cause: Optional[BaseException] = None) -> None:
        if self._closed.is_set():
            raise StoreClosed(f'the store at {self.address} was closed') from cause

    def _open(self, until: float) -> ServerSession:
        self._check_open()
        if self._is_over:
            raise StoreClosed(f'cannot connect to {self.address}: the run was retired. Open a new store.')
        if self.is_nonblocking and self._has_tried:
            self._open_beside()
            raise self._why_away()
        with self._turn_to_open(until):
            session = self._session
            if session is None:
                if self.num_sessions == 0:
                    check_files(self._url)
                url, num_ends = self._target(until)
                make = functools.partial(self._make_session, url, num_ends, until)
                session = make() if self._group is None else self._group.session_at(url, make)
                self._note_session(session.generation)
                self._server_url = url
                self._session = session
                if self._closed.is_set():
                    session.close()  # close() may have run before this session was set
                    self._check_open()
                self._watch_sentinels()
            return session

    def _make_session(self, url: str, num_ends: int, until: float) -> ServerSession:
        in_key, in_cluster = self._options.server_generation == 'key', self._group is not None
        generation = ServerGeneration(self.address, num_ends, self._generation_key, in_key, in_cluster)
        client = make_client(url, lambda one: self._greet(generation, one, until), self._options.socket_timeout_s)
        client.info('server')
        return ServerSession(client, self._scripts, generation)

    def _watch_sentinels(self) -> None:
        """Start the thread that notices when the sentinels name another primary."""
        if self._watcher is None and isinstance(self._finder, Sentinels):
            arguments = weakref.ref(self), self._finder, self._closed
            self._watcher = threading.Thread(target=_watch, args=arguments, name='ding_store-sentinels', daemon=True)
            self._watcher.start()

    def follow(self, primary_url: str) -> None:
        """Leave the server of the present session if it is not this one. Calls that run there are made again."""
        session = self._session
        if session is not None and primary_url != self._server_url and not self._is_over:
            self._drop(session, redis.ConnectionError(f'the sentinels name another primary: {address_of(primary_url)}'))
            wake(session.client)

    @contextmanager
    def _turn_to_open(self, until: float) -> Iterator[None]:
        """Let one thread connect at a time. The others wait for its result until ``until``."""
        while not self._opening.acquire(timeout=min(_LOOK_EVERY_S, max(0.0, until - time.monotonic()))):
            self._check_open()
            if time.monotonic() >= until:
                raise redis.ConnectionError('another thread did not connect in time')
        try:
            self._check_open()
            yield
        finally:
            self._opening.release()

    def _greet(self, generation: ServerGeneration, connection: Any, until: float) -> None:
        """Prepare a new connection, within the time left. Connecting may take long with TLS or on a slow network."""
        timeout_s, left_s = self._options.socket_timeout_s, _left_s(until)
        # ``until`` limits only a session's first connection. A later one serves a call that waits for its own reply.
        is_short = left_s < timeout_s and self.num_sessions > 0 and not generation.run_id
        if is_short:
            connection._sock.settimeout(left_s)
        generation.greet(connection)
        if is_short:
            connection._sock.settimeout(timeout_s)
        if self._closed.is_set():
            connection.disconnect()  # close() did not wake this connection, which would block
            self._check_open()

    def _open_beside(self) -> None:
        """Reconnect in a thread in the background: non-blocking calls do not connect themselves."""
        with self._lock:
            if self._opener is None or not self._opener.is_alive():
                self._opener = threading.Thread(target=self._try_to_open, name='ding_store-reconnect', daemon=True)
                self._opener.start()

    def _try_to_open(self) -> None:
        with suppress(StoreError):  # The next call gets the error, and starts this again.
            self._call('reconnect', lambda session: None)

    def _target(self, until: float) -> Tuple[str, int]:
        """Return the server's URL, and how often its data was put aside."""
        if self._finder is not None:
            return self._finder.find_primary(), 0
        if self._directory is None:
            return self._url, 0
        from ding_store.storage.embedded.private_server import (  # Only embedded servers need this import.
            ensure_server,
            num_ends,
        )

        socket = ensure_server(self._directory, self._options.grace_s, _left_s(until))
        return f'unix://{quote(socket)}', num_ends(self._directory)

    def _drop(self, session: Optional[ServerSession], error: redis.RedisError) -> None:
        self._check_open(error)
        if session is None:
            return
        with self._lock:
            if self._session is not session:
                return  # Another thread dropped it first.
            self._session = None
            self._lost = error
        if self._group is None or code_of(error) != 'MOVED':  # Other groups stay at the node that one has left.
            session.close()

    def _note_session(self, generation: ServerGeneration) -> None:
        """Count a new session, and log what is worth knowing about its server."""
        self._log_loss(generation.run_id == self._last_run_id)
        self._last_run_id = generation.run_id
        self.num_sessions += 1
        self._away_error = None
        if generation.advice and not self.advice:
            self.advice = generation.advice
            if self._group is None or self._group.is_news(self.advice):
                logger.warning('%s', self.advice)

    def _log_loss(self, is_harmless: bool) -> None:
        """Log why the connection was lost. Services close idle ones, which is harmless while the server is the same."""
        error, self._lost = self._lost, None
        if error is not None:
            has_moved = code_of(error) == 'MOVED'
            level = logging.INFO if is_harmless or has_moved or self._is_over else logging.WARNING
            logger.log(level, 'lost the connection to %s: %s', self.address, text_of(error))

    def _note_success(self, what: str) -> None:
        self._away_since = 0.0
        if self._stuck:
            for code in [code for code, (_, calls) in list(self._stuck.items()) if what in calls]:
                self._stuck.pop(code, None)

    def _note_away(self, since: float, error: redis.RedisError) -> float:
        """Note that the server is away. Return since when it is."""
        self._away_error = error
        self._away_since = since = self._away_since or since
        return since

    def _note_stuck(self, what: str, error: redis.RedisError) -> float:
        """Note a transient reply, and warn once. Return since when this reply comes."""
        since, calls = self._stuck.setdefault(code_of(error), (time.monotonic(), set()))
        if not calls:
            logger.warning('the call waits: %s', self._explained(what, error))
        calls.add(what)
        return since

    def _explained(self, what: str, error: redis.RedisError) -> str:
        meaning = meaning_of(error)
        return f'{what}: {self.address} {meaning.says}. {meaning.fix}. Cause: {text_of(error)}'

    def _refused(self, what: str, error: redis.RedisError) -> StoreError:
        return _ERRORS[meaning_of(error).answer](self._explained(what, error))

    def _away(self, what: str, error: redis.RedisError) -> StoreUnavailable:
        if meaning_of(error).answer is ReplyKind.RETRY:
            return StoreUnavailable(self._explained(what, error))
        return StoreUnavailable(f'{what}: {self.address} is away: {error}')

    def _unavailable(self, what: str, error: redis.RedisError) -> StoreUnavailable:
        if code_of(error):
            return StoreUnavailable(self._explained(what, error))
        if is_tls_error(error):
            return StoreDenied(f'{what}: {self.address}: TLS failed: {error}')
        url = self._url if self._finder is None else self._finder.server_url
        if url.startswith('rediss:') and speaks_plainly(url):
            return StoreDenied(
                f'{what}: {self.address} does not speak TLS. Use redis:// in the URL, or set its tls-port.'
            )
        if url.startswith('redis:') and self.num_sessions == 0 and speaks_tls(url):
            return StoreDenied(f'{what}: {self.address} speaks TLS. Use rediss://, see docs/howto/security.md.')
        if self._finder is not None:
            return StoreUnavailable(f'{what}: {self._finder.explain_away()}. Cause: {error}')
        if self._directory is None:
            return StoreUnavailable(self._explained(what, error))
        return StoreUnavailable(
            f'{what}: {self.address} cannot be reached: {error}. Look for the reason in {self._directory}.'
        )


def _watch(connection: weakref.ref[Connection], sentinels: Sentinels, closed: threading.Event) -> None:
    """Follow the primary that the sentinels name, until the connection is closed or no longer used."""
    while not closed.wait(_LOOK_AT_SENTINELS_S * random.uniform(0.5, 1.0)):
        with suppress(redis.RedisError, StoreError):
            if not _follow(connection(), sentinels.find_primary()):
                return


def _follow(connection: Optional[Connection], primary_url: str) -> bool:
    """Return False if the connection is no longer used."""
    if connection is not None:
        connection.follow(primary_url)
    return connection is not None


def _left_s(until: float) -> float:
    return min(max(_TRY_S, until - time.monotonic()), _LONGEST_TRY_S)
