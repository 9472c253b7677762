"""Frames that are there once, and references to them."""

from typing import Any

import numpy as np
import pytest

from ding_store.buffer.table import frame_references
from ding_store.buffer.table.frame_pool import FramePool
from ding_store.buffer.table.frame_references import FrameReferences, distinct_frames
from ding_store.environment import ENV_NO_NUMBA

SHAPE = (32, 32)


def frames_of(numbers: Any) -> np.ndarray:
    known = np.random.default_rng(0).integers(0, 256, (40, *SHAPE), np.uint8)
    return known[np.asarray(numbers)]


@pytest.mark.parametrize('compiled', [True, False])
@pytest.mark.parametrize('bits', [0, 2, 64])
def test_distinct_frames_are_those_with_different_bytes(monkeypatch: Any, compiled: bool, bits: int) -> None:
    """With no bits of the hash, all frames have one hash."""
    monkeypatch.setenv(ENV_NO_NUMBA, '0' if compiled else '1')
    monkeypatch.setattr(frame_references, '_ALL_BITS', (1 << bits) - 1)
    parts = [[3, 1, 3, 2], [7], [1, 7, 8, 8, 9]]
    made = [frames_of(numbers) for numbers in parts]
    made[2] = made[2].transpose(0, 2, 1).copy().transpose(0, 2, 1)  # not contiguous
    frames, numbers = distinct_frames(made, [0] * len(made))
    assert np.array_equal(frames, frames_of([3, 1, 2, 7, 8, 9]))
    assert np.array_equal(frames[numbers], frames_of([number for part in parts for number in part]))
    assert numbers.dtype == np.int32


def test_distinct_frames_differ_in_single_bits() -> None:
    frames = np.zeros((10, *SHAPE), np.float32)
    frames[1] = -0.0
    for place in range(2, 10):
        frames[place].view(np.uint8).reshape(-1)[-place] = 1
    found, numbers = distinct_frames([frames, frames[::-1]], [1, 0])
    assert found.tobytes() == frames.tobytes()
    assert numbers.tolist() == [*range(10), *range(9, -1, -1)]


@pytest.mark.parametrize('compiled', [True, False])
def test_references_have_the_values_of_their_frames(monkeypatch: Any, compiled: bool) -> None:
    monkeypatch.setenv(ENV_NO_NUMBA, '0' if compiled else '1')
    references = np.array([[0, 1], [2, 0], [1, 1]], np.int32)
    column = FrameReferences(frames_of([5, 6, 7]), references, (2, *SHAPE))
    values = frames_of([[5, 6], [7, 5], [6, 6]])
    assert (column.shape, column.dtype, column.ndim, len(column)) == (values.shape, values.dtype, 4, 3)
    assert np.array_equal(np.asarray(column), values)
    assert np.array_equal(np.asarray(column[1:]), values[1:])
    assert np.asarray(column, np.float32).dtype == np.float32


@pytest.mark.parametrize('compiled', [True, False])
def test_pool_counts_frames_as_often_as_they_are_used(monkeypatch: Any, compiled: bool) -> None:
    monkeypatch.setenv(ENV_NO_NUMBA, '0' if compiled else '1')
    pool = FramePool((np.dtype(np.uint8), SHAPE), 10)
    pool.reserve(5)
    pool.intern(frames_of([6]))
    # The last frame is used by none, and the third equals the first.
    references = np.array([0, 1, 1, 2, 0])
    numbers = pool.intern_repeated(frames_of([5, 6, 5, 9]), references)
    held = numbers[references]
    assert np.array_equal(pool.frames[held], frames_of([5, 6, 6, 5, 5]))
    assert pool.num_used == 2
    assert pool.findings(np.append(held, numbers[1])) == []
    pool.release(held[None], np.zeros(1, np.int64))
    assert pool.num_used == 1
    assert pool.findings(numbers[1:2]) == []
