"""Entries read ahead of their use, in a thread: the learner takes what is there already."""

from __future__ import annotations

import threading
from collections import deque
from typing import Callable, Deque, List, Optional

from ding_store.errors import StoreClosed
from ding_store.storage.base import Entry, EntryId
from ding_store.storage.exactly_once.reader import Reader

#: A read returns as soon as there is an entry; this only bounds how long a thread sleeps in one call.
READ_S = 2.0


class ReadAhead:
    """
    Overview:
        Follows a reader in a thread and reads on while it holds fewer than ``max_entries`` decoded entries, of at most
        half of ``max_bytes``: it then holds no more than twice of the one, and no more than the other while entries are
        no larger than those before.
    Arguments:
        - size_of (:obj:`Callable`): Bytes that an entry counts for; by default those of its arrays.
    Attributes:
        - num_bytes (:obj:`int`): What is held counts for.
    Raises (take):
        - Exception: What ended the thread, whatever it was: nobody else would ever hear of it.
    """

    def __init__(
        self,
        reader: Reader,
        max_entries: int = 64,
        max_bytes: int = 256 << 20,
        size_of: Optional[Callable[[Entry], int]] = None,
    ) -> None:
        self._reader = reader
        self._size_of = size_of or _bytes_of
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self.num_bytes = self._largest = 0  # the latter: of any entry
        self._entries: Deque[Entry] = deque()
        self._looked_at: Optional[EntryId] = None
        self._news = threading.Condition()
        self._error: Optional[Exception] = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name='ding_store-feed', daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many there are to be taken without waiting."""
        return len(self._entries)

    def passed(self) -> Optional[EntryId]:
        """The last entry that was looked at; None while some of those that came are not taken."""
        with self._news:
            return None if self._entries else self._looked_at

    def take(self, max_entries: int, timeout_s: float) -> List[Entry]:
        """Up to ``max_entries`` in order; waits for the first; empty when none came in time, or after ``wake``."""
        with self._news:
            self._news.wait_for(lambda: self._entries or self._error or self._closed, timeout_s)
            if self._error and not self._entries:
                raise self._error
            taken = [self._entries.popleft() for _ in range(min(max_entries, len(self._entries)))]
            self.num_bytes -= sum(map(self._size_of, taken))
            self._news.notify_all()
        return taken

    def wake(self) -> None:
        """End the waits: nothing more is wanted. The thread ends with its present read."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def rest(self) -> List[Entry]:
        """After ``wake``: what was read and not taken, and what is in the stream now."""
        self._thread.join(timeout=READ_S + 1.0)
        with self._news:
            rest, self._entries = list(self._entries), deque()
        # A reader serves one thread at a time.
        return rest if self._thread.is_alive() else rest + self._reader.read(max_entries=10_000)

    def _room(self) -> int:
        """How many entries to read now."""
        if len(self._entries) >= self._max_entries or self.num_bytes > self._max_bytes // 2:
            return 0
        if self._largest == 0:
            return 1  # It tells how large they are.
        fitting = (self._max_bytes - self.num_bytes) // self._largest
        return max(1, min(self._max_entries, fitting))

    def _run(self) -> None:
        try:
            while not self._closed:
                entries = self._reader.read(max_entries=self._room(), timeout_s=READ_S)
                sizes = list(map(self._size_of, entries))
                with self._news:
                    self._entries.extend(entries)
                    self.num_bytes += sum(sizes)
                    self._largest = max([self._largest, *sizes])
                    self._looked_at = self._reader.cursor
                    self._news.notify_all()
                    self._news.wait_for(lambda: self._room() > 0 or self._closed)
        except StoreClosed:
            self.wake()
        except Exception as error:  # noqa: BLE001 - it is raised where entries are taken
            with self._news:
                self._error = error
                self._news.notify_all()


def _bytes_of(entry: Entry) -> int:
    return sum(array.nbytes for array in entry.arrays.values())
