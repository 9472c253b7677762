"""What a buffer's fast samples are."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional

import treetensor.torch as ttorch

from ding_store.buffer.array_types import Array


class Batch(NamedTuple):
    """
    Overview:
        ``data``: one collated tree, leaves ``(B, ...)``, valid while anything of it is referenced. ``rows``: row
        numbers ``(B,)``. ``elements()``: the B elements, views of the same memory. ``weights``: importance weights
        ``(B,)``, None for uniform samples.

        Of sequences: leaves ``(T, B, ...)``, rows ``(T, B)``, and B lists of T elements.
    """

    data: ttorch.Tensor
    rows: Array
    elements: Callable[[], List[Any]]
    weights: Optional[Array] = None
