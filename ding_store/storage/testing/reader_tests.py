"""Tests of readers: which entries a store keeps for them, acks, and ``advance``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ding_store.errors import ConfigError, StoreClosed
from ding_store.storage.base import OLDEST, EntryId
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store
from ding_store.storage.testing.case import StoreCase
from ding_store.storage.testing.helpers import WAIT_S, chunk, found_in, number_of


class ReaderTests(StoreCase):
    def test_stream_without_a_durable_reader_is_not_trimmed(self, store: Store) -> None:
        last = [store.append('s', {}, chunk(i)) for i in range(3)][-1]
        store.register('s', 'viewer', durable=False)
        store.ack('s', 'viewer', last)
        assert len(self.raw_log(store, 's')) == 3

    def test_entries_acked_by_all_durable_readers_are_trimmed(self, store: Store) -> None:
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

    def test_entries_read_and_not_acked_are_read_again(self, store: Store) -> None:
        reader = Reader(store, 's', 'r')
        for i in range(3):
            store.append('s', {}, chunk(i))
        assert len(reader.read()) == len(self.raw_log(store, 's')) == 3
        again = Reader(store, 's', 'r')
        assert [number_of(entry) for entry in again.read()] == [0, 1, 2]
        again.ack()
        assert self.raw_log(store, 's') == []

    def test_acks_without_a_wait_arrive_before_later_commands(self, store: Store) -> None:
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

    def test_ack_beyond_the_end_acks_existing_entries(self, store: Store) -> None:
        place = store.append('s', {}, {})
        store.register('s', 'a')
        store.ack('s', 'a', place._replace(number=100))
        assert store.append('s', {}, {}).number == 2
        assert len(store.read('s', store.register('s', 'a'))) == 1

    def test_advance_acks_and_puts_the_value(self, store: Store) -> None:
        place = store.register('s', 'r')
        for i in range(3):
            place = store.append('s', {}, chunk(i))
            store.advance('s', 'r', place, 'news', {'at': i})
        store.flush()
        assert store.read('s') == []
        with self.another(store) as other:
            assert found_in(other) == ({'at': 2}, 3)
        assert store.put('news', {}, {}) == 4
        assert set(store.info().values) == {'news'}

    def test_waiting_get_sees_an_advance_without_a_flush(self, store: Store) -> None:
        with self.another(store) as other, ThreadPoolExecutor() as pool:
            waiting = pool.submit(other.get, 'news', 0, WAIT_S)
            store.advance('s', 'r', OLDEST, 'news', {'at': 1})
            assert waiting.result(WAIT_S) is not None
        assert found_in(store) == ({'at': 1}, 1)

    def test_advance_after_a_memory_loss_succeeds(self, store: Store) -> None:
        store.register('s', 'r')
        place = store.append('s', {}, chunk(0))
        for i in range(3):
            store.advance('s', 'r', place, 'news', {'at': i})
            self.lose_memory(store)
        store.advance('s', 'r', place, 'news', {'at': 3})
        store.flush()
        assert found_in(store) == ({'at': 3}, 4)

    def test_advance_with_a_value_of_any_size(self, store: Store) -> None:
        store.advance('s', 'r', OLDEST, 'news', {'long': 'x' * 100_000})
        store.flush()
        assert found_in(store) == ({'long': 'x' * 100_000}, 1)

    @pytest.mark.parametrize('is_told_by_another', [False, True])
    def test_close_sends_the_advance(self, store: Store, is_told_by_another: bool) -> None:
        store.register('s', 'r')
        for i in range(2):
            place = store.append('s', {}, chunk(i))
            store.advance('s', 'r', place, 'news', {'at': i})
        with self.another(store) as other:
            if is_told_by_another:
                store.flush()
                other.put('news', {'at': 'another'}, {})
                store.advance('s', 'r', place, 'news', {'at': 2})
            store.close()
            assert found_in(other) == (({'at': 2}, 4) if is_told_by_another else ({'at': 1}, 2))
            assert other.read('s') == []

    def test_advance_during_close_is_done_or_refused(self) -> None:
        for _ in range(10):
            with self.open() as store, self.another(store) as other, ThreadPoolExecutor() as pool:
                done = pool.submit(_advance_until_closed, store)
                assert other.get('news', timeout_s=WAIT_S) is not None
                store.close()
                last, news = done.result(WAIT_S), found_in(other)
                assert news is not None
                assert news[0]['at'] >= last

    def test_start_now_reads_only_later_entries(self, store: Store) -> None:
        place = store.append('s', {}, chunk(1))
        assert store.register('s', 'late', start='now') == place
        with pytest.raises(ConfigError, match='start'):
            store.register('s', 'late', start='then')

    def test_forget_of_the_slowest_reader_trims(self, store: Store) -> None:
        place = store.append('s', {}, chunk(1))
        for reader in 'ab':
            store.register('s', reader)
        store.ack('s', 'a', place)
        assert store.forget('s', 'b')
        assert not store.forget('s', 'b')
        assert self.raw_log(store, 's') == []

    def test_forget_of_the_last_durable_reader_trims_its_entries(self, store: Store) -> None:
        store.register('s', 'viewer', durable=False)
        store.append('s', {}, chunk(1))
        assert store.forget('s', 'viewer')
        assert len(self.raw_log(store, 's')) == 1, 'it is kept for the first durable reader'
        store.register('s', 'a')
        assert store.forget('s', 'a')
        assert self.raw_log(store, 's') == []
        assert not store.forget('s', 'a')
        place = store.append('s', {}, chunk(2))
        assert not store.forget('s', 'a')
        assert store.read('s', store.register('s', 'next'))[0].id == place

    def test_deleted_streams_stay_deleted(self, store: Store) -> None:
        store.append('s', {}, chunk(1))
        assert store.delete('s')
        assert not store.delete('s')
        assert store.read('s') == []
        assert store.info().streams == {}
        store.append('s', {}, chunk(2))
        assert [number_of(entry) for entry in store.read('s')] == [2]
        assert list(store.info().streams) == ['s']


def _advance_until_closed(store: Store) -> int:
    """Call ``advance`` until the store is closed, and return the last position that it accepted."""
    at = 0
    while True:
        try:
            store.advance('s', 'r', OLDEST, 'news', {'at': at + 1})
        except StoreClosed:
            return at
        at += 1
