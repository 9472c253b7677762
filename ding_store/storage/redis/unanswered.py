"""Scripts that are sent without waiting for what the server says to them."""

from __future__ import annotations

import logging
import threading
from typing import Any, Callable, List, NamedTuple, Optional

import redis

from ding_store.errors import StoreClosed, StoreError, StoreUnavailable
from ding_store.storage.redis.connection import Connection
from ding_store.storage.redis.scripts import Command
from ding_store.storage.redis.server_session import ServerSession

logger = logging.getLogger(__name__)

Replies = Callable[[], List[Any]]


class _Sent(NamedTuple):
    what: str
    session: ServerSession
    replies: Optional[Replies]  # None: they were lost
    note: Callable[[List[Any]], None]
    again: Callable[[], None]


class Unanswered:
    """
    Overview:
        What was sent last, and has no reply yet: by the time that the next is sent, its reply has been there for long,
        and reading it costs no wait. Thread-safe.
    Arguments:
        - call (:obj:`Callable`): Runs a command with a ``ServerSession``, again and again while the connection is lost.
        - link (:obj:`Connection`): To which the sessions belong.
    """

    def __init__(self, call: Callable[[str, Callable[[ServerSession], Any]], Any], connection: Connection) -> None:
        self._call = call
        self._connection = connection
        self._lock = threading.RLock()
        self._sent: Optional[_Sent] = None
        self._is_closed = False

    def send(
        self,
        what: str,
        commands: Callable[[ServerSession], List[Command]],
        note: Callable[[List[Any]], None],
        again: Callable[[], None],
    ) -> None:
        """
        Overview:
            Send some scripts as one, after the last ones are done.
        Arguments:
            - note (:obj:`Callable`): Called with their replies.
            - again (:obj:`Callable`): Does the same in calls that wait, when the replies were lost, or are errors: it
              must bear that it was done already.
        """
        with self._connection.held(self._lock):
            self._flush()
            session, replies = self._call(what, lambda session: (session, session.send(commands(session))))
            self._sent = _Sent(what, session, replies, note, again)
            if self._is_closed:
                raise StoreClosed(f'{what}: the store was closed meanwhile')

    def flush(self) -> None:
        """Return when all is done that was sent. Raises what ``again`` does; what was not done is kept."""
        with self._connection.held(self._lock):
            self._flush()

    def close(self, bring: Callable[[Optional[StoreError]], None]) -> None:
        """
        Overview:
            Settle before the connections are closed: a server may pass over what comes from one that is closed by then,
            and nobody else says it again. Waits for none that is away.
        Arguments:
            - bring (:obj:`Callable`): Called with why that is not done, if it is not: may look for the server, which
              is then told once more.
        """
        sent, error = self._sent, self._flush_last()
        bring(None if sent is None else error)
        if isinstance(error, StoreUnavailable):
            error = self._flush_last()
        if error is not None and sent is not None:
            logger.warning('closed before %s was done: %s', sent.what, error)

    def _flush_last(self) -> Optional[StoreError]:
        try:
            with self._connection.nonblocking(), self._connection.held(self._lock):
                self._is_closed = True
                self._flush()
        except StoreError as e:
            self._is_closed = True
            return e
        return None

    def _flush(self) -> None:
        sent, kept = self._sent, None
        if sent is None:
            return
        try:
            self._finish(sent)
        except StoreUnavailable:
            kept = sent._replace(replies=None)
            raise
        finally:
            self._sent = kept  # Not before: who closes meanwhile sees that it is not done.

    def _finish(self, sent: _Sent) -> None:
        if sent.replies is not None:
            try:
                replies = sent.replies()
            except redis.RedisError as e:
                self._connection.lose(sent.session, e)
            else:
                sent.note(replies)
                return
        if self._is_closed and self._connection.is_away():
            raise StoreUnavailable(f'{self._connection.address} is away')  # to ask it might bring it back
        sent.again()
