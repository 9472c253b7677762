"""Compiled loops over the row index: to the last slot what numpy does."""

from typing import Any, List

import numpy as np
import pytest
from needs import lacking

from ding_store.buffer import StoreBuffer
from ding_store.buffer.kernels.load import load_kernels
from ding_store.buffer.sequences.sequence_index import SequenceIndex
from ding_store.buffer.table.rows import RowIndex
from ding_store.environment import ENV_NO_NUMBA


@pytest.fixture(autouse=True)
def _numba() -> None:
    if load_kernels() is None:
        lacking('no numba, which scripts/setup.sh installs')


def both(make: Any, monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """One that is compiled and one that is not."""
    made = []
    for without in ('0', '1'):
        monkeypatch.setenv(ENV_NO_NUMBA, without)
        made.append(make())
    return made


@pytest.mark.parametrize('seed', range(4))
def test_row_kernel_eviction_equals_numpy(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    indexes = both(lambda: RowIndex(60), monkeypatch)
    assert [index.kernels is not None for index in indexes] == [True, False]
    random = np.random.RandomState(seed)
    for _ in range(150):
        if random.rand() < 0.5 or indexes[0].count < 2:
            num_rows = random.randint(1, 61)
            for index in indexes:
                index.publish(index.allocate(num_rows)[0])
        else:
            removed = random.permutation(indexes[0].live_slots)[: random.randint(1, indexes[0].count + 1)]
            for index in indexes:
                index.remove(removed)
        one, other = indexes
        assert one.live_slots.tolist() == other.live_slots.tolist()
        assert one._place.tolist() == other._place.tolist()
        assert one.row_of_slot.tolist() == other.row_of_slot.tolist()
        assert one.findings() == []


@pytest.mark.parametrize('length', [1, 3, 33])
def test_row_kernel_windows_equal_numpy(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> SequenceIndex:
        buffer = StoreBuffer(400)
        random = np.random.RandomState(1)
        buffer.extend({'env': np.zeros(1, np.int64), 'done': np.zeros(1, bool)})
        index = buffer._elements.sequences.index('env', 'done')
        with buffer.table.index.lock:
            index.starts(1)
            index.refresh()
            for _ in range(12):
                buffer.extend({'env': random.randint(0, 3, 50), 'done': random.rand(50) < 0.02})
                index.refresh()
        buffer.delete([str(row) for row in random.permutation(600)[:20]])
        index.buffer = buffer
        return index

    starts = np.arange(400)
    (slots, there), (other_slots, others) = (index.windows(starts, length) for index in both(make, monkeypatch))
    assert there.tolist() == others.tolist()
    assert 0 < there.sum() < 400
    assert slots[:, there].tolist() == other_slots[:, there].tolist()
    # All of them, of which there is nothing to say.
    for index in both(make, monkeypatch):
        assert index.windows(starts[there], length)[1] is None


def test_row_kernel_finds_rows_in_their_slots() -> None:
    kernels = load_kernels()
    assert kernels is not None
    row_of_slot = np.arange(100, 200)
    slots = np.random.RandomState(0).permutation(100)
    assert kernels.are_at(row_of_slot, slots, slots + 100)
    assert kernels.are_at(row_of_slot, slots[:0], slots[:0])
    for place in (0, 50, 99):
        rows = slots + 100
        rows[place] += 1
        assert not kernels.are_at(row_of_slot, slots, rows)
        for nowhere in (-1, 100):
            wrong = slots.copy()
            wrong[place] = nowhere
            assert not kernels.are_at(row_of_slot, wrong, slots + 100)
