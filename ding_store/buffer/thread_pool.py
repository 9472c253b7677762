"""A pool of threads of this process, made when it is first wanted."""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Optional


class Threads:
    """
    Overview:
        As ThreadPoolExecutor, also in a forked child, which has none of its parent's threads.
    Arguments:
        - count (:obj:`int`): At most so many.
        - name (:obj:`str`): Of each, before its number.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self.pool: Optional[ThreadPoolExecutor] = None
        self._lock = threading.Lock()
        _all.add(self)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """
        Raises:
            - RuntimeError: There can be no more threads, or the interpreter ends.
        """
        with self._lock:
            if self.pool is None:
                self.pool = ThreadPoolExecutor(self.count, self.name)
            return self.pool.submit(call, *arguments)

    def forget(self) -> None:
        """In a child: its lock may be one that nobody will give back."""
        self.pool, self._lock = None, threading.Lock()


_all: weakref.WeakSet[Threads] = weakref.WeakSet()


def _after_fork() -> None:
    for threads in list(_all):
        threads.forget()


os.register_at_fork(after_in_child=_after_fork)
