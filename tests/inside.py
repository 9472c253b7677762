"""What tests reach inside of a store for which there is no public name. Each function is the one place for it."""

from typing import Any, List

from ding_store.storage.shared_memory.cache_dir import CacheDir
from ding_store.storage.shared_memory.ring import RingWriter
from ding_store.storage.shared_memory.rings import Rings
from ding_store.storage.shared_memory.slots import SlotWriter
from ding_store.storage.shared_memory.value_slots import ValueSlots
from ding_store.storage.store import Store


def stream_rings(store: Store, stream: str) -> Rings:
    """Return the rings of this process for a stream."""
    return store._streams._rings[stream]


def rings_of(store: Store, stream: str = 's') -> List[RingWriter]:
    return stream_rings(store, stream)._rings


def streams_with_rings(store: Store) -> List[str]:
    return list(store._streams._rings)


def without_keeper(store: Store) -> Store:
    """Start no thread that looks after the streams: the test's calls do its work."""
    store._streams._start_keeper = lambda stream: None  # type: ignore[method-assign]
    return store


def slots_of(store: Store, name: str) -> ValueSlots:
    """Return the slots in which this process writes a value."""
    return store._values._own[name]


def all_slots_of(store: Store) -> List[ValueSlots]:
    return list(store._values._own.values())


def slot_file_of(store: Store, name: str) -> SlotWriter:
    file = slots_of(store, name)._file
    assert file is not None
    return file


def num_slots_of(store: Store, name: str) -> int:
    return len(slot_file_of(store, name)._buffers)


def without_backfills(store: Store) -> None:
    """Start no thread that backfills values: the test calls ``backfill``."""
    store._values._start_backfilling = lambda name: None  # type: ignore[method-assign]


def set_patience(store: Store, seconds: float) -> None:
    """Set how long a reader waits for the writer of a value on another host."""
    store._values._resolver._patience_s = seconds


def cache_of(store: Store) -> CacheDir:
    cache: Any = store._cache
    return cache
