"""Peers of the benchmark of data sets that are not installed are named in their rows."""

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
