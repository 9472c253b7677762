"""
Safe forks of a process whose threads use buffers.

A forked process has one thread, the one that forked. If another thread held a lock, the lock would stay locked there
for ever. The data that the thread was changing would stay half changed. Therefore a fork first acquires all locks of
buffers, which waits until no thread changes a buffer. It releases them when it is done.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
import weakref
from typing import Any, Dict, List, Protocol, Set, TypeVar

Lock = TypeVar('Lock')

#: The time that a fork waits for the locks. The child replaces those still held by new ones and refuses the data they
#: guard.
_WAIT_S = 10.0


class Forked(Protocol):
    """An object with callbacks around forks. Its locks are held from ``before_fork`` to the end of the fork."""

    def before_fork(self) -> None:
        """Prepare for a fork. Runs in the parent."""

    def after_fork(self, missed: Set[int]) -> None:
        """Clean up in the child. ``missed`` are the ids of locks that another thread still held at the fork."""


# By number, so that they are used in the order of their creation.
_locks: Dict[int, weakref.ref[Any]] = {}
_notified: Dict[int, weakref.ref[Any]] = {}
_numbers = itertools.count()
_held: List[Any] = []
_missed: List[Any] = []


def hold_over_forks(lock: Lock) -> Lock:
    """Hold this lock during every fork, and return it."""
    _keep(_locks, lock)
    return lock


def tell_of_forks(forked: Forked) -> None:
    """Call an object's methods around every fork, for as long as the object exists."""
    _keep(_notified, forked)


def _keep(known: Dict[int, weakref.ref[Any]], kept: Any) -> None:
    number = next(_numbers)
    # ``partial`` of a builtin: a signal could interrupt a Python function.
    known[number] = weakref.ref(kept, functools.partial(known.pop, number))


def _living(known: Dict[int, weakref.ref[Any]]) -> List[Any]:
    # ``list`` is one call, which no other thread can interrupt.
    return [each for each in [reference() for reference in list(known.values())] if each is not None]


def _before() -> None:
    global _held, _missed
    _held, _missed = [], _living(_locks)
    _held, _missed = _all_held()
    for each in _living(_notified):
        each.before_fork()


def _all_held() -> Any:
    """Acquire the locks. Return those that are held and those that could not be acquired in time."""
    deadline = time.monotonic() + _WAIT_S
    locks = _living(_locks)
    left = 0.0
    while True:
        held: List[Any] = []
        missed: List[Any] = []
        try:
            # Wait for the first lock only, while holding none: a thread that holds one of them may need another.
            for place, lock in enumerate(locks):
                is_held = lock.acquire(timeout=left) if place == 0 else lock.acquire(blocking=False)
                (held if is_held else missed).append(lock)
        except BaseException:  # A signal, for example. Python prints it and forks all the same.
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
    for each in _living(_notified):
        each.after_fork(ids)


# Registered after the imports above. Callbacks before a fork run in reverse order, so these locks come first.
os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
