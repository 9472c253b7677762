"""A time-major batch that can be used as the list of sequences that DI-engine's recurrent policies expect."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
import treetensor.torch as ttorch
from treevalue.tree.common import TreeStorage, create_storage

from ding_store.buffer.batch import Collation, Deferred, TrainBatch
from ding_store.buffer.sequences.states import STATE, States
from ding_store.columns import Schema, nodes
from ding_store.errors import SchemaMismatch


class SequenceBatch(TrainBatch):
    """
    Overview:
        A batch with leaves ``(T, B, ...)`` that also behaves like a list of B dicts. The values of the dicts are lists
        of T steps, as collectors of the config pipeline make them. ``timestep_collate`` and IMPALA's collate use the
        batch without copying a leaf. The former serves R2D2, R2D3, NGU, QMIX, WQMIX, CollaQ, QTRAN, COMA and MADQN. Any
        other caller of ``default_collate`` gets lists of T tensors ``(B, ...)``.
    """

    _own_keys = frozenset({STATE})
    #: Keys of leaves ``(B, ...)``, which sequences have as a whole.
    _whole_keys: FrozenSet[str] = frozenset()

    def _is_collated_for(self, collation: Collation) -> bool:
        return collation.cat_1dim and collation.stacks_steps


class StepRows(List[List[Any]]):
    """T lists of B values, for a leaf that is None in some rows."""


class Steps(Deferred, SequenceABC):
    """One sequence's part of a leaf ``(T, B, ...)``: the list of its steps, computed at the first read."""

    __slots__ = ('_leaf', '_length', '_place')

    def __init__(self, leaf: Any, length: int, place: int) -> None:
        self._leaf, self._length, self._place = leaf, length, place

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, step: Any) -> Any:
        return self.made()[step]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made())

    def made(self) -> List[Any]:
        if isinstance(self._leaf, torch.Tensor):
            return list(self._leaf[:, self._place].unbind(0))
        return [_at(self._leaf, step, self._place) for step in range(self._length)]


def in_steps(tree: ttorch.Tensor, length: int, size: int) -> ttorch.Tensor:
    """Reshape a tree of steps ``(length * size, ...)``, in the order of time, to ``(length, size, ...)``."""
    return ttorch.Tensor(_split(tree._detach(), length, size))


def sequence_batch(
    tree: ttorch.Tensor,
    length: int,
    size: int,
    states: States,
    step: Schema,
    extra: Mapping[str, Any],
    rest: Optional[Schema] = None,
) -> SequenceBatch:
    """
    Overview:
        Return one batch of ``size`` sequences.
    Arguments:
        - tree (:obj:`ttorch.Tensor`): Leaves ``(length, size, ...)``. The batch uses its storage.
        - states (:obj:`States`): The states before the steps, the first steps of all sequences first. Computed when
          they are read.
        - step (:obj:`Schema`): The schema of one step.
        - extra (:obj:`Mapping`): Leaves ``(size, ...)`` that sequences have as a whole.
        - rest (:obj:`Optional[Schema]`): The schema of those.
    """
    storage = tree._detach()
    batch_of_steps = dict(_items(storage))

    def elements() -> List[Dict[str, Any]]:
        made: List[Dict[str, Any]] = _steps(batch_of_steps, length, size, step.root)
        for key, value in extra.items():
            for element, each in zip(made, _as_pushed(value, None if rest is None else _child(rest.root, key))):
                element[key] = each
        if STATE in batch_of_steps:
            for element, of_sequence in zip(made, zip(*states.by_step(length, size))):
                element[STATE] = list(of_sequence)
        return made

    for key, value in extra.items():
        storage.set(key, value)
    return _batch_of(tree, size, elements, frozenset(extra))


def joined(batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """
    Overview:
        Return one batch of the sequences of all batches, in their order. Its leaves are copies. Its elements are those
        of the batches.
    Raises:
        - SchemaMismatch: The batches differ in their leaves or in the length of their sequences.
    """
    whole = batches[0]._whole_keys
    storages = [batch._detach() for batch in batches]
    tree = ttorch.Tensor(_joined_trees('', storages, lambda key: 0 if key in whole else 1))

    def elements() -> List[Dict[str, Any]]:
        # Without computing what is deferred.
        return [dict(dict.items(element)) for batch in batches for element in batch.elements()]

    return _batch_of(tree, sum(map(len, batches)), elements, whole)


def _batch_of(
    tree: ttorch.Tensor, size: int, elements: Callable[[], List[Dict[str, Any]]], whole_keys: FrozenSet[str]
) -> SequenceBatch:
    batch = SequenceBatch.of(tree, size, elements)
    batch.__dict__['_whole_keys'] = whole_keys  # as ``of`` sets the list
    assert isinstance(batch, SequenceBatch)
    return batch


def _joined_trees(path: str, trees: List[Any], axis_of: Callable[[str], int]) -> Any:
    items = [dict(_items(tree)) for tree in trees]
    for key in {key for each in items for key in each}:
        if any(key not in each for each in items):
            raise _differ(f'{path}{key}', 'only some have it')
    made = {key: _joined(f'{path}{key}', [each[key] for each in items], axis_of(key)) for key in items[0]}
    return create_storage(made) if isinstance(trees[0], TreeStorage) else made


def _joined(path: str, values: List[Any], axis: int) -> Any:
    """Join the parts of a leaf along the axis of its sequences."""
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        kinds = {(value.dtype, (*value.shape[:axis], *value.shape[axis + 1 :])) for value in values}
        if len(kinds) > 1:
            raise _differ(path, ', '.join(f'{value.dtype} {tuple(value.shape)}' for value in values))
        return torch.cat(values, axis)
    if all(isinstance(value, (TreeStorage, dict)) for value in values):
        return _joined_trees(f'{path}.', values, lambda key: axis)
    if all(isinstance(value, StepRows) for value in values) and len(set(map(len, values))) == 1:
        return StepRows([row for rows in step for row in rows] for step in zip(*values))
    if all(isinstance(value, (list, tuple)) for value in values) and len(set(map(len, values))) == 1:
        return _like(first, [_joined(path, list(each), axis) for each in zip(*values)])
    if all(value is None for value in values):
        return None
    raise _differ(path, ', '.join(type(value).__name__ for value in values))


def _differ(path: str, found: str) -> SchemaMismatch:
    return SchemaMismatch(
        f'leaf {path!r} differs between the sources of a mixed batch: {found}. Store the same leaves in all of them.'
    )


def _steps(value: Any, length: int, size: int, node: Optional[nodes.Node]) -> List[Any]:
    """Return each sequence's part of a batch: dicts of lists of steps, as collectors build them."""
    if not isinstance(value, (dict, TreeStorage)):
        value = _as_pushed(value, node)
        return [Steps(value, length, place) for place in range(size)]
    made: List[Dict[str, Any]] = [{} for _ in range(size)]
    for key, each in _items(value):
        if each is not None:
            for element, steps in zip(made, _steps(each, length, size, _child(node, key))):
                element[key] = steps
    return made


def _as_pushed(value: Any, node: Optional[nodes.Node]) -> Any:
    """Return a leaf with the last axis of the pushed elements. In a batch, shape ``(1,)`` became a number."""
    is_one = isinstance(node, nodes.Leaf) and node.shape == (1,)
    return value.unsqueeze(-1) if is_one and isinstance(value, torch.Tensor) else value


def _child(node: Optional[nodes.Node], key: str) -> Optional[nodes.Node]:
    return dict(node.items).get(key) if isinstance(node, nodes.Mapping) else None


def _at(value: Any, step: int, place: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[step, place]
    if isinstance(value, StepRows):
        return value[step][place]
    if isinstance(value, (TreeStorage, dict)):
        return {key: _at(each, step, place) for key, each in _items(value)}
    if isinstance(value, (list, tuple)):
        return _like(value, [_at(each, step, place) for each in value])
    return value


def _split(value: Any, length: int, size: int) -> Any:
    """Reshape leaves ``(length * size, ...)`` to ``(length, size, ...)``, as views."""
    if isinstance(value, torch.Tensor):
        return value.view(length, size, *value.shape[1:])
    if isinstance(value, TreeStorage):
        return create_storage({key: _split(each, length, size) for key, each in _items(value)})
    if isinstance(value, dict):
        return {key: _split(each, length, size) for key, each in _items(value)}
    if isinstance(value, list) and len(value) == length * size and any(each is None for each in value):
        # A leaf that is None in some rows is a list of rows.
        return StepRows(value[start : start + size] for start in range(0, length * size, size))
    if isinstance(value, (list, tuple)):
        return _like(value, [_split(each, length, size) for each in value])
    return value


def _items(value: Any) -> List[Tuple[str, Any]]:
    if isinstance(value, TreeStorage):
        return list(value.iter_items())
    return list(value.items())


def _like(value: Any, items: List[Any]) -> Any:
    return type(value)(*items) if hasattr(value, '_fields') else type(value)(items)
