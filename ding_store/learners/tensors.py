"""Gradients and parameters as the arrays of an entry or a value, and back."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from ding_store.compiled import FAR_BYTES, copy_each_past_caches, load_for
from ding_store.errors import ConfigError, SchemaMismatch

#: Types that floats may be rounded to when they are sent.
DTYPES = {'float16': torch.float16, 'bfloat16': torch.bfloat16}
Array = np.ndarray[Any, np.dtype[Any]]
Tensors = Sequence[Optional[torch.Tensor]]
#: Ends of an array's name: bfloat16 as its bits, which numpy has no type for, and sparse signs.
_BITS, _SIGNS = 'b', 's'
#: A sparse entry is ``index << 1 | is_negative`` in 32 bits.
MAX_SPARSE = 1 << 30


def check_dtype(dtype: Optional[str]) -> Optional[str]:
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f'dtype ({dtype!r}) must be None or one of {", ".join(DTYPES)}')
    return dtype


def to_arrays(tensors: Tensors, dtype: Optional[str] = None) -> Dict[str, Array]:
    """
    Overview:
        Return tensors as arrays, named by their places in the sequence. None is left out. Arrays share memory with
        dense tensors on the CPU.
    Arguments:
        - dtype (:obj:`Optional[str]`): Round floats to 'float16' or 'bfloat16'. A tensor with a value out of the type's
          range keeps its type.
    """
    arrays: Dict[str, Array] = {}
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        tensor = tensor.detach()
        if tensor.layout != torch.strided:  # the gradient of a sparse embedding
            tensor = tensor.to_dense()
        tensor = tensor.cpu()
        if dtype is not None and tensor.is_floating_point() and _fits(tensor, DTYPES[dtype]):
            tensor = tensor.to(DTYPES[dtype])
        if tensor.dtype == torch.bfloat16:
            arrays[f'{place}{_BITS}'] = tensor.contiguous().view(torch.int16).numpy()
        else:
            arrays[str(place)] = tensor.numpy()
    return arrays


def to_tensors(arrays: Mapping[str, Array], like: Sequence[torch.Tensor], threshold: float = 0.0) -> Tensors:
    """
    Overview:
        Return the tensors of ``to_arrays`` or ``to_signs``, each in its place. Dense ones have the arrays' memory and
        must not be written to.
    Arguments:
        - like (:obj:`Sequence[torch.Tensor]`): Tensors of the expected shapes.
        - threshold (:obj:`float`): Size of each entry of ``to_signs``.
    Raises:
        - SchemaMismatch: There are other places or shapes. The error names the first one.
    """
    tensors: List[Optional[torch.Tensor]] = [None] * len(like)
    for place, name, array in _placed(arrays, like):
        is_sparse = name.endswith(_SIGNS)
        tensors[place] = _from_signs(array, like[place], threshold) if is_sparse else _dense(name, array)
    return tensors


@torch.no_grad()
def load_arrays(targets: Sequence[torch.Tensor], arrays: Mapping[str, Array]) -> None:
    """
    Overview:
        Copy the arrays of ``to_arrays`` into the tensors at their places, large ones past the caches.
    Raises:
        - SchemaMismatch: See ``to_tensors``. Nothing was copied.
    """
    pairs: List[Tuple[Array, Array]] = []
    for place, name, array in list(_placed(arrays, targets)):
        target = targets[place].detach()
        own = target.numpy() if target.device.type == 'cpu' and target.dtype != torch.bfloat16 else None
        if own is not None and own.dtype == array.dtype and name.isdecimal():
            pairs.append((own, array))
        else:
            target.copy_(_dense(name, array))
    num_bytes = sum(target.nbytes for target, _ in pairs)
    load_for(num_bytes)
    if num_bytes >= FAR_BYTES:
        copy_each_past_caches(pairs)
    else:
        for target_array, source_array in pairs:
            np.copyto(target_array, source_array)


class Residuals:
    """
    Overview:
        The rest of gradients of which only entries beyond a threshold were sent. Each call adds the gradients to the
        residuals, returns +threshold or -threshold for each entry that is beyond it, and subtracts that. So everything
        sent and the residuals together are the sum of all gradients (Strom 2015, "Scalable distributed DNN training
        using commodity GPU cloud computing", section 3).
    Arguments:
        - threshold (:obj:`float`): In the unit of the gradients. With a power of two, subtracting it is exact.
    """

    def __init__(self, like: Sequence[torch.Tensor], threshold: float) -> None:
        if not threshold > 0:
            raise ConfigError(f'threshold ({threshold!r}) must be > 0')
        if max(tensor.numel() for tensor in like) >= MAX_SPARSE:
            raise ConfigError(f'threshold ({threshold!r}): a parameter has {MAX_SPARSE} entries or more. Leave it out.')
        self.threshold = threshold
        self.tensors = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in like]

    @torch.no_grad()
    def to_signs(self, gradients: Tensors) -> Dict[str, Array]:
        """Return the entries to send, one array of 32-bit integers per parameter: ``index << 1 | is_negative``."""
        arrays: Dict[str, Array] = {}
        for place, (residual, gradient) in enumerate(zip(self.tensors, gradients)):
            if gradient is not None:
                residual.add_(gradient.to_dense().cpu() if gradient.layout != torch.strided else gradient.cpu())
            flat = residual.view(-1)
            indices = (flat.abs() >= self.threshold).nonzero().view(-1)
            if len(indices):
                values = flat[indices]
                is_negative = values < 0
                flat[indices] = values - torch.where(is_negative, -self.threshold, self.threshold).to(values.dtype)
                arrays[f'{place}{_SIGNS}'] = (indices * 2 + is_negative).to(torch.int32).numpy()
        return arrays


def _placed(arrays: Mapping[str, Array], like: Sequence[torch.Tensor]) -> Iterator[Tuple[int, str, Array]]:
    """Yield place, name and array. Raise SchemaMismatch if there is no such place, or if it has another shape."""
    for name, array in arrays.items():
        digits = name.rstrip(_BITS + _SIGNS)
        place = int(digits) if digits.isdecimal() else len(like)
        if place >= len(like):
            raise SchemaMismatch(f'array {name!r}: there are {len(like)} parameters. Use the same model everywhere.')
        if array.shape != like[place].shape and not name.endswith(_SIGNS):
            raise SchemaMismatch(
                f'parameter {place}: expected shape {tuple(like[place].shape)}, got {array.shape}. '
                'Use the same model everywhere, and the same order of parameters in its optimizers.'
            )
        yield place, name, array


def _from_signs(signs: Array, like: torch.Tensor, threshold: float) -> torch.Tensor:
    coded = _tensor_of(signs).long()
    indices, is_negative = coded >> 1, (coded & 1).bool()
    if len(indices) and int(indices.max()) >= like.numel():
        raise SchemaMismatch(f'a sparse gradient has index {int(indices.max())} of {like.numel()} entries')
    dense = torch.zeros(like.numel(), dtype=like.dtype)
    dense[indices] = torch.where(is_negative, -threshold, threshold).to(like.dtype)
    return dense.view(like.shape)


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if all values of a tensor are finite in the type."""
    limit = torch.finfo(dtype).max
    if tensor.numel() == 0 or torch.finfo(tensor.dtype).max <= limit:
        return True
    low, high = tensor.aminmax()
    return -limit <= float(low) and float(high) <= limit


def _dense(name: str, array: Array) -> torch.Tensor:
    tensor = _tensor_of(array)
    return tensor.view(torch.bfloat16) if name.endswith(_BITS) else tensor


def _tensor_of(array: Array) -> torch.Tensor:
    return torch.from_numpy(array if array.size else array.copy())


with warnings.catch_warnings():
    # torch warns of the first read-only array in a process. Presenting each array as writable costs more than its sum.
    warnings.simplefilter('ignore')
    _tensor_of(np.frombuffer(b'1', np.uint8))
