"""Fresh: rows in proportion to 2 ** (-age / half_life)."""

import copy
import math
from itertools import permutations
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest

from ding_store.buffer import Fresh, StoreBuffer, Table
from ding_store.errors import ConfigError, NotEnoughData


def filled(count: int, half_life: float, size: int = 0, seed: Any = 0) -> StoreBuffer:
    buffer = StoreBuffer(size or count, sampler=Fresh(half_life, seed))
    buffer.extend({'x': np.arange(count)})
    return buffer


def table_of(count: int, capacity: int, gone: List[int]) -> Table:
    table = Table({'x': (np.int64, ())}, capacity)
    table.extend({'x': np.arange(count)})
    table.delete(np.array(gone, np.int64))
    return table


def draw(sampler: Fresh, table: Table, size: int, **options: Any) -> np.ndarray:
    """Row numbers of one choice."""
    with table.index.lock:
        return table.index.row_of_slot[sampler.choose(table.index, size, **options)]


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def limit(degrees: int) -> float:
    """The mean of chi-square plus four standard deviations."""
    return degrees + 4 * math.sqrt(2 * degrees)


def shares_of(rows: np.ndarray, half_life: float, newest: int) -> np.ndarray:
    weights = 2.0 ** ((rows - newest) / half_life)
    return weights / weights.sum()


@pytest.mark.parametrize('half_life', [3.0, 40.0, 1e9])
@pytest.mark.parametrize('is_sparse', [False, True])
def test_draws_are_in_proportion_to_freshness(half_life: float, is_sparse: bool) -> None:
    table, sampler = table_of(60, 40, [row for row in range(20, 60) if row % 7 and is_sparse]), Fresh(half_life, 0)
    rows = table.rows_by_age()
    drawn = np.concatenate([draw(sampler, table, 20, replace=True) for _ in range(1000)])
    shares = shares_of(rows, half_life, 59)
    # Rare rows count together: their counts are not near a normal law.
    is_rare = shares * len(drawn) < 10
    counts = np.array([np.count_nonzero(drawn == row) for row in rows])
    counts = np.append(counts[~is_rare], counts[is_rare].sum())[: len(counts)]
    expected = np.append(shares[~is_rare], shares[is_rare].sum())[: len(shares)]
    assert chi_square(counts, expected) < limit(len(counts) - 1)
    assert counts.sum() == len(drawn) == 20_000
    # A half-life that is a fifth longer would be seen, where rows differ.
    other = shares_of(rows, half_life * 1.2, 59)
    other = np.append(other[~is_rare], other[is_rare].sum())[: len(other)]
    assert chi_square(counts, other) > limit(len(counts) - 1) or half_life == 1e9


@pytest.mark.parametrize(('half_life', 'gone'), [(1.0, []), (0.25, []), (2.0, [3]), (1.0, [0, 5, 6, 7])])
def test_rows_without_replacement_are_drawn_one_by_one(half_life: float, gone: List[int]) -> None:
    table, sampler = table_of(9 if len(gone) > 1 else 5, 9, gone), Fresh(half_life, 0)
    rows = table.rows_by_age()
    weights = dict(zip(rows.tolist(), shares_of(rows, half_life, int(rows[-1])).tolist()))
    size, num_draws = 3, 2500
    chances: Dict[Tuple[int, ...], float] = {}
    for order in permutations(weights, size):
        chance, left = 1.0, sum(weights.values())
        for row in order:
            chance *= weights[row] / left
            left -= weights[row]
        chances[order] = chance
    counts = dict.fromkeys(chances, 0)
    for _ in range(num_draws):
        counts[tuple(draw(sampler, table, size).tolist())] += 1
    common = [order for order, chance in chances.items() if chance * num_draws >= 10]
    found = np.array([counts[order] for order in common] + [num_draws - sum(counts[order] for order in common)])
    expected = np.array([chances[order] for order in common] + [1 - sum(chances[order] for order in common)])
    assert chi_square(found[expected > 1e-9], expected[expected > 1e-9]) < limit(len(common))


def test_tiny_half_life_gives_the_newest_rows() -> None:
    buffer = filled(500, 0.01)
    assert buffer.sample_batch(200).rows.tolist() == list(range(499, 299, -1))
    assert buffer.sample_batch(50, replace=True).rows.tolist() == [499] * 50


def test_range_is_weighed_within_itself() -> None:
    buffer = filled(50, 2.0)
    table, sampler = buffer.table, buffer.sampler
    drawn = np.concatenate([draw(sampler, table, 1, sample_range=slice(3, 7)) for _ in range(4000)])
    assert chi_square(np.bincount(drawn)[3:], shares_of(np.arange(3, 7), 2.0, 49)) < limit(3)
    assert set(buffer.sample_batch(99, replace=True, sample_range=slice(3, 5)).rows.tolist()) == {3, 4}
    with pytest.raises(NotEnoughData, match=r'buffer\(4\)'):
        buffer.sample_batch(5, sample_range=slice(3, 7))


def test_too_few_rows_are_an_error() -> None:
    buffer = filled(3, 10.0, size=9)
    with pytest.raises(NotEnoughData, match=r'^There are less than 4 records in buffer\(3\)'):
        buffer.sample_batch(4)
    assert sorted(buffer.sample_batch(3).rows.tolist()) == [0, 1, 2]
    assert len(buffer.sample_batch(30, replace=True).rows) == 30
    buffer.clear()
    with pytest.raises(NotEnoughData):
        buffer.sample_batch(1, replace=True)


def test_seed_decides_on_the_draws() -> None:
    def draws(seed: Any) -> list:
        return filled(200, 50.0, seed=seed).sample_batch(30).rows.tolist()

    assert draws(3) == draws(3) != draws(4)
    np.random.seed(5)
    first = draws(None)
    np.random.seed(5)
    assert draws(None) == first
    buffer = filled(200, 50.0, seed=3)
    buffer.sample_batch(7)
    twin = copy.deepcopy(buffer)
    assert twin.sample_batch(9).rows.tolist() == buffer.sample_batch(9).rows.tolist()


@pytest.mark.parametrize('half_life', [0, -1, math.inf, math.nan, 'one', None])
def test_half_life_that_is_no_positive_number_is_refused(half_life: Any) -> None:
    with pytest.raises(ConfigError, match='half_life'):
        Fresh(half_life)
