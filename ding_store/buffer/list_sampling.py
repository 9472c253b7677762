"""StoreBuffer's reads as lists of items, like DI-engine's: samples, groups, and reads by index or age."""

from __future__ import annotations

import logging
import operator
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple, Union

import numpy as np
import treetensor.torch as ttorch
from ding.data.buffer import BufferedData, apply_middleware
from ding.utils import fastcopy
from ding.utils.data.collate_fn import ttorch_collate

from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.elements.elements import Choose, Elements
from ding_store.buffer.samplers.base import Sampler
from ding_store.buffer.samplers.choices import Sampled
from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.sequences.group_choice import GroupChoice, IndexedGroupChoice
from ding_store.buffer.table.row_choices import (
    by_age,
    by_indices,
    by_live_rows,
    check_sample_arguments,
    split,
)
from ding_store.columns import Schema
from ding_store.errors import NotEnoughData

logger = logging.getLogger(__name__)

Samples = Union[List[BufferedData], List[List[BufferedData]]]


class ListSampling:
    """
    Overview:
        The methods of StoreBuffer that return elements as single items. Samples pass through the middleware.
    """

    sliced: bool
    limiter: Optional[RateLimiter]
    _elements: Elements
    _uniform: Uniform
    _sampler: Sampler
    _sampling_together: Callable[[int], ContextManager[Callable[[Array], None]]]
    #: True if the last sample found too few elements.
    _is_short: bool = False

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
    ) -> Samples:
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
        size, indices = check_sample_arguments(size, indices, groupby, unroll_len, sample_range)
        groups: Optional[Union[GroupChoice, IndexedGroupChoice]] = None
        choose: Choose
        if indices:
            choose = by_indices(indices, sample_range)
        elif groupby is not None:
            unroll_len = operator.index(unroll_len) if unroll_len else None
            choose = groups = self._grouped(groupby, size, replace, unroll_len, sample_range)
        else:
            choose = Sampled(self._sampler, size, replace, sample_range)
        try:
            items = self._deliver(choose, size)
        except NotEnoughData as e:
            return self._short(e, ignore_insufficient)
        self._is_short = False
        if isinstance(choose, Sampled) and choose.weights is not None:
            for item, weight in zip(items, choose.weights.tolist()):
                # This bypasses the row's own meta, which would keep the key for later samples.
                dict.__setitem__(item.meta, 'priority_IS', weight)
        return items if groups is None else split(items, groups.lengths)

    def get(self, idx: int) -> BufferedData:
        """
        Overview:
            Return the element at a place by age: 0 is the oldest, -1 the newest. O(1), or O(count) after deletes.
        Raises:
            - IndexError: The buffer has fewer elements.
        """
        return self._read(by_age(operator.index(idx)), warm=False)[1][0]

    def get_by_index(self, index: str) -> BufferedData:
        """
        Raises:
            - RowGone: The buffer has no such element. RowGone is a KeyError, as in DequeBuffer.
        """
        return self._read(by_indices([index]), warm=False)[1][0]

    def _deliver(self, choose: Choose, size: int) -> List[BufferedData]:
        if isinstance(choose, Sampled):
            return choose.deliver(self._read, self._elements.delete, self.limiter)[1]
        if not isinstance(choose, (GroupChoice, IndexedGroupChoice)):
            return self._read(choose)[1]
        # A group counts as one sample, and so does a sequence.
        with self._sampling_together(size) as use:
            rows, items = self._read(choose)
            use(rows)
            return items

    def _read(self, choose: Choose, warm: bool = True) -> Tuple[Array, List[BufferedData]]:
        """Return the row numbers of the chosen rows, and their items."""
        read = self._elements.read(choose, warm)
        items, seen = [], set()
        for row, data, meta in zip(read.rows.tolist(), read.elements, read.metas):
            item = BufferedData(data=data, index=str(row), meta=meta)
            if row in seen:
                # Each further item of the same element is a copy, so that changing one item leaves the others as they
                # are.
                item = BufferedData(data=fastcopy.copy(data), index=item.index, meta=fastcopy.copy(meta))
            seen.add(row)
            items.append(item)
        return read.rows, items

    def _read_live(self, rows: Array) -> List[BufferedData]:
        return self._read(by_live_rows(rows), warm=False)[1]

    def _grouped(
        self, key: str, size: int, replace: bool, unroll_len: Optional[int], sample_range: Optional[slice]
    ) -> Union[GroupChoice, IndexedGroupChoice]:
        with self._elements.table.write_lock:
            groups = self._elements.metas.groups(key)
        draw, sliced = self._uniform.draw, self.sliced
        choice = GroupChoice(groups, draw, size, replace, unroll_len, sliced, sample_range)
        if sample_range is not None:
            return choice
        index = self._elements.sequences.index(key, None, metas_only=True)
        return IndexedGroupChoice(index, choice, draw, size, replace, unroll_len, sliced)

    def _short(self, error: NotEnoughData, ignore: bool) -> List[BufferedData]:
        if not ignore:
            raise error
        if not self._is_short:
            # Log once per shortage: a learner that waits for data calls this at every iteration.
            logger.warning('Sample returned no elements: %s', error)
        self._is_short = True
        return []

    def _collated(self, size: int, replace: bool, sample_range: Optional[slice]) -> Batch:
        # Pass only the arguments that are set: a middleware may not accept the others.
        options: Dict[str, Any] = {'replace': True} if replace else {}
        if sample_range is not None:
            options['sample_range'] = sample_range
        items = self.sample(size=size, **options)  # By keyword: a middleware may have another first argument.
        data, weights = [item.data for item in items], [item.meta.get('priority_IS') for item in items]
        if isinstance(data[0], ttorch.Tensor):
            batch = ttorch_collate(data)
        else:
            schema = Schema.infer(data)
            batch = schema.decode_batch(schema.encode(data))
        return Batch(
            batch,
            np.array([int(item.index) for item in items], np.int64),
            lambda: data,
            None if None in weights else np.array(weights, np.float32),
        )
