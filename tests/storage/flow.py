"""A writer and a reader that go on while a test takes servers away."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, wait

from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

STREAM = 'experience'


class Flow:
    """
    A writer and a reader in threads of their own. All that was appended is read, once and in order, or its block fails.
    """

    def __init__(self, url, run, stream=STREAM, **options):
        self._url, self._run, self._stream, self._options = url, run, stream, options
        self.appended, self.read = [], []
        self._is_over, self._has_all = threading.Event(), threading.Event()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(2))  # It ends last: closed stores end its calls.
            stack.callback(self._has_all.set)
            writer, learner = (stack.enter_context(open_store(self._url, self._run, **self._options)) for _ in range(2))
            self._reader = Reader(learner, self._stream, 'learner')
            self._work = [pool.submit(self._append, writer), pool.submit(self._ingest)]
            self.go_on()
            self._stack = stack.pop_all()
        return self

    def _append(self, store):
        for number in itertools.count():
            if self._is_over.is_set():
                return
            # Some in parts, some in one piece.
            store.append(self._stream, {}, chunk(number, 30_000 if number % 20 == 0 else 100))
            self.appended.append(number)

    def _ingest(self):
        while not self._has_all.is_set():
            for entry in self._reader.read(20, timeout_s=0.1):
                self.read.append(number_of(entry))
            self._reader.ack()

    def go_on(self):
        """Return when entries arrive that are appended from now on."""
        number = len(self.appended) + 3

        def has_arrived():
            for work in self._work:
                assert not work.done(), work.exception()
            return self.read[-1:] >= [number]

        eventually(has_arrived, 'entries arrive')

    def __exit__(self, *error):
        self._is_over.set()
        try:
            self._work[0].result(WAIT_S)
            eventually(lambda: self.read[-1:] == self.appended[-1:] or self._work[1].done(), 'all is read')
        finally:
            self._has_all.set()
            wait(self._work[1:], WAIT_S)
            self._stack.close()
        self._work[1].result()
        assert self.read == self.appended == list(range(len(self.appended)))
        assert self._reader.num_lost == 0
