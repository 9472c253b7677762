"""Names for numpy's types."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

#: An array of any dtype; comments and docstrings say which.
Array = npt.NDArray[Any]
