"""The samplers' interface, and the uniform sampler. A sampler chooses rows and never reads payloads."""

from __future__ import annotations

import copy
import math
import numbers
from typing import Any, Dict, List, Mapping, Optional, Protocol, runtime_checkable

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.load import Kernels
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import ConfigError, NotEnoughData


@runtime_checkable
class Sampler(Protocol):
    """
    Overview:
        Chooses rows of a table. The table calls it with its index locked, and again if a writer changed a chosen row.
    """

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Overview:
            Return the slots of ``size`` live rows.
        Arguments:
            - replace (:obj:`bool`): Allow a row more than once.
            - sample_range (:obj:`Optional[slice]`): Choose only these rows, by age: the oldest is 0, the newest -1.
        Raises:
            - NotEnoughData: There are fewer than ``size`` rows. Nothing changed.
        """

    def attach(self, index: RowIndex) -> None:
        """Use the index of this table. Called once, before the first sample."""

    def weigh(self, slots: Array) -> Optional[Array]:
        """Return the importance weights ``(B,)`` of the last choice. None if all rows count the same."""


@runtime_checkable
class PrioritySampler(Sampler, Protocol):
    """
    Overview:
        A sampler with priorities. They end with their rows, and with the process unless ``state`` is saved.
    """

    @property
    def num_stale_updates(self) -> int:
        """The number of updates for rows that are gone."""

    def update(self, rows: Array, priority: Any) -> None:
        """
        Overview:
            Set new priorities ``(B,)`` of rows ``(B,)``. Rows that are gone are skipped.
        Raises:
            - PriorityError: A priority is not a finite number >= 0, or their number differs from the rows'. Nothing
              changed.
        """

    def insert(self, rows: Array, priority: Any) -> None:
        """Set the priorities of rows that were just pushed."""

    def check(self, priority: Any, num_rows: int) -> Array:
        """Return the priorities as an array. Raise the errors of ``update``."""

    def state(self) -> Dict[str, Array]:
        """Return all state that draws depend on."""

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Restore a ``state`` of a table with the same rows."""


class Uniform:
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

    def attach(self, index: RowIndex) -> None:
        """Do nothing: this sampler keeps no state per row."""

    def weigh(self, slots: Array) -> Optional[Array]:
        return None

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


def not_enough(size: int, count: int, what: str = 'records') -> NotEnoughData:
    """Return the error for a lack of data, in the words of DI-engine's buffers."""
    return NotEnoughData(f'There are less than {size} {what} in buffer({count})')


def check_is_sampler(sampler: Any) -> None:
    """
    Overview:
        Check that this is a sampler.
    Raises:
        - ConfigError: It is not a sampler.
    """
    if isinstance(sampler, type) or not isinstance(sampler, Sampler):
        raise ConfigError(f'sampler ({sampler!r}) must be a sampler, such as Prioritized()')


def is_within(value: Any, least: float, most: float = math.inf) -> bool:
    """Return whether this is a number in the range."""
    return isinstance(value, numbers.Real) and least <= float(value) <= most


def generators_of(sampler: Any) -> List[np.random.RandomState]:
    """Return the private random generators of a sampler and of the samplers inside it, from the outside in."""
    found, each = [], sampler
    while each is not None:
        generator = getattr(each, '_random', None)
        if isinstance(generator, np.random.RandomState) and generator is not np.random.mtrand._rand:
            found.append(generator)
        each = getattr(each, 'sampler', None)
    return found
