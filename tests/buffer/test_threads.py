"""Writers and readers in different threads: no row is ever torn."""

import itertools
import sys
import threading
import time
from typing import Any, Callable, List

import numpy as np
import pytest
import torch

from ding_store.buffer import StoreBuffer
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.table import reads as table_reads
from ding_store.buffer.table.outputs import WarmOutputs
from ding_store.buffer.table.table import Table
from ding_store.errors import RowGone

WIDTH = 4096


@pytest.fixture(autouse=True)
def _switch_often() -> object:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def block(first: int, count: int) -> dict:
    """Rows that are wrong if any of their words is another row's."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    return {'a': numbers[:, None] + np.zeros((1, WIDTH), np.int64), 'b': ~numbers}


def check(rows: np.ndarray, columns: dict) -> None:
    a = columns['a']
    assert (a == a[:, :1]).all(), 'torn within a column'
    assert (a[:, 0] == ~columns['b']).all(), 'torn between columns'
    assert ((a[:, 0] - rows) % 1_000_000 == 0).all(), 'another row than was asked for'


def run_all(*jobs: Callable[[], None]) -> None:
    errors: List[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as e:  # noqa: BLE001  raised again below, in the test's own thread
            errors.append(e)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.fixture
def _look_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is read, without the lock."""
    monkeypatch.setattr(table_reads, 'QUICK_BYTES', -1)


@pytest.mark.parametrize('quick_bytes', [-1, 1 << 30])
def test_rows_read_during_writes_are_never_torn(quick_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_reads, 'QUICK_BYTES', quick_bytes)
    table = Table({'a': (np.dtype(np.int64), (WIDTH,)), 'b': (np.dtype(np.int64), ())}, 24)
    outputs = WarmOutputs(table.columns.specs)
    table.extend(block(0, 24))
    done = threading.Event()
    num_reads = [0, 0]

    def write() -> None:
        try:
            deadline = time.monotonic() + 30.0
            for i in itertools.count():
                if i >= 400 and (min(num_reads) > 10 or time.monotonic() > deadline):
                    return
                table.extend(block(table.next_row, 1 + i % 8))
                newest = table.next_row - 1
                if i % 5 == 0:
                    table.delete(np.array([newest - 3, newest - 9]))
                if i % 3 == 0:
                    # New data in an old row: its number stays, so the number alone would not tell.
                    table.update(np.array([newest - 1]), block(newest - 1 + 1_000_000 * i, 1))
        finally:
            done.set()

    def read(place: int) -> None:
        sampler = Uniform(place)
        while not done.is_set():
            rows, columns = table.read(
                lambda index: sampler.choose(index, 12), lambda slots: outputs.gather(table.columns.current, slots)[0]
            )
            check(rows, columns)
            try:
                check(rows[:4], table.gather(rows[:4]))
            except RowGone:
                pass
            num_reads[place] += 1

    run_all(write, lambda: read(0), lambda: read(1))
    assert min(num_reads) > 10


def test_torn_rows_are_found_by_the_check() -> None:
    columns = block(0, 4)
    columns['a'][2, 100:] = 77
    with pytest.raises(AssertionError, match='torn within'):
        check(np.arange(4), columns)


@pytest.mark.usefixtures('_look_twice')
def test_read_that_always_races_makes_writers_wait() -> None:
    table = Table({'a': (np.dtype(np.int64), ())}, 2)
    table.extend({'a': np.arange(2)})
    attempts = []

    def copy(slots: np.ndarray) -> int:
        attempts.append(len(slots))
        if len(attempts) <= 3:
            table.extend({'a': np.arange(2)})
        return len(attempts)

    rows, copied = table.read(lambda index: index.live_slots.astype(np.intp), copy)
    assert copied == 4
    assert sorted(rows.tolist()) == [6, 7]


@pytest.mark.usefixtures('_look_twice')
def test_read_during_an_update_is_redone() -> None:
    # The row keeps its number, so the number alone would not tell.
    table = Table({'a': (np.dtype(np.int64), ())}, 2)
    table.extend({'a': np.arange(2)})
    copies = []

    def copy(slots: np.ndarray) -> int:
        copies.append(table.columns.take(slots)['a'].tolist())
        if len(copies) == 1:
            table.update(np.array([1]), {'a': np.array([50])})
        return copies[-1]

    assert table.read(lambda index: np.array([0, 1]), copy)[1] == [0, 50]
    assert copies == [[0, 1], [0, 50]]


def test_read_of_few_rows_locks_out_writers() -> None:
    table = Table({'a': (np.dtype(np.int64), ())}, 2)
    table.extend({'a': np.arange(2)})
    writer = threading.Thread(target=lambda: table.update(np.array([1]), {'a': np.array([50])}))

    def copy(slots: np.ndarray) -> list:
        writer.start()
        writer.join(0.05)
        assert writer.is_alive()
        return table.columns.take(slots)['a'].tolist()

    assert table.read(lambda index: np.array([0, 1]), copy)[1] == [0, 1]
    writer.join(30)
    assert table.gather(np.array([1]))['a'].tolist() == [50]


@pytest.mark.parametrize('kind', ['columns', 'objects'])
def test_buffer_samples_between_threads_are_never_torn(kind: str) -> None:
    def element(i: int) -> Any:
        return {'x': torch.full((512,), float(i))} if kind == 'columns' else {'name': 'x', 'x': torch.tensor([i])}

    buffer = StoreBuffer(20, seed=0)
    buffer.extend_elements([element(i) for i in range(20)], [{'i': i} for i in range(20)])
    done = threading.Event()
    num_reads = 0

    def write() -> None:
        try:
            deadline = time.monotonic() + 30.0
            for i in itertools.count(20):
                if i >= 600 and (num_reads > 10 or time.monotonic() > deadline):
                    return
                buffer.push(element(i), {'i': i})
                if i % 4 == 0:
                    buffer.delete(str(i - 7))
        finally:
            done.set()

    def read() -> None:
        nonlocal num_reads
        while not done.is_set():
            for item in buffer.sample(8):
                assert (item.data['x'] == int(item.index)).all()
                assert item.meta['i'] == int(item.index)
                item.meta['seen'] = True
            num_reads += 1

    run_all(write, read)
    assert num_reads > 10
    assert all(item.meta['i'] == int(item.index) for item in buffer)
