"""The model exchanger: policy weights from the learner to everybody, as one versioned value per policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Generator, Mapping, Optional, Tuple

import numpy as np
import torch
from ding.framework import task
from ditk import logging

from ding_store.errors import SchemaMismatch
from ding_store.middleware.session import Session
from ding_store.storage.base import Value

if TYPE_CHECKING:
    from ding.framework import Context


def state_to_arrays(state: Mapping[str, Any]) -> Tuple[Dict[str, Any], Dict[str, np.ndarray]]:
    """
    Overview:
        A state dict as header and arrays. bfloat16 has no numpy dtype: its bits travel as uint16, named in the header.
    Raises:
        - SchemaMismatch: An entry that is no tensor.
    """
    arrays, bfloat16 = {}, []
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise SchemaMismatch(f'weight {name!r}: expected a tensor, got {type(tensor).__name__}')
        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            bfloat16.append(name)
            tensor = tensor.view(torch.int16)
        arrays[name] = tensor.numpy()
    return {'bfloat16': bfloat16}, arrays


def load_arrays(model: torch.nn.Module, value: Value) -> None:
    """
    Overview:
        Copy a published version into the model's parameters and buffers, in place; all or nothing.
    Raises:
        - SchemaMismatch: Names the parameters that are missing, unexpected or of another shape; the model is unchanged.
    """
    own = model.state_dict()
    wrong = [f'missing {name!r}' for name in own if name not in value.arrays]
    wrong += [f'unexpected {name!r}' for name in value.arrays if name not in own]
    for name, array in value.arrays.items():
        if name in own and tuple(own[name].shape) != array.shape:
            wrong.append(f'{name!r}: expected shape {tuple(own[name].shape)}, got {array.shape}')
    if wrong:
        raise SchemaMismatch(f'weights {value.name!r} version {value.version} do not fit the model: {"; ".join(wrong)}')
    with torch.no_grad():
        for name, array in value.arrays.items():
            _copy_into(own[name], array, name in value.header['bfloat16'])


def _copy_into(target: torch.Tensor, array: np.ndarray, bfloat16: bool) -> None:
    if target.device.type == 'cpu' and target.dtype != torch.bfloat16 and not bfloat16:
        np.copyto(target.numpy(), array)
        return
    source = torch.from_numpy(array.copy())
    target.copy_(source.view(torch.bfloat16) if bfloat16 else source)


def model_exchanger(session: Session, model: torch.nn.Module, model_loader: Any = None, name: str = 'main') -> Any:
    """
    Overview:
        Exchange weights through the store; ModelExchanger's place, with the difference that a collector loads the
        newest version there is and does not wait for a newer one: the pace is kept by the context exchanger.
    Arguments:
        - model_loader: Accepted for compatibility and not needed.
        - name (:obj:`str`): Which policy, for runs with several.
    """
    if not task.router.is_active:
        return task.void()
    if len(task.roles) == 0:
        logging.warning('The task does not have any roles defined, the model exchanger will not work.')
        return task.void()
    kind = WeightsSender if task.has_role(task.role.LEARNER) else WeightsReceiver
    return kind(session, model, name)


class WeightsSender:
    """Publish the model once before training, and after every iteration that trained."""

    __ding_store_harmless__ = True

    def __init__(self, session: Session, model: torch.nn.Module, name: str, period: int = 1) -> None:
        self._session, self._model, self._value = session, model, f'weights/{name}'
        self._period = period
        self._num_iterations = 0
        self._published_iter: Optional[int] = None

    def __call__(self, ctx: Context) -> Generator:
        if self._published_iter is None:
            self._publish(ctx)
        yield
        self._num_iterations += 1
        if ctx.train_iter != self._published_iter and (self._num_iterations - 1) % self._period == 0:
            self._publish(ctx)

    def _publish(self, ctx: Context) -> None:
        header, arrays = state_to_arrays(self._model.state_dict())
        header['train_iter'] = ctx.train_iter
        version = self._session.store.put(self._value, header, arrays)
        self._published_iter = ctx.train_iter
        self._session.figures(policy_version=version)


class WeightsReceiver:
    """Load the newest published version, if it is newer than the one at hand."""

    __ding_store_harmless__ = True

    def __init__(self, session: Session, model: torch.nn.Module, name: str) -> None:
        self._session, self._model, self._value = session, model, f'weights/{name}'
        self._version = 0

    def __call__(self, ctx: Context) -> None:
        value = self._session.store.get(self._value, newer_than=self._version)
        if value is not None:
            load_arrays(self._model, value)
            self._version = value.version
            self._session.figures(policy_version=value.version, policy_iter=value.header['train_iter'])
