"""Sends acks and progress without waiting for their replies, and sends them again if a reply was lost."""

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
    replies: Optional[Replies]  # None: lost
    note: Callable[[List[Any]], None]
    again: Callable[[], None]


class Unanswered:
    """
    Overview:
        Sends scripts, and reads their replies before the next ones are sent. By then the replies have arrived, and
        reading them costs no wait. Thread-safe.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        self._sent: Optional[_Sent] = None
        self._is_closed = False
        self._last: Optional[_Sent] = None  # not yet known to be done at ``finish``
        self._error: Optional[StoreError] = None  # of ``finish``

    def send(
        self,
        what: str,
        commands: Callable[[ServerSession], List[Command]],
        note: Callable[[List[Any]], None],
        again: Callable[[], None],
    ) -> None:
        """
        Overview:
            Read the replies to the last scripts, then send these in one message.
        Arguments:
            - note (:obj:`Callable`): Called with the replies.
            - again (:obj:`Callable`): Sends the same again and waits for the replies, if they were lost or are errors.
              It must do no harm if the scripts have run.
        """
        with self._connection.held(self._lock):
            self._flush()
            session, replies = self._connection.call(what, lambda session: (session, session.send(commands(session))))
            self._sent = _Sent(what, session, replies, note, again)
            if self._is_closed:
                raise StoreClosed(f'{what}: the store was closed during the call')

    def flush(self) -> None:
        """
        Overview:
            Return when the scripts that were sent are done. If their replies are lost or are errors, run ``again``.
        Raises:
            - StoreUnavailable: The next call sends the scripts again.
            - StoreError: Any other error of ``again``. The scripts are dropped, and are not sent again.
        """
        with self._connection.held(self._lock):
            self._flush()

    def finish(self) -> Optional[StoreError]:
        """
        Overview:
            Finish before ``close``, without waiting for a server that is away: a server may ignore commands on a closed
            connection.
        Returns:
            - error (:obj:`Optional[StoreError]`): The error that kept the scripts from finishing, if any.
        """
        self._last = self._sent
        self._error = self._flush_last()
        return None if self._last is None else self._error

    def close(self) -> None:
        """Send the scripts once more if ``finish`` could not, and log what is not done. Call it once."""
        if isinstance(self._error, StoreUnavailable):
            self._error = self._flush_last()
        if self._error is not None and self._last is not None:
            logger.warning('closed before %s was done: %s', self._last.what, self._error)

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
            self._sent = kept  # Set last: a concurrent close() must see what is not done.

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
            raise StoreUnavailable(f'{self._connection.address} is away')  # An ``again`` might start the server.
        sent.again()
