"""Ragged leaves: everything of DI-engine's buffers, batches with lengths, and what is refused."""

import copy
import os
from itertools import count
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from buffer_tests import BufferTests
from elements import RAGGED, check_ragged_batch, ragged, ragged_number
from test_threads import run_all

from ding_store.buffer import (
    Fifo,
    Fresh,
    Lifo,
    MaxHeap,
    Prioritized,
    RankPrioritized,
    Sampler,
    Shuffled,
    StoreBuffer,
    Uniform,
    limited,
)
from ding_store.buffer.table import reads as table_reads
from ding_store.errors import ConfigError, NotEnoughSpace, SchemaMismatch


class TestRagged(BufferTests):
    another_kind = {**ragged(3), 'extra': 4}

    def make(self, size: int, **options: Any) -> StoreBuffer:
        return StoreBuffer(size, ragged=RAGGED, **options)

    def element(self, i: int) -> Any:
        return ragged(i)

    def number(self, data: Any) -> int:
        return ragged_number(data)

    def test_clear_permits_another_kind_of_element(self) -> None:
        buffer = self.filled(5, 3)
        buffer.clear()
        buffer.push(self.another_kind)
        assert buffer.sample(1)[0].data['extra'] == 4
        buffer.clear()
        buffer.push(self.element(2))
        assert self.numbers(buffer) == [2]

    def test_view_shares_rows_but_not_middleware(self) -> None:
        buffer = self.filled(5, 5, sliced=True)
        view = buffer.view(Uniform(0))
        view.push(self.element(5))
        assert self.numbers(buffer) == [1, 2, 3, 4, 5]
        check_ragged_batch(view.gather_batch(np.array([2, 4])), [2, 4])
        view.clear()
        assert buffer.count() == 0


class TestRaggedInPath(TestRagged):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> Iterator[None]:
        self.paths, self.made = (str(tmp_path / f'kept-{i}') for i in count()), []
        yield
        for buffer in self.made:
            assert buffer.check() == []
            buffer.close()

    def make(self, size: int, **options: Any) -> StoreBuffer:
        self.made.append(super().make(size, path=next(self.paths), **options))
        return self.made[-1]


def filled(size: int, num_rows: int, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, **{'ragged': RAGGED, **options})
    buffer.extend_elements([ragged(i) for i in range(num_rows)], [{'i': i} for i in range(num_rows)])
    return buffer


SAMPLERS = {
    'uniform': lambda: Uniform(0),
    'prioritized': lambda: Prioritized(seed=0),
    'rank': lambda: RankPrioritized(seed=0),
    'fifo': Fifo,
    'lifo': Lifo,
    'heap': MaxHeap,
    'shuffled': lambda: Shuffled(seed=0),
    'fresh': lambda: Fresh(10, seed=0),
    'limited': lambda: limited(Uniform(0), max_times_sampled=2),
}


@pytest.mark.parametrize('name', SAMPLERS)
@pytest.mark.parametrize('prefetch', [0, 2])
def test_ragged_batch_of_each_sampler_is_padded(name: str, prefetch: int) -> None:
    make: Callable[[], Sampler] = SAMPLERS[name]
    buffer = filled(30, 50, sampler=make(), prefetch=prefetch)
    for step in range(4):
        batch = buffer.sample_batch(5)
        check_ragged_batch(batch, batch.rows.tolist())
        buffer.push(ragged(50 + step))
    buffer.close()


def test_held_ragged_batches_are_not_changed_by_later_ones() -> None:
    buffer = filled(30, 30)
    held = [buffer.sample_batch(8) for _ in range(12)]
    elements = [buffer.sample(4) for _ in range(12)]
    del held[3:6], elements[3:6]
    held += [buffer.sample_batch(8) for _ in range(6)]
    units = held[0].data.obs.units
    for batch in held:
        check_ragged_batch(batch, batch.rows.tolist())
    del held, batch
    copied = units.clone()
    for _ in range(20):
        buffer.sample_batch(8)
    assert torch.equal(units, copied)
    assert all(str(ragged_number(item.data)) == item.index for items in elements for item in items)


def test_ragged_sequences_and_episodes_are_padded() -> None:
    buffer = StoreBuffer(40, ragged=('units',))
    for i in range(40):
        buffer.push({'units': torch.full((i % 7, 2), float(i)), 'done': i % 10 == 9, 'env': 0})
    batch = buffer.sample_sequences(3, 4, 'env')
    units, lengths = batch.data['units'], batch.lengths['units']
    assert batch.rows.shape == lengths.shape == (4, 3)
    assert lengths.tolist() == (batch.rows % 7).tolist()
    assert units.shape == (4, 3, lengths.max(), 2)
    assert units.eq((torch.from_numpy(batch.rows)[..., None] * batch.mask('units'))[..., None]).all()
    assert [[len(step['units']) for step in steps] for steps in batch.elements()] == (batch.rows.T % 7).tolist()
    episodes = buffer.sample_episodes(2, 'env')
    rows = episodes.rows.reshape(2, 10).T
    assert episodes.leaf_lengths['units'].tolist() == (rows % 7).tolist()
    assert episodes.data['units'].shape == (10, 2, 6, 2)
    with pytest.raises(SchemaMismatch, match='ragged leaves cannot become a time-major batch'):
        buffer.sample_time_major(2)


def test_ragged_leaf_that_is_none_at_first_is_found() -> None:
    buffer = StoreBuffer(20, ragged=('units',))
    for i in range(12):
        buffer.push({'units': None if i < 3 or i % 5 == 4 else torch.full((i,), i), 'number': i})
    found = [item.data['units'] for item in buffer]
    assert [None if each is None else each.tolist() for each in found] == [
        None if i < 3 or i % 5 == 4 else [i] * i for i in range(12)
    ]
    assert buffer.gather_batch(np.array([5, 6])).data['units'].tolist() == [[5] * 5 + [0], [6] * 6]
    assert buffer.gather_batch(np.array([1, 6])).data['units'][0] is None
    assert buffer.check() == []


def test_all_leaves_with_a_dimension_may_be_ragged() -> None:
    buffer = StoreBuffer(20, ragged='all')
    for i in range(5):
        buffer.push(ttorch.as_tensor({'a': torch.arange(i), 'b': {'c': torch.full((i + 1, 2, i * 0 + 3), i)}}))
    assert sorted(buffer.schema.ragged) == ['a', 'b/c']
    batch = buffer.gather_batch(np.arange(5))
    assert batch.lengths['a'].tolist() == [0, 1, 2, 3, 4]
    assert isinstance(batch.elements()[2], ttorch.Tensor)
    whole = StoreBuffer(4, ragged='all')
    for i in range(3):
        whole.push(torch.arange(i))
    assert [item.data.tolist() for item in whole] == [[], [0], [0, 1]]


def test_ragged_columns_are_added_as_rows() -> None:
    buffer = StoreBuffer(20, ragged=('x',))
    buffer.extend({'x': [np.arange(3), np.arange(5)], 'y': np.arange(2.0)}, meta={'a': 1})
    buffer.extend({'x': np.zeros((3, 4), np.int64), 'y': np.zeros(3)})
    batch = buffer.gather_batch(np.arange(5))
    assert batch.lengths['x'].tolist() == [3, 5, 4, 4, 4]
    assert batch.data.x[1].tolist() == [0, 1, 2, 3, 4]
    assert buffer[0].meta == {'a': 1}
    with pytest.raises(SchemaMismatch, match='same number of rows'):
        buffer.extend({'x': [np.arange(3)], 'y': np.arange(2.0)})


def test_ragged_rows_with_middleware_make_a_batch() -> None:
    buffer = filled(20, 20)
    buffer.use(lambda action, chain, *args, **kwargs: chain(*args, **kwargs))
    batch = buffer.sample_batch(6)
    check_ragged_batch(batch, batch.rows.tolist())


def test_patch_changes_fixed_leaves_and_refuses_ragged_ones() -> None:
    buffer = filled(20, 20)
    buffer.update_if_present(np.array([3, 4]), {'obs/scalar': np.zeros((2, 2), np.float32)})
    assert buffer.get_by_index('3').data['obs']['scalar'].tolist() == [0, 0]
    assert len(buffer.get_by_index('3').data['obs']['units']) == 21
    for name in ('edges', '~place'):
        with pytest.raises(SchemaMismatch, match='ragged' if name == 'edges' else 'unknown'):
            buffer.update_if_present(np.array([3]), {name: np.zeros(1, np.int64)})
    assert buffer.check() == []


def test_varying_shape_names_the_option() -> None:
    buffer = StoreBuffer(5)
    buffer.push(ragged(1))
    with pytest.raises(
        SchemaMismatch, match=r"'obs/units': expected float32 \(7, 3\), got float32 \(14, 3\)\. .*ragged="
    ) as e:
        buffer.push(ragged(2))
    assert "ragged=('obs/units',)" in str(e.value)
    with pytest.raises(SchemaMismatch, match="ragged='all'"):
        StoreBuffer(5).extend_elements([torch.zeros(2), torch.zeros(3)])
    other = StoreBuffer(5, ragged=('obs/units',))
    other.push(ragged(1))
    with pytest.raises(SchemaMismatch, match=r"ragged=\('edges',\)"):
        other.push(ragged(2))
    assert other.count() == 1


@pytest.mark.parametrize(
    ('names', 'element', 'message'),
    [
        (('obs/unit',), ragged(1), 'is no leaf of the element. Its leaves are'),
        (('number',), ragged(1), 'has no dimension that could vary'),
        (('x',), [{'x': torch.zeros(2)}] * 2, 'it is in a list of 2 steps'),
        (('x',), {'x': 'text'}, 'columns cannot hold a str'),
    ],
)
def test_names_that_cannot_be_ragged_are_refused(names: Any, element: Any, message: str) -> None:
    buffer = StoreBuffer(5, ragged=names)
    with pytest.raises(SchemaMismatch, match=message):
        buffer.push(element)
    assert buffer.count() == 0


def test_options_that_are_no_names_are_refused(tmp_path: Path) -> None:
    for names in ('units', (3,)):
        with pytest.raises(ConfigError, match='must be a tuple of paths'):
            StoreBuffer(5, ragged=names)
    path = str(tmp_path / 'kept')
    filled(5, 3, path=path).close()
    for names in (('edges',), 'all'):
        with pytest.raises(ConfigError, match='differs from that of the elements'):
            StoreBuffer(5, path=path, ragged=names)
    buffer = StoreBuffer(5, path=path)
    buffer.push(ragged(4))
    assert [ragged_number(item.data) for item in buffer] == [0, 1, 2, 4]
    # Without elements, the option decides.
    buffer.clear()
    buffer.close()
    buffer = StoreBuffer(5, path=path, ragged=('edges',))
    buffer.push(ragged(4))
    with pytest.raises(SchemaMismatch, match='obs/units'):
        buffer.push(ragged(5))
    buffer.close()


def test_ragged_saves_load_where_the_option_differs(tmp_path: Path) -> None:
    name = str(tmp_path / 'save')
    filled(20, 20).save_data(name)
    for options in ({}, {'path': str(tmp_path / 'kept')}):
        plain = StoreBuffer(10, **options)
        plain.load_data(name)
        assert [ragged_number(item.data) for item in plain] == list(range(10, 20))
        plain.push(ragged(77))
        assert plain.check() == []
        plain.close()
    fixed = StoreBuffer(10)
    fixed.extend_elements([{'units': torch.full((3,), i / 255), 'n': i} for i in range(4)])
    fixed.save_data(name)
    buffer = StoreBuffer(10, ragged=('units',))
    buffer.load_data(name)
    buffer.push({'units': torch.ones(9), 'n': 4})
    assert [len(item.data['units']) for item in buffer] == [3, 3, 3, 3, 9]
    with pytest.raises(SchemaMismatch, match='is no leaf'):
        filled(5, 5).load_data(name)


def test_sizes_over_three_orders_of_magnitude_fit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    buffer = StoreBuffer(30, path=str(tmp_path), ragged='all')
    sizes = (10 ** rng.uniform(2, 5, 120)).astype(int)
    for i, size in enumerate(sizes.tolist()):
        buffer.push({'x': np.full(size, i % 250, np.uint8)})
    for item in buffer:
        assert len(item.data['x']) == sizes[int(item.index)]
        assert (item.data['x'] == int(item.index) % 250).all()
    file = tmp_path / 'packed'
    assert file.stat().st_blocks * 512 < 1.5 * max(sizes[i : i + 31].sum() for i in range(90)) + (1 << 20)
    assert buffer.check() == []
    buffer.close()


def test_ragged_file_stays_small_in_fifo_order() -> None:
    rng = np.random.default_rng(0)
    buffer = StoreBuffer(200, ragged='all')
    data, used, end = np.zeros(1 << 16, np.uint8), 0, 0
    for step in range(4000):
        buffer.push(data[: int(10 ** rng.uniform(2, 4.5))])
        if step > 1000:
            packets = buffer._elements.store._packets
            used, end = max(used, packets.used_bytes), max(end, packets._extents.end)
    assert end < 1.15 * used
    assert os.fstat(packets._file._descriptor).st_size < 1.5 * used + (1 << 20)


def test_ragged_rows_are_never_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_reads, 'QUICK_BYTES', -1)
    buffer = filled(20, 20)
    rng = np.random.default_rng(1)

    def write() -> None:
        for i in range(20, 500):
            row = int(buffer.push(ragged(i)).index)
            buffer.update(str(row - int(rng.integers(15))), ragged(row + 1000))
            if i % 9 == 0:
                buffer.delete(str(row - 5))

    def read() -> None:
        for _ in range(150):
            batch = buffer.sample_batch(6, replace=True)
            check_ragged_batch(batch, batch.data['number'].tolist())

    def read_items() -> None:
        for _ in range(150):
            for item in buffer.sample(6, replace=True):
                ragged_number(item.data)

    run_all(write, read, read_items)
    assert buffer.check() == []


def test_ragged_push_on_a_full_disk_changes_nothing(small_disk: Path) -> None:
    buffer = StoreBuffer(2000, path=str(small_disk / 'kept'), ragged='all')

    def fill() -> None:
        for i in range(2000):
            buffer.push({'x': torch.full((1000 + i,), i)})

    with pytest.raises(NotEnoughSpace, match='packed'):
        fill()
    pushed = buffer.count()
    assert 100 < pushed < 2000
    with pytest.raises(NotEnoughSpace):
        buffer.update('3', {'x': torch.zeros(1 << 20, dtype=torch.int64)})
    assert [int(item.data['x'][0]) for item in buffer] == list(range(pushed))
    assert buffer.check() == []
    buffer.delete([str(i) for i in range(4)])
    buffer.push({'x': torch.full((1000,), 7)})
    assert buffer.check() == []
    buffer.close()


def test_copied_ragged_buffer_keeps_its_option() -> None:
    twin = copy.deepcopy(filled(5, 5))
    twin.clear()
    twin.push(ragged(1))
    twin.push(ragged(2))
    assert [ragged_number(item.data) for item in twin] == [1, 2]
