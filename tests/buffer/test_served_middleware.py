"""DI-engine's middleware on real buffers, alone and in pairs, and when rows leave without it."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict

import numpy as np
import pytest
from ding.data import DequeBuffer
from ding.data.buffer.middleware import (
    PriorityExperienceReplay,
    clone_object,
    sample_range_view,
    staleness_check,
    use_time_check,
)
from elements import number, transition

from ding_store.buffer import Fifo, RateLimiter, StoreBuffer
from ding_store.errors import ConfigError, PriorityError, StoreTimeout


def made(*makers: Callable, count: int = 40, size: int = 40, kind: type = StoreBuffer) -> Any:
    buffer = kind(size)
    for make in makers:
        buffer.use(make(buffer))
    for i in range(count):
        buffer.push(transition(i), meta={'i': i, 'train_iter_data_collected': i, 'priority': 1.0 + i % 4})
    return buffer


def per(buffer: Any, power: float = 0.6) -> Any:
    return PriorityExperienceReplay(buffer, IS_weight=True, priority_power_factor=power)


#: In this order, the outermost first.
MIDDLEWARE: Dict[str, Callable] = {
    'clone': lambda buffer: clone_object(),
    'stale': lambda buffer: staleness_check(buffer, max_staleness=30),
    'range': lambda buffer: sample_range_view(buffer, start=-20),
    'per': per,
    'use': lambda buffer: use_time_check(buffer, max_use=3),
}
PAIRS = [(a, b) for i, a in enumerate(MIDDLEWARE) for b in list(MIDDLEWARE)[i:]]


@pytest.mark.parametrize('names', PAIRS, ids=lambda names: '-'.join(names))
def test_pairs_against_a_model(names: tuple) -> None:
    np.random.seed(0)
    buffer, uses = made(*[MIDDLEWARE[name] for name in sorted(set(names), key=list(MIDDLEWARE).index)]), Counter()
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
        # staleness_check takes its number in the first place.
        items = buffer.sample(size=8, **options) if 'stale' in names else buffer.sample(8)
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


@pytest.mark.parametrize('power', [0.6, 1.5])
@pytest.mark.parametrize(('name', 'inner'), [('stale', 'staleness_check'), ('range', 'sample_range_view')])
def test_what_cannot_be_inside_of_priorities(name: str, inner: str, power: float) -> None:
    buffer = made(lambda buffer: per(buffer, power))
    with pytest.raises(ConfigError, match=rf'{inner} is used inside of PriorityExperienceReplay.*before'):
        buffer.use(MIDDLEWARE[name](buffer))
    assert len(buffer.sample(8)) == 8


def test_a_range_takes_all_arguments() -> None:
    buffer = made(MIDDLEWARE['range'])
    assert {number(item.data) for item in buffer.sample(size=60, replace=True)} <= set(range(20, 40))
    groups = buffer.sample(2, groupby='priority', unroll_len=3)
    assert [len(group) for group in groups] == [3, 3]


@pytest.mark.parametrize('power', [0.6, 1.5])
def test_draws_and_weights_are_those_of_the_stock_buffer(power: float) -> None:
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


def test_rows_that_leave_without_the_middleware(tmp_path: Path) -> None:
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


def test_what_is_refused() -> None:
    buffer = made(per)
    with pytest.raises(TypeError, match='no groupby'):
        buffer.sample(2, groupby='i')
    for bad in (-1.0, float('nan')):
        with pytest.raises(PriorityError):
            buffer.update('3', meta={'priority': bad})


def test_a_buffer_that_is_kept_in_a_path_later_goes_on_with_its_middleware(tmp_path: Path) -> None:
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


def test_a_copy_has_priorities_and_uses_of_its_own() -> None:
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


def test_uses_are_looked_up_in_bulk_and_forgotten_with_their_rows() -> None:
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


def test_what_metas_say_is_found_without_a_look_at_the_elements() -> None:
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
def test_the_limiter_counts_what_is_sampled(how: dict) -> None:
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


def test_a_queue_and_its_limiter_move_to_a_path_together(tmp_path: Path) -> None:
    buffer = StoreBuffer(40, sampler=Fifo(), limiter=RateLimiter(2, 1, 2, timeout_s=0))
    buffer.keep_in(str(tmp_path))
    for i in range(4):
        buffer.push(transition(i))
    with pytest.raises(StoreTimeout):
        buffer.push(transition(4))
    buffer.sample(1)
    buffer.push(transition(4))
