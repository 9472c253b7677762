"""A process's last checkpoint: its launchers, the end of its parent and signals wait for it."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List, Union

logger = logging.getLogger(__name__)

#: How long a process may take for its last checkpoint.
SAVE_S = 600.0
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
    with _ends_later, _named(), _signals_deferred():
        yield


def wait_until_saved() -> None:
    """Called in another thread of this process: until it is outside of such a block, for ``SAVE_S`` at most."""
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


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: List[int] = []

    def note(number: int, frame: Any) -> None:
        heard.append(number)
        signal.signal(number, before[number])
        logger.warning('the last checkpoint is still being written (once more to end without it)')

    handlers: Dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        # Also after an error; and all of them: who raises out of a handler does not keep the others from theirs.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)
        try:
            for number, handler in before.items():
                signal.signal(number, handler)
            for number in heard:
                signal.pthread_kill(threading.get_ident(), number)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
