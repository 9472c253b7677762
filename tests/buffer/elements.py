"""Elements as collectors make them, whose contents follow from one number."""

from typing import Any

import torch
import treetensor.torch as ttorch


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
