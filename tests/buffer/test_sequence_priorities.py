"""Priorities of sequence starts: which sequences come, how often, and whose priority is whose."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import pytest
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ding_store.buffer import SequencePrioritized, StoreBuffer, limited, mixed_priority
from ding_store.errors import NotEnoughData, PriorityError

LENGTH = 5


def columns(first: int, count: int, envs: int = 3, every: int = 30) -> dict:
    """Environments take turns; each one's episode ends after ``every`` steps."""
    rows = np.arange(first, first + count)
    return {'row': rows, 'env': rows % envs, 'done': (rows // envs % every == every - 1)[:, None]}


def filled(count: int, size: int = 1000, path: Optional[str] = None, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(
        size, sampler=SequencePrioritized(**{'alpha': 1.0, 'epsilon': 0.0, 'seed': 1, **options}), path=path
    )
    buffer.extend(columns(0, count))
    return buffer


def starts_among(rows: Any, length: int = LENGTH) -> List[int]:
    live = set(rows.tolist())
    windows = [[row + 3 * k for k in range(length)] for row in sorted(live)]
    return [w[0] for w in windows if set(w) <= live and len({row // 3 // 30 for row in w}) == 1]


def test_sequence_starts_are_drawn_in_proportion() -> None:
    buffer = filled(360, size=300, beta=0.5, beta_end=0.5)
    buffer.sample_sequences(1, LENGTH, 'env')
    starts = np.array(starts_among(buffer.table.rows_by_age()))
    priority = np.random.RandomState(0).randint(0, 4, len(starts)).astype(float)
    buffer.update_priorities(starts, priority)
    counts: Counter = Counter()
    for _ in range(1500):
        batch = buffer.sample_sequences(16, LENGTH, 'env')
        assert batch.rows.shape == (LENGTH, 16)
        assert (np.diff(batch.rows, axis=0) == 3).all()
        counts.update(batch.rows[0].tolist())
        # (N P(i)) ** -beta over the largest, which is that of the smallest priority.
        expected = np.array([priority[starts == row][0] for row in batch.rows[0]]) ** -0.5
        assert batch.weights == pytest.approx(expected, rel=1e-5)
    wanted = priority / priority.sum() * 1500 * 16
    found = np.array([counts[row] for row in starts.tolist()])
    assert sum(counts.values()) == found.sum()
    assert (found[priority == 0] == 0).all()
    there = priority > 0
    freedom = there.sum() - 1
    # Stratified draws vary less than independent ones.
    assert ((found - wanted)[there] ** 2 / wanted[there]).sum() < freedom + 5 * (2 * freedom) ** 0.5


def test_priorities_pushed_before_their_sequence_ends_count() -> None:
    buffer = StoreBuffer(100, sampler=SequencePrioritized(alpha=1.0, epsilon=0.0, seed=0))
    buffer.extend(columns(0, 12), priority=np.arange(12.0))
    with pytest.raises(NotEnoughData):
        buffer.sample_sequences(1, LENGTH, 'env')
    buffer.extend(columns(12, 9), priority=np.full(9, 1000.0))
    # Whole are those that start at 0 to 8; the others have a priority, and no mass.
    rows = {row for _ in range(50) for row in buffer.sample_sequences(8, LENGTH, 'env').rows[0].tolist()}
    assert rows <= set(range(1, 9))
    assert 8 in rows
    assert buffer.sampler.priorities.of(np.array([8, 20])) == pytest.approx([8.0, 1000.0])


@pytest.mark.parametrize('prefetch', [0, 2])
def test_sequence_priorities_work_with_max_age(prefetch: int, tmp_path: Path) -> None:
    for life in range(2):
        sampler = SequencePrioritized(alpha=1.0, epsilon=0.0, seed=0)
        limits = limited(sampler, max_age=1, version='version')
        buffer = StoreBuffer(200, sampler=limits, prefetch=prefetch, path=str(tmp_path))
        if life == 0:
            for version in range(4):
                rows = np.arange(30 * version, 30 * version + 30)
                buffer.extend({'env': rows % 3, 'version': rows // 30, 'done': rows < 0}, priority=np.ones(30))
            # Of what is young enough 90, and 40, which leaves with its version.
            buffer.update_priorities(np.array([40, 90]), [100.0, 1000.0])
        for newest in (3, 4) if life == 0 else (4,):
            buffer.sampler.set_version(newest)
            for _ in range(4):
                batch = buffer.sample_sequences(8, LENGTH, 'env')
                assert batch.rows.min() >= 30 * (newest - 1)
                assert (batch.rows[0] == 90).mean() > 0.5
                assert batch.weights.shape == (8,)
        assert buffer.count() == 30
        assert buffer.sampler.sampler.priorities.of(np.array([40, 90])) == pytest.approx([np.nan, 1000.0], nan_ok=True)
        buffer.close()


def test_new_starts_get_the_largest_priority() -> None:
    buffer = filled(30, size=40)
    batch = buffer.sample_sequences(4, LENGTH, 'env', burn_in=1)
    assert batch.rows.shape == (LENGTH + 1, 4)
    errors = np.abs(np.random.RandomState(0).randn(LENGTH, 4))
    buffer.update_priorities(batch.rows[0], mixed_priority(errors))
    starts = np.unique(batch.rows[0], return_index=True)
    last = {row: mixed_priority(errors)[np.flatnonzero(batch.rows[0] == row)[-1]] for row in starts[0].tolist()}
    assert buffer.sampler.priorities.of(starts[0]) == pytest.approx(list(last.values()))
    buffer.update_priorities(np.array([3]), [50.0])
    buffer.extend(columns(30, 30))
    new = buffer.sample_sequences(4, LENGTH, 'env', burn_in=1).rows[0]
    assert (buffer.sampler.priorities.of(new) == 50.0).any()
    buffer.update_priorities(np.array([3]), [70.0])
    assert buffer.sampler.priorities.num_stale_updates == 1
    assert buffer.sampler.priorities.max_priority == 50.0


def test_sequence_priorities_work_with_overlap_and_prefetch() -> None:
    plain = filled(270)
    ahead = StoreBuffer(1000, sampler=SequencePrioritized(alpha=1.0, epsilon=0.0, seed=1), prefetch=2)
    ahead.extend(columns(0, 270))
    for buffer in (plain, ahead):
        buffer.update_priorities(np.arange(270), np.arange(270) + 1.0)
    for _ in range(20):
        one, other = (b.sample_sequences(8, LENGTH, 'env', overlap=2) for b in (plain, ahead))
        assert (one.rows == other.rows).all()
        assert one.weights == pytest.approx(other.weights)
        assert set((one.rows[0] // 3 % 30 % 3).tolist()) == {0}
    ahead.close()
    assert ahead.sampler.step == plain.sampler.step


@pytest.mark.parametrize('size', [170, 301, 700])
def test_priorities_stay_through_a_resize_and_a_change_of_dones(size: int) -> None:
    buffer = filled(360, size=300)
    buffer.sample_sequences(1, LENGTH, 'env')
    rows = buffer.table.rows_by_age()
    buffer.update_priorities(rows, rows + 1.0)
    buffer.resize(size)
    rows = buffer.table.rows_by_age()
    assert buffer.sampler.priorities.of(rows) == pytest.approx(rows + 1.0)
    assert len(buffer.sample_sequences(8, LENGTH, 'env').rows)
    # Of the likeliest ones, many go over a step that is the last of its episode from now on.
    ended = rows[-40:-30]
    buffer.table.update(ended, {'done': np.ones((10, 1), bool)})
    for _ in range(20):
        batch = buffer.sample_sequences(8, LENGTH, 'env')
        assert set(batch.rows[0].tolist()) <= set(starts_among(rows))
        assert not np.isin(batch.rows[:-1], ended).any()
    assert buffer.sampler.priorities.of(batch.rows[0]) == pytest.approx(batch.rows[0] + 1.0)
    twin = copy.deepcopy(buffer)
    assert twin.sampler.priorities.of(rows) == pytest.approx(rows + 1.0)
    assert twin.sample_sequences(8, LENGTH, 'env').rows.shape == (LENGTH, 8)


def test_sequence_priorities_survive_a_restart(tmp_path: Path) -> None:
    buffer = filled(90, path=str(tmp_path))
    starts = buffer.sample_sequences(8, LENGTH, 'env').rows[0]
    buffer.update_priorities(starts, starts + 2.0)
    buffer.close()
    again = StoreBuffer(1000, sampler=SequencePrioritized(alpha=1.0, epsilon=0.0, seed=1), path=str(tmp_path))
    assert again.sampler.priorities.of(starts) == pytest.approx(starts + 2.0)
    assert again.sampler.step == 1
    assert again.sample_sequences(8, LENGTH, 'env').weights.max() <= 1
    again.close()


def test_sequence_priorities_refuse_other_samples() -> None:
    buffer = filled(90)
    for sample in (lambda: buffer.sample_batch(2), lambda: buffer.sample(2)):
        with pytest.raises(TypeError, match='Call sample_sequences'):
            sample()
    buffer.sample_sequences(2, LENGTH, 'env')
    with pytest.raises(TypeError, match='sequences of 5 steps, every 1'):
        buffer.sample_sequences(2, LENGTH + 1, 'env')
    other = buffer.view(SequencePrioritized(seed=0))
    assert other.sample_sequences(2, LENGTH + 1, 'env').rows.shape == (LENGTH + 1, 2)
    with pytest.raises(PriorityError):
        buffer.update_priorities(np.arange(2), [1.0, np.nan])
    with pytest.raises(NotEnoughData, match='less than 500'):
        buffer.sample_sequences(500, LENGTH, 'env')
    assert buffer.view().sample_episodes(1, 'env').rows.shape == (30,)


class Model(RuleBasedStateMachine):
    """Beside dicts: of every sequence that there is, the mass is that of its start's priority; others never come."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = SequencePrioritized(alpha=1.0, epsilon=0.0, seed=3)
        self.buffer = StoreBuffer(40, sampler=self.sampler)
        self.envs: List[int] = []
        self.dones: List[bool] = []
        self.priority: Dict[int, float] = {}
        self.random = np.random.RandomState(0)

    def _live(self) -> List[int]:
        return self.buffer.table.rows_by_age().tolist()

    def _windows(self) -> Dict[int, List[int]]:
        """By their starts; nothing was deleted, so that a group's rows follow each other."""
        found = {}
        for env in (0, 1):
            rows = [row for row in self._live() if self.envs[row] == env]
            for place in range(len(rows) - 2):
                window = rows[place : place + 3]
                if not any(self.dones[row] for row in window[:-1]):
                    found[window[0]] = window
        return found

    @rule(count=st.integers(1, 12), seed=st.integers(0, 99), with_priority=st.booleans())
    def extend(self, count: int, seed: int, with_priority: bool) -> None:
        random = np.random.RandomState(seed)
        env, done = random.randint(0, 2, count), random.rand(count) < 0.15
        priority = random.randint(1, 9, count).astype(float) if with_priority else None
        rows = self.buffer.extend({'env': env, 'done': done}, priority=priority)
        self.envs += env.tolist()
        self.dones += done.tolist()
        if with_priority:
            self.priority.update(zip(rows.tolist(), priority.tolist()))

    @precondition(lambda self: len(self.envs))
    @rule(seed=st.integers(0, 99))
    def update(self, seed: int) -> None:
        random = np.random.RandomState(seed)
        rows = random.randint(0, len(self.envs), 6)
        priority = random.randint(0, 9, 6).astype(float)
        self.buffer.update_priorities(rows, priority)
        self.priority.update(zip(rows.tolist(), priority.tolist()))

    @rule()
    def sample(self) -> None:
        windows = self._windows()
        try:
            batch = self.buffer.sample_sequences(2, 3, 'env')
        except NotEnoughData:
            assert len(windows) < 2 or not any(self._mass(start) for start in windows)
            return
        for start, window in zip(batch.rows[0].tolist(), batch.rows.T.tolist()):
            assert windows[start] == window
            assert self._mass(start) > 0
        # Now it has taken in everything.
        index = self.buffer.table.index
        slots, _ = index.find(np.array(list(windows)))
        masses = self.sampler.priorities.masses.tree.masses[slots]
        assert masses.tolist() == [self._mass(start, mass) for start, mass in zip(windows, masses.tolist())]
        others, _ = index.find(np.setdiff1d(self._live(), list(windows)))
        masses = self.sampler.priorities.masses
        assert not masses.starts.contains(others).any() or not masses.tree.masses[others].any()

    def _mass(self, start: int, default: float = 1.0) -> float:
        # One that nobody set is the largest at the time when it was seen to be a start.
        assert default > 0 or self.priority.get(start) == 0
        return self.priority.get(start, default)

    @invariant()
    def sound(self) -> None:
        assert self.buffer.check() == []


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=15 * MORE, stateful_step_count=25, deadline=None)
