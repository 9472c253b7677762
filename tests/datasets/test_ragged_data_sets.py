"""Data sets of elements whose leaves vary in size: padded batches with masks, crashes, damage, and what is refused."""

import os
import types

import numpy as np
import pytest
import torch
from easydict import EasyDict
from rows import element

from ding_store.buffer import StoreBuffer
from ding_store.datasets import DataSet, DataSetWriter, export
from ding_store.datasets.ding_dataset import StoreDataset
from ding_store.datasets.episodes import summary_of
from ding_store.errors import ConfigError, CorruptPayload, SchemaMismatch
from ding_store.middleware.mixed_batches import mixed_fetcher, parts_of

RAGGED = ('units', 'mates')


def ragged(number):
    """An element with number % 5 units, and with mates in every second one."""
    units = torch.full((number % 5, 3), float(number))
    mates = None if number % 2 else torch.arange(number % 7)
    return {**dict(element(number, number // 10, number % 10 == 9).items()), 'units': units, 'mates': mates}


def write(path, first=0, end=60, **options):
    with DataSetWriter(str(path), **{'commit_bytes': 1, **options}) as writer:
        for begin in range(first, end, 6):
            writer.append_elements([ragged(number) for number in range(begin, begin + 6)], ragged=RAGGED)


def check(found, numbers):
    assert len(found) == len(numbers)
    for one, number in zip(found, numbers):
        for name, leaf in ragged(number).items():
            assert (one[name] is None) == (leaf is None)
            assert leaf is None or (one[name].dtype == leaf.dtype and torch.equal(one[name], leaf)), name


@pytest.mark.parametrize('reads', ['mapped', 'direct'])
def test_ragged_rows_are_read_back_and_padded_in_batches(tmp_path, reads):
    write(tmp_path, segment_bytes=2000)
    with DataSet(tmp_path, reads=reads) as data:
        assert len(data.segments) > 2
        rows = [59, 0, 33, 33, 7]
        check(data.elements(rows), rows)
        check(data.train_batch(rows), rows)
        assert data.batch(rows).units.shape == (5, 4, 3)
        seen = []
        with data.epochs(8, seed=0, num_epochs=2) as epochs:
            for batch in epochs:
                numbers = epochs.rows
                seen += numbers.tolist()
                assert epochs.lengths['units'].tolist() == (numbers % 5).tolist()
                expected = epochs.mask('units') * torch.from_numpy(numbers)[:, None]
                assert batch.units.eq(expected[..., None]).all()
                assert batch.units.shape == (len(numbers), max(numbers % 5), 3)
                check(epochs.as_list(), numbers.tolist())
        assert sorted(seen) == sorted([*range(60)] * 2)
        with pytest.raises(KeyError, match="'obs' is not ragged"):
            epochs.mask('obs')
        assert data.verify() == {}


def test_ragged_rows_behind_the_last_commit_are_cut_off(tmp_path):
    write(tmp_path, 0, 12)
    (items,) = tmp_path.glob('*.items')
    size = items.stat().st_size
    for path in (items, *tmp_path.glob('*.rows')):
        with open(path, 'ab') as file:
            file.write(b'torn')
    (tmp_path / '000007.items').touch()  # of a segment whose log was not created
    write(tmp_path, 12, 18)
    assert items.stat().st_size > size
    assert not (tmp_path / '000007.items').exists()
    with DataSet(tmp_path) as data:
        check(data.elements(range(18)), range(18))
        assert data.verify() == {}


def test_damaged_items_are_named(tmp_path):
    write(tmp_path, segment_bytes=2000)
    first, second, *_ = sorted(tmp_path.glob('*.items'))
    with open(first, 'r+b') as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    with DataSet(tmp_path) as data:
        assert '000000.items' in data.verify()['000000']
    os.truncate(second, second.stat().st_size - 1)
    with pytest.raises(CorruptPayload, match='000001.items'):
        DataSet(tmp_path)
    assert list(DataSet(tmp_path, on_damage='skip').damaged) == ['000001']


@pytest.mark.parametrize(('column', 'value'), [('~at/units', 1 << 40), ('units', 1 << 60), ('units', -1)])
def test_items_that_do_not_exist_are_damage(tmp_path, column, value):
    write(tmp_path)
    (rows,) = tmp_path.glob('*.rows')
    with DataSet(tmp_path) as data:
        (at,) = [offset for name, *_, offset in data.layout.to_json()['columns'] if name == column]
    with open(rows, 'r+b') as file:
        file.seek(at)
        file.write(np.int64(value).tobytes())
    with DataSet(tmp_path) as data, pytest.raises(CorruptPayload, match='segment 000000 is damaged'):
        data.elements([0])


def test_segments_whose_ragged_leaves_differ_are_refused_by_these(tmp_path):
    with DataSetWriter(str(tmp_path)) as writer:
        for dtype in (np.float32, np.int64):
            writer.append_elements([{'x': np.zeros(1, np.float32), 'units': np.zeros(2, dtype)}], ragged=('units',))
    with pytest.raises(SchemaMismatch, match=r"'units': 'float32 \(\)'.*'units': 'int64 \(\)'"):
        DataSet(tmp_path)


def test_items_that_are_not_of_the_rows_are_refused(tmp_path):
    from ding_store.columns import Schema

    elements = [ragged(number) for number in range(5)]
    schema = Schema.infer(elements, ragged=RAGGED)
    columns, _ = schema.encode_ragged(elements)
    with DataSetWriter(tmp_path / 'set') as writer:
        with pytest.raises(SchemaMismatch, match="items of leaf 'mates'|items of leaf 'units'"):
            writer.append(columns, schema)
        items = {'units': np.zeros((1, 3), np.float32), 'mates': np.zeros(4, np.int64)}
        with pytest.raises(SchemaMismatch, match="leaf 'units' has 1 items"):
            writer.append(columns, schema, items=items)


def test_ragged_data_sets_are_refused_where_they_do_not_fit(tmp_path):
    write(tmp_path / 'set')
    with DataSet(tmp_path / 'set') as data:
        leaves = summary_of(data)['leaves']
        assert leaves['units'] == 'float32 (any, 3)'
        assert leaves['obs'] == 'float32 (4,)'
        export(data, str(tmp_path / 'out.hdf5'), 'hdf5')  # which has none of these leaves
        cfg = EasyDict(seed=0, policy=dict(learn=dict(batch_size=8)))
        buffer_ = StoreBuffer(100, ragged=RAGGED)
        for number in range(20):
            buffer_.push(ragged(number))
        parts = parts_of(cfg, [(data, 0.5), (buffer_, 0.5)])
        with pytest.raises(ConfigError, match="a DataSet '.*' has ragged leaves .*'units'"):
            list(mixed_fetcher(cfg, parts, True, False, None)(types.SimpleNamespace()))
    with DataSetWriter(tmp_path / 'obs') as writer:
        elements = [{**dict(element(i).items()), 'obs': torch.ones(i % 3, 2)} for i in range(9)]
        writer.append_elements(elements, ragged=['obs'])
    with DataSet(tmp_path / 'obs') as data, pytest.raises(ConfigError, match="leaf 'obs' .* which d4rl cannot hold"):
        export(data, str(tmp_path / 'out.hdf5'), 'd4rl')
    cfg = EasyDict(policy=dict(collect=dict(data_path=str(tmp_path / 'obs'))), env={})
    with pytest.raises(SchemaMismatch, match="leaf 'obs' .* varies in its first dimension"):
        StoreDataset(cfg).statistics  # noqa: B018
