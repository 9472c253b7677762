"""Limited uses of sequences that share rows: each counts by the row that it starts at, and its rows stay."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from test_sequences_model import GROUPBY, SequenceModel

from ding_store.buffer import SequencePrioritized, StoreBuffer, Uniform, limited
from ding_store.errors import NotEnoughData

LENGTH = 3


def columns(first: int, count: int) -> dict:
    rows = np.arange(first, first + count)
    return {'env': rows % 2, 'row': rows, 'done': rows % 20 >= 18}


def filled(sampler: Any, count: int = 40, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(options.pop('size', 60), sampler=sampler, seed=0, **options)
    buffer.extend(columns(0, count))
    return buffer


def used(buffer: StoreBuffer, size: int = 4, **how: Any) -> Counter:
    """How often each start came until nothing was left."""
    uses: Counter = Counter()
    while True:
        try:
            rows = buffer.sample_sequences(size, LENGTH, 'env', **how).rows
        except NotEnoughData:
            return uses
        if not how.get('replace') and isinstance(buffer.sampler.sampler, Uniform):
            assert len(set(rows[0].tolist())) == size
        assert (np.diff(rows, axis=0) == 2).all()
        uses.update(rows[0].tolist())


SAMPLERS = [lambda: Uniform(0), lambda: SequencePrioritized(seed=0)]


@pytest.mark.parametrize('prefetch', [0, 2])
@pytest.mark.parametrize('how', [{}, {'overlap': 1}, {'replace': True}, {'overlap': 0, 'replace': True}], ids=str)
@pytest.mark.parametrize('make', SAMPLERS, ids=['uniform', 'prioritized'])
def test_sequence_is_sampled_at_most_the_limit(make: Any, how: dict, prefetch: int) -> None:
    buffer = filled(limited(make(), max_times_sampled=3), prefetch=prefetch)
    every = {0: 8, 1: 4, 2: 3}[0 if how.get('overlap') is None else 2 - how['overlap']]
    uses = used(buffer, **how)
    assert max(uses.values()) == 3
    # Two episodes of two envs, each of ten steps. What is less than a batch is left over.
    assert 4 * every - 4 < len(uses) <= 4 * every
    assert sum(uses.values()) > 3 * 4 * every - (4 if 'replace' in how else 4 * 3)
    assert buffer.count() == 40, 'other sequences share the rows'
    starts = np.array(list(uses))
    assert buffer.sampler.uses_of(starts, starts=True).tolist() == list(uses.values())
    buffer.extend(columns(40, 20))
    again = used(buffer, **how)
    assert max((again + uses).values()) == 3
    assert max(again) >= 40
    assert buffer.check() == []


def test_sequence_uses_limit_prioritized_starts() -> None:
    buffer = filled(limited(SequencePrioritized(alpha=1.0, epsilon=0.0, seed=0), max_times_sampled=5))
    buffer.sample_sequences(1, LENGTH, 'env')
    buffer.update_priorities(np.arange(40), np.where(np.arange(40) == 7, 1e6, 1e-3))
    batch = buffer.sample_sequences(8, LENGTH, 'env')
    assert (batch.rows[0] == 7).sum() == 5
    assert batch.weights.shape == (8,)
    assert 7 not in buffer.sample_sequences(8, LENGTH, 'env').rows[0]


def test_sequence_uses_are_counted_per_view() -> None:
    buffer = filled(limited(Uniform(0), max_times_sampled=1))
    view = buffer.view(limited(Uniform(1), max_times_sampled=2))
    assert sum(used(buffer, 1).values()) == 32
    assert sum(used(view, 1).values()) == 64
    assert len({int(view.view(Uniform(2)).sample_sequences(1, LENGTH, 'env').rows[0]) for _ in range(99)}) > 20


@pytest.mark.parametrize('size', [25, 90])
@pytest.mark.parametrize('make', SAMPLERS, ids=['uniform', 'prioritized'])
def test_sequence_uses_survive_resize_done_change_and_copy(make: Any, size: int) -> None:
    """What the sets of starts are made anew by, and what has them in other slots."""
    buffer = filled(limited(make(), max_times_sampled=2), size=50)
    before = Counter(buffer.sample_sequences(4, LENGTH, 'env').rows[0].tolist())
    buffer.resize(size)
    before.update(buffer.sample_sequences(4, LENGTH, 'env').rows[0].tolist())
    buffer.table.update(
        np.array([35]), {name: column[:1] for name, column in {**columns(35, 1), 'done': np.ones(1, bool)}.items()}
    )
    twin = copy.deepcopy(buffer)
    for each in (buffer, twin):
        uses = used(each, 1)
        live = set(each.table.rows_by_age().tolist())
        left = {row for row in live if {row, row + 2, row + 4} <= live}
        left -= {row for row in left if any(step % 20 >= 18 or step == 35 for step in (row, row + 2))}
        assert {row: before[row] + uses[row] for row in left} == dict.fromkeys(left, 2)
        assert each.check() == []


@pytest.mark.parametrize('make', SAMPLERS, ids=['uniform', 'prioritized'])
def test_sequence_uses_survive_a_restart(make: Any, tmp_path: Path) -> None:
    uses: Counter = Counter()
    for _ in range(6):
        buffer = StoreBuffer(60, sampler=limited(make(), max_times_sampled=2), path=str(tmp_path))
        if not uses:
            buffer.extend(columns(0, 40))
        uses.update(buffer.sample_sequences(8, LENGTH, 'env').rows[0].tolist())
        assert buffer.sampler.uses_of(np.array(list(uses)), starts=True).tolist() == list(uses.values())
        buffer.close()
    assert max(uses.values()) == 2
    buffer = StoreBuffer(60, sampler=limited(make(), max_times_sampled=2), path=str(tmp_path))
    uses += used(buffer, 1)
    assert sorted(uses.values()) == [2] * 32
    assert buffer.count() == 40
    buffer.close()


@pytest.mark.parametrize('how', ['reopened', 'resized', 'a change of done', 'another length first'])
@pytest.mark.parametrize('make', SAMPLERS, ids=['uniform', 'prioritized'])
def test_sequences_left_stay_equally_likely(make: Any, how: str, tmp_path: Path) -> None:
    """Though most starts are used up, and are starts again in a set that was made anew."""
    if how.startswith('another') and isinstance(make(), SequencePrioritized):
        pytest.skip('it draws sequences of one length')
    rows, replace = np.arange(1002), isinstance(make(), Uniform)

    def opened() -> StoreBuffer:
        return StoreBuffer(1002, sampler=limited(make(), max_times_sampled=8), seed=0, path=str(tmp_path))

    buffer = opened()
    buffer.extend({'env': rows * 0, 'row': rows, 'done': rows < 0})
    used_up = np.random.RandomState(0).permutation(1000)[:950]
    with buffer.table.index.lock:
        buffer.sampler.start_uses().count(np.repeat(used_up, 8))
    if how == 'reopened':
        buffer.close()
        buffer = opened()
    elif how == 'resized':
        buffer.resize(1003)
    elif how == 'another length first':
        buffer.sample_sequences(8, 2, 'env', replace=True)
    else:
        buffer.sample_sequences(8, 3, 'env', replace=replace)
        last = {'env': np.zeros(1, np.int64), 'row': np.array([1001]), 'done': np.ones(1, bool)}
        buffer.table.update(np.array([1001]), last)
    drawn = Counter(buffer.sample_sequences(64, 3, 'env', replace=True).rows[0].tolist())
    # Of 50 that are left 64 draws hit some 36; in the order of slots they would be the first few, eight times each.
    assert len(drawn) > 25
    assert max(drawn.values()) < 8
    assert np.median(list(drawn)) > 200
    buffer.close()


def test_sequence_starts_of_a_limited_view_end_with_the_view() -> None:
    buffer = filled(Uniform(0))
    index = buffer._elements.sequences.index('env', 'done')
    made: list = []
    add_starts = index._add_starts
    index._add_starts = lambda *arguments: made.append(0) or add_starts(*arguments)  # type: ignore[method-assign]
    views = [buffer.view(limited(Uniform(i), max_times_sampled=9)) for i in range(7)]
    for _ in range(3):
        for view in views:
            view.sample_sequences(2, LENGTH, 'env')
    assert len(made) == 7
    del views, view
    assert len(index._starts_of) == 0


class SequenceUsesModel(SequenceModel):
    """As that model, where a sequence comes twice, or a row of sequences that share none."""

    @initialize(size=st.integers(3, 40), by=st.sampled_from(sorted(GROUPBY)))
    def make(self, size: int, by: str) -> None:
        self.buffer = StoreBuffer(size, sampler=limited(Uniform(3), max_times_sampled=2))
        self.size, self.by, self.groupby, self.next_row = size, by, GROUPBY[by], 0
        self.uses: Counter = Counter()
        self.row_uses: Counter = Counter()
        self.forget()
        self.push_one_by_one([(0, False, 0)])
        self.sequences((2, None), 1)

    def sequences(self, kind: tuple, size: int, replace: bool = False) -> None:
        length, overlap = kind
        share_rows = replace or length != (1 if overlap is None else length - overlap)
        expected = self.windows(length, overlap)
        left = [2 - self.uses[rows[0]] if share_rows else 1 for rows in expected]
        num_left = sum(left) if replace else sum(each > 0 for each in left)
        try:
            batch = self.buffer.sample_sequences(size, length, self.groupby, overlap=overlap, replace=replace)
        except NotEnoughData:
            assert num_left < size
            return
        assert num_left >= size
        drawn = batch.rows.T.tolist()
        assert all(rows in expected for rows in drawn)
        assert replace or len({rows[0] for rows in drawn}) == size
        if share_rows:
            self.uses.update(rows[0] for rows in drawn)
            assert max(self.uses.values()) <= 2
            return
        self.row_uses.update(row for rows in drawn for row in rows)
        assert max(self.row_uses.values()) <= 2
        self.live = [row for row in self.live if self.row_uses[row] < 2]

    @rule()
    def sample_episodes(self) -> None:
        """Counted one by one."""


TestSequenceUses = SequenceUsesModel.TestCase
TestSequenceUses.settings = settings(max_examples=20 * MORE, stateful_step_count=25, deadline=None)
