"""A reader that returns each entry of a stream once, even if writers send entries again after a loss."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Protocol, Set

from ding_store.errors import ConfigError, CorruptPayload, StoreError
from ding_store.storage.base import Entry, EntryId, Header, StreamInfo
from ding_store.storage.exactly_once.losses import Losses

logger = logging.getLogger(__name__)

#: Policies for an entry whose bytes are not what was written.
ON_CORRUPT = ('stop', 'skip')
#: How many marks of absent writers a reader keeps, newest first. After a server lost its memory, the limit grows by
#: the number of writers it had, because they may come back.
MAX_CARRIED = 1024


class ReadableStore(Protocol):
    """The calls of a store that a reader makes: see ``Store``."""

    def read(self, stream: str, after: EntryId, max_entries: int, timeout_s: float) -> List[Entry]: ...

    def register(self, stream: str, reader: str, durable: bool = True, start: str = 'oldest') -> EntryId: ...

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None: ...

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None: ...

    def forget(self, stream: str, reader: str) -> bool: ...

    def stream_info(self, stream: str) -> Optional[StreamInfo]: ...


class Reader:
    """
    Overview:
        A consumer of one stream. It keeps, per writer, the highest sequence number that it has seen: its *marks*. It
        skips entries that are not above them. For exactly-once delivery across crashes, commit the marks together with
        the results of the entries. Then pass them to the next reader of this name. Without marks, a new reader
        continues behind the last ack, and may return unacked entries again.
        One thread at a time reads. Any thread may read ``marks``, ``heads``, ``lag`` and the counts.
    Arguments:
        - durable (:obj:`bool`): If true, retention waits for this reader's acks until ``forget``, also between two
          readers of this name.
        - start (:obj:`str`): Start of a reader that is new to the stream: 'oldest' or 'now'.
        - marks (:obj:`Optional[Mapping]`): writer -> highest sequence seen, from the previous reader of this name.
          Writers that cannot send anything any more may be left out.
        - heads (:obj:`Optional[Mapping]`): ``heads()`` of the previous reader, committed with the marks. Without them,
          entries that the server lost in between are not counted.
        - on_corrupt (:obj:`str`): 'stop': ``read`` raises CorruptPayload at such an entry, at each call. 'skip': the
          entry is counted, logged and left out.
        - loss_grace_s (:obj:`float`): Seconds that writers have to send entries again after the server lost its memory.
          After that, missing entries count as lost.
        - copied (:obj:`bool`): If true, ``read`` copies arrays out of memory that the writer uses again. Needed to keep
          entries of a stream that may drop them unread (``overflow='drop_oldest'``). An entry that was overwritten
          before it was copied counts as lost.
    Attributes:
        - num_lost (:obj:`int`): Entries that were in the stream and never came. A full stream dropped them, or the
          server lost them and their writer had exited. Losses of the server count only up to the last sequences that
          this reader, or the committed ``heads``, had seen. A reader looks once a second.
        - num_duplicates (:obj:`int`): Entries that came again and were skipped.
        - num_corrupt (:obj:`int`): Entries skipped because of ``on_corrupt='skip'``.
        - losses (:obj:`Losses`): What ``num_lost`` is counted from.
    """

    def __init__(
        self,
        store: ReadableStore,
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
        self.losses = Losses(loss_grace_s, heads or {})
        self._lock = threading.Lock()
        self._marks = dict(marks or {})  # in the order in which the writers were last read
        #: Writers that the server has, as far as this reader has seen in this epoch.
        self._here: Set[str] = set()
        #: The highest number of writers that a server had when it lost its memory.
        self._max_writers_at_loss: int = (heads or {}).get('num_lost_sight', 0)
        # Entries from before this reader must not count as new when their writer sends them again.
        self._past = self._writers() if start == 'now' else {}
        # Without marks, entries up to here may have been acked by a previous reader of this name.
        self._had_before = {} if marks else self._heads_before()
        self._cursor = store.register(stream, name, durable, start)
        self._outstanding: Optional[EntryId] = None  # the last entry returned, until it is acked
        self._acked = 0  # this reader's ack that the server still had when this epoch began
        self._has_left = False
        self._seen: Optional[StreamInfo] = None  # the stream at the last look
        self._warned_lost = self._warned_duplicates = self._warned_corrupt = False

    @property
    def marks(self) -> Dict[str, int]:
        """Map of writer -> highest sequence that ``read`` has returned, or skipped as lost or corrupt."""
        with self._lock:
            return dict(self._marks)

    def heads(self, marks: Optional[Mapping[str, int]] = None) -> Dict[str, Any]:
        """
        Overview:
            Return each writer's last sequence that this reader has seen in the stream, for the next reader of its name.
        Arguments:
            - marks (:obj:`Optional[Mapping]`): The marks that are committed with it. Default: all of this reader.
        Returns:
            - heads (:obj:`Dict[str, Any]`): JSON-able.
        """
        with self._lock:
            heads = self.losses.heads(self._cursor, self._marks, self._marks if marks is None else marks)
            return {**heads, 'num_lost_sight': self._max_writers_at_loss}

    @property
    def num_lost(self) -> int:
        return self.losses.count

    @property
    def cursor(self) -> EntryId:
        """The id of the last entry that was read, including skipped ones."""
        return self._cursor

    def read(self, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        """
        Overview:
            Return the next entries that were never seen before, in order. Wait up to ``timeout_s`` for the first. The
            list is also empty if only duplicates came.
        Raises:
            - CorruptPayload: With ``on_corrupt='stop'``, if the next entry is corrupt.
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
            self.losses.count_overdue(self._marks)
            self._drop_departed()
            self._report(self.num_lost - lost, self.num_duplicates - duplicates)
        if entries and self._outstanding is None:
            self.ack()  # Only duplicates came. The caller has nothing to ack, and they may fill the stream.
        return new

    def ack(self, entry_id: Optional[EntryId] = None, wait: bool = True) -> None:
        """
        Overview:
            Acknowledge what was read, up to and including ``entry_id``. Default: all that ``read`` returned.
        Arguments:
            - wait (:obj:`bool`): False: do not wait for the reply. A later call raises its errors: see ``Store.ack``.
        """
        with self._done_with(entry_id) as upto:
            self.store.ack(self.stream, self.name, upto, wait)

    def advance(self, entry_id: EntryId, name: str, header: Header) -> None:
        """Acknowledge up to ``entry_id`` and publish a value, mostly without a wait: see ``Store.advance``."""
        with self._done_with(entry_id) as upto:
            self.store.advance(self.stream, self.name, upto, name, header)

    @contextmanager
    def _done_with(self, entry_id: Optional[EntryId]) -> Iterator[EntryId]:
        outstanding = None
        with self._lock:
            if entry_id is None or entry_id == self._outstanding:
                # An ack of the last returned entry includes the duplicates behind it, also those of a new epoch.
                outstanding, self._outstanding, entry_id = self._outstanding, None, self._cursor
            elif entry_id.epoch == self._cursor.epoch and entry_id.number > self._cursor.number:
                self._cursor = entry_id  # A previous reader got these entries: they are no losses when trimmed now.
        try:
            yield entry_id
        except StoreError:
            with self._lock:
                self._outstanding = self._outstanding or outstanding  # The next ack repeats this one.
            raise

    def lag(self) -> int:
        """Return the number of entries in the stream that this reader has not read yet."""
        stream = self.store.stream_info(self.stream)
        if stream is None:
            return 0
        seen = self._cursor.number if self._cursor.epoch == stream.epoch else 0
        return max(0, stream.last - max(stream.floor, seen))

    def forget(self) -> bool:
        """Remove this reader from the stream, so that it holds no entries. To continue, create a new Reader."""
        self._has_left = True
        return self.store.forget(self.stream, self.name)

    def close(self) -> None:
        """Close the reader: a durable one stays registered with its cursor, an ephemeral one is removed."""
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
        """Return writer -> last sequence, of writers without an entry behind this reader's cursor, if it has one."""
        stream = self.store.stream_info(self.stream)
        if stream is None:
            return {}
        upto = stream.readers.get(self.name, stream.last)
        return {writer: last for writer, last in stream.writers.items() if stream.numbers.get(writer, 0) <= upto}

    def _heads_before(self) -> Dict[str, int]:
        """Return writer -> last sequence if this reader is registered, else nothing."""
        stream = self.store.stream_info(self.stream)
        return dict(stream.writers) if stream is not None and self.name in stream.readers else {}

    def _look_around(self) -> None:
        """Note the last sequence of each writer, once a second: only losses of noted entries can be counted."""
        if self.losses.is_time_to_look():
            stream = self._seen = self.store.stream_info(self.stream)
            with self._lock:
                self.losses.look(stream, self._cursor, self._marks)
            is_known = stream is None or stream.epoch != self._cursor.epoch or self.name in stream.readers
            if not is_known and not self._has_left:
                self._come_back()

    def _drop_departed(self) -> None:
        """Drop the marks of writers that the server does not have, except for the latest (see ``MAX_CARRIED``)."""
        stream, self._seen = self._seen, None
        if stream is None or stream.epoch != self._cursor.epoch:
            return
        self._here = set(stream.writers)
        carried = [writer for writer in self._marks if writer not in self._here]
        for writer in carried[: max(0, len(carried) - MAX_CARRIED - self._max_writers_at_loss)]:
            if not self.losses.is_awaited(writer):
                self._drop(writer)

    def _drop(self, writer: str) -> None:
        self._marks.pop(writer, None)
        self._past.pop(writer, None)
        self.losses.forget(writer)

    def _come_back(self) -> None:
        """Register again after another process removed this reader: acks of an unregistered reader make no room."""
        logger.warning('reader %r of %r was removed while it runs: it registers again', self.name, self.stream)
        self.store.register(self.stream, self.name, self.durable)
        if self._outstanding is None:
            self.ack()

    def _take(self, entries: List[Entry]) -> List[Entry]:
        self._follow(entries[0].id)
        self._warned_corrupt = False
        for one, following in zip(entries, entries[1:]):  # entries between them were dropped during the read
            self.losses.drop(max(0, following.id.number - max(one.id.number, self._acked) - 1))
        new = [one for one in entries if self._is_new(one) and not self._is_lost(one)]
        self._here.update(one.writer for one in entries)
        self._cursor = entries[-1].id
        self._outstanding = new[-1].id if new else self._outstanding
        return new

    def pass_over(self, error: CorruptPayload) -> None:
        """
        Overview:
            Treat an entry that the caller cannot use as corrupt: count it or raise, depending on ``on_corrupt``.
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
            if error.writer or entry_id.epoch != self._cursor.epoch:  # Without a writer, the number may be foreign.
                self._follow(entry_id)
            self._cursor = entry_id
            self.num_corrupt += 1
            if error.writer and error.sequence == self._marks.get(error.writer, 0) + 1:
                self._marks[error.writer] = error.sequence
            else:
                self.losses.excuse()  # The sequence may be corrupt, but one sequence will be missing.
        self._say_corrupt(error)

    def _say_corrupt(self, error: CorruptPayload) -> None:
        level = logging.DEBUG if self._warned_corrupt else logging.WARNING
        logger.log(level, 'reader %r of %r skips what it cannot read: %s', self.name, self.stream, error)
        self._warned_corrupt = True

    def _follow(self, first: EntryId) -> None:
        """Count the entries between the cursor and the first one read: numbers are dense, so these were dropped."""
        if first.epoch == self._cursor.epoch:
            self.losses.drop(max(0, first.number - max(self._cursor.number, self._acked) - 1))
        else:
            self.losses.begin_epoch(first.epoch, self._cursor, self._marks)
            self._max_writers_at_loss = max(self._max_writers_at_loss, len(self._here))
            self._here = set()

    def _know(self, epoch: str) -> None:
        """Register again if the next entries are of a new epoch. It may wait for the server, so it takes no lock."""
        if epoch != self._cursor.epoch:
            # The server lost its memory, perhaps with this reader's registration. This reader may have acked the
            # numbers that are missing now, so only sequences show what is lost.
            place = self.store.register(self.stream, self.name, self.durable)
            self._acked = place.number if place.epoch == epoch else 0

    def _is_new(self, entry: Entry) -> bool:
        writer, sequence = entry.writer, entry.sequence
        seen = self._marks.get(writer)
        if sequence <= max(seen or 0, self._past.get(writer, 0)):
            self.num_duplicates += 1
            return False
        # Without marks, a previous reader of this name may have acked entries up to ``_had_before``. Sequences that are
        # missing directly behind one of these may be acked ones, so they do not count as lost.
        is_owed = seen is None or seen > self._had_before.get(writer, 0)
        self.losses.miss(writer, seen, sequence, is_owed)
        self._marks.pop(writer, None)  # This moves it to the end.
        self._marks[writer] = sequence
        return True

    def _is_lost(self, entry: Entry) -> bool:
        self.losses.count += entry.is_lost
        return entry.is_lost

    def _report(self, lost: int, duplicates: int) -> None:
        """Log when losses or duplicates begin, not at every read."""
        if lost > 0 and not self._warned_lost:
            logger.warning(
                'reader %r of %r: %d entries were lost (%d in all)', self.name, self.stream, lost, self.num_lost
            )
        if duplicates and not self._warned_duplicates:
            logger.info('reader %r of %r: skipping entries that were sent again', self.name, self.stream)
        self._warned_lost, self._warned_duplicates = lost > 0, bool(duplicates)


def _copy_of(entry: Entry) -> Entry:
    """Return the entry with copies of its arrays, or marked as lost if they were overwritten."""
    if entry.guard is None:
        return entry
    arrays = {name: array.copy() for name, array in entry.arrays.items()}
    # The check comes after the copy, which may have read bytes of other entries.
    if entry.validate():
        return replace(entry, arrays=arrays, guard=None)
    return replace(entry, header={}, arrays={}, guard=None, is_lost=True)
