"""Priorities through StoreBuffer, and through DI-engine's pipeline on it."""

import copy
import gc
import threading
from typing import Any, List

import gym
import numpy as np
import pytest
import torch
from ding.framework import task
from ding.framework.context import OnlineRLContext
from easydict import EasyDict
from elements import number, transition

from ding_store.buffer import MaxHeap, Prioritized, RankPrioritized, StoreBuffer, StoreBufferWrapper, mixed_priority
from ding_store.errors import ConfigError, PriorityError, SchemaMismatch
from ding_store.middleware.replay import OffPolicyLearner, data_fetcher

BOTH = [Prioritized, RankPrioritized]


def filled(count: int, size: int = 100, kind: Any = Prioritized) -> StoreBuffer:
    buffer = StoreBuffer(size, sampler=kind(seed=0))
    buffer.extend_elements([transition(i) for i in range(count)])
    return buffer


def columns(count: int) -> Any:
    return {'obs': np.arange(count * 3, dtype=np.float32).reshape(count, 3), 'action': np.zeros(count, np.int64)}


@pytest.mark.parametrize('kind', BOTH)
def test_batches_have_weights_and_take_updates(kind: Any) -> None:
    buffer = filled(130, kind=kind)
    assert buffer.sampler.priorities is not None
    batch = buffer.sample_batch(16)
    assert batch.weights.tolist() == [1.0] * 16 or kind is RankPrioritized
    buffer.update_priorities(np.arange(30, 130), [1e4 if row == 77 else 1e-3 for row in range(30, 130)])
    batch = buffer.sample_batch(64)
    assert batch.weights.shape == (64,)
    rows = [number(element) for element in batch.elements()]
    assert batch.rows.tolist() == rows
    assert 77 in rows
    assert batch.weights[rows.index(77)] == batch.weights.min()
    assert (batch.weights > 0).all()
    assert (batch.weights <= 1).all()
    # As policies have them.
    buffer.update_priorities(batch.rows, torch.ones(64))
    buffer.update_priorities([3, 5], [1.0, 2.0])
    assert buffer.sampler.priorities.num_stale_updates == 2


@pytest.mark.parametrize('kind', BOTH)
def test_pushed_priorities_are_used(kind: Any) -> None:
    buffer = StoreBuffer(50, sampler=kind(seed=0))
    first = buffer.extend(columns(3), priority=[1.0, 2.0, 3.0])
    more = buffer.extend_elements(buffer.gather_batch(first).elements()[:2], priority=np.array([7.0, 0.5]))
    rows = np.concatenate([first, more, buffer.extend(columns(1))])
    assert buffer.sampler.priorities.of(rows).tolist() == pytest.approx([1.0, 2.0, 3.0, 7.0, 0.5, 7.0])
    # More than there is room for.
    rows = buffer.extend(columns(60), priority=np.arange(1.0, 61.0))
    assert buffer.sampler.priorities.of(rows[10:]).tolist() == pytest.approx(np.arange(11.0, 61.0).tolist())


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize('as_list', [False, True])
def test_priorities_of_any_policy_type_are_accepted(dtype: torch.dtype, as_list: bool) -> None:
    """With a gradient, in a type that numpy has not, or as a list of tensors; on a GPU it is no other code."""
    buffer = filled(4)
    errors = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=dtype, requires_grad=True)
    buffer.update_priorities(np.arange(4), list(errors) if as_list else errors)
    assert buffer.sampler.priorities.of(np.arange(4)).tolist() == pytest.approx([0.5, 1.0, 2.0, 4.0])
    steps = list(errors[:, None]) if as_list else errors[:, None]
    assert mixed_priority(steps).tolist() == pytest.approx([0.9 * 4 + 0.1 * 7.5 / 4])
    with pytest.raises(PriorityError):
        buffer.update_priorities(np.arange(2), [torch.ones(1), torch.ones(2)])


def test_bad_priorities_change_nothing() -> None:
    buffer = filled(10)
    before = buffer.sampler.state()
    elements = [transition(i) for i in range(3)]
    for bad in ([1.0, float('nan'), 1.0], [1.0, 2.0], [-1.0] * 3):
        with pytest.raises(PriorityError):
            buffer.extend_elements(elements, priority=bad)
        with pytest.raises(PriorityError):
            buffer.update_priorities(np.arange(3), bad)
    with pytest.raises(SchemaMismatch):
        buffer.extend(columns(2), priority=[5.0, 5.0])
    assert buffer.count() == 10
    after = buffer.sampler.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_priority_calls_without_priorities_are_refused() -> None:
    buffer = StoreBuffer(10)
    rows = buffer.extend(columns(3))
    assert buffer.sample_batch(2).weights is None
    for call in (lambda: buffer.update_priorities(rows, [1.0] * 3), lambda: buffer.extend(columns(1), priority=[1.0])):
        with pytest.raises(PriorityError, match=r'sampler=Prioritized\(\)'):
            call()
    assert buffer.count() == 3


def test_lists_have_weights_only_in_the_sampled_metas() -> None:
    buffer = filled(20)
    buffer.update_priorities(np.arange(20), np.arange(20.0))
    items = buffer.sample(10)
    masses = np.array([buffer.sampler.priorities.of(np.array([int(item.index)]))[0] for item in items])
    weights = np.array([item.meta['priority_IS'] for item in items])
    assert np.argmin(weights) == np.argmax(masses)
    assert [buffer.get_by_index(item.index).meta for item in items] == [{}] * 10


def test_python_objects_have_priorities() -> None:
    buffer = StoreBuffer(10, sampler=Prioritized(seed=0, epsilon=0.0))
    rows = [int(buffer.push(text).index) for text in 'abcdef']
    buffer.update_priorities(np.array(rows), [0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert {item.data for item in buffer.sample(5)} == {'c'}


def test_views_have_their_own_samplers() -> None:
    buffer = filled(20)
    ranked, same = buffer.view(sampler=RankPrioritized(seed=1)), buffer.view()
    buffer.update_priorities(np.arange(20), [1e9] + [0.0] * 19)
    ranked.update_priorities(np.arange(20), [0.0] * 19 + [1e9])
    assert buffer.sample_batch(8).rows.tolist() == same.sample_batch(8).rows.tolist() == [0] * 8
    assert 19 in ranked.sample_batch(8).rows
    buffer.delete(['0', '19'])
    assert 0 not in buffer.sample_batch(8).rows
    assert 19 not in ranked.sample_batch(8).rows
    with pytest.raises(ConfigError, match='one table'):
        StoreBuffer(5, sampler=buffer.sampler)


@pytest.mark.parametrize('kind', BOTH)
def test_deep_copy_has_the_priorities_and_draws_the_same(kind: Any) -> None:
    buffer = filled(130, kind=kind)
    buffer.delete([str(row) for row in range(40, 60)])
    buffer.update_priorities(np.arange(60, 130), np.linspace(0, 5, 70))
    twin = copy.deepcopy(buffer)
    rows = buffer.table.rows_by_age()
    assert twin.sampler.priorities.of(rows).tolist() == buffer.sampler.priorities.of(rows).tolist()
    assert sorted(twin.sample_batch(16).weights) == sorted(buffer.sample_batch(16).weights)
    twin.update_priorities(rows, np.zeros(len(rows)))
    assert buffer.sampler.priorities.of(rows).max() == pytest.approx(5.0)


def test_writers_and_learner_in_threads_keep_priorities_valid() -> None:
    buffer = filled(500, size=500)
    failures: List[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001  shown by the test
            failures.append(e)

    def write() -> None:
        for i in range(500, 2500, 5):
            buffer.extend_elements([transition(j) for j in range(i, i + 5)], priority=[1.0 + i % 3] * 5)

    def learn() -> None:
        for _ in range(400):
            batch = buffer.sample_batch(32, replace=True)
            # ``number`` fails for a row that is torn.
            assert [number(element) for element in batch.elements()] == batch.rows.tolist()
            buffer.update_priorities(batch.rows, batch.rows % 7 + 0.5)

    def delete() -> None:
        for i in range(0, 2000, 7):
            buffer.delete([str(i), str(i + 3)])

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (write, learn, delete)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    rows = buffer.table.rows_by_age()
    slots = buffer.table.index.find(rows)[0]
    assert not np.isnan(buffer.sampler.priorities.of(rows)).any()
    masses = buffer.sampler.priorities.masses.tree.masses
    assert np.count_nonzero(masses) == np.count_nonzero(masses[slots]) == len(rows)


def config(**policy: Any) -> EasyDict:
    options = dict(priority=True, collect=dict(unroll_len=1), learn=dict(batch_size=8, update_per_collect=3))
    return EasyDict(policy={**options, **policy})


@pytest.mark.parametrize('collate', ['batch', 'list'])
def test_data_fetcher_delivers_weights_and_updates(collate: str) -> None:
    buffer, ctx = filled(20), OnlineRLContext()
    fetch = data_fetcher(config(), buffer, collate=collate)
    generator = fetch(ctx)
    next(generator)
    if collate == 'batch':
        weights, rows = ctx.train_data.priority_IS, ctx.train_data.reward.reshape(8).long().numpy()
        assert weights.shape == (8,)
    else:
        weights, rows = [each.priority_IS for each in ctx.train_data], np.array([number(e) for e in ctx.train_data])
        assert {tuple(weight.shape) for weight in weights} == {(1,)}
    # What OffPolicyLearner leaves behind: the last output is that of this fetch.
    ctx.train_output = [{'priority': None}, {'priority': [float(row) for row in rows]}]
    assert list(generator) == []
    assert len(ctx.train_output) == 1
    assert buffer.sampler.priorities.of(rows).tolist() == pytest.approx(rows.tolist(), abs=1e-4)


@pytest.mark.parametrize('collate', ['batch', 'list'])
def test_data_fetcher_weighs_rows_of_a_heap_alike(collate: str) -> None:
    buffer, ctx = StoreBuffer(100, sampler=MaxHeap()), OnlineRLContext()
    buffer.extend_elements([transition(i) for i in range(20)])
    generator = data_fetcher(config(), buffer, collate=collate)(ctx)
    next(generator)
    weights = ctx.train_data.priority_IS if collate == 'batch' else [each.priority_IS for each in ctx.train_data]
    assert [float(weight) for weight in weights] == [1.0] * 8
    # Rows 0 to 7 came, and come again only after all others.
    ctx.train_output = {'priority': [0.0] * 8}
    assert list(generator) == []
    assert buffer.sample_batch(12).rows.tolist() == list(range(8, 20))


def test_data_fetcher_refuses_bad_priorities_and_waits() -> None:
    ctx = OnlineRLContext()
    assert list(data_fetcher(config(), filled(7))(ctx)) == []
    assert ctx.train_data is None
    with pytest.raises(ConfigError, match=r'policy\.priority'):
        data_fetcher(config(priority=False), filled(7))
    # Which would draw groups by environment, all alike, and update no priority.
    with pytest.raises(ConfigError, match=r'policy\.collect\.unroll_len \(8\)'):
        data_fetcher(config(collect=dict(unroll_len=8)), filled(7))


@pytest.mark.parametrize('collate', ['auto', 'list'])
def test_dqn_trains_by_priority(collate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ding.config import compile_config
    from ding.envs import BaseEnvManagerV2, DingEnvWrapper
    from ding.framework.middleware import StepCollector, data_pusher, eps_greedy_handler
    from ding.model import DQN
    from ding.policy import DQNPolicy
    from ding.utils import set_pkg_seed
    from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

    main = copy.deepcopy(main_config)
    main.policy.model.encoder_hidden_size_list = [32, 32]
    main.policy.priority = main.policy.priority_IS_weight = True
    cfg = compile_config(main, create_cfg=copy.deepcopy(create_config), auto=True, save_cfg=False)
    buffer = StoreBuffer(1000, sampler=Prioritized(seed=0, beta_anneal_steps=100))
    seen: List[Any] = []

    def update(rows: Any, priority: Any, update: Any = buffer.update_priorities) -> None:
        seen.append((task.ctx.train_iter, rows, np.asarray(priority)))
        update(rows, priority)
        # As the policy has said it, of a row that came twice the same twice.
        assert np.allclose(buffer.sampler.priorities.of(rows), priority, rtol=1e-4, atol=1e-5)

    monkeypatch.setattr(buffer, 'update_priorities', update)
    frozen: List[int] = []
    num_updates = cfg.policy.learn.update_per_collect
    gc.unfreeze()
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        env = BaseEnvManagerV2([lambda: DingEnvWrapper(gym.make('CartPole-v0')) for _ in range(4)], cfg.env.manager)
        set_pkg_seed(0, use_cuda=False)
        policy = DQNPolicy(cfg.policy, model=DQN(**cfg.policy.model))
        weights: List[Any] = []

        def forward(data: Any, plain: Any = policy.learn_mode.forward) -> Any:
            if len(frozen) < 2 * num_updates:  # it looks at each object that is frozen
                frozen.append(gc.get_freeze_count())
            weights.append(data.priority_IS if collate == 'auto' else torch.cat([each.priority_IS for each in data]))
            return plain(data)

        learn = policy.learn_mode
        learner = OffPolicyLearner(cfg, learn, buffer, collate=collate)
        monkeypatch.setattr(learner, '_trainer', trainer_of(cfg, forward))
        task.use(eps_greedy_handler(cfg))
        task.use(StepCollector(cfg, policy.collect_mode, env))
        task.use(data_pusher(cfg, buffer))
        task.use(learner)
        task.run(max_step=30)
        num_iterations = task.ctx.train_iter
    assert num_iterations >= 60
    assert len(frozen) == 2 * num_updates
    assert set(frozen[:num_updates]) == {0}, 'before it first has trained'
    assert min(frozen[num_updates:]) > 10_000
    OffPolicyLearner(cfg, learn, buffer, collate=collate)
    assert gc.get_freeze_count() == 0, 'the next one takes back what is left of this run'
    # After every iteration, and before the next one.
    assert [iteration for iteration, _, _ in seen] == list(range(1, num_iterations + 1))
    assert all((priority >= 0).all() and priority.std() > 0 for _, _, priority in seen)
    assert buffer.sampler.step == num_iterations
    assert buffer.sampler.beta == pytest.approx(min(1.0, 0.4 + 0.6 * num_iterations / 100))
    assert weights[0].tolist() == [1.0] * 64
    assert 0 < weights[-1].min() < weights[-1].max() <= 1
    buffer.clear()


def test_wrapper_save_and_load_keep_priorities(tmp_path: Any) -> None:
    def make(size: int = 50, **options: Any) -> StoreBufferWrapper:
        cfg = StoreBufferWrapper.default_config()
        cfg.update(replay_buffer_size=size, **options)
        return StoreBufferWrapper(EasyDict(cfg))

    buffer = make(priority=True, priority_max_limit=8.0)
    buffer.push([{'obs': torch.full((3,), float(i)), 'priority': 0.1 * i} for i in range(60)])
    buffer.update({'replay_unique_id': [15, None, 16, 3], 'priority': [4.0, 7.0, 100.0, 5.0]})
    rows = np.arange(10, 60)
    priorities = buffer.buffer.sampler.priorities.of(rows)
    assert priorities[5:7].tolist() == pytest.approx([4.0, 8.0])
    assert priorities[7:].tolist() == pytest.approx((0.1 * np.arange(17, 60)).tolist())
    for _ in range(5):
        buffer.sample(8)
    # By itself, or since the first update: with the same elements come their priorities.
    for loaded in (make(priority=True), make()):
        loaded.load_state_dict(buffer.state_dict())
        again = loaded.buffer.sampler.priorities.of(loaded.buffer.table.rows_by_age())
        assert again.tolist() == priorities.tolist()
        assert loaded.buffer.sampler.beta == buffer.buffer.sampler.beta
    smaller = make(size=20, priority=True)
    smaller.load_state_dict(buffer.state_dict())
    assert len(smaller.sample(20)) == 20
    path = str(tmp_path / 'table')
    kept = make(priority=True, path=path)
    kept.load_state_dict(buffer.state_dict())
    kept.close()
    kept = make(priority=True, path=path)
    again = kept.buffer.sampler.priorities.of(kept.buffer.table.rows_by_age())
    assert again.tolist() == pytest.approx(priorities.tolist())
    kept.close()


def trainer_of(cfg: Any, forward: Any) -> Any:
    """DI-engine's trainer around this forward."""
    from types import SimpleNamespace

    from ding.framework.middleware.functional import trainer

    return task.wrap(trainer(cfg, SimpleNamespace(forward=forward)))
