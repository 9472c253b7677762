"""A reader of one stream that sees each entry once, whatever the server forgets and the writers announce again."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set

from ding_store.errors import ConfigError, CorruptPayload, StoreError
from ding_store.storage.base import Entry, EntryId, Header, Store, StreamInfo
from ding_store.storage.exactly_once.losses import Losses

logger = logging.getLogger(__name__)

#: What a reader does with an entry whose bytes are not what was written.
ON_CORRUPT = ('stop', 'skip')
#: Of so many writers that the server does not know the marks are kept, those that were read last; and of as many as it
#: knew when it lost its memory. They may come back, or have left: data that become older may hold their entries again.
MAX_CARRIED = 1024


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
        - marks (:obj:`Optional[Mapping]`): writer -> highest sequence seen, of a former life of this reader; without
          writers of which nothing can come any more.
        - heads (:obj:`Optional[Mapping]`): ``heads()`` of that life, committed with the marks. Without them it knows
          nothing of what that had heard of, and does not count it where the server lost it meanwhile.
        - on_corrupt (:obj:`str`): 'stop': ``read`` raises CorruptPayload at such an entry, again and again; 'skip': it
          is counted, logged and left out.
        - loss_grace_s (:obj:`float`): After the server lost its memory, how long writers are waited for to announce
          again, before what they do not is counted as lost.
        - copied (:obj:`bool`): Whether ``read`` copies what lies in memory that its writer uses again: for who holds
          entries of a stream that may drop them unread (``overflow='drop_oldest'``). One that was overwritten before
          it was copied counts as lost.
    Attributes:
        - num_lost (:obj:`int`): Entries that were in the stream and never came: dropped by a full stream, or forgotten
          by the server when their writer was dead, as far as this reader had heard of them: it asks once a second, and
          its next life knows what was committed of that.
        - num_duplicates (:obj:`int`): Entries that came again, and were skipped.
        - num_corrupt (:obj:`int`): Entries skipped because of ``on_corrupt='skip'``.
    """

    def __init__(
        self,
        store: Store,
        stream: str,
        name: str,
        durable: bool = True,
        start: str = 'oldest',
        marks: Optional[Mapping[str, int]] = None,
        heads: Optional[Mapping[str, Any]] = None,
        on_corrupt: str = 'stop',
        loss_grace_s: float = 60.0,
        copied: bool = False,
    ) -> None:
        if on_corrupt not in ON_CORRUPT:
            raise ConfigError(f'on_corrupt ({on_corrupt!r}) must be one of {", ".join(ON_CORRUPT)}')
        self.store = store
        self.stream = stream
        self.name = name
        self.durable = durable
        self.on_corrupt = on_corrupt
        self.copied = copied
        self.num_duplicates = 0
        self.num_corrupt = 0
        self._losses = Losses(loss_grace_s, heads or {})
        self._lock = threading.Lock()
        self._marks = dict(marks or {})  # Those that were read last are the last.
        #: Writers that the server knows, as far as this reader has seen in this epoch.
        self._here: Set[str] = set()
        #: The most writers that a server knew when it lost its memory.
        self._num_lost_sight: int = (heads or {}).get('num_lost_sight', 0)
        # What was there before us must not pass for new when its writer announces it again.
        self._past = self._writers() if start == 'now' else {}
        # Without marks nothing tells what a former life of ours has acked, but how far the writers were by then.
        self._had_before = {} if marks else self._heads_before()
        self._cursor = store.register(stream, name, durable, start)
        self._outstanding: Optional[EntryId] = None  # the last entry returned, until it is acked
        self._acked = 0  # In this epoch, what the server remembers of our acks from before it lost its newest changes.
        self._has_left = False
        self._seen: Optional[StreamInfo] = None  # the stream, when we last looked
        self._warned_lost = self._warned_duplicates = self._warned_corrupt = False

    @property
    def marks(self) -> Dict[str, int]:
        """writer -> highest sequence that ``read`` has returned, or skipped as lost or corrupt."""
        with self._lock:
            return dict(self._marks)

    def heads(self, marks: Optional[Mapping[str, int]] = None) -> Dict[str, Any]:
        """
        Overview:
            How far the writers are, as far as this reader has heard of it, for the next life's reader.
        Arguments:
            - marks (:obj:`Optional[Mapping]`): Those that are committed with it, by default all of this reader.
        Returns:
            - heads (:obj:`Dict[str, Any]`): JSON.
        """
        with self._lock:
            heads = self._losses.heads(self._cursor, self._marks, self._marks if marks is None else marks)
            return {**heads, 'num_lost_sight': self._num_lost_sight}

    @property
    def num_lost(self) -> int:
        return self._losses.count

    @property
    def cursor(self) -> EntryId:
        """The last entry that was looked at."""
        return self._cursor

    def read(self, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        """
        Overview:
            The next entries never seen before, in order; waits up to ``timeout_s`` for the first. An empty list may
            also mean that there were only duplicates.
        Raises:
            - CorruptPayload: With ``on_corrupt='stop'``, when it is such an entry's turn.
        """
        lost, duplicates = self.num_lost, self.num_duplicates
        try:
            entries = self.store.read(self.stream, self._cursor, max_entries, timeout_s)
            if self.copied:
                entries = [_copy_of(entry) for entry in entries]
        except CorruptPayload as e:
            self._skip(e)
            entries = []
        self._look_around()
        if entries:
            self._know(entries[0].id.epoch)
        with self._lock:
            new = self._take(entries) if entries else []
            self._losses.count_overdue(self._marks)
            self._drop_departed()
            self._report(self.num_lost - lost, self.num_duplicates - duplicates)
        if entries and self._outstanding is None:
            self.ack()  # Only duplicates: nobody would ack these, and they may be what fills the stream.
        return new

    def ack(self, entry_id: Optional[EntryId] = None, wait: bool = True) -> None:
        """
        Overview:
            Let the store drop what was read, up to and with ``entry_id``: by default all that ``read`` returned.
        Arguments:
            - wait (:obj:`bool`): False for who acks often: see ``Store.ack``.
        """
        with self._done_with(entry_id) as upto:
            self.store.ack(self.stream, self.name, upto, wait)

    def advance(self, entry_id: EntryId, name: str, header: Header) -> None:
        """The same, and tell others by a value; may return before that is done: see ``Store.advance``."""
        with self._done_with(entry_id) as upto:
            self.store.advance(self.stream, self.name, upto, name, header)

    @contextmanager
    def _done_with(self, entry_id: Optional[EntryId]) -> Iterator[EntryId]:
        outstanding = None
        with self._lock:
            if entry_id is None or entry_id == self._outstanding:
                # With the last one returned, the duplicates behind it are done, too: those of a new epoch included.
                outstanding, self._outstanding, entry_id = self._outstanding, None, self._cursor
            elif entry_id.epoch == self._cursor.epoch and entry_id.number > self._cursor.number:
                self._cursor = entry_id  # Taken by a former life of ours: what the store drops now is no loss.
        try:
            yield entry_id
        except StoreError:
            with self._lock:
                self._outstanding = self._outstanding or outstanding  # It will be said again.
            raise

    def lag(self) -> int:
        """How many entries of the stream were not yet looked at."""
        stream = self.store.stream_info(self.stream)
        if stream is None:
            return 0
        seen = self._cursor.number if self._cursor.epoch == stream.epoch else 0
        return max(0, stream.last - max(stream.floor, seen))

    def forget(self) -> bool:
        """Nothing waits for this reader any more; reading again makes it known anew only as a new Reader."""
        self._has_left = True
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
        """How far they are: of those that are behind our cursor, where we are known and go on from that."""
        stream = self.store.stream_info(self.stream)
        if stream is None:
            return {}
        upto = stream.readers.get(self.name, stream.last)
        return {writer: last for writer, last in stream.writers.items() if stream.numbers.get(writer, 0) <= upto}

    def _heads_before(self) -> Dict[str, int]:
        """How far the writers are, in a stream that knows us."""
        stream = self.store.stream_info(self.stream)
        return dict(stream.writers) if stream is not None and self.name in stream.readers else {}

    def _look_around(self) -> None:
        """Remember what writers have appended that we have not read: only so can its loss be counted."""
        if self._losses.is_time_to_look():
            stream = self._seen = self.store.stream_info(self.stream)
            with self._lock:
                self._losses.look(stream, self._cursor, self._marks)
            is_known = stream is None or stream.epoch != self._cursor.epoch or self.name in stream.readers
            if not is_known and not self._has_left:
                self._come_back()

    def _drop_departed(self) -> None:
        """Forget the marks of writers that the server does not know, but for ``MAX_CARRIED`` and more of the latest."""
        stream, self._seen = self._seen, None
        if stream is None or stream.epoch != self._cursor.epoch:
            return
        self._here = set(stream.writers)
        carried = [writer for writer in self._marks if writer not in self._here]
        for writer in carried[: max(0, len(carried) - MAX_CARRIED - self._num_lost_sight)]:
            if not self._losses.is_awaited(writer):
                self._drop(writer)

    def _drop(self, writer: str) -> None:
        self._marks.pop(writer, None)
        self._past.pop(writer, None)
        self._losses.forget(writer)

    def _come_back(self) -> None:
        """Somebody took us for dead. Acks of a reader that is not known make no room, and writers would wait for it."""
        logger.warning('reader %r of %r was forgotten while it lives: it goes on', self.name, self.stream)
        self.store.register(self.stream, self.name, self.durable)
        if self._outstanding is None:
            self.ack()

    def _take(self, entries: List[Entry]) -> List[Entry]:
        self._follow(entries[0].id)
        self._warned_corrupt = False
        for one, following in zip(entries, entries[1:]):  # what was dropped while it was fetched
            self._losses.drop(max(0, following.id.number - max(one.id.number, self._acked) - 1))
        new = [one for one in entries if self._is_new(one) and not self._is_lost(one)]
        self._here.update(one.writer for one in entries)
        self._cursor = entries[-1].id
        self._outstanding = new[-1].id if new else self._outstanding
        return new

    def pass_over(self, error: CorruptPayload) -> None:
        """
        Overview:
            For who finds that an entry that was read is nothing to him: count it, or stop there, as ``on_corrupt`` has
            it.
        Raises:
            - CorruptPayload: The error itself, with ``on_corrupt='stop'``.
        """
        if self.on_corrupt == 'stop':
            raise error
        with self._lock:
            self.num_corrupt += 1
        self._say_corrupt(error)

    def _skip(self, error: CorruptPayload) -> None:
        if self.on_corrupt == 'stop' or error.entry_id is None:
            raise error
        entry_id = error.entry_id if isinstance(error.entry_id, EntryId) else EntryId(*error.entry_id)
        self._know(entry_id.epoch)
        with self._lock:
            if error.writer or entry_id.epoch != self._cursor.epoch:  # Else its number may be nothing of ours either.
                self._follow(entry_id)
            self._cursor = entry_id
            self.num_corrupt += 1
            if error.writer and error.sequence == self._marks.get(error.writer, 0) + 1:
                self._marks[error.writer] = error.sequence
            else:
                self._losses.excuse()  # Not to be believed; but some sequence will be missed.
        self._say_corrupt(error)

    def _say_corrupt(self, error: CorruptPayload) -> None:
        level = logging.DEBUG if self._warned_corrupt else logging.WARNING
        logger.log(level, 'reader %r of %r skips what it cannot read: %s', self.name, self.stream, error)
        self._warned_corrupt = True

    def _follow(self, first: EntryId) -> None:
        """From the cursor to the first entry read: numbers are dense, those in between were dropped before we came."""
        if first.epoch == self._cursor.epoch:
            self._losses.drop(max(0, first.number - max(self._cursor.number, self._acked) - 1))
        else:
            self._losses.begin_epoch(first.epoch, self._cursor, self._marks)
            self._num_lost_sight = max(self._num_lost_sight, len(self._here))
            self._here = set()

    def _know(self, epoch: str) -> None:
        """Entries of this epoch are next. Without the lock, since the server may be waited for."""
        if epoch != self._cursor.epoch:
            # The server lost its memory, perhaps of us too. Numbers missing now may have been acked by us: only
            # sequences tell what is lost.
            place = self.store.register(self.stream, self.name, self.durable)
            self._acked = place.number if place.epoch == epoch else 0

    def _is_new(self, entry: Entry) -> bool:
        writer, sequence = entry.writer, entry.sequence
        seen = self._marks.get(writer)
        if sequence <= max(seen or 0, self._past.get(writer, 0)):
            self.num_duplicates += 1
            return False
        # What a writer sent before we knew it may have been acked by a former life of ours: that is no loss.
        # Nor is what it does not bring any more behind that.
        is_owed = seen is None or seen > self._had_before.get(writer, 0)
        self._losses.miss(writer, seen, sequence, is_owed)
        self._marks.pop(writer, None)  # It is the last from now on.
        self._marks[writer] = sequence
        return True

    def _is_lost(self, entry: Entry) -> bool:
        self._losses.count += entry.is_lost
        return entry.is_lost

    def _report(self, lost: int, duplicates: int) -> None:
        """One line when it begins, not one per read."""
        if lost > 0 and not self._warned_lost:
            logger.warning(
                'reader %r of %r: %d entries were lost (%d in all)', self.name, self.stream, lost, self.num_lost
            )
        if duplicates and not self._warned_duplicates:
            logger.info('reader %r of %r: skipping entries that were announced again', self.name, self.stream)
        self._warned_lost, self._warned_duplicates = lost > 0, bool(duplicates)


def _copy_of(entry: Entry) -> Entry:
    """The entry with arrays of its own, or the fact that it is lost."""
    if entry.guard is None:
        return entry
    arrays = {name: array.copy() for name, array in entry.arrays.items()}
    # Asked after the copy: what was overwritten meanwhile is other entries' bytes.
    if entry.validate():
        return replace(entry, arrays=arrays, guard=None)
    return replace(entry, header={}, arrays={}, guard=None, is_lost=True)
