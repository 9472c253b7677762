"""What to read next. A sampler chooses rows and knows nothing of payloads."""

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
        Chooses rows of a table. Called with the table's index locked, and again for a choice that raced with a writer.
    """

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Overview:
            Slots of ``size`` live rows.
        Arguments:
            - replace (:obj:`bool`): Whether a row may be chosen more than once.
            - sample_range (:obj:`Optional[slice]`): Only these rows, counted by age; the oldest is 0, the newest -1.
        Raises:
            - NotEnoughData: There are fewer rows than that; nothing changed.
        """

    def attach(self, index: RowIndex) -> None:
        """Called once, with the index of the table that will be sampled."""

    def weigh(self, slots: Array) -> Optional[Array]:
        """Importance weights ``(B,)`` of what was just chosen; None where all count the same."""


@runtime_checkable
class PrioritySampler(Sampler, Protocol):
    """
    Overview:
        A sampler with priorities, which outlive neither their rows nor, unless ``state`` is saved, their process.
    """

    @property
    def num_stale_updates(self) -> int:
        """How many updates were for rows that are gone."""

    def update(self, rows: Array, priority: Any) -> None:
        """
        Overview:
            New priorities ``(B,)`` of rows ``(B,)``; rows that are gone are passed over.
        Raises:
            - PriorityError: A priority is no finite number >= 0, or there is not one per row; nothing changed.
        """

    def insert(self, rows: Array, priority: Any) -> None:
        """As ``update``, for rows that were just pushed."""

    def check(self, priority: Any, num_rows: int) -> Array:
        """The priorities as an array; raises what ``update`` would."""

    def state(self) -> Dict[str, Array]:
        """Everything that draws depend on."""

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Go on from a ``state`` of a table with the same rows."""


class Uniform:
    """
    Overview:
        Every row with the same probability; O(size) whatever the table's length.
    Arguments:
        - seed (:obj:`Optional[int]`): None draws from numpy's global generator, which ``set_pkg_seed`` seeds, so that a
          run is as reproducible as it is with stock buffers; a number makes a generator of this sampler's own.
    """

    def __init__(self, seed: Optional[int] = None) -> None:
        self._random = np.random.mtrand._rand if seed is None else np.random.RandomState(seed)

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        members = index.live_slots if sample_range is None else index.slots_by_age()[sample_range]
        if len(members) < (1 if replace else size):
            raise not_enough(size, len(members))
        return self.pick(members, size, replace, index.kernels)

    def attach(self, index: RowIndex) -> None:
        """Nothing is kept per row."""

    def weigh(self, slots: Array) -> Optional[Array]:
        return None

    def __deepcopy__(self, memo: Dict[int, Any]) -> Uniform:
        """One that follows the same generator, where that is numpy's, or a copy of this one's own."""
        twin = memo[id(self)] = type(self)()
        if self._random is not twin._random:
            twin._random = copy.deepcopy(self._random, memo)
        return twin

    def pick(self, members: Array, size: int, replace: bool, kernels: Optional[Kernels]) -> Array:
        """``size`` of these slots, of which there are enough, in random order, int64."""
        count = len(members)
        is_sparse = replace or size * 4 < count
        if kernels is not None and is_sparse and members.dtype == np.int32 and members.flags.c_contiguous:
            uniforms, slots = self._random.random_sample(size), np.empty(size, np.int64)
            if kernels.pick(uniforms, members, replace, slots):
                return slots
            return members[self._distinct(uniforms, count, replace)].astype(np.int64)
        return members[self.draw(count, size, replace)].astype(np.int64)

    def draw(self, num_items: int, size: int, replace: bool) -> Array:
        """``size`` of the numbers below ``num_items``, in random order."""
        if not replace and size * 4 >= num_items:
            return self._random.permutation(num_items)[:size]
        # A fifth of the time of ``randint``; 53 bits are as good as uniform for any table.
        return self._distinct(self._random.random_sample(size), num_items, replace)

    def _distinct(self, uniforms: Array, num_items: int, replace: bool) -> Array:
        """The numbers below ``num_items`` that these in [0, 1) stand for, and others for those seen before."""
        size = len(uniforms)
        drawn: Array = (uniforms * num_items).astype(np.int64)
        while not replace and len(set(drawn.tolist())) < size:
            # Drawn again: the same as drawing one by one without putting back.
            first = np.sort(np.unique(drawn, return_index=True)[1])
            more = self._random.random_sample(size - len(first)) * num_items
            drawn = np.concatenate([drawn[first], more.astype(np.int64)])
        return drawn


def not_enough(size: int, count: int, what: str = 'records') -> NotEnoughData:
    """The shortage, in the words that DI-engine's buffers use."""
    return NotEnoughData(f'There are less than {size} {what} in buffer({count})')


def check_is_sampler(sampler: Any) -> None:
    """
    Overview:
        Whether this is a sampler.
    Raises:
        - ConfigError: It is none.
    """
    if isinstance(sampler, type) or not isinstance(sampler, Sampler):
        raise ConfigError(f'sampler ({sampler!r}) must be a sampler, such as Prioritized()')


def is_within(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether it is a number, and in this range."""
    return isinstance(value, numbers.Real) and least <= float(value) <= most


def generators_of(sampler: Any) -> List[np.random.RandomState]:
    """The random generators that a sampler, and those that it limits or wraps, have of their own, in a fixed order."""
    found, each = [], sampler
    while each is not None:
        generator = getattr(each, '_random', None)
        if isinstance(generator, np.random.RandomState) and generator is not np.random.mtrand._rand:
            found.append(generator)
        each = getattr(each, 'sampler', None)
    return found
