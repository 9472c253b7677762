"""Averages of gradients over several learners, before an optimizer clips them or steps."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterable, List, Set, Tuple

import torch

from ding_store.errors import ConfigError

Parameter = torch.Tensor


class GradientAverage:
    """
    Overview:
        Averages the gradients of optimizers once per step. It replaces the ``step`` of each optimizer object, so it
        comes before DI-engine's optimizers clip, inside of their ``step``. Policies that clip before the step call
        ``torch.nn.utils.clip_grad_norm_``. ``average_before_clipping`` makes that average as well.
    Arguments:
        - add_up (:obj:`Callable`): Replaces a tensor by the sum over all learners.
        - num (:obj:`int`): Number of learners.
    """

    def __init__(self, add_up: Callable[[torch.Tensor], None], num: int) -> None:
        self._add_up, self._num = add_up, num
        self._watched: Dict[int, Parameter] = {}  # by id. The parameter is kept, so that no other gets its id
        self._averaged: Set[int] = set()  # ids of parameters whose gradients were averaged before they were clipped
        self._optimizers: List[torch.optim.Optimizer] = []

    @property
    def parameters(self) -> List[Parameter]:
        """All parameters of the watched optimizers, in a fixed order."""
        return list(self._watched.values())

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of an optimizer's parameters in each of its steps from now on."""
        if any(each is optimizer for each in self._optimizers):
            return
        self._optimizers.append(optimizer)
        self._watched.update((id(each), each) for each in _parameters_of(optimizer))
        step, zero_grad = optimizer.step, optimizer.zero_grad

        @functools.wraps(step)
        def averaged_step(*args: Any, **kwargs: Any) -> Any:
            if any(each is not None for each in (*args, kwargs.get('closure'))):
                raise ConfigError(
                    f'{type(optimizer).__name__}.step has a closure, which computes gradients inside of the step. '
                    'Several learners cannot average them: train with learner=1.'
                )
            parameters = _parameters_of(optimizer)
            self.average(parameters)
            self._averaged.difference_update(map(id, parameters))
            return step()

        @functools.wraps(zero_grad)
        def watched_zero_grad(*args: Any, **kwargs: Any) -> None:
            self._averaged.difference_update(map(id, _parameters_of(optimizer)))
            zero_grad(*args, **kwargs)

        optimizer.step, optimizer.zero_grad = averaged_step, watched_zero_grad  # type: ignore[method-assign,assignment]

    def average(self, parameters: Iterable[Parameter]) -> None:
        """
        Overview:
            Replace gradients by their averages over all learners. All learners call this for the same parameters. A
            gradient that only some learners have counts as 0 on the others. One that no learner has stays None.
        """
        kinds: Dict[Tuple[torch.dtype, torch.device], List[Parameter]] = {}
        for each in parameters:
            if each.requires_grad and id(each) in self._watched and id(each) not in self._averaged:
                kinds.setdefault((each.dtype, each.device), []).append(each)
        for (dtype, device), several in kinds.items():
            self._average(several, dtype, device)
            self._averaged.update(map(id, several))

    def _average(self, parameters: List[Parameter], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [each.numel() for each in parameters]
        flat = torch.zeros(sum(sizes) + len(parameters), dtype=dtype, device=device)
        pieces, has_gradient = flat[: sum(sizes)].split(sizes), flat[sum(sizes) :]
        with torch.no_grad():
            for i, (each, piece) in enumerate(zip(parameters, pieces)):
                if each.grad is not None:
                    grad = each.grad.to_dense() if each.grad.is_sparse else each.grad
                    piece.copy_(grad.reshape(-1))
                    has_gradient[i] = 1
            self._add_up(flat)
            for each, piece, count in zip(parameters, pieces, has_gradient.tolist()):
                if count:
                    mean = (piece / self._num).reshape(each.shape)
                    if each.grad is None or each.grad.is_sparse:
                        each.grad = mean.clone()
                    else:
                        each.grad.copy_(mean)


def average_before_clipping(average: GradientAverage) -> Callable[[], None]:
    """
    Overview:
        Make torch's functions that clip gradients average those of watched parameters first, in this process.
    Returns:
        - undo (:obj:`Callable`): Puts torch's functions back.
    """
    utils = torch.nn.utils
    before = {name: getattr(utils, name) for name in ('clip_grad_norm_', 'clip_grad_value_')}

    def averaging(clip: Callable) -> Callable:
        @functools.wraps(clip)
        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            several = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            average.average(several)
            return clip(several, *args, **kwargs)

        return clipped

    for name, clip in before.items():
        setattr(utils, name, averaging(clip))

    def undo() -> None:
        for name, clip in before.items():
            setattr(utils, name, clip)

    return undo


def _parameters_of(optimizer: torch.optim.Optimizer) -> List[Parameter]:
    return [each for group in optimizer.param_groups for each in group['params']]
