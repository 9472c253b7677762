"""What samplers know outlives their process: priorities, uses, a queue's place, a limiter's counts; killed or not."""

import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
import torch
from crashes import Child, crash_repeatedly, linger, noticed, noticed_at_any_time
from sampling_crashes import QUEUED, SamplingWorker, verify

from ding_store.buffer import Fifo, Prioritized, RankPrioritized, RateLimiter, StoreBuffer, Uniform, limited
from ding_store.buffer.persistence.commits import CommitRecord
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.samplers.fifo import Queue
from ding_store.buffer.samplers.limited import Limited
from ding_store.buffer.samplers.rate_limiter import RateLimiter as Limiter
from ding_store.buffer.table import table as table_module
from ding_store.errors import PriorityError

#: ``scripts/crash.sh`` asks for more.
KILLS = int(os.environ.get('DING_STORE_KILLS', '40')) // 2


def columns(count: int) -> dict:
    return {'x': np.arange(count, dtype=np.float32)}


def test_reopened_buffer_has_uses_and_no_used_up_rows(tmp_path: Path) -> None:
    def opened(most: int) -> StoreBuffer:
        return StoreBuffer(10, path=str(tmp_path), sampler=limited(Uniform(0), max_times_sampled=most))

    buffer = opened(3)
    buffer.extend(columns(12))
    counted = np.zeros(12, int)
    for _ in range(3):
        np.add.at(counted, buffer.sample_batch(4).rows, 1)
    buffer.resize(8)
    rows = buffer.table.rows_by_age()
    buffer.close()
    buffer = StoreBuffer(8, path=str(tmp_path), sampler=limited(Uniform(0), max_times_sampled=3))
    assert buffer.table.rows_by_age().tolist() == rows.tolist()
    assert buffer.sampler.uses_of(rows).tolist() == counted[rows].tolist()
    assert counted[rows].max() == 2
    # A row that takes over a slot begins anew.
    new = buffer.extend(columns(1))
    assert buffer.sampler.uses_of(new).tolist() == [0]
    buffer.close()
    buffer = StoreBuffer(8, path=str(tmp_path), sampler=limited(Uniform(0), max_times_sampled=2))
    assert (counted[buffer.table.rows_by_age()[:-1]] < 2).all()
    assert new[0] in buffer.table.rows_by_age()
    buffer.close()


def test_row_in_a_used_slot_has_no_uses_after_a_restart(tmp_path: Path) -> None:
    def opened() -> StoreBuffer:
        return StoreBuffer(4, path=str(tmp_path), sampler=limited(Uniform(0), max_times_sampled=3))

    buffer = opened()
    buffer.extend(columns(4))
    buffer.sample_batch(4)
    rows = buffer.extend(columns(3))
    buffer.close()
    buffer = opened()
    assert buffer.sampler.uses_of(np.arange(3, 7)).tolist() == [1, 0, 0, 0]
    assert rows.tolist() == [4, 5, 6]
    buffer.close()


def test_reopened_queue_continues_at_its_place(tmp_path: Path) -> None:
    buffer = StoreBuffer(20, path=str(tmp_path), sampler=Fifo(times=2))
    buffer.extend(columns(12))
    given = [buffer.sample_batch(4).rows.tolist() for _ in range(3)]
    assert given == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    buffer.close()
    buffer = StoreBuffer(20, path=str(tmp_path), sampler=Fifo(times=2))
    assert [buffer.sample_batch(4).rows[0] for _ in range(2)] == [4, 8]
    buffer.clear()
    buffer.extend(columns(4))
    buffer.close()
    buffer = StoreBuffer(20, path=str(tmp_path), sampler=Fifo(times=2))
    assert buffer.sample_batch(4).rows.tolist() == [12, 13, 14, 15]
    buffer.close()


def test_reopened_limiter_continues_its_counts(tmp_path: Path) -> None:
    def opened() -> StoreBuffer:
        limiter = RateLimiter(2, samples_per_insert=2, error_buffer=30, max_insert=9, max_sample=6, timeout_s=0)
        return StoreBuffer(6, path=str(tmp_path / 'kept'), limiter=limiter)

    buffer = opened()
    buffer.extend(columns(9))
    buffer.sample_batch(5)
    buffer.delete(['5'])
    with pytest.raises(ValueError, match='less than 6'):
        buffer.sample_batch(6)
    counts = buffer.limiter.state()
    assert counts == {'num_inserts': 9, 'num_samples': 5}
    buffer.close()
    buffer = opened()
    assert buffer.limiter.state() == counts
    # Rows of a file have its numbers, and were not inserted.
    other = StoreBuffer(6)
    other.extend(columns(50))
    other.save_data(str(tmp_path / 'other'))
    buffer.load_data(str(tmp_path / 'other'))
    assert buffer.table.next_row >= 50
    buffer.extend(columns(1))
    buffer.close()
    buffer = opened()
    assert buffer.limiter.state() == {'num_inserts': 10, 'num_samples': 5}
    buffer.close()


def test_limiter_counts_the_last_sample_before_a_restart(tmp_path: Path) -> None:
    def opened() -> StoreBuffer:
        limiter = RateLimiter(2, samples_per_insert=2, error_buffer=30, max_insert=9, max_sample=6, timeout_s=0)
        return StoreBuffer(6, path=str(tmp_path), limiter=limiter)

    buffer = opened()
    buffer.extend(columns(6))
    buffer.sample_batch(5)
    buffer.close()
    buffer = opened()
    assert buffer.limiter.state() == {'num_inserts': 6, 'num_samples': 5}
    buffer.close()


def test_view_counts_restart_in_the_next_process(tmp_path: Path) -> None:
    def opened() -> tuple:
        buffer = StoreBuffer(10, path=str(tmp_path), sampler=Prioritized(epsilon=0.0))
        return buffer, buffer.view(limited(Prioritized(epsilon=0.0), max_times_sampled=9))

    buffer, view = opened()
    rows = buffer.extend(columns(3))
    buffer.update_priorities(rows, [5.0, 2.0, 3.0])
    view.update_priorities(rows, [4.0, 2.0, 3.0])
    view.sample_batch(2)
    buffer.close()
    buffer, view = opened()
    assert buffer.sampler.priorities.of(rows) == pytest.approx([5.0, 2.0, 3.0])
    assert view.sampler.sampler.priorities.of(rows) == pytest.approx([1.0, 1.0, 1.0])
    assert view.sampler.uses_of(rows).sum() == 0
    buffer.close()


@pytest.mark.parametrize('has_path', [False, True])
def test_priority_of_one_row_may_be_a_scalar(has_path: bool, tmp_path: Path) -> None:
    buffer = StoreBuffer(4, path=str(tmp_path) if has_path else None, sampler=Prioritized(epsilon=0.0))
    rows = buffer.extend(columns(3))
    buffer.update_priorities(rows[:1], 3.0)
    buffer.update_priorities(rows[1:2], torch.tensor(4.0))
    with pytest.raises(PriorityError, match='shape'):
        buffer.update_priorities(rows, [torch.ones(1), torch.ones(2), torch.ones(3)])
    expected = [3.0, 4.0, 1.0]
    assert buffer.sampler.priorities.of(rows) == pytest.approx(expected)
    buffer.close()
    if has_path:
        buffer = StoreBuffer(4, path=str(tmp_path), sampler=Prioritized(epsilon=0.0))
        assert buffer.sampler.priorities.of(rows[:2]) == pytest.approx(expected[:2])
        buffer.close()


@pytest.mark.parametrize('kind', [Prioritized, RankPrioritized])
def test_rows_never_updated_keep_their_first_priority(kind: Any, tmp_path: Path) -> None:
    buffer = StoreBuffer(8, path=str(tmp_path), sampler=kind())
    buffer.extend(columns(3))
    buffer.update_priorities(np.array([0]), [50.0])
    buffer.push(buffer[0].data)
    buffer.extend(columns(2), priority=[2.0, 3.0])
    expected = [50.0, 1.0, 1.0, 50.0, 2.0, 3.0]
    for _ in range(2):
        assert buffer.sampler.priorities.of(np.arange(6)) == pytest.approx(expected, rel=1e-3)
        buffer.close()
        buffer = StoreBuffer(8, path=str(tmp_path), sampler=kind())
    buffer.close()


def test_row_after_a_killed_push_gets_the_default_priority(tmp_path: Path) -> None:
    def opened() -> StoreBuffer:
        return StoreBuffer(4, path=str(tmp_path), sampler=Prioritized(epsilon=0.0))

    def killed(tell: Any) -> None:
        buffer = opened()
        buffer.table.table_dir.commit = lambda *arguments: os.kill(os.getpid(), 9)
        buffer.extend(columns(1), priority=[9.0])

    assert Child(killed).wait() == -9
    buffer = opened()
    assert buffer.extend(columns(1)).tolist() == [0]
    buffer.close()
    buffer = opened()
    assert buffer.sampler.priorities.of(np.array([0])) == pytest.approx([1.0])
    buffer.close()


def test_largest_priority_of_a_deleted_row_is_kept(tmp_path: Path) -> None:
    buffer = StoreBuffer(4, path=str(tmp_path), sampler=Prioritized(epsilon=0.0))
    buffer.extend(columns(2), priority=[9.0, 2.0])
    buffer.delete(['0'])
    buffer.close()
    buffer = StoreBuffer(4, path=str(tmp_path), sampler=Prioritized(epsilon=0.0))
    rows = buffer.extend(columns(1))
    assert buffer.sampler.priorities.of(rows) == pytest.approx([9.0])
    buffer.close()


def test_largest_priority_after_all_its_rows_left_is_default(tmp_path: Path) -> None:
    def opened() -> StoreBuffer:
        return StoreBuffer(4, path=str(tmp_path), sampler=Prioritized(epsilon=0.0))

    buffer = opened()
    rows = buffer.extend(columns(2), priority=[9.0, 2.0])
    buffer.delete([str(row) for row in rows])
    buffer.extend(columns(1))
    buffer.close()
    buffer = opened()
    rows = buffer.extend(columns(1))
    assert buffer.sampler.priorities.of(rows) == pytest.approx([9.0])
    # After a clear it begins anew, as in the process itself.
    buffer.clear()
    buffer.close()
    buffer = opened()
    rows = buffer.extend(columns(1))
    assert buffer.sampler.priorities.of(rows) == pytest.approx([1.0])
    buffer.close()


def test_loaded_rows_inherit_no_sampler_state(tmp_path: Path) -> None:
    path = str(tmp_path / 'kept')
    buffer = StoreBuffer(6, path=path, sampler=limited(Prioritized(epsilon=0.0), max_times_sampled=9))
    rows = buffer.extend(columns(6), priority=np.arange(6.0) + 2)
    buffer.sample_batch(6)
    other = StoreBuffer(6)
    other.extend(columns(6))
    other.save_data(str(tmp_path / 'other'))
    # Its rows have numbers that ours had, in the same slots.
    buffer.load_data(str(tmp_path / 'other'))
    assert buffer.table.rows_by_age().tolist() == rows.tolist()
    buffer.close()
    buffer = StoreBuffer(6, path=path, sampler=limited(Prioritized(epsilon=0.0), max_times_sampled=9))
    assert buffer.sampler.uses_of(rows).tolist() == [0] * 6
    assert len(set(buffer.sampler.sampler.priorities.of(rows).round(6).tolist())) == 1
    buffer.close()


def test_forked_child_and_closed_buffer_record_nothing(tmp_path: Path) -> None:
    def opened() -> StoreBuffer:
        sampler = limited(Prioritized(epsilon=0.0), max_times_sampled=9)
        return StoreBuffer(6, path=str(tmp_path), sampler=sampler, limiter=RateLimiter(1, max_sample=6, max_insert=9))

    buffer = opened()
    rows = buffer.extend(columns(6), priority=np.full(6, 2.0))

    def work(tell: Any) -> None:
        batch = buffer.sample_batch(4)
        buffer.update_priorities(batch.rows, [5.0] * 4)

    assert Child(work).wait() == 0
    buffer.close()
    buffer.limiter.load_state({'num_inserts': 70, 'num_samples': 70})
    buffer = opened()
    assert buffer.sampler.uses_of(rows).sum() == 0
    assert buffer.sampler.sampler.priorities.of(rows) == pytest.approx([2.0] * 6)
    assert buffer.limiter.state() == {'num_inserts': 6, 'num_samples': 0}
    buffer.close()


def test_sampler_state_killed_anywhere_is_sound(tmp_path: Path) -> None:
    found = crash_repeatedly(
        tmp_path / 'replay', KILLS, KILLS, worker=SamplingWorker, verify=verify, reached=lambda words: words[QUEUED]
    )
    assert found == []


def names_the_row_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the value of the one before it in its slot, for a moment."""

    put = SlotValues.set

    def set_values(self: SlotValues, slots: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
        with self._storing():
            self._follows[slots] = rows + 1
            linger()
            put(self, slots, rows, values)

    monkeypatch.setattr(SlotValues, 'set', set_values)


def commits_before_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are live before it is known that they have priorities."""
    extend = table_module.Table.extend

    def late(self: Any, columns: Any, note: Any = None, keep: Any = None, narrowed: Any = ()) -> np.ndarray:
        rows = extend(self, columns, note, None, narrowed)
        linger()
        if keep is not None:
            slots, found = self.index.find(rows)
            keep(slots[found], rows[found])
        return rows

    monkeypatch.setattr(table_module.Table, 'extend', late)


def counts_uses_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses are on record at the next sample."""
    delivered = Limited.delivered

    def late(self: Limited, rows: np.ndarray) -> Any:
        counts = self._uses.counts
        kept, counts._kept = counts._kept, None
        leaving = delivered(self, rows)
        counts._kept = kept
        if hasattr(self, '_last'):
            kept.set(*self._last)
        slots, found = self._index.find(rows)
        self._last = slots[found], rows[found], counts._counts[slots[found]]
        return leaving

    monkeypatch.setattr(Limited, 'delivered', late)


def moves_the_queue_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue's place is on record at the next sample."""
    put = Queue.put_on_record

    def late(self: Queue) -> None:
        place, self.place = self.place, getattr(self, '_last', self.place)
        put(self)
        self._last = self.place = place

    monkeypatch.setattr(Queue, 'put_on_record', late)


def counts_inserts_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are one commit, and their count another."""

    @contextmanager
    def inserting(self: Limiter, num_rows: int) -> Iterator[None]:
        yield
        linger()
        self.num_inserts += num_rows
        self._record.put({'num_inserts': self.num_inserts, 'num_samples': self.num_samples})

    def keep(self: Limiter, record: CommitRecord, next_row: Any) -> None:
        self._record = record
        self.num_inserts = (record.value or {}).get('num_inserts', 0)
        self.num_samples = (record.value or {}).get('num_samples', 0)

    def put(self: Limiter) -> None:
        self._record.put({'num_inserts': self.num_inserts, 'num_samples': self.num_samples})

    monkeypatch.setattr(Limiter, 'inserting', inserting)
    monkeypatch.setattr(Limiter, 'keep', keep)
    monkeypatch.setattr(Limiter, '_put_on_record', put)


@pytest.mark.parametrize(
    ('mistake', 'finding'),
    [
        (names_the_row_first, 'priorities|were used'),
        (commits_before_priorities, 'priorities'),
        (counts_uses_late, 'were used'),
        (moves_the_queue_late, 'the queue goes on'),
        (counts_inserts_by_themselves, 'inserts'),
    ],
)
def test_sampler_state_written_in_a_wrong_order_is_found(
    mistake: Any, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    search = noticed_at_any_time if mistake in (counts_uses_late, moves_the_queue_late) else noticed
    assert re.search(finding, ' '.join(search(tmp_path / 'replay', worker=SamplingWorker, verify=verify)))
