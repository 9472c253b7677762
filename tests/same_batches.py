"""An equality of collated batches: containers, keys, dtypes, shapes and values."""

from typing import Any

import numpy as np
import torch


def is_same(one: Any, other: Any) -> bool:
    """Whether two batches train a policy alike. A tuple equals a list, and a tensor the list of its parts never."""
    if isinstance(one, dict) or isinstance(other, dict):
        both = isinstance(one, dict) and isinstance(other, dict) and set(one) == set(other)
        return both and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) or isinstance(other, (list, tuple)):
        both = isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other)
        return both and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)
