"""StoreBuffer's samples of sequences and whole episodes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Iterator, Optional

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.elements.elements import Choose, Elements
from ding_store.buffer.samplers.base import Sampler
from ding_store.buffer.samplers.choices import AT_ONCE, Sampled, T
from ding_store.buffer.samplers.prefetch import Prefetch
from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.sequences.group_keys import GroupBy
from ding_store.buffer.sequences.sequence_reads import Episodes, read_episodes, read_sequences, read_unrolled
from ding_store.buffer.sequences.sequences import EpisodeChoice, SequenceChoice, SequenceKind
from ding_store.buffer.table.row_choices import check_sample_arguments


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

        by_priority = self._sampler.sequence_sampler
        share_rows = stride < num_steps or replace or by_priority is not None
        kind = SequenceKind(index, num_steps, stride, self._sampler.start_uses() if share_rows else None)

        def choose() -> SequenceChoice:
            return SequenceChoice(kind, uniform, size, replace, by_priority)

        def read(chosen: Choose) -> Any:
            return read_sequences(elements, chosen, num_steps)

        chosen = choose()
        key = ('sequences', id(index), index.num_forgotten, id(by_priority), size, num_steps, stride, replace)
        with self._sampling_together(size, kind.delivered if share_rows else None) as use:
            found = read(chosen) if ahead is None else ahead.next(key, chosen, read)
            rows, data, decode = found
            use(rows)
        if ahead is not None:
            ahead.draw(key, choose, read, by_priority)
        return Batch(data, rows, decode, chosen.weights)

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
        if replace and self._sampler.start_uses() is not None:
            raise TypeError(
                f'replace would exceed max_times_sampled ({self._sampler.max_times}), which limits each row of '
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
        rows, data, decode = read
        return Batch(data, rows, decode, choose.weights)

    def _read_sampled(self, kind: str, choose: Sampled, read: Callable[[Choose], T]) -> T:
        """Read a sampler's choice, now or ahead. Either way it is counted now and waits for the limiter now."""
        ahead, delete = self._prefetch, self._elements.delete
        if ahead is None:
            return choose.deliver(read, delete, self.limiter)
        key = (kind, *choose.key)
        batch = choose.deliver(lambda chosen: ahead.next(key, chosen, read), delete, self.limiter, ahead)
        ahead.draw(key, choose.again, read, self._sampler)
        return batch

    @contextmanager
    def _sampling_together(
        self, size: int, use: Optional[Callable[[Array], None]] = None
    ) -> Iterator[Callable[[Array], None]]:
        """
        Open a sample of rows that the sampler does not draw one by one, but whose limits hold. The caller passes the
        rows to the function that this yields: ``use``, or by default one that deletes each row that is used up.
        """
        sampler = self._sampler
        # A sequence counts as one sample, like an element that is a sequence.
        with self._sampling(size), sampler.lock or AT_ONCE:
            sampler.prepare()
            yield use or self._use

    def _use(self, rows: Array) -> None:
        used_up = self._sampler.used(rows.reshape(-1))
        if used_up is not None and len(used_up):
            self._elements.delete(used_up)

    def _sampling(self, num_items: int) -> ContextManager[None]:
        return AT_ONCE if self.limiter is None else self.limiter.sampling(num_items)

    def _inserting(self, num_rows: int) -> ContextManager[None]:
        return AT_ONCE if self.limiter is None else self.limiter.inserting(num_rows)
