"""Limited uses and ages, with any sampler."""

import contextlib
import copy
from collections import Counter
from typing import Any, Optional

import numpy as np
import pytest
import torch
from ding.data.buffer import Buffer

from ding_store.buffer import Prioritized, RateLimiter, StoreBuffer, Uniform, limited
from ding_store.errors import ConfigError, NotEnoughData, SchemaMismatch, StoreTimeout


def element(version: int = 0) -> dict:
    return {'x': torch.zeros(3), 'policy_version': torch.tensor([version])}


def filled(sampler: Any, count: int = 30, size: int = 40) -> StoreBuffer:
    buffer = StoreBuffer(size, sampler=sampler)
    buffer.extend_elements([element() for _ in range(count)])
    return buffer


@pytest.mark.parametrize('make', [lambda: Uniform(1), lambda: Prioritized(seed=1)])
@pytest.mark.parametrize('most', [1, 3])
def test_limited_row_is_sampled_at_most_the_limit(make: Any, most: int) -> None:
    buffer, uses = filled(limited(make(), max_times_sampled=most)), Counter()
    while buffer.count() * most >= 7:
        try:
            uses.update(buffer.sample_batch(7, replace=True).rows.tolist())
        except NotEnoughData:
            break
    assert max(uses.values()) == most
    assert sum(uses.values()) > 30 * most - 7
    assert set(buffer.table.rows_by_age().tolist()) == {row for row in range(30) if uses[row] < most}


def test_limited_row_in_a_reused_slot_has_no_uses() -> None:
    buffer = filled(limited(Uniform(0), max_times_sampled=2), count=4, size=4)
    buffer.sample_batch(4)
    assert buffer.sampler.uses_of(np.arange(5)).tolist() == [1, 1, 1, 1, 0]
    buffer.extend_elements([element(), element()])
    assert buffer.sampler.uses_of(np.arange(6)).tolist() == [0, 0, 1, 1, 0, 0]
    buffer.sample_batch(4)
    assert buffer.table.rows_by_age().tolist() == [4, 5]


def test_limited_prioritized_row_leaves_at_its_limit() -> None:
    buffer = filled(limited(Prioritized(seed=0, alpha=1.0), max_times_sampled=5), count=20)
    buffer.update_priorities(np.arange(20), np.where(np.arange(20) == 7, 1e6, 1e-3))
    batch = buffer.sample_batch(8)
    assert batch.weights.shape == (8,)
    assert (batch.rows == 7).sum() == 5
    assert 7 not in buffer.table.rows_by_age()


def test_rows_above_max_age_are_removed() -> None:
    buffer = StoreBuffer(50, sampler=limited(Uniform(0), max_age=2))
    for version in (1, 2, 5, 3, 4):
        buffer.extend_elements([element(version) for _ in range(4)])
    batch = buffer.sample_batch(12)
    assert sorted(set(batch.data['policy_version'].tolist())) == [3, 4, 5]
    buffer.sampler.set_version(7)
    buffer.sampler.set_version(6)
    assert set(buffer.sample_batch(4).data['policy_version'].tolist()) == {5}
    buffer.push(element(4))  # Late: too old already.
    buffer.sample_batch(1)
    assert buffer.count() == 4


def versions_of(buffer: StoreBuffer) -> set:
    with contextlib.suppress(NotEnoughData):
        buffer.sample(1)
    return {int(item.data['policy_version']) for item in buffer.storage}


@pytest.mark.parametrize('is_sampled', [False, True])
@pytest.mark.parametrize('is_told', [False, True])
def test_loaded_rows_of_another_run_are_too_old(tmp_path: Any, caplog: Any, is_sampled: bool, is_told: bool) -> None:
    """Versions begin anew: else each new row would leave at once, and the old ones stay for ever."""
    path = str(tmp_path / 'saved')
    former = StoreBuffer(50)
    former.extend_elements([element(version) for version in (499, 500)])
    former.save_data(path)
    buffer = StoreBuffer(50, sampler=limited(Uniform(0), max_age=20))
    buffer.load_data(path)
    if is_sampled:
        assert versions_of(buffer) == {499, 500}
    if is_told:
        buffer.sampler.set_version(1)
        assert versions_of(buffer) == set()
    buffer.extend_elements([element(1), element(2)])
    assert versions_of(buffer) == {1, 2}
    buffer.extend_elements([element(30)])
    assert versions_of(buffer) == {30}
    assert caplog.text.count('they are of another run') == 1


def test_loaded_rows_of_the_same_run_keep_their_age(tmp_path: Any, caplog: Any) -> None:
    path = str(tmp_path / 'saved')
    former = StoreBuffer(50)
    former.extend_elements([element(version) for version in (480, 499, 500)])
    former.save_data(path)
    buffer = StoreBuffer(50, sampler=limited(Uniform(0), max_age=20))
    buffer.load_data(path)
    buffer.extend_elements([element(498)])
    assert versions_of(buffer) == {480, 498, 499, 500}
    buffer.extend_elements([element(501), element(3)])  # The last one is late.
    assert versions_of(buffer) == {498, 499, 500, 501}
    assert 'another run' not in caplog.text


def with_groups(sampler: Any, **options: Any) -> StoreBuffer:
    """Of versions 1 to 5, 8 rows each: an episode of 4 in each of two environments."""
    buffer = StoreBuffer(50, seed=0, sampler=sampler, **options)
    for i in range(40):
        step = {'env': i % 2, 'done': i // 2 % 4 == 3}
        buffer.push({**element(1 + i // 8), **step}, {'env': i % 2})
    return buffer


@pytest.mark.parametrize('prefetch', [0, 2])
def test_max_age_limits_sequences_episodes_and_groups(prefetch: int) -> None:
    for sample in (
        lambda buffer: buffer.sample_sequences(4, 2, 'env').elements(),
        lambda buffer: buffer.sample_episodes(2, 'env').elements(),
        lambda buffer: [[item.data for item in group] for group in buffer.sample(2, groupby='env')],
        lambda buffer: [[item.data for item in group] for group in buffer.sample(2, groupby='env', unroll_len=3)],
    ):

        def oldest(buffer: StoreBuffer, sample: Any = sample) -> int:
            return min(int(step['policy_version']) for steps in sample(buffer) for step in steps)

        buffer = with_groups(limited(Uniform(0), max_age=2), prefetch=prefetch)
        assert oldest(buffer) >= 3
        for version in (6, 7):
            buffer.sampler.set_version(version)
            assert oldest(buffer) >= version - 2
            assert buffer.count() == 8 * (8 - version)


def test_uses_of_groups_stay_within_the_limit() -> None:
    buffer = with_groups(limited(Uniform(0), max_times_sampled=2))
    uses: Counter = Counter()
    while buffer.count() > 20:
        for group in buffer.sample(2, groupby='env', unroll_len=5):
            uses.update(int(item.index) for item in group)
        live = buffer.table.rows_by_age()
        assert buffer.sampler.uses_of(live).tolist() == [uses[row] for row in live.tolist()]
        assert buffer.count() == 40 - sum(count == 2 for count in uses.values())
    assert max(uses.values()) == 2


def test_limited_deep_copy_counts_by_itself() -> None:
    buffer = filled(limited(Uniform(0), max_times_sampled=2), count=12, size=8)
    buffer.delete(['5'])
    rows = buffer.sample_batch(4).rows
    twin = copy.deepcopy(buffer)
    live = buffer.table.rows_by_age()
    expected = np.isin(live, rows).astype(int).tolist()
    assert twin.sampler.uses_of(live).tolist() == expected
    assert len(twin.sample_batch(7).rows) == 7
    assert twin.count() == 3
    assert buffer.sampler.uses_of(live).tolist() == expected


@pytest.mark.parametrize('prefetch', [0, 2])
@pytest.mark.parametrize('burn_in', [None, 0, 1])
def test_uses_of_episodes_and_disjoint_sequences_reach_limit(burn_in: Optional[int], prefetch: int) -> None:
    limiter = RateLimiter(1, max_sample=2, timeout_s=0.01)
    buffer = with_groups(limited(Uniform(0), max_times_sampled=3), prefetch=prefetch, limiter=limiter)
    uses: Counter = Counter()
    with contextlib.suppress(NotEnoughData, StoreTimeout):
        while True:
            if burn_in is None:
                rows = buffer.sample_episodes(2, 'env').rows
            else:
                rows = buffer.sample_sequences(2, 2 - burn_in, 'env', burn_in, overlap=0).rows.reshape(-1)
            uses.update(rows.tolist())
            live = buffer.table.rows_by_age()
            assert buffer.sampler.uses_of(live).tolist() == [uses[row] for row in live.tolist()]
            assert buffer.count() == 40 - sum(count == 3 for count in uses.values())
    assert max(uses.values()) == 3
    # One sequence may be left over, which is no batch.
    assert sum(uses.values()) >= 40 * 3 - 4 * 3
    assert buffer.check() == []


def test_uses_of_episodes_with_replacement_are_refused() -> None:
    buffer = with_groups(limited(Uniform(0), max_times_sampled=2))
    with pytest.raises(TypeError, match=r'max_times_sampled \(2\)'):
        buffer.sample_episodes(2, 'env', replace=True)
    assert buffer.sampler.uses_of(np.arange(40)).sum() == 0
    buffer.view(Uniform()).sample_episodes(2, 'env', replace=True)


def test_sequence_is_as_old_as_its_oldest_step() -> None:
    buffer = StoreBuffer(50, sampler=limited(Prioritized(seed=0), max_age=2))
    for first in (1, 2, 3, 4):
        buffer.push([element(first), element(first), element(first + 1)])
    # The newest step is of version 5.
    batch = buffer.sample_time_major(2)
    assert set(batch.data['policy_version'][0].flatten().tolist()) <= {3, 4}
    assert buffer.count() == 2
    buffer.sampler.set_version(6)
    assert set(buffer.sample_batch(1).rows) == {3}


def test_max_age_reads_versions_from_metas() -> None:
    buffer = StoreBuffer(50, sampler=limited(Uniform(0), max_age=0, version='v'))
    for version in (1, 2):
        for _ in range(3):
            buffer.push({'x': torch.zeros(2)}, {'v': version})
    assert sorted(buffer.sample_batch(3).rows.tolist()) == [3, 4, 5]
    assert buffer.count() == 3
    buffer.push({'x': torch.zeros(2)})
    with pytest.raises(SchemaMismatch, match="version \\('v'\\) is neither a column"):
        buffer.sample_batch(1)


@pytest.mark.parametrize('dtype', [np.float32, np.float64, np.bool_])
def test_max_age_refuses_a_version_that_is_no_integer(dtype: Any) -> None:
    buffer = StoreBuffer(50, sampler=limited(Uniform(0), max_age=1, version='v'))
    buffer.extend({'x': np.zeros(4), 'v': np.ones(4, dtype)})
    with pytest.raises(SchemaMismatch, match=rf"version \('v'\) is neither .*dtype is {np.dtype(dtype)}"):
        buffer.sample_batch(1)


def test_limits_of_uses_and_age_spare_other_views() -> None:
    buffer = filled(limited(Prioritized(seed=0), max_times_sampled=1, max_age=3))
    view = buffer.view(Uniform(0))
    rows = buffer.sample_batch(10).rows
    assert view.count() == 20
    assert not set(rows.tolist()) & set(view.sample_batch(20).rows.tolist())
    twin = copy.deepcopy(buffer)
    assert isinstance(twin, Buffer)
    assert twin.sample_batch(20).rows.size == 20
    assert (twin.count(), buffer.count()) == (0, 20)


@pytest.mark.parametrize(
    'limits', [{}, {'max_times_sampled': 0}, {'max_times_sampled': True}, {'max_age': -1}, {'max_age': 0.5}]
)
def test_limits_that_are_invalid_are_refused(limits: dict) -> None:
    with pytest.raises(ConfigError, match='max_'):
        limited(Uniform(), **limits)


def test_limits_belong_to_one_table() -> None:
    buffer = filled(limited(Uniform(), max_times_sampled=1))
    with pytest.raises(ConfigError, match='one table'):
        StoreBuffer(3, sampler=buffer.sampler)


def test_updates_of_deleted_rows_are_counted() -> None:
    buffer = StoreBuffer(10, sampler=limited(Prioritized(seed=0), max_times_sampled=1))
    buffer.extend({'x': np.arange(10)})
    batch = buffer.sample_batch(4)
    buffer.update_priorities(batch.rows, [1.0] * 4)
    assert buffer.sampler.priorities.num_stale_updates == 4
