"""Batches of a replay and of demonstrations: one collated batch, with the right rows of each, and their priorities."""

import types

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from ding.data import DequeBuffer
from ding.framework import task
from ding.framework.context import OnlineRLContext
from ding.model import DQN, DRQN
from ding.policy import DQNPolicy, R2D2Policy
from ding.utils.data import default_collate, timestep_collate
from easydict import EasyDict

from ding_store.buffer import Prioritized, StoreBuffer
from ding_store.datasets import DataSet, DataSetWriter
from ding_store.errors import ConfigError, SchemaMismatch
from ding_store.middleware import own_rank
from ding_store.middleware.replay import OffPolicyLearner, data_fetcher

CFG = EasyDict(seed=0, policy=dict(priority=True, collect=dict(unroll_len=1), learn=dict(batch_size=16)))


def element(number, width=4):
    return {
        'obs': torch.full((width,), float(number)),
        'next_obs': torch.full((width,), number + 1.0),
        'action': torch.tensor([number % 2]),
        'reward': torch.tensor([0.5]),
        'done': torch.tensor(False),
    }


@pytest.fixture
def demonstrations(tmp_path):
    """A data set whose observations are below 0."""
    with DataSetWriter(str(tmp_path / 'demos')) as writer:
        writer.append_elements([element(-1 - number) for number in range(40)])
    with DataSet(str(tmp_path / 'demos')) as data:
        yield data


def replay(num_rows=50, kind=StoreBuffer, **options):
    buffer_ = kind(100, **options)
    for number in range(num_rows):
        buffer_.push(element(number))
    return buffer_


def fetched(fetch, priorities=None):
    """Fetch a batch, and finish with these priorities."""
    ctx = types.SimpleNamespace(train_data=None, train_output={'priority': priorities})
    step = fetch(ctx)
    if isinstance(step, types.GeneratorType):
        next(step, None)
        batch = ctx.train_data
        next(step, None)
        return batch
    return ctx.train_data


def test_mixed_batch_has_the_share_of_each_source(demonstrations):
    sources = [(replay(), 0.75), (demonstrations, 0.25, {'reward': 1.0})]
    fetch = data_fetcher(CFG, sources, collate='batch')
    seen = []
    for _ in range(10):
        batch = fetched(fetch)
        assert batch.obs.shape == (16, 4)
        assert (batch.obs[:12] >= 0).all()
        assert (batch.obs[12:] < 0).all()
        assert batch.reward.tolist() == [0.5] * 12 + [1.0] * 4
        assert torch.equal(batch.next_obs, batch.obs + 1)
        seen += batch.obs[12:, 0].tolist()
    assert len(set(seen)) == 40, 'each demonstration once per epoch'
    assert demonstrations[0]['reward'].item() == 0.5, 'the data set is as it was'


@pytest.mark.parametrize('kind', [own_rank.set_own_rank, own_rank.set_own_worker])
def test_learners_draw_different_demonstrations(demonstrations, monkeypatch, kind):
    monkeypatch.setattr(own_rank, '_own', [])
    monkeypatch.setattr(own_rank, '_worker', [])
    seen = []
    for rank in range(2):
        kind(types.SimpleNamespace(rank=rank, num=2))
        fetch = data_fetcher(CFG, [(replay(), 0.75), (demonstrations, 0.25)], collate='batch')
        while len(seen) < 20 * (rank + 1):
            seen += [row for row in fetched(fetch).obs[:, 0].tolist() if row < 0]
    assert len(set(seen)) == 40, 'each demonstration once per epoch of both'


def test_worker_that_joined_draws_a_part_in_another_order(demonstrations, monkeypatch):
    monkeypatch.setattr(own_rank, '_worker', [])
    drawn = []
    for rank in (0, 100):
        own_rank.set_own_worker(types.SimpleNamespace(rank=rank, num=2))
        fetch = data_fetcher(CFG, [(replay(), 0.75), (demonstrations, 0.25)], collate='batch')
        drawn.append(fetched(fetch).obs[12:, 0].tolist())
    assert drawn[0] != drawn[1]


def test_mixed_batch_of_two_replays_equals_a_stock_one():
    """In shapes and types, to those that DI-engine makes of two of its buffers."""
    stock = fetched(data_fetcher(CFG, [(replay(kind=DequeBuffer), 0.5), (replay(kind=DequeBuffer), 0.5)]))
    assert isinstance(stock, list)
    expected = default_collate(stock)
    batch = fetched(data_fetcher(CFG, [(replay(), 0.5), (replay(), 0.5)], collate='batch'))
    assert set(batch.keys()) == set(expected)
    for name, leaf in expected.items():
        assert (leaf.shape, leaf.dtype) == (batch[name].shape, batch[name].dtype), name


def test_priorities_of_a_mixed_batch_go_to_their_own_rows(demonstrations):
    buffer_ = replay(sampler=Prioritized(alpha=1.0, epsilon=0.0))
    fetch = data_fetcher(CFG, [(demonstrations, 0.5), (buffer_, 0.5)], collate='batch')
    for _ in range(60):
        batch = fetched(fetch, np.r_[np.full(8, 77.0), np.full(8, 0.001)])
        assert batch.priority_IS.shape == (16,)
        assert (batch.priority_IS[:8] == 1).all()
    buffer_.update_priorities(np.arange(50), np.full(50, 1e-9))
    buffer_.update_priorities(np.array([7]), np.array([1.0]))
    batch = fetched(fetch, np.r_[np.full(8, 1.0), np.full(8, 1e-12)])
    assert set(batch.obs[8:, 0].tolist()) == {7.0}
    batch = fetched(fetch, np.ones(16))
    assert set(batch.obs[8:, 0].tolist()) != {7.0}, 'row 7 has got the priority of its own place in the batch'


def test_mixed_batch_waits_for_enough_rows(demonstrations):
    buffer_ = replay(3)
    fetch = data_fetcher(CFG, [(buffer_, 0.5), (demonstrations, 0.5)], collate='batch')
    assert fetched(fetch) is None
    for number in range(10):
        buffer_.push(element(number))
    assert len(fetched(fetch).obs) == 16
    assert fetched(data_fetcher(CFG, [(replay(0), 0.5), (demonstrations, 0.5)], collate='batch')) is None


def test_data_set_waits_for_the_replay_behind_it(demonstrations):
    buffer_ = replay(3)
    fetch = data_fetcher(CFG, [(demonstrations, 0.5), (buffer_, 0.5)], collate='batch')
    assert [fetched(fetch, np.ones(16)) for _ in range(3)] == [None] * 3
    for number in range(10):
        buffer_.push(element(number))
    seen = [fetched(fetch).obs[:8, 0].tolist() for _ in range(5)]
    assert len(set(sum(seen, []))) == 40, 'each demonstration once per epoch'


def test_sources_that_cannot_be_mixed_are_refused(demonstrations, tmp_path):
    with pytest.raises(ConfigError, match=r'needs StoreBuffers, not DequeBuffer'):
        data_fetcher(CFG, [(replay(kind=DequeBuffer), 0.5), (demonstrations, 0.5)], collate='batch')
    with pytest.raises(ConfigError, match='share 0.01 of batch_size 16 is no row'):
        data_fetcher(CFG, [(replay(), 0.99), (demonstrations, 0.01)], collate='batch')
    with pytest.raises(ConfigError, match='takes collated batches'):
        data_fetcher(CFG, [(replay(), 0.5), (demonstrations, 0.5)], collate='list')
    with pytest.raises(SchemaMismatch, match='lacks'):
        fetched(data_fetcher(CFG, [(demonstrations, 1.0, {'rewards': 1.0})], collate='batch'))
    other = StoreBuffer(10)
    for number in range(10):
        other.push({**element(number), 'extra': torch.ones(1)})
    with pytest.raises(SchemaMismatch, match="differ in 'extra'"):
        fetched(data_fetcher(CFG, [(other, 0.5), (demonstrations, 0.5)], collate='batch'))
    wide = StoreBuffer(10)
    for number in range(10):
        wide.push(element(number, width=5))
    with pytest.raises(SchemaMismatch, match="leaf 'obs' differs"):
        fetched(data_fetcher(CFG, [(wide, 0.5), (demonstrations, 0.5)], collate='batch'))


def test_policy_of_di_engine_learns_from_a_mixed_batch(demonstrations):
    """Deep Q-learning with demonstrations, as SQIL has it: reward 1 for the expert's steps, and 0 for its own."""
    cfg = EasyDict(DQNPolicy.default_config())
    cfg.nstep = 1
    cfg.learn.update(batch_size=16, update_per_collect=3)
    policy = DQNPolicy(cfg, model=DQN(obs_shape=4, action_shape=2, encoder_hidden_size_list=[8]))
    before = [parameter.clone() for parameter in policy.learn_mode.get_attribute('model').parameters()]
    sources = [(replay(), 0.5, {'reward': 0.0}), (demonstrations, 0.5, {'reward': 1.0})]
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        learner = OffPolicyLearner(EasyDict(seed=0, policy=cfg), policy.learn_mode, sources)
        learner(task.ctx)
        assert len(task.ctx.train_output) == 3
        assert isinstance(task.ctx.train_data, ttorch.Tensor)
    after = policy.learn_mode.get_attribute('model').parameters()
    assert any(not torch.equal(one, other) for one, other in zip(before, after))


def sequence(number, length=6):
    """Steps of one episode with the state of an LSTM before each, as DI-engine's R2D2 and R2D3 make them."""
    steps = [number + step / 10 for step in range(length)]
    return {
        'obs': [torch.full((4,), each) for each in steps],
        'action': [torch.tensor([number % 2]) for _ in steps],
        'reward': [torch.full((2,), each) for each in steps],
        'done': [torch.tensor(False) for _ in steps],
        'prev_state': [{'h': torch.full((1, 1, 8), each), 'c': torch.zeros(1, 1, 8)} for each in steps],
        'weight_of_all': torch.tensor(float(number)),
    }


def sequences(first, length=6, **options):
    buffer_ = StoreBuffer(100, **options)
    for number in range(first, first + 20):
        buffer_.push(sequence(number, length))
    return buffer_


def test_mixed_sequences_equal_the_collated_list_of_their_elements():
    sources = [(sequences(0), 0.75), (sequences(50), 0.25, {'reward': 7.0})]
    batch = fetched(data_fetcher(CFG, sources, collate='batch'))
    assert batch.obs.shape == (6, 16, 4)
    assert (batch.obs[0, :, 0] >= 50).tolist() == [False] * 12 + [True] * 4
    assert (batch.reward[:, 12:] == 7).all()
    assert torch.equal(batch.reward[:, :12, 0], batch.obs[:, :12, 0])
    assert batch.weight_of_all.tolist() == batch.obs[0, :, 0].tolist()
    expected = timestep_collate([dict(element) for element in batch])
    found = timestep_collate(batch)
    assert set(found) == set(expected)
    states = [[state['h'].mean().item() for state in of.pop('prev_state')[2]] for of in (expected, found)]
    assert states[0] == states[1] == pytest.approx((batch.obs[2, :, 0]).tolist())
    for name, leaf in expected.items():
        assert torch.equal(found[name], leaf), name


def test_priorities_of_mixed_sequences_go_to_their_own_rows():
    buffer_ = sequences(0, sampler=Prioritized(alpha=1.0, epsilon=0.0))
    buffer_.update_priorities(np.arange(20), np.r_[np.full(19, 1e-9), 1.0])
    fetch = data_fetcher(CFG, [(sequences(50), 0.5), (buffer_, 0.5)], collate='batch')
    batch = fetched(fetch, np.r_[np.ones(8), np.full(8, 1e-12)])
    assert batch.IS[:8].tolist() == [1.0] * 8
    assert set(batch.weight_of_all[8:].tolist()) == {19.0}
    assert 19.0 not in fetched(fetch, np.ones(16)).weight_of_all[8:].tolist(), 'row 19 has the priority 1e-12 now'


def test_sequences_that_cannot_be_mixed_are_refused(demonstrations):
    with pytest.raises(SchemaMismatch, match=r"leaf '\w+' differs between the sources"):
        fetched(data_fetcher(CFG, [(sequences(0), 0.5), (sequences(50, length=5), 0.5)], collate='batch'))
    with pytest.raises(ConfigError, match='sequences mix only with sequences'):
        fetched(data_fetcher(CFG, [(sequences(0), 0.5), (demonstrations, 0.5)], collate='batch'))


def changed(first, change, make=sequence, **options):
    """A replay of elements that ``change`` gives further leaves, by their number."""
    buffer_ = StoreBuffer(100, **options)
    for number in range(first, first + 20):
        buffer_.push({**make(number), **change(number)})
    return buffer_


def at_episode_start(number):
    """The first steps of some sequences begin an episode. DI-engine's R2D2 has no state before these."""
    return {'prev_state': [None, *sequence(number)['prev_state'][1:]]} if number % 4 == 0 else {}


@pytest.mark.parametrize('other', [at_episode_start, lambda number: {}, lambda number: {'prev_state': [None] * 6}])
def test_mixed_sequences_may_lack_states(other):
    sources = [(changed(0, at_episode_start), 0.75), (changed(50, other), 0.25)]
    fetch = data_fetcher(CFG, sources, collate='batch')
    for _ in range(10):
        batch = fetched(fetch)
        states = timestep_collate(batch)['prev_state']
        assert [len(step) for step in (states, *states)] == [6, *[16] * 6]
        for step in (0, 3):
            for number, state in zip(batch.weight_of_all.tolist(), states[step]):
                expected = {**sequence(int(number)), **(other if number >= 50 else at_episode_start)(int(number))}
                expected = expected['prev_state'][step]
                assert (state is None) == (expected is None)
                assert state is None or torch.equal(state['h'], expected['h'])


@pytest.mark.parametrize(
    ('make', 'change', 'ragged'),
    [
        (sequence, lambda number: {'aux': None if number % 2 else torch.ones(3)}, ()),
        (sequence, lambda number: {'aux': [None if number % 2 else torch.ones(3)] * 6}, ()),
        (sequence, lambda number: {'units': torch.ones(1 + number % 5, 2)}, ['units']),
        (element, lambda number: {'aux': None if number % 2 else torch.ones(3)}, ()),
        (element, lambda number: {'units': torch.ones(1 + number % 5, 2)}, ['units']),
    ],
    ids=['whole leaf of None', 'steps of None', 'ragged', 'plain of None', 'plain ragged'],
)
def test_leaves_that_differ_between_rows_are_mixed_as_a_list(make, change, ragged):
    parts = [changed(first, change, make, ragged=ragged) for first in (0, 50)]
    fetch = data_fetcher(CFG, [(part, 0.5) for part in parts], collate='batch')
    for _ in range(5):
        batch = fetched(fetch)
        assert isinstance(batch, list)
        assert len(batch) == 16
    name = next(iter(change(0)))
    fetch = data_fetcher(CFG, [(part, 0.5, {name: 0.0}) for part in parts], collate='batch')
    with pytest.raises(
        ConfigError, match='cannot be collated: a StoreBuffer has (ragged leaves|leaves that may be None)'
    ):
        fetched(fetch)


@pytest.mark.parametrize('is_mixed', [False, True], ids=['single', 'mixed'])
def test_ragged_sequences_come_as_lists_with_one_log_line(is_mixed, caplog):
    def units(number):
        return {'units': torch.ones(1 + number % 5, 2)}

    sampler = None if is_mixed else Prioritized()
    buffer_ = changed(0, units, ragged=['units'], sampler=sampler)
    policy = types.SimpleNamespace(forward=R2D2Policy.__new__(R2D2Policy)._forward_learn)  # one that takes sequences
    fetch = data_fetcher(
        CFG, [(buffer_, 0.5), (changed(50, units, ragged=['units']), 0.5)] if is_mixed else buffer_, policy
    )
    for _ in range(3):
        batch = fetched(fetch, np.ones(16))
        assert isinstance(batch, list)
        assert len(batch) == 16
        assert all(len(each['units']) == 1 + int(each['weight_of_all']) % 5 for each in batch)
    (line,) = [record.getMessage() for record in caplog.records if 'lists' in record.getMessage()]
    assert 'ragged' in line
    assert "'units'" in line


def test_states_that_are_none_in_some_rows_get_no_fixed_value():
    sources = [(sequences(0), 0.5), (changed(50, at_episode_start), 0.5, {'prev_state': 0.0})]
    with pytest.raises(SchemaMismatch, match="sets leaf 'prev_state', which is no tensor in each row"):
        fetched(data_fetcher(CFG, sources, collate='batch'))


def test_elements_of_mixed_sequences_are_views_of_the_batch():
    def info(number):
        return {'info': {'x': torch.full((3,), float(number)), 'y': torch.tensor([float(number)])}}

    batch = fetched(data_fetcher(CFG, [(changed(0, info), 0.5), (changed(50, info), 0.5)], collate='batch'))
    assert torch.equal(batch.info.x[:, 0], batch.weight_of_all)
    for place, one in enumerate(batch):
        assert one['info']['x'][0] == batch.weight_of_all[place]
        one['reward'][2].fill_(place)
        one['info']['x'].fill_(place)
    assert batch.reward[2, :, 0].tolist() == batch.info.x[:, 0].tolist() == list(range(16))
    assert torch.equal(timestep_collate(batch)['info']['y'], batch.weight_of_all)


def test_recurrent_policy_learns_from_mixed_sequences():
    cfg = EasyDict(R2D2Policy.default_config())
    cfg.update(nstep=2, burnin_step=1, learn_unroll_len=5, priority=True, priority_IS_weight=True)
    cfg.learn.update(batch_size=8, update_per_collect=2, value_rescale=False)
    cfg.collect.update(env_num=1, traj_len_inf=False)
    cfg.eval.env_num = 1
    policy = R2D2Policy(cfg, model=DRQN(obs_shape=4, action_shape=2, encoder_hidden_size_list=[8]))
    agent = sequences(0, sampler=Prioritized())
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        learner = OffPolicyLearner(
            EasyDict(seed=0, policy=cfg), policy.learn_mode, [(agent, 0.75), (sequences(50), 0.25)]
        )
        learner(task.ctx)
        assert task.ctx.train_data.obs.shape == (6, 8, 4)
    assert agent.sampler.priorities.max_priority != 1.0, 'the policy gave priorities to the sequences'
