"""The methods that a subclass of the store tests must define."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterator, List, Tuple

import pytest

from ding_store.storage.store import Store


class StoreCase(ABC):
    """
    Overview:
        Base class of a store's tests. Subclasses define how to open the store, and how to read and damage its data
        without its methods.
    """

    @abstractmethod
    def open(self, **options: Any) -> Store:
        """Open an empty store of a new run."""

    @abstractmethod
    def another(self, store: Store, **options: Any) -> Store:
        """Open a second store on the same run, as another process would."""

    @abstractmethod
    def lose_memory(self, store: Store) -> None:
        """Make the server lose everything."""

    @abstractmethod
    def raw_log(self, store: Store, stream: str) -> List[Tuple[int, str, int, bytes]]:
        """Return (number, writer, sequence, payload) of the held entries, read without the store's methods."""

    @abstractmethod
    def raw_damage(self, store: Store, stream: str, number: int) -> None:
        """Change one byte of an entry's payload."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with self.open() as store:
            yield store
