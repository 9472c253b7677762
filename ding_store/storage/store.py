"""A store over a server, without shared memory."""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence

from ding_store.storage.base import OLDEST, Arrays, Entry, EntryId, Header, Store, Value
from ding_store.storage.client import Client
from ding_store.storage.encoding.framing import encode_pieces
from ding_store.storage.options import StoreOptions, check_name
from ding_store.storage.protocol import Server
from ding_store.storage.shared_memory.transports import Resolver
from ding_store.storage.shared_memory.value_resolver import ValueResolver


class ServerStore(Client, Store):
    """
    Overview:
        A store whose payloads all go through the server.
    """

    def __init__(self, run: str, open_server: Callable[[str], Server], options: StoreOptions) -> None:
        super().__init__(run, open_server, options)

    def _begin(self) -> None:
        super()._begin()
        self._resolver = Resolver(self)
        self._value_resolver = ValueResolver(self)

    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId:
        check_name('stream', stream)
        self._enter(looks_around=False)
        return self.append_payload(stream, self._writer.encoded(stream, header, arrays), timeout_s)

    def read(self, stream: str, after: EntryId = OLDEST, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        return self._resolver.read(stream, after, max_entries, timeout_s)

    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        check_name('value', name)
        return self.put_version(name, encode_pieces(header, arrays), b'', expected_version)

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        return self._value_resolver.get(name, newer_than, timeout_s)

    def retire(self, last: Sequence[str] = ()) -> None:
        known = self.info()
        super().retire(last)
        self.server.retire({*known.streams, *known.values, *known.counters})
