"""
Forks of a process whose threads use buffers.

A forked process has one thread, the one that forked. A lock that another thread held would stay locked there for ever,
and what that thread was changing would stay half changed. So a fork waits until no thread changes a buffer: it holds
all locks of buffers until it is done.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
import weakref
from typing import Any, Dict, List, Protocol, Set, TypeVar

Lock = TypeVar('Lock')

#: So long a fork waits. The locks that are still held then are new ones in the child, and what they guard is refused.
_WAIT_S = 10.0


class Forked(Protocol):
    """Is told of forks; the locks that it uses are held meanwhile."""

    def before_fork(self) -> None:
        """In the process that forks."""

    def after_fork(self, missed: Set[int]) -> None:
        """In the child. ``missed`` are ids of locks that another thread held for too long."""


# By number, so that they come in the order in which they were made.
_locks: Dict[int, weakref.ref[Any]] = {}
_told: Dict[int, weakref.ref[Any]] = {}
_numbers = itertools.count()
_held: List[Any] = []
_missed: List[Any] = []


def hold_over_forks(lock: Lock) -> Lock:
    """Have forks wait for this lock, which is returned."""
    _keep(_locks, lock)
    return lock


def tell_of_forks(forked: Forked) -> None:
    """Tell an object of forks for as long as it lives."""
    _keep(_told, forked)


def _keep(known: Dict[int, weakref.ref[Any]], kept: Any) -> None:
    number = next(_numbers)
    # No function of Python's, which a signal might interrupt.
    known[number] = weakref.ref(kept, functools.partial(known.pop, number))


def _living(known: Dict[int, weakref.ref[Any]]) -> List[Any]:
    # One call, which no other thread interrupts.
    return [each for each in [reference() for reference in list(known.values())] if each is not None]


def _before() -> None:
    global _held, _missed
    _held, _missed = [], _living(_locks)
    _held, _missed = _all_held()
    for each in _living(_told):
        each.before_fork()


def _all_held() -> Any:
    """Locks that are held now, and those that are not."""
    deadline = time.monotonic() + _WAIT_S
    locks = _living(_locks)
    left = 0.0
    while True:
        held: List[Any] = []
        missed: List[Any] = []
        try:
            # Nothing is held while the first one is waited for: a thread that has one of them may want another.
            for place, lock in enumerate(locks):
                is_held = lock.acquire(timeout=left) if place == 0 else lock.acquire(blocking=False)
                (held if is_held else missed).append(lock)
        except BaseException:  # as by a signal; Python shows it, and forks all the same
            _release(held)
            raise
        left = max(0.0, deadline - time.monotonic())
        if not missed or not left:
            return held, missed
        _release(held)
        locks = [missed[0], *(lock for lock in locks if lock is not missed[0])]


def _release(locks: List[Any]) -> None:
    for lock in reversed(locks):
        lock.release()


def _after_in_parent() -> None:
    global _held, _missed
    held, _held, _missed = _held, [], []
    _release(held)


def _after_in_child() -> None:
    global _held, _missed
    held, missed, _held, _missed = _held, _missed, [], []
    for lock in missed:
        lock._at_fork_reinit()
    _release(held)
    ids = {id(lock) for lock in missed}
    for each in _living(_told):
        each.after_fork(ids)


# Behind those that are registered by what this package imports, so that these locks are waited for before theirs.
os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
