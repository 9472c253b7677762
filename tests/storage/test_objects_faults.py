"""Objects while another process is in the middle of something: it lists, forks, waits, or was killed."""

import contextlib
import itertools
import os
import threading

import numpy as np

from ding_store.storage import open_store
from ding_store.storage.testing import WAIT_S

_RUNS = (f'objects-faults{number}' for number in itertools.count())
KB, MB = 1000, 1000_000


def arrays(size, number=1):
    return {'x': np.full(size, number, np.uint8)}


@contextlib.contextmanager
def thread_of(work):
    """Yield a running thread, and a list that gets the result or the error of its work."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as e:  # noqa: BLE001 the test looks at it
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield thread, found
    finally:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_listing_counts_an_object_that_is_being_put_once(monkeypatch):
    writes, is_listed, scandir, write = threading.Event(), threading.Event(), os.scandir, os.pwritev
    with open_store('memory://') as store:
        objects = store.objects(max_bytes=MB)

        def pwritev(*arguments):
            writes.set()
            assert is_listed.wait(WAIT_S)
            return write(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(os, 'pwritev', pwritev)
            with thread_of(lambda: objects.put(arrays(KB))) as (putting, found):
                assert writes.wait(WAIT_S)

                @contextlib.contextmanager
                def slow_scandir(path):
                    with scandir(path) as entries:
                        names = list(entries)
                    is_listed.set()
                    putting.join(0.3)  # It must not end while the directory is listed.
                    yield iter(names)

                patched.setattr(os, 'scandir', slow_scandir)
                usage = objects.info().in_memory
        assert usage.num_objects == 0
        assert objects.get(found[0]).arrays['x'].sum() == KB
        assert objects.info().in_memory.num_objects == 1
