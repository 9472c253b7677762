"""The samplers' interface. A sampler chooses rows and never reads payloads."""

from __future__ import annotations

import math
import numbers
from typing import Any, Dict, List, Mapping, Optional, Protocol, runtime_checkable

import numpy as np

from ding_store.buffer.array_types import Array
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
