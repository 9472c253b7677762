"""A sampler that prefers new rows: the chance of a row falls by half with every ``half_life`` newer rows."""

from __future__ import annotations

import copy
import math
from typing import Any, Dict, List, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.samplers.base import Sampler, is_within, not_enough, private
from ding_store.buffer.table.rows import NO_ROWS, RowIndex
from ding_store.errors import ConfigError

#: The number of draws for rows that are gone or came twice, before all rows are weighed.
_ROUNDS = 4


class Fresh(Sampler):
    """
    Overview:
        Samples each row in proportion to ``2 ** (-age / half_life)``. The age of a row is the number of rows that were
        pushed after it. Batches have no importance weights.

        Without ``replace``, rows are drawn one after the other from those that are left. O(size) if ``half_life`` is
        well above the size and few rows were deleted. Otherwise O(rows).
    Arguments:
        - half_life (:obj:`float`): After so many newer rows, a row is half as likely. A number > 0.
        - seed (:obj:`Optional[int]`): None draws from numpy's global generator, as Uniform does.
    Raises:
        - ConfigError: ``half_life`` is not a finite number > 0.
    """

    def __init__(self, half_life: float, seed: Optional[int] = None) -> None:
        if not is_within(half_life, 0) or not 0 < half_life < math.inf:
            raise ConfigError(f'half_life ({half_life!r}) must be a finite number > 0')
        self.half_life = float(half_life)
        #: The logarithm of the ratio of the chances of a row and of the next older one.
        self._decay = math.log(2) / self.half_life
        self._random = np.random.mtrand._rand if seed is None else np.random.RandomState(seed)

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - NotEnoughData: There are fewer than ``size`` rows, or no rows with ``replace``.
        """
        count = index.count if sample_range is None else len(index.slots_by_age()[sample_range])
        if count < (1 if replace else size):
            raise not_enough(size, count)
        chosen = self._draw(index, size, replace) if sample_range is None else NO_ROWS
        if len(chosen) < size:
            slots = index.slots_by_age()[slice(None) if sample_range is None else sample_range].astype(np.intp)
            chosen = np.concatenate([chosen, self._pick(index, slots, chosen, size - len(chosen), replace)])
        return chosen

    def generators(self) -> List[np.random.RandomState]:
        return private(self._random)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Fresh:
        """Return a sampler on numpy's global generator if this one uses it, else on a copy of this one's generator."""
        twin = memo[id(self)] = type(self)(self.half_life)
        if self._random is not twin._random:
            twin._random = copy.deepcopy(self._random, memo)
        return twin

    def _draw(self, index: RowIndex, size: int, replace: bool) -> Array:
        """
        Draw row numbers, and leave out those that are gone. Return the slots of up to ``size`` rows, in the order of
        the draws. A row that comes again is left out as well, which equals drawing without putting back.
        """
        newest = index.next_row - 1
        num_ages = newest - int(index.row_of_slot[index.slots_by_age()[0]]) + 1
        # The share of the ages below ``num_ages`` in the geometric law.
        share = -math.expm1(-self._decay * num_ages)
        chosen: Array = np.empty(0, np.intp)
        for _ in range(_ROUNDS):
            uniforms = self._random.random_sample(size - len(chosen))
            ages = np.minimum(-np.log1p(-uniforms * share) / self._decay, num_ages - 1).astype(np.int64)
            slots, found = index.find(newest - ages)
            chosen = np.concatenate([chosen, slots[found].astype(np.intp)])
            if not replace:
                chosen = chosen[np.sort(np.unique(chosen, return_index=True)[1])]
            if len(chosen) == size:
                break
        return chosen

    def _pick(self, index: RowIndex, slots: Array, chosen: Array, size: int, replace: bool) -> Array:
        """Draw from these slots by the weights of their rows, without the ``chosen`` ones unless ``replace``."""
        if not replace:
            slots = slots[~np.isin(slots, chosen)]
        logarithms = (index.row_of_slot[slots] - index.next_row) * self._decay
        if replace:
            running = np.cumsum(np.exp(logarithms - logarithms.max()))
            places = np.searchsorted(running, self._random.random_sample(size) * running[-1], side='right')
            drawn: Array = slots[np.minimum(places, len(slots) - 1)]
            return drawn
        # The least of independent exponential times, with the weights as their rates, is a draw by weight. The next
        # ones are draws from the rest.
        times = np.log(self._random.standard_exponential(len(slots))) - logarithms
        first = np.argpartition(times, size - 1)[:size]
        picked: Array = slots[first[np.argsort(times[first])]]
        return picked
