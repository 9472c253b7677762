"""The table of the benchmark of data sets: bounds, and peers that are not installed."""

import sys

import pytest
import torch

from benchmarks import data_set_peers, datasets
from ding_store.datasets import DataSet, DataSetWriter


def test_peer_that_is_not_installed_is_named(tmp_path, monkeypatch):
    with DataSetWriter(str(tmp_path / 'set')) as writer:
        writer.append_elements([{'obs': torch.ones(3), 'done': torch.tensor(False)}] * 4)
    for name in ('webdataset', 'streaming'):
        monkeypatch.setitem(sys.modules, name, None)
    with DataSet(str(tmp_path / 'set')) as source:
        rows = list(data_set_peers.rows_of(source))
        assert [row['done'].shape for row in rows] == [(1,)] * 4
        peers = data_set_peers.rates(source, str(tmp_path), 2, lambda _: pytest.fail('it cannot be measured'))
    shown = {'rows': 4, 'row_bytes': 13, 'bytes': 52, 'write_bytes_per_s': 1.0, 'rows_per_s': {}, 'other_cores': 0.0}
    text = datasets.render_epochs({**shown, 'peers': {**peers, 'another': 5.0}})
    assert text.count('not installed') == 2
    assert 'another, DataLoader' in text


def test_datasets_bench_compares_each_way_to_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, 'OBS', 3)
    monkeypatch.setattr(datasets, 'hdf5', lambda path, workers: iter([1, 1]))
    monkeypatch.setattr(data_set_peers, 'rates', lambda *arguments: {})
    found = datasets.measure_epochs(str(tmp_path), 10 * datasets.BATCH, 1e-3)
    figures = found['rows_per_s']
    assert all(figure > 0 for figure in figures.values())

    figures.update({'disk: random reads': 100.0, 'epochs, half in memory': 150.0, 'memory: copy of rows': 1000.0})
    # The disk reads 100 of its half while memory gives 100 of the other.
    assert _row(found, 'half from the disk')[-2] == '200'
    assert _row(found, 'epochs, half in memory')[-1] == '0.75'
    figures['memory: copy of rows'] = 160.0  # Rows from the disk are copied as well.
    assert _row(found, 'half from the disk')[-2] == '160'


def _row(found, begin):
    (row,) = [each.split() for each in datasets.render_epochs(found).splitlines() if each.startswith(begin)]
    return row
