"""Sampling ahead: batches that would have come without it, too, and of which nothing counts before it is delivered."""

import contextlib
import copy
import multiprocessing
import signal
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest
import torch
from crashes import Child, shared_words
from elements import number, transition

from ding_store.buffer import (
    Fifo,
    Fresh,
    Lifo,
    MinHeap,
    Prioritized,
    RateLimiter,
    Shuffled,
    StoreBuffer,
    Uniform,
    limited,
)
from ding_store.buffer.samplers.prefetch import Prefetch
from ding_store.errors import ConfigError, NotEnoughData, RowGone, StoreTimeout


def filled(count: int = 100, size: int = 100, prefetch: int = 2, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, prefetch=prefetch, **options)
    buffer.extend_elements([transition(i) for i in range(count)])
    return buffer


class AtOnce(Prefetch):
    """Gathers when it draws."""

    def _submit(self, read: Callable, choose: Callable) -> Future:
        future: Future = Future()
        try:
            future.set_result(read(choose))
        except RowGone as e:
            future.set_exception(e)
        return future


class AtLast(Prefetch):
    """Gathers when it delivers."""

    def _submit(self, read: Callable, choose: Callable) -> Any:
        class Late:
            def result(self, timeout_s: float) -> Any:
                return read(choose)

            def cancel(self) -> None:
                pass

        return Late()


def samplers() -> dict:
    return {
        'uniform': lambda: Uniform(7),
        'prioritized': lambda: Prioritized(seed=7),
        'limited': lambda: limited(Prioritized(seed=7), max_times_sampled=3),
        'fifo': lambda: Fifo(),
        'lifo': lambda: Lifo(),
        'heap': lambda: MinHeap(),
        'shuffled': lambda: Shuffled(7),
        'fresh': lambda: Fresh(30, 7),
    }


# Under limits rows may be used up between draw and delivery, and others drawn instead.
@pytest.mark.parametrize('name', sorted(set(samplers()) - {'limited'}))
@pytest.mark.parametrize('depth', [1, 3, 12])
def test_prefetched_batches_come_in_draw_order(name: str, depth: int) -> None:
    plain, ahead = (filled(prefetch=prefetch, sampler=samplers()[name]()) for prefetch in (0, depth))
    for _ in range(10):
        expected, batch = plain.sample_batch(8), ahead.sample_batch(8)
        assert batch.rows.tolist() == expected.rows.tolist() == batch.data.reward.long().flatten().tolist()
        assert (batch.weights is None) == (expected.weights is None)
        if batch.weights is not None:
            assert batch.weights.tolist() == expected.weights.tolist()


@pytest.mark.parametrize('name', sorted(samplers()))
def test_batches_do_not_depend_on_when_the_thread_ran(name: str) -> None:
    seen: List[list] = []
    for kind in (Prefetch, AtOnce, AtLast):
        buffer = filled(80, prefetch=3, sampler=samplers()[name]())
        buffer._samples.prefetch = kind(3, buffer.table, buffer.sampler)
        seen.append([])
        for step in range(40):
            batch = buffer.sample_batch(6)
            seen[-1].append((batch.rows.tolist(), batch.data.obs.state.tolist(), batch.weights is not None))
            if name in ('prioritized', 'limited', 'heap'):
                buffer.update_priorities(batch.rows, (batch.rows % 7).astype(float))
            if step % 2 or name == 'lifo':  # A stack has no old rows left when the table is full.
                buffer.extend_elements([transition(80 + 9 * step + i) for i in range(9)])
            if step % 5 == 0:
                buffer.update(str(buffer.table.rows_by_age()[-1]), transition(1000 + step))
            if step % 7 == 0:
                buffer.delete(str(buffer.table.rows_by_age()[3]))
    assert seen[0] == seen[1] == seen[2]


def test_prefetched_uses_count_when_delivered() -> None:
    sampler = limited(Uniform(0), max_times_sampled=2)
    buffer = filled(60, prefetch=4, sampler=sampler)
    used: Counter = Counter()
    for _ in range(5):
        used.update(buffer.sample_batch(8).rows.tolist())
        live = buffer.table.rows_by_age()
        assert sampler.uses_of(live).tolist() == [used[row] for row in live.tolist()]
    assert max(used.values()) <= 2
    assert buffer.count() == 60 - sum(count == 2 for count in used.values())
    with contextlib.suppress(NotEnoughData):
        while True:
            used.update(buffer.sample_batch(8).rows.tolist())
    assert max(used.values()) == 2
    assert sum(used.values()) >= 120 - 16


@pytest.mark.parametrize('depth', [1, 2, 3])
def test_prefetched_row_is_sampled_at_most_the_limit(depth: int) -> None:
    sampler = limited(Prioritized(alpha=1.0, epsilon=0.0, seed=0), max_times_sampled=5)
    buffer = filled(40, prefetch=depth, sampler=sampler)
    # A quarter of the mass: twice or so in every batch of 8.
    buffer.update_priorities(np.arange(40), [13.0] + [1.0] * 39)
    used: Counter = Counter()
    for _ in range(10):
        used.update(buffer.sample_batch(8, replace=True).rows.tolist())
    assert used[0] == max(used.values()) == 5
    assert 0 not in buffer.table.rows_by_age()


def test_prefetched_batch_is_limited_when_delivered() -> None:
    limiter = RateLimiter(8, samples_per_insert=1.0, error_buffer=20.0, max_insert=20, max_sample=8, timeout_s=0.01)
    buffer = filled(20, prefetch=3, limiter=limiter)
    buffer.sample_batch(8)
    assert limiter.num_samples == 8
    delivered = 8
    with contextlib.suppress(StoreTimeout):
        while True:
            buffer.sample_batch(8)
            delivered += 8
    assert limiter.num_samples == delivered == 32


def test_prefetched_priorities_are_at_most_depth_batches_old() -> None:
    buffer = filled(prefetch=3, sampler=Prioritized(alpha=1.0, seed=0))
    buffer.sample_batch(10)
    buffer.update_priorities(np.arange(100), np.where(np.arange(100) == 42, 1.0, 1e-9))
    counts = [buffer.sample_batch(10).rows.tolist().count(42) for _ in range(5)]
    assert counts[:3] != [10] * 3
    assert counts[3:] == [10, 10]


def test_prefetched_batch_given_back_does_not_advance_beta() -> None:
    sampler = Prioritized(beta=0.0, beta_anneal_steps=100, seed=0)
    buffer = filled(prefetch=5, sampler=sampler)
    buffer.sample_batch(4)
    buffer.sample_batch(4)
    buffer._samples.prefetch.give_back()
    assert sampler.step == 2


@pytest.mark.parametrize('times', [1, 2])
def test_prefetched_queue_gives_rows_in_order_and_once(times: int) -> None:
    buffer = filled(60, prefetch=3, sampler=limited(Fifo(times), max_times_sampled=times))
    rows = [buffer.sample_batch(6).rows.tolist() for _ in range(2 * times)]
    rows += [
        buffer.sample_batch(4).rows.tolist() for _ in range(3 * times)
    ]  # Another size: those ahead are given back.
    flat = [row for batch in rows for row in batch]
    assert sorted(flat) == sorted(list(range(24)) * times)
    assert flat[:6] == list(range(6))
    assert buffer.table.rows_by_age().tolist() == list(range(24, 60))
    assert buffer.sampler.sampler.num_missed == 0


@pytest.mark.parametrize('kind', [Fifo, lambda: limited(Fifo(), max_times_sampled=1)])
def test_prefetched_queue_with_other_samplers_keeps_its_order(kind: Any) -> None:
    buffer = filled(96, prefetch=2, sampler=kind())
    view = buffer.view()  # Of the same queue.
    ways: List[Callable[[], Any]] = [
        lambda: buffer.sample_batch(8).rows.tolist(),
        lambda: [int(item.index) for item in buffer.sample(8)],
        lambda: view.sample_batch(8).rows.tolist(),
    ]
    rows = [row for way in (0, 1, 0, 2, 0, 0, 2, 2, 1, 1, 2, 0) for row in ways[way]()]
    assert rows == list(range(96))
    assert getattr(buffer.sampler, 'sampler', buffer.sampler).num_missed == 0


def test_prefetched_rows_of_a_deleted_view_return_to_queue() -> None:
    buffer = filled(48, prefetch=2, sampler=Fifo())
    assert buffer.view().sample_batch(8).rows.tolist() == list(range(8))
    assert [buffer.sample_batch(8).rows[0] for _ in range(5)] == [8, 16, 24, 32, 40]


def test_prefetched_queue_rows_permit_no_insert() -> None:
    limiter = RateLimiter(1, samples_per_insert=1.0, error_buffer=2.0, max_sample=2, timeout_s=0.01)
    buffer = StoreBuffer(1000, prefetch=3, sampler=Fifo(), limiter=limiter)
    for _ in range(6):
        with contextlib.suppress(StoreTimeout):
            while True:
                buffer.push(transition(0))
        assert limiter.num_inserts - 1 - limiter.num_samples == 2
        buffer.sample_batch(1)


@pytest.mark.parametrize('other', ['close', 'sample sequences'])
def test_prefetch_waiting_on_a_queue_blocks_no_other_call(other: str) -> None:
    buffer, went_on = StoreBuffer(100, prefetch=2, sampler=Fifo()), threading.Event()
    buffer.extend({'x': np.arange(96), 'done': np.zeros(96, bool)})
    buffer.sample_batch(8)
    does = buffer._samples.prefetch.close if other == 'close' else lambda: buffer.sample_sequences(2, 3, None)
    waiting = threading.Thread(target=does, daemon=True)

    def sample() -> None:
        with buffer.sampler.lock:  # As in the middle of a sample.
            waiting.start()
            waiting.join(0.2)  # It comes as far as it can.
            buffer.sample_batch(8)
        went_on.set()

    threading.Thread(target=sample, daemon=True).start()
    assert went_on.wait(20)
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize('times', [1, 2])
@pytest.mark.parametrize('depth', [1, 3])
def test_prefetched_queue_ahead_of_collectors_equals_plain(depth: int, times: int) -> None:
    plain, ahead = (StoreBuffer(300, prefetch=prefetch, sampler=Fifo(times)) for prefetch in (0, depth))
    seen: List[list] = [[], []]
    for chunk in (4, 11, 3, 16, 1, 30, 2, 5, 24):
        for buffer, rows in zip((plain, ahead), seen):
            buffer.extend({'x': np.arange(chunk)})
            with contextlib.suppress(NotEnoughData):
                while True:
                    rows.append(buffer.sample_batch(4).rows.tolist())
    assert seen[0] == seen[1]
    flat = [row for rows in seen[1] for row in rows]
    assert flat == list(range(96)) if times == 1 else max(Counter(flat).values()) == 2
    assert ahead.sampler.num_missed == plain.sampler.num_missed == 0


def test_prefetched_queue_of_a_full_table_counts_missed_rows() -> None:
    buffer = filled(20, size=20, prefetch=2, sampler=Fifo())
    assert buffer.sample_batch(4).rows.tolist() == [0, 1, 2, 3]
    buffer.extend_elements([transition(i) for i in range(20, 27)])  # 4 to 6 leave before their turn.
    assert buffer.sample_batch(4).rows.tolist() == [7, 8, 9, 10]
    assert buffer.sampler.num_missed == 3


@pytest.mark.parametrize('how', ['evict', 'delete', 'clear', 'resize', 'load'])
def test_prefetched_rows_that_were_deleted_are_dropped(how: str, tmp_path: Path) -> None:
    buffer = filled(prefetch=3, seed=0)
    other = StoreBuffer(100)
    other.extend_elements([transition(500 + i) for i in range(100)])
    other.save_data(str(tmp_path / 'other'))
    for _ in range(20):
        buffer.sample_batch(8)
        if how == 'evict':
            buffer.extend_elements([transition(buffer.table.next_row + i) for i in range(50)])
        elif how == 'delete':
            buffer.delete([str(row) for row in buffer.table.rows_by_age()[:4]])
        elif how == 'resize':
            buffer.resize(max(9, buffer.count() - 4))
        elif how == 'clear':
            first = buffer.table.next_row
            buffer.clear()
            buffer.extend_elements([transition(first + i) for i in range(20)])
        else:
            buffer.load_data(str(tmp_path / 'other'))
        live = set(buffer.table.rows_by_age().tolist())
        batch = buffer.sample_batch(8)
        assert set(batch.rows.tolist()) <= live
        expected = batch.rows + (500 if how == 'load' else 0)
        assert batch.data.reward.long().flatten().tolist() == expected.tolist()


def test_prefetched_rows_that_changed_are_read_again() -> None:
    buffer = filled(prefetch=4, seed=0)
    buffer.sample_batch(50)
    for i in range(100):
        buffer.update(str(i), transition(1000 + i))
    for _ in range(4):
        batch = buffer.sample_batch(50)
        assert batch.data.reward.long().flatten().tolist() == (1000 + batch.rows).tolist()


def test_prefetch_after_shortage_or_close_raises() -> None:
    buffer = filled(5, prefetch=2)
    with pytest.raises(NotEnoughData):
        buffer.sample_batch(6)
    buffer.push(transition(5))
    assert sorted(buffer.sample_batch(6).rows.tolist()) == list(range(6))
    (thread,) = buffer._samples.prefetch._pool._threads
    buffer.close()
    assert not thread.is_alive()
    with pytest.raises(NotEnoughData):
        buffer.sample_batch(6)
    for bad in (-1, 1.5, True):
        with pytest.raises(ConfigError, match='prefetch'):
            StoreBuffer(10, prefetch=bad)


def test_prefetch_is_separate_in_views_and_copies() -> None:
    buffer = filled(prefetch=2, sampler=Fifo())
    view = buffer.view(Fifo())
    assert buffer.sample_batch(3).rows.tolist() == view.sample_batch(3).rows.tolist() == [0, 1, 2]
    twin = copy.deepcopy(buffer)
    buffer.clear()
    assert twin.sample_batch(3).rows.tolist() == [3, 4, 5]


def test_prefetched_sequences_and_lists_equal_plain_ones() -> None:
    plain, ahead = StoreBuffer(100, seed=0), StoreBuffer(100, seed=0, prefetch=2)
    for buffer in (plain, ahead):
        for i in range(100):
            buffer.push({'obs': torch.full((2,), float(i)), 'env': i % 2, 'done': i % 20 > 17})
    for _ in range(5):
        expected, batch = (buffer.sample_sequences(4, 5, 'env') for buffer in (plain, ahead))
        assert batch.rows.tolist() == expected.rows.tolist()
        assert batch.data.obs[:, :, 0].tolist() == batch.rows.tolist()
    plain, ahead = StoreBuffer(100, seed=0), StoreBuffer(100, seed=0, prefetch=2)
    for buffer in (plain, ahead):
        for i in range(20):
            buffer.push({'obs': [torch.full((2,), 10.0 * i + t) for t in range(4)]})
    for _ in range(5):
        expected, batch = (buffer.sample_time_major(3) for buffer in (plain, ahead))
        assert batch.rows.tolist() == expected.rows.tolist()
        assert batch.data.obs[2, :, 0].tolist() == (10.0 * batch.rows + 2).tolist()


def _sample_in_child(buffer: StoreBuffer, out: Any) -> None:
    out.put(buffer.sample_batch(8).rows.tolist())


@pytest.mark.parametrize('how', ['done', 'meta'])
def test_prefetched_sequences_with_changed_rows_are_dropped(how: str) -> None:
    buffer = StoreBuffer(20, seed=0, prefetch=2)
    buffer.extend_elements([{'done': False}] * 20, [{'env': 0}] * 20)
    for row in range(0, 12, 2):
        rows = buffer.sample_sequences(4, 2, 'env').rows.T.tolist()
        assert all(first % 2 or first >= row for first, _ in rows)
        if how == 'done':
            buffer.update(str(row), {'done': True})
        else:
            buffer.update(str(row), meta={'env': 1 + row})


def test_prefetch_works_after_a_fork() -> None:
    buffer = filled(prefetch=2, seed=0)
    buffer.sample_batch(8)
    context = multiprocessing.get_context('fork')
    out = context.Queue()
    child = context.Process(target=_sample_in_child, args=(buffer, out))
    child.start()
    rows = out.get(timeout=60)
    child.join(60)
    assert len(set(rows)) == 8
    assert len(buffer.sample_batch(8).rows) == 8


def test_prefetch_during_writes_tears_no_row() -> None:
    buffer = filled(200, size=200, prefetch=3)
    done = threading.Event()

    def write() -> None:
        for start in range(200, 6000, 40):
            buffer.extend_elements([transition(start + i) for i in range(40)])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    num_batches = 0
    while writer.is_alive() or num_batches < 20:
        batch = buffer.sample_batch(16)
        assert [number(element) for element in batch.elements()] == batch.rows.tolist()
        num_batches += 1
    writer.join(60)
    assert done.is_set()


def test_prefetch_killed_leaves_a_sound_table(tmp_path: Path) -> None:
    path = str(tmp_path / 'rows')

    def work(tell: Callable[[], None]) -> None:
        buffer = StoreBuffer(100, path=path, prefetch=4)
        for i in range(10**9):
            buffer.push({'x': torch.full((64,), float(i))})
            if i > 64:
                buffer.sample_batch(32)
            if i == 400:
                tell()

    kill_when_told(work)
    buffer = StoreBuffer(100, path=path, prefetch=4)
    assert buffer.check() == []
    batch = buffer.sample_batch(64)
    assert batch.data.x[:, 0].tolist() == batch.rows.tolist()
    buffer.close()


def kill_when_told(work: Callable[[Callable[[], None]], None]) -> None:
    child = Child(work)
    for _ in range(2):  # It tells us that it began by itself.
        child.wait_until_told()
    assert child.kill() == -signal.SIGKILL


def opened(path: str, kind: str, prefetch: int) -> StoreBuffer:
    sampler = limited(Fifo(2) if kind == 'queue' else Uniform(0), max_times_sampled=2)
    limiter = RateLimiter(1, samples_per_insert=2.0, error_buffer=500.0, max_insert=60, max_sample=6, timeout_s=0.0)
    return StoreBuffer(60, path=path, sampler=sampler, limiter=limiter, prefetch=prefetch)


@pytest.mark.parametrize('kind', ['queue', 'random'])
def test_prefetched_rows_at_a_kill_are_neither_lost_nor_counted(kind: str, tmp_path: Path) -> None:
    path, delivered = str(tmp_path / 'rows'), shared_words(24)

    def work(tell: Callable[[], None]) -> None:
        buffer = opened(path, kind, prefetch=3)
        buffer.extend({'x': np.arange(60, dtype=np.float32)})
        delivered[:] = np.concatenate([buffer.sample_batch(6).rows for _ in range(4)])
        tell()
        threading.Event().wait(60)

    kill_when_told(work)  # with three batches drawn and not delivered
    uses = Counter(delivered.tolist())
    buffer = opened(path, kind, prefetch=0)
    rows = buffer.table.rows_by_age()
    assert rows.tolist() == [row for row in range(60) if uses[row] < 2]
    assert buffer.sampler.uses_of(rows).tolist() == [uses[row] for row in rows.tolist()]
    assert buffer.limiter.state() == {'num_inserts': 60, 'num_samples': 24}
    if kind == 'queue':
        assert buffer.sample_batch(6).rows.tolist() == list(range(12, 18))
        uses.update(range(12, 18))
    with contextlib.suppress(NotEnoughData, StoreTimeout):
        while True:
            uses.update(buffer.sample_batch(1).rows.tolist())
    assert uses == dict.fromkeys(range(60), 2)
    buffer.close()
