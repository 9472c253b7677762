"""``ding -m serial`` with the store's buffer: stock configs of dizoo, made small, and the flag. Real environments."""

import copy
import importlib
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from ding.entry import serial_pipeline
from easydict import EasyDict
from needs import need_extra

import ding_store
from ding_store.buffer import Batch, Fifo, StoreBuffer, StoreBufferWrapper
from ding_store.buffer.batch import TrainBatch
from ding_store.buffer.sequences.sequence_batch import SequenceBatch


class Seen:
    """What a pipeline did with its buffer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: List[Any] = []
        self.rows: List[List[int]] = []
        self.updates: List[Dict[str, Any]] = []
        self.buffers: List[StoreBufferWrapper] = []
        start, sample, update = (getattr(StoreBufferWrapper, name) for name in ('__init__', 'sample', 'update'))

        def __init__(buffer: StoreBufferWrapper, *args: Any, **kwargs: Any) -> None:
            start(buffer, *args, **kwargs)
            self.buffers.append(buffer)

        def record_sample(buffer: StoreBufferWrapper, *args: Any, **kwargs: Any) -> Any:
            batch = sample(buffer, *args, **kwargs)
            if batch is not None:
                self.batches.append(batch)
            return batch

        def recording(read: Callable) -> Callable:
            def record_rows(buffer: StoreBuffer, *args: Any, **kwargs: Any) -> Batch:
                batch = read(buffer, *args, **kwargs)
                self.rows.append(batch.rows.tolist())
                return batch

            return record_rows

        def record_update(buffer: StoreBufferWrapper, info: Dict[str, Any]) -> None:
            self.updates.append(info)
            update(buffer, info)

        for name in ('sample_batch', 'sample_time_major'):
            monkeypatch.setattr(StoreBuffer, name, recording(getattr(StoreBuffer, name)))
        monkeypatch.setattr(StoreBufferWrapper, '__init__', __init__)
        monkeypatch.setattr(StoreBufferWrapper, 'sample', record_sample)
        monkeypatch.setattr(StoreBufferWrapper, 'update', record_update)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Seen:
    monkeypatch.chdir(tmp_path)
    return Seen(monkeypatch)


def run(config: str, iterations: int, change: Callable[[EasyDict], None], **store: Any) -> Any:
    """The stock config with the flag, small; returns the policy."""
    module = importlib.import_module(f'dizoo.{config}')
    main, create = copy.deepcopy(module.main_config), copy.deepcopy(module.create_config)
    main.store = dict(enable=True, **store)
    main.policy.cuda = False
    main.env.update(collector_env_num=2, evaluator_env_num=1, n_evaluator_episode=1, stop_value=1e9)
    for mode in (main.policy.collect, main.policy.eval):
        if 'env_num' in mode:
            mode.env_num = 2 if mode is main.policy.collect else 1
    main.policy.eval.evaluator = dict(eval_freq=10**6)
    create.env_manager.type = 'base'
    change(main)
    assert ding_store.enable(main, create)
    return serial_pipeline((main, create), seed=0, max_train_iter=iterations)


@pytest.mark.parametrize('prefetch', [pytest.param(0, marks=pytest.mark.long), 2])
def test_serial_dqn_trains_with_priority(seen: Seen, prefetch: int) -> None:
    def small(main: EasyDict) -> None:
        main.policy.update(priority=True, priority_IS_weight=True)
        main.policy.collect.n_sample = 32

    run('classic_control.cartpole.config.cartpole_dqn_config', 30, small, prefetch=prefetch)
    buffer = seen.buffers[0]
    assert (buffer.buffer._samples.prefetch is not None) == bool(prefetch)
    assert len(seen.updates) == len(seen.batches) >= 30
    assert all(isinstance(batch, TrainBatch) for batch in seen.batches)
    # What was updated is what was sampled, and it is what rows are drawn by.
    assert [info['replay_unique_id'] for info in seen.updates] == seen.rows
    info = seen.updates[-1]
    last = dict(zip(info['replay_unique_id'], info['priority']))
    found = buffer._priorities.priorities.of(np.array(list(last), np.int64))
    assert np.allclose(found, list(last.values()), rtol=1e-3, atol=1e-4)
    assert seen.batches[-1].IS.min() < 1


def test_serial_r2d2_trains(seen: Seen) -> None:
    def small(main: EasyDict) -> None:
        main.policy.update(priority=True, priority_IS_weight=True, learn_unroll_len=8)
        main.policy.collect.update(unroll_len=10, n_sample=8)
        main.policy.learn.update(batch_size=4, update_per_collect=3)

    run('classic_control.cartpole.config.cartpole_r2d2_config', 9, small)
    assert len(seen.updates) == len(seen.batches) >= 9
    assert all(isinstance(batch, SequenceBatch) for batch in seen.batches)
    assert seen.batches[0].obs.shape == (10, 4, 4)
    assert seen.batches[-1].IS.shape == (4,)
    assert [info['replay_unique_id'] for info in seen.updates] == seen.rows


def test_serial_impala_trains(seen: Seen) -> None:
    run('classic_control.cartpole.config.cartpole_impala_config', 12, lambda main: None)
    assert len(seen.batches) >= 12
    assert all(isinstance(batch, SequenceBatch) for batch in seen.batches)
    assert seen.batches[0].next_obs.shape == (8, 16, 4)
    assert max(Counter(row for rows in seen.rows for row in rows).values()) <= 16


@pytest.mark.parametrize('max_use', [1, pytest.param(3, marks=pytest.mark.long)])
def test_serial_impala_trains_from_a_queue(seen: Seen, max_use: int) -> None:
    def queue(main: EasyDict) -> None:
        main.policy.other.replay_buffer.update(sampler='fifo', max_use=max_use)

    run('classic_control.cartpole.config.cartpole_impala_config', 12, queue)
    assert isinstance(seen.buffers[0].buffer.sampler.sampler, Fifo)
    # In the order of collecting, each as often as configured (the last ones had no time for it).
    whole = len(seen.rows) // max_use * max_use
    assert [len(set(map(tuple, seen.rows[i : i + max_use]))) for i in range(0, whole, max_use)] == [1] * (
        whole // max_use
    )
    used = Counter(row for batch in seen.rows for row in batch)
    assert list(used) == list(range(len(used)))
    assert max(used.values()) == max_use


def test_serial_sac_trains(seen: Seen) -> None:
    def small(main: EasyDict) -> None:
        main.policy.random_collect_size = 200
        main.policy.learn.batch_size = 32

    run('classic_control.pendulum.config.pendulum_sac_config', 10, small)
    assert len(seen.batches) >= 10
    assert all(isinstance(batch, TrainBatch) for batch in seen.batches)
    assert seen.batches[0].action.shape == (32, 1)


def test_serial_qmix_trains(seen: Seen) -> None:
    need_extra('pettingzoo', 'pettingzoo')
    need_extra('pygame', 'pettingzoo')

    def small(main: EasyDict) -> None:
        main.policy.collect.n_sample = 8
        main.policy.learn.update(batch_size=4, update_per_collect=3)

    run('petting_zoo.config.ptz_simple_spread_qmix_config', 6, small)
    assert len(seen.batches) >= 6
    assert all(isinstance(batch, SequenceBatch) for batch in seen.batches)
    assert seen.batches[0].obs.agent_state.shape[:3] == (16, 4, 3)
    assert all(torch.isfinite(batch.reward).all() for batch in seen.batches)


_CONFIG = """
import ding_store
from dizoo.classic_control.cartpole.config.cartpole_dqn_config import create_config, main_config

main_config.exp_name = 'with_the_flag'
main_config.policy.update(priority=True, priority_IS_weight=True)
main_config.env.update(evaluator_env_num=1, n_evaluator_episode=1)
main_config.store = dict(enable=True, prefetch=1)
ding_store.enable(main_config, create_config)
"""


@pytest.mark.long
def test_serial_command_trains_with_and_without_the_flag(tmp_path: Path) -> None:
    (tmp_path / 'config.py').write_text(_CONFIG)
    command = [str(Path(sys.executable).parent / 'ding'), '-m', 'serial', '-c', 'config.py', '-s', '0']
    environ = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, '--train-iter', '40'], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with (tmp_path / 'with_the_flag' / 'result.pkl').open('rb') as file:
        result = pickle.load(file)  # noqa: S301 - written by the command above
    assert result['train_iter'] >= 40
    assert "type='store'" in (tmp_path / 'with_the_flag' / 'formatted_total_config.py').read_text().replace('"', "'")
