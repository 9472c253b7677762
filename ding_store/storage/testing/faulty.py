"""A store whose calls fail on purpose."""

from __future__ import annotations

from typing import Callable, ContextManager, List, Optional, Type, TypeVar

from ding_store.errors import AppendUnsettled, StoreUnavailable
from ding_store.storage.base import OLDEST, Arrays, Entry, EntryId, Header, Store, StoreInfo, Value

T = TypeVar('T')


class FaultyStore(Store):
    """
    Overview:
        A wrapper that passes every call on to ``store``. The first ``fail_after`` calls succeed, and the next
        ``num_faults`` raise StoreUnavailable: instead of the call, or with ``after=True`` after it. After an append, it
        is AppendUnsettled.
    """

    def __init__(self, store: Store, fail_after: int = 0, num_faults: int = 1, after: bool = False) -> None:
        self.store = store
        self.run = store.run
        self.num_calls = 0
        self._faulty = range(fail_after + 1, fail_after + num_faults + 1)
        self._after = after

    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId:
        return self._pass_on(lambda: self.store.append(stream, header, arrays, timeout_s), AppendUnsettled)

    def read(self, stream: str, after: EntryId = OLDEST, max_entries: int = 64, timeout_s: float = 0.0) -> List[Entry]:
        return self._pass_on(lambda: self.store.read(stream, after, max_entries, timeout_s))

    def register(self, stream: str, reader: str, durable: bool = True, start: str = 'oldest') -> EntryId:
        return self._pass_on(lambda: self.store.register(stream, reader, durable, start))

    def ack(self, stream: str, reader: str, entry_id: EntryId, wait: bool = True) -> None:
        self._pass_on(lambda: self.store.ack(stream, reader, entry_id, wait))

    def forget(self, stream: str, reader: str) -> bool:
        return self._pass_on(lambda: self.store.forget(stream, reader))

    def put(self, name: str, header: Header, arrays: Arrays, expected_version: Optional[int] = None) -> int:
        return self._pass_on(lambda: self.store.put(name, header, arrays, expected_version))

    def set_start_version(self, name: str, version: int) -> None:
        self.store.set_start_version(name, version)  # sends nothing, so it never fails

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        return self._pass_on(lambda: self.store.get(name, newer_than, timeout_s))

    def add(self, counter: str, amount: int = 0) -> int:
        return self._pass_on(lambda: self.store.add(counter, amount))

    def delete(self, name: str) -> bool:
        return self._pass_on(lambda: self.store.delete(name))

    def info(self) -> StoreInfo:
        return self._pass_on(self.store.info)

    def flush(self) -> None:
        self._pass_on(self.store.flush)

    def close_for_writing(self) -> None:
        self.store.close_for_writing()  # sends nothing, so it never fails

    @property
    def is_away(self) -> bool:
        return self.store.is_away

    def nonblocking(self) -> ContextManager[None]:
        return self.store.nonblocking()

    def close(self) -> None:
        self.store.close()

    def _pass_on(self, call: Callable[[], T], lost: Type[StoreUnavailable] = StoreUnavailable) -> T:
        self.num_calls += 1
        is_faulty = self.num_calls in self._faulty
        if is_faulty and not self._after:
            raise StoreUnavailable(f'call {self.num_calls} fails on purpose')
        result = call()
        if is_faulty:
            raise lost(f'the reply to call {self.num_calls} is lost on purpose')
        return result
