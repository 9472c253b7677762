"""Sequences: uniform starts, episodes, what changes them, and bad input."""

import contextlib
import copy
import gc
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch

from ding_store.buffer import StoreBuffer
from ding_store.errors import NotEnoughData, SchemaMismatch


def columns(first: int, count: int, envs: int = 3, every: int = 30) -> dict:
    """Environments take turns; each one's episode ends after ``every`` steps."""
    rows = np.arange(first, first + count)
    return {'row': rows, 'env': rows % envs, 'done': (rows // envs % every == every - 1)[:, None]}


def filled(count: int, size: int = 1000, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, seed=5)
    buffer.extend(columns(0, count, **options))
    return buffer


def starts_of(buffer: StoreBuffer, draws: int, size: int, length: int, **options: Any) -> Counter:
    counts: Counter = Counter()
    for _ in range(draws):
        counts.update(buffer.sample_sequences(size, length, 'env', **options).rows[0].tolist())
    return counts


def chi_square(counts: Counter, expected: List[int]) -> float:
    """Of uniform counts: about ``len(expected)``, with a standard deviation of the root of twice that."""
    assert set(counts) <= set(expected)
    mean = sum(counts.values()) / len(expected)
    return sum((counts[each] - mean) ** 2 / mean for each in expected)


@pytest.mark.parametrize('replace', [True, False])
def test_sequence_starts_are_equally_likely(replace: bool) -> None:
    buffer = filled(360, size=300)
    buffer.sample_sequences(1, 5, 'env')  # From now on it sees who leaves, and whose they were.
    buffer.delete([str(row) for row in (100, 101, 250)])
    live = set(buffer.table.rows_by_age().tolist())
    windows = [[row + 3 * k for k in range(5)] for row in range(360)]
    expected = [w[0] for w in windows if set(w) <= live and len({row // 3 // 30 for row in w}) == 1]
    counts = starts_of(buffer, 1500, 16, 5, replace=replace)
    freedom = len(expected) - 1
    assert abs(chi_square(counts, expected) - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize('size', [170, 300, 301, 700])
def test_sequence_starts_after_a_resize_are_live_rows(size: int) -> None:
    buffer = filled(360, size=300)
    buffer.sample_sequences(1, 5, 'env')
    buffer.sample_episodes(1, 'env')
    buffer.delete([str(row) for row in (200, 201, 333)])
    buffer.resize(size)
    for is_after_more in (False, True):
        live = set(buffer.table.rows_by_age().tolist())
        newest = max(live)
        windows = [[row + 3 * k for k in range(5)] for row in range(newest + 1)]
        # All rows were looked at anew, and of those that were deleted nobody knows any longer whose they were.
        whole = [w for w in windows if live.issuperset(range(w[0], w[-1] + 1))]
        expected = {w[0] for w in whole if len({row // 3 // 30 for row in w}) == 1}
        assert set(starts_of(buffer, 200, 16, 5, replace=True)) == expected
        for rows in np.split(*_episodes(buffer)) if is_after_more else []:
            assert set(rows.tolist()) <= live
            assert len(rows) == 30
        # And those of the rows that come then.
        buffer.extend(columns(newest + 1, 150))
    assert buffer.check() == []


@pytest.mark.parametrize('size', [20, 300])
def test_rows_pushed_before_a_resize_keep_their_order(size: int) -> None:
    buffer = StoreBuffer(100, seed=5)
    for count in (60, 18, 3, 15):
        buffer.extend(columns(buffer.table.next_row, count, every=1000))
        if count == 18:
            buffer.resize(size)
            continue
        live = buffer.table.rows_by_age()
        for rows in buffer.sample_sequences(64, 5, 'env', replace=True).rows.T:
            assert rows.tolist() == list(range(rows[0], rows[0] + 15, 3))
            assert set(rows.tolist()) <= set(live.tolist())


def _episodes(buffer: StoreBuffer) -> Any:
    episodes = buffer.sample_episodes(8, 'env', replace=True)
    return episodes.rows, np.cumsum(episodes.lengths)[:-1]


def test_groups_and_starts_of_groupby_are_equally_likely() -> None:
    buffer = StoreBuffer(200, seed=5)
    sizes = {'a': 10, 'b': 40, 'c': 3}
    for key, count in sizes.items():
        for i in range(count):
            buffer.push({'i': torch.tensor([i])}, {'key': key})
    counts: Counter = Counter()
    for _ in range(6000):
        (group,) = buffer.sample(1, groupby='key', unroll_len=4)
        numbers = [int(item.data['i']) for item in group]
        assert numbers == list(range(numbers[0], numbers[0] + 4))
        counts[group[0].meta['key'], numbers[0]] += 1
    assert {key for key, _ in counts} == {'a', 'b'}
    for key, count in (('a', 7), ('b', 37)):
        of_key = Counter({i: n for (k, i), n in counts.items() if k == key})
        assert abs(sum(of_key.values()) - 3000) < 5 * 1500**0.5
        assert abs(chi_square(of_key, list(range(count))) - (count - 1)) < 5 * (2 * count) ** 0.5


def test_sequences_with_burn_in_are_time_major() -> None:
    batch = filled(300).sample_sequences(4, 6, 'env', burn_in=3)
    assert batch.data['row'].shape == (9, 4)
    assert (np.diff(batch.rows, axis=0) == 3).all()
    assert batch.data['row'].tolist() == batch.rows.tolist()
    assert [[int(step['row']) for step in steps] for steps in batch.elements()] == batch.rows.T.tolist()


@pytest.mark.parametrize('make', [dict, ttorch.Tensor])
def test_sequence_batches_of_tensors_equal_nested_ones(make: Any) -> None:
    """Which are made of views that are kept."""
    leaves = {
        'obs': torch.randn(60, 3),
        'reward': torch.randn(60, 1),
        'action': torch.arange(60),
        'mask': torch.rand(60) > 0.5,
        'grid': torch.randint(0, 9, (60, 1, 2)),
        'nothing': torch.zeros(60, 0),
    }
    plain, nested = StoreBuffer(60, seed=5), StoreBuffer(60, seed=5)
    for i in range(60):
        element = {name: leaf[i] for name, leaf in leaves.items()}
        plain.push(make(element))
        nested.push({**element, 'more': {'x': torch.tensor(i)}})
    for length in (1, 4, 4, 10):
        one, other = (buffer.sample_sequences(3, length, None, done=None) for buffer in (plain, nested))
        assert one.rows.tolist() == other.rows.tolist()
        assert type(one.data) is type(other.data)
        assert len(one.data) == 3
        for name, leaf in leaves.items():
            tensor, expected = one.data[name], leaf[torch.from_numpy(one.rows)]
            assert tensor.dtype == leaf.dtype
            assert torch.equal(tensor, expected[..., 0] if name == 'reward' else expected)
            assert torch.equal(tensor, other.data[name])
        assert torch.equal(one.data[1]['obs'][-1], one.data.obs[-1, 1])


def test_overlapping_sequences_start_at_fixed_steps() -> None:
    starts = starts_of(filled(360), 200, 4, 10, overlap=4, replace=True)
    assert {row // 3 % 30 for row in starts} == {0, 6, 12, 18}


def test_seeded_sequences_repeat() -> None:
    def draw() -> list:
        buffer = filled(300)
        return [buffer.sample_sequences(4, 5, 'env').rows.tolist() for _ in range(3)]

    assert draw() == draw()


def test_sequences_of_several_group_columns_do_not_mix() -> None:
    buffer = StoreBuffer(500, seed=0)
    rows = np.arange(400)
    buffer.extend({'collector': rows % 2, 'env': rows // 2 % 3, 'done': np.zeros(400, bool)})
    batch = buffer.sample_sequences(30, 4, ('collector', 'env'))
    assert (batch.data.collector == batch.data.collector[0]).all()
    assert (batch.data.env == batch.data.env[0]).all()
    assert (np.diff(batch.rows, axis=0) == 6).all()


def test_sequences_follow_updated_rows() -> None:
    buffer = filled(90, every=1000)
    assert len(starts_of(buffer, 300, 16, 20)) == 3 * 11
    item = buffer.get_by_index('45')
    item.data.done.fill_(True)
    buffer.update('45', item.data)
    starts = starts_of(buffer, 300, 8, 20)
    assert {row for row in starts if row % 3 == 0} == set()
    assert {row for row in starts if row % 3 == 1} == set(range(1, 33, 3))


def test_sequences_follow_updated_metas() -> None:
    buffer = StoreBuffer(50, seed=0)
    for i in range(10):
        buffer.push({'done': torch.tensor([False])}, {'env': i % 2})
    assert len(starts_of(buffer, 50, 2, 5)) == 2
    buffer.update('4', meta={'env': 7})
    with pytest.raises(NotEnoughData):
        buffer.sample_sequences(2, 5, 'env')
    assert starts_of(buffer, 5, 1, 5) == Counter({1: 5})


def test_rows_evicted_before_indexing_break_sequences() -> None:
    buffer = filled(8, size=12, envs=1)
    buffer.sample_sequences(1, 2, 'env')
    buffer.extend(columns(8, 30, envs=1))
    assert set(starts_of(buffer, 100, 4, 4)) == set(range(26, 35)) - {27, 28, 29}
    with pytest.raises(NotEnoughData, match='whole episodes'):
        buffer.sample_episodes(1, 'env')


def test_sample_episodes_returns_whole_episodes() -> None:
    buffer = StoreBuffer(100, seed=0)
    lengths = [3, 7, 1, 5]
    for episode, length in enumerate(lengths):
        for step in range(length):
            last = step == length - 1
            buffer.push({'x': torch.tensor([float(step + 1)]), 'done': last, 'episode': episode})
    buffer.push({'x': torch.tensor([1.0]), 'done': False, 'episode': 9})
    sample = buffer.sample_episodes(4, 'episode')
    assert sorted(sample.lengths.tolist()) == [1, 3, 5, 7]
    assert sample.data.x.shape == sample.mask.shape == (7, 4)
    for place, length in enumerate(sample.lengths.tolist()):
        assert sample.data.x[:, place].tolist() == [*range(1, length + 1)] + [0.0] * (7 - length)
        assert sample.mask[:, place].tolist() == [1.0] * length + [0.0] * (7 - length)
        assert len(sample.elements()[place]) == length
    assert sorted(buffer.sample_episodes(2, 'episode', max_length=3).lengths.tolist()) == [1, 3]
    with pytest.raises(NotEnoughData, match='^There are less than 5 whole episodes'):
        buffer.sample_episodes(5, 'episode')


def test_sequences_after_many_deletes_have_live_rows_only() -> None:
    buffer = filled(900, every=10_000)
    buffer.sample_sequences(8, 4, 'env')
    buffer.delete([str(row) for row in range(900) if row // 3 % 20 < 18])
    with pytest.raises(NotEnoughData):
        buffer.sample_sequences(1, 4, 'env')
    assert len(starts_of(buffer, 100, 5, 2)) == 45


def test_sequence_starts_of_views_and_copies_are_their_rows() -> None:
    buffer = filled(300)
    buffer.sample_sequences(2, 3, 'env')
    view, twin = buffer.view(), copy.deepcopy(buffer)
    view.extend(columns(300, 300))
    assert max(starts_of(buffer, 40, 16, 3)) > 300
    assert max(starts_of(twin, 40, 16, 3)) < 300


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        (dict(length=0), TypeError, r'length \(0\)'),
        (dict(length=2.5), TypeError, r'length \(2.5\)'),
        (dict(length=3, burn_in=-1), TypeError, r'burn_in \(-1\)'),
        (dict(length=3, overlap=3), TypeError, r'overlap \(3\) must be below'),
        (dict(length=3, done='end'), SchemaMismatch, r"done \('end'\) must be a column"),
        (dict(length=3, groupby='nobody'), SchemaMismatch, r"groupby \('nobody'\) is neither a column"),
        (dict(length=3, groupby='wide'), SchemaMismatch, r"groupby \('wide'\) must be a column with one integer"),
        (dict(length=3, groupby=()), TypeError, 'groupby must name'),
        (dict(length=3, size=0), TypeError, 'size'),
    ],
)
def test_sequence_arguments_that_are_invalid_are_refused(arguments: dict, error: type, message: str) -> None:
    buffer = StoreBuffer(50)
    buffer.extend({**columns(0, 30), 'wide': np.zeros((30, 2), np.float32)})
    with pytest.raises(error, match=message):
        buffer.sample_sequences(**{'size': 2, 'groupby': 'env', **arguments})


def test_sequences_of_objects_or_single_rows_are_refused() -> None:
    buffer = StoreBuffer(5)
    buffer.push({'name': 'text', 'x': 1}, {'env': 0})
    with pytest.raises(SchemaMismatch, match='Python objects'):
        buffer.sample_sequences(1, 1, 'env', done=None)
    with pytest.raises(SchemaMismatch, match='Python objects'):
        buffer.sample_time_major(1)
    with pytest.raises(SchemaMismatch, match='lists of T steps'):
        filled(10).sample_time_major(1)


def test_sequences_between_threads_are_never_torn() -> None:
    buffer, done, errors = filled(300, size=400), threading.Event(), []

    def write() -> None:
        try:
            for first in range(300, 12_000, 60):
                buffer.extend(columns(first, 60))
                if first % 300 == 0:
                    buffer.delete([str(first - 10), str(first - 11)])
        except BaseException as e:  # noqa: BLE001  raised again below, in the test's own thread
            errors.append(e)
        finally:
            done.set()

    thread = threading.Thread(target=write)
    thread.start()
    num_samples = 0
    while not done.is_set() or not num_samples:
        batch = buffer.sample_sequences(8, 6, 'env')
        assert batch.data['row'].tolist() == batch.rows.tolist()
        assert (np.diff(batch.rows, axis=0) == 3).all()
        assert (batch.rows[0] // 3 // 30 == batch.rows[-1] // 3 // 30).all()
        num_samples += 1
    thread.join(60)
    assert not errors


def test_load_of_a_save_with_gaps_keeps_sequences_consecutive(tmp_path: Path) -> None:
    rows = np.arange(40)
    buffer = StoreBuffer(50, seed=0)
    buffer.extend({'env': rows * 0, 'row': rows, 'done': rows < 0})
    buffer.delete([str(row) for row in range(1, 36, 3)])
    buffer.save_data(str(tmp_path / 'save'))
    for _ in range(2):  # a buffer that knows nothing of them yet, and one that does
        buffer.load_data(str(tmp_path / 'save'))
        batch = buffer.sample_sequences(3, 3, 'env')
        assert (np.diff(batch.rows, axis=0) == 1).all()


@pytest.mark.parametrize('how', ['clear', 'load'])
def test_sequence_index_releases_replaced_columns(how: str, tmp_path: Path) -> None:
    small = StoreBuffer(50)
    small.extend_elements([{'env': torch.tensor(0), 'done': torch.tensor(False)}] * 9)
    small.save_data(str(tmp_path / 'save'))
    buffer = StoreBuffer(50, seed=0)
    buffer.extend_elements([{'env': torch.tensor(0), 'done': torch.tensor(False), 'large': torch.zeros(999)}] * 9)
    buffer.sample_sequences(3, 3, 'env')
    gone = weakref.ref(buffer.table.columns.current['large'].stored)
    if how == 'clear':
        buffer.clear()
        buffer.extend_elements([{'env': torch.tensor(0), 'done': torch.tensor(False)}])
    else:
        buffer.load_data(str(tmp_path / 'save'))
    gc.collect()
    assert gone() is None


def test_sequence_groups_removed_during_pushes_do_not_deadlock() -> None:
    """The table's two locks are taken in one order."""
    buffer = StoreBuffer(100, seed=0)
    buffer.extend({'x': np.zeros(100, np.float32)}, meta={'g': 1})
    deadline = time.monotonic() + 60

    def read() -> None:
        for _ in range(300):
            buffer._elements.metas.forget_groups()
            with contextlib.suppress(NotEnoughData):
                buffer.sample_sequences(4, 3, 'g', done=None)

    def write() -> None:
        while reader.is_alive() and time.monotonic() < deadline:
            buffer.extend({'x': np.zeros(5, np.float32)}, meta={'g': 1})

    reader = threading.Thread(target=read, daemon=True)
    writer = threading.Thread(target=write, daemon=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for each in (reader, writer):
            each.start()
        for each in (reader, writer):
            each.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not reader.is_alive()
    assert not writer.is_alive()


def test_steps_of_older_rows_stay_when_a_newer_one_lacks_some():
    buffer = StoreBuffer(10)
    for number in range(3):
        states = [torch.tensor([number, step]) for step in range(3)]
        buffer.push({'state': [None, *states[1:]] if number == 2 else states})
    found = [element.data['state'] for element in buffer.sample(3)]
    assert sorted(state[1].tolist() for state in found) == [[0, 1], [1, 1], [2, 1]]
    assert sorted(state[0] is None for state in found) == [False, False, True]
