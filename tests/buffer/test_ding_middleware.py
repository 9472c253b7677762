"""DI-engine's buffer middleware on a StoreBuffer: its own, or the equivalents."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ding.data.buffer import middleware as stock
from ding.data.buffer.middleware import PriorityExperienceReplay, clone_object, group_sample, padding
from ding.framework import OnlineRLContext
from easydict import EasyDict
from elements import number, transition

from ding_store.buffer import Prioritized, StoreBuffer, limited
from ding_store.buffer.ding import sample_range_view, staleness_check, use_time_check
from ding_store.errors import ConfigError, NotEnoughData, SchemaMismatch
from ding_store.middleware.replay import data_pusher


def filled(count: int, size: int = 100) -> StoreBuffer:
    buffer = StoreBuffer(size)
    for i in range(count):
        buffer.push(transition(i), {'group': i % 4})
    return buffer


def test_use_time_check_removes_only_used_up_rows() -> None:
    buffer = filled(100)
    buffer.use(use_time_check(buffer, max_use=2))
    uses = dict.fromkeys(range(100), 0)
    for _ in range(10):
        for item in buffer.sample(10):
            uses[number(item.data)] += 1
            assert item.meta['use_count'] == uses[number(item.data)] <= 2
    assert [number(item.data) for item in buffer] == [i for i, count in uses.items() if count < 2]


def test_use_time_check_of_one_empties_the_buffer() -> None:
    buffer = filled(20)
    buffer.use(use_time_check(buffer, max_use=1))
    seen = [number(item.data) for _ in range(4) for item in buffer.sample(5)]
    assert sorted(seen) == list(range(20))
    with pytest.raises(NotEnoughData):
        buffer.sample(1)


def test_staleness_check_removes_stale_rows() -> None:
    buffer = StoreBuffer(100)
    buffer.use(staleness_check(buffer, max_staleness=10))
    for i in range(100):
        buffer.push(transition(i), meta={'train_iter_data_collected': i // 2})
    # Iterations 0 .. 24 are older than 10 at iteration 35.
    items = buffer.sample(size=50, train_iter_sample_data=35)
    assert {number(item.data) for item in items} == set(range(50, 100))
    assert buffer.count() == 50
    for item in items:
        iteration = number(item.data) // 2
        assert item.meta == {'train_iter_data_collected': iteration, 'staleness': 35 - iteration}


def test_middleware_of_ding_engine_works_and_names_its_equivalent(caplog: pytest.LogCaptureFixture) -> None:
    buffer = filled(20, size=20)
    buffer.use(stock.use_time_check(buffer, max_use=1)).use(stock.sample_range_view(buffer, start=-5))
    assert {number(item.data) for item in buffer.sample(5)} == set(range(15, 20))
    assert buffer.count() == 15
    assert 'use_time_check is DI-engine' in caplog.text
    assert 'sample_range_view is DI-engine' in caplog.text
    assert 'ding_store.buffer.ding' in caplog.text


def test_an_element_without_its_iteration_is_refused() -> None:
    buffer = StoreBuffer(4).use(staleness_check(StoreBuffer(4), max_staleness=1))
    with pytest.raises(AssertionError, match='train_iter_data_collected'):
        buffer.push(transition(1), meta={'other': 1})
    with pytest.raises(ConfigError, match='start, end or both'):
        sample_range_view(buffer)


def test_clone_object_keeps_the_stored_row_unchanged() -> None:
    buffer = filled(10)
    buffer.use(clone_object())
    buffer.push(transition(10))
    item = buffer.sample(indices=['10'])[0]
    item.meta['mark'] = 1
    item.data.reward.fill_(-1.0)
    assert number(buffer[10].data) == 10
    assert buffer[10].meta == {}


def test_group_samples_are_padded() -> None:
    buffer = filled(18)
    buffer.use(padding()).use(group_sample(size_in_group=3))
    groups = buffer.sample(4, groupby='group')
    assert [len(group) for group in groups] == [3] * 4
    for group in groups:
        numbers = [number(item.data) for item in group]
        assert numbers == [numbers[0], numbers[0] + 4, numbers[0] + 8]
    buffer = filled(18)
    buffer.use(padding())
    assert [len(group) for group in buffer.sample(4, groupby='group')] == [5] * 4


def test_sample_range_view_limits_samples_to_the_newest() -> None:
    buffer = filled(20, size=20)
    buffer.use(sample_range_view(buffer, start=-5))
    assert {number(item.data) for _ in range(20) for item in buffer.sample(5)} == set(range(15, 20))


@pytest.mark.parametrize('weighted', [True, False])
def test_priority_middleware_draws_by_priority(weighted: bool) -> None:
    buffer = StoreBuffer(8)
    buffer.use(PriorityExperienceReplay(buffer, IS_weight=weighted))
    for i in range(12):
        buffer.push(transition(i))
    # All priorities are equal, and as many are drawn as there are: one of each, in the order of the tree.
    items = buffer.sample(8)
    assert [number(item.data) for item in items] == [8, 9, 10, 11, 4, 5, 6, 7]
    for item in items:
        item.meta['priority'] = 100.0 if number(item.data) == 9 else 1e-4
        buffer.update(index=item.index, data=None, meta=item.meta)
    items = buffer.sample(64)
    assert sum(number(item.data) == 9 for item in items) > 50
    assert ('priority_IS' in items[0].data) is weighted
    batch = buffer.sample_batch(32)
    assert batch.data.reward.tolist() == batch.rows.tolist()
    if weighted:
        assert batch.data.priority_IS.shape == batch.weights.shape == (32,)
        assert np.allclose(batch.weights, batch.data.priority_IS.numpy())
    buffer.clear()
    assert buffer.count() == 0


def test_fetcher_and_pusher_of_di_engine_work() -> None:
    from ding.framework import task
    from ding.framework.context import OnlineRLContext
    from ding.framework.middleware.functional import data_pusher, offpolicy_data_fetcher

    cfg = EasyDict(policy=dict(collect=dict(unroll_len=1), learn=dict(batch_size=4)))
    with task.start():
        buffer, ctx = StoreBuffer(100), OnlineRLContext()
        buffer.use(PriorityExperienceReplay(buffer))
        ctx.trajectories = [transition(i) for i in range(3)]
        data_pusher(cfg, buffer)(ctx)
        fetch = offpolicy_data_fetcher(cfg, buffer)
        for i in range(3, 20):
            buffer.push(transition(i))
        generator = fetch(ctx)
        next(generator)
        assert len(ctx.train_data) == 4
        ctx.train_output = {'priority': [5.0, 6.0, 7.0, 8.0]}
        rows = [int(number(element)) for element in ctx.train_data]
        with pytest.raises(StopIteration):
            next(generator)
        assert {buffer[row].meta['priority'] for row in rows} == {5.0, 6.0, 7.0, 8.0}


def test_fetcher_of_di_engine_skips_only_for_a_shortage() -> None:
    from ding.framework.context import OnlineRLContext
    from ding.framework.middleware.functional import offpolicy_data_fetcher

    cfg = EasyDict(policy=dict(collect=dict(unroll_len=1), learn=dict(batch_size=4)))
    buffer, ctx = filled(3), OnlineRLContext()
    assert list(offpolicy_data_fetcher(cfg, buffer)(ctx)) == []
    assert ctx.train_data is None
    cfg.policy.learn.batch_size = 0
    with pytest.raises(TypeError):
        list(offpolicy_data_fetcher(cfg, buffer)(ctx))


def test_buffer_saver_writes_a_loadable_file(tmp_path: Path) -> None:
    from ding.framework.context import OnlineRLContext
    from ding.framework.middleware.functional import buffer_saver

    buffer, ctx = filled(5), OnlineRLContext()
    ctx.env_step = 7
    buffer_saver(EasyDict(exp_name=str(tmp_path)), buffer, every_envstep=5)(ctx)
    loaded = StoreBuffer(10)
    loaded.load_data(str(tmp_path / 'replaybuffer' / 'data_envstep_7.hkl'))
    assert [number(item.data) for item in loaded] == list(range(5))


# --- combined


def test_delete_of_many_passes_through_priorities() -> None:
    buffer = StoreBuffer(20)
    buffer.use(PriorityExperienceReplay(buffer))
    for i in range(20):
        buffer.push(transition(i))
    buffer.delete(['3', '4', '4', '17', '99'])
    assert buffer.count() == 17
    seen = {number(item.data) for _ in range(20) for item in buffer.sample(16)}
    assert seen == set(range(20)) - {3, 4, 17}


def test_staleness_with_priorities_drops_stale_rows() -> None:
    buffer = StoreBuffer(100)
    # The first is the outermost: what is stale leaves before the rest is drawn by priority.
    buffer.use(staleness_check(buffer, max_staleness=10)).use(PriorityExperienceReplay(buffer))
    for i in range(100):
        buffer.push(transition(i), meta={'train_iter_data_collected': i // 2})
    # Equal priorities and as many draws as rows: each once.
    items = buffer.sample(size=50, train_iter_sample_data=35)
    assert {number(item.data) for item in items} == set(range(50, 100))
    assert buffer.count() == 50
    for item in items:
        item.meta['priority'] = 100.0 if number(item.data) == 77 else 1e-4
        buffer.update(index=item.index, data=None, meta=item.meta)
    again = buffer.sample(size=64, train_iter_sample_data=35)
    assert sum(number(item.data) == 77 for item in again) > 30


@pytest.mark.parametrize('staleness_first', [True, False])
def test_staleness_with_use_counts(staleness_first: bool) -> None:
    buffer = StoreBuffer(100)
    checks = [staleness_check(buffer, max_staleness=10), use_time_check(buffer, max_use=2)]
    for check in checks if staleness_first else reversed(checks):
        buffer.use(check)
    for i in range(100):
        buffer.push(transition(i), meta={'train_iter_data_collected': i // 2})
    uses = dict.fromkeys(range(50, 100), 0)
    for _ in range(6):
        for item in buffer.sample(size=10, train_iter_sample_data=35):
            uses[number(item.data)] += 1
            assert item.meta['use_count'] == uses[number(item.data)] <= 2
    assert [number(item.data) for item in buffer] == [i for i, count in uses.items() if count < 2]
    assert buffer.sample(size=5, train_iter_sample_data=10**6, ignore_insufficient=True) == []
    assert buffer.count() == 0


def test_views_have_their_own_ranges_and_use_counts() -> None:
    """As DI-engine's ppg_offpolicy has them."""
    buffer = StoreBuffer(40)
    policy, value = buffer.view(), buffer.view()
    policy.use(use_time_check(policy, max_use=1)).use(sample_range_view(policy, start=-10))
    value.use(use_time_check(value, max_use=3)).use(sample_range_view(value, start=-40))
    for i in range(40):
        buffer.push(transition(i))
    taken = [number(item.data) for item in policy.sample(10)]
    assert sorted(taken) == list(range(30, 40))
    assert buffer.count() == value.count() == 30
    uses = dict.fromkeys(range(30), 0)
    for _ in range(8):
        for item in value.sample(10):
            uses[number(item.data)] += 1
    assert max(uses.values()) <= 3
    assert buffer.count() == sum(count < 3 for count in uses.values())


@pytest.mark.parametrize('priorities', [True, False])
def test_clones_have_use_counts(priorities: bool) -> None:
    buffer = StoreBuffer(40)
    if priorities:
        buffer.use(PriorityExperienceReplay(buffer))
    buffer.use(clone_object()).use(use_time_check(buffer, max_use=1000))
    for i in range(40):
        buffer.push(transition(i))
    items = buffer.sample(20)
    for item in items:
        item.data.reward.fill_(-1.0)
        item.meta['mark'] = 1
    assert [number(item.data) for item in buffer] == list(range(40))
    assert all('mark' not in item.meta for item in buffer)
    assert sum(item.meta.get('use_count', 0) for item in items) >= 20


def test_groups_are_padded_and_counted() -> None:
    buffer = filled(18)
    buffer.use(padding()).use(group_sample(size_in_group=3)).use(use_time_check(buffer, max_use=2))
    for _ in range(2):
        groups = buffer.sample(4, groupby='group')
        assert [len(group) for group in groups] == [3] * 4
        assert len({item.meta['group'] for group in groups for item in group}) == 4
    # Whole groups were sampled below group_sample: all rows had their two uses.
    assert buffer.count() == 0


def test_groups_of_clones_follow_ranges() -> None:
    buffer = filled(40)
    buffer.use(clone_object()).use(padding())
    groups = buffer.sample(4, groupby='group', sample_range=slice(-13, None))
    assert [len(group) for group in groups] == [4] * 4
    assert all(number(item.data) >= 27 for group in groups for item in group)
    unrolled = buffer.sample(8, groupby='group', unroll_len=3, replace=True)
    for group in unrolled:
        numbers = [number(item.data) for item in group]
        assert numbers == [numbers[0], numbers[0] + 4, numbers[0] + 8]


def test_limited_prioritized_replaces_two_middleware() -> None:
    """DI-engine's two middleware cannot do this together: see docs/howto/migrate-from-dequebuffer.md."""
    buffer = StoreBuffer(40, sampler=limited(Prioritized(seed=0), max_times_sampled=2))
    for i in range(40):
        buffer.push(transition(i))
    uses = dict.fromkeys(range(40), 0)
    for _ in range(8):
        batch = buffer.sample_batch(8)
        for row in batch.rows.tolist():
            uses[row] += 1
        buffer.update_priorities(batch.rows, batch.rows.astype(float))
    assert max(uses.values()) == 2
    assert buffer.count() == sum(count < 2 for count in uses.values())


@pytest.mark.parametrize('element', [3, 'text', torch.ones(2), [torch.ones(2)] * 3, (1, 2)])
def test_data_pusher_accepts_elements_that_are_no_mappings(element: object) -> None:
    ctx = OnlineRLContext()
    ctx.trajectories = [element] * 5
    buffer = StoreBuffer(10, sampler=Prioritized())
    data_pusher(None, buffer)(ctx)
    assert buffer.count() == 5


def test_sample_accepts_false_as_no_indices() -> None:
    buffer = filled(10)
    assert len(buffer.sample(4, False)) == 4
    # Middleware of DequeBuffer passes its ``replace`` on in this place.
    assert len(buffer.sample(4, False, True)) == 4


def test_priority_metas_equal_those_of_di_engine() -> None:
    buffer = StoreBuffer(10)
    buffer.use(PriorityExperienceReplay(buffer, IS_weight=True))
    for i in range(10):
        buffer.push(transition(i), meta={'priority': 2.0})
    items = buffer.sample(6)
    for item in items:
        assert {'priority', 'priority_idx', 'priority_IS'} <= set(item.meta)
        assert buffer._middleware[0].buffer_idx[item.meta['priority_idx']] == item.index
        # What the sample added to the data is not of the buffer's elements.
        assert buffer.update(item.index, item.data, {**item.meta, 'priority': 3.0})
    assert len(buffer._middleware[0].buffer_idx) == 10


def test_update_with_a_new_key_is_one_error() -> None:
    buffer = filled(3)
    item = buffer.get(0)
    element = dict(item.data, another=torch.ones(1))
    with pytest.raises(SchemaMismatch, match='another') as raised:
        buffer.update(item.index, element)
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    with pytest.raises(SchemaMismatch, match='another') as raised:
        buffer.push(element)
    assert raised.value.__context__ is None
