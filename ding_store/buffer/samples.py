"""The samples of a buffer or a view: its sampler, with the limiter and the prefetch that belong to it."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Dict, Iterator, Optional

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.elements.device_batches import DeviceBatches
from ding_store.buffer.elements.elements import Choose, Elements
from ding_store.buffer.elements.sequence_reads import Episodes, read_episodes, read_sequences, read_unrolled
from ding_store.buffer.samplers.base import Sampler, check_is_sampler
from ding_store.buffer.samplers.choices import AT_ONCE, Sampled, T
from ding_store.buffer.samplers.prefetch import Prefetch
from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.sequences.group_keys import GroupBy
from ding_store.buffer.sequences.sequences import EpisodeChoice, SequenceChoice, SequenceKind
from ding_store.buffer.table.row_choices import check_sample_arguments
from ding_store.errors import ConfigError


class Samples:
    """
    Overview:
        Samples batches for one buffer or view. ``StoreBuffer`` describes the arguments and results.
    Arguments:
        - elements (:obj:`Elements`): The elements that are sampled.
        - sampler (:obj:`Sampler`): Chooses rows. It is attached to the table here.
        - uniform (:obj:`Uniform`): Chooses groups, sequences and episodes.
        - depth (:obj:`int`): The number of batches that a thread gathers ahead.
        - is_kept (:obj:`bool`): Whether a path keeps the sampler's state. False for a view.
    """

    def __init__(
        self, elements: Elements, sampler: Sampler, uniform: Uniform, depth: int = 0, is_kept: bool = True
    ) -> None:
        check_is_sampler(sampler)
        table = elements.table
        sampler.attach(table.index, elements)
        if is_kept and table.table_dir is not None:
            sampler.persist_to(table.table_dir)
        self._elements, self.sampler, self.uniform = elements, sampler, uniform
        self.prefetch = Prefetch(depth, table, sampler) if depth else None
        #: Sends the batches that are gathered ahead to a GPU. None: they stay on the host.
        self.device: Optional[DeviceBatches] = None
        #: Makes samples and inserts wait for each other. None: neither waits.
        self.limiter: Optional[RateLimiter] = None

    @property
    def depth(self) -> int:
        return 0 if self.prefetch is None else self.prefetch.depth

    def limit_with(self, limiter: RateLimiter) -> None:
        """Let this limiter make samples and inserts wait from now on."""
        if not isinstance(limiter, RateLimiter):
            raise ConfigError(f'limiter ({limiter!r}) must be a RateLimiter')
        table, table_dir = self._elements.table, self._elements.table.table_dir
        limiter.attach(lambda: len(table), table.capacity, self.sampler)
        self.limiter = limiter
        if table_dir is not None:
            record = table_dir.record('limiter', of_rows=False)
            limiter.keep(record, lambda: table.next_row - table_dir.num_skipped)

    def viewed(self, sampler: Optional[Sampler] = None) -> Samples:
        """Return the samples of a view, with another sampler if one is given."""
        if sampler is not None:
            check_is_sampler(sampler)
            if self.limiter is not None:
                self.limiter.check_sampler(sampler)
        chosen = self.sampler if sampler is None else sampler
        made = Samples(self._elements, chosen, self.uniform, self.depth, is_kept=False)
        made.limiter, made.device = self.limiter, self.device
        return made

    def copied(self, elements: Elements, memo: Dict[int, Any]) -> Samples:
        """Return samples of copied elements, which go on where these are."""
        sampler, uniform = copy.deepcopy(self.sampler, memo), copy.deepcopy(self.uniform, memo)
        made = Samples(elements, sampler, uniform, self.depth)
        made.sampler.take_over(self.sampler)
        made.device = self.device
        if self.limiter is not None:
            made.limit_with(copy.deepcopy(self.limiter, memo))
        return made

    def moved(self, elements: Elements) -> Samples:
        """Return samples of other elements that begin anew, with the same settings."""
        sampler = self.uniform if self.sampler is self.uniform else copy.deepcopy(self.sampler)
        made = Samples(elements, sampler, self.uniform, self.depth)
        made.device = self.device
        if self.limiter is not None:
            made.limit_with(self.limiter)
        return made

    def close(self) -> None:
        """Stop the thread that gathers ahead, if there is one."""
        if self.prefetch is not None:
            self.prefetch.close()

    def batch(self, size: int, replace: bool, sample_range: Optional[slice]) -> Batch:
        """Sample one collated batch."""
        choose = Sampled(self.sampler, size, replace, sample_range)
        elements, device = self._elements, self.device
        if device is not None and self.prefetch is not None and elements.can_send():
            rows, sent, decode = self._read('sent', choose, lambda chosen: elements.read_and_send(chosen, device))
            return Batch(device.receive(sent), rows, decode, choose.weights)
        if self.prefetch is None:
            rows, data, decode, lengths = choose.deliver(elements.read_batch, elements.delete, self.limiter)
        else:
            rows, data, decode, lengths = self._read('batch', choose, elements.read_batch)
        return Batch(data, rows, decode, choose.weights, lengths)

    def time_major(self, size: int, replace: bool, sample_range: Optional[slice]) -> Batch:
        """Sample elements that are sequences themselves, step by step."""
        size, _ = check_sample_arguments(size, None, None, None, sample_range)
        choose = Sampled(self.sampler, size, replace, sample_range)
        elements = self._elements
        read = self._read('time-major', choose, lambda chosen: read_unrolled(elements, chosen))
        rows, data, decode = read
        return Batch(data, rows, decode, choose.weights)

    def sequences(
        self,
        size: int,
        length: int,
        groupby: Optional[GroupBy],
        burn_in: int,
        done: Optional[str],
        overlap: Optional[int],
        replace: bool,
    ) -> Batch:
        """Sample consecutive rows of groups."""
        size, _ = check_sample_arguments(size, None, None, None, None)
        num_steps = integer('length', length, 1, TypeError) + integer('burn_in', burn_in, 0, TypeError)
        stride = 1 if overlap is None else num_steps - integer('overlap', overlap, 0, TypeError)
        if stride < 1:
            raise TypeError(f'overlap ({overlap}) must be below burn_in + length ({num_steps})')
        index = self._elements.sequences.index(groupby, done)
        elements, uniform, ahead = self._elements, self.uniform, self.prefetch

        by_priority = self.sampler.sequence_sampler
        share_rows = stride < num_steps or replace or by_priority is not None
        kind = SequenceKind(index, num_steps, stride, self.sampler.start_uses() if share_rows else None)

        def choose() -> SequenceChoice:
            return SequenceChoice(kind, uniform, size, replace, by_priority)

        def read(chosen: Choose) -> Any:
            return read_sequences(elements, chosen, num_steps)

        chosen = choose()
        key = ('sequences', id(index), index.num_forgotten, id(by_priority), size, num_steps, stride, replace)
        with self.together(size, kind.delivered if share_rows else None) as use:
            found = read(chosen) if ahead is None else ahead.next(key, chosen, read)
            rows, data, decode, lengths = found
            use(rows)
        if ahead is not None:
            ahead.draw(key, choose, read, by_priority)
        return Batch(data, rows, decode, chosen.weights, lengths)

    def episodes(self, size: int, groupby: GroupBy, done: str, max_length: Optional[int], replace: bool) -> Episodes:
        """Sample whole episodes."""
        size, _ = check_sample_arguments(size, None, None, None, None)
        if max_length is not None:
            max_length = integer('max_length', max_length, 1, TypeError)
        index = self._elements.sequences.index(groupby, done)
        choose = EpisodeChoice(index, self.uniform, size, replace, max_length)
        if replace and self.sampler.start_uses() is not None:
            raise TypeError(
                f'replace would exceed max_times_sampled ({self.sampler.max_times}), which limits each row of '
                'an episode. Sample without replace, or sample view(Uniform()), which has no limit.'
            )
        with self.together(size) as use:
            episodes = read_episodes(self._elements, choose, lambda: choose.lengths)
            use(episodes.rows)
        return episodes

    def _read(self, kind: str, choose: Sampled, read: Callable[[Choose], T]) -> T:
        """Read a sampler's choice, now or ahead. Either way it is counted now and waits for the limiter now."""
        ahead, delete = self.prefetch, self._elements.delete
        if ahead is None:
            return choose.deliver(read, delete, self.limiter)
        key = (kind, *choose.key)
        batch = choose.deliver(lambda chosen: ahead.next(key, chosen, read), delete, self.limiter, ahead)
        ahead.draw(key, choose.again, read, self.sampler)
        return batch

    def together(
        self, size: int, use: Optional[Callable[[Array], None]] = None
    ) -> ContextManager[Callable[[Array], None]]:
        """
        Open a sample of rows that the sampler does not draw one by one, but whose limits hold. The caller passes the
        rows to the function that this yields: ``use``, or by default one that deletes each row that is used up.
        """
        if self.limiter is not None or self.sampler.lock is not None:
            return self._together(size, use or self._use)
        self.sampler.prepare()
        return nullcontext(use or self._use)

    @contextmanager
    def _together(self, size: int, use: Callable[[Array], None]) -> Iterator[Callable[[Array], None]]:
        # A sequence counts as one sample, like an element that is a sequence.
        with self.sampling(size), self.sampler.lock or AT_ONCE:
            self.sampler.prepare()
            yield use

    def _use(self, rows: Array) -> None:
        used_up = self.sampler.used(rows.reshape(-1))
        if used_up is not None and len(used_up):
            self._elements.delete(used_up)

    def sampling(self, num_items: int) -> ContextManager[None]:
        return AT_ONCE if self.limiter is None else self.limiter.sampling(num_items)

    def inserting(self, num_rows: int) -> ContextManager[None]:
        return AT_ONCE if self.limiter is None else self.limiter.inserting(num_rows)
