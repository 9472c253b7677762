"""What a config says about its replay, as buffers; epsilons of collectors; first priorities on their way."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from easydict import EasyDict

from ding_store.errors import ConfigError, NotEnoughData

pytest.importorskip('ding')

from ding_store.buffer import Lifo, Prioritized, RankPrioritized, Shuffled, StoreBuffer, Uniform  # noqa: E402
from ding_store.middleware.replay import data_pusher  # noqa: E402
from ding_store.middleware.replay_settings import ReplaySettings  # noqa: E402
from ding_store.middleware.trajectories import Unroller, collector_epsilon, first_priorities  # noqa: E402


def config(policy=None, **replay):
    return EasyDict(policy=dict(policy or {}, other=dict(replay_buffer={'replay_buffer_size': 100, **replay})))


def buffer_of(cfg):
    return ReplaySettings.of(cfg).store(StoreBuffer)


def step(i, **more):
    return ttorch.as_tensor({'obs': torch.full((2,), float(i)), 'action': torch.tensor([i % 2]), **more})


def test_replay_settings_choose_the_sampler():
    assert isinstance(buffer_of(config(max_use=float('inf'))).sampler, Uniform)
    weighted = buffer_of(config(dict(priority=True, priority_IS_weight=True), alpha=0.7, beta=0.5)).sampler
    assert isinstance(weighted, Prioritized)
    assert weighted.beta == 0.5
    assert buffer_of(config(dict(priority=True))).sampler.beta == 0.0, 'no weights were asked for'


@pytest.mark.parametrize('max_use', [None, 1, 3])
def test_replay_queue_gives_each_element_in_order(max_use):
    buffer_ = buffer_of(config(sampler='fifo', **({} if max_use is None else {'max_use': max_use})))
    for i in range(12):
        buffer_.push(step(i))
    came = []
    for _ in range(3 * (max_use or 1)):
        came += buffer_.sample_batch(4).data.obs[:, 0].int().tolist()
    with pytest.raises(NotEnoughData):
        buffer_.sample_batch(1)
    assert sorted(came) == sorted(list(range(12)) * (max_use or 1))
    assert came[:4] == sorted(came[:4])
    assert buffer_.count() == 0


def test_replay_samplers_have_the_names_of_the_keys():
    stack = buffer_of(config(sampler='lifo')).sampler
    assert (type(stack.sampler), stack.max_times_sampled) == (Lifo, 1)
    assert isinstance(buffer_of(config(sampler='shuffled')).sampler, Shuffled)
    fresh = buffer_of(config(sampler='fresh', half_life=30, max_use=4)).sampler
    assert (fresh.sampler.half_life, fresh.max_times_sampled) == (30.0, 4)


def test_replay_ragged_and_remover_reach_the_buffer():
    buffer_ = buffer_of(config(ragged=['units'], remover='reservoir'))
    for i in range(12):
        buffer_.push({'units': np.zeros((i, 2)), 'obs': i})
    assert len(buffer_.sample_batch(4).lengths['units']) == 4
    assert buffer_._elements.reservoir is not None


@pytest.mark.parametrize('kind', ['stock', 'store'])
def test_replay_max_use_limits_uses(kind):
    buffer_ = getattr(ReplaySettings.of(config(max_use=2)), kind)(*([StoreBuffer] if kind == 'store' else []))
    for i in range(8):
        buffer_.push(step(i))
    for _ in range(2):
        assert len(buffer_.sample(8)) == 8
    # DequeBuffer loses track of what it deleted; in both, nothing comes a third time.
    with pytest.raises(ValueError, match='There are less than'):
        buffer_.sample(8)


@pytest.mark.parametrize(
    ('policy', 'replay', 'text'),
    [
        ({}, dict(sampler='heap'), r"sampler \('heap'\) must be one of auto"),
        ({}, dict(alhpa=0.1), r"unknown key 'alhpa'; did you mean 'alpha'"),
        ({}, dict(max_staleness=2.5), r'max_staleness \(2.5\) must be an integer'),
        ({}, dict(max_use=0), r'max_use \(0\) must be an integer >= 1'),
        (dict(priority=True), dict(sampler='fifo'), 'turn policy.priority off'),
        (dict(priority=True), dict(sampler='fresh', half_life=9), r"sampler \('fresh'\) ignores priorities"),
    ],
)
def test_replay_settings_that_contradict_are_refused(policy, replay, text):
    with pytest.raises(ConfigError, match=text):
        ReplaySettings.of(config(policy, **replay))


def test_replay_settings_all_have_an_effect(tmp_path):
    policy = dict(priority=True, priority_IS_weight=True)
    keys = dict(priority_power_factor=0.9, IS_weight_power_factor=0.1, anneal_step=5, max_staleness=3, prefetch=2)
    buffer_ = buffer_of(config(policy, path=str(tmp_path / 'replay'), sampler='rank', sliced=True, max_use=7, **keys))
    limits, sampler = buffer_.sampler, buffer_.sampler.sampler
    assert isinstance(sampler, RankPrioritized)
    assert (limits.max_times_sampled, limits.max_age) == (7, 3)
    assert buffer_.table.table_dir.path == str(tmp_path / 'replay')
    assert buffer_._samples.prefetch.depth == 2
    assert buffer_.sliced
    for i in range(10):
        buffer_.push(step(i, collect_train_iter=torch.tensor([i])))
    weights = []
    for _ in range(7):
        batch = buffer_.sample_batch(4)
        assert batch.data.obs.min() >= 6, 'older ones have left'
        weights.append(sampler.beta)
        if buffer_.count() < 4:
            break
    assert weights[0] == pytest.approx(0.1, abs=0.6)
    assert float(sampler.state()['alpha']) == 0.9
    buffer_.close()
    assert isinstance(buffer_of(config(policy, sampler='rank')).sampler, RankPrioritized)
    assert ReplaySettings.of(config(policy, beta=0.3, anneal_step=0)).stock()._middleware[1].delta_anneal == 0


def test_replay_keys_of_every_policy_are_accepted():
    import ding.policy  # noqa: F401
    from ding.utils import POLICY_REGISTRY

    accepted = 0
    for policy in POLICY_REGISTRY.values():
        defaults = policy.default_config() if hasattr(policy, 'default_config') else {}
        replay = (defaults.get('other') or {}).get('replay_buffer')
        if replay:
            ReplaySettings.of(config(**{**replay, 'replay_buffer_size': 10}))
            accepted += 1
    assert accepted > 20


def test_first_priorities_are_those_of_the_collector():
    cfg = config(dict(priority=True, priority_IS_weight=True, discount_factor=0.5, nstep=2))
    values = torch.nn.Linear(2, 3)
    steps = [
        step(i, next_obs=torch.ones(2) * i, reward=torch.tensor([1.0, 2.0]), value_gamma=torch.tensor([0.25]))
        for i in range(6)
    ]
    for i, each in enumerate(steps):
        each.done = torch.tensor(i == 5)
    ctx = SimpleNamespace(trajectories=steps)
    first_priorities(cfg, lambda_model(values))(ctx)
    for each in steps:
        with torch.no_grad():
            after = values(each.next_obs).max() * (0.0 if each.done else 0.25)
            expected = abs(1.0 + 0.5 * 2.0 + after - values(each.obs)[int(each.action)])
        assert float(each.priority) == pytest.approx(float(expected), rel=1e-5)
    by_element, by_column = buffer_of(cfg), buffer_of(cfg)
    data_pusher(cfg, by_element)(SimpleNamespace(trajectories=list(steps), episodes=None))
    push = data_pusher(cfg, by_column).push_columns()
    push(by_element.schema, by_element.schema.encode(steps))
    wanted = [float(each.priority) for each in steps]
    for buffer_ in (by_element, by_column):
        np.testing.assert_allclose(buffer_.sampler.priorities.of(np.arange(6)), wanted, rtol=1e-4)


def lambda_model(values):
    model = torch.nn.Sequential(values)
    forward = model.forward
    model.forward = lambda obs: {'logit': forward(obs)}
    return model


def test_epsilons_of_ape_x_follow_its_formula():
    """Horgan et al. 2018: 0.4 ** (1 + i / (N - 1) * 7)."""
    epsilons = [collector_epsilon(i, 8) for i in range(8)]
    assert epsilons[0] == pytest.approx(0.4)
    assert epsilons[-1] == pytest.approx(0.4**8)
    assert epsilons == sorted(epsilons, reverse=True)
    assert collector_epsilon(9, 8) == epsilons[1], 'one that joins later'
    assert collector_epsilon(0, 1) == pytest.approx(0.4)
    with pytest.raises(ConfigError, match='num_collectors 0'):
        collector_epsilon(0, 0)


def test_replay_overlap_of_a_whole_sequence_is_refused():
    with pytest.raises(ConfigError, match=r'overlap \(8\)'):
        Unroller(8, overlap=8)


@pytest.mark.parametrize('kind', ['steps', 'steps of envs', 'episodes', 'lists'])
def test_data_pusher_pushes_what_plain_di_engine_pushes(kind):
    from ding.framework.middleware import data_pusher as stock_pusher

    steps = [step(i, env_data_id=torch.tensor([i % 3])) for i in range(7)]
    given = dict(trajectories=steps, episodes=None)
    if kind == 'episodes':
        given = dict(trajectories=None, episodes=[steps[:3], steps[3:]])
    elif kind == 'lists':
        given = dict(
            trajectories=[{'obs': [each.obs for each in part]} for part in (steps[:4], steps[3:])], episodes=None
        )
    made = []
    for pusher in (stock_pusher, data_pusher):
        buffer_, ctx = StoreBuffer(5, seed=0), SimpleNamespace(**given)
        pusher(config(), buffer_, kind == 'steps of envs')(ctx)
        assert ctx.trajectories is None
        assert ctx.episodes is None
        made.append(buffer_)
    stock, ours = made
    assert [item.index for item in ours] == [item.index for item in stock]
    assert [item.meta for item in ours] == [item.meta for item in stock]
    assert [plain(item.data) for item in ours] == [plain(item.data) for item in stock]
    with pytest.raises(RuntimeError, match='should be not None'):
        data_pusher(config(), ours)(SimpleNamespace(trajectories=None, episodes=None))


def test_data_pusher_with_middleware_pushes_each_element():
    buffer_, seen = StoreBuffer(10), []

    def watch(action, chain, *args, **kwargs):
        seen.append(action)
        return chain(*args, **kwargs)

    buffer_.use(watch)
    data_pusher(config(), buffer_)(SimpleNamespace(trajectories=[step(i) for i in range(3)], episodes=None))
    assert seen == ['push'] * 3


def plain(element):
    """Without addresses, which the names of trees have."""
    if isinstance(element, torch.Tensor) and not isinstance(element, ttorch.Tensor):
        return element.tolist()
    if isinstance(element, list):
        return [plain(each) for each in element]
    return {key: plain(each) for key, each in element.items()}
