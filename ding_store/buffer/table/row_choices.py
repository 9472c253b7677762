"""Choices of rows without a sampler: by index, by age, by group. They are called with the index locked."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, List, Optional, Protocol, Sequence, Tuple, TypeVar

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.samplers.base import Sampler, not_enough
from ding_store.buffer.sequences.groups import Groups
from ding_store.buffer.table.rows import NO_ROWS, RowIndex
from ding_store.errors import RowGone

#: Receives the number of items, how many to draw, and whether with replacement. Returns positions.
Draw = Callable[[int, int, bool], Array]

T = TypeVar('T')


class Limiter(Protocol):
    """Admits samples, like ``RateLimiter``."""

    def sampling(self, num_rows: int) -> ContextManager[None]:
        """Return a context to sample ``num_rows`` in. If an exception leaves the context, the sample is not counted."""


def to_row(index: Any) -> int:
    """Return the row number of an index string, or -1 for a string of another origin. No row has number -1."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return -1


def by_indices(indices: Sequence[str], sample_range: Optional[slice] = None) -> Callable[[RowIndex], Array]:
    """
    Overview:
        Choose the slots of these rows, in this order, with repetitions.
    Raises (when called):
        - RowGone: A row is not in the table, or not in ``sample_range``.
    """
    rows = np.array([to_row(index) for index in indices], np.int64)

    def choose(index: RowIndex) -> Array:
        slots, found = index.find(rows)
        if sample_range is not None:
            found &= np.isin(slots, index.slots_by_age()[sample_range])
        if not found.all():
            raise RowGone(f'index {indices[int(np.argmin(found))]!r} is not in the buffer')
        return slots

    return choose


def by_rows(rows: Array) -> Callable[[RowIndex], Array]:
    """
    Overview:
        Choose the slots of these row numbers, in this order.
    Raises (when called):
        - RowGone: A row is not in the table.
    """
    wanted = as_rows(rows)

    def choose(index: RowIndex) -> Array:
        slots, found = index.find(wanted)
        if not found.all():
            gone = wanted[~found][0]
            raise RowGone(f'row {gone} is not in the table: it was evicted or deleted, or never existed')
        return slots

    return choose


def as_rows(rows: Array) -> Array:
    """Convert row numbers to int64 of shape ``(B,)``. Raises TypeError for anything else."""
    rows = np.asarray(rows)
    if rows.ndim != 1 or (rows.dtype.kind not in 'iu' and rows.size):
        raise TypeError(f'rows must be integers of shape (B,), got {rows.dtype} of shape {rows.shape}')
    return rows.astype(np.int64, copy=False)


def by_live_rows(rows: Array) -> Callable[[RowIndex], Array]:
    """Choose the slots of those rows that are still in the table, in the given order."""

    def choose(index: RowIndex) -> Array:
        slots, found = index.find(rows)
        return slots[found]

    return choose


def by_age(position: int) -> Callable[[RowIndex], Array]:
    """
    Overview:
        Choose the slot of the row at a position in the order of age: 0 is the oldest, -1 the newest.
    Raises (when called):
        - IndexError: There are too few rows.
    """

    def choose(index: RowIndex) -> Array:
        count = index.count
        if not -count <= position < count:
            raise IndexError(f'index {position} is out of range of a buffer of {count}')
        place = position % count
        return index.slots_by_age()[place : place + 1].astype(np.intp)

    return choose


class Sampled:
    """A choice of rows by a sampler. ``weights`` are those of the last choice."""

    __slots__ = ('weights', 'delivered', '_sampler', '_size', '_replace', '_range', '_rows')

    def __init__(self, sampler: Sampler, size: int, replace: bool, sample_range: Optional[slice]) -> None:
        self._sampler, self._size, self._replace, self._range = sampler, size, replace, sample_range
        self.weights: Optional[Array] = None
        #: Hook of samplers that track which of their rows were read, see ``deliver``.
        self.delivered: Optional[Callable[[Array], Optional[Array]]] = getattr(sampler, 'delivered', None)
        self._rows = NO_ROWS

    def __call__(self, index: RowIndex) -> Array:
        slots = self._sampler.choose(index, self._size, self._replace, self._range)
        self.weights = self._sampler.weigh(slots)
        if self.delivered is not None:
            self._rows = index.row_of_slot[slots]
        return slots

    @property
    def key(self) -> Tuple[Any, ...]:
        """A key that is equal for equal kinds of choices."""
        limits = self._range and (self._range.start, self._range.stop, self._range.step)
        return id(self._sampler), self._size, self._replace, limits

    def again(self) -> Sampled:
        """Return another choice of the same kind."""
        return Sampled(self._sampler, self._size, self._replace, self._range)

    def adopt(self, other: Sampled) -> None:
        """Take over the result of another choice."""
        self.weights, self._rows = other.weights, other._rows

    def deliver(
        self,
        read: Callable[[Sampled], T],
        delete: Callable[[Array], None],
        limiter: Optional[Limiter],
        ahead: Optional[Any] = None,
    ) -> T:
        """
        Overview:
            Read the chosen rows with ``read``. If the sampler tracks which rows were read, such as a queue or one with
            limits, report the rows to it. Its lock is held meanwhile. A limiter must admit the sample first. ``ahead``
            is the object that draws in advance.
        """
        delivered = self.delivered
        if delivered is None and limiter is None:
            return read(self)
        with limiter.sampling(self._size) if limiter is not None else nullcontext():
            with getattr(self._sampler, 'lock', nullcontext()):
                if hasattr(self._sampler, 'sampled_by'):
                    self._sampler.sampled_by(ahead)
                if hasattr(self._sampler, 'prepare'):
                    self._sampler.prepare()
                result = read(self)
                leaving = delivered(self._rows) if delivered is not None else None
                if leaving is not None and len(leaving):
                    delete(leaving)
                return result


class GroupChoice:
    """
    Overview:
        A choice of rows of groups: whole groups, or ``unroll_len`` consecutive rows of each. Every group is equally
        likely, and within a group every start. O(rows) per choice.
    Arguments:
        - groups (:obj:`Groups`): Maps rows to groups.
        - draw (:obj:`Draw`): Draws groups and starts.
        - size (:obj:`int`): The number of groups.
        - unroll_len (:obj:`Optional[int]`): Groups with fewer rows are left out. None chooses whole groups.
        - sliced (:obj:`bool`): If true, starts are multiples of ``unroll_len``, and the last slice ends with the group.
    Raises (when called):
        - NotEnoughData: There are fewer groups than ``size``.
    """

    def __init__(
        self,
        groups: Groups,
        draw: Draw,
        size: int,
        replace: bool = False,
        unroll_len: Optional[int] = None,
        sliced: bool = False,
        sample_range: Optional[slice] = None,
    ) -> None:
        self._groups, self._draw, self._size, self._replace = groups, draw, size, replace
        self._unroll_len, self._sliced, self._range = unroll_len, sliced, sample_range
        #: Number of rows per group in the last choice.
        self.lengths: List[int] = []

    def __call__(self, index: RowIndex) -> Array:
        slots = index.slots_by_age()[self._range or slice(None)].astype(np.intp)
        slots = slots[self._groups.codes[slots] != Groups.NONE]
        codes = self._groups.codes[slots]
        chosen = self._choose_groups(codes)
        # Loop only over the rows of the chosen groups.
        slots = slots[np.isin(codes, chosen)]
        codes = self._groups.codes[slots]
        parts = [self._part_of(slots[codes == code]) for code in chosen.tolist()]
        self.lengths = [len(part) for part in parts]
        return np.concatenate(parts)

    def _choose_groups(self, codes: Array) -> Array:
        names, counts = np.unique(codes, return_counts=True)
        eligible = names[counts >= (self._unroll_len or 1)]
        if len(eligible) < (1 if self._replace else self._size):
            raise not_enough(self._size, len(eligible), 'records/groups')
        return eligible[self._draw(len(eligible), self._size, self._replace)]

    def _part_of(self, slots: Array) -> Array:
        length = self._unroll_len
        if length is None:
            return slots
        start = self._start(len(slots), length)
        return slots[start : start + length]

    def _start(self, num_rows: int, length: int) -> int:
        if not self._sliced:
            return int(self._draw(num_rows - length + 1, 1, True)[0])
        start = int(self._draw(num_rows, 1, True)[0]) // length * length
        return min(start, num_rows - length)


def split(items: List[Any], lengths: Sequence[int]) -> List[List[Any]]:
    """Cut a list into lists of these lengths."""
    ends = np.cumsum(lengths).tolist()
    return [items[end - length : end] for end, length in zip(ends, lengths)]


def check_sample_arguments(
    size: Optional[int],
    indices: Optional[Sequence[str]],
    groupby: Optional[str],
    unroll_len: Optional[int],
    sample_range: Optional[slice],
) -> Tuple[int, Optional[List[str]]]:
    """
    Overview:
        Check the arguments of a sample. Return the number of rows, and the indices if they were given.
    Raises:
        - TypeError: The arguments are invalid. DI-engine's fetcher takes ValueError and AssertionError for a lack of
          data.
    """
    # False counts as None: middleware written for DequeBuffer passes its ``replace`` in this position.
    chosen = None if indices is None or (isinstance(indices, bool) and not indices) else list(indices)
    if size is not None:
        size = integer('size', size, 0, TypeError)
    if not size and not chosen:
        raise TypeError(f'one of size ({size!r}) and indices ({chosen!r}) must not be empty')
    if size and chosen and size != len(chosen):
        raise TypeError(f'size ({size}) and the number of indices ({len(chosen)}) must be equal')
    if chosen and groupby is not None:
        raise TypeError(f'indices cannot be combined with groupby ({groupby!r})')
    if unroll_len is not None:
        unroll_len = integer('unroll_len', unroll_len, 0, TypeError)
    if unroll_len and groupby is None:
        raise TypeError(f'unroll_len ({unroll_len}) needs groupby')
    if sample_range is not None and (not isinstance(sample_range, slice) or sample_range.step == 0):
        raise TypeError(f'sample_range ({sample_range!r}) must be a slice with a step other than 0')
    return int(size or len(chosen or ())), chosen or None
