"""A store whose calls fail on purpose."""

from __future__ import annotations

import functools
from typing import Any, Callable, Type

from ding_store.errors import AppendUnsettled, StoreUnavailable
from ding_store.storage.store import Store

#: Calls that send nothing, so that they never fail, and the end.
_SAFE = ('set_start_version', 'close_for_writing', 'nonblocking', 'close')


class FaultyStore:
    """
    Overview:
        A wrapper that passes every call on to ``store``. The first ``fail_after`` calls succeed, and the next
        ``num_faults`` raise StoreUnavailable: instead of the call, or with ``after=True`` after it. After an append, it
        is AppendUnsettled.
    """

    def __init__(self, store: Store, fail_after: int = 0, num_faults: int = 1, after: bool = False) -> None:
        self.store = store
        self.num_calls = 0
        self._faulty = range(fail_after + 1, fail_after + num_faults + 1)
        self._after = after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if name in _SAFE or not callable(found):
            return found
        return functools.partial(self._pass_on, found, AppendUnsettled if name == 'append' else StoreUnavailable)

    def __enter__(self) -> FaultyStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()

    def _pass_on(self, call: Callable[..., Any], lost: Type[StoreUnavailable], *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        is_faulty = self.num_calls in self._faulty
        if is_faulty and not self._after:
            raise StoreUnavailable(f'call {self.num_calls} fails on purpose')
        result = call(*args, **kwargs)
        if is_faulty:
            raise lost(f'the reply to call {self.num_calls} is lost on purpose')
        return result
