"""What whoever tests a store of his own has to say of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterator, List, Tuple

import pytest

from ding_store.storage.base import Store


class StoreCase(ABC):
    """
    Overview:
        What the tests of a store need: ways to open it, and to reach behind its methods.
    """

    @abstractmethod
    def open(self, **options: Any) -> Store:
        """An empty store of a run of its own."""

    @abstractmethod
    def another(self, store: Store, **options: Any) -> Store:
        """A second store on the same run, as another process would open it."""

    @abstractmethod
    def lose_memory(self, store: Store) -> None:
        """The server forgets everything."""

    @abstractmethod
    def raw_log(self, store: Store, stream: str) -> List[Tuple[int, str, int, bytes]]:
        """(number, writer, sequence, payload) of what is held, read without the store's methods."""

    @abstractmethod
    def raw_damage(self, store: Store, stream: str, number: int) -> None:
        """Change one byte of an entry's payload."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with self.open() as store:
            yield store
