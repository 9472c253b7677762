"""Tests of values and counters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ding_store.errors import NotEnoughSpace, VersionConflict
from ding_store.storage.store import Store
from ding_store.storage.testing.case import StoreCase
from ding_store.storage.testing.helpers import WAIT_S, chunk


class ValueTests(StoreCase):
    def test_values_have_versions(self, store: Store) -> None:
        for newer_than in (0, -1):
            assert store.get('weights/main', newer_than, timeout_s=0.01) is None
        assert store.put('weights/main', {'iter': 1}, chunk(1)) == 1
        assert store.put('weights/main', {'iter': 2}, chunk(2)) == 2
        value = store.get('weights/main')
        assert value is not None
        assert (value.name, value.version, value.header) == ('weights/main', 2, {'iter': 2})
        assert value.arrays['x'][0] == 2
        assert store.get('weights/main', newer_than=2) is None
        assert store.info().values == {'weights/main': 2}

    def test_waiting_get_returns_the_next_version(self, store: Store) -> None:
        store.put('v', {}, chunk(1))
        with self.another(store) as other, ThreadPoolExecutor() as pool:
            waiting = pool.submit(store.get, 'v', 1, WAIT_S)
            other.put('v', {}, chunk(2))
            value = waiting.result(WAIT_S)
        assert value is not None
        assert value.version == 2

    def test_wait_for_a_version_passes_over_earlier_ones(self, store: Store) -> None:
        assert not store.wait_for_version('v', 1, timeout_s=0.01)
        with self.another(store) as other, ThreadPoolExecutor() as pool:
            waiting = pool.submit(store.wait_for_version, 'v', 3, WAIT_S)
            for number in range(3):
                other.put('v', {}, chunk(number))
            while not waiting.result(WAIT_S):  # It may return sooner.
                waiting = pool.submit(store.wait_for_version, 'v', 3, WAIT_S)
        assert store.wait_for_version('v', 2, timeout_s=0.0)
        assert not store.wait_for_version('v', 4, WAIT_S, is_over=lambda: True)

    def test_put_with_an_expected_version_compares_and_swaps(self, store: Store) -> None:
        assert store.put('v', {}, {}, expected_version=0) == 1
        for expected in (0, 2):
            with pytest.raises(VersionConflict, match='version 1'):
                store.put('v', {}, {}, expected_version=expected)
        with pytest.raises(VersionConflict, match='-1'):
            store.put('v', {}, {}, expected_version=-1)
        assert store.put('v', {}, {}, expected_version=1) == 2

    def test_concurrent_swaps_succeed_once(self, store: Store) -> None:
        def swap(_: int) -> int:
            try:
                return store.put('v', {}, {}, expected_version=0)
            except VersionConflict:
                return 0

        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(swap, range(8))) == [0] * 7 + [1]

    def test_versions_grow_for_their_writer_only(self, store: Store) -> None:
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
    def test_put_under_a_known_version_is_new(self, store: Store, size: int) -> None:
        with self.another(store) as former:
            assert former.put('v', {}, chunk(1, size)) == 1
        known = store.get('v')
        assert known is not None
        assert store.get('v', newer_than=known.version) is None
        self.lose_memory(store)
        with self.another(store) as other:
            assert other.put('v', {}, chunk(2, size)) == 1
            value = None
            for timeout_s in (0.0, WAIT_S):
                value = store.get('v', newer_than=known.version, timeout_s=timeout_s)
                assert value is not None
                assert (value.version, value.arrays['x'][0]) == (1, 2)
            assert value is not None
            assert store.get('v', newer_than=value.version) is None
            with pytest.raises(VersionConflict, match='went back in time'):
                other.put('v', {}, {}, expected_version=known.version)
            assert store.put('v', {}, {}, expected_version=value.version) == 2

    @pytest.mark.parametrize('size', [1, 50_000])
    def test_versions_continue_after_the_start_version(self, store: Store, size: int) -> None:
        store.set_start_version('v', 7)
        store.set_start_version('v', 5)
        store.set_start_version('w', 3)
        assert store.put('v', {}, chunk(1, size)) == 8
        assert store.put('v', {}, chunk(1, size), expected_version=8) == 9
        with self.another(store) as other:
            other.set_start_version('v', 4)
            assert other.put('v', {}, {}) == 10

    def test_counters_add_and_are_deleted(self, store: Store) -> None:
        assert store.add('n') == 0
        assert store.add('n', np.int64(5)) == 5  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            store.add('n', 0.5)  # type: ignore[arg-type]
        with self.another(store) as other:
            assert other.add('n', -2) == 3
        assert store.info().counters == {'n': 3}
        assert store.delete('n')
        assert store.add('n') == 0

    def test_deleted_values_are_not_read(self, store: Store) -> None:
        store.put('v', {}, {})
        assert store.delete('v')
        assert store.get('v') is None
        assert not store.delete('v')
        assert store.info().values == {}

    def test_decision_of_one_process_stands(self, store: Store) -> None:
        assert not store.uphold('v')
        assert store.decide('v', {'by': 'one'}, expected_version=0) == 1
        with self.another(store) as other:
            with pytest.raises(VersionConflict, match='version 1'):
                other.decide('v', {'by': 'other'}, expected_version=0)
            value = other.get('v')
            assert value is not None
            assert value.header == {'by': 'one'}
            assert not other.uphold('v')
        assert store.uphold('v')

    def test_decision_gives_way_to_a_later_one(self, store: Store) -> None:
        first = store.decide('v', {}, expected_version=0)
        with self.another(store) as other:
            assert other.decide('v', {}, expected_version=first) == 2
            with pytest.raises(VersionConflict, match='version 2'):
                store.uphold('v')
            assert not store.uphold('v')
            assert other.uphold('v')

    def test_deleted_decision_is_not_decided_again(self, store: Store) -> None:
        store.decide('v', {}, expected_version=0)
        with self.another(store) as other:
            assert other.delete('v')
        assert not store.uphold('v')
        assert store.get('v') is None

    def test_decision_that_is_large_is_refused(self, store: Store) -> None:
        with pytest.raises(NotEnoughSpace, match="decision 'v' has"):
            store.decide('v', {'text': 'x' * (1 << 20)})
        assert store.get('v') is None
