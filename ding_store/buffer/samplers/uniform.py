"""The uniform sampler."""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.load import Kernels
from ding_store.buffer.samplers.base import Sampler, not_enough, private
from ding_store.buffer.table.rows import RowIndex


class Uniform(Sampler):
    """
    Overview:
        Samples every row with the same probability. O(size) for any length of the table.
    Arguments:
        - seed (:obj:`Optional[int]`): None draws from numpy's global generator, which ``set_pkg_seed`` seeds. A run is
          then as reproducible as in plain DI-engine. A number creates a separate generator.
    """

    def __init__(self, seed: Optional[int] = None) -> None:
        self._random = np.random.mtrand._rand if seed is None else np.random.RandomState(seed)

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        members = index.live_slots if sample_range is None else index.slots_by_age()[sample_range]
        if len(members) < (1 if replace else size):
            raise not_enough(size, len(members))
        return self.pick(members, size, replace, index.kernels)

    def generators(self) -> List[np.random.RandomState]:
        return private(self._random)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Uniform:
        """Return a sampler on numpy's global generator if this one uses it, else on a copy of this one's generator."""
        twin = memo[id(self)] = type(self)()
        if self._random is not twin._random:
            twin._random = copy.deepcopy(self._random, memo)
        return twin

    def pick(self, members: Array, size: int, replace: bool, kernels: Optional[Kernels]) -> Array:
        """Pick ``size`` of these slots in random order, int64. The caller checked that there are enough."""
        count = len(members)
        is_sparse = replace or size * 4 < count
        if kernels is not None and is_sparse and members.dtype == np.int32 and members.flags.c_contiguous:
            uniforms, slots = self._random.random_sample(size), np.empty(size, np.int64)
            if kernels.pick(uniforms, members, replace, slots):
                return slots
            return members[self._distinct(uniforms, count, replace)].astype(np.int64)
        return members[self.draw(count, size, replace)].astype(np.int64)

    def draw(self, num_items: int, size: int, replace: bool) -> Array:
        """Draw ``size`` of the numbers below ``num_items``, in random order."""
        if not replace and size * 4 >= num_items:
            return self._random.permutation(num_items)[:size]
        # This takes a fifth of the time of ``randint``. For any table, 53 bits are as good as uniform.
        return self._distinct(self._random.random_sample(size), num_items, replace)

    def _distinct(self, uniforms: Array, num_items: int, replace: bool) -> Array:
        """Scale these uniforms in [0, 1) to numbers below ``num_items``, and draw again for repeated ones."""
        size = len(uniforms)
        drawn: Array = (uniforms * num_items).astype(np.int64)
        while not replace and len(set(drawn.tolist())) < size:
            # Drawing again for repeats equals drawing one by one without putting back.
            first = np.sort(np.unique(drawn, return_index=True)[1])
            more = self._random.random_sample(size - len(first)) * num_items
            drawn = np.concatenate([drawn[first], more.astype(np.int64)])
        return drawn
