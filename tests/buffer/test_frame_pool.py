"""Frames that are kept once: references, free frames and hash collisions, beside a plain model."""

from collections import Counter
from typing import Any, Dict, List

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ding_store.buffer.table import frame_pool
from ding_store.buffer.table.frame_pool import FramePool

#: Few different frames, so that many are equal. Two of them differ in the last byte alone.
NUM_KINDS = 12
FIRST = np.zeros(1, np.int64)


def frame(kind: int, size: int) -> np.ndarray:
    made = np.full(size, kind // 2, np.uint8)
    made[-1] = kind
    return made


class Frames(RuleBasedStateMachine):
    """A pool whose rows come and go in any order, in which each kind of frame is kept once."""

    size, hash_bits, is_compiled = 1031, 64, True
    capacity = 64

    def __init__(self) -> None:
        super().__init__()
        self.pool = FramePool((np.dtype(np.uint8), (self.size,)), self.capacity)
        self.rows: Dict[int, np.ndarray] = {}
        self.kinds: Dict[int, List[int]] = {}
        self.next = 0

    @rule(kinds=st.lists(st.integers(0, NUM_KINDS - 1), min_size=1, max_size=8))
    def push(self, kinds: List[int]) -> None:
        if sum(map(len, self.kinds.values())) + len(kinds) > self.capacity:
            return
        self.rows[self.next] = self.pool.intern(np.stack([frame(kind, self.size) for kind in kinds]))
        self.kinds[self.next] = kinds
        self.next += 1

    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        if self.rows:
            row = data.draw(st.sampled_from(sorted(self.rows)))
            self.pool.release(self.rows.pop(row)[None], FIRST)
            del self.kinds[row]

    @rule()
    def recount(self) -> None:
        self.pool.recount(self.all())

    def all(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *self.rows.values()])

    @invariant()
    def is_sound(self) -> None:
        assert self.pool.findings(self.all()) == []
        for row, numbers in self.rows.items():
            assert [int(self.pool.frames[number][-1]) for number in numbers] == self.kinds[row]
        if self.is_compiled or self.hash_bits == 64:
            kinds = Counter(kind for each in self.kinds.values() for kind in each)
            assert self.pool.num_used == len(kinds)


@pytest.mark.parametrize('is_compiled', [True, False])
@pytest.mark.parametrize('hash_bits', [64, 2])
@pytest.mark.parametrize('size', [7, 1031, 2048])
def test_frame_pool_equals_a_model(is_compiled: bool, hash_bits: int, size: int, monkeypatch: Any) -> None:
    if not is_compiled:
        monkeypatch.setattr(frame_pool, 'load_kernels', lambda: None)
    monkeypatch.setattr(FramePool, 'hash_bits', hash_bits)
    machine = type('Machine', (Frames,), dict(size=size, hash_bits=hash_bits, is_compiled=is_compiled))
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None))


@pytest.mark.parametrize('hash_bits', [64, 4])
def test_pool_of_many_frames_grows_its_table(hash_bits: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(FramePool, 'hash_bits', hash_bits)
    pool, rng = FramePool((np.dtype(np.uint8), (32, 32)), 3000), np.random.default_rng(0)
    frames = rng.integers(0, 256, (1500, 32, 32), np.uint8)
    first, second = pool.intern(frames), pool.intern(frames[::-1])
    assert (second == first[::-1]).all()
    assert len(np.unique(first)) == pool.num_used == 1500
    assert (pool.frames[first] == frames).all()
    pool.release(np.stack([first, second], axis=1), np.arange(1000))
    assert pool.num_used == 1000
    assert pool.findings(np.concatenate([first[1000:], second[1000:]])) == []


def test_frames_that_differ_in_one_byte_are_two(monkeypatch: Any) -> None:
    """All of them have one hash, so that each byte decides: in blocks, in words and at the end."""
    monkeypatch.setattr(FramePool, 'hash_bits', 0)
    size = 1101
    pool, frames = FramePool((np.dtype(np.uint8), (size,)), size + 1), np.eye(size + 1, size, dtype=np.uint8)
    numbers = pool.intern(frames)
    assert len(np.unique(numbers)) == size + 1
    assert (pool.intern(frames) == numbers).all()


def test_frames_that_are_not_contiguous_are_interned() -> None:
    pool = FramePool((np.dtype(np.float32), (300,)), 10)
    columns = np.arange(900, dtype=np.float32).reshape(300, 3).T
    numbers = pool.intern(columns)
    assert (pool.frames[numbers] == columns).all()


def test_pool_reports_wrong_references() -> None:
    pool = FramePool((np.dtype(np.uint8), (2000,)), 10)
    numbers = pool.intern(np.zeros((2, 2000), np.uint8))
    assert pool.findings(numbers) == []
    assert pool.findings(numbers[:1]) == ['the numbers of references to frames are wrong']
    assert pool.findings(np.array([7], np.int32)) == ['a row refers to a frame that does not exist']


def test_full_pool_refuses_a_new_frame() -> None:
    pool = FramePool((np.dtype(np.uint8), (2000,)), 2)
    frames = np.arange(3, dtype=np.uint8).repeat(2000).reshape(3, 2000)
    pool.intern(frames[:2])
    with pytest.raises(RuntimeError, match='2 are in use'):
        pool.intern(frames[2:])
    pool.intern(frames[:2])
