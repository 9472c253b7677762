"""The result type of a buffer's batch samples."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional

import treetensor.torch as ttorch

from ding_store.buffer.array_types import Array


class Batch(NamedTuple):
    """
    Overview:
        A sample as one batch. ``data``: a collated tree with leaves ``(B, ...)``, valid while any part of it is
        referenced. ``rows``: row numbers ``(B,)``. ``elements()``: the B elements, as views of the same memory.
        ``weights``: importance weights ``(B,)``, None for uniform samples.

        A batch of sequences has leaves ``(T, B, ...)``, rows ``(T, B)``, and B lists of T elements.
    """

    data: ttorch.Tensor
    rows: Array
    elements: Callable[[], List[Any]]
    weights: Optional[Array] = None
