"""The base class of samplers. It declares every hook that the buffer calls, and each does nothing by default."""

from __future__ import annotations

import math
import numbers
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Protocol, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import ConfigError, NotEnoughData, PriorityError

#: Receives the slots and the row numbers of new rows just before they become live.
Record = Callable[[Array, Array], None]


class StoredRows(Protocol):
    """The rows behind an index: what a sampler may read of them, and how it removes them."""

    def delete(self, rows: Array) -> None:
        """Delete rows, in all views. Rows that are gone are skipped. The caller holds no lock of the index."""

    def versions(self, name: str, slots: Array) -> Array:
        """Return a column or meta key of integers ``(n, steps)``. One step, unless rows are sequences."""


class DrawsAhead(Protocol):
    """An object that draws batches before they are delivered: a Prefetch."""

    def give_back(self) -> None:
        """Drop all batches that were drawn and not delivered, and call the sampler's ``returned``."""


class RowPriorities(Protocol):
    """The priorities that a sampler keeps, and what a buffer does with them."""

    #: The number of updates for rows that are gone.
    num_stale_updates: int

    def check(self, priority: Any, num_rows: int) -> Array:
        """
        Overview:
            Return priorities as an array ``(num_rows,)``.
        Raises:
            - PriorityError: One is not a finite number >= 0, or their number differs.
        """

    def of(self, rows: Array) -> Array:
        """Return the priorities ``(B,)`` of rows ``(B,)``. NaN for rows that are gone."""

    def update(self, rows: Array, priority: Any) -> None:
        """
        Overview:
            Set new priorities ``(B,)`` of rows ``(B,)``. Rows that are gone are skipped, and counted.
        Raises:
            - PriorityError: See ``check``. Nothing changed.
        """

    def insert(self, rows: Array, priority: Any) -> None:
        """Set the priorities of rows that were just pushed."""

    def recording(self, priority: Array) -> Optional[Record]:
        """Return what records the priorities of a push before its rows are live. None: nothing is in files."""


class Sampler:
    """
    Overview:
        Chooses the rows of each batch. A sampler overrides ``choose``, ``draw_sequences`` or both, and those of the
        other methods that it needs. All others do nothing. To follow the rows, for example with a value
        per row, derive a class from ``RowListener``, and call ``index.listen`` with its object in ``attach``.

        One sample calls, in this order: ``sampled_by`` and ``prepare``; ``choose`` and ``weights`` with the index
        locked, and again if a writer changed a chosen row; ``delivered``. With ``prefetch``, ``choose`` and ``weights``
        run for a batch that comes later, followed by ``drawn``. When its turn comes, ``may_deliver`` and ``delivered``
        are called for it. Batches that cannot be delivered any more go to ``returned``.

        ``copy.deepcopy`` makes a sampler for a copied buffer: with the same settings, without a table. What
        ``attach`` and ``persist_to`` gave becomes None in such a copy.
    """

    #: Held during each sample, if two samples must not overlap. None: they may.
    lock: Optional[ContextManager[Any]] = None

    # The table.

    def attach(self, index: RowIndex, rows: Optional[StoredRows] = None) -> None:
        """
        Overview:
            Sample the rows of this index from now on. Called before the first sample, and once per view.
        Raises:
            - ConfigError: The sampler belongs to another table already.
        """

    def persist_to(self, files: TableDirectory) -> None:
        """
        Overview:
            Continue from the state in these files, and record it there from now on. Called after ``attach`` for a
            buffer with a path. What is not recorded begins anew in the next process.
        """

    def take_over(self, other: Sampler) -> None:
        """Continue where another sampler is, of this table or of the table that this one copies."""
        if type(other) is type(self):
            self.load_state(other.state())

    # Samples.

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Overview:
            Return the slots of ``size`` live rows, integers ``(size,)``.
        Arguments:
            - replace (:obj:`bool`): Allow a row more than once.
            - sample_range (:obj:`Optional[slice]`): Choose only these rows, by age: the oldest is 0, the newest -1.
        Raises:
            - NotEnoughData: There are fewer than ``size`` rows. Nothing changed.
            - TypeError: The sampler has no such method, because it draws only sequences.
        """
        raise TypeError(
            f'the sampler {type(self).__name__} draws no single rows, because it has no method choose. Call '
            'sample_sequences, or sample a view with another sampler.'
        )

    def weights(self, slots: Array) -> Optional[Array]:
        """Return the importance weights ``(size,)`` of the last choice. None if all rows count the same."""
        return None

    def prepare(self) -> None:
        """Get ready for a sample, without a lock of the table: for example, delete rows that are too old."""

    def delivered(self, rows: Array) -> Optional[Array]:
        """Count rows ``(size,)`` that the sampler chose and the caller gets. Return those that must leave."""
        return None

    def used(self, rows: Array) -> Optional[Array]:
        """
        Count rows of groups, episodes or sequences, which the sampler did not choose. Return those that must leave.
        Sequences that share rows count in ``start_uses`` instead.
        """
        return None

    def sampled_by(self, ahead: Optional[DrawsAhead]) -> None:
        """
        Note which Prefetch, if any, draws ahead for the next sample. A sampler that gives each row out in order, such
        as Fifo, calls ``give_back`` of the previous Prefetch if it is another one.
        """

    def drawn(self, rows: Array) -> None:
        """Note that these chosen rows are drawn ahead. ``delivered`` or ``returned`` follows."""

    def may_deliver(self, rows: Array) -> bool:
        """Return whether live rows that were drawn ahead may still be delivered."""
        return True

    def returned(self, num_batches: int) -> None:
        """Cancel all batches that were drawn ahead, and were not delivered."""

    def num_left(self) -> Optional[int]:
        """Return how many rows can be sampled now. None: all rows of the table."""
        return None

    @property
    def max_times(self) -> Optional[int]:
        """The number of times that a row comes at most. None: any number."""
        return None

    # Sequences.

    @property
    def sequence_sampler(self) -> Optional[Sampler]:
        """The sampler that draws the starts of sequences by priority: this one or one inside it. None: uniformly."""
        return None

    def draw_sequences(self, kind: Any, size: int, replace: bool) -> Tuple[Array, Array]:
        """Draw starts ``(size,)`` of a SequenceKind, and the slots of their sequences ``(length, size)``."""
        raise TypeError(
            f'the sampler {type(self).__name__} draws no sequences, because it has no method draw_sequences.'
        )

    def start_uses(self) -> Any:
        """Return the UseCounts of sequences that share rows, by each sequence's first row. None: without a limit."""
        return None

    # Priorities.

    @property
    def priorities(self) -> Optional[RowPriorities]:
        """The priorities of rows, which the buffer's ``update_priorities`` sets. None: rows have none."""
        return None

    # State.

    def state(self) -> Dict[str, Array]:
        """Return all state that draws depend on, for a table with the same rows."""
        return {}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Restore a ``state`` of a table with the same rows."""

    def generators(self) -> List[np.random.RandomState]:
        """Return the private random generators of this sampler and of those inside it, from the outside in."""
        return []


def priorities_of(sampler: Sampler) -> RowPriorities:
    """
    Overview:
        Return a sampler's priorities.
    Raises:
        - PriorityError: It has none.
    """
    priorities = sampler.priorities
    if priorities is None:
        raise PriorityError(
            f'the sampler {type(sampler).__name__} has no priorities. Create the buffer with '
            'StoreBuffer(size, sampler=Prioritized()).'
        )
    return priorities


def private(generator: np.random.RandomState) -> List[np.random.RandomState]:
    """Return a generator in a list, or an empty list for numpy's global one."""
    return [] if generator is np.random.mtrand._rand else [generator]


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
    if not isinstance(sampler, Sampler):
        raise ConfigError(
            f'sampler ({sampler!r}) must be a sampler, such as Prioritized(). Derive your own from '
            'ding_store.buffer.Sampler.'
        )


def is_within(value: Any, least: float, most: float = math.inf) -> bool:
    """Return whether this is a number in the range."""
    return isinstance(value, numbers.Real) and least <= float(value) <= most
