"""Shipped tests of what every store promises, and wrappers that fail on purpose: for those who write another backend.

class TestMyStore(StoreTests):
    @pytest.fixture
    def store(self): ...
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterator, List, Optional, Tuple, TypeVar

import numpy as np
import pytest

from ding_store.errors import (
    ConfigError,
    CorruptPayload,
    StoreClosed,
    StoreTimeout,
    StoreUnavailable,
    StreamFull,
    VersionConflict,
)
from ding_store.storage.base import OLDEST, Arrays, Entry, EntryId, Header, Store, StoreInfo, Value
from ding_store.storage.exactly_once.reader import Reader

T = TypeVar('T')

#: A deadline, not a duration.
WAIT_S = 20.0


def chunk(value: int, size: int = 8) -> Arrays:
    """A payload that tells its number, and shows when it is torn."""
    return {'x': np.full(size, value, np.int64)}


def number_of(entry: Entry) -> int:
    x = entry.arrays['x']
    assert (x == x[0]).all(), f'torn entry {entry.id}'
    return int(x[0])


def found_in(store: Store) -> Optional[Tuple[Header, int]]:
    """Header and version of the value 'news'."""
    value = store.get('news')
    return None if value is None else (value.header, value.version)


def eventually(true: Callable[[], bool], what: str) -> None:
    """Wait for something that no event tells of."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not true():
        assert time.monotonic() < deadline, f'{what}: not within {WAIT_S} s'
        pause.wait(0.005)


class FaultyStore(Store):
    """
    Overview:
        Passes every call on to ``store``, and raises StoreUnavailable instead of (``after=False``) or after the calls
        whose turn it is: the first ``fail_after`` are left alone, then ``num_faults`` fail.
    """

    def __init__(self, store: Store, fail_after: int = 0, num_faults: int = 1, after: bool = False) -> None:
        self.store = store
        self.run = store.run
        self.num_calls = 0
        self._faulty = range(fail_after + 1, fail_after + num_faults + 1)
        self._after = after

    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId:
        return self._pass_on(lambda: self.store.append(stream, header, arrays, timeout_s))

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

    def count_from(self, name: str, version: int) -> None:
        self.store.count_from(name, version)  # it reaches no server

    def get(self, name: str, newer_than: int = 0, timeout_s: float = 0.0) -> Optional[Value]:
        return self._pass_on(lambda: self.store.get(name, newer_than, timeout_s))

    def add(self, counter: str, amount: int = 0) -> int:
        return self._pass_on(lambda: self.store.add(counter, amount))

    def delete(self, name: str) -> bool:
        return self._pass_on(lambda: self.store.delete(name))

    def info(self) -> StoreInfo:
        return self._pass_on(self.store.info)

    def close(self) -> None:
        self.store.close()

    def _pass_on(self, call: Callable[[], T]) -> T:
        self.num_calls += 1
        is_faulty = self.num_calls in self._faulty
        if is_faulty and not self._after:
            raise StoreUnavailable(f'call {self.num_calls} fails on purpose')
        result = call()
        if is_faulty:
            raise StoreUnavailable(f'the reply to call {self.num_calls} is lost on purpose')
        return result


class StoreTests(ABC):
    """
    Overview:
        What ``base.Store`` promises. Subclasses open stores, and reach behind their methods with the ``raw_`` ones.
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

    # Streams

    def test_entries_come_back_as_they_went_in(self, store: Store) -> None:
        arrays = {
            'obs': np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, ::2],
            'done': np.array([True, False]),
            'reward': np.array(0.5, np.float16),
            'none': np.zeros((0, 3), np.float32),
            'swapped': np.arange(3, dtype='>i4'),
        }
        place = store.append('experience', {'env_step': 3, 'who': ['a', None]}, arrays)
        (entry,) = store.read('experience')
        assert (entry.id, entry.stream, entry.sequence) == (place, 'experience', 1)
        assert entry.header == {'env_step': 3, 'who': ['a', None]}
        assert list(entry.arrays) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(entry.arrays[name], array)
            assert entry.arrays[name].dtype == array.dtype
            assert not entry.arrays[name].flags.writeable

    def test_append_copies(self, store: Store) -> None:
        array = np.zeros(4)
        store.append('s', {}, {'x': array})
        array += 1
        assert not store.read('s')[0].arrays['x'].any()

    def test_numbers_are_dense_and_reading_goes_on(self, store: Store) -> None:
        places = [store.append('s', {}, chunk(i)) for i in range(5)]
        assert [place.number for place in places] == [1, 2, 3, 4, 5]
        assert [number_of(entry) for entry in store.read('s', places[1], max_entries=2)] == [2, 3]
        assert store.read('s', places[4]) == []
        assert [row[0] for row in self.raw_log(store, 's')] == [1, 2, 3, 4, 5]

    def test_an_unknown_stream_is_empty(self, store: Store) -> None:
        assert store.read('nothing', timeout_s=0.01) == []
        assert store.info().streams == {}

    def test_sequences_are_per_writer(self, store: Store) -> None:
        with self.another(store) as other:
            for writer in (store, other, store):
                writer.append('s', {}, {})
            entries = other.read('s')
        assert [entry.sequence for entry in entries] == [1, 1, 2]
        assert entries[0].writer == entries[2].writer != entries[1].writer

    def test_a_waiting_reader_gets_the_first_entry(self, store: Store) -> None:
        with self.another(store) as other, ThreadPoolExecutor() as pool:
            waiting = pool.submit(store.read, 's', OLDEST, 64, WAIT_S)
            other.append('s', {}, chunk(7))
            assert [number_of(entry) for entry in waiting.result(WAIT_S)] == [7]

    def test_damage_is_noticed_and_named(self, store: Store) -> None:
        store.append('s', {}, chunk(1))
        self.raw_damage(store, 's', 1)
        with pytest.raises(CorruptPayload, match="entry 1 of 's'"):
            store.read('s')

    @pytest.mark.parametrize('name', ['', 'a b', 'a{b}', 'a:b', '/a', 'a//b', 'a/../b', 'é', 'x' * 201, None])
    def test_bad_names_are_refused(self, store: Store, name: Any) -> None:
        for call in (store.read, store.get, store.add, store.delete):
            with pytest.raises(ConfigError, match='name'):
                call(name)

    @pytest.mark.parametrize(
        'array', [np.array([None]), np.zeros(1, 'M8[s]'), np.zeros(1, 'i4,f4'), [1], np.array(['a'])]
    )
    def test_only_numbers_are_stored(self, store: Store, array: Any) -> None:
        with pytest.raises(TypeError, match="'bad'"):
            store.append('s', {}, {'bad': array})
        with pytest.raises(TypeError, match='JSON'):
            store.append('s', {'bad': object()}, {})
        assert store.append('s', {}, {}).number == 1

    # Readers and retention

    def test_nothing_is_trimmed_before_the_first_durable_reader(self, store: Store) -> None:
        last = [store.append('s', {}, chunk(i)) for i in range(3)][-1]
        store.register('s', 'viewer', durable=False)
        store.ack('s', 'viewer', last)
        assert len(self.raw_log(store, 's')) == 3

    def test_what_all_durable_readers_acked_is_trimmed(self, store: Store) -> None:
        places = [store.append('s', {}, chunk(i)) for i in range(4)]
        for reader in 'ab':
            assert store.register('s', reader).number == 0
        store.ack('s', 'a', places[3])
        assert len(self.raw_log(store, 's')) == 4
        store.ack('s', 'b', places[1])
        assert [row[0] for row in self.raw_log(store, 's')] == [3, 4]
        stream = store.info().streams['s']
        assert (stream.floor, stream.last, stream.readers) == (2, 4, {'a': 4, 'b': 2})
        assert stream.durable == {'a': True, 'b': True}
        assert stream.pending_bytes == sum(len(row[3]) for row in self.raw_log(store, 's'))

    def test_acks_that_are_not_waited_for_come_before_what_follows(self, store: Store) -> None:
        store.register('s', 'a')
        for i in range(1, 6):
            place = store.append('s', {}, chunk(i))
            store.ack('s', 'a', place, wait=False)
            assert store.read('s', place) == []
            assert self.raw_log(store, 's') == []
        for _ in range(3):
            place = store.append('s', {}, chunk(6))
            store.ack('s', 'a', place, wait=False)
        assert store.register('s', 'a') == place
        store.append('s', {}, chunk(7))
        store.ack('s', 'a', place._replace(number=place.number + 1), wait=False)
        with self.another(store) as other:
            store.close()
            assert self.raw_log(other, 's') == []

    def test_acks_only_move_forward(self, store: Store) -> None:
        places = [store.append('s', {}, chunk(i)) for i in range(3)]
        store.register('s', 'a')
        store.ack('s', 'a', places[1])
        store.ack('s', 'a', places[0])
        store.ack('s', 'a', EntryId('of another epoch', 3))
        store.ack('s', 'stranger', places[2])
        assert store.register('s', 'a') == places[1]

    def test_an_ack_beyond_the_end_acks_what_there_is(self, store: Store) -> None:
        place = store.append('s', {}, {})
        store.register('s', 'a')
        store.ack('s', 'a', place._replace(number=100))
        assert store.append('s', {}, {}).number == 2
        assert len(store.read('s', store.register('s', 'a'))) == 1

    def test_a_reader_that_advances_acks_and_tells(self, store: Store) -> None:
        place = store.register('s', 'r')
        for i in range(3):
            place = store.append('s', {}, chunk(i))
            store.advance('s', 'r', place, 'news', {'at': i})
        store.settle()
        assert store.read('s') == []
        with self.another(store) as other:
            assert found_in(other) == ({'at': 2}, 3)
        assert store.put('news', {}, {}) == 4
        assert set(store.info().values) == {'news'}

    def test_who_waits_hears_of_an_advance_that_nobody_settles(self, store: Store) -> None:
        with self.another(store) as other, ThreadPoolExecutor() as pool:
            waiting = pool.submit(other.get, 'news', 0, WAIT_S)
            store.advance('s', 'r', OLDEST, 'news', {'at': 1})
            assert waiting.result(WAIT_S) is not None
        assert found_in(store) == ({'at': 1}, 1)

    def test_advances_go_on_when_the_server_lost_its_memory(self, store: Store) -> None:
        store.register('s', 'r')
        place = store.append('s', {}, chunk(0))
        for i in range(3):
            store.advance('s', 'r', place, 'news', {'at': i})
            self.lose_memory(store)
        store.advance('s', 'r', place, 'news', {'at': 3})
        store.settle()
        assert found_in(store) == ({'at': 3}, 4)

    def test_news_of_any_size_advance(self, store: Store) -> None:
        store.advance('s', 'r', OLDEST, 'news', {'long': 'x' * 100_000})
        store.settle()
        assert found_in(store) == ({'long': 'x' * 100_000}, 1)

    def test_start_now_sees_only_what_comes(self, store: Store) -> None:
        place = store.append('s', {}, chunk(1))
        assert store.register('s', 'late', start='now') == place
        with pytest.raises(ConfigError, match='start'):
            store.register('s', 'late', start='then')

    def test_forgetting_the_slowest_reader_trims(self, store: Store) -> None:
        place = store.append('s', {}, chunk(1))
        for reader in 'ab':
            store.register('s', reader)
        store.ack('s', 'a', place)
        assert store.forget('s', 'b')
        assert not store.forget('s', 'b')
        assert self.raw_log(store, 's') == []

    def test_deleted_streams_stay_deleted(self, store: Store) -> None:
        store.append('s', {}, chunk(1))
        assert store.delete('s')
        assert not store.delete('s')
        assert store.read('s') == []
        assert store.info().streams == {}
        store.append('s', {}, chunk(2))
        assert [number_of(entry) for entry in store.read('s')] == [2]
        assert list(store.info().streams) == ['s']

    # Limits

    def test_a_full_stream_blocks_until_the_deadline(self) -> None:
        with self.open(max_pending_bytes=1000) as store:
            store.append('s', {}, chunk(1, 50))
            store.append('s', {}, chunk(2, 20))
            with pytest.raises(StoreTimeout, match='max_pending_bytes'):
                store.append('s', {}, chunk(3, 50), timeout_s=0.05)
            store.append('s', {}, chunk(4, 1))
            assert [number_of(entry) for entry in store.read('s')] == [1, 2, 4]
            assert [entry.sequence for entry in store.read('s')] == [1, 2, 3]

    def test_room_wakes_a_blocked_append(self) -> None:
        with self.open(max_pending_bytes=1000) as store, ThreadPoolExecutor() as pool:
            first = store.append('s', {}, chunk(1, 80))
            store.register('s', 'r')
            blocked = pool.submit(store.append, 's', {}, chunk(2, 80), WAIT_S)
            with self.another(store) as other:
                other.ack('s', 'r', first)
            assert blocked.result(WAIT_S).number == 2

    def test_drop_oldest_makes_room_and_counts(self, caplog: pytest.LogCaptureFixture) -> None:
        with self.open(max_pending_bytes=2000, overflow='drop_oldest') as store:
            for i in range(10):
                store.append('s', {}, chunk(i, 50))
            stream = store.info().streams['s']
            held = [number_of(entry) for entry in store.read('s')]
        assert held == list(range(10 - len(held), 10))
        assert stream.num_dropped == stream.floor == 10 - len(held)
        assert stream.pending_bytes <= 2000
        assert len([record for record in caplog.records if 'dropping' in record.message]) == 1

    def test_overflow_error_refuses(self) -> None:
        with self.open(stream_options={'s': {'max_pending_bytes': 1000, 'overflow': 'error'}}) as store:
            store.append('s', {}, chunk(1, 80))
            with pytest.raises(StreamFull):
                store.append('s', {}, chunk(2, 80))
            store.append('other', {}, chunk(2, 800))
            assert len(self.raw_log(store, 's')) == 1

    def test_an_entry_above_the_limit_is_refused_at_once(self) -> None:
        for overflow in ('block', 'drop_oldest', 'error'):
            with self.open(max_pending_bytes=1000, overflow=overflow) as store:
                with pytest.raises(StreamFull, match='1000'):
                    store.append('s', {}, chunk(1, 1000))

    # Values and counters

    def test_values_have_versions(self, store: Store) -> None:
        assert store.get('weights/main') is None
        assert store.put('weights/main', {'iter': 1}, chunk(1)) == 1
        assert store.put('weights/main', {'iter': 2}, chunk(2)) == 2
        value = store.get('weights/main')
        assert value is not None
        assert (value.name, value.version, value.header) == ('weights/main', 2, {'iter': 2})
        assert value.arrays['x'][0] == 2
        assert store.get('weights/main', newer_than=2) is None
        assert store.info().values == {'weights/main': 2}

    def test_a_waiting_getter_gets_the_next_version(self, store: Store) -> None:
        store.put('v', {}, chunk(1))
        with self.another(store) as other, ThreadPoolExecutor() as pool:
            waiting = pool.submit(store.get, 'v', 1, WAIT_S)
            other.put('v', {}, chunk(2))
            value = waiting.result(WAIT_S)
        assert value is not None
        assert value.version == 2

    def test_put_compares_and_swaps(self, store: Store) -> None:
        assert store.put('v', {}, {}, expected_version=0) == 1
        for expected in (0, 2):
            with pytest.raises(VersionConflict, match='version 1'):
                store.put('v', {}, {}, expected_version=expected)
        assert store.put('v', {}, {}, expected_version=1) == 2

    def test_one_of_many_swaps_wins(self, store: Store) -> None:
        def swap(_: int) -> int:
            try:
                return store.put('v', {}, {}, expected_version=0)
            except VersionConflict:
                return 0

        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(swap, range(8))) == [0] * 7 + [1]

    def test_versions_grow_for_the_writer_and_may_fall_for_others(self, store: Store) -> None:
        for _ in range(3):
            store.put('v', {}, {})
        self.lose_memory(store)
        with self.another(store) as other:
            assert other.put('v', {}, chunk(9)) == 1
            value = store.get('v', newer_than=3)
            assert value is not None
            assert value.version == 1
            assert store.put('v', {}, {}) == 4

    @pytest.mark.parametrize('size', [1, 50_000])
    def test_versions_go_on_behind_one_that_the_writer_was_told_of(self, store: Store, size: int) -> None:
        store.count_from('v', 7)
        store.count_from('v', 5)
        store.count_from('w', 3)
        assert store.put('v', {}, chunk(1, size)) == 8
        assert store.put('v', {}, chunk(1, size), expected_version=8) == 9
        with self.another(store) as other:
            other.count_from('v', 4)
            assert other.put('v', {}, {}) == 10

    def test_counters(self, store: Store) -> None:
        assert store.add('n') == 0
        assert store.add('n', 5) == 5
        with self.another(store) as other:
            assert other.add('n', -2) == 3
        assert store.info().counters == {'n': 3}
        assert store.delete('n')
        assert store.add('n') == 0

    def test_deleted_values_are_gone(self, store: Store) -> None:
        store.put('v', {}, {})
        assert store.delete('v')
        assert store.get('v') is None
        assert not store.delete('v')
        assert store.info().values == {}

    # Losing and closing

    def test_what_was_forgotten_is_announced_again_in_order(self, store: Store) -> None:
        old = [store.append('s', {}, chunk(i)) for i in range(4)]
        self.lose_memory(store)
        new = store.append('s', {}, chunk(4))
        assert new.epoch != old[-1].epoch
        assert [number_of(entry) for entry in store.read('s')] == [0, 1, 2, 3, 4]
        assert [number_of(entry) for entry in store.read('s', old[-1])] == [0, 1, 2, 3, 4]

    def test_only_what_is_not_acked_is_announced_again(self, store: Store) -> None:
        store.register('s', 'r')
        places = [store.append('s', {}, chunk(i)) for i in range(4)]
        store.ack('s', 'r', places[1])
        store.append('s', {}, chunk(4))
        self.lose_memory(store)
        store.append('s', {}, chunk(5))
        assert [number_of(entry) for entry in store.read('s')] == [2, 3, 4, 5]

    def test_an_idle_writer_announces_again_while_it_waits_for_something_else(self) -> None:
        with self.open(check_every_s=0.02) as store, self.another(store) as other:
            for stream in 'st':
                store.append(stream, {}, chunk(1))
            self.lose_memory(store)
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(store.get, 'weights', 0, WAIT_S)
                assert [len(other.read(stream, OLDEST, 64, WAIT_S)) for stream in 'st'] == [1, 1]
                other.put('weights', {}, {})
                assert waiting.result(WAIT_S) is not None

    def test_a_waiting_reader_notices_a_new_epoch(self) -> None:
        with self.open(check_every_s=0.02) as store, self.another(store) as other:
            places = [other.append('s', {}, chunk(i)) for i in range(3)]
            reader = Reader(store, 's', 'r')
            assert len(reader.read()) == 3
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(store.read, 's', places[-1], 64, WAIT_S)
                self.lose_memory(store)
                other.append('s', {}, chunk(3))
                assert waiting.result(WAIT_S)[0].id.epoch != places[-1].epoch
            assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [3]
            assert (reader.num_duplicates, reader.num_lost) == (3, 0)

    def test_concurrent_appends_are_all_there_once(self, store: Store) -> None:
        with ThreadPoolExecutor(4) as pool:
            places = list(pool.map(lambda i: store.append('s', {}, chunk(i)), range(200)))
        entries = store.read('s', max_entries=1000)
        assert sorted(number_of(entry) for entry in entries) == list(range(200))
        assert [entry.sequence for entry in entries] == list(range(1, 201))
        assert {number_of(entry): entry.id for entry in entries} == dict(enumerate(places))

    @pytest.mark.parametrize('wait', ['read', 'get', 'append'])
    def test_close_wakes_who_waits(self, wait: str) -> None:
        store = self.open(max_pending_bytes=1000)
        store.append('full', {}, chunk(1, 80))
        calls = {
            'read': lambda: store.read('s', timeout_s=WAIT_S * 2),
            'get': lambda: store.get('v', timeout_s=WAIT_S * 2),
            'append': lambda: store.append('full', {}, chunk(1, 80), timeout_s=WAIT_S * 2),
        }
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(calls[wait])
            eventually(waiting.running, 'the thread starts')
            store.close()
            with pytest.raises(StoreClosed):
                waiting.result(WAIT_S)

    def test_closed_is_closed(self, store: Store) -> None:
        store.close()
        store.close()
        for call in (store.read, store.get, store.add, store.delete):
            with pytest.raises(StoreClosed):
                call('x')
        with pytest.raises(StoreClosed):
            store.append('x', {}, {})
        with pytest.raises(StoreClosed):
            store.advance('x', 'r', OLDEST, 'news', {})

    def test_unknown_options_are_refused_with_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'overflow'"):
            self.open(overflw='block')
        for wrong in ({'overflow': 'never'}, {'max_pending_bytes': 0}, {'check_every_s': 60}):
            with pytest.raises(ConfigError, match=next(iter(wrong))):
                self.open(**wrong)
