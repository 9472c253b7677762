"""A store in this process's memory: for tests, single-process jobs, and as the reference for other backends."""

from __future__ import annotations

import copy
import operator
import os
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterator, List, Mapping, NoReturn, Optional, Sequence, Tuple

from ding_store.errors import ConfigError, StoreClosed
from ding_store.storage.base import OLDEST, START, Arrays, Entry, EntryId, Header, StoreInfo, Value, ValueVersion
from ding_store.storage.encoding.compression import AUTO
from ding_store.storage.encoding.framing import Pieces, encode_pieces
from ding_store.storage.encoding.value_parts import ValuePart
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.exactly_once.writer import Writer, writer_id
from ding_store.storage.memory.log import Log
from ding_store.storage.options import (
    STORE_OPTIONS,
    StoreOptions,
    StreamOptions,
    check_name,
    refuse_rest,
    stream_options,
)
from ding_store.storage.protocol import (
    WAITING,
    AppendReply,
    AppendRequest,
    Backfill,
    Fetch,
    FreedCapacity,
    Moved,
    Version,
    conflict,
    fate,
    fetch_own,
    unwatched,
)
from ding_store.storage.protocol import StoredEntry as Found
from ding_store.storage.shared_memory.transports import Resolver, TransportStore
from ding_store.storage.shared_memory.value_resolver import ValueResolver


@dataclass
class State:
    """Everything that a server would keep on its disk."""

    logs: Dict[str, Log] = field(default_factory=dict)
    values: Dict[str, Version] = field(default_factory=dict)
    wants: Dict[str, int] = field(default_factory=dict)  # value -> number of requests for its payload
    counters: Dict[str, int] = field(default_factory=dict)


class Memory:
    """The server of a process's stores: the state, and a condition that is notified at every change."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.state = State()
        self.pid = os.getpid()

    def log(self, stream: str) -> Log:
        log = self.state.logs.setdefault(stream, Log(deleted=True))
        log.epoch = log.epoch or uuid.uuid4().hex
        return log

    def restart(self, state: State) -> None:
        """Set the state and begin a new epoch in every stream: other entries may get the numbers of lost ones."""
        self.state = copy.deepcopy(state)
        for log in self.state.logs.values():
            log.epoch = uuid.uuid4().hex

    def go_back(self, state: State) -> None:
        """Set the state to an earlier ``snapshot()`` without a new epoch, for tests."""
        with self.changed:
            self.state = copy.deepcopy(state)
            self.changed.notify_all()


class MemoryStore(TransportStore):
    """
    Overview:
        The store of ``memory://``. Each opened store has its own memory. ``another()`` opens a second store on it.
    Arguments:
        - options: The fields of ``options.StreamOptions``, ``stream_options`` and ``check_every_s``.
    """

    def __init__(self, url: str = 'memory://', run: str = 'default', memory: Optional[Memory] = None, **options: Any):
        if url != 'memory://':
            raise ConfigError(f'{url!r}: a memory store has no address; use "memory://"')
        self.run = check_name('run', run, slashes=False)
        self.address = url
        self.writer = writer_id()
        self._options = dict(options)
        self._memory = memory or Memory()
        self._closed = False
        self._versions: Dict[str, int] = {}  # of the values that this store wrote
        self._writer = Writer(
            _without_auto(stream_options(options)),
            self._send_request,
            self._wait_for_capacity,
            self._backfill,
            self._leave,
        )
        self._resolver = Resolver(self)
        self._value_resolver = ValueResolver(self)
        refuse_rest('memory', options, STORE_OPTIONS)

    def another(self, **options: Any) -> MemoryStore:
        """Open a second store on the same memory, with its own writer, as another process would."""
        return MemoryStore(self.address, self.run, self._memory, **{**self._options, **options})

    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId:
        check_name('stream', stream)
        return self.append_payload(stream, self._writer.encoded(stream, header, arrays), timeout_s)

    def append_payload(self, stream: str, payload: Payload, timeout_s: Optional[float] = None) -> EntryId:
        check_name('stream', stream)
        self._enter()
        return self._writer.append(stream, payload, timeout_s)

    def read(self, stream: str, after: EntryId = OLDEST, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        return self._resolver.read(stream, after, max_entries, timeout_s)

    def read_records(
        self, stream: str, after: EntryId, max_entries: int, timeout_s: float, fetch: Fetch = fetch_own
    ) -> List[Found]:
        check_name('stream', stream)
        self._wait(lambda: self._has_after(stream, after), timeout_s)
        with self._memory.changed:
            log = self._memory.log(stream)
            first = log.behind(after) + 1
            numbers = range(first, min(log.last, first + max_entries - 1) + 1)
            found = [(EntryId(log.epoch, number), log.records[number]) for number in numbers]
        return [
            Found(place.chained(record.chain), record.writer, record.sequence, record.payload)
            for place, record in found
        ]

    def register(self, stream: str, reader: str, durable: bool = True, start: str = 'oldest') -> EntryId:
        return self.register_at(stream, reader, durable, start)

    def register_at(
        self, stream: str, reader: str, durable: bool = True, start: str = 'oldest', host: str = ''
    ) -> EntryId:
        check_name('reader', reader)
        if start not in START:
            raise ConfigError(f'start ({start!r}) must be one of {", ".join(START)}')
        with self._change(stream) as log:
            return log.register(reader, durable, start, host)

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        with self._change(stream) as log:
            log.ack(reader, entry_id)

    def forget(self, stream: str, reader: str) -> bool:
        with self._change(stream) as log:
            return log.forget(reader)

    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        check_name('value', name)
        return self.put_version(name, encode_pieces(header, arrays), b'', expected_version)

    def put_version(
        self, name: str, payload: Optional[Pieces], reference: bytes, expected_version: Optional[int] = None
    ) -> int:
        check_name('value', name)
        self._enter()
        with self._memory.changed:
            state = self._memory.state
            stored = state.values[name].version if name in state.values else ValueVersion(0)
            if expected_version is not None and stored.is_of_another_put(expected_version):
                raise conflict(name, stored, expected_version)
            version = ValueVersion(max(stored, self._versions.get(name, 0)) + 1, uuid.uuid4().hex)
            self._versions[name] = version
            state.values[name] = Version(version, payload.sealed() if payload is not None else b'', reference)
            if not payload and name in state.wants:
                state.wants[name] += 1
            self._memory.changed.notify_all()
        return version

    def set_start_version(self, name: str, version: int) -> None:
        check_name('value', name)
        with self._memory.changed:
            self._versions[name] = max(version, self._versions.get(name, 0))

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        return self._value_resolver.get(name, newer_than, timeout_s)

    def get_version(
        self, name: str, newer_than: int, timeout_s: float = 0.0, or_filled: bool = False
    ) -> Optional[Version]:
        check_name('value', name)

        def news() -> Optional[Version]:
            found = self._memory.state.values.get(name)
            is_news = found and (found.version.is_of_another_put(newer_than) or (or_filled and found.payload))
            return found if is_news else None

        self._wait(lambda: news() is not None, timeout_s)
        with self._memory.changed:
            return news()

    def fetch_parts(self, name: str, wanted: Sequence[Tuple[ValuePart, memoryview]], moved: Moved = unwatched) -> bool:
        return False  # No payload has parts.

    def backfill_version(self, name: str, version: int, payload: Pieces) -> bool:
        self._enter()
        with self._memory.changed:
            found = self._memory.state.values.get(name)
            if found is None or found.version.is_of_another_put(version) or found.payload:
                return False
            self._memory.state.values[name] = found._replace(payload=payload.sealed())
            self._memory.changed.notify_all()
        return True

    def request_version(self, name: str) -> None:
        self._enter()
        with self._memory.changed:
            self._memory.state.wants[name] = self._memory.state.wants.get(name, 0) + 1
            self._memory.changed.notify_all()

    def wait_for_requests(self, known: Mapping[str, str], timeout_s: float) -> Dict[str, str]:
        def wants() -> Dict[str, str]:
            return {name: str(self._memory.state.wants.get(name, '')) for name in known}

        self._wait(lambda: wants() != dict(known), timeout_s, 1)
        with self._memory.changed:
            return wants()

    def add(self, counter: str, amount: int = 0) -> int:
        check_name('counter', counter)
        amount = operator.index(amount)  # also accepts integers of numpy
        self._enter()
        with self._memory.changed:
            counters = self._memory.state.counters
            counters[counter] = counters.get(counter, 0) + amount
            return counters[counter]

    def delete(self, name: str) -> bool:
        check_name('value', name)
        with self._change(name) as log:
            state = self._memory.state
            found = [log.delete(), state.values.pop(name, None) is not None, state.counters.pop(name, None) is not None]
            state.wants.pop(name, None)
        self._writer.let_go(name)
        return any(found)

    def info(self) -> StoreInfo:
        self._enter()
        with self._memory.changed:
            state = self._memory.state
            streams = {stream: log.info() for stream, log in state.logs.items() if not log.deleted}
            values = {name: int(found.version) for name, found in state.values.items()}
            return StoreInfo(self.address, self.run, 'memory', streams, values, dict(state.counters))

    def close(self) -> None:
        if not self._closed:
            self._writer.close(lambda: self.is_away)
            self._closed = True
        if os.getpid() == self._memory.pid:
            with self._memory.changed:
                self._memory.changed.notify_all()

    def flush(self) -> None:
        self._enter()
        self._writer.flush()

    def close_for_writing(self) -> None:
        self._writer.close_for_writing()

    def snapshot(self) -> State:
        """Return what a server's disk would hold now, for tests."""
        with self._memory.changed:
            return copy.deepcopy(self._memory.state)

    def lose_memory(self, keep: Optional[State] = None) -> None:
        """Restart the server without data, or with those of an earlier ``snapshot()``, for tests."""
        with self._memory.changed:
            self._memory.restart(keep or State())
            self._memory.changed.notify_all()

    def __reduce__(self) -> NoReturn:
        raise ConfigError('memory:// cannot be sent to another process: open embedded:// or redis:// in both instead')

    @property
    def own_writer(self) -> Writer:
        return self._writer

    def want(self, stream: str) -> None:
        with self._change(stream) as log:
            log.set_transport(log.host)

    def wait_for_backfill(
        self, stream: str, record: Found, timeout_s: float, fetch: Fetch = fetch_own
    ) -> Optional[bytes]:
        self._wait(lambda: self.fate_of(stream, record) != WAITING, timeout_s)
        with self._memory.changed:
            return self._memory.log(stream).filled.get(record.id.number)

    def fate_of(self, stream: str, record: Found) -> str:
        with self._memory.changed:
            log = self._memory.log(stream)
            log.behind(record.id)  # This begins a new epoch if another entry has its number by now.
            is_over, is_held = record.id.epoch != log.epoch, record.id.number > log.floor
            is_filled = record.id.number in log.filled
            return fate(is_over, is_held, is_filled, record.sequence, log.bases.get(record.writer, 0))

    def wait_for_transports(self, known: Mapping[str, int], timeout_s: float) -> None:
        self._wait(
            lambda: any(self._memory.log(stream).transport != transport for stream, transport in known.items()),
            timeout_s,
            1,
        )

    def _backfill(self, request: Backfill) -> None:
        with self._change(request.stream) as log:
            log.backfill(self.writer, request)

    def _leave(self, stream: str, admission: int) -> None:
        with self._change(stream) as log:
            log.leave(self.writer, admission)

    def _send_request(self, request: AppendRequest) -> AppendReply:
        with self._change(request.stream) as log:
            return log.handle_request(self.writer, request)

    def _wait_for_capacity(self, stream: str, freed: int, timeout_s: float) -> Optional[FreedCapacity]:
        self._wait(lambda: self._memory.log(stream).freed > freed, timeout_s, slices=1)
        with self._memory.changed:
            log = self._memory.log(stream)
            return FreedCapacity(log.freed, log.epoch, log.floor, log.floor_chain)

    def _has_after(self, stream: str, after: EntryId) -> bool:
        log = self._memory.log(stream)
        return log.last > log.behind(after)

    def _wait(self, true: Callable[[], bool], timeout_s: float, slices: int = sys.maxsize) -> bool:
        """Wait for ``true()`` in slices. Between them, the waiting thread sends again what the server lost."""
        deadline = time.monotonic() + timeout_s
        for _ in range(slices):
            self._enter()
            self._writer.check()
            slice_s = min(self._writer.check_every_s, deadline - time.monotonic())
            with self._memory.changed:
                found = self._memory.changed.wait_for(lambda: self._closed or true(), max(0.0, slice_s))
            if found or time.monotonic() >= deadline:
                break
        self._enter()
        return found

    @contextmanager
    def _change(self, stream: str) -> Iterator[Log]:
        check_name('stream', stream)
        self._enter()
        with self._memory.changed:
            yield self._memory.log(stream)
            self._memory.changed.notify_all()

    def _enter(self) -> None:
        if os.getpid() != self._memory.pid:
            raise StoreClosed(
                f'memory:// belongs to process {self._memory.pid} and cannot be used in process {os.getpid()}: '
                'open embedded:// or redis:// in both instead'
            )
        if self._closed:
            raise StoreClosed(f'the store of run {self.run!r} was closed')


def _without_auto(options: StoreOptions) -> StoreOptions:
    """Replace the compression 'auto' by None: compression costs more time than it saves where no network is."""

    def without(stream: StreamOptions) -> StreamOptions:
        return replace(stream, compression=None) if stream.compression == AUTO else stream

    streams = {name: without(stream) for name, stream in options.streams.items()}
    return replace(options, common=without(options.common), streams=streams)
