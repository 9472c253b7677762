"""One partition of the experience, as its learner reads it: the reader, the thread that reads ahead, and the acks."""

from __future__ import annotations

import time
from typing import Any, Dict, Optional, Tuple

from ding_store.errors import ServerFull
from ding_store.middleware.backpressure import ProgressWriter
from ding_store.middleware.chunks import ChunkWriter
from ding_store.middleware.consumer_offset import ConsumerOffset
from ding_store.middleware.partitions import progress_name_of
from ding_store.middleware.read_ahead import ReadAhead
from ding_store.run.several_learners import stream_of
from ding_store.run.waiting import LOOK_EVERY_S, SLICE_S
from ding_store.storage.base import EntryId
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store

LEARNER_READER = 'learner'


class Feed:
    """
    Overview:
        Reads one partition for its learner. Acks and progress are kept until ``send_ack``, as the store may be away.
    Arguments:
        - partition (:obj:`int`), num (:obj:`int`): Number of the partition from 0 on, and of all partitions of the run.
        - offset (:obj:`Optional[ConsumerOffset]`): Which entries were taken. None: none.
    Attributes:
        - reader (:obj:`Reader`), read_ahead (:obj:`ReadAhead`): From ``open`` and from ``start`` on.
    """

    reader: Reader
    read_ahead: ReadAhead

    def __init__(self, store: Store, partition: int = 0, num: int = 1, offset: Optional[ConsumerOffset] = None) -> None:
        self.stream, self._progress = stream_of(partition, num), progress_name_of(partition, num)
        self.offset = offset or ConsumerOffset()
        self._store = store
        self._writer = ProgressWriter(self._progress)
        self._unpublished: Optional[Tuple[EntryId, Dict[str, Any]]] = None  # the ack and progress that are not sent yet
        self._published: Optional[Dict[str, Any]] = None  # the progress of the last put
        self._looked_at = 0.0
        self._num_skipped = 0  # corrupt and lost entries that were acknowledged

    def open(self, **options: Any) -> None:
        """Begin to read after the entries taken. ``options`` are those of ``Reader``."""
        self.reader = self.offset.reader(self._store, self.stream, LEARNER_READER, **options)

    def start(self, **options: Any) -> None:
        """Read ahead from now on. ``options`` are those of ``ReadAhead``."""
        self.read_ahead = ReadAhead(self.reader, **options)

    def keep_ack(self, ingested: EntryId, counts: Dict[str, int]) -> None:
        """Keep the ack of all entries up to this one, and the progress, for ``send_ack``."""
        self._unpublished = ingested, {'ingested': list(ingested), **counts}

    def send_ack(self) -> None:
        """
        Send the last ack and progress, without waiting for the reply. The message wakes every collector, and with few
        cores they would run before the learner.
        """
        if self._unpublished is not None:
            ingested, progress = self._unpublished
            self._writer.publish(self.reader, ingested, progress)
            self._unpublished, self._published = None, progress

    def passed_over(self) -> Optional[EntryId]:
        """
        Return the place up to which skipped or lost entries can be acknowledged, once for each of them: no chunk does
        that for them, and their writers may wait for it. None: there is nothing to acknowledge.
        """
        skipped = self.reader.num_corrupt + self.reader.num_lost
        passed = None if skipped == self._num_skipped else self.read_ahead.passed()
        if passed is not None:
            self._num_skipped = skipped
        return passed

    def restore_progress(self) -> None:
        """Put the progress again if the server lost it. Collectors that wait for it may be the only source of rows."""
        now = time.monotonic()
        if self._published is None or now < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = now
        newest = self._store.get(self._progress)
        if newest is None or newest.header.get('ingested') != self._published['ingested']:
            self._store.put(self._progress, self._published, {})

    def end_of_stream(self) -> None:
        """Wake the thread, which sleeps until an entry arrives, by an entry without rows."""
        header = dict(kind='trajectories', env_step=0, env_episode=0, end_idx=[])
        try:
            ChunkWriter(self._store, self.stream).write([], header, timeout_s=SLICE_S)
        except (TimeoutError, ServerFull):
            pass  # the stream is full, so its entries wake the thread
