"""A copy of an optimizer that steps with its own parameters: for a parameter server in the process of a worker."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, Dict, List, Tuple

import torch

#: Attributes that optimizers, schedulers and averages put on an instance. They refer to the original.
_OF_THE_INSTANCE = ('step', 'zero_grad')


def parameters_of(optimizer: torch.optim.Optimizer) -> List[torch.Tensor]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [each for group in optimizer.param_groups for each in group['params']]


def copy_optimizer(optimizer: torch.optim.Optimizer) -> Tuple[List[torch.Tensor], torch.optim.Optimizer]:
    """
    Overview:
        Copy an optimizer of any class, with its settings and its state, but without its hooks.
    Returns:
        - parameters (:obj:`List[torch.Tensor]`): Copies of its parameters, in its order. The copy steps with them.
        - copied (:obj:`torch.optim.Optimizer`): The copy.
    """
    own = {
        id(each): torch.nn.Parameter(each.detach().clone(), requires_grad=each.requires_grad)
        for each in parameters_of(optimizer)
    }
    copied: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith('_hooks'):
            setattr(copied, name, OrderedDict())
        elif name not in (*_OF_THE_INSTANCE, 'param_groups', 'state'):
            setattr(copied, name, copy.deepcopy(value))
    copied.param_groups = [
        {
            name: [own[id(each)] for each in value] if name == 'params' else copy.deepcopy(value)
            for name, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    copied.state = defaultdict(dict)
    set_state(copied, state_of(optimizer))
    return list(own.values()), copied


def state_of(optimizer: torch.optim.Optimizer) -> List[Dict[str, Any]]:
    """Return a copy of an optimizer's state, one dict per parameter."""
    states, parameters = optimizer.state, parameters_of(optimizer)
    return [copy.deepcopy(states[each]) if each in states else {} for each in parameters]


def set_state(optimizer: torch.optim.Optimizer, state: List[Dict[str, Any]]) -> None:
    """Give an optimizer the state that ``state_of`` returned for one with the same parameters."""
    optimizer.state.clear()
    for parameter, values in zip(parameters_of(optimizer), state):
        if values:
            optimizer.state[parameter] = {
                name: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in values.items()
            }
