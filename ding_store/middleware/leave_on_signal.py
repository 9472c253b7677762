"""SIGTERM as a request to leave: a process ends its iteration, delivers what it has, and leaves the run in order."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any, Optional

from ding_store.errors import StoreError
from ding_store.run.last_checkpoint import SAME_S
from ding_store.run.session import RunSession

logger = logging.getLogger(__name__)

#: Seconds that the present iteration may take after the signal. Then the process leaves without its unfinished chunk.
#: Platforms and launchers wait longer than this before they kill.
ITERATION_S = 8.0
#: Exit status of a process that has left at the signal, as a shell says it: the work is not complete, so a platform
#: that wants it done starts another.
EXIT_CODE = 128 + signal.SIGTERM
#: The sessions that leave at the signal, as long as its handler refers to them.
_sessions: weakref.WeakSet[RunSession] = weakref.WeakSet()


def exit_code(code: int) -> int:
    """Return the exit status of this process, whose script has ended with ``code``."""
    return EXIT_CODE if code == 0 and any(session.leaves_alone for session in _sessions) else code


def leave_on_signal(session: RunSession) -> None:
    """
    Overview:
        Leave the run after the present iteration at the first SIGTERM, or after ``ITERATION_S``. A second one ends the
        process at once. If the script handles or ignores SIGTERM, this does nothing. Only the main thread can do it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    owner = os.getpid()
    came: Any = queue.SimpleQueue()  # a handler may put into it, whatever code it has interrupted
    first_s: Optional[float] = None

    def handle(number: int, frame: Optional[FrameType]) -> None:
        nonlocal first_s
        now = time.monotonic()
        # A forked process, as of an environment manager, has inherited this handler. It has nothing to deliver.
        if os.getpid() != owner or (first_s is not None and now - first_s >= SAME_S):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(number)
        elif first_s is None:
            first_s = now
            session.ask_to_leave()
            came.put(number)

    _sessions.add(session)
    threading.Thread(target=_attend, args=(came, session), name='ding_store-leave', daemon=True).start()
    signal.signal(signal.SIGTERM, handle)


def _attend(came: Any, session: RunSession) -> None:
    """Log the signal, and leave for the main thread if its iteration takes too long."""
    came.get()
    logger.warning('ding_store: SIGTERM received: this process leaves the run after its iteration')
    time.sleep(ITERATION_S)
    try:
        if session.leave_at_once():
            logger.warning('ding_store: the iteration has not ended within %.0f s: its chunk is dropped', ITERATION_S)
            os._exit(EXIT_CODE if session.leaves_alone else 0)
    except StoreError as error:
        logger.warning('ding_store: this process could not leave its run in order: %s', error)
        os._exit(1)
