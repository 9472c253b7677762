"""
The last checkpoint of a process. Launchers, the end of its parent and signals wait for it.

A signal that would end a learner with checkpoints is held back. It is delivered between two updates, or after a
checkpoint that is being written. It is held for a limited time. A second signal of its kind is delivered at once. If
the main thread hangs in a C call, no handler runs, and only SIGKILL ends the process.
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

#: How long a process may take to write its last checkpoint.
SAVE_S = 600.0
#: How long it may take to begin it. An iteration that takes longer is interrupted. Launchers wait longer than this.
ARRIVE_S = 8.0
#: Two equal signals within this time count as one. A scheduler may signal all processes, while a launcher forwards its
#: own signal.
SAME_S = 1.0
#: Name of a process, as in ``ps``, while it writes one. The kernel keeps at most 15 characters.
NAME = 'ding_store-save'
#: Signals that are held back. mpire's pool, and so ``ditask``, interrupts its workers with SIGUSR1.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_ends_later = threading.RLock()


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """
    Overview:
        Write a last checkpoint in this block. The process's name shows it to others, see ``is_saving``. A signal that
        would end the process is delivered after the block. A second one is delivered at once.
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
        Holds signals back from ``expect`` to ``done``, for a process that writes a checkpoint before it ends. When the
        state is whole, the process checks ``must_exit``. If it is True, the process writes a checkpoint and calls
        ``done``. If it has not begun within ``ARRIVE_S``, it ends without one.
    """

    _is_expected = False

    def expect(self) -> None:
        self._is_expected = self._is_expected or _signals.hold()

    @property
    def must_exit(self) -> bool:
        """True if the process must end. Only in the main thread, which alone may write the last checkpoint."""
        must_exit = bool(_signals.received) or _signals.parent_is_gone
        return self._is_expected and must_exit and threading.current_thread() is threading.main_thread()

    def done(self) -> None:
        """Deliver the signals that were held back."""
        if self._is_expected:
            self._is_expected = False
            _signals.release()


def wait_until_saved() -> None:
    """
    Overview:
        Wait until this process has written its last checkpoint, if it has one to write. Another thread calls this when
        the parent is gone. It waits for ``ARRIVE_S`` and ``SAVE_S`` at most.
    """
    _signals.tell_of_parent()
    if _ends_later.acquire(timeout=SAVE_S):
        _ends_later.release()


def is_saving(pid: int) -> bool:
    """Return True if another process of this host is in a ``saving`` block. False if /proc does not show its name."""
    return _name_of(pid) == NAME.encode()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    before = _name_of('self')
    if before:  # else /proc is not readable, so no process could see the new name, and it could not be restored
        _rename(NAME.encode())
    try:
        yield
    finally:
        if before:
            _rename(before)


def _name_of(pid: Union[int, str]) -> bytes:
    """Return the name of a process. Empty if it cannot be read."""
    try:
        return Path(f'/proc/{pid}/comm').read_bytes()[:-1]
    except OSError:
        return b''


def _rename(name: bytes) -> None:
    with contextlib.suppress(OSError):  # /proc is read-only: the checkpoint is written, but no process waits for it
        Path('/proc/self/comm').write_bytes(name)


class _HeldBack:
    """Holds back signals that end this process, from the first ``hold`` to the last ``release``."""

    def __init__(self) -> None:
        self.received: List[int] = []
        self.parent_is_gone = False
        self._heard_at: Dict[int, float] = {}
        self._num_holds = self._pid = 0
        self._before: Dict[int, Any] = {}
        self._news: Any = queue.SimpleQueue()  # a handler may put into it, whatever code it has interrupted
        self._is_over = threading.Event()

    def hold(self) -> bool:
        """Hold signals back. Return False outside of the main thread, because only that one runs handlers."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._num_holds += 1
        if self._num_holds == 1:
            self.received, self._pid, self._news, self._is_over = (
                [],
                os.getpid(),
                queue.SimpleQueue(),
                threading.Event(),
            )
            handlers: Dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
            self._before = {n: handler for n, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
            with contextlib.suppress(RuntimeError):  # no more threads: no log line, and a long iteration is not ended
                threading.Thread(target=self._attend, args=(self._news,), name='ding_store-told', daemon=True).start()
            for number in self._before:
                signal.signal(number, self._note)
        return True

    def release(self) -> None:
        self._num_holds -= 1
        if self._num_holds == 0:
            self._give_back()

    def tell_of_parent(self) -> None:
        """Note that the parent is gone. Return when signals are no longer held back, or after ``ARRIVE_S``."""
        if self._num_holds:
            self.parent_is_gone = True
            self._is_over.wait(ARRIVE_S)

    def _note(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a forked child inherited the handlers, but has nothing to save
            self.received = [number]
            self._give_back()
        elif not self._num_holds:  # a handler that was set later calls this one, though nothing is held back any more
            self._pass_on(number, frame)
        elif number in self.received:
            if time.monotonic() - self._heard_at[number] < SAME_S:
                return
            self.received.remove(number)
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
        else:
            self._heard_at[number] = time.monotonic()
            self.received.append(number)
            self._news.put(number)

    def _pass_on(self, number: int, frame: Any) -> None:
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _give_back(self) -> None:
        """Restore all handlers and deliver the held signals, even if one of the handlers raises."""
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread may change handlers, so ours stay and pass later signals on.
            self._news.put(None)
            self._is_over.set()
            for number in self.received:
                os.kill(os.getpid(), number)
            return
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._before)
        try:
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._note:  # else other code has set its handler since
                    signal.signal(number, handler)
            for number in self.received:
                signal.pthread_kill(threading.get_ident(), number)
            self._news.put(None)
            self._is_over.set()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _attend(self, news: Any) -> None:
        """
        Log signals, and end an iteration that takes longer than ``ARRIVE_S``. This is a thread, because a handler must
        not log: it may have interrupted a log call.
        """
        ends: Optional[float] = None
        while True:
            try:
                number = news.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
            except queue.Empty:
                break
            if number is None:
                return
            ends = ends or time.monotonic() + ARRIVE_S
            logger.warning('signal received: this process ends after a last checkpoint. Send it again to end at once')
        if _ends_later.acquire(blocking=False):  # else the checkpoint is being written, and the launcher waits for it
            try:
                logger.warning('the iteration has not ended within %.0f s: no last checkpoint is written', ARRIVE_S)
                for number in self.received[:1]:  # a second signal of its kind, which ends the process
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
            finally:
                _ends_later.release()


_signals = _HeldBack()
