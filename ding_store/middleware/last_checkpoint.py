"""
A process's last checkpoint: its launchers, the end of its parent and signals wait for it.

A signal that would end a learner with checkpoints is held back until a moment between two updates, or to the end of a
checkpoint that is being written, and comes then. Not for ever, and never a second one of its kind; but a main thread
that hangs in a C call hears of none, and SIGKILL alone ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Union

logger = logging.getLogger(__name__)

#: How long a process may take for its last checkpoint.
SAVE_S = 600.0
#: How long it may take to come to it: an iteration that takes longer is broken off. Less than launchers wait.
ARRIVE_S = 8.0
#: Two signals of a kind within this time are one: a scheduler told all processes, and a launcher handed its own on.
SAME_S = 1.0
#: What a process is called while it writes one (in ``ps``, too), of no more characters than the kernel keeps.
NAME = 'ding_store-save'
#: The last one is how mpire's pool, and so ``ditask``, interrupts its workers.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_ends_later = threading.RLock()


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """
    Overview:
        Write a last checkpoint in this block. Who looks sees by the process's name that it does, and a signal that
        would end it comes after the block; a second one comes at once.
    """
    with _ends_later, _named():
        is_held = _signals.hold()
        try:
            yield
        finally:
            if is_held:
                _signals.release()


class LastCheckpoint:
    """
    Overview:
        A process that would write a checkpoint before it ends: from ``expect`` to ``done`` signals are held back. Who
        finds that it is told to end, at a moment at which there is a whole state, writes one and calls ``done``. If
        nobody has begun to within ``ARRIVE_S``, the process ends without.
    """

    _is_expected = False

    def expect(self) -> None:
        self._is_expected = self._is_expected or _signals.hold()

    @property
    def is_told(self) -> bool:
        """In the thread that signals interrupt; no other may write it."""
        is_told = bool(_signals.heard) or _signals.parent_is_gone
        return self._is_expected and is_told and threading.current_thread() is threading.main_thread()

    def done(self) -> None:
        """What was held back comes now."""
        if self._is_expected:
            self._is_expected = False
            _signals.release()


def wait_until_saved() -> None:
    """
    Overview:
        Called in another thread of a process whose parent is gone: let it write its last checkpoint, if it has one to
        write, for ``ARRIVE_S`` and ``SAVE_S`` at most.
    """
    _signals.tell_of_parent()
    if _ends_later.acquire(timeout=SAVE_S):
        _ends_later.release()


def is_saving(pid: int) -> bool:
    """Whether another process of this host is in such a block; not, where /proc does not say so."""
    return _name_of(pid) == NAME.encode()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    before = _name_of('self')
    if before:  # else nobody could see the other one either, or it could not be given back
        _rename(NAME.encode())
    try:
        yield
    finally:
        if before:
            _rename(before)


def _name_of(pid: Union[int, str]) -> bytes:
    """Empty where it cannot be seen."""
    try:
        return Path(f'/proc/{pid}/comm').read_bytes()[:-1]
    except OSError:
        return b''


def _rename(name: bytes) -> None:
    with contextlib.suppress(OSError):  # of a /proc that is read-only: then nobody waits, but it is written
        Path('/proc/self/comm').write_bytes(name)


class _HeldBack:
    """Signals that end this process, from the first ``hold`` to the last ``release``."""

    def __init__(self) -> None:
        self.heard: List[int] = []
        self.parent_is_gone = False
        self._heard_at: Dict[int, float] = {}
        self._num_holds = self._pid = 0
        self._before: Dict[int, Any] = {}
        self._news: Any = queue.SimpleQueue()  # which may be put into by a handler, whatever it has interrupted
        self._is_over = threading.Event()

    def hold(self) -> bool:
        """False outside of the main thread, which alone hears them."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._num_holds += 1
        if self._num_holds == 1:
            self.heard, self._pid, self._news, self._is_over = [], os.getpid(), queue.SimpleQueue(), threading.Event()
            handlers: Dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
            self._before = {n: handler for n, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
            with contextlib.suppress(RuntimeError):  # no more threads: then nobody says so, nor breaks off an iteration
                threading.Thread(target=self._attend, args=(self._news,), name='ding_store-told', daemon=True).start()
            for number in self._before:
                signal.signal(number, self._note)
        return True

    def release(self) -> None:
        self._num_holds -= 1
        if self._num_holds == 0:
            self._give_back()

    def tell_of_parent(self) -> None:
        """Returns when nothing is held back any more, or ``ARRIVE_S`` later."""
        if self._num_holds:
            self.parent_is_gone = True
            self._is_over.wait(ARRIVE_S)

    def _note(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a child that was forked meanwhile has our handlers, and nothing to save
            self.heard = [number]
            self._give_back()
        elif not self._num_holds:  # somebody's handler that came later calls this one: it is nobody's business any more
            self._pass_on(number, frame)
        elif number in self.heard:
            if time.monotonic() - self._heard_at[number] < SAME_S:
                return
            self.heard.remove(number)
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
        else:
            self._heard_at[number] = time.monotonic()
            self.heard.append(number)
            self._news.put(number)

    def _pass_on(self, number: int, frame: Any) -> None:
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _give_back(self) -> None:
        """All of them, also after an error: who raises out of a handler does not keep the others from theirs."""
        if threading.current_thread() is not threading.main_thread():
            # Handlers can be changed in that one only: what comes is passed on from here on.
            self._news.put(None)
            self._is_over.set()
            for number in self.heard:
                os.kill(os.getpid(), number)
            return
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._before)
        try:
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._note:  # else it is somebody's who came later
                    signal.signal(number, handler)
            for number in self.heard:
                signal.pthread_kill(threading.get_ident(), number)
            self._news.put(None)
            self._is_over.set()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _attend(self, news: Any) -> None:
        """A thread, since the handlers interrupt whatever it is, also what is being logged."""
        ends: Optional[float] = None
        while True:
            try:
                number = news.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
            except queue.Empty:
                break
            if number is None:
                return
            ends = ends or time.monotonic() + ARRIVE_S
            logger.warning('told to end, after a last checkpoint (once more to end without it)')
        if _ends_later.acquire(blocking=False):  # else it is being written, for which others wait
            try:
                logger.warning('the iteration has not ended within %.0f s: there is no last checkpoint', ARRIVE_S)
                for number in self.heard[:1]:  # the second time
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
            finally:
                _ends_later.release()


_signals = _HeldBack()
