"""A snapshot is of the moment of ``save``, though the next step comes at once and copies from a GPU come late."""

import copy
from typing import Any, Dict, List

import pytest
import torch
from torch import nn

from ding_store.checkpoint import Saver, read_state, write_state

OPTIMIZERS = {
    'Adam': lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    'Adam, foreach': lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    'Adam, its steps on the GPU': lambda parameters: torch.optim.Adam(parameters, lr=0.01, capturable=True),
    'AMSGrad': lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    'SGD': lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    'RMSprop': lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


class Training:
    def __init__(self, devices: List[str], optimizer: str) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(20, 20).to(device) for device in devices]
        self.target = copy.deepcopy(self.models[0])
        self.optimizer = OPTIMIZERS[optimizer]([each for model in self.models for each in model.parameters()])

    def find_gradients(self) -> None:
        self.optimizer.zero_grad()
        for model in self.models:
            model(torch.randn(4, 20).to(model.weight.device)).pow(2).mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            for mine, its in zip(self.target.parameters(), self.models[0].parameters()):
                mine.lerp_(its, 0.1)

    def state(self) -> Dict[str, Any]:
        models = [model.state_dict() for model in self.models]
        return {'models': models, 'target': self.target.state_dict(), 'optimizer': self.optimizer.state_dict()}


def on_cpu(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: on_cpu(value) for key, value in tree.items()}
    return [on_cpu(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def same(one: Any, other: Any) -> bool:
    """Also the device: a saved state is of the CPU."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.device == other.device and torch.equal(one, other)
    return one == other


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('devices', [['cuda:0'], ['cuda:1'], ['cuda:0', 'cuda:1']], ids=' and '.join)
def test_snapshot_is_not_changed_by_the_next_step(devices: List[str], optimizer: str) -> None:
    training = Training(devices, optimizer)
    training.find_gradients()
    training.step()
    saver, expected, written = Saver([training.optimizer]), [], []
    for _ in range(5):
        expected.append(on_cpu(training.state()))
        assert saver.save(training.state(), lambda state: written.append(on_cpu_as_it_is(state)))
        training.step()
        saver.drain(60)
        training.find_gradients()
    assert saver.num_failed == 0
    assert [same(on_cpu(one), other) for one, other in zip(written, expected)] == [True] * 5
    assert torch.cuda.current_device() == 0


def on_cpu_as_it_is(state: Any) -> Any:
    """A copy of what is written, which must be on the CPU already."""
    copied = copy.deepcopy(state)
    assert same(on_cpu(copied), copied)
    return copied


def test_checkpoint_written_from_a_gpu_is_read_without_one(tmp_path: Any) -> None:
    """``write_state`` of a policy's own tensors, as of the best checkpoint."""
    model = nn.Linear(3, 2).to('cuda:1')
    path = str(tmp_path / 'best.pth.tar')
    write_state(path, {'model': model.state_dict()})
    assert read_state(path)['model']['weight'].device.type == 'cpu'
    assert torch.equal(read_state(path)['model']['weight'], model.weight.detach().cpu())
