"""StoreBuffer against a plain list that does what DequeBuffer is meant to do."""

import copy
import os
import tempfile
from typing import Any, List, Optional

import pytest
import torch
from elements import RAGGED, check_ragged_batch, number, ragged, ragged_number, transition
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ding_store.buffer import StoreBuffer
from ding_store.buffer.table.frame_pool import FramePool
from ding_store.errors import NotEnoughData, RowGone

METAS = st.one_of(st.none(), st.fixed_dictionaries({}, optional={'env': st.integers(0, 2), 'p': st.floats(0, 1)}))


class BufferModel(RuleBasedStateMachine):
    """The model is a list of [index, number, meta], oldest first."""

    @initialize(size=st.integers(1, 8), objects=st.booleans())
    def make(self, size: int, objects: bool) -> None:
        self.buffer, self.size, self.objects, self.pushed = self.new_buffer(size), size, objects, 0
        self.model: List[list] = []

    def new_buffer(self, size: int) -> StoreBuffer:
        return StoreBuffer(size, seed=1)

    def element(self, i: int) -> Any:
        return {'name': 'x', 'number': i} if self.objects else transition(i)

    def number(self, data: Any) -> int:
        return data['number'] if self.objects else number(data)

    def row(self, data: st.DataObject) -> str:
        return str(data.draw(st.integers(0, self.pushed + 1)))

    @rule(meta=METAS)
    def push(self, meta: Optional[dict]) -> None:
        item = self.buffer.push(self.element(self.pushed), None if meta is None else dict(meta))
        assert item.index == str(self.pushed)
        self.model = [*self.model, [item.index, self.pushed, meta or {}]][-self.size :]
        self.pushed += 1

    @rule(metas=st.lists(METAS, min_size=1, max_size=12), with_metas=st.booleans())
    def extend(self, metas: List[Optional[dict]], with_metas: bool) -> None:
        numbers = list(range(self.pushed, self.pushed + len(metas)))
        given = [None if meta is None else dict(meta) for meta in metas] if with_metas else None
        assert self.buffer.extend_elements([self.element(i) for i in numbers], given).tolist() == numbers
        added = [[str(i), i, (meta or {}) if with_metas else {}] for i, meta in zip(numbers, metas)]
        self.model = (self.model + added)[-self.size :]
        self.pushed += len(metas)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        rows = [self.row(data) for _ in range(3)]
        self.buffer.delete(rows)
        self.model = [item for item in self.model if item[0] not in rows]

    @rule(data=st.data(), value=st.one_of(st.none(), st.integers(500, 600)), meta=METAS)
    def update(self, data: st.DataObject, value: Optional[int], meta: Optional[dict]) -> None:
        index = self.row(data)
        found = [item for item in self.model if item[0] == index]
        element = None if value is None else self.element(value)
        assert self.buffer.update(index, element, None if meta is None else dict(meta)) is bool(found)
        for item in found:
            item[1:] = [item[1] if value is None else value, item[2] if meta is None else meta]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), mark=st.integers(0, 9))
    def write_into_a_sampled_meta(self, data: st.DataObject, mark: int) -> None:
        item = data.draw(st.sampled_from(self.model))
        self.buffer.sample(indices=[item[0]])[0].meta['mark'] = mark
        item[2] = {**item[2], 'mark': mark}

    @rule(data=st.data(), start=st.integers(-9, 9), stop=st.one_of(st.none(), st.integers(-9, 9)))
    def sample_a_range(self, data: st.DataObject, start: int, stop: Optional[int]) -> None:
        part = {item[0] for item in self.model[start:stop]}
        size = data.draw(st.integers(1, self.size))
        if size > len(part):
            with pytest.raises(NotEnoughData):
                self.buffer.sample(size, sample_range=slice(start, stop))
            return
        got = [item.index for item in self.buffer.sample(size, sample_range=slice(start, stop))]
        assert len(set(got)) == size
        assert set(got) <= part

    @rule(unroll_len=st.integers(1, 3), sliced=st.booleans())
    def sample_groups(self, unroll_len: int, sliced: bool) -> None:
        self.buffer.sliced = sliced
        groups = {}
        for index, _, meta in self.model:
            if 'env' in meta:
                groups.setdefault(meta['env'], []).append(index)
        long = [group for group in groups.values() if len(group) >= unroll_len]
        if not long:
            with pytest.raises(NotEnoughData):
                self.buffer.sample(1, groupby='env', unroll_len=unroll_len)
            return
        for items in self.buffer.sample(len(long), groupby='env', unroll_len=unroll_len):
            got = [item.index for item in items]
            assert len(got) == unroll_len
            assert any(got == group[i : i + unroll_len] for group in long for i in range(len(group)))

    @rule(size=st.integers(1, 12))
    def resize(self, size: int) -> None:
        self.buffer.resize(size)
        self.size, self.model = size, self.model[-size:]

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.model = []

    @rule()
    def duplicate(self) -> None:
        self.buffer = copy.deepcopy(self.buffer)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            name = os.path.join(directory, 'data')
            self.buffer.save_data(name)
            self.buffer = self.new_buffer(self.size)
            self.buffer.load_data(name)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, 'buffer'):
            return
        items = list(self.buffer)
        assert [[item.index, self.number(item.data), dict(item.meta)] for item in items] == self.model
        assert [self.buffer.indices.get(item[0]) for item in self.model] == list(range(len(self.model)))
        if self.model:
            assert self.buffer[-1].index == self.model[-1][0]
        with pytest.raises(RowGone):
            self.buffer.get_by_index(str(self.pushed))


class FramesModel(BufferModel):
    """The same with elements whose frames are kept once. Neighbours have four of their six frames in common."""

    #: The largest value of a frame is 1, so that float32 frames are stored as bytes, or 0.3.
    largest = 1.0

    @initialize(size=st.integers(1, 8))
    def make(self, size: int) -> None:
        super().make(size, False)

    def element(self, i: int) -> Any:
        return {'obs': self.stack(i), 'next_obs': self.stack(i + 1), 'number': torch.tensor([i])}

    def stack(self, i: int) -> torch.Tensor:
        levels = torch.arange(i, i + 3).remainder(256).float()[:, None, None]
        return (levels / 255 * self.largest).expand(3, 32, 32)

    def number(self, data: Any) -> int:
        i = int(data['number'])
        assert torch.equal(data['obs'], self.stack(i))
        assert torch.equal(data['next_obs'], self.stack(i + 1))
        return i

    @invariant()
    def frames_are_kept_once(self) -> None:
        if not hasattr(self, 'buffer'):
            return
        assert self.buffer.check() == []
        if self.model:
            shared = self.buffer.table.columns.shared
            frames = {each % 256 for _, number, _ in self.model for each in range(number, number + 4)}
            assert {name: each.pool.num_used for name, each in shared.items()} == dict.fromkeys(
                ('obs', 'next_obs'), len(frames)
            )


class WideFramesModel(FramesModel):
    largest = 0.3


class DurableFramesModel(FramesModel):
    """The same with a path. The buffer is closed and opened at any time, and all hashes are 0 to 3."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.TemporaryDirectory()
        self.number_of_path = 0
        FramePool.hash_bits = 2

    def new_buffer(self, size: int) -> StoreBuffer:
        if hasattr(self, 'buffer'):
            self.buffer.close()
        self.number_of_path += 1
        return self.opened(size)

    def opened(self, size: int) -> StoreBuffer:
        return StoreBuffer(size, seed=1, path=os.path.join(self.root.name, str(self.number_of_path)))

    @rule()
    def duplicate(self) -> None:
        """Instead of a copy, which would be in memory."""
        self.buffer.close()
        self.buffer = self.opened(self.size)

    def teardown(self) -> None:
        FramePool.hash_bits = 64
        if hasattr(self, 'buffer'):
            self.buffer.close()
        self.root.cleanup()


class RaggedModel(BufferModel):
    """The same with elements whose arrays have 0 to 40 items."""

    @initialize(size=st.integers(1, 8))
    def make(self, size: int) -> None:
        super().make(size, False)

    def new_buffer(self, size: int) -> StoreBuffer:
        return StoreBuffer(size, seed=1, ragged=RAGGED)

    def element(self, i: int) -> Any:
        return ragged(i)

    def number(self, data: Any) -> int:
        return ragged_number(data)

    @rule(size=st.integers(1, 6))
    def sample_a_batch(self, size: int) -> None:
        if not self.model:
            return
        batch = self.buffer.sample_batch(size, replace=True)
        numbers = {item[0]: item[1] for item in self.model}
        check_ragged_batch(batch, [numbers[str(row)] for row in batch.rows.tolist()])

    @invariant()
    def nothing_is_damaged(self) -> None:
        assert not hasattr(self, 'buffer') or self.buffer.check() == []


class DurableRaggedModel(RaggedModel):
    """The same with a path. The buffer is closed and opened at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.TemporaryDirectory()
        self.number_of_path = 0

    def new_buffer(self, size: int) -> StoreBuffer:
        if hasattr(self, 'buffer'):
            self.buffer.close()
        self.number_of_path += 1
        return self.opened(size)

    def opened(self, size: int) -> StoreBuffer:
        path = os.path.join(self.root.name, str(self.number_of_path))
        return StoreBuffer(size, seed=1, path=path, ragged=RAGGED)

    @rule()
    def duplicate(self) -> None:
        """Instead of a copy, which would be in memory."""
        self.buffer.close()
        self.buffer = self.opened(self.size)

    def teardown(self) -> None:
        if hasattr(self, 'buffer'):
            self.buffer.close()
        self.root.cleanup()


TestBufferModel = BufferModel.TestCase
TestBufferModel.settings = settings(max_examples=20 * MORE, stateful_step_count=25, deadline=None)
TestFramesModel = FramesModel.TestCase
TestFramesModel.settings = settings(max_examples=10 * MORE, stateful_step_count=25, deadline=None)
TestWideFramesModel = WideFramesModel.TestCase
TestWideFramesModel.settings = settings(max_examples=5 * MORE, stateful_step_count=25, deadline=None)
TestDurableFramesModel = DurableFramesModel.TestCase
TestDurableFramesModel.settings = settings(max_examples=10 * MORE, stateful_step_count=25, deadline=None)
TestRaggedModel = RaggedModel.TestCase
TestRaggedModel.settings = settings(max_examples=10 * MORE, stateful_step_count=25, deadline=None)
TestDurableRaggedModel = DurableRaggedModel.TestCase
TestDurableRaggedModel.settings = settings(max_examples=10 * MORE, stateful_step_count=25, deadline=None)
