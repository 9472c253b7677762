"""Tests of a store whose server loses its memory, and of a store that is closed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Set

import pytest

from ding_store.errors import AppendUnsettled, ConfigError, StoreClosed, StoreTimeout
from ding_store.storage.base import OLDEST
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store
from ding_store.storage.testing.case import StoreCase
from ding_store.storage.testing.helpers import WAIT_S, chunk, eventually, number_of


class LossTests(StoreCase):
    def test_forgotten_entries_are_resent_in_order(self, store: Store) -> None:
        old = [store.append('s', {}, chunk(i)) for i in range(4)]
        self.lose_memory(store)
        new = store.append('s', {}, chunk(4))
        assert new.epoch != old[-1].epoch
        assert [number_of(entry) for entry in store.read('s')] == [0, 1, 2, 3, 4]
        assert [number_of(entry) for entry in store.read('s', old[-1])] == [0, 1, 2, 3, 4]

    def test_unacked_entries_only_are_resent(self, store: Store) -> None:
        store.register('s', 'r')
        places = [store.append('s', {}, chunk(i)) for i in range(4)]
        store.ack('s', 'r', places[1])
        store.append('s', {}, chunk(4))
        self.lose_memory(store)
        store.append('s', {}, chunk(5))
        assert [number_of(entry) for entry in store.read('s')] == [2, 3, 4, 5]

    def test_resent_entries_of_a_full_stream_need_no_new_room(self) -> None:
        with self.open(max_pending_bytes=1500) as store, self.another(store) as other:
            for i in range(2):
                store.append('s', {}, chunk(i, 80))
            self.lose_memory(store)
            other.append('s', {}, chunk(2, 80))  # It takes the room that the two had.
            with pytest.raises(AppendUnsettled):
                store.append('s', {}, chunk(3, 80), timeout_s=0)
            assert [number_of(entry) for entry in other.read('s')] == [2, 0, 1]

    def test_absent_reader_misses_nothing_that_another_acks(self, store: Store) -> None:
        store.register('s', 'away')
        reader = Reader(store, 's', 'r')
        for i in range(4):
            store.append('s', {}, chunk(i))
        self.lose_memory(store)
        store.append('s', {}, chunk(4))
        assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [0, 1, 2, 3, 4]
        reader.ack()
        store.append('s', {}, chunk(5))
        assert [number_of(entry) for entry in Reader(store, 's', 'away').read()] == [0, 1, 2, 3, 4, 5]

    def test_forgotten_reader_is_restored_by_no_writer(self) -> None:
        with self.open() as store, self.another(store) as other:
            store.register('s', 'dead')
            store.register('s', 'r')
            for writer in (store, other):
                for reader in ('dead', 'r'):
                    store.ack('s', reader, writer.append('s', {}, chunk(1)))
            self.lose_memory(store)
            store.register('s', 'r')
            store.append('s', {}, chunk(2))
            assert self.readers_of(store) == {'dead', 'r'}
            assert store.forget('s', 'dead')
            other.append('s', {}, chunk(2))
            assert self.readers_of(store) == {'r'}
            store.register('s', 'dead')
            other.append('s', {}, chunk(3))  # Its reply lists the readers.
            self.lose_memory(store)
            other.append('s', {}, chunk(4))
            assert self.readers_of(store) == {'dead', 'r'}

    def test_refused_append_does_not_trim_for_lost_readers(self) -> None:
        # The entries before the refused one have room, even if a thread of ``other`` sends both of its own again.
        with self.open(max_pending_bytes=1100, check_every_s=0.02) as store, self.another(store) as other:
            store.register('s', 'dead')
            store.register('s', 'r')
            for reader in ('dead', 'r'):
                store.ack('s', reader, other.append('s', {}, chunk(1)))
            store.append('s', {}, chunk(2, 80))
            self.lose_memory(store)
            store.register('s', 'r')
            store.ack('s', 'r', store.append('s', {}, chunk(3)))
            # If that thread was faster, the append is refused at its first try, and is withdrawn.
            with pytest.raises((AppendUnsettled, StoreTimeout)):
                other.append('s', {}, chunk(4, 20), timeout_s=0)
            assert self.readers_of(store) == {'dead', 'r'}
            assert store.forget('s', 'dead')
            other.append('s', {}, chunk(5), timeout_s=WAIT_S)
            assert self.readers_of(store) == {'r'}

    def readers_of(self, store: Store) -> Set[str]:
        stream = store.stream_info('s')
        assert stream is not None
        return set(stream.durable)

    def test_waiting_writer_resends_lost_entries(self) -> None:
        with self.open(check_every_s=0.02) as store, self.another(store) as other:
            for stream in 'st':
                store.append(stream, {}, chunk(1))
            self.lose_memory(store)
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(store.get, 'weights', 0, WAIT_S)
                assert [len(other.read(stream, OLDEST, 64, WAIT_S)) for stream in 'st'] == [1, 1]
                other.put('weights', {}, {})
                assert waiting.result(WAIT_S) is not None

    def test_waiting_reader_sees_a_new_epoch(self) -> None:
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

    def test_concurrent_appends_all_arrive_once(self, store: Store) -> None:
        with ThreadPoolExecutor(4) as pool:
            places = list(pool.map(lambda i: store.append('s', {}, chunk(i)), range(200)))
        entries = store.read('s', max_entries=1000)
        assert sorted(number_of(entry) for entry in entries) == list(range(200))
        assert [entry.sequence for entry in entries] == list(range(1, 201))
        assert {number_of(entry): entry.id for entry in entries} == dict(enumerate(places))

    @pytest.mark.parametrize('wait', ['read', 'get', 'append'])
    def test_close_wakes_waiting_calls(self, wait: str) -> None:
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

    def test_closed_store_refuses_every_call(self, store: Store) -> None:
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
