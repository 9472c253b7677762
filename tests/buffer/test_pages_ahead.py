"""Private tables: pages that will be written soon are touched by a thread, and room is reserved ahead of the rows."""

import ctypes
import mmap
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from needs import lacking

from ding_store import free_space
from ding_store.buffer.table import cold, column_memory, page_touching
from ding_store.buffer.table.table import Table
from ding_store.errors import NotEnoughSpace

ROW_BYTES = 1 << 20
KINDS = ['memory', 'file']


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch, tmp_path):
    if request.param == 'file':
        monkeypatch.setattr(free_space, 'MEMORY_SHARE', 0)
        monkeypatch.setattr(free_space, 'roomiest_directory', lambda: str(tmp_path))
    return request.param


def columns(num_rows, value=1):
    return {'obs': np.full((num_rows, ROW_BYTES), value, np.uint8), 'action': np.full(num_rows, value)}


def table_of(num_rows, path=None):
    return Table({'obs': (np.dtype(np.uint8), (ROW_BYTES,)), 'action': (np.dtype(int), ())}, num_rows, path)


def rows_of(table):
    return table.gather(table.rows_by_age())


def settle(table):
    future = table.columns._memory._toucher._future
    assert future is not None
    done, _ = wait([future], 60)
    assert done


def num_held(table, start, stop):
    """Pages of these rows that memory has."""
    rows = table.columns.current['obs'].stored[start:stop]
    begin = rows.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = rows.ctypes.data + rows.nbytes - begin
    states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    assert cold._C.mincore(begin, size, states.ctypes.data) == 0, ctypes.get_errno()
    return int((states & 1).sum())


def num_faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.fixture
def able():
    """Where the kernel can: 5.14 and later."""
    toucher = page_touching.Toucher()
    toucher._touch([np.zeros(1 << 20, np.uint8)], 0, 1 << 20)
    if not toucher.is_able:
        lacking('this kernel has no MADV_POPULATE_WRITE (Linux 5.14)')


def test_page_touching_runs_ahead_of_pushes(kind, able):
    table = table_of(200)
    table.extend(columns(4))
    settle(table)
    assert num_held(table, 4, 12) >= 8 * ROW_BYTES // mmap.PAGESIZE - 1
    assert num_held(table, 100, 200) == 0, 'no more than some'
    rows = columns(4, 2)
    before = num_faults()
    table.extend(rows)
    assert num_faults() - before < ROW_BYTES // mmap.PAGESIZE
    assert (rows_of(table)['obs'][:, -1] == [1] * 4 + [2] * 4).all()
    table.close()


def test_page_touching_covers_the_rows_of_each_push(kind, able):
    table = table_of(300)
    table.extend(columns(10))
    for start in range(10, 300, 10):
        settle(table)
        assert num_held(table, start, start + 10) >= 10 * ROW_BYTES // mmap.PAGESIZE - 1, start
        table.extend(columns(10, start % 250))
    assert (rows_of(table)['action'][::10] == [1, *range(10, 250, 10), *range(0, 50, 10)]).all()
    table.close()


def test_page_touching_skips_a_full_table(kind, monkeypatch):
    table = table_of(8)
    table.extend(columns(8))
    touched = []
    monkeypatch.setattr(page_touching.Toucher, 'touch', lambda *arguments: touched.append(arguments))
    for _ in range(5):
        table.extend(columns(3))
    assert touched == []
    table.close()


def test_page_touching_skips_tables_with_a_path(tmp_path, monkeypatch):
    touched = []
    monkeypatch.setattr(page_touching.Toucher, 'touch', lambda *arguments: touched.append(arguments))
    table = table_of(64, str(tmp_path / 'table'))
    table.extend(columns(4))
    table.close()
    assert touched == []


def test_page_touching_stops_when_the_table_shrinks(kind, monkeypatch):
    """Or a file would have blocks again that were given back."""
    steps, may_go_on = threading.Semaphore(0), threading.Event()
    real = page_touching._C.madvise

    def slow(*arguments):
        steps.release()
        assert may_go_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr(page_touching, '_C', type('C', (), {'madvise': staticmethod(slow)}))
    table = table_of(200)
    table.extend(columns(4))
    assert steps.acquire(timeout=60)
    with ThreadPoolExecutor(1) as pool:
        resized = pool.submit(table.shape.resize, 6)
        toucher = table.columns._memory._toucher
        while not toucher._is_stopped:
            assert not resized.done() or resized.exception() is None
        may_go_on.set()
        resized.result(60)
    assert not steps.acquire(blocking=False), 'another step after the one that had begun'
    if kind == 'file':
        (file,) = {each.fd for name, each in table.columns._memory._file_of.items() if name == 'obs'}
        assert os.fstat(file).st_blocks * 512 <= 7 * ROW_BYTES
    table.extend(columns(4, 2))
    assert sorted(rows_of(table)['action']) == [1, 1, 2, 2, 2, 2]
    table.close()


def test_pushes_without_a_touching_thread_succeed(kind, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(page_touching._threads, 'submit', refuse)
    table = table_of(64)
    for value in range(8):
        table.extend(columns(4, value))
    assert len(table.rows_by_age()) == 32
    table.close()


def test_page_touching_refused_by_the_kernel_is_not_retried(kind, monkeypatch):
    asked = []

    def refuse(*arguments):
        asked.append(arguments)
        return -1

    monkeypatch.setattr(page_touching, '_C', type('C', (), {'madvise': staticmethod(refuse)}))
    table = table_of(200)
    for value in range(40):
        table.extend(columns(4, value))
        settle(table)
    assert len(asked) == 1
    assert len(table.rows_by_age()) == 160
    table.close()


def test_page_touching_survives_a_fork():
    table = table_of(400)
    table.extend(columns(16))
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            table.extend(columns(16, 2))
            table.shape.resize(20)
            rows = rows_of(table)['action']
            os._exit(0 if rows.tolist() == [1] * 4 + [2] * 16 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    table.close()


def test_space_reserved_ahead_is_shared_between_columns(small_disk, monkeypatch):
    monkeypatch.setattr(free_space, 'MEMORY_SHARE', 0)
    monkeypatch.setattr(free_space, 'roomiest_directory', lambda: str(small_disk))
    row_bytes = 1 << 16
    status = os.statvfs(small_disk)
    fits = status.f_bavail * status.f_frsize // (2 * row_bytes)
    spec = np.dtype(np.uint8), (row_bytes,)
    table = Table({'a': spec, 'b': spec}, 40)

    def push(value):
        rows = np.full((1, row_bytes), value, np.uint8)
        table.extend({'a': rows, 'b': rows})

    for value in range(fits):
        push(value)
    with pytest.raises(NotEnoughSpace, match='no room for rows'):
        push(fits)
    assert len(table.rows_by_age()) == fits
    batch = rows_of(table)
    for column in batch.values():
        assert (column[:, -1] == range(fits)).all()
    table.close()
    assert 40 * row_bytes < column_memory.EXTENT_BYTES
