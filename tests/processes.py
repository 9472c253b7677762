"""Forked processes of a test: what they say through a pipe, and their end."""

import contextlib
import os
import signal
import sys
import traceback
from typing import Any, Callable, Iterator, TextIO, Tuple


@contextlib.contextmanager
def child(work: Callable[[TextIO], Any]) -> Iterator[Tuple[int, TextIO]]:
    """A forked process that runs ``work(pipe)`` and never comes back into the test; killed at the end."""
    reading, writing = os.pipe()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        os.close(reading)
        try:
            with os.fdopen(writing, 'w', buffering=1) as pipe:
                work(pipe)
            status = 0
        except BaseException:  # noqa: BLE001 whatever it is, it must be seen, and never reach the test below us
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        try:
            yield pid, pipe
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
