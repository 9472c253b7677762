"""Fifo: the order of pushing, each row once."""

import copy
import threading
from collections import Counter
from pathlib import Path
from typing import List

import pytest
from elements import number, transition
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ding_store.buffer import Fifo, StoreBuffer, limited
from ding_store.errors import ConfigError, NotEnoughData


def push(buffer: StoreBuffer, count: int) -> None:
    buffer.extend_elements([transition(i) for i in range(count)])


def filled(count: int, size: int = 20) -> StoreBuffer:
    buffer = StoreBuffer(size, sampler=Fifo())
    push(buffer, count)
    return buffer


def test_fifo_gives_rows_in_order_and_once() -> None:
    buffer = filled(10)
    assert buffer.sample_batch(4).rows.tolist() == [0, 1, 2, 3]
    assert [number(item.data) for item in buffer.sample(5)] == [4, 5, 6, 7, 8]
    with pytest.raises(NotEnoughData, match=r'^There are less than 2 records in buffer\(1\)'):
        buffer.sample_batch(2)
    buffer.push(transition(10))
    assert buffer.sample_batch(2).rows.tolist() == [9, 10]
    assert buffer.count() == 11


def test_fifo_counts_rows_evicted_before_their_turn() -> None:
    buffer = filled(10, size=6)
    buffer.delete(['5', '7'])
    assert buffer.sample_batch(3).rows.tolist() == [4, 6, 8]
    assert buffer.sampler.num_missed == 6


def test_fifo_after_clear_or_load_counts_no_row_missed_twice(tmp_path: Path) -> None:
    saved = filled(15)
    saved.delete([str(row) for row in range(5)])
    saved.save_data(str(tmp_path / 'saved'))
    for kept in (None, str(tmp_path / 'kept')):
        buffer = StoreBuffer(6, path=kept, sampler=Fifo())

        push(buffer, 6)
        buffer.sample_batch(6)
        buffer.clear()
        push(buffer, 2)
        buffer.sample_batch(2)
        assert buffer.sampler.num_missed == 0
        # Those that leave before their turn are.
        buffer.clear()
        push(buffer, 6)
        push(buffer, 2)
        assert buffer.sample_batch(6).rows.tolist() == list(range(10, 16))
        assert buffer.sampler.num_missed == 2
        push(buffer, 3)
        buffer.clear()
        if kept is not None:
            buffer.close()
            buffer = StoreBuffer(6, path=kept, sampler=Fifo())
        with pytest.raises(NotEnoughData):
            buffer.sample_batch(1)
        push(buffer, 1)
        buffer.sample_batch(1)
        assert buffer.sampler.num_missed == 5
        # Of a file with rows 9 to 14, and before those that were here.
        buffer.load_data(str(tmp_path / 'saved'))
        assert buffer.sample_batch(3).rows.tolist() == [9, 10, 11]
        assert buffer.sampler.num_missed == 5
        buffer.close()


def test_fifo_with_one_use_removes_sampled_rows() -> None:
    buffer = StoreBuffer(20, sampler=limited(Fifo(), max_times_sampled=1))
    buffer.extend_elements([transition(i) for i in range(8)])
    assert buffer.sample_batch(5).rows.tolist() == [0, 1, 2, 3, 4]
    assert buffer.table.rows_by_age().tolist() == [5, 6, 7]


def test_several_queues_on_one_table_are_independent() -> None:
    buffer = filled(6)
    other = buffer.view(Fifo())
    assert buffer.sample_batch(4).rows.tolist() == other.sample_batch(4).rows.tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match='another table'):
        StoreBuffer(3, sampler=buffer.sampler)


def test_fifo_copy_continues_at_the_same_place() -> None:
    buffer = filled(6)
    buffer.sample_batch(2)
    twin = copy.deepcopy(buffer)
    assert twin.sample_batch(2).rows.tolist() == buffer.sample_batch(2).rows.tolist() == [2, 3]


def test_fifo_refuses_replacement_and_ranges() -> None:
    with pytest.raises(TypeError, match='once'):
        filled(6).sample_batch(2, replace=True)
    with pytest.raises(TypeError, match='once'):
        filled(6).sample(2, sample_range=slice(0, 3))


def test_fifo_between_threads_gives_each_row_once() -> None:
    buffer, seen, errors = StoreBuffer(2000, sampler=Fifo()), [[], []], []
    buffer.extend_elements([transition(i) for i in range(1600)])

    def read(place: int) -> None:
        try:
            while True:
                seen[place] += buffer.sample_batch(8).rows.tolist()
        except NotEnoughData:
            pass
        except BaseException as e:  # noqa: BLE001  raised again below, in the test's own thread
            errors.append(e)

    threads = [threading.Thread(target=read, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert Counter(seen[0] + seen[1]) == Counter(range(1600))


class FifoModel(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 12))
    def make(self, size: int) -> None:
        self.buffer, self.size = StoreBuffer(size, sampler=Fifo()), size
        self.live: List[int] = []
        self.next_row, self.last = 0, -1

    @rule(count=st.integers(1, 15))
    def push(self, count: int) -> None:
        self.buffer.extend_elements([transition(i) for i in range(count)])
        self.live = (self.live + list(range(self.next_row, self.next_row + count)))[-self.size :]
        self.next_row += count

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(max(0, self.next_row - 9), self.next_row), max_size=4))
        self.buffer.delete([str(row) for row in rows])
        self.live = [row for row in self.live if row not in rows]

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.live = []

    @rule(size=st.integers(1, 6))
    def sample(self, size: int) -> None:
        waiting = [row for row in self.live if row > self.last]
        try:
            rows = self.buffer.sample_batch(size).rows.tolist()
        except NotEnoughData:
            assert len(waiting) < size
            return
        assert rows == waiting[:size]
        self.last = rows[-1]


TestFifoModel = FifoModel.TestCase
TestFifoModel.settings = settings(max_examples=15 * MORE, stateful_step_count=25, deadline=None)
