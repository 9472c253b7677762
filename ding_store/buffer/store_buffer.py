"""DI-engine's buffer over a table: everything that DequeBuffer does, and batches that are collated already."""

from __future__ import annotations

import copy
import logging
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Union

import numpy as np
from ding.data.buffer import Buffer, BufferedData, apply_middleware

from ding_store.buffer import served
from ding_store.buffer.arrays import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.checks import integer
from ding_store.buffer.compat import IndexView, StorageView
from ding_store.buffer.durability.kept import checked_view_name
from ding_store.buffer.elements.elements import Elements
from ding_store.buffer.list_sampling import ListSampling
from ding_store.buffer.priorities import Priorities, keeping
from ding_store.buffer.sampling.limits import Limited
from ding_store.buffer.sampling.prefetch import Prefetch
from ding_store.buffer.sampling.rate_limiter import RateLimiter
from ding_store.buffer.sampling.samplers import Sampler, Uniform
from ding_store.buffer.saving import files
from ding_store.buffer.sequence_sampling import SequenceSampling
from ding_store.buffer.table.base import Columns
from ding_store.buffer.table.choices import (
    Sampled,
    by_rows,
    check_sample_arguments,
    to_row,
)
from ding_store.buffer.table.narrowing import widened_columns
from ding_store.buffer.table.table import Keep, Table
from ding_store.columns import Schema
from ding_store.errors import ConfigError

logger = logging.getLogger(__name__)

__all__ = ['Batch', 'StoreBuffer']


class StoreBuffer(ListSampling, SequenceSampling, Priorities, Buffer):
    """
    Overview:
        A replay buffer in memory-mapped columns, to be used wherever DI-engine takes a DequeBuffer. ``index`` of an
        item is its row number as a string: it only grows, and is never used again.

        Elements in columns are copied when pushed and when read, so that what was sampled may be changed at will;
        ``update`` changes the buffer. Python objects (and, without a path, episodes of varying length) are kept by
        reference.
    Arguments:
        - size (:obj:`int`): The number of elements; the oldest leave when there are more.
        - sliced (:obj:`bool`): Whether ``unroll_len`` starts at its multiples only, as in DequeBuffer.
        - path (:obj:`Optional[str]`): Directory of a buffer that survives its process, killed or not: made on the same
          directory again, it goes on. Not for elements that hold Python objects. None for memory, or unlinked files
          where it does not suffice.
        - sampler (:obj:`Optional[Sampler]`): Chooses rows; uniformly by default.
        - seed (:obj:`Optional[int]`): Of the default sampler and of groups; None follows numpy's global seed.
        - fsync (:obj:`bool`): Whether what is in ``path`` survives power cuts, too; costs some fsyncs per push.
        - limiter (:obj:`Optional[RateLimiter]`): Makes samples and inserts of this process wait for each other.
        - prefetch (:obj:`int`): Batches that are gathered ahead in a thread, of those that come as one batch
          (``sample_batch``, ``sample_time_major``, ``sample_sequences``); see Prefetch. Pays for large rows.
    Raises:
        - ConfigError: ``size`` is no positive integer, or not that of the buffer in ``path``.
        - TableLocked: The buffer in ``path`` is open, here or in another process.
        - FormatMismatch, CorruptPayload: ``path`` was written by another version, or is damaged.
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
    ) -> None:
        super().__init__(size=size)
        self.sliced = sliced
        self._uniform = Uniform(seed)
        self._elements = Elements(integer('size', size, 1), path, fsync)
        self.limiter: Optional[RateLimiter] = None
        try:
            self._sample_with(self._uniform if sampler is None else sampler)
            depth = integer('prefetch', prefetch, 0)
            self._prefetch = Prefetch(depth, self.table, self._sampler) if depth else None
            if limiter is not None:
                self.limit_with(limiter)
        except BaseException:
            # Else a table with a path stays locked for as long as the exception is held.
            self._elements.close()
            raise

    @property
    def table(self) -> Table:
        return self._elements.table

    @property
    def sampler(self) -> Sampler:
        """What chooses rows."""
        return self._sampler

    @property
    def schema(self) -> Optional[Schema]:
        """The leaves of an element; None before the first one, and where elements are Python objects."""
        return self._elements.schema

    @apply_middleware('push')
    def push(self, data: Any, meta: Optional[Dict[Any, Any]] = None) -> BufferedData:
        """
        Overview:
            Add one element.
        Raises:
            - SchemaMismatch: It differs from those before it; names path, expected and actual. Nothing changed.
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        with self._inserting(1):
            row, kept = self._elements.push(data, meta)
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
            Add many elements at once: one copy per leaf. Middleware, where there is any, sees them one by one.
        Arguments:
            - columns (:obj:`Mapping`): Leaf path (``'obs/image'``) -> array ``(n, *leaf)``.
            - schema (:obj:`Optional[Schema]`): Of these columns, where it may differ from the buffer's by what is None;
              without one, the first columns make elements that are trees of tensors.
            - priority (:obj:`Optional[Any]`): ``(n,)``, for a sampler that has such; by default the largest seen.
            - commit (:obj:`Optional[Mapping]`): What ``committed`` is as soon as these elements are there, and not
              before, even if the process is killed: such as a stream's cursor. With middleware it comes after them.
            - meta (:obj:`Optional[dict]`): Of each of these elements.
            - narrowed (:obj:`Collection[str]`): Names of columns of float32 that come as uint8: k for the value k/255.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers ``(n,)``, int64.
        Raises:
            - SchemaMismatch: The columns are not those of the schema. Nothing changed.
            - PriorityError: See ``update_priorities``. Nothing changed.
        """
        if self._middleware:
            known = schema or self._elements.schema
            if known is None:
                raise TypeError('columns need a schema to go through middleware before the first element is pushed')
            elements = known.decode(widened_columns(columns, narrowed))
            metas = None if meta is None else [dict(meta) for _ in elements]
            return self.extend_elements(elements, metas, priority=priority, commit=commit)
        if priority is None:
            with self._inserting(_num_rows(columns)):
                return self._elements.extend(columns, schema, commit, meta=meta, narrowed=narrowed)
        sampler = self._with_priorities()
        values = sampler.check(priority, _num_rows(columns))
        with self._inserting(len(values)):
            rows = self._elements.extend(columns, schema, commit, keeping(sampler, values), meta, narrowed)
        sampler.insert(rows, values)
        return rows

    def extend_elements(
        self,
        elements: Sequence[Any],
        metas: Optional[Sequence[Optional[Dict[Any, Any]]]] = None,
        priority: Optional[Any] = None,
        commit: Optional[Mapping[str, Any]] = None,
    ) -> Array:
        """
        Overview:
            As one ``push`` per element, but faster where there is no middleware; ``priority`` and ``commit`` as in
            ``extend``.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers ``(n,)``, int64.
        """
        keep: Optional[Keep] = None
        if priority is not None:
            sampler = self._with_priorities()
            values = sampler.check(priority, len(elements))
            keep = keeping(sampler, values)
        if self._middleware or len(elements) == 0:
            pairs = zip(elements, metas or [None] * len(elements))
            rows = np.array([int(self.push(data, meta=meta).index) for data, meta in pairs], np.int64)
            if commit is not None:
                self.commit(commit)
        else:
            with self._inserting(len(elements)):
                rows = self._elements.append(elements, metas, commit, keep)
        if priority is not None:
            sampler.insert(rows, values)
        return rows

    def sample_batch(self, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Batch:
        """
        Overview:
            Sample one collated batch: a gather per leaf, and nothing per element. Middleware, where there is any, sees
            the sample as a list first, which costs its time.
        Raises:
            - NotEnoughData: There are fewer elements than asked for.
            - SchemaMismatch: The elements are Python objects, of which there is no collated batch.
            - TypeError: ``size`` is no positive integer, or ``sample_range`` no slice.
        """
        if type(size) is not int or size < 1 or sample_range is not None:
            size, _ = check_sample_arguments(size, None, None, None, sample_range)
        if self._middleware:
            return self._collated(size, replace, sample_range)
        choose = Sampled(self._sampler, size, replace, sample_range)
        read = self._elements.read_batch
        is_simple = self._prefetch is None and self.limiter is None and choose.delivered is None
        rows, data, elements = read(choose) if is_simple else self._read_sampled('batch', choose, read)
        return Batch(data, rows, elements, choose.weights)

    def gather_batch(self, rows: Array) -> Batch:
        """
        Overview:
            One collated batch of these row numbers, in their order. It samples nothing, so no middleware sees it.
        Raises:
            - RowGone: One of them is not there.
            - SchemaMismatch: The elements are Python objects.
        """
        rows, data, elements = self._elements.read_batch(by_rows(rows))
        return Batch(data, rows, elements)

    @apply_middleware('update')
    def update(self, index: str, data: Optional[Any] = None, meta: Optional[Dict[Any, Any]] = None) -> bool:
        """
        Overview:
            Replace the data, the meta or both of one element. Returns whether it was there.
        Raises:
            - SchemaMismatch: The data differ from the other elements. Nothing changed.
        """
        return self._elements.update(to_row(index), data, meta)

    def delete(self, indices: Union[str, Iterable[str]]) -> None:
        """
        Overview:
            Delete by index, one or many; those that are gone already are passed over. O(1) each. Middleware sees them
            one by one, and only those that are there.
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
            Delete everything. The next element may be of another kind.
        Raises:
            - NotEnoughSpace: The disk of its path is full. Nothing changed.
        """
        self._elements.clear()
        if self.limiter is not None:
            self.limiter.begin_anew()

    @property
    def size(self) -> int:
        """The number of elements that it can hold; see ``resize``."""
        return self.table.capacity

    @size.setter
    def size(self, size: int) -> None:
        # DI-engine's constructor sets it; a table has its capacity, which views share.
        if hasattr(self, '_elements'):
            self.resize(size)

    def resize(self, size: int) -> None:
        """
        Overview:
            Hold more or fewer elements from now on: where there are more than ``size``, the oldest leave. O(size).
        Raises:
            - TypeError: ``size`` is no positive integer, or less than the buffer's limiter wants.
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        # No ConfigError, which is a ValueError: DI-engine's fetcher takes those for a shortage.
        size = integer('size', size, 1, TypeError)
        problem = None if self.limiter is None else self.limiter.problem_of_capacity(size)
        if problem is not None:
            raise TypeError(problem)
        self._elements.resize(size)

    @property
    def committed(self) -> Optional[Dict[str, Any]]:
        """What was committed last, by ``extend(..., commit=...)`` or ``commit``, in this process or one before it."""
        return self.table.committed

    def commit(self, note: Mapping[str, Any]) -> None:
        """Set ``committed`` to a dict that JSON can hold, without new elements."""
        self.table.commit(note)

    def keep_in(self, path: str, fsync: bool = False) -> None:
        """
        Overview:
            Be the buffer in ``path`` from now on, as if made with it: for a process that learns late that it is the one
            to have it. The sampler becomes another of the same settings.
        Raises:
            - ConfigError: It has elements or a path already.
        """
        if self.count() or self.table.home is not None:
            raise ConfigError(f'a buffer that has elements, or a path, cannot be kept in {path!r} from now on')
        before, former = dict(vars(self)), self._elements
        try:
            # The others of this run may go on in the middle of episodes.
            self._elements = Elements(int(self.size), path, fsync, begin_episodes=False)
            if self._prefetch is not None:
                self._prefetch.close()
            self._sample_with(self._uniform if self._sampler is self._uniform else copy.deepcopy(self._sampler))
            self._prefetch = self._prefetch and Prefetch(self._prefetch.depth, self.table, self._sampler)
            if self.limiter is not None:
                self.limit_with(self.limiter)
            self._tell_served()
        except BaseException:
            if self._elements is not former:
                self._elements.close()
            self.__dict__.update(before)
            raise
        former.close()

    def limit_with(self, limiter: RateLimiter) -> None:
        """
        Overview:
            Let this limiter make samples and inserts wait from now on, as if the buffer were made with it.
        Raises:
            - ConfigError: The buffer is too small for it, or it is none.
        """
        if not isinstance(limiter, RateLimiter):
            raise ConfigError(f'limiter ({limiter!r}) must be a RateLimiter')
        limiter.attach(self.count, int(self.size), self._sampler)
        self.limiter = limiter
        self._keep_counts()

    def use(self, func: Callable) -> StoreBuffer:
        """
        Overview:
            Middleware between the calls and the buffer, the first one outermost. Of DI-engine's, those that keep
            tables of their own are served by the buffer's samplers, which know of every row that leaves.
        """
        served.use(self._middleware, func, self)
        return self

    def _tell_served(self) -> None:
        for middleware in self._middleware:
            if isinstance(middleware, (served.ServedPriorities, served.ServedUses)):
                middleware.loaded()

    def check(self) -> List[str]:
        """What is wrong with the buffer's memory and files, one sentence each; nothing, unless they were damaged."""
        return [*self.table.check(), *self._elements.findings()]

    def close(self) -> None:
        """Release memory and files. What is in ``path`` stays there, for another process; the buffer is empty."""
        if self._prefetch is not None:
            self._prefetch.close()
        self._elements.close()

    def count(self) -> int:
        return len(self.table)

    def save_data(self, file_name: str) -> None:
        """
        Overview:
            Write all elements, metas and the limiter's counts to one file, which appears whole or not at all.
        """
        files.save(file_name, self._elements, None if self.limiter is None else self.limiter.state)

    def load_data(self, file_name: str) -> None:
        """
        Overview:
            Replace the contents by those of a file of ``save_data``, or of DequeBuffer's (``.hkl``). The buffer keeps
            its size: of a longer file the newest are loaded. Needs room for both until it is done.
        Raises:
            - CorruptPayload: The file is truncated, damaged, or something else. FormatMismatch: Of a later version, or
              it holds objects of a class that cannot be imported.
            - NotEnoughSpace, SchemaMismatch: The elements do not fit. Whatever is raised, the buffer is unchanged.
        """
        counts = files.load(file_name, self._elements)
        with self.table.index.lock:
            self.table.index.tell_loaded()
        self._tell_served()
        if self.limiter is not None:
            # Row numbers are the file's from here on; the counts, too, if it has any.
            self.limiter.load_state(counts or self.limiter.state())

    @property
    def storage(self) -> StorageView:
        """The elements in the order of age, as DequeBuffer's deque: ``len``, ``[i]``, iteration."""
        return StorageView(self)

    @property
    def indices(self) -> IndexView:
        """Index string -> place in the order of age, as DequeBuffer's: ``get``, ``has``, ``len``."""
        return IndexView(self.table)

    @property
    def meta_index(self) -> Dict[Any, List[Any]]:
        """For every key that was grouped by, the values of all elements by age. Made anew at every look."""
        # The index's lock, too: who asks by age may pack its log, as readers do.
        with self.table.write_lock, self.table.index.lock:
            slots = self.table.index.slots_by_age()
            made = {}
            for key in self._elements.metas.group_keys():
                groups = self._elements.metas.groups(key)
                value_of = groups.value_of()
                made[key] = [value_of.get(code) for code in groups.codes[slots].tolist()]
            return made

    @meta_index.setter
    def meta_index(self, index: Mapping[Any, Any]) -> None:
        with self.table.write_lock:
            self._elements.metas.forget_groups()
            for key in index:
                self._elements.metas.groups(key)

    def __iter__(self) -> Iterator[BufferedData]:
        return iter(self.storage)

    def view(self, sampler: Optional[Sampler] = None, name: Optional[str] = None) -> StoreBuffer:
        """
        Overview:
            The same elements under middleware of its own, and a sampler of its own if one is given: several may look
            at one table, each with its own priorities.
        Arguments:
            - name (:obj:`Optional[str]`): Under which the view's priorities, uses and place in a queue outlive the
              process, as the buffer's own do; for a buffer with a path. Without one they are gone with it.
        Raises:
            - ConfigError: There is a view of this name, or it is no word, or comes without a sampler.
        """
        if name is not None:
            self._elements.take_name(checked_view_name(name), sampler)
        view = copy.copy(self)
        if sampler is not None:
            if self.limiter is not None:
                self.limiter.check_sampler(sampler)
            self._attach(sampler)
            view._sampler, view._priorities = sampler, self._kept(sampler, name)
            view._prefetch = self._prefetch and Prefetch(self._prefetch.depth, self.table, sampler)
        return view

    def __copy__(self) -> StoreBuffer:
        """A view: the same elements under middleware of its own."""
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._middleware = []
        view._prefetch = self._prefetch and Prefetch(self._prefetch.depth, self.table, self._sampler)
        return view

    def __deepcopy__(self, memo: Dict[int, Any]) -> StoreBuffer:
        """A buffer of its own, private, with the same elements under the same indices."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name == '_elements' else copy.deepcopy(value, memo)
        with self.table.write_lock:
            twin._elements = files.duplicate(self._elements, memo)
            twin._attach(twin._sampler)
            if isinstance(self._sampler, Limited) and isinstance(twin._sampler, Limited):
                twin._sampler.take_over(self._sampler)
            twin._prefetch = self._prefetch and Prefetch(self._prefetch.depth, twin.table, twin._sampler)
            if twin.limiter is not None:
                twin.limiter.attach(twin.count, int(twin.size), twin._sampler)
            if self._priorities is not None and twin._priorities is not None:
                twin._priorities.load_state(self._priorities.state())
            for own, copied in zip(self._middleware, twin._middleware):
                if isinstance(own, served.ServedPriorities):
                    copied.loaded()
                    copied.load_state_dict(own.state_dict())
        return twin


def _num_rows(columns: Columns) -> int:
    """0 for columns that are none, which are refused where they are looked at."""
    return len(next(iter(columns.values()), ()))
