"""Forked processes: what they sample of their parent's buffer is right, or refused, and none of them hangs."""

import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, List

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ding_store import free_space
from ding_store.buffer import Fifo, Prioritized, RateLimiter, StoreBuffer, Uniform, limited
from ding_store.errors import StoreClosed

SIZE = 64
WAIT_S = 60.0


def element(i: int) -> Any:
    return {'number': torch.tensor([i]), 'payload': torch.full((256,), float(i)), 'env': torch.tensor([i % 2])}


class Kind:
    """Buffers of a kind; the element of each row is that of its number."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path
        self.is_in_files = name in ('files', 'path', 'packed')

    def make(self, sampler: Any = None, **options: Any) -> StoreBuffer:
        path = str(self._path / 'table') if self.name in ('path', 'packed') else None
        return StoreBuffer(SIZE, path=path, sampler=sampler, **options)

    def element(self, i: int) -> Any:
        return [element(i)] * (1 + i % 3) if self.name in ('objects', 'packed') else element(i)

    def filled(self, count: int = SIZE, **options: Any) -> StoreBuffer:
        buffer = self.make(**options)
        self.push(buffer, range(count))
        return buffer

    def push(self, buffer: StoreBuffer, numbers: Any) -> None:
        buffer.extend_elements([self.element(i) for i in numbers])


KINDS = ['memory', 'objects', 'files', 'path', 'packed']


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kind:
    if request.param == 'files':
        monkeypatch.setattr(free_space, 'available_memory', lambda: 0)
    return Kind(request.param, tmp_path)


def check_items(items: List[Any]) -> None:
    for item in items:
        for each in item.data if isinstance(item.data, list) else [item.data]:
            assert int(each['number']) == int(item.index)
            assert each['payload'].tolist() == [float(item.index)] * 256


class Child:
    """A forked process that runs ``work(child)``; ended by force if it takes longer than WAIT_S."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        self._goes_on, goes_on = os.pipe()
        told, self._told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(goes_on)
            os.close(told)
            code = 1
            try:
                work(self)
                code = 0
            except BaseException:  # noqa: BLE001 - the child must not return into the test
                traceback.print_exc()
            os._exit(code)
        os.close(self._told)
        os.close(self._goes_on)
        self._told, self._goes_on = told, goes_on

    def say(self) -> None:
        """In the child."""
        os.write(self._told, b'.')

    def await_parent(self) -> None:
        """In the child: until ``go_on``."""
        assert select.select([self._goes_on], [], [], WAIT_S)[0]
        os.read(self._goes_on, 1)

    def go_on(self) -> None:
        os.write(self._goes_on, b'.')

    def await_child(self) -> None:
        assert select.select([self._told], [], [], WAIT_S)[0], 'the child hangs'
        os.read(self._told, 1)

    def end(self) -> int:
        """How it ended; -9 where it hung."""
        deadline = time.monotonic() + WAIT_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                _, status = os.waitpid(self.pid, 0)
                break
            time.sleep(0.002)
        os.close(self._told)
        os.close(self._goes_on)
        return os.waitstatus_to_exitcode(status)


CHANGES = {
    'push': lambda kind, buffer: kind.push(buffer, range(SIZE, SIZE + 8)),
    'update': lambda kind, buffer: buffer.update('5', kind.element(99)),
    'delete': lambda kind, buffer: (buffer.delete(['3', '4', '5']), kind.push(buffer, range(SIZE, SIZE + 3))),
    'clear': lambda kind, buffer: (buffer.clear(), kind.push(buffer, range(SIZE, SIZE + 9))),
    'resize': lambda kind, buffer: (buffer.resize(8), kind.push(buffer, range(SIZE, SIZE + 9))),
    'close': lambda kind, buffer: (buffer.close(), kind.push(kind.make(), range(SIZE, SIZE + 9))),
}


@pytest.mark.parametrize('change', CHANGES)
def test_forked_child_of_a_parent_that_changes_rows_reads(kind: Kind, change: str) -> None:
    buffer = kind.filled()
    # Private files that are closed are never written again.
    is_refused = kind.is_in_files and (kind.name, change) != ('files', 'close')

    def work(child: Child) -> None:
        check_items(buffer.sample(20))
        child.say()
        child.await_parent()
        for read in (lambda: buffer.sample(20), lambda: list(buffer), lambda: [buffer.get(0)]):
            if is_refused:
                with pytest.raises(StoreClosed, match='forked process any more'):
                    read()
            else:
                check_items(read())
        if not is_refused:
            assert [int(item.index) for item in buffer] == list(range(SIZE))

    child = Child(work)
    child.await_child()
    CHANGES[change](kind, buffer)
    child.go_on()
    assert child.end() == 0


def test_forked_child_of_a_parent_that_adds_rows_reads(kind: Kind) -> None:
    buffer = kind.filled(count=20)

    def work(child: Child) -> None:
        child.await_parent()
        assert buffer.count() == 20
        for _ in range(5):
            items = buffer.sample(20)
            check_items(items)
            assert sorted(int(item.index) for item in items) == list(range(20))

    child = Child(work)
    kind.push(buffer, range(20, 40))
    child.go_on()
    assert child.end() == 0


def test_forked_child_that_writes_is_refused(kind: Kind, tmp_path: Path) -> None:
    buffer = kind.filled(sampler=limited(Prioritized(seed=0), max_times_sampled=5))
    before = [(item.index, item.meta) for item in buffer]
    writes: List[Callable[[], Any]] = [
        lambda: buffer.push(kind.element(SIZE)),
        lambda: buffer.push(kind.element(SIZE + 1), {'meta': 1.5}),
        lambda: kind.push(buffer, range(SIZE + 2, SIZE + 9)),
        lambda: buffer.update(str(SIZE - 1), kind.element(SIZE - 1), {'meta': 1}),
        lambda: buffer.delete(str(SIZE - 2)),
        lambda: buffer.resize(32),
        lambda: buffer.commit({'cursor': 1}),
        buffer.clear,
    ]

    def work(child: Child) -> None:
        for write in writes:
            if kind.is_in_files:
                with pytest.raises(StoreClosed, match='forked process'):
                    write()
            else:
                write()
                check_items(list(buffer))
                assert buffer.check() == []
        if kind.is_in_files:
            items = buffer.sample(5)
            items[0].meta['seen'] = 1.5
            buffer.update_priorities(np.arange(5), np.arange(5.0))
            check_items(list(buffer))
        buffer.close()

    assert Child(work).end() == 0
    assert [(item.index, item.meta) for item in buffer] == before
    check_items(list(buffer))
    assert buffer.check() == []
    kind.push(buffer, range(SIZE, SIZE + 9))
    check_items(list(buffer))
    if kind.name in ('path', 'packed'):
        found = [item.index for item in buffer]
        buffer.close()
        assert [item.index for item in kind.make()] == found


def test_forked_child_whose_parent_died_is_refused(tmp_path: Path) -> None:
    """Then other processes may open the path."""
    kind, told, gone = Kind('path', tmp_path), os.pipe(), os.pipe()

    def parent(_: Child) -> None:
        buffer = kind.filled()

        def work(child: Child) -> None:
            check_items(buffer.sample(20))
            child.say()
            assert select.select([gone[0]], [], [], WAIT_S)[0]
            with pytest.raises(StoreClosed, match='forked process any more'):
                buffer.sample(20)
            os.write(told[1], b'refused')

        child = Child(work)
        child.await_child()
        os.close(told[1])

    assert Child(parent).end() == 0
    os.write(gone[1], b'.')
    os.close(told[1])
    assert select.select([told[0]], [], [], WAIT_S)[0]
    assert os.read(told[0], 100) == b'refused'
    for descriptor in (told[0], *gone):
        os.close(descriptor)


@contextmanager
def pushing(kind: Kind, buffer: StoreBuffer, num_threads: int = 2) -> Iterator[List[int]]:
    """Threads that change the buffer all the time, and sample it."""
    is_over = threading.Event()
    counts = [0] * num_threads
    raised: List[BaseException] = []

    def run(number: int) -> None:
        try:
            while not is_over.is_set():
                with buffer.table.write_lock:
                    first = buffer.table.next_row
                    kind.push(buffer, range(first, first + 3))
                buffer.sample(4)
                counts[number] += 1
        except BaseException as e:  # noqa: BLE001 - raised below
            raised.append(e)

    threads = [threading.Thread(target=run, args=[number], daemon=True) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    yield counts
    is_over.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    if raised:
        raise raised[0]


SAMPLERS = {
    'uniform': (Uniform, {}),
    'prioritized': (lambda: limited(Prioritized(seed=0), max_times_sampled=1000), {'prefetch': 2}),
    'queue': (lambda: Fifo(times=5), {}),
}


@pytest.mark.parametrize('sampler', SAMPLERS)
@pytest.mark.parametrize('name', ['memory', 'path'])
def test_forks_during_pushes_of_threads_sample(
    name: str, sampler: str, tmp_path: Path, num_forks: int = int(os.environ.get('DING_STORE_FORKS', '4'))
) -> None:
    kind = Kind(name, tmp_path)
    make, options = SAMPLERS[sampler]
    limiter = RateLimiter(1, 1.0, 1e9, SIZE, 10)
    buffer = kind.filled(sampler=make(), limiter=limiter, **options)

    def work(_: Child) -> None:
        for _ in range(3):
            try:
                items = buffer.sample(4)
                check_items(items)
                if not kind.is_in_files:
                    assert buffer.check() == []
                    check_items(list(buffer))
                    first = buffer.table.next_row
                    kind.push(buffer, range(first, first + 3))
                    assert set(buffer.sample_batch(4).rows.tolist()) <= set(buffer.table.rows_by_age().tolist())
            except StoreClosed:
                assert kind.is_in_files

    with pushing(kind, buffer) as counts:
        for _ in range(num_forks):
            before = sum(counts)
            assert Child(work).end() == 0
            deadline = time.monotonic() + WAIT_S
            while sum(counts) == before:
                assert time.monotonic() < deadline, 'the parent hangs'
                time.sleep(0.001)
    assert buffer.check() == []


def test_fork_during_a_write_that_never_ends_is_refused(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    from ding_store.buffer import forks

    monkeypatch.setattr(forks, '_WAIT_S', 0.2)
    buffer = kind.filled()
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with buffer.table.write_lock:
            is_held.set()
            may_go_on.wait(WAIT_S)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert is_held.wait(WAIT_S)

    def work(_: Child) -> None:
        for use in (lambda: buffer.sample(4), lambda: buffer.push(kind.element(SIZE)), buffer.clear):
            with pytest.raises(StoreClosed, match='a thread was changing it'):
                use()

    assert Child(work).end() == 0
    may_go_on.set()
    thread.join(WAIT_S)
    check_items(buffer.sample(4))


class Sampled(Dataset):
    """Each item is a batch of the buffer."""

    def __init__(self, buffer: StoreBuffer) -> None:
        self._buffer = buffer

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> Any:
        batch = self._buffer.sample_batch(8)
        return batch.rows, batch.data['number'].numpy().copy(), batch.data['payload'].numpy().copy()


@pytest.mark.parametrize('name', ['memory', 'path'])
def test_forked_workers_of_a_data_loader_read_all_rows(name: str, tmp_path: Path) -> None:
    buffer = Kind(name, tmp_path).filled()
    num_batches = 0
    loader = DataLoader(Sampled(buffer), batch_size=None, num_workers=2, multiprocessing_context='fork')
    for rows, numbers, payload in loader:
        assert numbers.reshape(-1).tolist() == rows.tolist()
        assert (payload == np.float32(rows)[:, None]).all() if isinstance(rows, np.ndarray) else True
        num_batches += 1
    assert num_batches == 24


def test_forked_child_of_a_child_samples(kind: Kind) -> None:
    buffer = kind.filled()

    def grandchild(_: Child) -> None:
        check_items(buffer.sample(20))

    def child(_: Child) -> None:
        assert Child(grandchild).end() == 0

    assert Child(child).end() == 0


def _sample(buffer: StoreBuffer, queue: Any) -> None:
    queue.put(sorted(int(item.index) for item in buffer.sample(SIZE)))


def test_forked_process_of_multiprocessing_samples(kind: Kind) -> None:
    buffer, context = kind.filled(), multiprocessing.get_context('fork')
    queue: Any = context.Queue()
    process = context.Process(target=_sample, args=(buffer, queue))
    process.start()
    assert queue.get(timeout=WAIT_S) == list(range(SIZE))
    process.join(WAIT_S)
    assert process.exitcode == 0
