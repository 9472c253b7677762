"""Reads as DI-engine's buffers offer them: lists of items and of groups, and views of the storage and the index."""

from __future__ import annotations

import logging
import operator
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import numpy as np
import treetensor.torch as ttorch
from ding.data.buffer import BufferedData
from ding.utils import fastcopy
from ding.utils.data.collate_fn import ttorch_collate

from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.elements.elements import Choose, Elements
from ding_store.buffer.samplers.choices import Sampled
from ding_store.buffer.samples import Samples
from ding_store.buffer.sequences.group_choice import GroupChoice, IndexedGroupChoice
from ding_store.buffer.table.row_choices import by_indices, by_live_rows, check_sample_arguments, split, to_row
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.columns.ragged import Names, Ragged, ragged_lengths
from ding_store.errors import NotEnoughData, RowGone

logger = logging.getLogger(__name__)

Items = Union[List[BufferedData], List[List[BufferedData]]]


class Lists:
    """
    Overview:
        The elements of a buffer or a view as single items.
    Arguments:
        - samples (:obj:`Samples`): Its sampler draws items one by one.
        - sliced (:obj:`bool`): Let ``unroll_len`` start only at its multiples.
    """

    def __init__(self, elements: Elements, samples: Samples, sliced: bool) -> None:
        self._elements, self._samples, self._sliced = elements, samples, sliced
        #: True if the last sample found too few elements.
        self._is_short = False

    def sample(
        self,
        size: Optional[int],
        indices: Optional[List[str]],
        replace: bool,
        sample_range: Optional[slice],
        ignore_insufficient: bool,
        groupby: Optional[str],
        unroll_len: Optional[int],
    ) -> Items:
        """Sample elements or groups, or read those of given indices. ``StoreBuffer.sample`` describes the arguments."""
        size, indices = check_sample_arguments(size, indices, groupby, unroll_len, sample_range)
        groups: Optional[Union[GroupChoice, IndexedGroupChoice]] = None
        choose: Choose
        if indices:
            choose = by_indices(indices, sample_range)
        elif groupby is not None:
            unroll_len = operator.index(unroll_len) if unroll_len else None
            choose = groups = self._grouped(groupby, size, replace, unroll_len, sample_range)
        else:
            choose = Sampled(self._samples.sampler, size, replace, sample_range)
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

    def read(self, choose: Choose, warm: bool = False) -> List[BufferedData]:
        """Return the items of the chosen rows."""
        return self._read(choose, warm)[1]

    def read_live(self, rows: Array) -> List[BufferedData]:
        """Return the items of those rows that are still in the buffer."""
        return self.read(by_live_rows(rows))

    def _deliver(self, choose: Choose, size: int) -> List[BufferedData]:
        if isinstance(choose, Sampled):
            return choose.deliver(self._read, self._elements.delete, self._samples.limiter)[1]
        if not isinstance(choose, (GroupChoice, IndexedGroupChoice)):
            return self._read(choose)[1]
        # A group counts as one sample, and so does a sequence.
        with self._samples.together(size) as use:
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

    def _grouped(
        self, key: str, size: int, replace: bool, unroll_len: Optional[int], sample_range: Optional[slice]
    ) -> Union[GroupChoice, IndexedGroupChoice]:
        with self._elements.table.write_lock:
            groups = self._elements.metas.groups(key)
        draw, sliced = self._samples.uniform.draw, self._sliced
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


def collated(items: List[BufferedData], ragged: Names = ()) -> Batch:
    """Return one batch of items that passed through middleware. ``ragged`` names leaves whose lengths vary."""
    data, weights = [item.data for item in items], [item.meta.get('priority_IS') for item in items]
    lengths: Mapping[str, Array] = {}
    if ragged:
        schema = Schema.infer(data, ragged=ragged)
        columns, arrays = schema.encode_ragged(data)
        columns.update({name: Ragged.of(arrays[name], *spec) for name, spec in schema.ragged.items()})
        batch, lengths = schema.decode_batch(columns), ragged_lengths(schema, columns)
    elif isinstance(data[0], ttorch.Tensor):
        batch = ttorch_collate(data)
    else:
        schema = Schema.infer(data)
        batch = schema.decode_batch(schema.encode(data))
    return Batch(
        batch,
        np.array([int(item.index) for item in items], np.int64),
        lambda: data,
        None if None in weights else np.array(weights, np.float32),
        lengths,
    )


def meta_index(elements: Elements) -> Dict[Any, List[Any]]:
    """Return the values of all elements by age, for each meta key that was grouped by."""
    # The index's lock is needed because ``slots_by_age`` may compact the index's log.
    with elements.table.write_lock, elements.table.index.lock:
        slots = elements.table.index.slots_by_age()
        made = {}
        for key in elements.metas.group_keys():
            groups = elements.metas.groups(key)
            value_of = groups.value_of()
            made[key] = [value_of.get(code) for code in groups.codes[slots].tolist()]
        return made


def group_by(elements: Elements, keys: Mapping[Any, Any]) -> None:
    """Group by these meta keys, and by no others."""
    with elements.table.write_lock:
        elements.metas.forget_groups()
        for key in keys:
            elements.metas.groups(key)


#: Elements that an iteration reads at once.
_CHUNK = 256


class StorageView:
    """
    Overview:
        The elements of a buffer in the order of age.
    Arguments:
        - table (:obj:`Table`): The buffer's table.
        - get (:obj:`Callable`): Returns the element at a position in the order of age.
        - read_live (:obj:`Callable`): Returns the elements of those rows that are still in the buffer.
    """

    def __init__(
        self,
        table: Table,
        get: Callable[[int], BufferedData],
        read_live: Callable[[Array], List[BufferedData]],
    ) -> None:
        self._table, self._get, self._read_live = table, get, read_live

    @property
    def maxlen(self) -> int:
        return self._table.capacity

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, position: int) -> BufferedData:
        return self._get(position)

    def __iter__(self) -> Iterator[BufferedData]:
        """Iterate over the elements of this moment. An element that leaves the buffer before its turn is skipped."""
        rows = self._table.rows_by_age()
        for start in range(0, len(rows), _CHUNK):
            yield from self._read_live(rows[start : start + _CHUNK])


class IndexView:
    """The place of each index string, ordered by age."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def get(self, index: str) -> int:
        """
        Raises:
            - RowGone: The buffer has no such element. RowGone is a KeyError, as in DequeBuffer.
        """
        if not self.has(index):
            raise RowGone(f'index {index!r} is not in the buffer')
        return int(np.searchsorted(self._table.rows_by_age(), to_row(index)))

    def has(self, index: str) -> bool:
        return bool(self._table.contains(np.array([to_row(index)]))[0])

    def __len__(self) -> int:
        return len(self._table)
