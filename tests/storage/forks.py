"""Child processes for tests: forked, and killed at the end."""

import contextlib
import os
import signal


@contextlib.contextmanager
def child(work):
    """A forked process that runs ``work()`` and never comes back into the test. Yields its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
