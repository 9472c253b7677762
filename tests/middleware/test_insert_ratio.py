"""A ratio of samples to inserts in the learner's loop: settings, shortages, and what cannot go on."""

from types import SimpleNamespace

import pytest

pytest.importorskip('ding')

from ding.data import DequeBuffer  # noqa: E402
from ding.framework import task  # noqa: E402
from easydict import EasyDict  # noqa: E402

from ding_store.buffer import RateLimiter, StoreBuffer  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import ConfigError, NotEnoughData, StoreTimeout  # noqa: E402
from ding_store.middleware.ingest_plan import IngestPlan  # noqa: E402
from ding_store.middleware.insert_ratio import RatioReadAhead, ratio_of  # noqa: E402
from ding_store.middleware.replay import data_pusher  # noqa: E402

CONFIG = EasyDict(policy=dict(learn=dict(batch_size=16), collect=dict(unroll_len=1)))


def made(**store):
    return ratio_of(StoreConfig.from_block(store), CONFIG)


class Chunks:
    """A feed of chunks of so many rows, that always has one."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def take(self, max_entries, timeout_s):
        return [SimpleNamespace(header=dict(kind='trajectories', rows=self.num_rows))]


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
    fed = RatioReadAhead(Chunks(40), made(samples_per_insert=4.0, error_buffer=100.0))
    fed.begin(0)
    with pytest.raises(ConfigError, match='at least 160'):
        fed.take(0.0)


def test_policy_that_never_trains_raises_an_error():
    fed = RatioReadAhead(Chunks(8), made(samples_per_insert=4.0, error_buffer=64.0))

    def iterate(num_iterations):
        for _ in range(num_iterations):
            fed.begin(0)
            for entry in fed.take(0.0):
                fed.ratio.await_can_insert(entry.header['rows'])

    iterate(50)
    with pytest.raises(StoreTimeout, match='error_buffer'):
        iterate(100)


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
