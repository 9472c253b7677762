"""Choices of rows by a sampler, and what surrounds them: locks, counts and a limiter."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Optional, Tuple, TypeVar

from ding_store.buffer.array_types import Array
from ding_store.buffer.samplers.base import DrawsAhead, Sampler
from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.buffer.table.rows import RowIndex

#: The result of a read. Its first item are the row numbers.
T = TypeVar('T', bound=Tuple[Any, ...])

AT_ONCE: ContextManager[Any] = nullcontext()


class Choice:
    """
    Overview:
        Chooses rows when it is called with the index locked, now or ahead of their delivery. ``weights`` are those of
        the last choice, or of the choice made ahead that took its place.
    """

    __slots__ = ('weights',)

    def __init__(self) -> None:
        self.weights: Optional[Array] = None

    def __call__(self, index: RowIndex) -> Array:
        raise NotImplementedError(f'{type(self).__name__} must choose slots')

    def may_deliver(self, rows: Array) -> bool:
        """Return whether live rows that were chosen ahead may still be delivered."""
        return True


class Sampled(Choice):
    """A choice of rows by a sampler."""

    __slots__ = ('_sampler', '_size', '_replace', '_range')

    def __init__(self, sampler: Sampler, size: int, replace: bool, sample_range: Optional[slice]) -> None:
        self.weights = None
        self._sampler, self._size, self._replace, self._range = sampler, size, replace, sample_range

    def __call__(self, index: RowIndex) -> Array:
        slots = self._sampler.choose(index, self._size, self._replace, self._range)
        self.weights = self._sampler.weights(slots)
        return slots

    def may_deliver(self, rows: Array) -> bool:
        return self._sampler.may_deliver(rows)

    @property
    def key(self) -> Tuple[Any, ...]:
        """A key that is equal for equal kinds of choices."""
        limits = self._range and (self._range.start, self._range.stop, self._range.step)
        return id(self._sampler), self._size, self._replace, limits

    def again(self) -> Sampled:
        """Return another choice of the same kind."""
        return Sampled(self._sampler, self._size, self._replace, self._range)

    def deliver(
        self,
        read: Callable[[Sampled], T],
        delete: Callable[[Array], None],
        limiter: Optional[RateLimiter],
        ahead: Optional[DrawsAhead] = None,
    ) -> T:
        """
        Overview:
            Read the chosen rows, and tell the sampler which rows were read. Its lock is held meanwhile. A limiter must
            admit the sample first.
        Arguments:
            - read (:obj:`Callable`): Reads the rows of a choice. Its first result are the row numbers.
            - delete (:obj:`Callable`): Deletes the rows that must leave.
            - ahead (:obj:`Optional[DrawsAhead]`): The object that draws in advance.
        """
        lock = self._sampler.lock
        if limiter is None and lock is None:
            return self._deliver(read, delete, ahead)
        with AT_ONCE if limiter is None else limiter.sampling(self._size), lock or AT_ONCE:
            return self._deliver(read, delete, ahead)

    def _deliver(self, read: Callable[[Sampled], T], delete: Callable[[Array], None], ahead: Optional[DrawsAhead]) -> T:
        sampler = self._sampler
        sampler.sampled_by(ahead)
        sampler.prepare()
        result = read(self)
        leaving = sampler.delivered(result[0])
        if leaving is not None and len(leaving):
            delete(leaving)
        return result
