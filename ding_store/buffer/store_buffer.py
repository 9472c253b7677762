"""A replay buffer with DequeBuffer's interface that stores elements in memory-mapped columns."""

from __future__ import annotations

import operator
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Union

import numpy as np
import torch
from ding.data.buffer import Buffer, BufferedData, apply_middleware

from ding_store.buffer.arguments import check_ragged, integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.ding import middleware as ding_middleware
from ding_store.buffer.ding.lists import IndexView, Items, Lists, StorageView, collated, group_by, meta_index
from ding_store.buffer.elements.device_batches import DeviceBatches
from ding_store.buffer.elements.elements import Elements
from ding_store.buffer.elements.patches import patch_columns, patched_rows
from ding_store.buffer.elements.sequence_reads import Episodes
from ding_store.buffer.inserts import Inserts
from ding_store.buffer.samplers.base import Sampler, check_is_sampler, priorities_of
from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.buffer.samplers.removers import Reservoir, check_remover, remove_lowest
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.samples import Samples
from ding_store.buffer.saving import save_files
from ding_store.buffer.sequences.group_keys import GroupBy
from ding_store.buffer.table.row_choices import by_age, by_indices, by_rows, check_sample_arguments, to_row
from ding_store.buffer.table.specs import Columns
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.errors import ConfigError

__all__ = ['Batch', 'StoreBuffer']


class StoreBuffer(Buffer):
    """
    Overview:
        A replay buffer in memory-mapped columns. Use it in place of DI-engine's DequeBuffer. The ``index`` of an item
        is its row number as a string. Row numbers grow and are never used again.

        Elements in columns are copied at each push and each read, so changing a sampled element never changes the
        buffer. ``update`` changes the buffer. Python objects are kept by reference. Without a path, episodes of varying
        length are kept by reference as well.
    Arguments:
        - size (:obj:`int`): The number of elements. A push to a full buffer drops the oldest, see ``remover``.
        - sliced (:obj:`bool`): Let ``unroll_len`` start only at its multiples, as in DequeBuffer.
        - path (:obj:`Optional[str]`): Directory for the buffer's files. A later process that opens the same directory
          continues with its elements, even after a kill. Elements must not hold Python objects. None keeps the rows
          in memory, or in unlinked files if memory is too small.
        - sampler (:obj:`Optional[Sampler]`): Chooses rows. The default is uniform.
        - seed (:obj:`Optional[int]`): Seed of the default sampler and of groups. None uses numpy's global generator.
        - fsync (:obj:`bool`): Make the files in ``path`` survive power cuts. This costs some fsyncs per push.
        - limiter (:obj:`Optional[RateLimiter]`): Makes samples and inserts of this process wait for each other.
        - prefetch (:obj:`int`): The number of batches that a thread gathers ahead. This applies to ``sample_batch``,
          ``sample_time_major`` and ``sample_sequences``, and pays for large rows. See Prefetch.
        - share_frames (:obj:`Union[str, bool]`): ``'auto'`` keeps frames that recur in several rows once, such as those
          of Atari's stacks. False keeps each row by itself. Rows found in ``path`` stay in the form in which they are.
        - remover (:obj:`str`): Decides which elements leave a full buffer. ``'oldest'``: the oldest.
          ``'lowest_priority'``: those of the lowest priorities. ``'reservoir'``: the buffer keeps a uniform sample of
          all elements ever pushed, so that new ones may leave at once.
        - ragged (:obj:`Union[str, Collection[str]]`): Paths of leaves whose first dimension varies, such as
          ``('obs/units',)``, or 'all'. Batches are padded, see ``Batch.lengths``. By default those found in ``path``.
    Raises:
        - ConfigError: ``size`` is not a positive integer, or differs from the buffer in ``path``. Or ``share_frames``
          is neither 'auto' nor False. Or ``remover`` is 'lowest_priority' without a sampler of priorities, or
          'reservoir' with a path. Or ``ragged`` differs from the elements in ``path``.
        - TableLocked: The buffer in ``path`` is open, here or in another process.
        - FormatMismatch, CorruptPayload: Another version wrote ``path``, or its files are damaged.
    """

    def __init__(
        self,
        size: int,
        sliced: bool = False,
        path: Optional[str] = None,
        sampler: Optional[Sampler] = None,
        seed: Optional[int] = None,
        fsync: bool = False,
        limiter: Optional[RateLimiter] = None,
        prefetch: int = 0,
        share_frames: Union[str, bool] = 'auto',
        remover: str = 'oldest',
        ragged: Union[str, Collection[str]] = (),
    ) -> None:
        if share_frames is not False and share_frames != 'auto':
            raise ConfigError(f"share_frames ({share_frames!r}) must be 'auto' or False")
        uniform = Uniform(seed)
        sampler = uniform if sampler is None else sampler
        check_is_sampler(sampler)
        check_remover(remover, sampler, path)
        check_ragged(ragged)
        is_sharing = share_frames == 'auto'
        elements = Elements(integer('size', size, 1), path, fsync, share_frames=is_sharing, ragged=ragged)
        try:
            samples = Samples(elements, sampler, uniform, integer('prefetch', prefetch, 0))
            if limiter is not None:
                samples.limit_with(limiter)
            self._remove_by(remover, elements, samples, seed)
        except BaseException:
            # Otherwise a table with a path would stay locked for as long as the exception is referenced.
            elements.close()
            raise
        self._begin(elements, samples, sliced)

    def _begin(self, elements: Elements, samples: Samples, sliced: bool) -> None:
        """Set all parts of a buffer, of a view or of a copy. DI-engine's constructor would set ``size`` as well."""
        self._middleware: List[Callable] = []
        self.sliced = sliced
        self._serve(elements, samples)

    def _serve(self, elements: Elements, samples: Samples) -> None:
        """Serve these elements from now on."""
        self._elements, self._samples = elements, samples
        self._inserts, self._lists = Inserts(elements, samples), Lists(elements, samples, self.sliced)

    def _remove_by(self, remover: str, elements: Elements, samples: Samples, seed: Optional[int]) -> None:
        """Let a remover choose which of these elements leave."""
        table_dir = elements.table.table_dir
        check_remover(remover, samples.sampler, None if table_dir is None else table_dir.path)
        self._remover, self._seed = remover, seed
        if remover == 'reservoir':
            elements.table.index.remover = elements.reservoir = Reservoir(elements.table, seed)
        elif remover == 'lowest_priority':
            remove_lowest(elements.table, samples.sampler)

    def _made_of(self, elements: Elements, samples: Samples) -> StoreBuffer:
        made = type(self).__new__(type(self))
        made._begin(elements, samples, self.sliced)
        made._remover, made._seed = self._remover, self._seed
        return made

    @property
    def table(self) -> Table:
        return self._elements.table

    @property
    def sampler(self) -> Sampler:
        """The sampler that chooses the rows."""
        return self._samples.sampler

    @property
    def limiter(self) -> Optional[RateLimiter]:
        """
        Makes samples and inserts wait for each other. None: neither waits. Setting it raises ConfigError if it is not a
        RateLimiter, or if the buffer is too small for it.
        """
        return self._samples.limiter

    @limiter.setter
    def limiter(self, limiter: RateLimiter) -> None:
        self._samples.limit_with(limiter)

    @property
    def schema(self) -> Optional[Schema]:
        """The leaves of an element. None before the first element, and if elements are Python objects."""
        return self._elements.schema

    @property
    def ragged(self) -> Union[str, Collection[str]]:
        """The leaves whose first dimension varies, or 'all'."""
        return self._elements.ragged

    @apply_middleware('push')
    def push(self, data: Any, meta: Optional[Dict[Any, Any]] = None) -> BufferedData:
        """
        Overview:
            Add one element.
        Raises:
            - SchemaMismatch: The element differs from those before it. The message names the path, the expected and the
              actual leaf. Nothing changed.
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        row, kept = self._inserts.push(data, meta)
        return BufferedData(data=data, index=str(row), meta=kept)

    def extend(
        self,
        columns: Columns,
        schema: Optional[Schema] = None,
        priority: Optional[Any] = None,
        commit: Optional[Mapping[str, Any]] = None,
        meta: Optional[Dict[Any, Any]] = None,
        narrowed: Collection[str] = (),
    ) -> Array:
        """
        Overview:
            Add many elements at once, with one copy per leaf. If the buffer has middleware, it sees them one by one.
        Arguments:
            - columns (:obj:`Mapping`): Leaf path (``'obs/image'``) -> array ``(n, *leaf)``.
            - schema (:obj:`Optional[Schema]`): The schema of these columns. It may differ from the buffer's only in the
              leaves that are None. Without a schema, the first columns define elements that are trees of tensors.
            - priority (:obj:`Optional[Any]`): ``(n,)``, for a sampler with priorities. The default is the largest seen.
            - commit (:obj:`Optional[Mapping]`): The new ``committed``, for example a stream's cursor. It changes
              together with the elements, even if the process is killed. With middleware it changes after them.
            - meta (:obj:`Optional[dict]`): The meta of each of these elements.
            - narrowed (:obj:`Collection[str]`): Names of float32 columns that arrive as uint8. A byte k stands for
              k/255.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers ``(n,)``, int64.
        Raises:
            - SchemaMismatch: The columns differ from the schema. Nothing changed.
            - PriorityError: See ``update_priorities``. Nothing changed.
            - NotEnoughSpace: Memory or disk is full. Nothing changed.
        """
        if self._middleware:
            elements, metas = self._inserts.decoded(columns, schema, meta, narrowed)
            return self.extend_elements(elements, metas, priority=priority, commit=commit)
        return self._inserts.columns(columns, schema, priority, commit, meta, narrowed)

    def extend_elements(
        self,
        elements: Sequence[Any],
        metas: Optional[Sequence[Optional[Dict[Any, Any]]]] = None,
        priority: Optional[Any] = None,
        commit: Optional[Mapping[str, Any]] = None,
    ) -> Array:
        """
        Overview:
            Add elements as one ``push`` each would, but faster if the buffer has no middleware. ``priority`` and
            ``commit`` work as in ``extend``.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers ``(n,)``, int64.
        """
        if self._middleware:
            return self._inserts.one_by_one(elements, metas, priority, commit, self.push)
        return self._inserts.elements(elements, metas, priority, commit)

    @apply_middleware('sample')
    def sample(
        self,
        size: Optional[int] = None,
        indices: Optional[List[str]] = None,
        replace: bool = False,
        sample_range: Optional[slice] = None,
        ignore_insufficient: bool = False,
        groupby: Optional[str] = None,
        unroll_len: Optional[int] = None,
    ) -> Items:
        """
        Overview:
            Sample elements, or read those of given indices in their order. Elements in columns are views of one
            gathered batch, which stays in memory as long as any of them is referenced.
        Arguments:
            - sample_range (:obj:`Optional[slice]`): Sample only these elements, by age as in a list: -1 is the newest.
            - ignore_insufficient (:obj:`bool`): Return ``[]`` if there are too few elements, instead of raising.
            - groupby (:obj:`Optional[str]`): Key of the metas. The result is then a list of ``size`` groups. The
              sampler does not draw groups, but its limits hold: each row's use counts, twice if its group came twice.
            - unroll_len (:obj:`Optional[int]`): Return so many consecutive elements of each group. Every start is
              equally likely.
        Raises:
            - NotEnoughData: There are fewer than ``size`` elements or groups.
            - RowGone: One of ``indices`` is not in the buffer.
            - TypeError: The arguments cannot be combined.
        """
        return self._lists.sample(size, indices, replace, sample_range, ignore_insufficient, groupby, unroll_len)

    def sample_batch(self, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Batch:
        """
        Overview:
            Sample one collated batch, with one gather per leaf and no work per element. If the buffer has middleware,
            the sample passes through it as a list first, which is slower.
        Raises:
            - NotEnoughData: The buffer has fewer than ``size`` elements.
            - SchemaMismatch: The elements are Python objects, which have no collated batch.
            - TypeError: ``size`` is not a positive integer, or ``sample_range`` is not a slice.
        """
        if type(size) is not int or size < 1 or sample_range is not None:
            size, _ = check_sample_arguments(size, None, None, None, sample_range)
        if not self._middleware:
            return self._samples.batch(size, replace, sample_range)
        # Pass only the arguments that are set: a middleware may not accept the others.
        options: Dict[str, Any] = {'replace': True} if replace else {}
        if sample_range is not None:
            options['sample_range'] = sample_range
        return collated(
            self.sample(size=size, **options), self._elements.ragged
        )  # By keyword: a middleware may have another first argument.

    def send_to(self, device: Union[str, torch.device]) -> None:
        """
        Overview:
            Let ``sample_batch`` return batches on a GPU from now on, if they are gathered ahead (``prefetch``). The
            thread gathers them into pinned memory and copies them on a stream of its own. Frames that the buffer keeps
            as bytes travel as bytes. Elements that are no mappings of tensors, or have ragged leaves, stay on the host.
        """
        place = torch.device(device)
        if place.type != 'cuda':
            raise ConfigError(f'device ({device!r}) must be a GPU, such as "cuda:0"')
        if self._samples.depth:
            self._samples.device = DeviceBatches(place)

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
        return self._samples.time_major(size, replace, sample_range)

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
        return self._samples.sequences(size, length, groupby, burn_in, done, overlap, replace)

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
        return self._samples.episodes(size, groupby, done, max_length, replace)

    def update_priorities(self, rows: Array, priority: Any) -> None:
        """
        Overview:
            Set new priorities, after a training step on these rows. If a row is repeated, its last priority counts.
            Rows that are gone are skipped, and the sampler counts them. O(B log(size)).
        Arguments:
            - rows (:obj:`np.ndarray`): ``Batch.rows``, shape ``(B,)``.
            - priority: ``(B,)``, finite numbers >= 0.
        Raises:
            - PriorityError: A priority is not such a number, or the sampler has no priorities. Nothing changed.
        """
        priorities_of(self._samples.sampler).update(rows, priority)

    def gather_batch(self, rows: Array) -> Batch:
        """
        Overview:
            Return one collated batch of these rows, in their order. Middleware does not see it, because it samples
            nothing.
        Raises:
            - RowGone: One of the rows is not in the buffer.
            - SchemaMismatch: The elements are Python objects.
        """
        rows, data, elements, lengths = self._elements.read_batch(by_rows(rows))
        return Batch(data, rows, elements, None, lengths)

    def get(self, idx: int) -> BufferedData:
        """
        Overview:
            Return the element at a place by age: 0 is the oldest, -1 the newest. O(1), or O(count) after deletes.
        Raises:
            - IndexError: The buffer has fewer elements.
        """
        return self._lists.read(by_age(operator.index(idx)))[0]

    def get_by_index(self, index: str) -> BufferedData:
        """
        Raises:
            - RowGone: The buffer has no such element. RowGone is a KeyError, as in DequeBuffer.
        """
        return self._lists.read(by_indices([index]))[0]

    @apply_middleware('update')
    def update(self, index: str, data: Optional[Any] = None, meta: Optional[Dict[Any, Any]] = None) -> bool:
        """
        Overview:
            Replace the data, the meta or both of one element. Return False if the element is gone.
        Raises:
            - SchemaMismatch: The data differ from the other elements. Nothing changed.
        """
        return self._elements.update(to_row(index), data, meta)

    def update_if_present(self, rows: Any, patch: Any, newer_than: Optional[str] = None) -> Array:
        """
        Overview:
            Replace some leaves of many elements at once, for example the targets that a learner computed anew. Elements
            that are gone are skipped. A row number is never used again, so a patch cannot reach another element. The
            patch is written as a whole: readers see all of it or nothing, and so does the next process after a kill.

            Priorities, uses and metas stay as they are. Middleware does not see the patch.
        Arguments:
            - rows (:obj:`Any`): Row numbers ``(n,)``, such as ``Batch.rows``, or the indices of items.
            - patch (:obj:`Any`): Leaf path (``'obs/image'``) -> array or tensor ``(n, *leaf)``, or a tree of these.
            - newer_than (:obj:`Optional[str]`): A leaf of the patch with a version, one integer per row. A row is
              skipped unless its version is larger than the one in the buffer. Of two writers, the older one then does
              not undo what the newer one wrote.
        Returns:
            - written (:obj:`np.ndarray`): Whether each row was written, bool ``(n,)``. If a row is repeated, its
              patches are written in their order.
        Raises:
            - SchemaMismatch: A leaf is unknown, has another dtype or shape, or is None in some elements. Or elements
              are Python objects. Nothing changed.
            - NotEnoughSpace: Memory or disk is full. Nothing changed.
        """
        return self._elements.patch(patched_rows(rows), patch_columns(patch), newer_than)

    def delete(self, indices: Union[str, Iterable[str]]) -> None:
        """
        Overview:
            Delete one element or many by index, O(1) each. Elements that are gone are skipped. Middleware sees the
            others one by one.
        """
        if isinstance(indices, str):
            indices = [indices]
        if not self._middleware:
            self._delete(indices)
            return
        for index in indices:
            if self.indices.has(index):
                self._delete(index)

    @apply_middleware('delete')
    def _delete(self, indices: Union[str, Iterable[str]]) -> None:
        if isinstance(indices, str):
            indices = [indices]
        self._elements.delete(np.array([to_row(index) for index in indices], np.int64))
        if self.limiter is not None:
            self.limiter.wake()

    @apply_middleware('clear')
    def clear(self) -> None:
        """
        Overview:
            Delete all elements. The next element may have another schema.
        Raises:
            - NotEnoughSpace: The disk that holds ``path`` is full. Nothing changed.
        """
        self._elements.clear()
        if self.limiter is not None:
            self.limiter.begin_anew()

    @property
    def size(self) -> int:
        """The number of elements that the buffer can hold. Change it with ``resize``."""
        return self.table.capacity

    @size.setter
    def size(self, size: int) -> None:
        self.resize(size)

    @property
    def num_bytes(self) -> Optional[int]:
        """The bytes of the rows that the buffer holds. None if these are Python objects, or there are none."""
        packet_bytes = self._elements.store.packet_bytes
        if self.schema is None and not packet_bytes:
            return None
        return self.table.columns.num_bytes(len(self.table)) + packet_bytes

    def resize(self, size: int) -> None:
        """
        Overview:
            Change the number of elements that the buffer can hold. If there are more than ``size``, the oldest leave,
            or those that the ``remover`` chooses. O(size).
        Raises:
            - TypeError: ``size`` is not a positive integer, or too small for the buffer's limiter.
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        # Not a ConfigError, which is a ValueError: DI-engine's fetcher takes a ValueError for a lack of data.
        size = integer('size', size, 1, TypeError)
        problem = None if self.limiter is None else self.limiter.problem_of_capacity(size)
        if problem is not None:
            raise TypeError(problem)
        self._elements.resize(size)

    @property
    def committed(self) -> Optional[Dict[str, Any]]:
        """The last note that ``extend(..., commit=...)`` or ``commit`` set, in this process or an earlier one."""
        return self.table.committed

    def commit(self, note: Mapping[str, Any]) -> None:
        """Set ``committed`` to a dict that JSON can hold, without adding elements."""
        self.table.commit(note)

    def keep_in(self, path: str, fsync: bool = False) -> None:
        """
        Overview:
            Move this empty buffer to ``path``, as if it had been created there. A process uses this if it learns only
            after the construction that it owns the path. A copy with the same settings replaces the sampler.
        Raises:
            - ConfigError: The buffer has elements or a path already.
        """
        if self.count() or self.table.table_dir is not None:
            raise ConfigError(
                f'the buffer cannot move to {path!r}: it has elements or a path. Use an empty buffer without a path.'
            )
        former = self._elements, self._samples
        # Other processes of this run may be in the middle of episodes, so the next rows need not begin one.
        is_sharing = self.table.columns.share_frames
        ragged = self._elements.ragged
        elements = Elements(int(self.size), path, fsync, begin_episodes=False, share_frames=is_sharing, ragged=ragged)
        try:
            self._samples.close()
            self._serve(elements, self._samples.moved(elements))
            self._remove_by(self._remover, elements, self._samples, self._seed)
            ding_middleware.tell_loaded(self._middleware)
        except BaseException:
            self._serve(*former)
            elements.close()
            raise
        former[0].close()

    def use(self, func: Callable) -> StoreBuffer:
        """
        Overview:
            Add middleware between callers and the buffer. The first one added is the outermost. A
            PriorityExperienceReplay is replaced by its equivalent, which follows every row that leaves.
            ``ding_store.buffer.ding`` has equivalents of ``use_time_check``, ``staleness_check`` and
            ``sample_range_view``.
        """
        ding_middleware.use(self._middleware, func, self)
        return self

    def check(self) -> List[str]:
        """Return one sentence per defect in the buffer's memory and files. The list is empty if nothing is damaged."""
        return [*self.table.check(), *self._elements.findings()]

    def close(self) -> None:
        """Release memory and files. The buffer is then empty. Files in ``path`` stay for another process."""
        self._samples.close()
        self._elements.close()

    def count(self) -> int:
        return len(self.table)

    def save_data(self, file_name: str) -> None:
        """
        Overview:
            Write all elements, metas and the limiter's counts to one file. The file appears complete or not at all.
        """
        save_files.save(file_name, self._elements, None if self.limiter is None else self.limiter.state)

    def load_data(self, file_name: str) -> None:
        """
        Overview:
            Replace the contents by those of a file that ``save_data`` or DequeBuffer (``.hkl``) wrote. The buffer keeps
            its size: of a longer file it loads the newest elements. Until it is done it needs room for both contents.
        Raises:
            - CorruptPayload: The file is truncated or damaged, or has another format.
            - FormatMismatch: A later version wrote the file, or it holds objects of a class that cannot be imported.
            - NotEnoughSpace, SchemaMismatch: The elements do not fit. After any error the buffer is unchanged.
        """
        counts = save_files.load(file_name, self._elements)
        ding_middleware.tell_loaded(self._middleware)
        if self.limiter is not None:
            # Row numbers now continue those of the file. The counts do the same if the file has counts.
            self.limiter.load_state(counts or self.limiter.state())

    @property
    def storage(self) -> StorageView:
        """The elements by age, with the methods of DequeBuffer's deque: ``len``, ``[i]``, iteration."""
        return StorageView(self.table, self.get, self._lists.read_live)

    @property
    def indices(self) -> IndexView:
        """The place of each index string by age, as in DequeBuffer: ``get``, ``has``, ``len``."""
        return IndexView(self.table)

    @property
    def meta_index(self) -> Dict[Any, List[Any]]:
        """The values of all elements by age, for each meta key that was grouped by. Each access computes them anew."""
        return meta_index(self._elements)

    @meta_index.setter
    def meta_index(self, index: Mapping[Any, Any]) -> None:
        group_by(self._elements, index)

    def __iter__(self) -> Iterator[BufferedData]:
        return iter(self.storage)

    def view(self, sampler: Optional[Sampler] = None) -> StoreBuffer:
        """
        Overview:
            Return a view: the same elements with their own middleware, and their own sampler if one is given. Several
            views may sample one table, each with its own priorities. What a view's sampler knows ends with the
            process, also in a buffer with a path.
        """
        return self._made_of(self._elements, self._samples.viewed(sampler))

    def __copy__(self) -> StoreBuffer:
        """Return a view: the same elements with their own middleware."""
        return self.view()

    def __deepcopy__(self, memo: Dict[int, Any]) -> StoreBuffer:
        """Return an independent buffer in memory, with the same elements under the same indices."""
        with self.table.write_lock:
            elements = save_files.duplicate(self._elements, memo)
            twin = memo[id(self)] = self._made_of(elements, self._samples.copied(elements, memo))
            twin._remove_by(self._remover, elements, twin._samples, self._seed)
            if elements.reservoir is not None and self._elements.reservoir is not None:
                elements.reservoir.continue_from(self._elements.reservoir)
            twin._middleware = ding_middleware.copied(self._middleware, memo)
        return twin
