"""Scripts that are sent without waiting for what the server says to them."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, Callable, List, NamedTuple, Optional

import redis

from ding_store.errors import StoreUnavailable
from ding_store.storage.redis.link import Link, Session
from ding_store.storage.redis.scripts import Command

Replies = Callable[[], List[Any]]


class _Sent(NamedTuple):
    session: Session
    replies: Optional[Replies]  # None: they were lost
    note: Callable[[List[Any]], None]
    again: Callable[[], None]


class Unanswered:
    """
    Overview:
        What was sent last, and has no reply yet: by the time that the next is sent, its reply has been there for long,
        and reading it costs no wait. Thread-safe.
    Arguments:
        - call (:obj:`Callable`): Runs a command with a ``Session``, again and again while the connection is lost.
        - link (:obj:`Link`): To which the sessions belong.
    """

    def __init__(self, call: Callable[[str, Callable[[Session], Any]], Any], link: Link) -> None:
        self._call = call
        self._link = link
        self._lock = threading.RLock()  # ``again`` is made of calls that settle first
        self._sent: Optional[_Sent] = None

    def send(
        self,
        what: str,
        commands: Callable[[Session], List[Command]],
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
        with self._link.held(self._lock):
            self._settle()
            session, replies = self._call(what, lambda session: (session, session.send(commands(session))))
            self._sent = _Sent(session, replies, note, again)

    def settle(self) -> None:
        """Return when all is done that was sent. Raises what ``again`` does; what was not done is kept."""
        with self._link.held(self._lock):
            self._settle()

    def close(self) -> None:
        """Before the connections are: a server may pass over what comes from one that is closed by then."""
        if self._lock.acquire(blocking=False):
            sent, self._sent = self._sent, None
            self._lock.release()
            if sent is not None and sent.replies is not None:
                with suppress(redis.RedisError):
                    sent.replies()

    def _settle(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        try:
            self._finish(sent)
        except StoreUnavailable:
            self._sent = sent._replace(replies=None)
            raise

    def _finish(self, sent: _Sent) -> None:
        if sent.replies is not None:
            try:
                replies = sent.replies()
            except redis.RedisError as e:
                self._link.lose(sent.session, e)
            else:
                sent.note(replies)
                return
        sent.again()
