"""MinHeap and MaxHeap: the rows of the lowest or highest priorities, the oldest first of equal ones."""

import copy
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
from examples import MORE
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ding_store.buffer import MaxHeap, MinHeap, Prioritized, StoreBuffer, Uniform, limited
from ding_store.buffer.samplers.least_tree import LeastTree
from ding_store.errors import ConfigError, NotEnoughData, PriorityError

HEAPS = [MinHeap, MaxHeap]


def filled(heap: Any, priority: List[float], size: int = 20, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, **{'sampler': heap(), **options})
    buffer.extend({'x': np.arange(len(priority))}, priority=priority)
    return buffer


def sample(buffer: StoreBuffer, size: int, **options: Any) -> List[int]:
    rows: List[int] = buffer.sample_batch(size, **options).rows.tolist()
    return rows


@pytest.mark.parametrize('heap', HEAPS)
def test_heap_gives_rows_in_order_of_priority(heap: Any) -> None:
    buffer = filled(heap, [3.0, 1.0, 2.0, 1.0, 3.0])
    expected = [1, 3, 2] if heap is MinHeap else [0, 4, 2]
    assert sample(buffer, 3) == sample(buffer, 3) == expected
    assert buffer.sample_batch(3).weights is None
    buffer.update_priorities([1, 4], [2.5, 2.5])
    assert sample(buffer, 5) == ([3, 2, 1, 4, 0] if heap is MinHeap else [0, 1, 4, 2, 3])
    with pytest.raises(NotEnoughData, match=r'^There are less than 6 records in buffer\(5\)'):
        sample(buffer, 6)


@pytest.mark.parametrize('heap', HEAPS)
def test_row_without_a_priority_gets_the_largest_seen(heap: Any) -> None:
    buffer = filled(heap, [3.0, 5.0, 2.0])
    buffer.update_priorities([1], [4.0])
    row = int(buffer.extend({'x': np.arange(1)})[0])
    ordered = sample(buffer, 4)
    assert ordered == ([2, 0, 1, row] if heap is MinHeap else [row, 1, 0, 2])
    assert buffer.sampler.priorities.of(np.array([row])).tolist() == [5.0]


@pytest.mark.parametrize('prefetch', [0, 2])
def test_heap_with_one_use_is_a_priority_queue(prefetch: int) -> None:
    buffer = filled(lambda: limited(MinHeap(), max_times_sampled=1), [5.0, 3.0, 4.0, 1.0, 2.0], prefetch=prefetch)
    assert [sample(buffer, 1), sample(buffer, 2)] == [[3], [4, 1]]
    buffer.extend({'x': np.arange(1)}, priority=[4.5])
    assert sample(buffer, 1) == [2]
    assert sample(buffer, 2) == [5, 0]
    assert buffer.count() == 0
    buffer.close()


def test_heap_draws_from_a_range_in_order() -> None:
    buffer = filled(MaxHeap, [9.0, 1.0, 3.0, 3.0, 2.0])
    buffer.delete('1')
    assert sample(buffer, 2, sample_range=slice(-3, None)) == [2, 3]
    with pytest.raises(NotEnoughData, match=r'buffer\(3\)'):
        sample(buffer, 4, sample_range=slice(-3, None))


def test_heap_refuses_replacement_and_another_table() -> None:
    buffer = filled(MinHeap, [1.0, 2.0])
    with pytest.raises(TypeError, match='a MinHeap samples rows in order'):
        sample(buffer, 2, replace=True)
    with pytest.raises(ConfigError, match='another table'):
        StoreBuffer(3, sampler=buffer.sampler)
    with pytest.raises(PriorityError, match='at most'):
        buffer.update_priorities([0], [np.inf])
    with pytest.raises(PriorityError):
        buffer.update_priorities([0], [-1.0])


def test_state_of_another_sampler_is_refused() -> None:
    buffer = filled(MinHeap, [1.0, 2.0])
    other = StoreBuffer(20, sampler=Prioritized())
    other.extend({'x': np.arange(2)})
    with pytest.raises(PriorityError, match='alpha'):
        buffer.sampler.load_state(other.sampler.state())
    assert sample(buffer, 2) == [0, 1]


@pytest.mark.parametrize('heap', HEAPS)
def test_reopened_heap_has_its_priorities(heap: Any, tmp_path: Path) -> None:
    buffer = filled(heap, [3.0, 1.0, 2.0, 0.0], path=str(tmp_path / 'kept'))
    buffer.update_priorities([0], [7.0])
    buffer.close()
    buffer = filled(heap, [], path=str(tmp_path / 'kept'))
    assert sample(buffer, 4) == ([3, 1, 2, 0] if heap is MinHeap else [0, 2, 1, 3])
    buffer.extend({'x': np.arange(1)})
    assert buffer.sampler.priorities.of(np.array([0, 4])).tolist() == [7.0, 7.0]
    assert buffer.check() == []
    buffer.close()


@settings(max_examples=60 * MORE, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), capacity=st.sampled_from([1, 7, 8, 9, 64, 65, 600]))
def test_least_tree_gives_what_sorting_gives(seed: int, capacity: int) -> None:
    tree, random = LeastTree(capacity), np.random.RandomState(seed)
    model: Dict[int, Tuple[float, int]] = {}
    for _ in range(4):
        # Slots are repeated, and many keys are equal.
        slots = random.randint(0, capacity, random.randint(0, 200))
        keys = random.choice([0.0, -1.0, 1.0, 2.5, np.inf], len(slots))
        ties = random.permutation(capacity)[slots]
        tree.set(slots, keys, ties)
        model.update(zip(slots.tolist(), zip(keys.tolist(), ties.tolist())))
        # A tie may be that of another slot, whose key was set before.
        ordered = sorted(pair for pair in model.values() if pair[0] < np.inf)
        for count in (1, 3, 8, capacity):
            assert [model[slot] for slot in tree.least(count).tolist()] == ordered[:count]


class HeapModel(RuleBasedStateMachine):
    """The model is a priority per live row."""

    @initialize(size=st.integers(1, 12), heap=st.sampled_from(HEAPS))
    def make(self, size: int, heap: Any) -> None:
        self.buffer, self.size, self.heap = StoreBuffer(size, sampler=heap()), size, heap
        self.model: Dict[int, float] = {}
        self.largest = 1.0

    @rule(priority=st.lists(st.integers(0, 4), min_size=1, max_size=15), is_given=st.booleans())
    def push(self, priority: List[int], is_given: bool) -> None:
        rows = self.buffer.extend({'x': np.arange(len(priority))}, priority=priority if is_given else None).tolist()
        for row, value in zip(rows, priority):
            self.model[row] = float(value) if is_given else self.largest
        self.model = dict(sorted(self.model.items())[-self.size :])
        if is_given:
            self.largest = max([self.largest, *(self.model[row] for row in rows if row in self.model)])

    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from([-1, *self.model]), max_size=4))
        priority = data.draw(st.lists(st.integers(0, 6), min_size=len(rows), max_size=len(rows)))
        self.buffer.update_priorities(np.array(rows, np.int64), [float(each) for each in priority])
        for row, value in zip(rows, priority):
            if row in self.model:
                self.model[row] = float(value)
                self.largest = max(self.largest, float(value))

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from([-1, *self.model]), max_size=4))
        self.buffer.delete([str(row) for row in rows])
        self.model = {row: value for row, value in self.model.items() if row not in rows}

    @rule(size=st.integers(1, 12))
    def resize(self, size: int) -> None:
        self.buffer.resize(size)
        self.size, self.model = size, dict(sorted(self.model.items())[-size:])

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.model, self.largest = {}, 1.0

    @rule()
    def duplicate(self) -> None:
        self.buffer = copy.deepcopy(self.buffer)

    @precondition(lambda self: self.model)
    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            self.buffer.save_data(f'{directory}/saved')
            self.buffer.load_data(f'{directory}/saved')
        # A load replaces all rows, and new rows begin anew.
        self.model, self.largest = dict.fromkeys(self.model, 1.0), 1.0

    @rule(size=st.integers(1, 12))
    def sample(self, size: int) -> None:
        def order(item: Tuple[int, float]) -> Tuple[float, int]:
            return item[1] if self.heap is MinHeap else -item[1], item[0]

        expected = [row for row, _ in sorted(self.model.items(), key=order)]
        if size > len(expected):
            with pytest.raises(NotEnoughData):
                sample(self.buffer, size)
            return
        assert sample(self.buffer, size) == expected[:size]

    @precondition(lambda self: self.model)
    @rule()
    def sample_with_another(self) -> None:
        self.buffer.view(Uniform(0)).sample_batch(1)


TestHeapModel = HeapModel.TestCase
TestHeapModel.settings = settings(max_examples=25 * MORE, stateful_step_count=25, deadline=None)
