"""The part of StoreBuffer that samples sequences and whole episodes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Iterator, Optional, TypeVar, Union

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.elements.elements import Choose, Elements
from ding_store.buffer.sampling.prefetch import Prefetch
from ding_store.buffer.sampling.rate_limiter import RateLimiter
from ding_store.buffer.sampling.samplers import Sampler, Uniform
from ding_store.buffer.sampling.use_limits import Limited
from ding_store.buffer.sequences.group_keys import GroupBy
from ding_store.buffer.sequences.sequence_priorities import PrioritizedSequenceChoice, SequencePrioritized
from ding_store.buffer.sequences.sequence_reads import Episodes, read_episodes, read_sequences, read_unrolled
from ding_store.buffer.sequences.sequences import EpisodeChoice, SequenceChoice, SequenceKind
from ding_store.buffer.table.row_choices import Sampled, check_sample_arguments

T = TypeVar('T')

_AT_ONCE = nullcontext()


def _use_nothing(rows: Array) -> None:
    """Nobody counts these rows."""


_UNLIMITED = nullcontext(_use_nothing)


class SequenceSampling:
    """
    Overview:
        Sequences of rows that follow each other in a group. A group is what an environment of a collector makes, or an
        episode. These methods gather batches; middleware of the buffer does not see them.
    """

    _elements: Elements
    _uniform: Uniform
    _sampler: Sampler
    _prefetch: Optional[Prefetch]
    #: What makes samples and inserts wait for each other; None: nothing.
    limiter: Optional[RateLimiter] = None

    def sample_sequences(
        self,
        size: int,
        length: int,
        groupby: Optional[GroupBy],
        burn_in: int = 0,
        done: Optional[str] = 'done',
        overlap: Optional[int] = None,
        replace: bool = False,
    ) -> Batch:
        """
        Overview:
            Sample ``size`` sequences of ``burn_in + length`` steps; none goes over an episode's end, or from one group
            into another. Every possible start is equally likely, or in proportion to its priority where the sampler
            is a SequencePrioritized. One gather, O(T B) whatever the buffer's length.
        Arguments:
            - length (:obj:`int`): Steps to train on.
            - groupby (:obj:`Optional[GroupBy]`): A column of integers or a key of the metas; ``('collector', 'env')``
              groups by both. The first sample by it looks at all rows. None: all rows follow each other.
            - burn_in (:obj:`int`): Steps before those, which only warm the recurrent state (R2D2).
            - done (:obj:`Optional[str]`): The column that is true at an episode's last step. None: groups do not end.
            - overlap (:obj:`Optional[int]`): Cut episodes into sequences that share so many steps with the next, as
              collectors with an unroll length do. None: a sequence may start anywhere.
            - replace (:obj:`bool`): Whether a sequence may come more than once.
        Returns:
            - batch (:obj:`Batch`): Leaves ``(T, B, ...)``; recurrent policies take ``batch.data`` as their list.
              ``weights`` are ``(B,)`` where starts have priorities; these are updated by ``batch.rows[0]``.
        Raises:
            - NotEnoughData: There are fewer such sequences.
            - SchemaMismatch: There is no such column, or the elements are Python objects.
            - TypeError: A number makes no sense.
        """
        size, _ = check_sample_arguments(size, None, None, None, None)
        num_steps = integer('length', length, 1, TypeError) + integer('burn_in', burn_in, 0, TypeError)
        stride = 1 if overlap is None else num_steps - integer('overlap', overlap, 0, TypeError)
        if stride < 1:
            raise TypeError(f'overlap ({overlap}) must be below burn_in + length ({num_steps})')
        index = self._elements.sequences.index(groupby, done)
        elements, uniform, ahead = self._elements, self._uniform, self._prefetch

        limits = self._sampler if isinstance(self._sampler, Limited) else None
        sampler = self._sampler if limits is None else limits.sampler
        by_priority = sampler if isinstance(sampler, SequencePrioritized) else None
        share_rows = stride < num_steps or replace or by_priority is not None
        kind = SequenceKind(
            index, num_steps, stride, limits.start_uses() if limits is not None and share_rows else None
        )

        def choose() -> Union[SequenceChoice, PrioritizedSequenceChoice]:
            if by_priority is not None:
                return PrioritizedSequenceChoice(kind, by_priority, size, replace)
            return SequenceChoice(kind, uniform, size, replace)

        def read(chosen: Choose) -> Any:
            return read_sequences(elements, chosen, num_steps)

        chosen = choose()
        key = ('sequences', id(index), index.num_forgotten, id(by_priority), size, num_steps, stride, replace)
        with self._sampling_together(size, kind.delivered if share_rows else None) as use:
            found = read(chosen) if ahead is None else ahead.next(key, chosen, read)
            batch = Batch(*found)._replace(weights=getattr(chosen, 'weights', None))
            use(batch.rows)
        if ahead is not None:
            ahead.draw(key, choose, read, by_priority)
        return batch

    def sample_episodes(
        self, size: int, groupby: GroupBy, done: str = 'done', max_length: Optional[int] = None, replace: bool = False
    ) -> Episodes:
        """
        Overview:
            Sample whole episodes of any lengths: from the first row of a group, or the one behind a done, to the next
            done, if all of these rows are there. Every episode is equally likely. O(rows sampled).

            Rows are kept one by one, so that only the batch is padded. After a ``clear`` groups begin anew. Of rows
            that were there before the first such sample, or came and went in one push, nobody knows what preceded them:
            then a group's episodes count from its next done on.
        Arguments:
            - max_length (:obj:`Optional[int]`): Leave longer episodes out.
        Raises:
            - NotEnoughData: There are fewer such episodes.
            - SchemaMismatch: There is no such column, or the elements are Python objects.
            - TypeError: A number makes no sense, or the sampler has ``max_times_sampled``, and ``replace`` is given.
        """
        size, _ = check_sample_arguments(size, None, None, None, None)
        if max_length is not None:
            max_length = integer('max_length', max_length, 1, TypeError)
        index = self._elements.sequences.index(groupby, done)
        choose = EpisodeChoice(index, self._uniform, size, replace, max_length)
        if replace and isinstance(self._sampler, Limited) and self._sampler.max_times_sampled is not None:
            raise TypeError(
                f'max_times_sampled ({self._sampler.max_times_sampled}) counts the rows of episodes, which replace '
                'would have come more often: sample without it, or a view whose sampler has no such limit, '
                'view(Uniform())'
            )
        with self._sampling_together(size) as use:
            episodes = read_episodes(self._elements, choose, lambda: choose.lengths)
            use(episodes.rows)
        return episodes

    def sample_time_major(self, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Batch:
        """
        Overview:
            As ``sample_batch``, of elements that are sequences themselves: lists of T steps, or dicts of such lists.
            Chosen by the buffer's sampler, and gathered step by step: ``data`` has leaves ``(T, B, ...)``, and those
            that a sequence has as a whole ``(B, ...)``; ``rows`` and ``weights`` are ``(B,)``.
        Raises:
            - SchemaMismatch: The elements are something else.
        """
        size, _ = check_sample_arguments(size, None, None, None, sample_range)
        choose = Sampled(self._sampler, size, replace, sample_range)
        elements = self._elements
        read = self._read_sampled('time-major', choose, lambda chosen: read_unrolled(elements, chosen))
        return Batch(*read)._replace(weights=choose.weights)

    def _read_sampled(self, kind: str, choose: Sampled, read: Callable[[Choose], T]) -> T:
        """What ``read`` makes of a sampler's choice, now or ahead; it counts, and waits for the limiter, now."""
        ahead, delete = self._prefetch, self._elements.delete
        if ahead is None:
            return choose.deliver(read, delete, self.limiter)
        key = (kind, *choose.key)
        batch = choose.deliver(lambda chosen: ahead.next(key, chosen, read), delete, self.limiter, ahead)
        ahead.draw(key, choose.again, read, self._sampler)
        return batch

    def _sampling_together(
        self, size: int, use: Optional[Callable[[Array], None]] = None
    ) -> ContextManager[Callable[[Array], None]]:
        """
        Around a sample of rows that no sampler draws one by one, whose limits hold all the same; yields what is to be
        told of the rows: ``use``, by default what has each of them leave when it is used up.
        """
        limits = self._sampler
        if not isinstance(limits, Limited):
            return _UNLIMITED if self.limiter is None else self._limited(size, None, _use_nothing)
        return self._limited(size, limits, use or (lambda rows: limits.use(rows.reshape(-1))))

    @contextmanager
    def _limited(
        self, size: int, limits: Optional[Limited], use: Callable[[Array], None]
    ) -> Iterator[Callable[[Array], None]]:
        with self._sampling(size):
            if limits is None:
                yield use
                return
            with limits.lock:
                limits.prepare()
                yield use

    def _sampling(self, num_items: int) -> ContextManager[None]:
        # Sequences count as one sample each, as elements that are sequences do.
        return _AT_ONCE if self.limiter is None else self.limiter.sampling(num_items)

    def _inserting(self, num_rows: int) -> ContextManager[None]:
        return _AT_ONCE if self.limiter is None else self.limiter.inserting(num_rows)
