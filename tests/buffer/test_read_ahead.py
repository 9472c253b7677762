"""Large rows of files that memory does not hold: the disk is told about all of a batch before it is copied."""

import itertools

import numpy as np
import pytest

from ding_store.buffer import StoreBuffer
from ding_store.buffer.table import disk_reads

ROW = (64, 64, 64)  # floats: 1 MiB


@pytest.fixture
def advice(monkeypatch):
    given = []
    monkeypatch.setattr(disk_reads.os, 'posix_fadvise', lambda fd, *args: given.append(args))
    return given


def filled(path, shape=ROW):
    buffer = StoreBuffer(8, path=path, seed=0, share_frames=False)
    buffer.extend({'obs': np.arange(8, dtype=np.float32).reshape(8, 1, 1, 1) * np.ones(shape, np.float32)})
    return buffer


def test_read_ahead_after_page_faults_requests_whole_rows(tmp_path, advice, monkeypatch):
    monkeypatch.setattr(disk_reads, '_num_disk_faults', itertools.count().__next__)
    buffer = filled(str(tmp_path / 'table'))
    buffer.sample_batch(4)
    assert advice == []
    batch = buffer.sample_batch(4)
    size = 4 * np.prod(ROW)
    # The table was filled once, so a row's slot is its number.
    assert sorted(advice) == sorted((int(row) * size, size, disk_reads.os.POSIX_FADV_WILLNEED) for row in batch.rows)
    assert (batch.data.obs[:, 0, 0, 0].numpy() == batch.rows).all()
    buffer.close()


def test_read_ahead_skips_cached_and_small_rows(tmp_path, advice, monkeypatch):
    monkeypatch.setattr(disk_reads, '_num_disk_faults', lambda: 0)
    buffer = filled(str(tmp_path / 'large'))
    for _ in range(3):
        buffer.sample_batch(4)
    buffer.close()
    monkeypatch.setattr(disk_reads, '_num_disk_faults', itertools.count().__next__)
    for buffer in (filled(str(tmp_path / 'small'), (16, 16, 8)), filled(None)):
        for _ in range(3):
            buffer.sample_batch(4)
        buffer.close()
    assert advice == []
