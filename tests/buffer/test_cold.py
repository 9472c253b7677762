"""Rows of tables that are larger than memory: read past the page cache, bit by bit what the mapping has."""

import ctypes
import itertools
import mmap
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from needs import lacking

from ding_store import free_space
from ding_store.buffer import StoreBuffer
from ding_store.buffer.table import cold, disk_reads
from ding_store.buffer.table.cold import ColdColumn
from ding_store.storage.testing import WAIT_S

C = ctypes.CDLL(None)
C.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PAGE = mmap.PAGESIZE
#: Bytes per row: whole pages, no whole pages, less than one.
SIZES = [64 * PAGE, 30 * PAGE + 2024, 1000]


def evict(array, descriptor):
    """Have no page of a mapped file in memory, if the file system lets go of them."""
    os.fsync(descriptor)
    C.madvise(array.ctypes.data, array.nbytes, mmap.MADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class File:
    """A column of int32 numbers that say where they are."""

    def __init__(self, path, num_rows, row_bytes):
        self.expected = np.arange(num_rows * row_bytes // 4, dtype=np.int32).reshape(num_rows, -1)
        path.write_bytes(self.expected.tobytes())
        self.descriptor = os.open(path, os.O_RDWR)
        self.mapped = np.frombuffer(mmap.mmap(self.descriptor, self.expected.nbytes), np.int32)
        self.column = self.mapped.reshape(self.expected.shape)
        try:
            self.cold = ColdColumn(self.column, self.descriptor)
        except OSError as error:
            lacking(f'this file system has no direct reads: {error}')

    def evict(self):
        evict(self.mapped, self.descriptor)
        if self.cold._held(0).any():
            lacking('this file system keeps pages that it is told not to need')

    def read(self, slots):
        out = np.zeros((len(slots), self.column.shape[1]), np.int32)
        self.cold.each(np.array(slots), lambda place, row: out[place].__setitem__(..., row))
        return out


@pytest.fixture
def file(request, tmp_path):
    made = File(tmp_path / 'column', 12, request.param)
    yield made
    os.close(made.descriptor)


@pytest.mark.parametrize('file', SIZES, indirect=True)
def test_cold_read_leaves_no_row_in_memory(file):
    file.evict()
    slots = [11, 0, 3, 3, 7, 1]
    assert np.array_equal(file.read(slots), file.expected[slots])
    assert file.cold.num_misses == 1
    assert not any(file.cold._held(slot).any() for slot in slots)


@pytest.mark.parametrize('file', SIZES, indirect=True)
def test_cold_read_returns_unsynced_writes(file):
    file.evict()
    rng = np.random.default_rng(0)
    for _ in range(30):
        file.evict()
        for number in rng.integers(0, file.mapped.size, 5):
            file.mapped[number] = file.expected.reshape(-1)[number] = rng.integers(1 << 30)
        slots = rng.permutation(12)
        assert np.array_equal(file.read(slots), file.expected[slots])


@pytest.mark.parametrize('file', SIZES[:1], indirect=True)
def test_cold_read_of_a_short_file_raises_after_all_threads_end(file):
    file.evict()
    os.ftruncate(file.descriptor, 6 * 64 * PAGE)
    running = set()

    def put(place, row):
        running.add(place)
        time.sleep(0.05)
        running.discard(place)

    with pytest.raises(OSError, match='ends at byte'):
        file.cold.each(np.array([11, 0, 1, 2, 3, 4]), put)
    assert not running


@pytest.mark.parametrize('file', SIZES[:1], indirect=True)
def test_cold_read_failing_put_raises_after_all_threads_end(file):
    """Of a row that memory has, which the caller's thread puts, while others read."""
    file.evict()
    C.madvise(file.mapped.ctypes.data, file.mapped.nbytes, mmap.MADV_RANDOM)
    file.column[0].sum()
    assert [file.cold._held(slot).all() for slot in (0, 5, 7, 11)] == [True, False, False, False]
    running, reading = set(), threading.Event()

    def put(place, row):
        if place == 0:
            assert reading.wait(WAIT_S)
            raise ValueError('no room')
        running.add(place)
        reading.set()
        row.sum()
        running.discard(place)

    with pytest.raises(ValueError, match='no room'):
        file.cold.each(np.array([0, 11, 5, 7]), put)
    assert not running


@pytest.mark.parametrize('file', SIZES, indirect=True)
def test_cold_read_reads_columns_in_parallel(file):
    """The rows of the second come while the first waits for them."""
    file.evict()
    out, both = np.zeros((2, 3, file.column.shape[1]), np.int32), threading.Barrier(2)

    def put(column):
        def put_one(place, row):
            if place == 0:
                both.wait(WAIT_S)
            out[column, place] = row

        return put_one

    slots = np.array([1, 5, 9])
    cold.read_cold([cold.ColdRead(file.cold, slots, put(column)) for column in range(2)])
    assert all(np.array_equal(each, file.expected[slots]) for each in out)


@pytest.mark.parametrize('file', SIZES[:1], indirect=True)
def test_cold_read_works_in_a_forked_process(file):
    file.evict()
    file.read([0, 1, 2])
    assert cold._threads.pool is not None
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if np.array_equal(file.read([3, 4, 5]), file.expected[3:6]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


LEVELS = np.arange(256, dtype=np.float32) / np.float32(255)


def frames(num_rows, shape):
    """Numbers of 0 to 255 by 255, which the table narrows."""
    return LEVELS[np.random.default_rng(1).integers(0, 256, (num_rows, *shape))]


@pytest.fixture
def larger_than_memory(monkeypatch):
    monkeypatch.setattr(free_space, 'available_memory', lambda: 0)
    monkeypatch.setattr(disk_reads, '_num_disk_faults', itertools.count().__next__)


def evict_all(buffer):
    found = buffer.table.columns._memory
    for name, file in found._file_of.items():
        evict(found.columns[name].reshape(-1), file.fd)


@pytest.mark.usefixtures('larger_than_memory')
def test_cold_batches_equal_those_from_memory(tmp_path):
    columns = {
        'frame': frames(20, (3, 200, 161)),
        'state': np.random.default_rng(2).random((20, 33_001)),
        'reward': np.arange(20, dtype=np.float32),
    }
    buffer = StoreBuffer(20, path=str(tmp_path / 'table'), seed=0)
    buffer.extend(columns)
    buffer.sample_batch(4)
    for _ in range(5):
        evict_all(buffer)
        assert set(buffer.table.columns.sources[1]) == {'frame', 'state'}
        batch = buffer.sample_batch(8)
        rows = batch.rows
        for name, values in columns.items():
            assert np.array_equal(batch.data[name].numpy(), values[rows])
        evict_all(buffer)
        found = buffer.table.gather(rows)
        assert all(np.array_equal(found[name], columns[name][rows]) for name in columns)
    assert all(column.num_misses for column in buffer.table.columns.sources[1].values())
    buffer.close()


@pytest.mark.usefixtures('larger_than_memory')
def test_cold_read_of_replaced_columns_skips_the_old_files(tmp_path, monkeypatch):
    buffer = StoreBuffer(20, path=str(tmp_path / 'table'), seed=0)
    buffer.extend({'state': np.zeros((20, 33_001))})
    table = buffer.table
    opened = disk_reads.DiskReads._open_cold

    def raced(found, columns, files):
        opened(found, columns, files)
        assert table.columns.sources[1]
        stale = found._cold
        table.shape.add_columns({'late': (np.dtype(np.float32), ())})
        found._cold = stale  # as of a thread that was stopped before its last store

    monkeypatch.setattr(disk_reads.DiskReads, '_open_cold', raced)
    buffer.sample_batch(4)
    assert not table.columns.sources[1]
    buffer.close()


@pytest.mark.usefixtures('larger_than_memory')
def test_cold_sequences_are_time_major(tmp_path):
    obs = torch.from_numpy(frames(6 * 5, (1, 300, 300)))
    sequences = [[{'obs': obs[5 * n + t], 'reward': torch.tensor([float(t)])} for t in range(5)] for n in range(6)]
    buffer = StoreBuffer(6, path=str(tmp_path / 'table'), seed=0)
    buffer.extend_elements(sequences)
    buffer.sample_time_major(2)
    for _ in range(3):
        evict_all(buffer)
        batch = buffer.sample_time_major(4)
        for place, row in enumerate(batch.rows.tolist()):
            assert torch.equal(batch.data['obs'][:, place], obs[5 * row : 5 * row + 5])
    assert sum(column.num_misses for column in buffer.table.columns.sources[1].values()) == 3
    buffer.close()


@pytest.mark.usefixtures('larger_than_memory')
def test_cold_read_during_writes_tears_no_row(tmp_path):
    buffer = StoreBuffer(16, path=str(tmp_path / 'table'), seed=0)
    row = np.ones((1, 70_000), np.int64)
    for number in range(16):
        buffer.extend({'x': row * number})
    ended, failures = threading.Event(), []

    def write():
        number = 16
        while not ended.is_set():
            buffer.extend({'x': row * number})
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until and not failures:
            evict_all(buffer)
            batch = buffer.sample_batch(4)
            if not (batch.data['x'].numpy() == batch.rows[:, None]).all():
                failures.append(batch.rows)
    finally:
        ended.set()
        writer.join()
    assert not failures
    buffer.close()


def test_table_that_fits_into_memory_uses_the_page_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_reads, '_num_disk_faults', itertools.count().__next__)
    buffer = StoreBuffer(20, path=str(tmp_path / 'table'), seed=0)
    buffer.extend({'state': np.zeros((20, 33_001))})
    for _ in range(3):
        buffer.sample_batch(8)
    assert not buffer.table.columns.sources[1]
    buffer.close()
