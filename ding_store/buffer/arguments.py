"""Checks of arguments."""

from __future__ import annotations

import operator
from typing import Any, Type

import numpy as np
import torch

from ding_store.errors import ConfigError


def integer(name: str, value: Any, least: int, error: Type[Exception] = ConfigError) -> int:
    """
    Overview:
        Convert an integer of Python or numpy, or a tensor without axes, to Python's int.
    Raises:
        - ConfigError: It is not an integer, or is less than ``least``. Calls that sample pass ``error=TypeError``:
          DI-engine's fetcher takes a ConfigError, which is a ValueError, for a lack of data.
    """
    is_bool = isinstance(value, (bool, np.bool_)) or getattr(value, 'dtype', None) is torch.bool
    try:
        # ``operator.index`` accepts a tensor of one item with any number of axes.
        if not is_bool and not getattr(value, 'ndim', 0) and operator.index(value) >= least:
            return operator.index(value)
    except TypeError:
        pass
    raise error(f'{name} ({value!r}) must be an integer >= {least}')


def check_ragged(names: Any) -> None:
    """Raise ConfigError unless these are names of leaves, or 'all'."""
    is_name = isinstance(names, str)
    if (is_name and names != 'all') or not (is_name or all(isinstance(name, str) for name in names)):
        raise ConfigError(f"ragged ({names!r}) must be a tuple of paths of leaves, such as ('obs/units',), or 'all'")
