"""The config pipeline's buffer: type='store'."""

import copy
import gc
import weakref
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from ding.policy.common_utils import default_preprocess_learn
from ding.utils.data import default_collate
from ding.worker.replay_buffer import create_buffer
from easydict import EasyDict

from ding_store.buffer import StoreBufferWrapper
from ding_store.errors import ConfigError, SchemaMismatch


def element(i: int) -> dict:
    return {
        'obs': torch.full((4,), float(i)),
        'next_obs': torch.full((4,), i + 1.0),
        'action': torch.tensor([i % 2]),
        'reward': torch.tensor([float(i)]),
        'done': False,
        'collect_iter': i // 10,
    }


def make(logger: Any = None, **config: Any) -> StoreBufferWrapper:
    cfg = StoreBufferWrapper.default_config()
    cfg.update(import_names=['ding_store.buffer'], replay_buffer_size=50, **config)
    return create_buffer(EasyDict(cfg), tb_logger=logger)


def filled(count: int = 50, logger: Any = None, **config: Any) -> StoreBufferWrapper:
    buffer = make(logger, **config)
    buffer.push([element(i) for i in range(count)], cur_collector_envstep=0)
    return buffer


def test_objects_before_the_first_training_are_frozen_for_gc():
    gc.unfreeze()
    buffer = filled(30)
    for _ in range(2):
        buffer.sample(4, 7)
        assert gc.get_freeze_count() == 0, 'it has not trained'
    buffer.sample(4, 8)
    assert gc.get_freeze_count() > 10_000
    made = [Cycle()]
    buffer.sample(4, 9)
    gone = weakref.ref(made.pop())
    gc.collect()
    assert gone() is None, 'what comes later is collected as ever'
    make()
    assert gc.get_freeze_count() == 0, 'the next one takes back what is left of this run'


class Cycle:
    def __init__(self) -> None:
        self.me = self


class Logger:
    def __init__(self) -> None:
        self.scalars: List[tuple] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        pass


def test_wrapper_batch_is_preprocessed_as_a_list() -> None:
    batch = filled().sample(16, 0)
    assert isinstance(batch, ttorch.Tensor)
    rows = [d['replay_unique_id'] for d in batch]
    ours = default_preprocess_learn(batch, use_nstep=True)
    theirs = default_preprocess_learn([element(row) for row in rows], use_nstep=True)
    for name in ('obs', 'next_obs', 'action', 'reward', 'done'):
        assert ours[name].equal(theirs[name]), name
        assert ours[name].dtype == theirs[name].dtype


def test_wrapper_batch_equals_the_list_of_its_elements() -> None:
    batch = filled().sample(6, 0)
    assert len(batch) == 6
    elements = list(batch)
    assert [type(each['done']) for each in elements] == [bool] * 6
    assert batch[2]['obs'].equal(elements[2]['obs'])
    assert [each['reward'].item() for each in batch[1:3]] == batch.reward.tolist()[1:3]
    assert len(batch + [element(1)]) == len([element(1)] + batch) == 7
    assert isinstance(copy.deepcopy(batch), list)


def test_wrapper_trains_on_changed_elements() -> None:
    batch = filled().sample(6, 0)
    for i, each in enumerate(batch):
        each['reward'] = torch.tensor([100.0 + i])
    assert default_collate(batch)['reward'].tolist() == [100.0 + i for i in range(6)]
    batch = filled().sample(6, 0)
    batch[0]['obs'].fill_(-5.0)
    assert default_collate(batch)['obs'][0].tolist() == [-5.0] * 4
    batch = filled().sample(6, 0)
    stored = [each.pop('obs') for each in batch]
    assert 'obs' not in default_collate(batch)
    assert len(stored) == 6


def test_wrapper_sample_supports_shortage_range_and_replace() -> None:
    buffer = filled(10)
    assert buffer.sample(11, 0) is None
    assert make().sample(1, 0) is None
    assert make(priority=True).sample(1, 0, replace=True) is None
    assert len(buffer.sample(30, 0, replace=True)) == 30
    assert set(buffer.sample(3, 0, sample_range=slice(-3, None)).reward.tolist()) == {7.0, 8.0, 9.0}
    assert buffer.sample(0, 0) == []


def test_wrapper_push_of_one_element_is_counted() -> None:
    buffer = make()
    buffer.start()
    for i in range(60):
        buffer.push(element(i), 0)
    buffer.push([], 0)
    assert (buffer.count(), buffer.push_count, buffer.replay_buffer_size) == (50, 60, 50)
    buffer.clear()
    assert buffer.count() == 0
    buffer.close()


@pytest.mark.parametrize('priority', [True, None])
def test_wrapper_updates_priorities_every_iteration(priority: Any) -> None:
    np.random.seed(0)
    buffer = filled(priority=priority)
    batch = buffer.sample(50, 0)
    assert torch.equal(batch.IS, torch.ones(50))
    for iteration in range(3):
        batch = buffer.sample(50, iteration)
        ids = [d.get('replay_unique_id') for d in batch]
        favourite = 10 * iteration + 5
        buffer.update(
            {
                'priority': [1000.0 if i == favourite else 0.01 for i in range(50)],
                'replay_unique_id': list(range(50)),
                'replay_buffer_idx': ids,
            }
        )
        rewards = buffer.sample(50, iteration).reward.tolist()
        assert rewards.count(float(favourite)) > 30


def test_wrapper_importance_weights_follow_the_formula() -> None:
    np.random.seed(0)
    buffer = filled(20, priority=True, IS_weight_power_factor=0.5, priority_power_factor=1.0)
    priorities = np.arange(1.0, 21.0)
    buffer.update({'priority': priorities.tolist(), 'replay_unique_id': list(range(20))})
    batch = buffer.sample(2000, 0, replace=True)
    numbers = batch.reward.long()
    counts = torch.bincount(numbers, minlength=20).numpy()
    assert np.abs(counts / 2000 - priorities / priorities.sum()).max() < 0.01
    expected = (priorities / priorities.min()) ** -0.5
    assert np.allclose(batch.priority_IS.numpy(), expected[numbers.numpy()], atol=1e-3)


def test_wrapper_initial_priorities_are_read_from_elements() -> None:
    np.random.seed(0)
    buffer = make(priority=True)
    buffer.push([{**element(i), 'priority': 1000.0 if i == 3 else 0.001} for i in range(20)], 0)
    rewards = buffer.sample(20, 0).reward.tolist()
    assert rewards.count(3.0) > 15


def test_wrapper_draws_rows_of_priority_zero() -> None:
    buffer = make(priority=True)
    buffer.push([{**element(i), 'priority': 0.0} for i in range(5)], 0)
    assert set(buffer.sample(200, 0, replace=True).reward.tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}


@pytest.mark.parametrize('bad', [-1.0, float('nan')])
def test_wrapper_invalid_priorities_are_refused(bad: float) -> None:
    buffer = filled(priority=True)
    with pytest.raises(TypeError, match='priorities must be numbers >= 0'):
        buffer.update({'priority': [1.0, bad], 'replay_unique_id': [1, 2]})
    with pytest.raises(TypeError, match='priorities must be numbers >= 0'):
        buffer.push([element(1), {**element(2), 'priority': bad}], 0)
    assert buffer.push_count == 50


def test_wrapper_priorities_follow_pushed_and_removed_rows() -> None:
    np.random.seed(0)
    buffer = filled(priority=True, max_use=2)
    for step in range(40):
        batch = buffer.sample(8, step)
        ids = [d['replay_unique_id'] for d in batch]
        assert batch.reward.tolist() == [float(i) for i in ids]
        buffer.update({'priority': [float(i % 7) for i in ids], 'replay_unique_id': ids})
        buffer.push([element(50 + 10 * step + i) for i in range(10)], 0)
    assert buffer.count() <= 50


def test_wrapper_max_use_limits_uses() -> None:
    buffer = filled(max_use=2)
    uses = dict.fromkeys(range(50), 0)
    for _ in range(10):
        for each in buffer.sample(8, 0):
            uses[each['replay_unique_id']] += 1
    assert max(uses.values()) == 2
    assert buffer.count() == sum(count < 2 for count in uses.values())
    buffer.push([element(i) for i in range(50)], 0)
    assert buffer.count() == 50
    assert buffer.buffer.sampler.uses_of(buffer.buffer.table.rows_by_age()).sum() == 0


def test_wrapper_max_staleness_removes_stale_elements() -> None:
    buffer = filled(max_staleness=3)
    buffer.sample(1, 5)  # Iterations 0, 1 and 2 are too old at iteration 5.
    assert buffer.count() == 20


def test_wrapper_accepts_keys_of_other_buffer_types() -> None:
    buffer = filled(alpha=0.5, beta=0.3, anneal_step=10, deepcopy=True, enable_track_used_data=False, monitor={})
    assert buffer.sample(5, 0) is not None
    buffer = filled(20, thruput_controller=dict(sample_min_limit_ratio=3))
    assert buffer.sample(7, 0) is None
    assert buffer.sample(6, 0) is not None
    with pytest.raises(ConfigError, match='alpha'):
        make(priority=True, alpha=1.5)


def test_wrapper_accepts_elements_that_no_column_holds() -> None:
    buffer = make()
    buffer.push([{'text': str(i), 'value': i} for i in range(10)], 0)
    data = buffer.sample(4, 0)
    assert type(data) is list
    assert [each['text'] for each in data] == [str(each['value']) for each in data]
    assert 'replay_unique_id' not in buffer.buffer[0].data


def test_wrapper_logs_its_figures() -> None:
    logger = Logger()
    buffer = filled(logger=logger, priority=True, max_use=100, train_iter_per_log=10)
    for iteration in range(25):
        buffer.sample(4, iteration)
    assert {step for _, _, step in logger.scalars} == {0, 10, 20}
    assert {name for name, _, _ in logger.scalars} == {
        'buffer_iter/buffer_data_count',
        'buffer_iter/use_count_avg',
        'buffer_iter/priority_avg',
        'buffer_iter/priority_max',
        'store/replay_rows',
        'store/replay_bytes',
        'store/samples_per_insert',
    }
    assert ('store/samples_per_insert', 4 * 21 / buffer.push_count, 20) in logger.scalars
    buffer.close()


def test_wrapper_saves_loads_and_has_a_state(tmp_path: Path) -> None:
    buffer = filled(30, priority=True)
    buffer.save_data(str(tmp_path / 'data'))
    loaded = make(priority=True)
    loaded.load_data(str(tmp_path / 'data'))
    assert sorted(loaded.sample(30, 0).reward.tolist()) == [float(i) for i in range(30)]
    other = make()
    other.load_state_dict(buffer.state_dict())
    assert other.count() == 30


@pytest.mark.parametrize('priority', [False, True])
def test_wrapper_runs_in_the_serial_pipeline(priority: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ding.entry import serial_pipeline
    from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

    monkeypatch.chdir(tmp_path)
    main, create = copy.deepcopy(main_config), copy.deepcopy(create_config)
    create.replay_buffer = EasyDict(type='store', import_names=['ding_store.buffer'])
    main.policy.priority = main.policy.priority_IS_weight = priority
    main.env.evaluator_env_num = main.env.n_evaluator_episode = 1
    updates = []
    monkeypatch.setattr(
        StoreBufferWrapper,
        'update',
        lambda self, info, update=StoreBufferWrapper.update: updates.append(update(self, info)),
    )
    policy = serial_pipeline((main, create), seed=0, max_train_iter=60)
    assert policy is not None
    assert len(updates) == (60 if priority else 0)


def test_wrapper_state_that_does_not_fit_changes_nothing() -> None:
    def step(size: int) -> dict:
        return {'obs': torch.zeros(size)}

    episodes = make()
    for episode in ([step(3)] * 2, [step(3)], [step(5)] * 2, []):
        episodes.push([episode])
    again = filled(5)
    again.load_state_dict(episodes.state_dict())
    assert again.episode_len == [2, 1, 2, 0]
    with pytest.raises(SchemaMismatch):
        again.load_state_dict({'data': [step(3), [step(3)]]})
    assert again.episode_len == [2, 1, 2, 0]
