"""Shuffled: each row once per epoch, in a random order."""

import copy
from pathlib import Path
from typing import Any, List, Set

import numpy as np
import pytest
from examples import MORE
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from live_rows import LiveRows, push

from ding_store.buffer import Shuffled, StoreBuffer, limited
from ding_store.buffer.samplers.shuffled import Permutation
from ding_store.errors import ConfigError, NotEnoughData


def filled(count: int, size: int = 30, seed: Any = 0, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, **{'sampler': Shuffled(seed), **options})
    push(buffer, count)
    return buffer


def sample(buffer: StoreBuffer, size: int) -> List[int]:
    batch = buffer.sample_batch(size)
    assert batch.data.x.tolist() == batch.rows.tolist()
    rows: List[int] = batch.rows.tolist()
    assert len(set(rows)) == size
    return rows


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_epoch_has_each_row_once() -> None:
    buffer = filled(24)
    epochs = [[row for _ in range(4) for row in sample(buffer, 6)] for _ in range(3)]
    assert [sorted(rows) for rows in epochs] == [list(range(24))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert buffer.sampler.num_epochs == 3


def test_pushed_rows_wait_for_the_next_epoch() -> None:
    buffer = filled(10)
    first = sample(buffer, 6)
    push(buffer, 4)
    assert sorted(first + sample(buffer, 4)) == list(range(10))
    assert sorted(sample(buffer, 14)) == list(range(14))


def test_rows_that_left_do_not_come() -> None:
    buffer = filled(20, size=20)
    first = sample(buffer, 4)
    gone = [row for row in range(3, 20) if row not in first][:5]
    buffer.delete([str(row) for row in gone])
    push(buffer, 8)  # Five of them take free slots, and rows 0, 1 and 2 leave.
    left = [row for row in range(3, 20) if row not in [*first, *gone]]
    assert sorted(sample(buffer, len(left))) == left
    push(buffer, 20)
    assert sorted(sample(buffer, 20)) == list(range(28, 48))


def test_batch_over_the_end_of_an_epoch_has_no_row_twice() -> None:
    for seed in range(30):
        buffer = filled(7, seed=seed)
        rows = [row for _ in range(7) for row in sample(buffer, 5)]
        assert [sorted(rows[start : start + 7]) for start in range(0, 35, 7)] == [list(range(7))] * 5


def test_whole_table_is_a_batch() -> None:
    buffer = filled(9)
    for _ in range(5):
        assert sorted(sample(buffer, 9)) == list(range(9))
    with pytest.raises(NotEnoughData, match=r'^There are less than 10 records in buffer\(9\)'):
        sample(buffer, 10)


def test_seed_decides_on_the_order() -> None:
    def orders(seed: Any) -> List[List[int]]:
        buffer = filled(20, seed=seed)
        return [sample(buffer, 20) for _ in range(2)]

    assert orders(3) == orders(3) != orders(4)
    np.random.seed(5)
    first = orders(None)
    np.random.seed(5)
    assert orders(None) == first


@pytest.mark.parametrize('ahead', [0, 3])
def test_reopened_epoch_goes_on(tmp_path: Path, ahead: int) -> None:
    model = filled(25)
    expected = [sample(model, 10) for _ in range(6)]
    found = []
    for step in range(6):
        buffer = filled(25 if step == 0 else 0, path=str(tmp_path / 'kept'), prefetch=ahead)
        found.append(sample(buffer, 10))
        assert buffer.check() == []
        num_epochs = buffer.sampler.num_epochs
        buffer.close()
    assert found == expected
    assert num_epochs == model.sampler.num_epochs == 3


def test_a_copy_and_a_state_go_on_in_the_epoch() -> None:
    buffer = filled(25)
    sample(buffer, 10)
    twin = copy.deepcopy(buffer)
    other = filled(25, seed=9)
    other.sampler.load_state(buffer.sampler.state())
    for _ in range(2):
        rows = sample(buffer, 7)
        assert sample(twin, 7) == sample(other, 7) == rows


def test_clear_and_load_begin_another_epoch(tmp_path: Path) -> None:
    buffer = filled(12)
    buffer.save_data(str(tmp_path / 'saved'))
    sample(buffer, 5)
    buffer.load_data(str(tmp_path / 'saved'))
    assert sorted(sample(buffer, 12)) == list(range(12))
    buffer.clear()
    push(buffer, 3)
    assert sorted(sample(buffer, 3)) == [12, 13, 14]
    assert buffer.sampler.num_epochs == 3


def test_rows_with_uses_left_come_in_each_epoch() -> None:
    buffer = filled(12, sampler=limited(Shuffled(0), max_times_sampled=2), prefetch=2)
    assert sorted(row for _ in range(6) for row in sample(buffer, 4)) == sorted([*range(12)] * 2)
    assert buffer.count() == 0
    buffer.close()


def test_two_readers_share_an_epoch() -> None:
    buffer = filled(12, prefetch=3)
    view = buffer.view()
    rows = [row for _ in range(2) for reader in (buffer, view, view) for row in sample(reader, 2)]
    assert sorted(rows) == list(range(12))
    buffer.close()


def test_shuffled_refuses_what_contradicts_an_epoch() -> None:
    buffer = filled(6)
    with pytest.raises(TypeError, match='a Shuffled samples rows once'):
        buffer.sample_batch(2, replace=True)
    with pytest.raises(TypeError, match='once'):
        buffer.sample(2, sample_range=slice(0, 3))
    with pytest.raises(ConfigError, match='another table'):
        StoreBuffer(3, sampler=buffer.sampler)
    for seed in (-1, 0.5, 1 << 32):
        with pytest.raises(ConfigError, match='seed'):
            Shuffled(seed)


@settings(max_examples=40 * MORE, deadline=None)
@given(count=st.integers(1, 5000), seed=st.integers(0, 99))
def test_permutation_has_each_number_once(count: int, seed: int) -> None:
    permutation = Permutation.over(count, np.random.RandomState(seed))
    assert count <= permutation.size <= max(256, 4 * count)
    assert np.array_equal(np.sort(permutation.of(np.arange(permutation.size))), np.arange(permutation.size))


@pytest.mark.parametrize('count', [10, 40])
def test_every_order_is_equally_likely(count: int) -> None:
    places, pairs = np.zeros((count, count)), np.zeros((count, count))
    for seed in range(1000):
        permutation = Permutation.over(count, np.random.RandomState([seed, 0]))
        numbers = permutation.of(np.arange(permutation.size))
        order = numbers[numbers < count]
        places[order, np.arange(count)] += 1
        pairs[order[:-1], order[1:]] += 1
    degrees = (count - 1) ** 2
    # The mean plus four standard deviations. Pairs of one row and itself do not occur.
    limit = degrees + 4 * np.sqrt(2 * degrees)
    assert chi_square(places) < limit
    assert chi_square(pairs[~np.eye(count, dtype=bool)]) < limit + count


class ShuffledModel(LiveRows):
    """The model is the set of rows that the epoch still owes."""

    @initialize(size=st.integers(1, 12), seed=st.integers(0, 99))
    def make(self, size: int, seed: int) -> None:
        self.buffer, self.size = StoreBuffer(size, sampler=Shuffled(seed)), size
        self.live = []
        self.left: Set[int] = set()

    @rule(size=st.integers(1, 8))
    def sample(self, size: int) -> None:
        if size > len(self.live):
            with pytest.raises(NotEnoughData):
                sample(self.buffer, size)
            return
        self.left &= set(self.live)
        rows = sample(self.buffer, size)
        ends = rows[: len(self.left)]
        assert set(ends) <= self.left
        self.left -= set(ends)
        if len(ends) < size:
            assert not self.left
            self.left = set(self.live)
            assert set(rows[len(ends) :]) <= self.left - set(ends)
            self.left -= set(rows[len(ends) :])


TestShuffledModel = ShuffledModel.TestCase
TestShuffledModel.settings = settings(max_examples=25 * MORE, stateful_step_count=25, deadline=None)
