"""Acks whose replies are read later: who reads on need not wait for each."""

from __future__ import annotations

import logging
import threading
from typing import Any, Callable, Iterator, NamedTuple, Optional

import redis

from .link import Session

logger = logging.getLogger(__name__)

Send = Callable[[Session], Iterator[Any]]


class _Sent(NamedTuple):
    session: Session
    reply: Iterator[Any]
    send: Send


class RedisAcks:
    """
    Overview:
        Thread-safe. Of at most one ack the reply is not known. If that does not come, since the connection is lost,
        ``settle`` acks again: else a stream might stay full for want of an ack.
    Arguments:
        - call (:obj:`Callable`): Runs a command with a ``Session``, again and again while the connection is lost.
    """

    def __init__(self, call: Callable[[str, Callable[[Session], Any]], Any]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._sent: Optional[_Sent] = None

    def send(self, send: Send) -> None:
        """An ack: ``send(session)`` returns what waits for the reply."""

        def command(session: Session) -> None:
            self._sent = _Sent(session, send(session), send)

        with self._lock:
            self._settle()
            self._call('ack', command)

    def settle(self) -> None:
        """Wait for the reply to the last one."""
        if self._sent is not None:
            with self._lock:
                self._settle()

    def close(self) -> None:
        """Wait for the reply to the last one, but do not ack again: what is not acked is the next reader's."""
        if self._lock.acquire(blocking=False):  # else another thread is about to settle it
            try:
                if self._sent is not None:
                    next(self._sent.reply, None)
            except (redis.RedisError, OSError) as e:
                logger.info('closed, and the last ack may be lost: %s', e)
            finally:
                self._lock.release()

    def _settle(self) -> None:
        sent = self._sent
        if sent is not None:
            # None: of a reply that was an error, and raised.
            self._call('ack', lambda now: next(sent.reply if now is sent.session else sent.send(now), None))
            self._sent = None
