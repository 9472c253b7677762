"""A server in this process's memory: for tests, for jobs of one process, and the oracle of the Redis server."""

from __future__ import annotations

import copy
import os
import threading
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ding_store.errors import StoreClosed
from ding_store.storage.base import EntryId, StoreInfo, ValueVersion
from ding_store.storage.encoding.framing import Pieces
from ding_store.storage.encoding.value_parts import ValuePart
from ding_store.storage.memory.log import Log
from ding_store.storage.protocol import (
    FILLED,
    AppendReply,
    AppendRequest,
    Backfill,
    Backfilled,
    Fetch,
    FreedCapacity,
    Moved,
    Server,
    StoredEntry,
    Version,
    conflict,
    fate,
    fetch_own,
    unwatched,
)


@dataclass
class State:
    """Everything that a server would keep on its disk."""

    logs: Dict[str, Log] = field(default_factory=dict)
    values: Dict[str, Version] = field(default_factory=dict)
    wants: Dict[str, int] = field(default_factory=dict)  # value -> number of requests for its payload
    counters: Dict[str, int] = field(default_factory=dict)


class Memory:
    """The state of a server that all stores of a process share, and a condition that is notified at every change."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.state = State()
        self.generation = uuid.uuid4().hex
        self.pid = os.getpid()

    def log(self, stream: str) -> Log:
        log = self.state.logs.setdefault(stream, Log(deleted=True))
        log.epoch = log.epoch or uuid.uuid4().hex
        return log

    def snapshot(self) -> State:
        """Return what a server's disk would hold now, for tests."""
        with self.changed:
            return copy.deepcopy(self.state)

    def restart(self, state: State) -> None:
        """Set the state and begin a new epoch in every stream: other entries may get the numbers of lost ones."""
        with self.changed:
            self.state, self.generation = copy.deepcopy(state), uuid.uuid4().hex
            for log in self.state.logs.values():
                log.epoch = uuid.uuid4().hex
            self.changed.notify_all()

    def go_back(self, state: State) -> None:
        """Set the state to an earlier ``snapshot()`` without a new epoch, for tests."""
        with self.changed:
            self.state = copy.deepcopy(state)
            self.changed.notify_all()


class MemoryServer(Server):
    """
    Overview:
        The commands of one writer to a ``Memory``.
    """

    address = 'memory://'

    def __init__(self, memory: Memory, run: str, writer: str) -> None:
        if os.getpid() != memory.pid:
            raise StoreClosed(
                f'memory:// belongs to process {memory.pid} and cannot be used in process {os.getpid()}: '
                'open embedded:// or redis:// in both instead'
            )
        super().__init__(writer)
        self._memory = memory
        self._run = run
        self._is_closed = False

    def append(self, request: AppendRequest) -> AppendReply:
        with self._change(request.stream) as log:
            return log.handle_request(self.writer, request)

    def backfill(self, request: Backfill) -> None:
        with self._change(request.stream) as log:
            log.backfill(self.writer, request)

    def leave(self, stream: str, admission: int) -> None:
        with self._change(stream) as log:
            log.leave(self.writer, admission)

    def wait_for_capacity(self, stream: str, freed: int, timeout_s: float) -> Optional[FreedCapacity]:
        with self._when(lambda: self._memory.log(stream).freed > freed, timeout_s) as is_freed:
            log = self._memory.log(stream)
            return FreedCapacity(log.freed, log.epoch, log.floor, log.floor_chain) if is_freed else None

    def wait_for_transports(self, known: Mapping[str, int], timeout_s: float) -> None:
        def is_other() -> bool:
            return any(self._memory.log(stream).transport != transport for stream, transport in known.items())

        with self._when(is_other, timeout_s):
            pass

    def read(
        self, stream: str, after: EntryId, max_entries: int, timeout_s: float = 0.0, fetch: Fetch = fetch_own
    ) -> List[StoredEntry]:
        def has_more() -> bool:
            log = self._memory.log(stream)
            return log.last > log.behind(after)

        with self._when(has_more, timeout_s):
            log = self._memory.log(stream)
            first = log.behind(after) + 1
            numbers = range(first, min(log.last, first + max_entries - 1) + 1)
            found = [(EntryId(log.epoch, number), log.records[number]) for number in numbers]
        return [StoredEntry(place.chained(one.chain), one.writer, one.sequence, one.payload) for place, one in found]

    def read_backfill(self, stream: str, entry: StoredEntry, fetch: Optional[Fetch] = None) -> Backfilled:
        with self._memory.changed:
            log, number = self._memory.log(stream), entry.id.number
            log.behind(entry.id)  # This begins a new epoch if another entry has its number by now.
            is_over, is_held, is_filled = entry.id.epoch != log.epoch, number > log.floor, number in log.filled
            how = fate(is_over, is_held, is_filled, entry.sequence, log.bases.get(entry.writer, 0))
            return Backfilled(log.filled[number] if how == FILLED else None, how, log.freed)

    def request_backfills(self, stream: str) -> None:
        with self._change(stream) as log:
            log.set_transport(log.host)

    def register_reader(
        self, stream: str, reader: str, durable: bool = True, start: str = 'oldest', host: str = ''
    ) -> EntryId:
        with self._change(stream) as log:
            return log.register(reader, durable, start, host)

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        with self._change(stream) as log:
            log.ack(reader, entry_id)

    def unregister_reader(self, stream: str, reader: str) -> bool:
        with self._change(stream) as log:
            return log.forget(reader)

    def put(
        self, name: str, payload: Optional[Pieces], reference: bytes = b'', expected_version: Optional[int] = None
    ) -> ValueVersion:
        with self._changing() as state:
            stored = state.values[name].version if name in state.values else ValueVersion(0)
            if expected_version is not None and stored.is_of_another_put(expected_version):
                raise conflict(name, stored, expected_version)
            version = ValueVersion(max(stored, self.versions.of(name)) + 1, uuid.uuid4().hex)
            self.versions.raise_to(name, version)
            state.values[name] = Version(version, payload.sealed() if payload is not None else b'', reference)
            if not payload and name in state.wants:
                state.wants[name] += 1
        return version

    def generation(self, name: str) -> str:
        return self._memory.generation

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0, or_filled: bool = False) -> Optional[Version]:
        def news() -> Optional[Version]:
            found = self._memory.state.values.get(name)
            is_news = found and (found.version.is_of_another_put(newer_than) or (or_filled and found.payload))
            return found if is_news else None

        with self._when(lambda: news() is not None, timeout_s):
            return news()

    def fetch_parts(self, name: str, wanted: Sequence[Tuple[ValuePart, memoryview]], moved: Moved = unwatched) -> bool:
        return False  # No payload has parts.

    def backfill_version(self, name: str, version: int, payload: Pieces) -> bool:
        with self._changing() as state:
            found = state.values.get(name)
            if found is None or found.version.is_of_another_put(version) or found.payload:
                return False
            state.values[name] = found._replace(payload=payload.sealed())
        return True

    def request_version(self, name: str) -> None:
        with self._changing() as state:
            state.wants[name] = state.wants.get(name, 0) + 1

    def wait_for_requests(self, known: Mapping[str, str], timeout_s: float) -> Dict[str, str]:
        def wants() -> Dict[str, str]:
            return {name: str(self._memory.state.wants.get(name, '')) for name in known}

        with self._when(lambda: wants() != dict(known), timeout_s):
            return wants()

    def add(self, counter: str, amount: int) -> int:
        with self._changing() as state:
            state.counters[counter] = state.counters.get(counter, 0) + amount
            return state.counters[counter]

    def delete(self, name: str) -> bool:
        with self._change(name) as log:
            state = self._memory.state
            found = [log.delete(), state.values.pop(name, None) is not None, state.counters.pop(name, None) is not None]
            state.wants.pop(name, None)
        return any(found)

    def info(self) -> StoreInfo:
        with self._memory.changed:
            state = self._memory.state
            streams = {stream: log.info() for stream, log in state.logs.items() if not log.deleted}
            values = {name: int(found.version) for name, found in state.values.items()}
            return StoreInfo(self.address, self._run, 'memory', streams, values, dict(state.counters))

    def close(self) -> None:
        with self._memory.changed:
            self._is_closed = True
            self._memory.changed.notify_all()

    @contextmanager
    def _changing(self) -> Iterator[State]:
        """Lend the state within the block, and wake all that wait for a change of it."""
        with self._memory.changed:
            self._check_open()
            yield self._memory.state
            self._memory.changed.notify_all()

    @contextmanager
    def _change(self, stream: str) -> Iterator[Log]:
        with self._changing():
            yield self._memory.log(stream)

    @contextmanager
    def _when(self, true: Callable[[], bool], timeout_s: float) -> Iterator[bool]:
        """Hold the state within the block, once ``true()`` or after ``timeout_s``. The value is True if it was true."""
        with self._memory.changed:
            found = self._memory.changed.wait_for(lambda: self._is_closed or true(), timeout_s)
            self._check_open()
            yield found

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosed(f'the store of run {self._run!r} was closed')
