"""The dtypes of leaves, and their conversion between tensors and arrays."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Tuple

import numpy as np
import torch

Shape = Tuple[int, ...]

#: A leaf in Python: a torch tensor, a numpy array, a numpy scalar, or a Python number.
LEAF_KINDS = ('tensor', 'array', 'scalar', 'bool', 'int', 'float')

#: Other subclasses of ndarray would lose what makes them special, such as a mask or a unit.
PLAIN_ARRAYS = (np.ndarray, np.memmap)

PYTHON_DTYPES = {'bool': 'bool', 'int': 'int64', 'float': 'float64'}


class TensorDtype(NamedTuple):
    """numpy's storage of a torch dtype: the same dtype, or the bits of ``carrier`` if numpy has no such dtype."""

    torch: torch.dtype
    numpy: np.dtype
    carrier: Optional[torch.dtype] = None


def _tensor_dtypes() -> Dict[str, TensorDtype]:
    plain = 'bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128'
    found = {name: TensorDtype(getattr(torch, name), np.dtype(name)) for name in plain.split() if hasattr(torch, name)}
    # The carrier is signed because older torch has no uint16. The numpy dtype is unsigned.
    found['bfloat16'] = TensorDtype(torch.bfloat16, np.dtype('uint16'), torch.int16)
    for name in ('float8_e4m3fn', 'float8_e4m3fnuz', 'float8_e5m2', 'float8_e5m2fnuz'):
        if hasattr(torch, name):
            found[name] = TensorDtype(getattr(torch, name), np.dtype('uint8'), torch.uint8)
    return found


#: Logical dtype, as named in a schema -> its storage.
TENSOR_DTYPES = _tensor_dtypes()

#: torch.dtype -> its name in a schema.
TENSOR_NAMES = {stored.torch: name for name, stored in TENSOR_DTYPES.items()}


def as_array(tensor: torch.Tensor, stored: TensorDtype) -> np.ndarray:
    """
    Overview:
        Return a tensor as the array that its column holds. Shares memory if possible: not for tensors on a GPU, or with
        delayed conjugation or negation.
    """
    if tensor.requires_grad or tensor.device.type != 'cpu' or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if stored.carrier is not None:
        return tensor.view(stored.carrier).numpy().view(stored.numpy)
    return tensor.numpy()


def as_tensor(array: np.ndarray, stored: TensorDtype) -> torch.Tensor:
    """Return a column, or a part of one, as the tensor that it represents. Shares its memory."""
    if stored.carrier is None:
        return torch.from_numpy(array)
    signed = np.int16 if stored.carrier is torch.int16 else np.uint8
    return torch.from_numpy(array.view(signed)).view(stored.torch)
