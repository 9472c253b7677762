"""Files are loaded into the page cache as a whole, whatever the read-ahead of their disk is."""

import ctypes
import mmap
import os

import numpy as np
import pytest

from ding_store import page_cache
from ding_store.storage.testing import eventually

SIZE = 24 << 20


def num_resident(descriptor):
    """Return how many bytes of a file are in the page cache."""
    mapped = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
    pages = np.zeros(SIZE // mmap.PAGESIZE, np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    result = ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (address, SIZE, pages.ctypes.data)))
    assert result == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


def test_load_reads_all_of_a_large_file(tmp_path):
    path = tmp_path / 'file'
    path.write_bytes(bytes(SIZE))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if num_resident(descriptor):
            pytest.skip('files of this file system stay in memory')
        page_cache.load(descriptor, 0, SIZE)
        eventually(lambda: num_resident(descriptor) == SIZE, 'the file is in the page cache')
    finally:
        os.close(descriptor)
