"""Scripts that are sent without waiting for what the server says to them."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, Callable, List, NamedTuple, Optional

import redis

from ding_store.storage.redis.link import Command, Session

Replies = Callable[[], List[Any]]


class _Sent(NamedTuple):
    replies: Replies
    note: Callable[[List[Any]], None]
    again: Callable[[], None]


class Unanswered:
    """
    Overview:
        What was sent last, and has no reply yet: by the time that the next is sent, its reply has been there for long,
        and reading it costs no wait. Thread-safe.
    Arguments:
        - call (:obj:`Callable`): Runs a command with a ``Session``, again and again while the connection is lost.
    """

    def __init__(self, call: Callable[[str, Callable[[Session], Replies]], Replies]) -> None:
        self._call = call
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
        with self._lock:
            self._settle()
            self._sent = _Sent(self._call(what, lambda session: session.send(commands(session))), note, again)

    def settle(self) -> None:
        """Return when all is done that was sent. Raises what ``again`` does."""
        if self._sent is not None:
            with self._lock:
                self._settle()

    def close(self) -> None:
        """Before the connections are: a server may pass over what comes from one that is closed by then."""
        if self._lock.acquire(blocking=False):
            sent, self._sent = self._sent, None
            self._lock.release()
            if sent is not None:
                with suppress(redis.RedisError):
                    sent.replies()

    def _settle(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        try:
            replies = sent.replies()
        except redis.RedisError:
            sent.again()
        else:
            sent.note(replies)
