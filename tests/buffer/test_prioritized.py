"""Prioritized and RankPrioritized on a table, against a plain list of priorities."""

import copy
import gc
from typing import Any, Dict, List

import numpy as np
import pytest
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ding_store.buffer import Prioritized, RankPrioritized, mixed_priority
from ding_store.buffer.table.table import Table
from ding_store.environment import ENV_NO_NUMBA
from ding_store.errors import ConfigError, NotEnoughData, PriorityError, SchemaMismatch

BOTH = [Prioritized, RankPrioritized]


def table_of(num_rows: int, capacity: int = 50) -> Table:
    table = Table({'x': (np.int64, ())}, capacity)
    push(table, num_rows)
    return table


def push(table: Table, num_rows: int) -> np.ndarray:
    return table.extend({'x': np.arange(table.next_row, table.next_row + num_rows)})


def attached(table: Table, kind: Any = Prioritized, **options: Any) -> Any:
    sampler = kind(**{'seed': 0, **options})
    sampler.attach(table.index)
    return sampler


def draw(sampler: Any, table: Table, size: int, **options: Any) -> np.ndarray:
    """Row numbers of one choice."""
    with table.index.lock:
        return table.index.row_of_slot[sampler.choose(table.index, size, **options)]


def counts_of(sampler: Any, table: Table, num_rows: int, num_draws: int) -> np.ndarray:
    rows = np.concatenate([draw(sampler, table, 10, replace=True) for _ in range(num_draws // 10)])
    return np.bincount(rows - table.rows_by_age()[0], minlength=num_rows)


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize('capacity', [1, 7, 1000])
def test_rows_are_found_by_their_numbers_alone(capacity: int) -> None:
    table = table_of(capacity, capacity)
    sampler = attached(table, alpha=1.0, epsilon=0.0)
    table.index.next_row = 10**15
    rows = push(table, capacity)
    assert rows[0] == 10**15
    nobody = [-1, -capacity, capacity - 1, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), rows[0] - capacity, rows[-1] + 1]
    for row in nobody:
        sampler.priorities.update(np.array([row]), [5.0])
    assert sampler.priorities.num_stale_updates == len(nobody)
    priority = 2.0 + np.arange(capacity)
    sampler.priorities.update(rows, priority)
    assert sampler.priorities.of(rows).tolist() == priority.tolist()


@pytest.mark.parametrize('numba', ['0', '1'])
@pytest.mark.parametrize('alpha', [0.0, 0.6, 1.0])
def test_rows_are_drawn_in_proportion_to_priorities(alpha: float, numba: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NO_NUMBA, numba)
    table = table_of(40)
    sampler = attached(table, alpha=alpha, epsilon=0.0)
    priority = np.linspace(0.1, 5, 40)
    sampler.priorities.update(np.arange(40), priority)
    shares = priority**alpha / (priority**alpha).sum()
    # Strata make the counts less spread than independent draws, so that this quantile (p = 0.999, 39 degrees of
    # freedom) is rarely come near to; with a share wrong by a third it is passed by far.
    counts = counts_of(sampler, table, 40, 20_000)
    assert chi_square(counts, shares) < 72.1
    assert chi_square(counts, np.roll(shares, 13)) > 72.1 or alpha == 0


def test_rank_draws_follow_their_shares() -> None:
    table = table_of(40)
    sampler = attached(table, RankPrioritized, alpha=0.7)
    priority = np.random.RandomState(1).permutation(40) + 0.5
    sampler.priorities.update(np.arange(40), priority)
    sampler.sort()
    shares = (40 - priority + 0.5) ** -0.7
    assert chi_square(counts_of(sampler, table, 40, 20_000), shares / shares.sum()) < 72.1
    # An outlier counts no more than its place.
    sampler.priorities.update(np.array([int(priority.argmax())]), [1e9])
    sampler.sort()
    assert chi_square(counts_of(sampler, table, 40, 20_000), shares / shares.sum()) < 72.1


def test_ranks_between_sorts_are_about_right() -> None:
    random = np.random.RandomState(0)
    table = table_of(2000, 2000)
    sampler = attached(table, RankPrioritized, sort_every=10**9)
    sampler.priorities.update(np.arange(2000), random.lognormal(size=2000))
    sampler.sort()
    for rows in np.array_split(random.permutation(2000), 40):
        sampler.priorities.update(rows, random.lognormal(size=len(rows)))
    kept = sampler.priorities.masses.tree.masses[:2000].copy()
    total = sampler.priorities.masses.tree.total
    sampler.sort()
    exact = sampler.priorities.masses.tree.masses[:2000]
    assert sampler.priorities.masses.tree.total == pytest.approx(total, rel=0.35)
    assert np.corrcoef(np.log(kept), np.log(exact))[0, 1] > 0.95


def test_new_rows_share_the_first_ranks() -> None:
    table = table_of(1000, 2000)
    sampler = attached(table, RankPrioritized, sort_every=10**9)
    sampler.priorities.update(np.arange(1000), np.random.RandomState(0).rand(1000))
    sampler.sort()
    for _ in range(100):
        push(table, 1)
    draw(sampler, table, 1)
    # Were each of them of rank 1, they would have nearly all of the mass.
    new = sampler.priorities.masses.tree.masses[table.index.find(np.arange(1000, 1100))[0]]
    assert new.tolist() == pytest.approx((np.arange(1, 101) ** -0.7).tolist())


@pytest.mark.parametrize('changes', [dict(sort_every=7), dict(sort_every=None)])
def test_ranks_are_sorted_at_intervals(changes: Dict[str, Any]) -> None:
    table = table_of(50)
    sampler = attached(table, RankPrioritized, **changes)
    random = np.random.RandomState(0)
    for _ in range(400):
        rows = random.randint(0, 50, 5)
        sampler.priorities.update(rows, random.rand(5))
    if changes['sort_every'] == 7:
        # At most the last rows since a sort are away from their exact rank.
        masses = np.sort(sampler.priorities.masses.tree.masses[:50])[::-1]
        assert masses.tolist() == pytest.approx((np.arange(1, 51) ** -0.7).tolist(), rel=0.3)
    assert (sampler.priorities.masses._counts >= 0).all()
    assert sampler.priorities.masses._counts.sum() == 50


def test_importance_weights_follow_their_formula() -> None:
    table = table_of(20)
    sampler = attached(table, alpha=0.7, beta=0.5, beta_anneal_steps=0, epsilon=0.0, beta_end=0.5)
    priority = np.arange(1.0, 21.0)
    sampler.priorities.update(np.arange(20), priority)
    # (N P(i)) ** -beta over the largest, written out.
    shares = priority**0.7 / (priority**0.7).sum()
    weights = (20 * shares) ** -0.5
    with table.index.lock:
        slots = sampler.choose(table.index, 20)
        got = sampler.weights(slots)
    assert got.dtype == np.float32
    rows = table.index.row_of_slot[slots]
    assert got.tolist() == pytest.approx((weights / weights.max())[rows].tolist(), rel=1e-6)


def test_beta_grows_with_the_batches() -> None:
    table = table_of(20)
    sampler = attached(table, beta=0.4, beta_end=0.8, beta_anneal_steps=4)
    betas = []
    for _ in range(6):
        betas.append(sampler.beta)
        sampler.weights(sampler.choose(table.index, 2))
    assert betas == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.8])
    sampler.step = 2
    assert sampler.beta == pytest.approx(0.6)


@pytest.mark.parametrize('kind', BOTH)
def test_new_rows_get_the_largest_priority_seen(kind: Any) -> None:
    table = table_of(5)
    sampler = attached(table, kind)
    assert sampler.priorities.of(np.arange(5)).tolist() == pytest.approx([1.0] * 5)
    sampler.priorities.update(np.arange(2), [7.0, 3.0])
    rows = push(table, 1)
    sampler.priorities.update(np.array([0]), [0.5])
    rows = np.append(rows, push(table, 2))
    assert sampler.priorities.of(rows).tolist() == pytest.approx([7.0] * 3)
    sampler.priorities.insert(push(table, 2), [0.25, 9.0])
    assert sampler.priorities.of(np.arange(7, 12)).tolist() == pytest.approx(
        [7.0, 0.25, 9.0, np.nan, np.nan], nan_ok=True
    )
    assert sampler.priorities.max_priority == 9.0
    table.clear()
    assert sampler.priorities.of(push(table, 1)).tolist() == pytest.approx([1.0])


@pytest.mark.parametrize('kind', BOTH)
def test_updates_of_deleted_rows_are_counted(kind: Any) -> None:
    table = table_of(70)
    sampler = attached(table, kind)
    table.delete(np.array([30]))
    before = sampler.priorities.of(np.arange(70))
    sampler.priorities.update(np.array([3, 30, 40, 99, -1]), [100.0, 100.0, 2.0, 100.0, 100.0])
    assert sampler.priorities.num_stale_updates == 4
    # They count for nothing: neither for other rows, nor as the largest seen.
    assert sampler.priorities.max_priority == 2.0
    before[40] = 2.0
    assert sampler.priorities.of(np.arange(70)).tolist() == pytest.approx(before.tolist(), nan_ok=True)


def test_update_of_a_repeated_row_keeps_the_last_priority() -> None:
    for kind in BOTH:
        table = table_of(10)
        sampler = attached(table, kind)
        sampler.priorities.update(np.array([4, 5, 4, 4]), [1.0, 2.0, 9.0, 3.0])
        assert sampler.priorities.of(np.array([4, 5])).tolist() == pytest.approx([3.0, 2.0])


@pytest.mark.parametrize('kind', BOTH)
@pytest.mark.parametrize(
    'bad',
    [[1.0, -1e-9], [float('nan'), 1.0], [1.0, float('inf')], [1e299, 1.0], [1.0], 2.0, [[1.0, 2.0]], ['a', 'b'], None],
)
def test_bad_priorities_change_nothing(kind: Any, bad: Any) -> None:
    table = table_of(10)
    sampler = attached(table, kind)
    sampler.priorities.update(np.arange(10), np.arange(10.0))
    before = sampler.state()
    with pytest.raises(PriorityError, match='priorit') as caught:
        sampler.priorities.update(np.array([2, 3]), bad)
    # DI-engine takes a ValueError for a shortage of data.
    assert not isinstance(caught.value, (ValueError, AssertionError))
    after = sampler.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize('numba', ['0', '1'])
def test_updates_accept_any_array_type(numba: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NO_NUMBA, numba)
    table = table_of(75)
    sampler = attached(table)
    # Strided, of other types, read-only, by place and moved.
    sampler.priorities.update(np.arange(25, 75, dtype=np.int32)[::2], np.arange(50, dtype=np.float32)[::2])
    fixed = np.arange(1.0, 4.0)
    fixed.flags.writeable = False
    sampler.priorities.update([26, 28, 30], fixed)
    assert sampler.priorities.of(np.array([25, 27, 73, 28])).tolist() == pytest.approx([0.0, 2.0, 48.0, 2.0], abs=1e-6)
    table.delete(np.array([40, 41]))
    moved = push(table, 2)
    assert (table.index.find(moved)[0] != moved % 50).any()
    sampler.priorities.update(np.append(moved, 74), [5.0, 6.0, 7.0])
    assert sampler.priorities.of(np.append(moved, 74)).tolist() == pytest.approx([5.0, 6.0, 7.0])


def test_prioritized_invalid_settings_are_refused() -> None:
    for options in (dict(alpha=-0.1), dict(alpha=float('nan')), dict(alpha='x'), dict(beta=1.1), dict(beta_end=None)):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Prioritized(**options)
    for options in (dict(epsilon=-1.0), dict(epsilon=1), dict(beta_anneal_steps=-1), dict(beta_anneal_steps='1')):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Prioritized(**options)
    for sort_every in (0, '9'):
        with pytest.raises(ConfigError, match='sort_every'):
            RankPrioritized(sort_every=sort_every)
    sampler = attached(table_of(3))
    with pytest.raises(ConfigError, match='one table'):
        sampler.attach(table_of(3).index)
    with pytest.raises(PriorityError, match='no table'):
        Prioritized().priorities.update(np.array([1]), [1.0])


@pytest.mark.parametrize('kind', BOTH)
def test_prioritized_sample_from_too_few_rows_raises(kind: Any) -> None:
    table = table_of(0)
    sampler = attached(table, kind)
    for replace in (False, True):
        with pytest.raises(NotEnoughData, match='There are less than 4'):
            draw(sampler, table, 4, replace=replace)
    push(table, 3)
    with pytest.raises(NotEnoughData, match='There are less than 4'):
        draw(sampler, table, 4)
    assert len(draw(sampler, table, 4, replace=True)) == 4


def test_rows_of_priority_zero_are_not_drawn() -> None:
    table = table_of(10)
    sampler = attached(table, epsilon=0.0)
    sampler.priorities.update(np.arange(10), [0.0] * 10)
    with pytest.raises(NotEnoughData, match='priority above 0'):
        draw(sampler, table, 4)
    sampler.priorities.update(np.array([6]), [0.1])
    assert draw(sampler, table, 4).tolist() == [6] * 4
    # With an epsilon even a priority of 0 has its chance.
    sampler = attached(table_of(10), epsilon=1e-3)
    sampler.priorities.update(np.arange(10), [0.0] * 10)
    assert sampler.priorities.masses.tree.total == pytest.approx(10 * 1e-3**0.6)


@pytest.mark.parametrize('kind', BOTH)
def test_sample_range_draws_by_age_and_priority(kind: Any) -> None:
    table = table_of(60)
    table.delete(np.array([20, 21]))
    sampler = attached(table, kind)
    sampler.priorities.update(np.arange(10, 60), np.linspace(0.01, 1, 50))
    for window, rows in ((slice(-3, None), {57, 58, 59}), (slice(0, 2), {10, 11}), (slice(9, 12), {19, 22, 23})):
        drawn = np.concatenate([draw(sampler, table, 4, replace=True, sample_range=window) for _ in range(50)])
        assert set(drawn.tolist()) == rows
    with pytest.raises(NotEnoughData):
        draw(sampler, table, 1, sample_range=slice(100, None))
    counts = np.zeros(3)
    for _ in range(2000):
        np.add.at(counts, draw(sampler, table, 2, replace=True, sample_range=slice(-3, None)) - 57, 1)
    masses = sampler.priorities.masses.tree.masses[table.index.find(np.array([57, 58, 59]))[0]]
    assert chi_square(counts, masses / masses.sum()) < 13.8  # p = 0.999, 2 degrees of freedom


@pytest.mark.parametrize('kind', BOTH)
@pytest.mark.parametrize('global_seed', [False, True])
def test_seeded_draws_are_equal_with_and_without_numba(
    kind: Any, global_seed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(numba: str) -> List[Any]:
        monkeypatch.setenv(ENV_NO_NUMBA, numba)
        np.random.seed(3)
        table = table_of(300, 500)
        sampler = attached(table, kind, seed=None if global_seed else 3)
        random, drawn = np.random.RandomState(0), []
        for _ in range(30):
            rows = draw(sampler, table, 64)
            drawn += [rows.tolist(), sampler.weights(table.index.find(rows)[0]).tolist()]
            sampler.priorities.update(rows, random.lognormal(size=64))
            push(table, 17)
            table.delete(rows[:3])
        return drawn

    first = run('0')
    assert first == run('0')
    assert first == run('1')


@pytest.mark.parametrize('kind', BOTH)
def test_state_restores_the_sampler(kind: Any) -> None:
    random = np.random.RandomState(0)
    table = table_of(80)
    sampler = attached(table, kind, sort_every=20) if kind is RankPrioritized else attached(table, kind)
    table.delete(np.array([40, 45, 50]))
    for _ in range(10):
        sampler.weights(sampler.choose(table.index, 8))
        sampler.priorities.update(random.randint(25, 80, 9), random.rand(9) * 10)
    state = sampler.state()
    assert all(isinstance(value, np.ndarray) for value in state.values())
    # The same rows in other slots.
    twin_table = table_of(0, 60)
    push(twin_table, 47)
    rows = table.rows_by_age()
    twin_table.index.clear()
    twin_table.index.load(rows)
    twin_table.index.next_row = table.next_row
    twin = attached(twin_table, kind, seed=1, **({'sort_every': 20} if kind is RankPrioritized else {}))
    twin.load_state(state)
    again = twin.state()
    assert set(again) == set(state)
    assert all(np.array_equal(state[name], again[name]) for name in state)
    assert twin.beta == sampler.beta
    rows = table.rows_by_age()
    assert twin.priorities.of(rows).tolist() == sampler.priorities.of(rows).tolist()
    assert twin.draws._random.random_sample() == sampler.draws._random.random_sample()


def test_state_of_another_sampler_is_refused() -> None:
    sampler = attached(table_of(10))
    state = sampler.state()
    for changed in ({'mass': state['mass'][1:]}, {'alpha': np.array(0.1)}):
        with pytest.raises(PriorityError):
            sampler.load_state({**state, **changed})
    with pytest.raises(PriorityError, match='lack'):
        sampler.load_state({'mass': state['mass']})
    with pytest.raises(PriorityError, match='RankPrioritized'):
        attached(table_of(10), RankPrioritized, alpha=0.6).load_state(state)


@pytest.mark.parametrize('kind', BOTH)
def test_several_samplers_on_one_table_are_independent(kind: Any) -> None:
    table = table_of(10, 10)
    one, other = attached(table, kind), attached(table, kind)
    one.priorities.update(np.arange(10), [1e6] + [1e-6] * 9)
    other.priorities.update(np.arange(10), [1e-6] * 9 + [1e6])
    assert one.priorities.of(np.array([0, 9])).tolist() == pytest.approx([1e6, 1e-6], rel=1e-3, abs=1e-6)
    push(table, 1)
    for sampler in (one, other):
        assert sampler.priorities.of(np.array([10])).tolist() == pytest.approx([1e6])
        assert 0 not in draw(sampler, table, 10)
    del one, sampler
    gc.collect()
    assert len(table.index._listeners.alive()) == 1


@pytest.mark.parametrize('kind', BOTH)
def test_refused_push_leaves_the_priorities(kind: Any) -> None:
    table = table_of(50)
    sampler = attached(table, kind)
    sampler.priorities.update(np.arange(50), np.arange(50.0))
    before = sampler.state()
    for num_rows in (1, 7):
        with pytest.raises(SchemaMismatch), table.writing(num_rows):
            raise SchemaMismatch('as an element that does not fit')
    after = sampler.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    # Of a push that fails otherwise neither the new rows nor those that made room for them are there.
    with pytest.raises(KeyError), table.writing(5):
        raise KeyError
    assert draw(sampler, table, 45).min() >= 5


def test_sampler_copy_has_no_table() -> None:
    for kind in BOTH:
        table = table_of(10)
        sampler = attached(table, kind, beta=0.3)
        sampler.weights(sampler.choose(table.index, 1))
        twin = copy.deepcopy(sampler)
        assert (twin.beta, twin.step, type(twin)) == (sampler.beta, 1, kind)
        twin.attach(table_of(5).index)


def test_mixed_priority_follows_its_formula() -> None:
    errors = np.array([[1.0, -4.0], [3.0, 0.0]])
    assert mixed_priority(errors).tolist() == pytest.approx([0.9 * 3 + 0.1 * 2, 0.9 * 4 + 0.1 * 2])
    assert mixed_priority(errors, eta=0.0).tolist() == [2.0, 2.0]
    with pytest.raises(PriorityError, match='shape'):
        mixed_priority([1.0, 2.0])
    with pytest.raises(ConfigError, match='eta'):
        mixed_priority(errors, eta=1.5)


class PrioritiesModel(RuleBasedStateMachine):
    """A list of (row, priority) is what the sampler must agree with, whatever happens to the table."""

    kind: Any = Prioritized

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of(0, 12)
        self.sampler = attached(self.table, self.kind, epsilon=0.0) if self.kind is Prioritized else self._ranked()
        self.rows: Dict[int, float] = {}
        self.largest, self.num_stale = 1.0, 0

    def _ranked(self) -> Any:
        return attached(self.table, RankPrioritized, sort_every=5)

    @rule(num_rows=st.integers(1, 15), data=st.data())
    def push(self, num_rows: int, data: Any) -> None:
        rows = push(self.table, num_rows).tolist()
        priorities = [self.largest] * num_rows
        if data.draw(st.booleans()):
            priorities = data.draw(st.lists(st.floats(0.01, 50), min_size=num_rows, max_size=num_rows))
            self.sampler.priorities.insert(np.array(rows), priorities)
        for row, priority in zip(rows, priorities):
            self.rows[row] = priority
        self._evict()
        self.largest = max([self.largest, *(self.rows[row] for row in rows if row in self.rows)])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def delete(self, data: Any) -> None:
        rows = data.draw(st.lists(st.integers(0, max(self.rows)), max_size=4))
        self.table.delete(np.array(rows, np.int64))
        for row in rows:
            self.rows.pop(row, None)

    @rule(pairs=st.lists(st.tuples(st.integers(0, 60), st.floats(0.01, 100)), max_size=6))
    def update(self, pairs: List[Any]) -> None:
        rows = np.array([row for row, _ in pairs], np.int64)
        self.sampler.priorities.update(rows, [priority for _, priority in pairs])
        for row, priority in pairs:
            if row in self.rows:
                self.rows[row] = priority
                self.largest = max(self.largest, priority)
            else:
                self.num_stale += 1

    @rule(num_rows=st.integers(1, 12))
    def refused_push(self, num_rows: int) -> None:
        with pytest.raises(SchemaMismatch), self.table.writing(min(num_rows, self.table.capacity)):
            raise SchemaMismatch('as an element that does not fit')

    @rule(capacity=st.integers(1, 20))
    def resize(self, capacity: int) -> None:
        self.table.shape.resize(capacity)
        self._evict()

    def _evict(self) -> None:
        while len(self.rows) > self.table.capacity:
            del self.rows[min(self.rows)]

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.rows, self.largest = {}, 1.0

    @precondition(lambda self: self.rows)
    @rule(size=st.integers(1, 30))
    def draw(self, size: int) -> None:
        assert set(draw(self.sampler, self.table, size, replace=True).tolist()) <= set(self.rows)

    @invariant()
    def agrees(self) -> None:
        known = sorted(self.rows)
        priorities = [self.rows[row] for row in known]
        assert self.sampler.priorities.of(np.array(known, np.int64)).tolist() == pytest.approx(priorities)
        assert self.sampler.priorities.max_priority == self.largest
        assert self.sampler.priorities.num_stale_updates == self.num_stale
        slots = self.table.index.find(np.array(known, np.int64))[0]
        masses = self.sampler.priorities.masses.tree.masses
        assert np.count_nonzero(masses) == len(known)
        assert self.sampler.priorities.masses.tree.total == pytest.approx(masses[slots].sum())
        if known:
            assert self.sampler.priorities.masses.tree.smallest == masses[slots].min()


class RankPrioritiesModel(PrioritiesModel):
    kind = RankPrioritized


TestPrioritiesModel = PrioritiesModel.TestCase
TestRankPrioritiesModel = RankPrioritiesModel.TestCase
TestPrioritiesModel.settings = settings(max_examples=20 * MORE, stateful_step_count=40, deadline=None)
TestRankPrioritiesModel.settings = TestPrioritiesModel.settings
