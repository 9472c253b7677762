"""StoreBuffer's samples of sequences and whole episodes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Iterator, Optional, TypeVar, Union

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.elements.elements import Choose, Elements
from ding_store.buffer.samplers.base import Sampler
from ding_store.buffer.samplers.limited import Limited
from ding_store.buffer.samplers.prefetch import Prefetch
from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.sequences.group_keys import GroupBy
from ding_store.buffer.sequences.sequence_priorities import PrioritizedSequenceChoice, SequencePrioritized
from ding_store.buffer.sequences.sequence_reads import Episodes, read_episodes, read_sequences, read_unrolled
from ding_store.buffer.sequences.sequences import EpisodeChoice, SequenceChoice, SequenceKind
from ding_store.buffer.table.row_choices import Sampled, check_sample_arguments

T = TypeVar('T')

_AT_ONCE = nullcontext()


def _use_nothing(rows: Array) -> None:
    """Do nothing: no limit counts these rows."""


_UNLIMITED = nullcontext(_use_nothing)


class SequenceSampling:
    """
    Overview:
        The methods of StoreBuffer that sample consecutive rows of a group. A group holds the rows of one environment of
        a collector, or of one episode. These methods gather batches, which the buffer's middleware does not see.
    """

    _elements: Elements
    _uniform: Uniform
    _sampler: Sampler
    _prefetch: Optional[Prefetch]
    #: Makes samples and inserts wait for each other. None: neither waits.
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
            Sample ``size`` sequences of ``burn_in + length`` steps. No sequence crosses an episode's end or a group's
            border. Every possible start is equally likely. With a SequencePrioritized sampler, starts come in
            proportion to their priorities. The method gathers once: O(T B) for any buffer length.
        Arguments:
            - length (:obj:`int`): Steps to train on.
            - groupby (:obj:`Optional[GroupBy]`): A column of integers or a key of the metas. ``('collector', 'env')``
              groups by both. The first sample by a key reads all rows. None treats all rows as one group.
            - burn_in (:obj:`int`): Steps before those, which only warm up the recurrent state (R2D2).
            - done (:obj:`Optional[str]`): The column that is true at an episode's last step. None: groups do not end.
            - overlap (:obj:`Optional[int]`): Cut episodes into sequences that share so many steps with the next, like
              collectors with an unroll length. None: a sequence may start anywhere.
            - replace (:obj:`bool`): Allow a sequence more than once.
        Returns:
            - batch (:obj:`Batch`): Leaves ``(T, B, ...)``. Recurrent policies take ``batch.data`` as their list. If
              starts have priorities, ``weights`` is ``(B,)``, and ``batch.rows[0]`` are the rows to update.
        Raises:
            - NotEnoughData: There are fewer than ``size`` such sequences.
            - SchemaMismatch: There is no such column, or the elements are Python objects.
            - TypeError: A number is out of range.
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
            Sample whole episodes of any lengths, each with the same probability. O(rows sampled). An episode begins at
            the first row of a group or after a done, and ends at the next done. All its rows must be in the buffer.

            Rows are stored one by one, so only the batch is padded. After ``clear``, groups begin anew. The rows before
            a row are unknown if it came before the first such sample, or came and left within one push. Its group's
            episodes then count from the next done on.
        Arguments:
            - max_length (:obj:`Optional[int]`): Leave longer episodes out.
        Raises:
            - NotEnoughData: There are fewer than ``size`` such episodes.
            - SchemaMismatch: There is no such column, or the elements are Python objects.
            - TypeError: A number is out of range, or ``replace`` is given and the sampler has ``max_times_sampled``.
        """
        size, _ = check_sample_arguments(size, None, None, None, None)
        if max_length is not None:
            max_length = integer('max_length', max_length, 1, TypeError)
        index = self._elements.sequences.index(groupby, done)
        choose = EpisodeChoice(index, self._uniform, size, replace, max_length)
        if replace and isinstance(self._sampler, Limited) and self._sampler.max_times_sampled is not None:
            raise TypeError(
                f'replace would exceed max_times_sampled ({self._sampler.max_times_sampled}), which limits each row of '
                'an episode. Sample without replace, or sample view(Uniform()), which has no limit.'
            )
        with self._sampling_together(size) as use:
            episodes = read_episodes(self._elements, choose, lambda: choose.lengths)
            use(episodes.rows)
        return episodes

    def sample_time_major(self, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Batch:
        """
        Overview:
            Sample elements that are sequences themselves: lists of T steps, or dicts of such lists. The buffer's
            sampler chooses them, as in ``sample_batch``, and they are gathered step by step. ``data`` has leaves ``(T,
            B, ...)``, or ``(B, ...)`` for leaves that a sequence has as a whole. ``rows`` and ``weights`` are ``(B,)``.
        Raises:
            - SchemaMismatch: The elements are not such sequences.
        """
        size, _ = check_sample_arguments(size, None, None, None, sample_range)
        choose = Sampled(self._sampler, size, replace, sample_range)
        elements = self._elements
        read = self._read_sampled('time-major', choose, lambda chosen: read_unrolled(elements, chosen))
        return Batch(*read)._replace(weights=choose.weights)

    def _read_sampled(self, kind: str, choose: Sampled, read: Callable[[Choose], T]) -> T:
        """Read a sampler's choice, now or ahead. Either way it is counted now and waits for the limiter now."""
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
        Open a sample of rows that the sampler does not draw one by one, but whose limits hold. The caller passes the
        rows to the function that this yields: ``use``, or by default one that deletes each row that is used up.
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
        # A sequence counts as one sample, like an element that is a sequence.
        return _AT_ONCE if self.limiter is None else self.limiter.sampling(num_items)

    def _inserting(self, num_rows: int) -> ContextManager[None]:
        return _AT_ONCE if self.limiter is None else self.limiter.inserting(num_rows)
