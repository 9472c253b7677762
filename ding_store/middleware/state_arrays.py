"""State dicts <-> arrays: what a policy's weights are as one value of the store, and how they get into a model."""

from __future__ import annotations

import json
from typing import Any, Collection, Container, Dict, Iterable, Iterator, Mapping, MutableMapping, Optional, Tuple, Union

import numpy as np
import torch

from ding_store.checkpoint.snapshot import host_buffer
from ding_store.compiled import FAR_BYTES, copy_each_past_caches, load_for
from ding_store.errors import ConfigError, SchemaMismatch
from ding_store.storage.base import Value

#: What floats may be published as, beside their own types.
DTYPES = {'float16': torch.float16, 'bfloat16': torch.bfloat16}
#: What torch.compile puts before names, of the model or of a part of it, and DistributedDataParallel.
_COMPILED, _DISTRIBUTED = '_orig_mod.', 'module.'
#: So many differences between weights and a model are named.
_MAX_NAMED = 10
#: What a header says of the arrays, and what is meant where it does not.
_FIELDS: Dict[str, Any] = {'shared': {}, 'others': {}, 'bfloat16': []}
_EXTRA = '_extra_state'  # What torch calls a module's entry that is anything, set by a method of the module's.


def state_to_arrays(
    state: Mapping[str, Any],
    dtype: Optional[str] = None,
    pinned: Optional[Dict[str, torch.Tensor]] = None,
    exact: Container[str] = (),
) -> Tuple[Dict[str, Any], Dict[str, np.ndarray]]:
    """
    Overview:
        A state dict as header and arrays; the arrays share memory with tensors that are on the CPU. Dicts that hold
        tensors become names with ``/``, tensors that are the same memory one array, other entries a part of the
        header. bfloat16 has no numpy dtype: its bits travel as int16.
    Arguments:
        - dtype (:obj:`Optional[str]`): 'float16' or 'bfloat16': what floats are rounded to; None: to nothing. A tensor
          with a value out of the range of the type keeps its own, and is named in ``header['not_rounded']``.
        - pinned (:obj:`Optional[Dict]`): Where tensors of a GPU are copied to; kept between calls.
        - exact (:obj:`Container`): Names of tensors that ``dtype`` is not for.
    Raises:
        - SchemaMismatch: Names an entry that is neither a dense tensor of numbers nor JSON-able, or a key that is no
          part of a name.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f'weights dtype {dtype!r} must be one of {", ".join(DTYPES)}')
    header: Dict[str, Any] = {'bfloat16': [], 'shared': {}, 'others': {}, 'not_rounded': []}
    tensors: Dict[str, torch.Tensor] = {}
    firsts: Dict[Any, str] = {}
    for name, entry in _leaves(state):
        if not isinstance(entry, torch.Tensor):
            header['others'][name] = _checked(name, entry)
            continue
        if torch.nn.parameter.is_lazy(entry):
            raise SchemaMismatch(f'weight {name!r} has no shape yet: run the lazy module once, before it is published')
        if entry.layout != torch.strided or entry.is_meta or entry.is_nested:
            kind = 'nested tensors' if entry.is_nested else entry.layout
            raise SchemaMismatch(f'weight {name!r}: expected a dense tensor, got one of {kind} on {entry.device}')
        first = firsts.setdefault(_memory(entry) if entry.numel() else name, name)
        if first != name:
            header['shared'][name] = first
        else:
            tensors[name] = entry.detach()
    _to_cpu(tensors, pinned if pinned is not None else {})
    arrays = {}
    for name, tensor in tensors.items():
        if dtype is not None and tensor.dtype.is_floating_point and name not in exact and not _is_extra(name):
            if _fits(tensor, DTYPES[dtype]):
                tensor = tensor.to(DTYPES[dtype])
            else:
                header['not_rounded'].append(name)
        if tensor.dtype == torch.bfloat16:
            header['bfloat16'].append(name)
            tensor = tensor.contiguous().view(torch.int16)
        arrays[name] = _array_of(name, tensor)
    return header, arrays


def _are_names(shared: Any, arrays: Container[str]) -> bool:
    return isinstance(shared, dict) and all(isinstance(first, str) and first in arrays for first in shared.values())


def _without_wrappers(own: Iterable[str], published: Collection[str]) -> Dict[str, str]:
    """What published names are in the model, if wrappers of it or of the published one are the only difference."""
    mine = {_bare(name): name for name in own}
    theirs = {_bare(name): name for name in published}
    if mine.keys() != theirs.keys() or len(theirs) != len(published) or set(mine.values()) == set(published):
        return {}
    return {name: mine[bare] for bare, name in theirs.items()}


def _bare(name: str) -> str:
    bare = name.replace(_COMPILED, '')
    while bare.startswith(_DISTRIBUTED):
        bare = bare[len(_DISTRIBUTED) :]
    return bare


def _prefixed(own: Collection[str], published: Collection[str]) -> str:
    """In a few words that all names differ in one prefix; empty if that is not all."""
    for longer, shorter, whose in ((own, published, 'the model'), (published, own, 'the weights')):
        first = min(shorter, default='')
        for name in longer:
            prefix = name[: len(name) - len(first)] if first and name.endswith(first) else ''
            if prefix and {prefix + each for each in shorter} == set(longer):
                return f'the names of {whose} begin with {prefix!r}, the others do not. Rename them on one side'
    return ''


def load_arrays(target: Union[torch.nn.Module, MutableMapping[str, Any]], value: Value, in_place: bool = False) -> None:
    """
    Overview:
        Copy a published version into a model's parameters and buffers, or into a state dict, where they are; all or
        nothing. Floats may be of other types than the published ones.
    Arguments:
        - in_place (:obj:`bool`): The model's parameters become the published arrays themselves, without a copy: all
          processes of a host then share one. They are read-only, *writing to them ends the process*: for inference
          only. Parameters of other types or on a GPU are copied as usual, and so are buffers.
    Raises:
        - SchemaMismatch: Names what is missing, unexpected, of another shape or kind; the model is unchanged.
    """
    is_module = isinstance(target, torch.nn.Module)
    own = dict(_leaves(target.state_dict() if isinstance(target, torch.nn.Module) else target))
    # Extra state is set by a method of the module: what that takes is its own matter.
    fixed = {name: entry for name, entry in own.items() if not (is_module and _is_extra(name))}
    shared, others, rounded = (value.header.get(name, empty) for name, empty in _FIELDS.items())
    if not (isinstance(others, dict) and isinstance(rounded, list) and _are_names(shared, value.arrays)):
        raise SchemaMismatch(
            f'the header of weights {value.name!r} version {value.version} is not one of state_to_arrays: put what '
            'that returns'
        )
    arrays = {**value.arrays, **{name: value.arrays[first] for name, first in shared.items()}}
    bfloat16 = {name for name in arrays if shared.get(name, name) in rounded}
    names = _without_wrappers(own, [*arrays, *others])
    if names:
        arrays, others = ({names[name]: each for name, each in kept.items()} for kept in (arrays, others))
        bfloat16 = {names[name] for name in bfloat16}
    wrong = [f'missing {name!r}' for name in own if name not in arrays and name not in others]
    wrong += [f'unexpected {name!r}' for name in [*arrays, *others] if name not in own]
    known = [(name, array) for name, array in arrays.items() if name in fixed]
    wrong += filter(None, (_misfit(name, fixed[name], array, name in bfloat16) for name, array in known))
    wrong += [f'{name!r}: expected a tensor' for name in others if isinstance(fixed.get(name), torch.Tensor)]
    if is_module:
        wrong += [f"{name!r}: a tensor in a module's extra state cannot be loaded" for name in own if '/' in name]
    if wrong:
        what = _prefixed(own, [*arrays, *others]) or '; '.join(wrong[:_MAX_NAMED])
        if len(wrong) > _MAX_NAMED:
            what += f'; {len(wrong)} differences in all'
        raise SchemaMismatch(f'weights {value.name!r} version {value.version} do not fit the model: {what}')
    done = _point(target, arrays, bfloat16) if in_place and isinstance(target, torch.nn.Module) else set()
    copied = [(name, array) for name, array in known if name not in done]
    num_bytes = sum(array.nbytes for _, array in copied)
    load_for(num_bytes)
    pairs = []
    with torch.no_grad():
        for name, array in copied:
            tensor = fixed[name].detach()
            if tensor.device.type == 'cpu' and tensor.dtype != torch.bfloat16 and name not in bfloat16:
                pairs.append((tensor.numpy(), array))
            else:
                tensor.copy_(_tensor_of(array, name in bfloat16))
    if num_bytes >= FAR_BYTES:
        copy_each_past_caches(pairs)
    else:
        for pair in pairs:
            np.copyto(*pair)
    extra = {name: _tensor_of(array, name in bfloat16).clone() for name, array in arrays.items() if name not in fixed}
    for name, entry in {**others, **extra}.items():
        _set_other(target, name, entry)


def _leaves(state: Mapping[str, Any], prefix: str = '') -> Iterator[Tuple[str, Any]]:
    for key, entry in state.items():
        if not isinstance(key, str) or '/' in key:
            raise SchemaMismatch(f'weight {prefix + str(key)!r}: the key {key!r} must be a string without "/"')
        if isinstance(entry, torch.Tensor):  # first: typing's Mapping takes several times as long to say no
            yield prefix + key, entry
        elif isinstance(entry, Mapping) and _has_tensors(entry):
            yield from _leaves(entry, f'{prefix}{key}/')
        else:
            yield prefix + key, entry


def _is_extra(name: str) -> bool:
    return name.rpartition('.')[2] == _EXTRA


def _has_tensors(entry: Any) -> bool:
    if isinstance(entry, Mapping):
        return any(map(_has_tensors, entry.values()))
    return isinstance(entry, torch.Tensor)


def _memory(tensor: torch.Tensor) -> Any:
    marks = tensor.is_conj(), tensor.is_neg()  # of what is in memory the values are made when they are read
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), marks


def _checked(name: str, entry: Any) -> Any:
    if isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry):
        return {key: _checked(f'{name}/{key}', part) for key, part in entry.items()}
    try:
        is_same = json.loads(json.dumps(entry)) == entry
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        raise SchemaMismatch(f'weight {name!r}: expected a tensor or what JSON can hold, got {type(entry).__name__}')
    return entry


def _array_of(name: str, tensor: torch.Tensor) -> np.ndarray:
    try:
        return tensor.numpy(force=True)  # which also resolves what is only marked as conjugate or negative
    except TypeError as e:
        raise SchemaMismatch(f'weight {name!r}: {tensor.dtype} is no type of numpy') from e
    except RuntimeError as e:  # of a subclass of tensors
        raise SchemaMismatch(f'weight {name!r}: a {type(tensor).__name__} cannot be stored: {e}') from e


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether no value of it is infinite in the type."""
    limit = torch.finfo(dtype).max
    if tensor.numel() == 0 or torch.finfo(tensor.dtype).max <= limit:
        return True
    low, high = tensor.aminmax()
    return -limit <= float(low) and float(high) <= limit


def _to_cpu(tensors: Dict[str, torch.Tensor], pinned: Dict[str, torch.Tensor]) -> None:
    """Copies of all tensors are on their way at once, through pinned memory."""
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type == 'cuda'}
    for name, tensor in tensors.items():
        if tensor.device.type == 'cuda':
            if name not in pinned or pinned[name].shape != tensor.shape or pinned[name].dtype != tensor.dtype:
                pinned[name] = host_buffer(tensor)
            tensors[name] = pinned[name].copy_(tensor, non_blocking=True)
        elif tensor.device.type != 'cpu':
            tensors[name] = tensor.cpu()
    for device in devices:
        torch.cuda.synchronize(device)  # Without an argument: the current one alone.


def _misfit(name: str, own: Any, array: np.ndarray, is_bfloat16: bool) -> Optional[str]:
    if not isinstance(own, torch.Tensor):
        return f'{name!r}: expected {type(own).__name__}, got an array'
    if tuple(own.shape) != array.shape:
        return f'{name!r}: expected shape {tuple(own.shape)}, got {array.shape}'
    is_float = is_bfloat16 or array.dtype.kind == 'f'
    if own.dtype.is_floating_point and is_float:
        return None
    theirs = 'bfloat16' if is_bfloat16 else str(array.dtype)
    return None if str(own.dtype) == f'torch.{theirs}' else f'{name!r}: expected {own.dtype}, got {theirs}'


class _Writable:
    """To torch all memory is writable, and it warns of numpy's that is not: this array says that it is."""

    def __init__(self, array: np.ndarray) -> None:
        self.owner = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, 'data': (interface['data'][0], False)}


def _tensor_of(array: np.ndarray, is_bfloat16: bool) -> torch.Tensor:
    """The array as a tensor, in place; never to be written to."""
    if array.size == 0:
        array = array.copy()
    tensor = torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def _point(model: torch.nn.Module, arrays: Mapping[str, np.ndarray], bfloat16: set) -> set:
    """Let parameters on the CPU be the arrays; returns their names."""
    done = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in arrays and parameter.device.type == 'cpu':
            # Of another type it is a copy, but a new one: the old memory may be a version that was read in place.
            parameter.data = _tensor_of(arrays[name], name in bfloat16).to(parameter.dtype)
            done.add(name)
    return done


def _set_other(target: Any, name: str, entry: Any) -> None:
    if isinstance(target, torch.nn.Module):
        target.get_submodule(name[: -len(_EXTRA)].rstrip('.')).set_extra_state(entry)
        return
    *path, last = name.split('/')
    for key in path:
        target = target[key]
    target[last] = entry
