"""Elements as collectors make them, whose contents follow from one number."""

from typing import Any, Dict, List, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.buffer import Batch


def transition(i: int) -> ttorch.Tensor:
    """A transition whose leaves all say ``i``."""
    return ttorch.as_tensor(
        {
            'obs': {'state': torch.full((4,), float(i)), 'image': torch.full((2, 3), i % 256, dtype=torch.uint8)},
            'action': torch.tensor([i % 2]),
            'reward': torch.tensor([float(i)]),
            'done': torch.tensor([False]),
        }
    )


def number(element: Any) -> int:
    """The number that a transition was made of; fails if its leaves disagree."""
    i = int(element.reward)
    assert element.obs.state.tolist() == [float(i)] * 4
    assert element.obs.image.tolist() == [[i % 256] * 3] * 2
    assert element.action.tolist() == [i % 2]
    return i


#: The ragged leaves of ``ragged``.
RAGGED = ('obs/units', 'edges')


def ragged_lengths(i: int) -> Tuple[int, int]:
    return i * 7 % 41, i * 5 % 3


def ragged(i: int) -> Dict[str, Any]:
    """An element whose two ragged leaves have other lengths than those of the next. All leaves say ``i``."""
    units, edges = ragged_lengths(i)
    return {
        'obs': {'units': torch.full((units, 3), float(i)), 'scalar': torch.full((2,), float(i))},
        'edges': np.full((edges, 2, 2), i, np.int16),
        'number': i,
    }


def ragged_number(data: Any) -> int:
    i = int(data['number'])
    units, edges = ragged_lengths(i)
    assert data['obs']['units'].tolist() == [[float(i)] * 3] * units
    assert data['obs']['scalar'].tolist() == [float(i)] * 2
    assert data['edges'].dtype == np.int16
    assert data['edges'].tolist() == [[[i] * 2] * 2] * edges
    return i


def check_ragged_batch(batch: Batch, numbers: List[int]) -> None:
    """Fail unless a batch has these elements, padded."""
    lengths = [ragged_lengths(i) for i in numbers]
    assert batch.data['number'].tolist() == numbers
    for name, leaf, found in zip(RAGGED, zip(*lengths), (batch.data['obs']['units'], batch.data['edges'])):
        assert batch.lengths[name].tolist() == list(leaf)
        assert found.shape[:2] == (len(numbers), max(leaf))
        assert batch.mask(name).sum(1).tolist() == list(leaf)
        of_number = torch.tensor(numbers)[:, None] * batch.mask(name)
        assert found.flatten(2).eq(of_number[..., None]).all()
    assert [ragged_number(element) for element in batch.elements()] == numbers
