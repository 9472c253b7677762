"""What comes from a GPU is the CPU's in the replay, in the store and on the disk."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ding.model import DQN
from ding.policy import DQNPolicy
from easydict import EasyDict

from ding_store.buffer import Prioritized, StoreBuffer, mixed_priority
from ding_store.checkpoint import CheckpointDir
from ding_store.config import StoreConfig
from ding_store.middleware.checkpoint import BestCheckpoint
from ding_store.middleware.pickled_chunks import pickled, unpickled


def element(i, device='cuda:1'):
    return {'x': torch.full((3,), float(i), device=device), 'done': torch.tensor(i == 3, device=device)}


def test_elements_of_a_gpu_are_stored_on_the_cpu():
    buffer = StoreBuffer(10, sampler=Prioritized(epsilon=0.0))
    for i in range(4):
        buffer.push(element(i, ('cuda:0', 'cuda:1', 'cpu', 'cuda')[i]))
    batch = buffer.gather_batch(np.arange(4)).data
    assert batch.x.device.type == 'cpu'
    assert batch.x[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    errors = torch.tensor([0.5, 1.0, 2.0, 4.0], device='cuda', dtype=torch.bfloat16, requires_grad=True)
    for priority in (errors, list(errors), errors.half()):
        buffer.update_priorities(np.arange(4), priority)
        assert buffer.sampler.priorities.of(np.arange(4)).tolist() == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert mixed_priority(errors[:, None]).tolist() == pytest.approx([0.9 * 4 + 0.1 * 7.5 / 4])


def test_elements_pickled_from_a_gpu_load_on_the_cpu():
    header, arrays = pickled([{**element(i), 'name': 'a'} for i in range(2)], {})
    entry = SimpleNamespace(header={**header, 'rows': 2}, arrays=arrays)
    first, second = unpickled(entry)
    assert first['x'].device.type == 'cpu'
    assert second['x'].tolist() == [1.0] * 3


def test_best_policy_of_an_evaluator_loads_without_a_gpu(tmp_path):
    cfg = EasyDict(DQNPolicy.default_config())
    cfg.cuda = True
    model = DQN(obs_shape=4, action_shape=2, encoder_hidden_size_list=[8, 8])
    CheckpointDir(str(tmp_path), 2).begin()
    best = BestCheckpoint(StoreConfig.from_block({'checkpoint': dict(path=str(tmp_path))}).checkpoint)
    best.add(DQNPolicy(cfg, model=model))
    best(SimpleNamespace(eval_value=1.0, train_iter=3))
    state = torch.load(tmp_path / 'best.pth.tar')
    saved, own = state['model'], model.state_dict()
    assert {tensor.device.type for tensor in own.values()} == {'cuda'}
    assert {tensor.device.type for tensor in saved.values()} == {'cpu'}
    assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in own.items())
