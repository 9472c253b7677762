"""The two sides: DI-engine's DequeBuffer with its middleware and collate, and StoreBuffer, behind one interface."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np
import torch
import treetensor.torch as ttorch
from treevalue.tree.common import create_storage

from ding_store.compare.rows import Columns, Row
from ding_store.gc_freeze import leave_out_of_collections, take_back_into_collections

#: Bytes that the fill makes at once.
CHUNK_BYTES = 128 << 20


def elements_of(row: Row, columns: Columns) -> List[Any]:
    """Return the elements that a collector pushes: views of these columns, like transitions of an env batch."""
    tensors = {path: torch.from_numpy(column) for path, column in columns.items()}
    count = len(next(iter(tensors.values())))
    if row.steps:
        by_row = {path: [list(one.unbind(0)) for one in tensor.unbind(0)] for path, tensor in tensors.items()}
        return [_sequence({path: lists[i] for path, lists in by_row.items()}) for i in range(count)]
    rows = {path: tensor.unbind(0) for path, tensor in tensors.items()}
    return [ttorch.Tensor(create_storage(_nested({p: each[i] for p, each in rows.items()}))) for i in range(count)]


def _nested(leaves: Dict[str, Any]) -> Dict[str, Any]:
    tree: Dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split('/')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _sequence(lists: Dict[str, List[Any]]) -> Dict[str, Any]:
    element = _nested(lists)
    state = element.pop('prev_state', None)
    if state is not None:
        element['prev_state'] = [_state(tuple(state), values) for values in zip(*state.values())]
    return element


def _state(names: Tuple[str, ...], values: Tuple[torch.Tensor, ...]) -> Any:
    """Return the recurrent state before a step: a dict, or a list with one for each agent."""
    if values[0].dim() < 4:
        return dict(zip(names, values))
    return [dict(zip(names, each)) for each in zip(*(value.unbind(0) for value in values))]


class Side:
    """
    Overview:
        A filled replay in its steady state: every push evicts the oldest element. ``push`` does what data_pusher does
        with a collector's elements. ``sample`` returns the learner's input: one collated batch. In a prioritized row it
        also writes new priorities, as a learner's iteration does.
    """

    def __init__(self, row: Row, length: int) -> None:
        self.row, self.length = row, length
        self._rng = np.random.default_rng(3)

    def fill(self, source: Columns) -> None:
        raise NotImplementedError

    def elements(self, count: int) -> List[Any]:
        """Return the next elements to push."""
        return [next(self._supply) for _ in range(count)]

    buffer: Any
    _supply: Iterator[Any]

    def push(self, elements: List[Any]) -> None:
        raise NotImplementedError

    def train_data(self) -> Any:
        """Return a sample as a policy takes it: a list of elements, or one batch."""
        raise NotImplementedError

    def update(self, priority: Sequence[float]) -> None:
        """Write new priorities of the last sample."""
        raise NotImplementedError

    def has_trained(self) -> None:
        """Adjust the process after a policy has trained on a first sample."""

    def sample(self) -> Any:
        batch = collated(self.row, self.train_data())
        if self.row.kind == 'prioritized':
            self.update(self._priorities().tolist())
        return batch

    def count(self) -> int:
        return int(self.buffer.count())

    def _priorities(self) -> np.ndarray:
        return self._rng.random(self.row.batch) + 0.01


class Stock(Side):
    title = 'stock'

    def fill(self, source: Columns) -> None:
        from ding.data import DequeBuffer
        from ding.data.buffer.middleware import PriorityExperienceReplay, use_time_check

        self.buffer = DequeBuffer(self.length)
        if self.row.kind == 'prioritized':
            self.buffer.use(PriorityExperienceReplay(self.buffer, IS_weight=True))
        elif self.row.kind == 'limited':
            self.buffer.use(use_time_check(self.buffer, max_use=self.row.max_use))
        # DequeBuffer keeps references: each element is an object, and is pushed again only after it was evicted.
        self._all: List[Any] = []
        for columns in chunks(self.row, self.length):
            made = elements_of(self.row, columns)
            self.push(made)
            self._all += made
        self._supply = _cycle(self._all)

    def push(self, elements: List[Any]) -> None:
        for element in elements:
            self.buffer.push(element)

    def train_data(self) -> Any:
        self._items = self.buffer.sample(self.row.batch)
        return [item.data for item in self._items]

    def update(self, priority: Sequence[float]) -> None:
        for item, value in zip(self._items, priority):
            item.meta['priority'] = float(value)
            self.buffer.update(item.index, None, item.meta)


class Store(Side):
    title = 'store'

    def fill(self, source: Columns) -> None:
        from ding_store.buffer import StoreBuffer

        # The same elements come again and again, so all frames would be shared, as in no real replay.
        self.buffer = StoreBuffer(self.length, sampler=sampler_of(self.row), seed=0, share_frames=False)
        for columns in chunks(self.row, self.length):
            self.buffer.extend_elements(elements_of(self.row, columns))
        # StoreBuffer copies elements: a few are enough, if they have more bytes than any cache.
        self._supply = _cycle(elements_of(self.row, source))

    def push(self, elements: List[Any]) -> None:
        self.buffer.extend_elements(elements)

    def train_data(self) -> Any:
        size = self.row.batch
        batch = self.buffer.sample_time_major(size) if self.row.steps else self.buffer.sample_batch(size)
        self.rows = batch.rows
        return batch.data

    def update(self, priority: Sequence[float]) -> None:
        self.buffer.update_priorities(self.rows, np.asarray(priority))

    def has_trained(self) -> None:
        # The learner and the buffer of the config pipeline do the same. Both sides did so after the fill.
        take_back_into_collections()
        leave_out_of_collections()


def collated(row: Row, elements: List[Any]) -> Any:
    """Return the batch that the row's policy of DI-engine collates first from a list of elements."""
    from ding.utils.data import default_collate, timestep_collate

    if row.collate == 'timestep':
        return timestep_collate(elements)
    # Like default_preprocess_learn: continuous actions keep their last dimension, and then all leaves do.
    batch = default_collate(elements, cat_1dim=row.leaves['action'][0] is np.int64)
    if row.collate == 'impala':
        batch = {key: default_collate(value) if isinstance(value, list) else value for key, value in batch.items()}
    return batch


def sampler_of(row: Row) -> Any:
    from ding_store.buffer import Prioritized, Uniform, limited

    if row.kind == 'prioritized':
        return Prioritized(alpha=0.6, beta=0.4, seed=0)
    if row.kind == 'limited':
        return limited(Uniform(0), max_times_sampled=row.max_use)
    return None


def chunks(row: Row, length: int) -> Iterator[Columns]:
    """Yield ``length`` elements in pieces. Each piece has other memory and the same random bytes."""
    size = max(1, min(length, CHUNK_BYTES // row.element_bytes))
    first = row.columns(size)
    for begin in range(0, length, size):
        left = min(size, length - begin)
        yield {path: column[:left].copy() for path, column in first.items()}


def _cycle(elements: List[Any]) -> Iterator[Any]:
    while True:
        yield from elements


SIDES = {side.title: side for side in (Stock, Store)}
