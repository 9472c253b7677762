"""The client of a run's server, the same for every server: it has the writer, and waits in slices."""

from __future__ import annotations

import operator
import time
from contextlib import suppress
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

from ding_store.errors import ConfigError, NotEnoughSpace, StoreClosed, StoreError, StoreUnavailable
from ding_store.storage.base import START, Buffer, EntryId, Header, StoreInfo, StreamInfo
from ding_store.storage.encoding.framing import Pieces
from ding_store.storage.encoding.value_parts import ValuePart
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.exactly_once.writer import Writer, writer_id
from ding_store.storage.options import StoreOptions, check_name
from ding_store.storage.protocol import (
    WAITING,
    Fetch,
    Moved,
    Server,
    StoredEntry,
    Version,
    fetch_own,
    unwatched,
)

#: Time in which close() starts further attempts to reach a lost server, after a first one. No other process can resend
#: this store's unacked entries.
LEAVE_S = 5.0

T = TypeVar('T')


class Client:
    """
    Overview:
        One process's side of a run: the server, and the writer that keeps unacked entries and sends them again. Entries
        and values have encoded payloads here, or references to them.
    Arguments:
        - open_server (:obj:`Callable`): Returns the server for a writer's id.
    """

    def __init__(self, run: str, open_server: Callable[[str], Server], options: StoreOptions) -> None:
        self.run = run
        self.server = open_server(writer_id())
        self.check_every_s = options.check_every_s
        self._writer = Writer(options, self.server)
        self.server.after_reconnect = lambda: self._writer.check(now=True)
        self._closed = False

    def _enter(self, looks_around: bool = True) -> None:
        """Check that the client is open, and regularly resend entries that the server lost."""
        if self._closed:
            raise StoreClosed(f'the store at {self.address} was closed')
        if looks_around and not self.is_nonblocking:
            self._writer.check()

    def _sliced(self, timeout_s: float, ask: Callable[[float], T]) -> T:
        """Call ``ask`` with the seconds that it may wait, until it returns something or the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._enter()
            found = ask(self._slice_s(deadline - time.monotonic()))
            if found or time.monotonic() >= deadline:
                return found

    def _slice_s(self, timeout_s: float) -> float:
        return max(0.0, min(timeout_s, self.check_every_s))

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def patience_s(self) -> float:
        """Seconds that a reader waits for a writer's backfill."""
        return self.server.patience_s

    @property
    def num_sessions(self) -> int:
        """Number of connections to the server so far: it grows after each outage."""
        return self.server.availability.num_sessions

    @property
    def own_writer(self) -> Writer:
        """The writing side of this process."""
        # An append reads this before it keeps its entry. If no server is reachable then, the append must still keep it.
        self._enter(looks_around=False)
        return self._writer

    # Waits

    @property
    def is_away(self) -> bool:
        return self.server.availability.is_away()

    @property
    def is_nonblocking(self) -> bool:
        """True if this thread is inside ``nonblocking``."""
        return self.server.availability.is_nonblocking

    def nonblocking(self) -> ContextManager[None]:
        return self.server.availability.nonblocking()

    def leaving(self) -> ContextManager[None]:
        """Wait only some seconds in all for an unreachable server: what this thread sends is also in files."""
        return self.server.availability.leaving(LEAVE_S)

    def held(self, lock: ContextManager[Any]) -> ContextManager[Any]:
        """Hold a lock. Inside ``nonblocking``, do not wait for a holder that waits for the server."""
        return self.server.availability.held(lock)

    # Streams

    def append_payload(self, stream: str, payload: Payload, timeout_s: Optional[float] = None) -> EntryId:
        """Append an encoded payload, see ``append``. ``payload.is_kept`` is set if the store releases it itself."""
        check_name('stream', stream)
        self.check_size(f'entry of {stream!r}', payload.size)
        self._enter(looks_around=False)
        with self.server.availability.one_wait():
            place = self._writer.append(stream, payload, timeout_s)
        # After the append: an append that reaches no server reports the fate of its entry and has waited enough.
        if not self.is_nonblocking:
            with suppress(StoreError), self.nonblocking():
                self._writer.check()
        return place

    def check_size(self, what: str, num_bytes: int) -> None:
        """
        Overview:
            Check that a payload of this size could be sent to another host.
        Raises:
            - NotEnoughSpace: The payload is larger than the server's limit.
        """
        limit = self.server.max_payload_bytes
        if num_bytes > limit:
            raise NotEnoughSpace(f'{what} has {num_bytes} bytes, and the limit is {limit}. Split it.')

    def read_records(
        self, stream: str, after: EntryId, max_entries: int, timeout_s: float, fetch: Fetch = fetch_own
    ) -> List[StoredEntry]:
        """Read entries without decoding them, see ``read``. ``fetch`` downloads payloads outside the records."""
        check_name('stream', stream)
        self._enter()
        self.server.flush()
        return self._sliced(timeout_s, lambda left_s: self.server.read(stream, after, max_entries, left_s, fetch))

    def wait_for_backfill(
        self, stream: str, record: StoredEntry, timeout_s: float, fetch: Fetch = fetch_own
    ) -> Optional[Buffer]:
        """Return the backfilled payload of an entry. Wait up to ``timeout_s`` while it may still come."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._enter()
            found = self.server.read_backfill(stream, record, fetch)
            if found.fate != WAITING or time.monotonic() >= deadline:
                return found.payload
            self._enter()
            self.server.wait_for_capacity(stream, found.freed, self._slice_s(deadline - time.monotonic()))

    def fate_of(self, stream: str, record: StoredEntry) -> str:
        """Return the state of an entry that holds a reference, see ``protocol.fate``."""
        self._enter()
        return self.server.read_backfill(stream, record).fate

    def want(self, stream: str) -> None:
        """Request a backfill of all references that the stream's writers have appended until now."""
        check_name('stream', stream)
        self._enter()
        self.server.request_backfills(stream)

    def wait_for_transports(self, known: Mapping[str, int], timeout_s: float) -> None:
        """Return when a stream's transport is not the known one, when the time is over, or sooner."""
        self._enter()
        self.server.wait_for_transports(known, self._slice_s(timeout_s))

    def register_at(
        self, stream: str, reader: str, durable: bool = True, start: str = 'oldest', host: str = ''
    ) -> EntryId:
        """Register a reader that can map the files of ``host``, see ``register``."""
        check_name('reader', reader)
        if start not in START:
            raise ConfigError(f'start ({start!r}) must be one of {", ".join(START)}')
        check_name('stream', stream)
        self._enter()
        return self.server.register_reader(stream, reader, durable, start, host)

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        check_name('stream', stream)
        self._enter()
        self.server.ack(stream, reader, entry_id, wait)

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None:
        check_name('stream', stream)
        check_name('value', name)
        self._enter()
        self.server.advance(stream, reader, entry_id, name, header)

    def forget(self, stream: str, reader: str) -> bool:
        check_name('stream', stream)
        self._enter()
        return self.server.unregister_reader(stream, reader)

    def flush(self) -> None:
        self._enter()
        self.server.flush()
        self._writer.flush()

    def stream_info(self, stream: str) -> Optional[StreamInfo]:
        check_name('stream', stream)
        self._enter()
        return self.server.stream_info(stream)

    # Values

    def put_version(
        self, name: str, payload: Optional[Pieces], reference: bytes, expected_version: Optional[int] = None
    ) -> int:
        """Publish a new version, see ``put``, from an encoded payload, a reference to it, or both."""
        check_name('value', name)
        self.check_size(f'value {name!r}', payload.num_bytes if payload is not None else 0)
        self._enter()
        return self.server.put(name, payload, reference, expected_version)

    def get_version(
        self, name: str, newer_than: int, timeout_s: float = 0.0, or_filled: bool = False
    ) -> Optional[Version]:
        """Return the newest version, see ``get``. With ``or_filled``, return ``newer_than`` once it has a payload."""
        check_name('value', name)
        return self._sliced(timeout_s, lambda left_s: self.server.get(name, newer_than, left_s, or_filled))

    def set_start_version(self, name: str, version: int) -> None:
        check_name('value', name)
        self._enter(looks_around=False)
        self.server.versions.raise_to(name, version)

    def fetch_parts(self, name: str, wanted: Sequence[Tuple[ValuePart, memoryview]], moved: Moved = unwatched) -> bool:
        """Download parts of a version into their buffers and verify their checksums. Return False if one is missing."""
        self._enter()
        return self.server.fetch_parts(name, wanted, moved)

    def backfill_version(self, name: str, version: int, payload: Pieces) -> bool:
        """Add the payload to a version that is only a reference. Return False if it is no longer the newest version."""
        self.check_size(f'value {name!r}', payload.num_bytes)
        self._enter()
        return self.server.backfill_version(name, version, payload)

    def request_version(self, name: str) -> None:
        """Request that the value's writer backfills its newest version and all later ones."""
        self._enter()
        self.server.request_version(name)

    def wait_for_requests(self, known: Mapping[str, str], timeout_s: float) -> Dict[str, str]:
        """See ``Server.wait_for_requests``."""
        self._enter()
        return self.server.wait_for_requests(known, self._slice_s(timeout_s))

    # Everything else

    def add(self, counter: str, amount: int = 0) -> int:
        check_name('counter', counter)
        amount = operator.index(amount)  # accepts numpy integers
        self._enter()
        return self.server.add(counter, amount)

    def delete(self, name: str) -> bool:
        check_name('stream', name)
        self._enter()
        existed = self.server.delete(name)
        self._writer.let_go(name)
        return existed

    def info(self) -> StoreInfo:
        self._enter()
        return self.server.info()

    # The end

    def close_for_writing(self) -> None:
        self._writer.close_for_writing()

    def close(self) -> None:
        was_closed, self._closed = self._closed, True
        if not was_closed:
            self._writer.is_closed = True
            self._send_last(self.server.finish())
            self.server.close()

    def _send_last(self, error: Optional[StoreError]) -> None:
        """
        Overview:
            Resend unacked entries that the server may have lost, if it can be reached, and close the writer.
        Arguments:
            - error (:obj:`Optional[StoreError]`): The error that kept earlier commands from finishing, if any.
        """
        availability, is_kept = self.server.availability, self.server.keeps_data  # No need to start such a server.
        has_unacked = self._writer.has_unacked and not is_kept
        if has_unacked and error is None:
            error = self._ask_last()
        has_hung = error is not None and availability.has_hung(error)  # It has waited already.
        if error is not None and not (is_kept or has_hung) and availability.is_away():
            with suppress(StoreError):
                availability.reach('close', LEAVE_S if has_unacked else 0.0)
        with availability.nonblocking():
            self._writer.close(availability.is_away, is_kept)

    def _ask_last(self) -> Optional[StoreError]:
        """Check the writer's entries once: an idle connection may not show a lost server. Return the error, if any."""
        if self.is_away:
            return StoreUnavailable(f'{self.address} is away')
        self._writer.close_for_writing()
        try:
            with self.nonblocking():
                self._writer.check(now=True)
        except StoreError as e:
            return e
        return None
