"""Arguments that are looked at before anything is done with them."""

from __future__ import annotations

import operator
from typing import Any, Type

import numpy as np
import torch

from ding_store.errors import ConfigError


def integer(name: str, value: Any, least: int, error: Type[Exception] = ConfigError) -> int:
    """
    Overview:
        An integer of Python, numpy or a tensor without axes, as Python's.
    Raises:
        - ConfigError: It is none, or less than ``least``. Where a buffer samples, ``error`` is TypeError: a ConfigError
          is a ValueError, which DI-engine's fetcher takes for a shortage of data.
    """
    is_bool = isinstance(value, (bool, np.bool_)) or getattr(value, 'dtype', None) is torch.bool
    try:
        # Tensors of one item pass for indices whatever their axes.
        if not is_bool and not getattr(value, 'ndim', 0) and operator.index(value) >= least:
            return operator.index(value)
    except TypeError:
        pass
    raise error(f'{name} ({value!r}) must be an integer >= {least}')
