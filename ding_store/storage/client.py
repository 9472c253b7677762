"""The client of a run's server, the same for every server: it has the writer, and waits in slices."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Callable, List, Optional, TypeVar

from ding_store.errors import NotEnoughSpace, StoreClosed, StoreError, StoreUnavailable
from ding_store.storage.base import Buffer, EntryId
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.exactly_once.writer import Writer, writer_id
from ding_store.storage.options import StoreOptions
from ding_store.storage.protocol import WAITING, Fetch, Server, StoredEntry, Version, fetch_own

#: Time in which close() starts further attempts to reach a lost server, after a first one. No other process can resend
#: this store's unacked entries.
LEAVE_S = 5.0

T = TypeVar('T')


class Client:
    """
    Overview:
        One process's side of a run: the server, and the writer that keeps unacked entries and sends them again. Entries
        and values have encoded payloads here, or references to them. Commands that need nothing else are called on the
        server that ``enter`` returns.
    Arguments:
        - open_server (:obj:`Callable`): Returns the server for a writer's id.
    """

    def __init__(self, run: str, open_server: Callable[[str], Server], options: StoreOptions) -> None:
        self.run = run
        self.server = open_server(writer_id())
        self.availability = self.server.availability
        self.check_every_s = options.check_every_s
        self._writer = Writer(options, self.server)
        self.server.after_reconnect = lambda: self._writer.check(now=True)
        self._closed = False

    def enter(self, looks_around: bool = True) -> Server:
        """Check that the client is open, and regularly resend entries that the server lost. Return the server."""
        if self._closed:
            raise StoreClosed(f'the store at {self.server.address} was closed')
        if looks_around and not self.availability.is_nonblocking:
            self._writer.check()
        return self.server

    @property
    def own_writer(self) -> Writer:
        """The writing side of this process."""
        # An append reads this before it keeps its entry. If no server is reachable then, the append must still keep it.
        self.enter(looks_around=False)
        return self._writer

    def append(self, stream: str, payload: Payload, timeout_s: Optional[float] = None) -> EntryId:
        """Append an encoded payload: see ``Store.append``. If ``payload.is_kept`` is set, the writer releases it."""
        self.check_size(f'entry of {stream!r}', payload.size)
        with self.server.availability_of(stream).one_wait():
            place = self.own_writer.append(stream, payload, timeout_s)
        # After the append: an append that reaches no server reports the fate of its entry and has waited enough.
        if self._writer.is_check_due and not self.availability.is_nonblocking:
            with suppress(StoreError), self.availability.nonblocking():
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

    def read(
        self, stream: str, after: EntryId, max_entries: int, timeout_s: float, fetch: Fetch = fetch_own
    ) -> List[StoredEntry]:
        """Read entries without decoding them: see ``Store.read``. ``fetch`` downloads payloads outside the entries."""
        return self._sliced(timeout_s, lambda left_s: self.server.read(stream, after, max_entries, left_s, fetch))

    def wait_for_backfill(
        self, stream: str, record: StoredEntry, timeout_s: float, fetch: Fetch = fetch_own
    ) -> Optional[Buffer]:
        """Return the backfilled payload of an entry. Wait up to ``timeout_s`` while it may still come."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.enter().read_backfill(stream, record, fetch)
            if found.fate != WAITING or time.monotonic() >= deadline:
                return found.payload
            self.enter().wait_for_capacity(stream, found.freed, self._slice_s(deadline - time.monotonic()))

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0, or_filled: bool = False) -> Optional[Version]:
        """Return the newest version as the server has it: see ``Store.get``, and ``Server.get`` for ``or_filled``."""
        return self._sliced(timeout_s, lambda left_s: self.server.get(name, newer_than, left_s, or_filled))

    def flush(self) -> None:
        self.enter().flush()
        self._writer.flush()

    def delete(self, name: str) -> bool:
        existed = self.enter().delete(name)
        self._writer.let_go(name)
        return existed

    def _sliced(self, timeout_s: float, ask: Callable[[float], T]) -> T:
        """Call ``ask`` with the seconds that it may wait, until it returns something or the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.enter()
            found = ask(self._slice_s(deadline - time.monotonic()))
            if found or time.monotonic() >= deadline:
                return found

    def _slice_s(self, timeout_s: float) -> float:
        return max(0.0, min(timeout_s, self.check_every_s))

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
        availability, is_kept = self.availability, self.server.keeps_data  # No need to start such a server.
        has_unacked = self._writer.has_unacked and not is_kept
        if has_unacked and error is None:
            error = self._ask_last()
        has_hung = error is not None and availability.has_hung(error)  # It has waited already.
        if error is not None and not (is_kept or has_hung) and availability.is_away():
            with suppress(StoreError):
                availability.reach('close', LEAVE_S if has_unacked else 0.0)
        with availability.nonblocking():
            self._writer.close(is_kept)

    def _ask_last(self) -> Optional[StoreError]:
        """Check the writer's entries once: an idle connection may not show a lost server. Return the error, if any."""
        if self.availability.is_away():
            return StoreUnavailable(f'{self.server.address} is away')
        self._writer.close_for_writing()
        try:
            with self.availability.nonblocking():
                self._writer.check(now=True)
        except StoreError as e:
            return e
        if self.availability.is_away():  # one of several servers, which the check has skipped
            return StoreUnavailable(f'{self.server.address} is away')
        return None
