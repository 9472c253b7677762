"""Keys through which the learners of a run find each other: values of the run's store, seen as torch's own store."""

from __future__ import annotations

import base64
import time
from datetime import timedelta
from typing import List, Optional, Set

import torch.distributed as dist

from ding_store.errors import StoreTimeout
from ding_store.storage.store import Store

#: Time that the learners may take to connect once all of them are there.
CONNECT_S = 60.0


class StoreKeys(dist.Store):
    """
    Overview:
        A ``torch.distributed.Store`` whose keys are values of a run's store. The learners exchange the addresses of
        their sockets through it, so it works wherever they reach the run's server.
    Arguments:
        - prefix (:obj:`str`): The first part of the values' names.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__()
        self._store, self._prefix = store, prefix
        self._own: Set[str] = set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # noqa: A003 - torch's name
        name = self._name_of(key)
        self._own.add(name)
        self._store.put(name, {'value': base64.b64encode(_as_bytes(value)).decode()}, {})

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + CONNECT_S
        while True:
            found = self._store.get(self._name_of(key), timeout_s=1.0)
            if found is not None:
                return base64.b64decode(str(found.header['value']))
            if time.monotonic() >= deadline:
                raise StoreTimeout(f"another learner did not connect within {CONNECT_S:.0f} s. See the learners' logs.")

    def check(self, keys: List[str]) -> bool:
        return all(self._store.get(self._name_of(key)) is not None for key in keys)

    def wait(self, keys: List[str], timeout: Optional[timedelta] = None) -> None:
        for key in keys:
            self.get(key)

    def delete_own(self) -> None:
        """Delete the keys that this process has set."""
        for name in self._own:
            self._store.delete(name)

    def _name_of(self, key: str) -> str:
        return f'{self._prefix}/{key.encode().hex()}'


def _as_bytes(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[call-overload,no-any-return]
