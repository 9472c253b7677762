"""Child processes for tests: forked, and killed at the end."""

import contextlib
import os
import signal
import traceback


@contextlib.contextmanager
def child(work):
    """A forked process that runs ``work()`` and never comes back into the test. Yields its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - shown; the parent sees that its answer is missing
            traceback.print_exc()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
