"""Lifo: the newest rows first, each row once."""

import copy
from pathlib import Path
from typing import Any, List, Set

import numpy as np
import pytest
import torch
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from live_rows import LiveRows, push

from ding_store.buffer import Lifo, StoreBuffer, limited
from ding_store.buffer.table.rows import RowListener
from ding_store.errors import ConfigError, NotEnoughData, SchemaMismatch


def filled(count: int, size: int = 20, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, **{'sampler': Lifo(), **options})
    push(buffer, count)
    return buffer


def sample(buffer: StoreBuffer, size: int) -> List[int]:
    batch = buffer.sample_batch(size)
    assert batch.data.x.tolist() == batch.rows.tolist()
    rows: List[int] = batch.rows.tolist()
    return rows


def test_lifo_gives_the_newest_rows_first_and_once() -> None:
    buffer = filled(10)
    assert sample(buffer, 3) == [9, 8, 7]
    push(buffer, 2)
    assert sample(buffer, 4) == [11, 10, 6, 5]
    assert [item.index for item in buffer.sample(2)] == ['4', '3']
    assert buffer.sampler.num_left() == 3
    with pytest.raises(NotEnoughData, match=r'^There are less than 4 records in buffer\(3\)'):
        buffer.sample_batch(4)
    assert buffer.count() == 12


def test_lifo_with_one_use_removes_sampled_rows() -> None:
    buffer = filled(8, sampler=limited(Lifo(), max_times_sampled=1))
    assert sample(buffer, 5) == [7, 6, 5, 4, 3]
    assert buffer.table.rows_by_age().tolist() == [0, 1, 2]


def test_lifo_skips_rows_that_left() -> None:
    buffer = filled(10, size=6)
    buffer.delete(['9', '7'])
    assert sample(buffer, 3) == [8, 6, 5]
    push(buffer, 5)
    assert sample(buffer, 5) == [14, 13, 12, 11, 10]
    with pytest.raises(NotEnoughData, match=r'buffer\(0\)'):
        sample(buffer, 1)


def test_lifo_after_a_refused_push_has_all_rows() -> None:
    buffer = StoreBuffer(6, sampler=Lifo())
    buffer.extend_elements([{'x': torch.tensor(i)} for i in range(6)])
    assert sample(buffer, 2) == [5, 4]
    restored: List[int] = []
    listener = RestoreListener(restored)
    buffer.table.index.listen(listener)
    with pytest.raises(SchemaMismatch):
        buffer.extend_elements([{'x': torch.zeros(2)}] * 3)
    assert restored == [0, 1, 2]
    assert sample(buffer, 2) == [3, 2]
    row = int(buffer.push({'x': torch.tensor(int(buffer.table.next_row))}).index)
    assert sample(buffer, 2) == [row, 1]


class RestoreListener(RowListener):
    """Notes the slots whose rows were restored."""

    def __init__(self, slots: List[int]) -> None:
        self._slots = slots

    def restored(self, slots: np.ndarray) -> None:
        self._slots += slots.tolist()


def test_stacks_on_one_table_are_independent() -> None:
    buffer = filled(6)
    other = buffer.view(Lifo())
    assert sample(buffer, 4) == sample(other, 4) == [5, 4, 3, 2]
    with pytest.raises(ConfigError, match='another table'):
        StoreBuffer(3, sampler=buffer.sampler)
    with pytest.raises(ConfigError, match='no table yet'):
        Lifo().num_left()


def test_rows_drawn_ahead_go_back_to_another_reader() -> None:
    buffer = filled(12, prefetch=3)
    assert sample(buffer, 2) == [11, 10]
    assert sample(buffer.view(), 2) == [9, 8]
    assert buffer.sampler.num_left() == 8
    push(buffer, 1)
    assert sample(buffer, 2) == [12, 7]
    buffer.close()


def test_lifo_refuses_replacement_and_ranges() -> None:
    with pytest.raises(TypeError, match='a Lifo samples rows once'):
        filled(6).sample_batch(2, replace=True)
    with pytest.raises(TypeError, match='once'):
        filled(6).sample(2, sample_range=slice(0, 3))


@pytest.mark.parametrize('ahead', [0, 2])
def test_reopened_stack_gives_no_row_twice(tmp_path: Path, ahead: int) -> None:
    options = {'path': str(tmp_path / 'kept'), 'prefetch': ahead}
    buffer = filled(10, **options)
    assert sample(buffer, 3) == [9, 8, 7]
    buffer.close()
    buffer = filled(2, **options)
    assert sample(buffer, 4) == [11, 10, 6, 5]
    buffer.clear()
    push(buffer, 3)
    assert sample(buffer, 1) == [14]
    buffer.close()
    buffer = filled(0, **options)
    assert sample(buffer, 2) == [13, 12]
    assert buffer.check() == []
    buffer.close()


def test_a_copy_of_a_stack_continues_in_its_path(tmp_path: Path) -> None:
    buffer = filled(10, path=str(tmp_path / 'kept'))
    sample(buffer, 3)
    twin = copy.deepcopy(buffer)
    assert sample(twin, 2) == sample(buffer, 2) == [6, 5]
    buffer.save_data(str(tmp_path / 'saved'))
    buffer.load_data(str(tmp_path / 'saved'))
    # Rows of a file are new, as they are for every sampler.
    assert sample(buffer, 2) == [9, 8]
    buffer.close()


class LifoModel(LiveRows):
    @initialize(size=st.integers(1, 12))
    def make(self, size: int) -> None:
        self.buffer, self.size = StoreBuffer(size, sampler=Lifo()), size
        self.live = []
        self.sampled: Set[int] = set()

    @rule(size=st.integers(1, 6))
    def sample(self, size: int) -> None:
        waiting = [row for row in reversed(self.live) if row not in self.sampled]
        assert self.buffer.sampler.num_left() == len(waiting)
        try:
            rows = sample(self.buffer, size)
        except NotEnoughData:
            assert len(waiting) < size
            return
        assert rows == waiting[:size]
        self.sampled.update(rows)


TestLifoModel = LifoModel.TestCase
TestLifoModel.settings = settings(max_examples=20 * MORE, stateful_step_count=25, deadline=None)
