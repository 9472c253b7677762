"""A copy of a policy's state at one moment, in reused memory. Most of it is copied while training goes on."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple

import torch

from ding_store.compiled import copy_past_caches

logger = logging.getLogger(__name__)

Path = Tuple[Any, ...]


class _Copy(NamedTuple):
    source: torch.Tensor
    target: torch.Tensor
    version: int  # version of the source when the snapshot began


class Snapshot:
    """
    Overview:
        A copy of a policy's state. ``begin`` copies what a forward pass may change: target networks, statistics of
        normalization, counters. ``complete`` copies the rest in another thread: what only optimizers change, their
        parameters and their state. It must not change until then: the owner waits before each optimizer step.
    Arguments:
        - optimizers (:obj:`Sequence`): All optimizers whose parameters are in a state.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self.optimizers = list(optimizers)
        self._buffers: Dict[Path, torch.Tensor] = {}
        self._copies: List[_Copy] = []
        self._marks: Dict[torch.device, Any] = {}  # by GPU: an event after the work that training queued at ``begin``
        self._streams: Dict[torch.device, Any] = {}
        self.state: Any = None

    def begin(self, state: Any, at_once: bool = False) -> None:
        """
        Overview:
            Begin a snapshot: copy what a forward pass may change.
        Arguments:
            - state: A ``state_dict()``: tensors in nested dicts, lists and tuples, and other values.
            - at_once (:obj:`bool`): Copy everything here.
        """
        guarded: Set[int] = set() if at_once else self._guarded()
        self._copies = []
        self.state = self._walk(state, (), guarded)
        gpus = {each.source.device for each in self._copies if each.source.is_cuda}
        self._marks = {gpu: torch.cuda.current_stream(gpu).record_event() for gpu in gpus}

    def complete(self) -> bool:
        """
        Overview:
            Copy the rest. Return whether it stayed unchanged meanwhile. If not, the snapshot cannot be used.
        """
        for each in self._copies:
            if not each.source.is_cuda:
                _copy(each.target, each.source)
        for gpu, mark in self._marks.items():
            self._copy_from(gpu, mark)
        whole = all(each.source._version == each.version for each in self._copies)
        self._copies = []
        return whole

    def _copy_from(self, gpu: torch.device, mark: Any) -> None:
        """
        Overview:
            Copy from a GPU in a separate stream. The copies start after the last step, in whichever stream that is, and
            run in parallel with training.
        """
        if gpu not in self._streams:
            self._streams[gpu] = torch.cuda.Stream(gpu)
        stream = self._streams[gpu]
        stream.wait_event(mark)
        # Set the device as well: leaving a stream in a new thread returns to the first GPU, and begins to use it.
        with torch.cuda.device(gpu), torch.cuda.stream(stream):
            for each in self._copies:
                if each.source.device == gpu:
                    each.target.copy_(each.source, non_blocking=True)
        stream.synchronize()

    def _guarded(self) -> Set[int]:
        """Return the addresses of memory that only an optimizer step changes."""
        found: Set[int] = set()
        for optimizer in self.optimizers:
            tensors = [each for group in optimizer.param_groups for each in group['params']]
            tensors += [each for state in optimizer.state.values() for each in state.values()]
            found.update(each.data_ptr() for each in tensors if isinstance(each, torch.Tensor) and each.numel())
        return found

    def _walk(self, tree: Any, path: Path, guarded: Set[int]) -> Any:
        if isinstance(tree, torch.Tensor) and tree.layout == torch.strided:
            return self._copy(tree, path, guarded)
        if isinstance(tree, dict):
            made = {key: self._walk(value, (*path, key), guarded) for key, value in tree.items()}
            return _like(tree, made)
        if type(tree) in (list, tuple):
            return type(tree)(self._walk(value, (*path, i), guarded) for i, value in enumerate(tree))
        return copy.deepcopy(tree)

    def _copy(self, source: torch.Tensor, path: Path, guarded: Set[int]) -> torch.Tensor:
        source = source.detach()
        target = self._buffers.get(path)
        if target is None or target.shape != source.shape or target.dtype != source.dtype:
            target = self._buffers[path] = host_buffer(source)
        if source.data_ptr() in guarded:
            self._copies.append(_Copy(source, target, source._version))
        else:
            _copy(target, source)
        return target


@functools.cache
def _warn_of_pageable(reason: str) -> None:
    """Warn once, not for each tensor."""
    logger.warning('copies from the GPU take longer: memory cannot be pinned (%s)', reason)


def host_buffer(source: torch.Tensor) -> torch.Tensor:
    """
    Overview:
        Allocate memory for a copy of a tensor. Copies from a GPU use pinned memory if possible, which is several times
        faster.
    """
    if source.is_cuda:
        try:
            return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        except RuntimeError as e:
            _warn_of_pageable(str(e).partition('\n')[0])
    return torch.empty(source.shape, dtype=source.dtype)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor to one of the same type and shape."""
    is_here = target.device.type == source.device.type == 'cpu' and not (source.is_conj() or source.is_neg())
    if is_here and target.is_contiguous() and source.is_contiguous():
        copy_past_caches(*(each.reshape(-1).view(torch.uint8).numpy() for each in (target, source)))
    else:
        target.copy_(source)


def optimizers_of(policy: Any) -> List[torch.optim.Optimizer]:
    """Return all optimizers that a policy of DI-engine holds, also in lists and dicts."""
    found = _held(policy, torch.optim.Optimizer).values()
    return list({id(each): each for each in found}.values())


def schedules_of(policy: Any) -> Dict[str, Any]:
    """Return a policy's learning rate schedules by attribute. Names of those in lists and dicts include the key."""
    return _held(policy, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))


def _held(policy: Any, kinds: Any) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    for name, value in vars(policy).items():
        if isinstance(value, kinds):
            found[name] = value
        elif isinstance(value, (dict, list, tuple)):
            several = value.items() if isinstance(value, dict) else enumerate(value)
            found.update({f'{name}.{key}': each for key, each in several if isinstance(each, kinds)})
    return found


def _like(tree: Dict[Any, Any], made: Dict[Any, Any]) -> Dict[Any, Any]:
    """Return the same kind of dict: a module's dict holds the versions of its parts, which loading needs."""
    if type(tree) is dict:
        return made
    like: Dict[Any, Any] = type(tree)()
    like.update(made)
    metadata = getattr(tree, '_metadata', None)
    if metadata is not None:
        like._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    return like
