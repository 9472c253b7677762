"""``Router``, which passes each command on to one of several servers, by the name that the command is about."""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager, nullcontext, suppress
from typing import (
    AbstractSet,
    Callable,
    Collection,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

from ding_store.errors import StoreDenied, StoreError, StoreUnavailable
from ding_store.storage.base import EntryId, Header, StoreInfo, StreamInfo, ValueVersion
from ding_store.storage.encoding.framing import Pieces
from ding_store.storage.encoding.value_parts import ValuePart
from ding_store.storage.protocol import (
    AppendReply,
    AppendRequest,
    Availability,
    Backfill,
    Backfilled,
    Decided,
    Fetch,
    FreedCapacity,
    Moved,
    Server,
    StartVersions,
    StoredEntry,
    Version,
    fetch_own,
    unwatched,
)
from ding_store.storage.shards.availability import ShardedAvailability, call_all
from ding_store.storage.shards.placement import shard_of

logger = logging.getLogger(__name__)

T = TypeVar('T')
#: Number of a server that cannot be reached -> why not.
Away = Dict[int, StoreUnavailable]


class Router(Server):
    """
    Overview:
        Several servers of one run. Each stream, value and counter is on one of them, see ``placement.shard_of``. A
        server that is away delays only calls for names that it has.
    Arguments:
        - servers (:obj:`Sequence[Server]`): The servers, in the order that all processes of the run use.
    """

    def __init__(self, run: str, servers: Sequence[Server]) -> None:
        super().__init__(servers[0].writer)
        self._run = run
        self._servers = tuple(servers)
        self._read_from = self._servers  # An empty server stands in for each one that ``look`` did not reach.
        self._away: Optional[AbstractSet[int]] = None  # at the last ``look``
        if len(servers) == 1:
            self.availability = servers[0].availability
        else:
            self.availability = ShardedAvailability([server.availability for server in servers])
        self.address = ' '.join(server.address for server in servers)
        self.patience_s = max(server.patience_s for server in servers)
        self.max_payload_bytes = min(server.max_payload_bytes for server in servers)
        self.keeps_data = all(server.keeps_data for server in servers)
        self.min_replicas = servers[0].min_replicas
        self.versions = _Versions(self._on)
        for number, server in enumerate(servers):
            server.after_reconnect = functools.partial(self._restore, number)

    def connect(self) -> None:
        """
        Overview:
            Connect to all servers. If one cannot be reached, calls for its names wait for it, as if it was lost later.
        Raises:
            - StoreUnavailable: None of them can be reached, or not all of them can be and the run has not begun.
        """
        try:
            away = self._connect_all()
            if not self._is_begun(away) and away:
                error = next(iter(away.values()))
                raise StoreUnavailable(f'{str(error).rstrip(".")}. A run begins with all of its servers') from error
        except StoreError:
            self.close()
            raise
        self.advice = ' '.join(dict.fromkeys(server.advice for server in self._servers if server.advice))
        for reason in _reasons(away):
            logger.warning('%s. Until it is back, calls for its names wait', reason.rstrip('.'))

    def _connect_all(self) -> Away:
        """Try to connect to each server. Raise StoreUnavailable if none can be reached."""
        away = self._try_each(lambda server: server.connect())
        if len(away) == len(self._servers):
            raise away[0]
        return away

    def _try_each(self, reach: Callable[[Server], None]) -> Away:
        """Try to reach each server, but those that share a host only once. Return those that cannot be."""
        away: Away = {}
        tried: Dict[object, Optional[StoreUnavailable]] = {}
        for number, server in enumerate(self._servers):
            host = self._host_of(number)
            if host not in tried:
                error = None
                try:
                    reach(server)
                except StoreDenied:
                    raise
                except StoreUnavailable as e:
                    error = e
                host = self._host_of(number)  # In a cluster, the first connection finds the hosts.
                tried[host] = error
            found = tried[host]
            if found is not None:
                away[number] = found
        return away

    def _host_of(self, number: int) -> object:
        """Return what a server shares with those that are away whenever it is."""
        return number

    def _is_begun(self, away: Collection[int]) -> bool:
        """
        Return whether the servers that are not away show that the run is on all of these servers. Raise ConfigError if
        it is on others. A cluster names its nodes itself.
        """
        return True

    def connect_to_read(self) -> None:
        """Connect in a process that only reads. Before it reads, it calls ``look``."""
        self._connect_all()

    def look(self, make_empty: Callable[[], Server]) -> List[str]:
        """
        Overview:
            Put an empty server in place of each one that is away, until the next call. Return why those are away.
            Threads in the background connect to them.
        Arguments:
            - make_empty (:obj:`Callable`): Returns an empty server.
        """
        away = self._try_each(_reach_now)
        if away.keys() != self._away:
            self._is_begun(away)
            self._away = away.keys()
        self._read_from = tuple(
            make_empty() if number in away else server for number, server in enumerate(self._servers)
        )
        return _reasons(away)

    def _restore(self, number: int) -> None:
        """Restore entries with the next write: the server may have lost its memory."""
        self.after_reconnect()

    def shard_of(self, name: str) -> int:
        return shard_of(name, len(self._servers))

    def availability_of(self, name: str) -> Availability:
        return self._on(name).availability

    def apart(self, name: str) -> ContextManager[None]:
        return nullcontext() if len(self._servers) == 1 else self._apart(name)

    @contextmanager
    def _apart(self, name: str) -> Iterator[None]:
        with suppress(StoreUnavailable), self.availability_of(name).nonblocking():
            yield

    def _on(self, name: str) -> Server:
        return self._read_from[self.shard_of(name)]

    def _writing(self, name: str) -> Server:
        """Return the server of a name for a command that may be the first to write to it."""
        return self._on(name)

    # Streams

    def append(self, request: AppendRequest) -> AppendReply:
        # A request for the stream's state writes nothing, also nothing into a run that was deleted.
        server = self._writing(request.stream) if request.sequence else self._on(request.stream)
        return server.append(request)

    def backfill(self, request: Backfill) -> None:
        self._on(request.stream).backfill(request)

    def leave(self, stream: str, admission: int) -> None:
        self._on(stream).leave(stream, admission)

    def wait_for_capacity(self, stream: str, freed: int, timeout_s: float) -> Optional[FreedCapacity]:
        return self._on(stream).wait_for_capacity(stream, freed, timeout_s)

    def wait_for_transports(self, known: Mapping[str, int], timeout_s: float) -> None:
        for server, names, share_s in self._shares(known, timeout_s):
            server.wait_for_transports(names, share_s)

    def read(
        self, stream: str, after: EntryId, max_entries: int, timeout_s: float = 0.0, fetch: Fetch = fetch_own
    ) -> List[StoredEntry]:
        return self._on(stream).read(stream, after, max_entries, timeout_s, fetch)

    def read_backfill(self, stream: str, entry: StoredEntry, fetch: Optional[Fetch] = None) -> Backfilled:
        return self._on(stream).read_backfill(stream, entry, fetch)

    def request_backfills(self, stream: str) -> None:
        self._on(stream).request_backfills(stream)

    def register_reader(
        self, stream: str, reader: str, durable: bool = True, start: str = 'oldest', host: str = ''
    ) -> EntryId:
        return self._writing(stream).register_reader(stream, reader, durable, start, host)

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        self._on(stream).ack(stream, reader, entry_id, wait)

    def unregister_reader(self, stream: str, reader: str) -> bool:
        return self._on(stream).unregister_reader(stream, reader)

    def stream_info(self, stream: str) -> Optional[StreamInfo]:
        return self._on(stream).stream_info(stream)

    # Values and counters

    def put(
        self, name: str, payload: Optional[Pieces], reference: bytes = b'', expected_version: Optional[int] = None
    ) -> ValueVersion:
        return self._writing(name).put(name, payload, reference, expected_version)

    def decide(self, name: str, payload: Pieces, expected_version: Optional[int] = None) -> Decided:
        return self._writing(name).decide(name, payload, expected_version)

    def announce(self, name: str, header: Header) -> None:
        self._writing(name).announce(name, header)

    def generation(self, name: str) -> str:
        return self._on(name).generation(name)

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0, or_filled: bool = False) -> Optional[Version]:
        return self._on(name).get(name, newer_than, timeout_s, or_filled)

    def wait_for_version(
        self, name: str, version: int, timeout_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        return self._on(name).wait_for_version(name, version, timeout_s, is_over)

    def fetch_parts(self, name: str, wanted: Sequence[Tuple[ValuePart, memoryview]], moved: Moved = unwatched) -> bool:
        return self._on(name).fetch_parts(name, wanted, moved)

    def backfill_version(self, name: str, version: int, payload: Pieces) -> bool:
        return self._on(name).backfill_version(name, version, payload)

    def request_version(self, name: str) -> None:
        self._on(name).request_version(name)

    def wait_for_requests(self, known: Mapping[str, str], timeout_s: float) -> Dict[str, str]:
        found: Dict[str, str] = {}
        for server, names, share_s in self._shares(known, timeout_s):
            found.update(server.wait_for_requests(names, share_s))
        return found

    def add(self, counter: str, amount: int) -> int:
        return self._writing(counter).add(counter, amount)

    # Several names

    def advance(self, stream: str, reader: str, entry_id: EntryId, name: str, header: Header) -> None:
        """Send the ack, then the value. If both are on one server, they are one message. Neither waits for a reply."""
        server = self._on(stream)
        if self._writing(name) is server:
            server.advance(stream, reader, entry_id, name, header)
        else:
            server.ack(stream, reader, entry_id, wait=False)
            self._on(name).announce(name, header)

    def _shares(self, known: Mapping[str, T], timeout_s: float) -> List[Tuple[Server, Dict[str, T], float]]:
        """
        Return each server with its names, and its share of the time: servers wait one after another. A process has a
        thread for each server, which waits for names of that server alone.
        """
        names: Dict[Server, Dict[str, T]] = {}
        for name, one in known.items():
            names.setdefault(self._on(name), {})[name] = one
        return [(server, own, timeout_s / len(names)) for server, own in names.items()]

    def delete(self, name: str) -> bool:
        return self._on(name).delete(name)

    def info(self) -> StoreInfo:
        """Return what all servers hold, in one."""
        infos = [server.info() for server in self._servers if server in self._read_from]
        found = StoreInfo(self.address, self._run, ', '.join(dict.fromkeys(info.server for info in infos)))
        for info in infos:
            found.streams.update(info.streams)
            found.values.update(info.values)
            found.counters.update(info.counters)
            found.memory.update(info.memory)
        return found

    def flush(self) -> None:
        call_all([server.flush for server in self._servers])

    def finish(self) -> Optional[StoreError]:
        errors = [server.finish() for server in self._servers]
        return next((error for error in errors if error is not None), None)

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def retire(self, names: Set[str]) -> None:
        for number, server in enumerate(self._servers):
            server.retire({name for name in names if self.shard_of(name) == number})


def _reasons(away: Away) -> List[str]:
    """Return each reason once: servers that share a host share it."""
    return list(dict.fromkeys(map(str, away.values())))


def _reach_now(server: Server) -> None:
    """Raise StoreUnavailable at once if the server is away. A thread in the background then tries to connect."""
    if server.availability.is_away():
        with server.availability.nonblocking():
            server.availability.reach('look', 0.0)


class _Versions(StartVersions):
    """The versions that each server counts on from."""

    def __init__(self, server_of: Callable[[str], Server]) -> None:
        super().__init__()
        self._server_of = server_of

    def of(self, name: str) -> int:
        return self._server_of(name).versions.of(name)

    def raise_to(self, name: str, version: int) -> None:
        self._server_of(name).versions.raise_to(name, version)

    def follow(self, name: str, entry_id: EntryId) -> None:
        self._server_of(name).versions.follow(name, entry_id)
