"""Read-ahead of a stream in a thread, so that the learner finds entries in memory."""

from __future__ import annotations

import threading
from collections import deque
from typing import Callable, Deque, List, Optional, Sequence

from ding_store.errors import StoreClosed
from ding_store.storage.base import Entry, EntryId
from ding_store.storage.exactly_once.reader import Reader

#: The longest time that one read sleeps. It returns earlier as soon as there is an entry.
READ_S = 2.0


class ReadAhead:
    """
    Overview:
        A thread that reads entries from a reader before they are needed. It reads while it holds fewer than
        ``max_entries`` entries and at most half of ``max_bytes``. It can hold up to twice ``max_entries``. It stays
        within ``max_bytes`` while new entries are no larger than earlier ones.
    Arguments:
        - size_of (:obj:`Callable`): Returns the bytes that an entry counts for. Default: the size of its arrays.
        - news (:obj:`Optional[threading.Condition]`): Several with one condition can be waited for together.
        - rest_s (:obj:`float`): Pause after a read that took all there was. The next read then takes several entries.
    Attributes:
        - num_bytes (:obj:`int`): Bytes that the held entries count for.
    Raises (take, wait):
        - Exception: The error that ended the thread. No other calls raise it.
    """

    def __init__(
        self,
        reader: Reader,
        max_entries: int = 64,
        max_bytes: int = 256 << 20,
        size_of: Optional[Callable[[Entry], int]] = None,
        news: Optional[threading.Condition] = None,
        rest_s: float = 0.0,
    ) -> None:
        self._reader, self._rest_s = reader, rest_s
        self._size_of = size_of or _bytes_of
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self.num_bytes = self._largest = 0  # the latter: bytes of the largest entry so far
        self._entries: Deque[Entry] = deque()
        self._looked_at: Optional[EntryId] = None
        self._news = news or threading.Condition()
        self._error: Optional[Exception] = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name='ding_store-feed', daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return how many entries ``take`` can return without waiting."""
        return len(self._entries)

    def passed(self) -> Optional[EntryId]:
        """Return the id up to which the reader has read, or None while entries wait to be taken."""
        with self._news:
            return None if self._entries else self._looked_at

    def take(self, max_entries: int, timeout_s: float) -> List[Entry]:
        """Return up to ``max_entries`` in order. Wait for the first until the timeout or ``wake``, else return none."""
        with self._news:
            self.wait(timeout_s)
            taken = [self._entries.popleft() for _ in range(min(max_entries, len(self._entries)))]
            self.num_bytes -= sum(map(self._size_of, taken))
            self._news.notify_all()
        return taken

    def wait(self, timeout_s: float) -> bool:
        """Wait like ``take``, and take nothing. Return True if there is an entry."""
        with self._news:
            self._news.wait_for(lambda: self._has_news, timeout_s)
            if self._error and not self._entries:
                raise self._error
            return bool(self._entries)

    @staticmethod
    def wait_for_any(several: Sequence[ReadAhead], timeout_s: float) -> None:
        """Wait until one of several with the same ``news`` has an entry or an error, until the timeout, or ``wake``."""
        news = several[0]._news
        with news:
            news.wait_for(lambda: any(each._has_news for each in several), timeout_s)

    @property
    def _has_news(self) -> bool:
        return bool(self._entries or self._error or self._closed)

    def wake(self) -> None:
        """End all waits. The thread stops after its present read."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def rest(self) -> List[Entry]:
        """Return the entries that were read and not taken, then those in the stream now. Call ``wake`` first."""
        self._thread.join(timeout=READ_S + 1.0)
        with self._news:
            rest, self._entries = list(self._entries), deque()
        # Only one thread at a time may use a reader.
        return rest if self._thread.is_alive() else rest + self._reader.read(max_entries=10_000)

    def _room(self) -> int:
        """Return how many entries the thread may read now."""
        if len(self._entries) >= self._max_entries or self.num_bytes > self._max_bytes // 2:
            return 0
        if self._largest == 0:
            return 1  # the first entry shows how large they are
        fitting = (self._max_bytes - self.num_bytes) // self._largest
        return max(1, min(self._max_entries, fitting))

    def _run(self) -> None:
        try:
            while not self._closed:
                room = self._room()
                entries = self._reader.read(max_entries=room, timeout_s=READ_S)
                sizes = list(map(self._size_of, entries))
                with self._news:
                    self._entries.extend(entries)
                    self.num_bytes += sum(sizes)
                    self._largest = max([self._largest, *sizes])
                    self._looked_at = self._reader.cursor
                    self._news.notify_all()
                    if self._rest_s and len(entries) < room:
                        self._news.wait_for(lambda: self._closed, self._rest_s)
                    self._news.wait_for(lambda: self._room() > 0 or self._closed)
        except StoreClosed:
            self.wake()
        except Exception as error:  # noqa: BLE001 - ``take`` raises it
            with self._news:
                self._error = error
                self._news.notify_all()


def _bytes_of(entry: Entry) -> int:
    return sum(array.nbytes for array in entry.arrays.values())
