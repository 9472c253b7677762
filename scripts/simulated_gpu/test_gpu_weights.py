"""Weights from any device, or a model over several, to any device: the learner's values, in every version."""

from typing import Any, Dict

import numpy as np
import pytest
import torch
from torch import nn

from ding_store.middleware.state_arrays import load_arrays, state_to_arrays
from ding_store.storage import open_store


class Model(nn.Module):
    """Parameters and buffers of all kinds: tied, not contiguous, a scalar, empty, of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(30, 30), nn.Linear(30, 30)
        self.other.weight = self.one.weight
        self.transposed = nn.Parameter(torch.randn(8, 6).t())
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Parameter(torch.randn(7, 5).bfloat16())
        self.narrower = nn.Parameter(torch.randn(3).half())
        self.none = nn.Parameter(torch.zeros(0))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.register_buffer('count', torch.tensor(3))
        self.register_buffer('strided', torch.arange(10.0)[::2])
        self.register_buffer('flags', torch.tensor([True, False]))


def on(device: str) -> Model:
    torch.manual_seed(0)
    model = Model()
    if device != 'all':
        return model.to(device)
    model.norm.to('cuda:1')
    model.one.to('cuda:0')
    model.other.weight = model.one.weight
    return model


def values(model: Model) -> Dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize('dtype', [None, 'float16', 'bfloat16'])
@pytest.mark.parametrize('in_place', [False, True])
@pytest.mark.parametrize('target', ['cpu', 'cuda:0', 'cuda:1'])
@pytest.mark.parametrize('source', ['cpu', 'cuda:0', 'cuda:1', 'all'])
def test_weights_of_every_version_arrive_on_any_device(source: str, target: str, in_place: bool, dtype: Any) -> None:
    model, copy, pinned = on(source), on(target), {}
    buffers = {name for name, _ in model.named_buffers()}
    with open_store('memory://', run='w') as store:
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            expected = values(model)
            header, arrays = state_to_arrays(model.state_dict(), dtype, pinned, buffers)
            store.put('weights/x', header, arrays)
            load_arrays(copy, store.get('weights/x'), in_place=in_place)
            for name, value in values(copy).items():
                exact = dtype is None or name in buffers
                tolerance = dict(rtol=0, atol=0) if exact else dict(rtol=1e-2, atol=1e-2)
                torch.testing.assert_close(value, expected[name], **tolerance, msg=lambda said, n=name: f'{n}: {said}')
    assert {str(parameter.device) for parameter in copy.parameters()} == {target}
    gpus = [name for name, tensor in model.state_dict().items() if tensor.is_cuda and name not in header['shared']]
    assert set(pinned) == set(gpus)
    assert all(tensor.is_pinned() for tensor in pinned.values() if tensor.numel())


def test_weights_copied_from_a_gpu_are_complete() -> None:
    """Of a GPU that is not the current one, too."""
    assert torch.cuda.current_device() == 0
    pinned: Dict[str, torch.Tensor] = {}
    for number in range(3):
        state = {name: torch.full((4,), number + 0.5, device=name) for name in ('cuda:0', 'cuda:1')}
        _, arrays = state_to_arrays(state, None, pinned)
        for name in state:
            assert np.array_equal(arrays[name], np.full(4, number + 0.5, np.float32)), name
