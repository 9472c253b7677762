"""The sending side of a store: an outbox per stream, waiting for room, and sending lost entries again."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from typing import Any, Dict, Iterable, Iterator, List, Optional

from ding_store.errors import (
    AppendUnsettled,
    ServerFull,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    StreamFull,
)
from ding_store.storage.base import Arrays, EntryId, Header
from ding_store.storage.encoding.compression import AUTO, Choice
from ding_store.storage.encoding.framing import encode, encode_pieces
from ding_store.storage.exactly_once.outbox import Outbox, Payload, Refused
from ding_store.storage.options import StoreOptions, StreamOptions
from ding_store.storage.protocol import FreedCapacity, Server

logger = logging.getLogger(__name__)

#: Minimum time that an append waits for the stream's lock. Its holder may be in a round trip or a backfill.
_TURN_S = 1.0
#: After its own deadline, how often an append checks whether the holder of the lock waits for room.
_LOOK_EVERY_S = 0.05
#: Maximum time that ``flush`` and ``close`` wait for the lock of a stream. Its holder may be sending lost entries.
_LAST_TURN_S = 5.0
#: How many more streams, and how many seconds, before the writer looks which of its streams were deleted.
SPARE_STREAMS = 64
FORGET_EVERY_S = 3600.0
#: Deleted streams whose last sequence is kept. A reader that outlived the stream still has a mark of this writer.
MAX_ENDED = 10_000


def writer_id() -> str:
    """Return an id that is unique per open store and process: a forked child must not reuse its parent's numbers."""
    return f'{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}'


class _Lock:
    """
    A lock that records which thread is inside the guarded block (``user``). A thread that a signal kept from releasing
    it can acquire it again.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self.user = 0

    def acquire(self, timeout: float) -> bool:
        me = threading.get_ident()
        if self._lock._is_owned():
            if self.user == me:
                return False
            self._lock.release()
        got: bool = self._lock.acquire(timeout=timeout)
        if got:
            self.user = me
        return got

    def let_go(self) -> None:
        """
        Release the lock if this thread holds it. The caller has reset ``user`` by an assignment, not by a call: signal
        handlers run after calls.
        """
        if self._lock._is_owned():
            self._lock.release()


class StreamWriter:
    """The writer of one stream: its outbox, its lock, and one warning per change of state."""

    def __init__(
        self,
        stream: str,
        options: StreamOptions,
        server: Server,
        start: int,
    ) -> None:
        self.lock = _Lock()
        self.is_dropped = False  # Another stream writer may have replaced it by now.
        self.is_continued = False  # continues the numbers of a dropped stream writer
        self.options = options
        self.may_drop = options.overflow == 'drop_oldest'  # entries that no reader has acked
        self._compression = Choice()
        limits = options.max_pending_bytes, self.may_drop
        self.outbox = Outbox(stream, server.append, *limits, server.backfill, start)
        self.is_waiting = False  # the thread that holds the lock waits for room
        self._dropping = False
        self._num_dropped = 0

    @contextmanager
    def held(self, deadline: float) -> Iterator[None]:
        """Hold the lock within the block, for an append. Raise StoreTimeout if its turn does not come in time."""
        me = threading.get_ident()
        if self.lock.user == me:
            raise StoreError(
                f'append to {self.outbox.stream!r} within an append of this thread. Do not append in a signal handler.'
            )
        turn = max(deadline, time.monotonic() + _TURN_S)
        try:
            while not self.lock.acquire(timeout=self._slice_s(deadline)):
                now = time.monotonic()
                if now >= deadline and (self.is_waiting or now >= turn):
                    what = 'waited for room' if self.is_waiting else 'was appending'
                    raise StoreTimeout(f'append to {self.outbox.stream!r}: another thread {what} until the deadline')
            yield
        finally:
            if self.lock.user == me:
                self.lock.user = 0
            self.lock.let_go()

    @contextmanager
    def tried(self, wait_s: float) -> Iterator[bool]:
        """Try to hold the lock within the block. The value is True if this thread acquired it."""
        me = threading.get_ident()
        was_mine = self.lock.user == me
        try:
            yield self.lock.acquire(timeout=wait_s)
        finally:
            if not was_mine:
                if self.lock.user == me:
                    self.lock.user = 0
                self.lock.let_go()

    def _slice_s(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if self.is_waiting:
            return max(0.0, min(left, threading.TIMEOUT_MAX))
        return min(max(left, _LOOK_EVERY_S), threading.TIMEOUT_MAX)

    def encoded(self, header: Header, arrays: Arrays) -> Payload:
        """Return the payload of an entry for Redis, compressed according to the stream's options."""
        if self.options.compression != AUTO:
            return Payload(encode(header, arrays, self.options.compression))
        # ``encode`` refuses values that are no arrays.
        num_bytes = sum(getattr(array, 'nbytes', 0) for array in arrays.values())
        codec = self._compression.codec(num_bytes)
        if codec is None:
            return Payload(encode(header, arrays))
        pieces = encode_pieces(header, arrays)
        data = pieces.sealed(codec)
        self._compression.note(pieces.num_bytes, len(data))
        return Payload(data)

    def warn_of_drops(self) -> None:
        """Log a warning when the stream begins to drop entries."""
        dropped, self._num_dropped = self.outbox.num_dropped - self._num_dropped, self.outbox.num_dropped
        if dropped > 0 and not self._dropping:
            logger.warning(
                'stream %r is over its max_pending_bytes (%d): dropping the oldest entries (%d so far)',
                self.outbox.stream,
                self.options.max_pending_bytes,
                self.outbox.num_dropped,
            )
        self._dropping = dropped > 0


class Writer:
    """
    Overview:
        The sending side of one open store. Thread-safe. Appends to one stream take turns, so that entries arrive in the
        order of their sequence numbers.
    Attributes:
        - is_closed (:obj:`bool`): Set when the store is closed. Appends that wait for room then raise StoreClosed.
    """

    def __init__(self, options: StoreOptions, server: Server) -> None:
        self.check_every_s = options.check_every_s
        self.is_closed = False
        self._options = options
        self._server = server
        self._stream_writers: Dict[str, StreamWriter] = {}
        self._stream_writers_lock = threading.Lock()
        self._max_streams, self._forgot_at = SPARE_STREAMS, time.monotonic()
        self._ended: Dict[str, int] = {}  # deleted stream -> this writer's last sequence
        self._ended_before = 0  # the highest sequence of streams that are no longer listed
        self._checked_at = time.monotonic()
        self._is_closed_for_writing = False

    def append(self, stream: str, payload: Payload, timeout_s: Optional[float]) -> EntryId:
        """Append one entry: see ``Store.append``."""
        options = self._options.of(stream)
        if payload.size > options.max_pending_bytes:
            raise StreamFull(
                f'one entry of {payload.size} bytes is over max_pending_bytes ({options.max_pending_bytes}) '
                f'of stream {stream!r}'
            )
        deadline = time.monotonic() + (options.max_block_s if timeout_s is None else timeout_s)
        while True:
            stream_writer = self.stream_writer(stream)
            with stream_writer.held(deadline):
                if not stream_writer.is_dropped:
                    is_new = not stream_writer.outbox.has_written
                    place = self._append(stream_writer, payload, deadline)
                    break
        if is_new and self._is_time_to_forget():
            self.forget_deleted()
        return place

    def check(self, now: bool = False) -> None:
        """
        Overview:
            Send again what the server lost, on every stream, if the last check was ``check_every_s`` ago, or ``now``.
            Streams whose lock is taken are skipped: the thread that holds it sends their entries. With several servers,
            streams of one that is away are skipped as well: the caller's own request may have another server.
        """
        if not (now or self.is_check_due):
            return
        self._checked_at = time.monotonic()
        for stream_writer in self._all_stream_writers():
            with self._server.apart(stream_writer.outbox.stream):
                self._check(stream_writer)

    @property
    def is_check_due(self) -> bool:
        """True if the last check was ``check_every_s`` ago."""
        return time.monotonic() - self._checked_at >= self.check_every_s

    def check_stream(self, stream: str, wait_s: float = 0.0) -> None:
        """Check one stream now, and send again what the server lost. Wait for the stream's lock up to ``wait_s``."""
        stream_writer = self._stream_writers.get(stream)
        if stream_writer is not None:
            self._check(stream_writer, wait_s, also_empty=True)

    def ask_for_acks(self, stream: str, wait_s: float) -> None:
        """Release the entries that are acked. Wait up to ``wait_s`` for new acks."""
        stream_writer = self.stream_writer(stream)
        freed = self._wait_for_capacity(stream, stream_writer.outbox.freed, wait_s) if wait_s > 0 else None
        if freed is None or not self._on_freed(stream_writer, freed):
            self.check_stream(stream)

    def encoded(self, stream: str, header: Header, arrays: Arrays) -> Payload:
        """Return the payload of an entry for Redis, compressed according to the stream's options."""
        return self.stream_writer(stream).encoded(header, arrays)

    def options_of(self, stream: str) -> StreamOptions:
        return self.stream_writer(stream).options

    def host_of(self, stream: str) -> str:
        """Return the host of all readers of a stream, by the server's last reply. '': payloads go through Redis."""
        return self.stream_writer(stream).outbox.host

    def transports(self, streams: Iterable[str]) -> Dict[str, int]:
        """Return stream -> number of its transport, by the server's last reply, for streams that had one."""
        stream_writers = {stream: self._stream_writers.get(stream) for stream in streams}
        return {
            stream: stream_writer.outbox.transport
            for stream, stream_writer in stream_writers.items()
            if stream_writer is not None
        }

    def publish(self, wait_s: float) -> bool:
        """
        Overview:
            Send the payloads of all unacked entries to the server, so that they stay readable without this process.
        Returns:
            - done (:obj:`bool`): False if entries are left, as when another thread held a lock for ``wait_s``.
        """
        stream_writers = [
            stream_writer for stream_writer in self._all_stream_writers() if stream_writer.outbox.has_references
        ]
        are_done, error = True, None
        for stream_writer in stream_writers:
            try:
                are_done &= self._publish(stream_writer, wait_s)
            except StoreUnavailable as e:  # Other streams may have another server.
                error = error or e
        if error is not None:
            raise error
        return are_done

    def num_unacked(self, stream: str) -> int:
        stream_writer = self._stream_writers.get(stream)
        return len(stream_writer.outbox) if stream_writer else 0

    @property
    def has_unacked(self) -> bool:
        """True while an entry that must not be dropped is not acked."""
        return any(
            len(stream_writer.outbox) for stream_writer in self._all_stream_writers() if not stream_writer.may_drop
        )

    def flush(self) -> None:
        """
        Overview:
            Send once more the entries that are queued: a full stream may have room again. This waits for a thread that
            is sending them, but not for one that waits for room.
        """
        for stream_writer in self._all_stream_writers():
            if stream_writer.outbox.num_queued:
                self._check(stream_writer, 0.0 if stream_writer.is_waiting else _LAST_TURN_S)

    def close_for_writing(self) -> None:
        """Send nothing more to a stream that was deleted since: see ``Store.close_for_writing``."""
        self._is_closed_for_writing = True

    def close(self, is_kept: bool = False) -> None:
        """
        Overview:
            Send what the server does not have, and leave all streams. Nothing is sent to streams that were deleted
            since: their name may belong to the next run.
        Arguments:
            - is_kept (:obj:`bool`): True if a restarted server still has the entries that it accepted.
        """
        self.close_for_writing()
        for stream_writer in self._all_stream_writers():
            outbox = stream_writer.outbox
            is_away = self._server.availability_of(outbox.stream).is_away  # Any command might start the server again.
            if len(outbox) and not is_away():
                with suppress(StoreError):
                    self._check(stream_writer, _LAST_TURN_S)
            if outbox.num_left:
                logger.warning('closed with %d entries of %r not sent', outbox.num_left, outbox.stream)
            elif len(outbox) and not (is_kept or stream_writer.may_drop) and is_away():
                logger.warning(
                    'closed with %d unacked entries of %r while the server is unreachable: they are lost if it '
                    'restarts without its data',
                    len(outbox),
                    outbox.stream,
                )
            if outbox.may_leave and not is_away():
                with suppress(StoreError):
                    self._server.leave(outbox.stream, outbox.admission)
        with self._stream_writers_lock:
            self._stream_writers = {}  # Payloads may refer to mapped files, which are part of reference cycles.

    def let_go(self, stream: str) -> None:
        """Drop the copies of a stream that this process has deleted, and leave the stream until the next append."""
        stream_writer = self._stream_writers.get(stream)
        if stream_writer is None:
            return
        with stream_writer.tried(0.0) as is_held:
            if is_held and not stream_writer.is_dropped:
                stream_writer.outbox.let_all_go()
                self._drop(stream_writer)

    def _wait_for_capacity(self, stream: str, freed: int, timeout_s: float) -> Optional[FreedCapacity]:
        """Wait in slices: between them, the caller's thread sends again what the server lost."""
        if self.is_closed:
            raise StoreClosed(f'the store was closed while {stream!r} had no room')
        if not self._server.availability.is_nonblocking:
            self.check()
        return self._server.wait_for_capacity(stream, freed, min(timeout_s, self.check_every_s))

    def _is_time_to_forget(self) -> bool:
        return len(self._stream_writers) > self._max_streams or time.monotonic() - self._forgot_at > FORGET_EVERY_S

    def forget_deleted(self) -> None:
        """Drop the state of streams that others deleted. It follows an append, so it must not raise."""
        self._forgot_at = time.monotonic()
        with suppress(StoreError):
            for stream_writer in self._all_stream_writers():
                with self._server.apart(stream_writer.outbox.stream):
                    self._check(stream_writer, also_empty=True)
        self._max_streams = 2 * len(self._stream_writers) + SPARE_STREAMS

    def _drop(self, stream_writer: StreamWriter) -> None:
        """Drop the writer of a deleted stream, unless it has unsent entries. The caller holds its lock."""
        stream = stream_writer.outbox.stream
        if stream_writer.outbox.may_leave:
            self._server.leave(stream, stream_writer.outbox.admission)
        with self._stream_writers_lock:
            if len(stream_writer.outbox) or self._stream_writers.get(stream) is not stream_writer:
                return
            stream_writer.is_dropped = True
            del self._stream_writers[stream]
            self._ended.pop(stream, None)  # Move it to the end of the order.
            self._ended[stream] = stream_writer.outbox.sequence
            while len(self._ended) > MAX_ENDED:
                self._ended_before = max(self._ended_before, self._ended.pop(next(iter(self._ended))))

    def has_stream_writer(self, stream: str) -> bool:
        """Return whether this writer has state for a stream."""
        return stream in self._stream_writers

    def stream_writer(self, stream: str) -> StreamWriter:
        """Return the writer of one stream. The first call makes it."""
        with self._stream_writers_lock:
            if stream not in self._stream_writers:
                start = self._ended.get(stream, self._ended_before)
                stream_writer = StreamWriter(stream, self._options.of(stream), self._server, start)
                stream_writer.is_continued = stream in self._ended
                self._stream_writers[stream] = stream_writer
            return self._stream_writers[stream]

    def _all_stream_writers(self) -> List[StreamWriter]:
        with self._stream_writers_lock:
            return list(self._stream_writers.values())

    def _publish(self, stream_writer: StreamWriter, wait_s: float) -> bool:
        with stream_writer.tried(wait_s) as is_held:
            if not is_held:
                return False
            if stream_writer.is_dropped:
                return True
            stream_writer.outbox.check()
            with suppress(Refused):
                stream_writer.outbox.flush(is_last=True)
            stream_writer.outbox.backfill()
            # In a deleted stream no reader finds a reference.
            return stream_writer.outbox.num_queued == 0 or stream_writer.outbox.is_over

    def _on_freed(self, stream_writer: StreamWriter, freed: FreedCapacity) -> bool:
        with stream_writer.tried(0.0) as is_held:
            return is_held and stream_writer.outbox.on_freed(freed)

    def _check(self, stream_writer: StreamWriter, wait_s: float = 0.0, also_empty: bool = False) -> None:
        if not (also_empty or len(stream_writer.outbox)):
            return
        with stream_writer.tried(wait_s) as is_held:
            if not is_held or stream_writer.is_dropped:
                return
            try:
                stream_writer.outbox.check()
                if stream_writer.outbox.is_over and not len(stream_writer.outbox):
                    self._drop(stream_writer)
                    return
                stream_writer.outbox.flush(is_last=self._is_closed_for_writing)
            except Refused:
                pass  # Entries that were never accepted wait for room. The next append waits with them.
            except ServerFull as e:
                # The call that runs this check did not fail. The next append to this stream raises the error.
                logger.info('stream %r waits for memory: %s', stream_writer.outbox.stream, e)

    def _append(self, stream_writer: StreamWriter, payload: Payload, deadline: float) -> EntryId:
        outbox, options = stream_writer.outbox, stream_writer.options
        if outbox.queued_bytes + payload.size > options.max_pending_bytes:
            raise StreamFull(f'{outbox.num_queued} entries of {outbox.stream!r} already wait for the server to return')
        item = outbox.add(payload)
        try:
            self._bring(stream_writer, deadline)
        except Exception as e:
            is_away = isinstance(e, StoreUnavailable) and not isinstance(e, StoreDenied)
            is_withdrawn = not is_away and outbox.withdraw(item)
            is_closed = isinstance(e, StoreClosed) and not isinstance(e, _Retired)
            if is_withdrawn or is_closed:
                raise
            reason = 'the server may have this entry, so it is kept and sent later: do not append it again'
            raise AppendUnsettled(f'{e or type(e).__name__}; {reason}') from e
        stream_writer.warn_of_drops()
        return EntryId(outbox.epoch, item.number).chained(item.chain)

    def _bring(self, stream_writer: StreamWriter, deadline: float) -> None:
        """Send every queued entry, and wait for room."""
        outbox, options = stream_writer.outbox, stream_writer.options
        if self._is_closed_for_writing and stream_writer.is_continued and not outbox.has_written:
            raise _Retired(f'this process had appended its last to {outbox.stream!r}, which was deleted before')
        is_full = f'stream {outbox.stream!r} holds max_pending_bytes ({options.max_pending_bytes})'
        while True:
            try:
                if self._is_closed_for_writing:
                    outbox.check()  # Unlike an append, this does not create a stream that was deleted.
                outbox.flush(is_last=self._is_closed_for_writing)
                break
            except Refused as refused:
                if time.monotonic() >= deadline:
                    raise StoreTimeout(f'{is_full}: no room was made in time') from None
                stream_writer.is_waiting = True
                try:
                    self._wait_for_capacity(outbox.stream, refused.freed, deadline - time.monotonic())
                finally:
                    stream_writer.is_waiting = False
        if outbox.num_queued:
            raise _Retired(f'cannot append to {outbox.stream!r}: it was retired after close_for_writing()')


class _Retired(StoreClosed):
    """An append to a deleted stream after ``close_for_writing``. The store itself is open."""
