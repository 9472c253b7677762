"""Files are loaded into the page cache as a whole, although Linux limits the size of each request."""

import contextlib
import ctypes
import mmap
import os

import numpy as np
import pytest
import torch

from ding_store import page_cache
from ding_store.columns import Schema
from ding_store.datasets import DataSet, DataSetWriter
from ding_store.storage.testing import eventually

SIZE = 24 << 20


def num_resident(descriptor):
    """Return how many bytes of a file are in the page cache."""
    size = os.fstat(descriptor).st_size
    mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    result = ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (address, size, pages.ctypes.data)))
    assert result == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


@contextlib.contextmanager
def evicted(path):
    """Open a file that is not in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if num_resident(descriptor):
            pytest.skip('files of this file system stay in memory')
        yield descriptor
    finally:
        os.close(descriptor)


def test_load_reads_all_of_a_large_file(tmp_path):
    path = tmp_path / 'file'
    path.write_bytes(bytes(SIZE))
    with evicted(path) as descriptor:
        page_cache.load(descriptor, 0, SIZE)
        eventually(lambda: num_resident(descriptor) == SIZE, 'the file is in the page cache')


@pytest.mark.parametrize('options', [{'reads': 'direct', 'cache_bytes': 1 << 20}, {'reads': 'mapped'}])
def test_data_set_loads_the_rows_that_it_keeps(tmp_path, monkeypatch, options):
    obs = np.zeros((128, 4096), np.float32)  # rows of 16 KiB
    with DataSetWriter(str(tmp_path)) as writer:
        writer.append({'obs': obs}, Schema.infer([{'obs': torch.from_numpy(obs[0])}]))
    # Half of it, for the data set that is larger than that: reads='mapped' must not load all rows either.
    monkeypatch.setattr('ding_store.datasets.data_set.available_memory', lambda: 2 << 20)
    with evicted(tmp_path / '000000.rows') as descriptor, DataSet(tmp_path, **options) as data:
        data.load_more(len(data))
        eventually(lambda: num_resident(descriptor) >= 1 << 20, 'the rows are in the page cache')
        assert num_resident(descriptor) < obs.nbytes
