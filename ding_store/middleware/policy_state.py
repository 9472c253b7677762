"""State of a DI-engine policy that its ``state_dict`` leaves out: temperatures, statistics, counters."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Mapping, Set, Tuple

import numpy as np
import torch
from ding.model.wrapper.model_wrappers import IModelWrapper, TargetNetworkWrapper
from ding.utils import RunningMeanStd

from ding_store.checkpoint.archive import leaves

#: Attributes that policies count in. Other integers are settings, which a resumed script may change.
COUNTERS = ('_forward_learn_cnt', '_train_iteration', 'train_cnt', 'cont_train_cnt', 'disc_train_cnt', 'gradient_steps')
_STATISTICS = ('_mean', '_var', '_count')


def left_out(policy: Any, state: Mapping[str, Any]) -> Dict[str, Any]:
    """
    Overview:
        Return what a policy needs to resume, in addition to its own ``state``:
        - tensors that are attributes, such as SAC's ``_log_alpha``, but not a fixed temperature
        - RunningMeanStd objects, such as PPO's value normalization
        - the updates since the last assignment of target networks
        - the counters in ``COUNTERS``
        - modules and optimizers with a tensor that ``state`` does not hold
    Arguments:
        - state (:obj:`Mapping`): The policy's ``learn_mode.state_dict()``.
    """
    saved = _addresses(state)
    return dict(
        tensors={name: each.detach() for name, each in _tensors(policy)},
        statistics={name: [_plain(getattr(each, key)) for key in _STATISTICS] for name, each in _statistics(policy)},
        target_updates={name: each._update_count for name, each in targets_of(policy)},
        counters={name: each for name, each in _attributes(policy, int) if name in COUNTERS},
        modules={name: each for name, each in _modules(policy) if not saved.issuperset(_addresses(each))},
    )


def set_left_out(policy: Any, state: Mapping[str, Any]) -> None:
    """
    Overview:
        Set a policy's attributes to the values that ``left_out`` returned. Attributes that it lacks are skipped.
    Raises:
        - ValueError, RuntimeError: A tensor or module has another shape.
    """
    for name, tensor in _tensors(policy):
        if name in state['tensors']:
            _set_tensor(name, tensor, state['tensors'][name])
    for name, each in _statistics(policy):
        for key, value in zip(_STATISTICS, state['statistics'].get(name, ())):
            setattr(each, key, value.numpy()[()] if isinstance(value, torch.Tensor) else value)
    for name, each in targets_of(policy):
        each._update_count = state['target_updates'].get(name, each._update_count)
    for name, _ in _attributes(policy, int):
        if name in state['counters']:
            setattr(policy, name, state['counters'][name])
    for name, value in state['modules'].items():
        if hasattr(policy, name):
            getattr(policy, name).load_state_dict(value)


def _attributes(policy: Any, kind: Any) -> Iterator[Tuple[str, Any]]:
    return ((name, value) for name, value in list(vars(policy).items()) if isinstance(value, kind))


def _tensors(policy: Any) -> Iterator[Tuple[str, torch.Tensor]]:
    # A temperature that is not learned is a setting, which a resumed script may change.
    setting = None if getattr(policy, '_auto_alpha', True) else '_alpha'
    return ((name, each) for name, each in _attributes(policy, torch.Tensor) if name != setting)


def _statistics(policy: Any) -> Iterator[Tuple[str, RunningMeanStd]]:
    return _attributes(policy, RunningMeanStd)


def targets_of(policy: Any) -> Iterator[Tuple[str, TargetNetworkWrapper]]:
    """Yield name and wrapper of each target network of a policy."""
    for name, wrapper in _attributes(policy, IModelWrapper):
        while isinstance(wrapper, IModelWrapper):
            if isinstance(wrapper, TargetNetworkWrapper):
                yield name, wrapper
            wrapper = wrapper._model


def _modules(policy: Any) -> Iterator[Tuple[str, Dict[str, Any]]]:
    for name, each in _attributes(policy, (torch.nn.Module, IModelWrapper, torch.optim.Optimizer)):
        yield name, each.state_dict()


def _addresses(state: Mapping[str, Any]) -> Set[int]:
    return {each.data_ptr() for each in leaves(state) if isinstance(each, torch.Tensor) and each.numel()}


def _plain(value: Any) -> Any:
    """Return numpy numbers and arrays as tensors of the same type, because a checkpoint holds only tensors."""
    return torch.from_numpy(np.array(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def _set_tensor(name: str, own: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor, in place because an optimizer may refer to the tensor."""
    if own.shape != value.shape:
        raise ValueError(f'{name!r}: expected shape {tuple(own.shape)}, got {tuple(value.shape)}')
    with torch.no_grad():
        own.copy_(value)
