"""A ratio of samples to inserts in the learner's loop: settings, shortages, and what cannot go on."""

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip('ding')

from ding.data import DequeBuffer  # noqa: E402
from ding.framework import task  # noqa: E402
from easydict import EasyDict  # noqa: E402

from ding_store.buffer import RateLimiter, StoreBuffer  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import ConfigError, NotEnoughData, StoreTimeout  # noqa: E402
from ding_store.middleware import replay  # noqa: E402
from ding_store.middleware.ingest_plan import IngestPlan  # noqa: E402
from ding_store.middleware.insert_ratio import RatioReadAhead, ratio_of  # noqa: E402
from ding_store.middleware.replay import data_pusher  # noqa: E402

CONFIG = EasyDict(policy=dict(learn=dict(batch_size=16), collect=dict(unroll_len=1)))


def made(**store):
    return ratio_of(StoreConfig.from_block(store), CONFIG)


def chunk(num_rows):
    return SimpleNamespace(header=dict(kind='trajectories', rows=num_rows))


def chunks(*num_rows):
    """A feed that always has a chunk, whose parts in the partitions have so many rows."""
    return lambda timeout_s: [chunk(each) for each in num_rows]


@pytest.mark.parametrize(
    ('store', 'named'),
    [
        (dict(samples_per_insert=0, error_buffer=100), 'samples_per_insert'),
        (dict(samples_per_insert='4', error_buffer=100), 'samples_per_insert'),
        (dict(samples_per_insert=4.0), 'error_buffer'),
        (dict(samples_per_insert=4.0, error_buffer=2.0), 'error_buffer'),
        (dict(error_buffer=2.0), 'samples_per_insert'),
        (dict(min_size_to_sample=0), 'min_size_to_sample'),
        (dict(min_size_to_sample=1.5), 'min_size_to_sample'),
        (dict(samples_per_insert=4.0, error_buffer=15.0), r'batch_size \(16\)'),
    ],
)
def test_insert_ratio_settings_that_are_wrong_are_refused(store, named):
    with pytest.raises(ConfigError, match=named):
        made(**store)


def test_insert_ratio_without_settings_has_no_limit():
    assert made() is None


def test_pusher_alone_needs_no_learner_settings():
    assert ratio_of(StoreConfig.from_block({}), EasyDict(policy=dict(cuda=False))) is None


def test_sample_before_the_minimal_size_is_a_shortage():
    ratio = made(min_size_to_sample=50)
    ratio.await_can_insert(49)
    with pytest.raises(NotEnoughData):
        ratio.await_can_sample(16)
    ratio.await_can_insert(1)
    ratio.await_can_sample(16)


def test_chunk_beyond_the_tolerance_is_named():
    fed = RatioReadAhead(chunks(40), made(samples_per_insert=4.0, error_buffer=100.0))
    fed.begin(0)
    with pytest.raises(ConfigError, match='at least 160'):
        fed.take(0.0)


def test_policy_that_never_trains_raises_an_error():
    fed = RatioReadAhead(chunks(8), made(samples_per_insert=4.0, error_buffer=64.0))

    def iterate(num_iterations):
        for _ in range(num_iterations):
            fed.begin(0)
            for entry in fed.take(0.0):
                fed.ratio.await_can_insert(entry.header['rows'])

    iterate(50)
    with pytest.raises(StoreTimeout, match='error_buffer'):
        iterate(100)


def test_parts_of_a_chunk_are_inserted_as_the_ratio_allows():
    fed = RatioReadAhead(chunks(8, 0, 8, 16), made(samples_per_insert=4.0, error_buffer=64.0))
    ratio, inserted = fed.ratio, []

    def iterate():
        fed.begin(0)
        inserted.append([entry.header['rows'] for entry in fed.take(0.0)])
        for num_rows in inserted[-1]:
            ratio.await_can_insert(num_rows)

    iterate()  # up to 32 rows: 16 of the minimal size, and 16 of the tolerance
    iterate()
    ratio.await_can_sample(16)
    ratio.await_can_sample(16)
    iterate()
    assert inserted == [[8, 0, 8, 16], [], [8, 0]]
    assert fed.is_holding


class Ranks:
    """Several learners in step, as far as their ratio goes. Each trains on its part of a batch of 16."""

    def __init__(self, num, **settings):
        config = replace(StoreConfig.from_block(settings), num_learners=num)
        self.ratios = [ratio_of(config, CONFIG) for _ in range(num)]
        for each in self.ratios:
            each.attach(lambda each=each: each.num_inserts, 10**6)
        self.waiting = [[] for _ in range(num)]
        self.feds = [RatioReadAhead(partial(self._take, i), each) for i, each in enumerate(self.ratios)]
        self.train_iter = 0

    def _take(self, rank, timeout_s):
        return [chunk(self.waiting[rank].pop(0))] if self.waiting[rank] else []

    def iterate(self, can_train=True):
        """Return which ranks have sampled a batch. They train if all have."""
        have_sampled = []
        for fed, ratio in zip(self.feds, self.ratios):
            fed.begin(self.train_iter)
            for entry in fed.take(0.0) or []:
                ratio.await_can_insert(entry.header['rows'])
            try:
                ratio.await_can_sample(16 // len(self.ratios))
                have_sampled.append(can_train)
            except NotEnoughData:
                have_sampled.append(False)
        counts = np.sum([ratio.counts() for ratio in self.ratios], axis=0)
        for ratio in self.ratios:
            ratio.agree(all(have_sampled), *counts)
        self.train_iter += all(have_sampled)
        return have_sampled

    @property
    def difference(self):
        """What the ratio keeps: samples that the inserts allow, minus samples."""
        inserts = sum(each.num_inserts - each.min_size_to_sample for each in self.ratios)
        return inserts * self.ratios[0].samples_per_insert - sum(each.num_samples for each in self.ratios)


@pytest.mark.parametrize('num', [2, 4])
@pytest.mark.parametrize('samples_per_insert', [0.5, 4.0])
def test_model_of_ranks_keeps_the_ratio_of_all_together(num, samples_per_insert):
    """Episodes of 30 steps go to one rank each, so the rows of a chunk are one rank's or the other's."""
    ranks, rng, num_chunks = Ranks(num, samples_per_insert=samples_per_insert, error_buffer=100.0), random.Random(1), 0
    differences, places = [], [0] * 3
    for iteration in range(1500):
        if min(map(len, ranks.waiting)) < rng.randrange(3):  # as collectors, which may be slow
            parts = [0] * num
            for env in range(3):
                if num_chunks % 6 == 0:
                    places[env] = rng.randrange(num)
                parts[places[env]] += 5
            num_chunks += 1
            for each, rows in zip(ranks.waiting, parts):
                each.append(rows)
        assert len(set(ranks.iterate())) == 1 or iteration < 200, 'all ranks may sample, or none'
        differences.append(ranks.difference)
    assert {each.num_samples for each in ranks.ratios} == {ranks.train_iter * 16 // num}
    assert ranks.train_iter * 16 >= 0.9 * samples_per_insert * sum(each.num_inserts for each in ranks.ratios) - 300
    assert min(differences[200:]) >= -100
    assert max(differences[200:]) <= 100 + 15 * samples_per_insert


def test_rank_without_rows_lets_all_insert_until_it_has_a_batch():
    ranks = Ranks(2, samples_per_insert=4.0, error_buffer=100.0)
    for _ in range(40):
        ranks.waiting[0].append(15)
        ranks.waiting[1].append(0)
        ranks.iterate()
    assert [each.num_inserts for each in ranks.ratios] == [600, 0]
    assert [each.num_samples for each in ranks.ratios] == [0, 0], 'a batch that none trains on does not count'
    ranks.waiting[1].append(15)
    for _ in range(20):
        ranks.iterate()
    assert ranks.train_iter >= 10


def test_rank_that_goes_on_with_another_ratio_counts_anew():
    ranks = Ranks(2, samples_per_insert=4.0, error_buffer=100.0)
    for each in ranks.ratios:
        each.load_state({'num_inserts': 10_000, 'num_samples': 80_000})
    ranks.iterate()
    ranks.waiting = [[15] * 10, [15] * 10]
    for _ in range(20):
        ranks.iterate()
    assert ranks.train_iter > 5


def test_ratio_of_several_learners_needs_one_replay(monkeypatch):
    """The learners agree on one ratio. Samples by another one would never be allowed."""
    rank = SimpleNamespace(ratio=None)
    learner = SimpleNamespace(router=SimpleNamespace(is_active=True), role=SimpleNamespace(LEARNER=0))
    learner.has_role = lambda role: True
    monkeypatch.setattr(replay, 'own_rank', lambda: rank)
    monkeypatch.setattr(replay, 'task', learner)
    config = StoreConfig(num_learners=2, samples_per_insert=2.0, error_buffer=64.0)
    first = StoreBuffer(100)
    replay.data_pusher(CONFIG, first, config=config)
    assert rank.ratio is first.limiter
    with pytest.raises(ConfigError, match=r'samples_per_insert \(2\) of several learners needs one replay'):
        replay.data_pusher(CONFIG, StoreBuffer(100), config=config)


def test_chunks_left_at_the_end_are_inserted_at_any_ratio():
    ratio = made(samples_per_insert=4.0, error_buffer=64.0)
    ratio.await_can_insert(16)
    ratio.await_can_insert(16)
    assert not ratio.may_insert(8)
    ratio.end()
    ratio.await_can_insert(80)


def test_setting_without_effect_is_logged(caplog):
    """Outside of runs with roles, of other buffers, of two ratios, and where nothing of ours pushes."""
    config = StoreConfig.from_block(dict(samples_per_insert=4.0, error_buffer=64.0))
    own = StoreBuffer(100, limiter=RateLimiter(1))
    with task.start():
        for buffer_, reason in (
            (StoreBuffer(100), 'a run with roles'),
            (DequeBuffer(100), 'no StoreBuffer'),
            (own, 'already has a limiter'),
        ):
            data_pusher(CONFIG, buffer_, config=config)
            assert reason in caplog.text
            caplog.clear()
        exchanger = SimpleNamespace(role='learner', _session=SimpleNamespace(config=config))
        IngestPlan(task, exchanger)
        assert 'samples_per_insert and min_size_to_sample are ignored: no data_pusher' in caplog.text
        caplog.clear()
        exchanger._session.config = StoreConfig.from_block({})
        IngestPlan(task, exchanger)
        assert not caplog.text
