"""DI-engine's middleware on real buffers, alone and in pairs, and when rows leave without it."""

import copy
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any, Callable, Dict

import numpy as np
import pytest
import torch
from ding.data import DequeBuffer
from ding.data.buffer.middleware import (
    PriorityExperienceReplay,
    clone_object,
    group_sample,
    padding,
)
from elements import number, transition

from ding_store.buffer import Fifo, RateLimiter, StoreBuffer
from ding_store.buffer.ding import sample_range_view, staleness_check, use_time_check
from ding_store.errors import ConfigError, NotEnoughData, PriorityError, StoreTimeout


def made(*makers: Callable, count: int = 40, size: int = 40, kind: type = StoreBuffer) -> Any:
    buffer = kind(size)
    for make in makers:
        buffer.use(make(buffer))
    for i in range(count):
        buffer.push(transition(i), meta={'i': i, 'train_iter_data_collected': i, 'priority': 1.0 + i % 4})
    return buffer


def per(buffer: Any, power: float = 0.6) -> Any:
    return PriorityExperienceReplay(buffer, IS_weight=True, priority_power_factor=power)


MIDDLEWARE: Dict[str, Callable] = {
    'clone': lambda buffer: clone_object(),
    'stale': lambda buffer: staleness_check(buffer, max_staleness=30),
    'range': lambda buffer: sample_range_view(buffer, start=-20),
    'per': per,
    'use': lambda buffer: use_time_check(buffer, max_use=3),
}
#: The outermost first.
ORDERS = [names for many in (1, 2, 3) for names in permutations(MIDDLEWARE, many)]


@pytest.mark.parametrize('names', ORDERS, ids=lambda names: '-'.join(names))
def test_middleware_in_any_order_equals_a_model(names: tuple) -> None:
    np.random.seed(0)
    buffer, uses = made(*[MIDDLEWARE[name] for name in names]), Counter()
    alive = set(range(40))
    for _ in range(6):
        options: Dict[str, Any] = {}
        if 'stale' in names:
            options['train_iter_sample_data'] = 45
            alive &= set(range(15, 40))
        if 'range' in names:
            newest = set(sorted(alive)[20:]) if len(alive) > 20 else set()
        if ('range' in names and len(newest) < 8) or len(alive) < 8:
            break
        items = buffer.sample(8, **options)
        got = [number(item.data) for item in items]
        assert set(got) <= (newest if 'range' in names else alive)
        uses.update(got)
        if 'use' in names:
            assert all(item.meta['use_count'] <= uses[number(item.data)] for item in items)
            alive -= {i for i in got if uses[i] >= 3}
        if 'per' in names:
            for item in items:
                item.meta['priority'] = 0.5
                buffer.update(item.index, data=None, meta=item.meta)
        assert {number(item.data) for item in buffer} == alive


@pytest.mark.parametrize('name', ['stale', 'range'])
def test_middleware_inside_of_changed_priorities_is_refused(name: str) -> None:
    buffer = made(lambda buffer: per(buffer, 1.5))
    with pytest.raises(ConfigError, match='cannot be used inside PriorityExperienceReplay.*before'):
        buffer.use(MIDDLEWARE[name](buffer))
    assert len(buffer.sample(8)) == 8


def test_groups_inside_of_changed_priorities_are_accepted() -> None:
    buffer = made(lambda buffer: per(buffer, 1.5))
    for each in (padding(), group_sample(size_in_group=3)):
        buffer.use(each)
    assert len(buffer._middleware) == 3
    assert type(buffer._middleware[0]) is PriorityExperienceReplay


@pytest.mark.parametrize('arguments', [(45, 8), (45,)])
def test_staleness_argument_is_first_or_named(arguments: tuple) -> None:
    buffer = made(MIDDLEWARE['stale'])
    buffer.table.columns.take = None  # which would read those that are only looked through
    with pytest.raises(TypeError, match='train_iter_sample_data'):
        buffer.sample(size=8)
    with pytest.raises(NotEnoughData):
        buffer.sample(26, train_iter_sample_data=45)
    assert len(buffer.sample(*arguments, **({} if len(arguments) == 2 else {'size': 8}))) == 8
    del buffer.table.columns.take
    twin = copy.deepcopy(buffer)
    assert len(twin.sample(20, train_iter_sample_data=50)) == 20
    assert (twin.count(), buffer.count()) == (20, 25)


def test_row_without_collection_time_is_refused_when_sampled() -> None:
    """Whether it is sampled or not."""
    buffer = made(MIDDLEWARE['stale'])
    buffer.view().push(transition(7), meta={'i': 7})
    with pytest.raises(KeyError, match="row 40 has no meta 'train_iter_data_collected'"):
        buffer.sample(1, train_iter_sample_data=100)
    assert buffer.count() == 40


def test_batch_without_an_iteration_for_staleness_is_refused() -> None:
    """Its size is none: rows left before it was refused."""
    buffer = made(MIDDLEWARE['stale'])
    with pytest.raises(TypeError, match='train_iter_sample_data'):
        buffer.sample_batch(39)
    assert buffer.count() == 40


GROUPED: Dict[str, Callable] = {
    'stale': MIDDLEWARE['stale'],
    'pad': lambda buffer: padding(),
    'part': lambda buffer: group_sample(size_in_group=3),
    'per': per,
    'use': MIDDLEWARE['use'],
}


GROUPED_ORDERS = [names for many in (2, 3) for names in permutations(GROUPED, many)]


@pytest.mark.parametrize('names', GROUPED_ORDERS, ids=lambda names: '-'.join(names))
def test_groups_work_with_middleware_in_any_order(names: tuple) -> None:
    np.random.seed(0)
    buffer = made(*[GROUPED[name] for name in names])
    options: Dict[str, Any] = {'train_iter_sample_data': 45} if 'stale' in names else {}
    oldest = 15 if 'stale' in names else 0
    for _ in range(2):
        groups = buffer.sample(3, groupby='priority', **options)
        assert [{item.meta['i'] % 4 for item in group} for group in groups] == [
            {group[0].meta['i'] % 4} for group in groups
        ]
        assert all(item.meta['i'] >= oldest and number(item.data) == item.meta['i'] for g in groups for item in g)
        if 'part' in names:
            assert [len(group) for group in groups] == [3, 3, 3]
        elif 'pad' in names:
            assert len({len(group) for group in groups}) == 1
        for group in groups if 'per' in names else []:
            assert len({item.data['priority_IS'].item() for item in group}) == 1
        if 'use' in names:
            break  # Groups that were used up have left.
    assert all(item.meta['i'] >= oldest for item in buffer)


def test_groups_are_drawn_in_proportion_to_their_priorities() -> None:
    np.random.seed(0)
    buffer, counts, weights = made(lambda buffer: per(buffer, 1.0), count=0), Counter(), {}
    for i in range(40):
        buffer.push(transition(i), meta={'i': i, 'group': i % 4, 'priority': 1.0 + i % 4})
    beta = buffer._middleware[0].IS_weight_power_factor
    for group in buffer.sample(2000, groupby='group', replace=True):
        assert [item.meta['i'] for item in group] == list(range(group[0].meta['group'], 40, 4))
        counts[group[0].meta['group']] += 1
        weights[group[0].meta['group']] = group[0].meta['priority_IS']
    assert [counts[group] / 200 for group in range(4)] == pytest.approx([1, 2, 3, 4], abs=0.02)
    assert [weights[group] for group in range(4)] == pytest.approx([(1 + group) ** -beta for group in range(4)])
    assert [len(group) for group in buffer.sample(3, groupby='group', sample_range=slice(-8, None))] == [2, 2, 2]
    assert buffer.sample(5, groupby='group', ignore_insufficient=True) == []
    with pytest.raises(NotEnoughData, match='less than 5 records/groups'):
        buffer.sample(5, groupby='group')


@pytest.mark.parametrize('sliced', [False, True])
def test_unrolls_are_drawn_in_proportion_to_their_starts(sliced: bool) -> None:
    np.random.seed(0)
    buffer, counts = StoreBuffer(40, sliced=sliced), Counter()
    buffer.use(per(buffer, 1.0))
    for i in range(14):
        # Of group 0 rows 0, 2 ... 12; of group 1 rows 1, 3 ... 13.
        buffer.push(transition(i), meta={'i': i, 'group': i % 2, 'priority': 1.0 + i})
    for group in buffer.sample(4000, groupby='group', unroll_len=3, replace=True):
        first = group[0].meta['i']
        assert [item.meta['i'] for item in group] == [first, first + 2, first + 4]
        counts[first] += 1
    if sliced:
        # Each row stands for its slice; the last slice ends with the group.
        masses = {0: 1 + 3 + 5, 6: 7 + 9 + 11, 8: 13, 1: 2 + 4 + 6, 7: 8 + 10 + 12, 9: 14}
    else:
        masses = {first: 1 + first for first in range(10)}
    total = sum(masses.values())
    assert set(counts) == set(masses)
    assert all(counts[first] / 4000 == pytest.approx(mass / total, abs=0.004) for first, mass in masses.items())


def test_reads_by_index_draw_no_random_numbers() -> None:
    buffer = made(per)
    items = buffer.sample(indices=['3', '5'])
    assert [number(item.data) for item in items] == [3, 5]
    assert all('priority_IS' not in item.meta for item in items)


def test_priority_middleware_state_is_restored() -> None:
    """DI-engine's asks for what it does not have."""
    used: list = []
    buffer, twin = (made(lambda buffer: used.append(per(buffer)) or used[-1]) for _ in range(2))
    for item in buffer.sample(8):
        buffer.update(item.index, meta={'priority': 7.0})
    used[1].load_state_dict(used[0].state_dict())
    assert twin._middleware[0].max_priority == buffer._middleware[0].max_priority > 7
    assert twin._middleware[0].IS_weight_power_factor == buffer._middleware[0].IS_weight_power_factor > 0.4
    drawn = []
    for each in (buffer, twin):
        np.random.seed(2)
        drawn.append([(item.index, item.meta['priority_IS']) for item in each.sample(8)])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize('how', [{}, {'groupby': 'priority'}])
def test_priority_middleware_without_weights_keeps_beta(how: dict) -> None:
    buffer = made(lambda buffer: PriorityExperienceReplay(buffer, IS_weight=False))
    buffer.sample(3, **how)
    assert buffer._middleware[0].IS_weight_power_factor == 0.4


def test_batch_of_dicts_passes_middleware() -> None:
    np.random.seed(0)
    buffer = StoreBuffer(40)
    buffer.use(per(buffer))
    for i in range(40):
        buffer.push({'obs': torch.full((4,), float(i)), 'at': (i, 1.5 * i), 'done': i % 2 == 1})
    batch = buffer.sample_batch(8)
    plain = buffer.view().gather_batch(batch.rows)
    assert batch.data.obs.tolist() == plain.data.obs.tolist()
    assert batch.data.done.tolist() == plain.data.done.tolist() == [row % 2 == 1 for row in batch.rows.tolist()]
    assert [each.tolist() for each in batch.data['at']] == [each.tolist() for each in plain.data['at']]
    assert batch.data.priority_IS.tolist() == batch.weights.tolist()


def test_range_middleware_accepts_all_arguments() -> None:
    buffer = made(MIDDLEWARE['range'])
    assert {number(item.data) for item in buffer.sample(size=60, replace=True)} <= set(range(20, 40))
    groups = buffer.sample(2, groupby='priority', unroll_len=3)
    assert [len(group) for group in groups] == [3, 3]


@pytest.mark.parametrize('power', [0.6, 1.5])
def test_draws_and_weights_equal_those_of_di_engine(power: float) -> None:
    found = []
    for kind in (StoreBuffer, DequeBuffer):
        np.random.seed(1)
        buffer, drawn = made(lambda buffer: per(buffer, power), kind=kind), []
        for step in range(5):
            items = buffer.sample(8)
            drawn += [(item.meta['i'], item.data['priority_IS'].item()) for item in items]
            for item in items:
                item.meta['priority'] = item.meta['i'] / 10 + step
                buffer.update(item.index, data=None, meta=item.meta)
        found.append(drawn)
    ours, stock = found
    assert [i for i, _ in ours] == [i for i, _ in stock]
    np.testing.assert_allclose([w for _, w in ours], [w for _, w in stock], rtol=1e-4)


def test_rows_removed_without_the_middleware_are_not_drawn(tmp_path: Path) -> None:
    buffer = made(per)
    buffer.resize(20)
    view = buffer.view()
    view.delete([view[i].index for i in range(0, 20, 2)])
    for _ in range(20):
        assert {number(item.data) for item in buffer.sample(8)} <= set(range(21, 40, 2))
    buffer.update(buffer[0].index, meta={'priority': 50.0})
    buffer.save_data(str(tmp_path / 'save'))
    loaded = made(per, count=3)
    loaded.load_data(str(tmp_path / 'save'))
    counts = Counter(number(item.data) for _ in range(50) for item in loaded.sample(8))
    assert set(counts) <= set(range(21, 40, 2))
    assert counts.most_common(1)[0][0] == 21


def test_priority_middleware_refuses_bad_arguments() -> None:
    buffer = made(per)
    with pytest.raises(TypeError, match='unroll_len .2. needs groupby'):
        buffer.sample(2, unroll_len=2)
    for bad in (-1.0, float('nan')):
        with pytest.raises(PriorityError):
            buffer.update('3', meta={'priority': bad})


def test_middleware_continues_after_keep_in_and_restart(tmp_path: Path) -> None:
    for life in range(2):
        buffer = made(per, lambda buffer: use_time_check(buffer, max_use=3), count=0)
        buffer.keep_in(str(tmp_path))
        for i in range(8 if life == 0 else 0):
            buffer.push(transition(i), meta={'priority': 0.0 if i else 1.0})
        # The one row that has a priority comes twice in this life, and for the last time in the next one.
        for count in (8, 8) if life == 0 else (7,):
            assert number(buffer.sample(1)[0].data) == 0
            assert buffer.count() == count
        buffer.close()


def test_copy_has_priorities_and_uses_of_its_own() -> None:
    buffer = made(per, lambda buffer: use_time_check(buffer, max_use=3), count=8)
    for item in list(buffer):
        buffer.update(item.index, meta={'priority': 0.0 if number(item.data) else 1.0})
    buffer.sample(1)
    twin = copy.deepcopy(buffer)
    np.testing.assert_array_equal(
        twin._middleware[0].sampler.state()['mass'], buffer._middleware[0].sampler.state()['mass']
    )
    twin.push(transition(8), meta={'priority': 1e6})
    assert {number(item.data) for item in twin.sample(3)} == {8}
    assert twin.count() == 8, 'three uses at once'
    assert buffer.count() == 8
    assert {number(buffer.sample(1)[0].data) for _ in range(2)} == {0}
    assert buffer.count() == 7


def test_new_rows_of_a_copy_get_the_same_priority_as_original() -> None:
    buffer = made(per, count=2)
    buffer.push(transition(2), meta={'priority': 9.0})  # Which does not raise what DI-engine gives new rows.
    twin = copy.deepcopy(buffer)
    metas = [each.push(transition(3)).meta for each in (buffer, twin)]
    assert metas[0]['priority'] == metas[1]['priority'] == 1.0


def test_use_counts_are_read_in_bulk_and_removed_with_rows() -> None:
    buffer, looked_up = made(lambda buffer: use_time_check(buffer, max_use=2), count=400, size=400), []
    contains = buffer.table.contains
    buffer.table.contains = lambda rows: looked_up.append(len(rows)) or contains(rows)
    used = buffer._middleware[0]
    for i in range(400, 1600):
        buffer.push(transition(i))
        buffer.sample(1, sample_range=slice(-40, None))
        assert len(used._counts) <= 2 * buffer.count() + 64
    assert sum(looked_up) < 3 * 1200, 'each a few times, and not all of them for each that is used up'
    assert used._counts
    assert all(used._counts[item.index] == item.meta['use_count'] for item in buffer if 'use_count' in item.meta)


def test_metas_are_read_without_reading_elements() -> None:
    buffer = StoreBuffer(10)
    for i in range(14):
        buffer.push(transition(i), meta=[{'priority': i / 2}, {'priority': i}, None, {'x': 1}][i % 4])
    buffer.delete(['8'])
    buffer.table.read = buffer.table.gather = None
    buffer.use(per(buffer))
    rows, values = buffer._elements.metas.values_of('priority')
    assert list(zip(rows.tolist(), values)) == [(4, 2.0), (5, 5), (9, 9), (12, 6.0), (13, 13)]
    assert buffer._middleware[0].max_priority == 13


@pytest.mark.parametrize('how', [{}, {'groupby': 'i'}, {'groupby': 'half', 'unroll_len': 2}])
def test_limiter_counts_what_is_sampled(how: dict) -> None:
    buffer = StoreBuffer(40, limiter=RateLimiter(8, 1, 8, max_sample=8, timeout_s=0))
    if not how:
        buffer.use(per(buffer))
    for i in range(16):
        buffer.push(transition(i), meta={'i': i, 'half': i // 2})
    with pytest.raises(StoreTimeout):
        buffer.push(transition(16), meta={})
    for _ in range(2):
        assert len(buffer.sample(8, **how)) == 8
    with pytest.raises(StoreTimeout):
        buffer.sample(8, **how)
    assert buffer.limiter.state() == {'num_inserts': 16, 'num_samples': 16}
    if how:
        assert buffer.sample(indices=['3'])[0].index == '3', 'reads are no samples'


def test_queue_and_its_limiter_move_to_a_path_together(tmp_path: Path) -> None:
    buffer = StoreBuffer(40, sampler=Fifo(), limiter=RateLimiter(2, 1, 2, timeout_s=0))
    buffer.keep_in(str(tmp_path))
    for i in range(4):
        buffer.push(transition(i))
    with pytest.raises(StoreTimeout):
        buffer.push(transition(4))
    buffer.sample(1)
    buffer.push(transition(4))
