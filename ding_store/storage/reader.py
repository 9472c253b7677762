"""A reader of one stream that sees each entry once, whatever the server forgets and the writers announce again."""

from __future__ import annotations

import logging
import threading
from typing import Dict, List, Mapping, Optional

from ding_store.errors import StoreError

from .base import Entry, EntryId, Store

logger = logging.getLogger(__name__)


class Reader:
    """
    Overview:
        Keeps per writer the highest sequence it has seen, its *marks*, and skips what is not above them. Who commits
        the marks together with what was made of the entries, and passes them to the next life's reader, has
        exactly-once across crashes; without them a new reader goes on behind the last ack, and may see again what was
        not acked.
        One thread at a time reads; any thread may ask for marks, counts and lag.
    Arguments:
        - durable (:obj:`bool`): Whether retention waits for this reader's acks, also when it is away, until ``forget``.
        - start (:obj:`str`): Where a reader that is new to the stream starts: 'oldest' or 'now'.
        - marks (:obj:`Optional[Mapping]`): writer -> highest sequence seen, of a former life of this reader.
    """

    def __init__(
        self,
        store: Store,
        stream: str,
        name: str,
        durable: bool = True,
        start: str = 'oldest',
        marks: Optional[Mapping[str, int]] = None,
    ) -> None:
        self.store = store
        self.stream = stream
        self.name = name
        self.durable = durable
        self.num_lost = 0
        self.num_duplicates = 0
        self._lock = threading.Lock()
        self._marks = dict(marks or {})
        # What was there before us must not pass for new when its writer announces it again.
        self._past = self._writers() if start == 'now' else {}
        self._cursor = store.register(stream, name, durable, start)
        self._excused = 0  # Lost entries known by their numbers, whose sequences are still to be missed.
        self._outstanding: Optional[EntryId] = None  # the last entry returned, until it is acked
        self._said_lost = self._said_duplicates = False

    @property
    def marks(self) -> Dict[str, int]:
        """writer -> highest sequence that ``read`` has returned, or skipped as lost."""
        with self._lock:
            return dict(self._marks)

    @property
    def cursor(self) -> EntryId:
        """The last entry that was looked at."""
        return self._cursor

    def read(self, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        """
        Overview:
            The next entries never seen before, in order; waits up to ``timeout_s`` for the first. An empty list may
            also mean that there were only duplicates.
        """
        entries = self.store.read(self.stream, self._cursor, max_entries, timeout_s)
        if not entries:
            return []
        with self._lock:
            lost, duplicates = self.num_lost, self.num_duplicates
            self._follow(entries[0].id)
            new = [entry for entry in entries if self._is_new(entry)]
            self._cursor = entries[-1].id
            self._outstanding = new[-1].id if new else self._outstanding
            self._report(self.num_lost - lost, self.num_duplicates - duplicates)
        if self._outstanding is None:
            self.ack()  # Only duplicates: nobody would ack these, and they may be what fills the stream.
        return new

    def ack(self, entry_id: Optional[EntryId] = None) -> None:
        """Let the store drop what was read, up to and with ``entry_id``: by default all that ``read`` returned."""
        with self._lock:
            if entry_id is None or entry_id == self._outstanding:
                # With the last one returned, the duplicates behind it are done, too: those of a new epoch included.
                self._outstanding, entry_id = None, self._cursor
        self.store.ack(self.stream, self.name, entry_id)

    def lag(self) -> int:
        """How many entries of the stream were not yet looked at."""
        stream = self.store.info().streams.get(self.stream)
        if stream is None:
            return 0
        seen = self._cursor.number if self._cursor.epoch == stream.epoch else 0
        return stream.last - max(stream.floor, seen)

    def forget(self) -> bool:
        """Nothing waits for this reader any more; reading again makes it known anew only as a new Reader."""
        return self.store.forget(self.stream, self.name)

    def close(self) -> None:
        """A durable reader stays known, with its cursor; an ephemeral one is forgotten. The store stays open."""
        if not self.durable:
            try:
                self.forget()
            except StoreError as e:
                logger.info('reader %r of %r was not forgotten: %s', self.name, self.stream, e)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _writers(self) -> Dict[str, int]:
        stream = self.store.info().streams.get(self.stream)
        return dict(stream.writers) if stream else {}

    def _follow(self, first: EntryId) -> None:
        """From the cursor to the first entry read: numbers are dense, those in between were dropped before we came."""
        if first.epoch == self._cursor.epoch:
            missed = max(0, first.number - self._cursor.number - 1)
            self.num_lost += missed
            self._excused += missed
        else:
            # The server lost its memory, perhaps of us too. Numbers missing now may have been acked by us: only
            # sequences tell what is lost.
            self.store.register(self.stream, self.name, self.durable)
            self._excused = 0

    def _is_new(self, entry: Entry) -> bool:
        seen = self._marks.get(entry.writer)
        if entry.sequence <= max(seen or 0, self._past.get(entry.writer, 0)):
            self.num_duplicates += 1
            return False
        missed = entry.sequence - 1 - (seen or 0)
        excused = min(missed, self._excused)
        self._excused -= excused
        # What a writer sent before we knew it may have been acked by a former life of ours: that is no loss.
        self.num_lost += 0 if seen is None else missed - excused
        self._marks[entry.writer] = entry.sequence
        return True

    def _report(self, lost: int, duplicates: int) -> None:
        """One line when it begins, not one per read."""
        if lost and not self._said_lost:
            logger.warning(
                'reader %r of %r: %d entries were lost (%d in all)', self.name, self.stream, lost, self.num_lost
            )
        if duplicates and not self._said_duplicates:
            logger.info('reader %r of %r: skipping entries that were announced again', self.name, self.stream)
        self._said_lost, self._said_duplicates = bool(lost), bool(duplicates)
