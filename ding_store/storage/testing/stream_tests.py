"""Tests of streams and their limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, List

import numpy as np
import pytest

from ding_store.errors import ConfigError, CorruptPayload, StoreTimeout, StreamFull
from ding_store.storage.base import OLDEST, OVERFLOW
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store
from ding_store.storage.testing.case import StoreCase
from ding_store.storage.testing.helpers import WAIT_S, chunk, number_of


class StreamTests(StoreCase):
    def test_entries_are_read_as_appended(self, store: Store) -> None:
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

    def test_append_copies_its_arrays(self, store: Store) -> None:
        array = np.zeros(4)
        store.append('s', {}, {'x': array})
        array += 1
        assert not store.read('s')[0].arrays['x'].any()

    def test_entry_numbers_are_dense_and_reads_continue(self, store: Store) -> None:
        places = [store.append('s', {}, chunk(i)) for i in range(5)]
        assert [place.number for place in places] == [1, 2, 3, 4, 5]
        assert [number_of(entry) for entry in store.read('s', places[1], max_entries=2)] == [2, 3]
        assert store.read('s', places[4]) == []
        assert [row[0] for row in self.raw_log(store, 's')] == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize('overflow', OVERFLOW)
    def test_appends_without_a_wait_still_wait_for_their_turn(self, overflow: str) -> None:
        with self.open(overflow=overflow) as store, ThreadPoolExecutor(4) as pool:
            done = [pool.submit(store.append, 's', {}, chunk(i), timeout_s=0.0) for i in range(100)]
            assert sorted(one.result(WAIT_S).number for one in done) == list(range(1, 101))

    @pytest.mark.parametrize('number', [0, -1])
    def test_read_of_zero_or_fewer_entries_is_refused(self, store: Store, number: int) -> None:
        place = store.append('s', {}, chunk(1))
        store.append('s', {}, chunk(2))
        for after in (OLDEST, place):
            with pytest.raises(ConfigError, match=f'max_entries .{number}.'):
                store.read('s', after, max_entries=number)

    def test_unknown_stream_is_empty(self, store: Store) -> None:
        assert store.read('nothing', timeout_s=0.01) == []
        assert store.info().streams == {}

    def test_sequence_numbers_are_per_writer(self, store: Store) -> None:
        with self.another(store) as other:
            for writer in (store, other, store):
                writer.append('s', {}, {})
            entries = other.read('s')
        assert [entry.sequence for entry in entries] == [1, 1, 2]
        assert entries[0].writer == entries[2].writer != entries[1].writer

    def test_waiting_reader_gets_the_first_entry(self, store: Store) -> None:
        with self.another(store) as other, ThreadPoolExecutor() as pool:
            waiting = pool.submit(store.read, 's', OLDEST, 64, WAIT_S)
            other.append('s', {}, chunk(7))
            assert [number_of(entry) for entry in waiting.result(WAIT_S)] == [7]

    def test_damaged_entry_is_refused_by_name(self, store: Store) -> None:
        store.append('s', {}, chunk(1))
        self.raw_damage(store, 's', 1)
        with pytest.raises(CorruptPayload, match="entry 1 of 's'"):
            store.read('s')

    @pytest.mark.parametrize('name', ['', 'a b', 'a{b}', 'a:b', '/a', 'a//b', 'a/../b', 'é', 'x' * 201, None])
    def test_stream_names_that_are_invalid_are_refused(self, store: Store, name: Any) -> None:
        for call in (store.read, store.get, store.add, store.delete):
            with pytest.raises(ConfigError, match='name'):
                call(name)

    def test_payload_in_parts_is_one_entry(self, store: Store) -> None:
        """The large ones exceed what a server accepts in one piece. Several come at once, among small ones."""
        sizes = [1, 30_000, 1_000_000, 2, 300_000]
        store.register('s', 'r')
        places = [store.append('s', {'number': i}, chunk(i, size)) for i, size in enumerate(sizes)]
        with self.another(store) as other:
            for after, expected in ((OLDEST, [0, 1, 2, 3, 4]), (places[1], [2, 3, 4])):
                entries = other.read('s', after)
                while len(entries) < len(expected):
                    more = other.read('s', entries[-1].id, timeout_s=WAIT_S)
                    assert more, 'the rest did not come'
                    entries += more
                assert [(number_of(entry), entry.header['number']) for entry in entries] == [(i, i) for i in expected]
                assert [len(entry.arrays['x']) for entry in entries] == sizes[expected[0] :]
        store.ack('s', 'r', places[2])
        stream = store.stream_info('s')
        assert stream is not None
        assert stream.pending_bytes < 8 * sum(sizes[3:]) + 10_000
        assert [number_of(entry) for entry in store.read('s')] == [3, 4]
        store.append('s', {}, chunk(5))  # Its reply contains what is acked.
        self.lose_memory(store)
        store.append('s', {}, chunk(6))
        reader = Reader(store, 's', 'r')
        seen: List[int] = []
        while len(seen) < 4:
            seen += map(number_of, reader.read(timeout_s=WAIT_S))
        assert seen == [3, 4, 5, 6]
        assert store.delete('s')
        assert store.read('s') == []

    @pytest.mark.parametrize(
        'array',
        [
            np.array([None]),
            np.zeros(1, 'M8[s]'),
            np.zeros(1, 'i4,f4'),
            [1],
            np.array(['a']),
            np.ma.masked_array([1.0], [True]),  # type: ignore[no-untyped-call]
        ],
    )
    def test_arrays_of_other_than_numbers_are_refused(self, store: Store, array: Any) -> None:
        with pytest.raises(TypeError, match="'bad'"):
            store.append('s', {}, {'bad': array})
        with pytest.raises(TypeError, match='JSON'):
            store.append('s', {'bad': object()}, {})
        assert store.append('s', {}, {}).number == 1

    # Limits

    def test_full_stream_blocks_until_the_deadline(self) -> None:
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

    def test_drop_oldest_counts_all_that_one_entry_drops(self) -> None:
        with self.open(max_pending_bytes=2000, overflow='drop_oldest') as store:
            for i in range(4):
                store.append('s', {}, chunk(i))
            store.append('s', {}, chunk(4, 200))
            stream = store.info().streams['s']
            held = [number_of(entry) for entry in store.read('s')]
        assert held == list(range(5 - len(held), 5))
        assert stream.num_dropped == stream.floor == 5 - len(held) > 1

    def test_entry_above_the_limit_is_refused_at_once(self) -> None:
        for overflow in OVERFLOW:
            with self.open(max_pending_bytes=1000, overflow=overflow) as store:
                with pytest.raises(StreamFull, match='1000'):
                    store.append('s', {}, chunk(1, 1000))
