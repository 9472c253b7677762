"""A pool of threads that starts at its first use and also works after a fork."""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Optional


class Threads:
    """
    Overview:
        A ThreadPoolExecutor that also works in a forked child, which has none of its parent's threads.
    Arguments:
        - count (:obj:`int`): The maximum number of threads.
        - name (:obj:`str`): The prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self.pool: Optional[ThreadPoolExecutor] = None
        self._lock = threading.Lock()
        _all.add(self)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """
        Raises:
            - RuntimeError: No thread can be started, or the interpreter is shutting down.
        """
        with self._lock:
            if self.pool is None:
                self.pool = ThreadPoolExecutor(self.count, self.name)
            return self.pool.submit(call, *arguments)

    def forget(self) -> None:
        """Reset the pool in a forked child, where a thread that no longer exists may hold the lock."""
        self.pool, self._lock = None, threading.Lock()


_all: weakref.WeakSet[Threads] = weakref.WeakSet()


def _after_fork() -> None:
    for threads in list(_all):
        threads.forget()


os.register_at_fork(after_in_child=_after_fork)
