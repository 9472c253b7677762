"""Conversion of policy weights: a state dict becomes the arrays of one value, and a value is loaded into a model."""

from __future__ import annotations

import json
from typing import Any, Collection, Container, Dict, Iterable, Iterator, Mapping, MutableMapping, Optional, Tuple, Union

import numpy as np
import torch

from ding_store.checkpoint.snapshot import host_buffer
from ding_store.compiled import FAR_BYTES, copy_each_past_caches, load_for
from ding_store.errors import ConfigError, SchemaMismatch
from ding_store.storage.base import Value

#: Types that floats may be rounded to when they are published.
DTYPES = {'float16': torch.float16, 'bfloat16': torch.bfloat16}
#: Prefixes that torch.compile and DistributedDataParallel put before names, of the model or of a part of it.
_COMPILED, _DISTRIBUTED = '_orig_mod.', 'module.'
#: How many differences between weights and a model an error names.
_MAX_NAMED = 10
#: Fields of a header that describe the arrays, and their defaults.
_FIELDS: Dict[str, Any] = {'shared': {}, 'others': {}, 'bfloat16': []}
_EXTRA = '_extra_state'  # torch's name for a module's entry of any kind, set by the module's ``set_extra_state``


def state_to_arrays(
    state: Mapping[str, Any],
    dtype: Optional[str] = None,
    pinned: Optional[Dict[str, torch.Tensor]] = None,
    exact: Container[str] = (),
) -> Tuple[Dict[str, Any], Dict[str, np.ndarray]]:
    """
    Overview:
        Return a state dict as a header and arrays. The arrays share memory with tensors on the CPU. Nested dicts with
        tensors become names with ``/``. Tensors with the same memory become one array. Other entries go into the
        header. numpy has no bfloat16, so its bits travel as int16.
    Arguments:
        - dtype (:obj:`Optional[str]`): Round floats to 'float16' or 'bfloat16'. None: do not round. A tensor with a
          value out of the type's range keeps its type, and is named in ``header['not_rounded']``.
        - pinned (:obj:`Optional[Dict]`): Pinned memory that GPU tensors are copied to. Pass the same dict to each call.
        - exact (:obj:`Container`): Names of tensors that are not rounded.
    Raises:
        - SchemaMismatch: An entry is neither a dense tensor of numbers nor storable as JSON, or a key is no string or
          contains ``/``. The error names it.
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
            raise SchemaMismatch(f'weight {name!r} has no shape yet. Run the lazy module once before you publish it.')
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
    """Return published name -> name in the model, if they differ by wrappers' prefixes only. Else return {}."""
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
    """Return a short text if all names differ by one prefix only. Else return ''."""
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
        Load a published version into a model's parameters and buffers, or into a state dict, in place. Load all of it,
        or nothing if it does not fit. Float types may differ from the published ones.
    Arguments:
        - in_place (:obj:`bool`): Let the model's parameters be the published arrays, without a copy. All processes of a
          host then share the memory. It is read-only, and *a write to it ends the process*, so use it for inference
          only. Buffers are copied as usual, and so are parameters of other types or on a GPU.
    Raises:
        - SchemaMismatch: The error names entries that are missing, unexpected, or of another shape or kind. The model
          is unchanged.
    """
    is_module = isinstance(target, torch.nn.Module)
    own = dict(_leaves(target.state_dict() if isinstance(target, torch.nn.Module) else target))
    # A module's method sets its extra state, so only the module can check it.
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
        if isinstance(entry, torch.Tensor):  # first, because a failing check for Mapping takes several times as long
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
    marks = tensor.is_conj(), tensor.is_neg()  # such a tensor computes its values from the memory when it is read
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
        return tensor.numpy(force=True)  # force also resolves tensors that are only marked as conjugate or negative
    except TypeError as e:
        raise SchemaMismatch(f'weight {name!r}: numpy has no type for {tensor.dtype}') from e
    except RuntimeError as e:  # raised by subclasses of Tensor
        raise SchemaMismatch(f'weight {name!r}: a {type(tensor).__name__} cannot be stored: {e}') from e


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if all values of a tensor are finite in the type."""
    limit = torch.finfo(dtype).max
    if tensor.numel() == 0 or torch.finfo(tensor.dtype).max <= limit:
        return True
    low, high = tensor.aminmax()
    return -limit <= float(low) and float(high) <= limit


def _to_cpu(tensors: Dict[str, torch.Tensor], pinned: Dict[str, torch.Tensor]) -> None:
    """Copy all tensors to the CPU, those of GPUs at the same time and through pinned memory."""
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type == 'cuda'}
    for name, tensor in tensors.items():
        if tensor.device.type == 'cuda':
            if name not in pinned or pinned[name].shape != tensor.shape or pinned[name].dtype != tensor.dtype:
                pinned[name] = host_buffer(tensor)
            tensors[name] = pinned[name].copy_(tensor, non_blocking=True)
        elif tensor.device.type != 'cpu':
            tensors[name] = tensor.cpu()
    for device in devices:
        torch.cuda.synchronize(device)  # without an argument, it waits for the current device only


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
    """Presents a read-only array as writable, because torch would warn of it: it has no read-only tensors."""

    def __init__(self, array: np.ndarray) -> None:
        self.owner = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, 'data': (interface['data'][0], False)}


def _tensor_of(array: np.ndarray, is_bfloat16: bool) -> torch.Tensor:
    """Return a tensor with the array's memory, which must not be written to."""
    if array.size == 0:
        array = array.copy()
    tensor = torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def _point(model: torch.nn.Module, arrays: Mapping[str, np.ndarray], bfloat16: set) -> set:
    """Let parameters on the CPU use the arrays' memory, and return their names."""
    done = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in arrays and parameter.device.type == 'cpu':
            # With another type, this makes a new copy: the old memory may be a shared version, which is read-only.
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
