"""remover: the elements that leave a full buffer are the oldest, those of the lowest priorities, or random ones."""

import copy
import math
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import pytest
import torch
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ding_store.buffer import (
    Fifo,
    MaxHeap,
    MinHeap,
    Prioritized,
    RankPrioritized,
    RateLimiter,
    SequencePrioritized,
    StoreBuffer,
    Uniform,
    limited,
)
from ding_store.errors import ConfigError, SchemaMismatch

WITH_PRIORITIES = {
    'proportional': lambda: Prioritized(seed=0),
    'rank': lambda: RankPrioritized(seed=0),
    'heap': MaxHeap,
    'limited': lambda: limited(MinHeap(), max_times_sampled=99),
}


def columns(numbers: List[int]) -> Dict[str, np.ndarray]:
    return {'x': np.array(numbers, np.int64), 'env': np.array(numbers, np.int64) % 2}


def numbers(buffer: StoreBuffer) -> List[int]:
    return [int(item.data.x) for item in buffer]


def filled(count: int, size: int = 6, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, **options)
    buffer.extend(columns(list(range(count))))
    return buffer


def test_row_of_the_lowest_priority_leaves_first() -> None:
    buffer = filled(6, sampler=Prioritized(seed=0), remover='lowest_priority')
    buffer.update_priorities(np.arange(6), [5.0, 1.0, 3.0, 1.0, 9.0, 0.0])
    buffer.extend(columns([6, 7]))
    assert numbers(buffer) == [0, 2, 3, 4, 6, 7]
    buffer.extend(columns([8]), priority=[0.5])
    assert numbers(buffer) == [0, 2, 4, 6, 7, 8]
    buffer.push(buffer.get(0).data)
    assert numbers(buffer) == [0, 2, 4, 6, 7, 0]
    buffer.resize(4)
    # Those without a priority have the largest seen, 9. The oldest of them leave after the lower ones.
    assert numbers(buffer) == [4, 6, 7, 0]
    assert buffer.check() == []


def test_more_rows_than_the_buffer_holds_replace_all() -> None:
    buffer = filled(6, sampler=MaxHeap(), remover='lowest_priority')
    buffer.extend(columns(list(range(6, 20))), priority=np.arange(14.0))
    assert numbers(buffer) == list(range(14, 20))


def test_refused_push_removes_no_row() -> None:
    buffer = StoreBuffer(3, sampler=MaxHeap(), remover='lowest_priority')
    for i in range(3):
        buffer.push({'x': torch.tensor(i)})
    buffer.update_priorities([0, 1, 2], [3.0, 1.0, 2.0])
    with pytest.raises(SchemaMismatch):
        buffer.extend_elements([{'x': torch.zeros(2)}] * 2)
    assert [int(item.data['x']) for item in buffer] == [0, 1, 2]
    buffer.push({'x': torch.tensor(3)})
    assert [int(item.data['x']) for item in buffer] == [0, 2, 3]


def test_copies_views_and_loads_keep_the_remover(tmp_path: Path) -> None:
    buffer = filled(6, sampler=MaxHeap(), remover='lowest_priority')
    buffer.update_priorities(np.arange(6), [2.0, 3.0, 1.0, 4.0, 5.0, 6.0])
    twin = copy.deepcopy(buffer)
    view = buffer.view(Fifo())
    view.extend(columns([6]))
    twin.extend(columns([6]))
    assert numbers(buffer) == numbers(twin) == [0, 1, 3, 4, 5, 6]
    assert view.sample_batch(6).rows.tolist() == [0, 1, 3, 4, 5, 6]
    buffer.save_data(str(tmp_path / 'saved'))
    buffer.load_data(str(tmp_path / 'saved'))
    buffer.update_priorities([3], [0.0])
    buffer.extend(columns([7]))
    assert numbers(buffer) == [0, 1, 4, 5, 6, 7]
    moved = StoreBuffer(3, sampler=MaxHeap(), remover='lowest_priority')
    moved.keep_in(str(tmp_path / 'kept'))
    moved.extend(columns([0, 1, 2]), priority=[2.0, 1.0, 3.0])
    moved.extend(columns([3]))
    assert numbers(moved) == [0, 2, 3]
    moved.close()


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(remover='newest'), r"remover \('newest'\) must be one of 'oldest', 'lowest_priority', 'reservoir'"),
        (dict(remover='lowest_priority'), 'not Uniform. Pass one as sampler'),
        (dict(remover='lowest_priority', sampler=SequencePrioritized()), 'not SequencePrioritized'),
        (dict(remover='reservoir', path='kept'), 'Leave out path, or choose another remover'),
    ],
)
def test_removers_that_cannot_work_are_refused(options: Dict[str, Any], message: str, tmp_path: Path) -> None:
    if 'path' in options:
        options = {**options, 'path': str(tmp_path / 'kept')}
    with pytest.raises(ConfigError, match=message):
        StoreBuffer(6, **options)
    assert not list(tmp_path.iterdir())


def test_reservoir_does_not_move_to_a_path(tmp_path: Path) -> None:
    buffer = StoreBuffer(6, remover='reservoir')
    with pytest.raises(ConfigError, match='Leave out path'):
        buffer.keep_in(str(tmp_path / 'kept'))
    buffer.extend(columns([1, 2]))
    assert numbers(buffer) == [1, 2]


# The reservoir


@pytest.mark.parametrize('is_one_by_one', [False, True])
def test_reservoir_keeps_each_row_with_the_same_chance(is_one_by_one: bool) -> None:
    num_rows, size, num_runs = 60, 8, 100 if is_one_by_one else 200
    counts, num_neighbours, random = np.zeros(num_rows), 0, np.random.RandomState(0)
    for run in range(num_runs):
        buffer = StoreBuffer(size, seed=run, remover='reservoir')
        first = 0
        while first < num_rows:
            end = min(num_rows, first + (1 if is_one_by_one else random.randint(1, 25)))
            buffer.extend(columns(list(range(first, end))))
            first = end
        kept = numbers(buffer)
        assert len(set(kept)) == size
        counts[kept] += 1
        num_neighbours += np.count_nonzero(np.diff(sorted(kept)) == 1)
    expected = num_runs * size / num_rows
    degrees = num_rows - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 4 * math.sqrt(2 * degrees)
    # Two rows in a row are kept as often as any two rows.
    chance = (num_rows - 1) * size * (size - 1) / (num_rows * (num_rows - 1))
    assert abs(num_neighbours - num_runs * chance) < 4 * math.sqrt(num_runs * chance)


def test_reservoir_copies_and_loads_go_on_counting(tmp_path: Path) -> None:
    buffer = filled(500, seed=0, remover='reservoir')
    twin = copy.deepcopy(buffer)
    buffer.extend(columns(list(range(500, 700))))
    twin.extend(columns(list(range(500, 700))))
    assert numbers(twin) == numbers(buffer)
    assert twin._elements.reservoir.num_seen == buffer._elements.reservoir.num_seen == 700
    buffer.save_data(str(tmp_path / 'saved'))
    again = StoreBuffer(6, seed=1, remover='reservoir')
    again.load_data(str(tmp_path / 'saved'))
    assert again._elements.reservoir.num_seen == 700
    again.clear()
    again.extend(columns([1, 2, 3]))
    assert numbers(again) == [1, 2, 3]


def test_reservoir_commits_a_note_with_no_row_kept() -> None:
    buffer = filled(5000, seed=0, remover='reservoir')
    kept = numbers(buffer)
    for step in range(20):
        buffer.extend(columns([5000 + step]), commit={'cursor': step})
        assert buffer.committed == {'cursor': step}
    assert numbers(buffer) == kept
    assert buffer.table.next_row == 5020


def test_reservoir_after_a_refused_push_is_whole() -> None:
    buffer = StoreBuffer(4, seed=0, remover='reservoir')
    for i in range(4):
        buffer.push({'x': torch.tensor(i)})
    for _ in range(5):
        with pytest.raises(SchemaMismatch):
            buffer.extend_elements([{'x': torch.zeros(2)}] * 4)
    assert [int(item.data['x']) for item in buffer] == [0, 1, 2, 3]
    assert buffer._elements.reservoir.num_seen == 4
    assert buffer.check() == []


def test_reservoir_works_with_a_limiter_and_limits() -> None:
    limiter = RateLimiter(2, samples_per_insert=1.0, error_buffer=60.0, max_insert=30, max_sample=4, timeout_s=0)
    sampler = limited(Prioritized(seed=0), max_times_sampled=3)
    buffer = StoreBuffer(6, sampler=sampler, limiter=limiter, prefetch=2, seed=0, remover='reservoir')
    pushed = 0
    for _ in range(30):
        buffer.extend(columns(list(range(pushed, pushed + 5))), priority=np.arange(5.0) + 1)
        pushed += 5
        assert buffer.sample_batch(4, replace=True).data.x.max() < pushed
    assert limiter.num_inserts == 150
    assert buffer.check() == []
    buffer.close()


class LowestModel(RuleBasedStateMachine):
    """The model is [number, priority, env] per live row."""

    has_path = False

    @initialize(size=st.integers(1, 8), kind=st.sampled_from(sorted(WITH_PRIORITIES)))
    def make(self, size: int, kind: str) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.size, self.kind, self.pushed, self.largest = size, kind, 0, 1.0
        self.model: Dict[int, List[Any]] = {}
        self.buffer = self.opened()

    def opened(self) -> StoreBuffer:
        path = f'{self.directory.name}/kept' if self.has_path else None
        return StoreBuffer(self.size, path=path, sampler=WITH_PRIORITIES[self.kind](), remover='lowest_priority')

    def teardown(self) -> None:
        if hasattr(self, 'buffer'):
            self.buffer.close()
            self.directory.cleanup()

    @rule(
        priority=st.lists(st.integers(0, 4), min_size=1, max_size=12), is_given=st.booleans(), with_meta=st.booleans()
    )
    def push(self, priority: List[int], is_given: bool, with_meta: bool) -> None:
        made = list(range(self.pushed, self.pushed + len(priority)))
        meta: Optional[dict] = {'env': self.pushed} if with_meta else None
        rows = self.buffer.extend(columns(made), priority=priority if is_given else None, meta=meta).tolist()
        stored = min(len(rows), self.size)
        self.leave(len(self.model) + stored - self.size)
        for row, number, value in list(zip(rows, made, priority))[-stored:]:
            self.model[row] = [number, float(value) if is_given else self.largest, meta or {}]
        if is_given:
            self.largest = max([self.largest, *map(float, priority[-stored:])])
        self.pushed += len(priority)

    def leave(self, count: int) -> None:
        for row in sorted(self.model, key=lambda row: (self.model[row][1], row))[: max(0, count)]:
            del self.model[row]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(list(self.model)), max_size=4, unique=True))
        values = [float(data.draw(st.integers(0, 6))) for _ in rows]
        self.buffer.update_priorities(np.array(rows, np.int64), values)
        for row, value in zip(rows, values):
            self.model[row][1] = value
            self.largest = max(self.largest, value)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.model)))
        self.buffer.delete(str(row))
        del self.model[row]

    @rule(size=st.integers(1, 8))
    def resize(self, size: int) -> None:
        self.buffer.resize(size)
        self.leave(len(self.model) - size)
        self.size = size

    @rule()
    def duplicate_or_reopen(self) -> None:
        if not self.has_path:
            self.buffer = copy.deepcopy(self.buffer)
            return
        self.buffer.close()
        self.buffer = self.opened()

    @rule()
    def sample(self) -> None:
        if self.model:
            assert set(self.buffer.view(Uniform(0)).sample_batch(1).rows.tolist()) <= set(self.model)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, 'buffer'):
            return
        found = [[int(item.index), int(item.data.x), dict(item.meta)] for item in self.buffer]
        assert found == [[row, number, meta] for row, (number, _, meta) in sorted(self.model.items())]
        assert self.buffer.check() == []


class DurableLowestModel(LowestModel):
    has_path = True


TestLowestModel = LowestModel.TestCase
TestLowestModel.settings = settings(max_examples=15 * MORE, stateful_step_count=20, deadline=None)
TestDurableLowestModel = DurableLowestModel.TestCase
TestDurableLowestModel.settings = settings(max_examples=6 * MORE, stateful_step_count=20, deadline=None)


class ReservoirModel(RuleBasedStateMachine):
    """The model is (number, priority, meta) per row that was pushed. The buffer holds some of them, whole."""

    @initialize(size=st.integers(1, 8), kind=st.sampled_from(['uniform', *WITH_PRIORITIES]), as_elements=st.booleans())
    def make(self, size: int, kind: str, as_elements: bool) -> None:
        sampler = WITH_PRIORITIES.get(kind, lambda: None)()
        self.buffer, self.size = StoreBuffer(size, sampler=sampler, seed=size, remover='reservoir'), size
        self.has_priorities, self.as_elements = sampler is not None, as_elements
        self.pushed: Dict[int, Any] = {}
        self.count = 0

    @rule(count=st.integers(1, 12), with_meta=st.booleans())
    def push(self, count: int, with_meta: bool) -> None:
        made = list(range(len(self.pushed), len(self.pushed) + count))
        priority = [1.0 + number % 5 for number in made] if self.has_priorities else None
        first = int(self.buffer.table.next_row)
        metas: List[Any] = [{'number': number} if with_meta else None for number in made]
        if self.as_elements:
            elements = [{'x': torch.tensor(number), 'env': torch.tensor(number % 2)} for number in made]
            if count == 1 and priority is None:
                rows = [int(self.buffer.push(elements[0], metas[0]).index)]
            else:
                rows = self.buffer.extend_elements(elements, metas, priority=priority).tolist()
        else:
            metas = [{'first': first} if with_meta else None] * count
            rows = self.buffer.extend(columns(made), priority=priority, meta=metas[0]).tolist()
        assert sorted(rows) == list(range(first, first + count))
        self.pushed.update(zip(rows, zip(made, priority or [None] * count, metas)))
        self.count = min(self.size, self.count + count)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        live = self.buffer.table.rows_by_age().tolist()
        if live:
            self.buffer.delete(str(data.draw(st.sampled_from(live))))
            self.count -= 1

    @rule(size=st.integers(1, 8))
    def resize(self, size: int) -> None:
        self.buffer.resize(size)
        self.size, self.count = size, min(size, self.count)

    @rule()
    def duplicate(self) -> None:
        self.buffer = copy.deepcopy(self.buffer)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, 'buffer'):
            return
        items = list(self.buffer)
        assert len(items) == self.count
        for item in items:
            number, _, meta = self.pushed[int(item.index)]
            assert (int(item.data['x']), dict(item.meta)) == (number, meta or {})
        if self.has_priorities and items:
            rows = self.buffer.table.rows_by_age()
            expected = [self.pushed[row][1] for row in rows.tolist()]
            assert self.buffer.sampler.priorities.of(rows) == pytest.approx(expected)
        assert self.buffer.check() == []


TestReservoirModel = ReservoirModel.TestCase
TestReservoirModel.settings = settings(max_examples=15 * MORE, stateful_step_count=20, deadline=None)
