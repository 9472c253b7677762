"""A time-major batch that can be used as the list of sequences that DI-engine's recurrent policies expect."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from functools import cache
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import treetensor.torch as ttorch
from treevalue.tree.common import TreeStorage, create_storage

from ding_store.buffer.batch import IDS, OWN_KEYS, Collation, Deferred, TrainBatch
from ding_store.buffer.sequences.states import STATE, States
from ding_store.buffer.sequences.unrolled import has_optional, parts_can_be_joined
from ding_store.columns import Schema, nodes
from ding_store.errors import ConfigError, SchemaMismatch


class _Form(NamedTuple):
    """The parts of a batch of sequences, beside its leaves."""

    length: int
    #: Returns T lists of the B states before each step.
    states: Callable[[], List[List[Any]]]
    #: The schemas of one step, and of what a sequence has as a whole.
    step: Schema
    rest: Optional[Schema]
    #: Keys of leaves ``(B, ...)``, which sequences have as a whole.
    whole_keys: FrozenSet[str]


class SequenceBatch(TrainBatch):
    """
    Overview:
        A batch with leaves ``(T, B, ...)`` that also behaves like a list of B dicts. The values of the dicts are lists
        of T steps, as collectors of the config pipeline make them. ``timestep_collate`` and IMPALA's collate use the
        batch without copying a leaf. The former serves R2D2, R2D3, NGU, QMIX, WQMIX, CollaQ, QTRAN, COMA and MADQN. Any
        other caller of ``default_collate`` gets lists of T tensors ``(B, ...)``. The sum of two such batches, as the
        entry of R2D3 makes it, is one if their leaves are the same, and else a list.
    """

    _own_keys = frozenset({STATE})
    _form: _Form  # as ``_list``, not in a subtree

    @classmethod
    def of(
        cls,
        tree: ttorch.Tensor,
        size: int,
        make_elements: Callable[[], List[Dict[str, Any]]],
        cat_1dim: bool = True,
    ) -> TrainBatch:
        batch = super().of(tree, size, make_elements, cat_1dim)
        if isinstance(tree, SequenceBatch):
            batch.__dict__['_form'] = tree._form
        return batch

    def __add__(self, other: Sequence[Any]) -> Any:
        if isinstance(other, SequenceBatch) and self._can_be_added() and other._can_be_added():
            with suppress(SchemaMismatch):
                return self._sum(other)
        _check_is_ours(other)
        return super().__add__(other)

    def __radd__(self, other: Sequence[Any]) -> List[Any]:
        _check_is_ours(other)
        return super().__radd__(other)

    def _can_be_added(self) -> bool:
        if self._list is None or self._list.by_element:
            return False
        form = self._form
        return not form.step.ragged and parts_can_be_joined(
            form.step.root, None if form.rest is None else form.rest.root
        )

    def _sum(self, other: SequenceBatch) -> TrainBatch:
        batch = joined([self, other])
        listed = batch._list
        assert listed is not None

        def elements() -> List[Dict[str, Any]]:
            made = listed.make()
            for element, own in zip(made, [*self, *other]):
                element.update({key: own[key] for key in OWN_KEYS if key in own})
            return made

        return SequenceBatch.of(batch, len(batch), elements)

    def _is_collated_for(self, collation: Collation) -> bool:
        return collation.cat_1dim and collation.stacks_steps


def _check_is_ours(elements: Sequence[Any]) -> None:
    """Raise ConfigError if these are of DI-engine's 'advanced' buffer. Numbers in its steps do not become tensors."""
    if not isinstance(elements, TrainBatch) and any(
        isinstance(each, Mapping) and isinstance(each.get(IDS[0]), str) for each in elements
    ):
        raise ConfigError(
            "a batch of sequences of ding_store cannot be added to one of DI-engine's 'advanced' buffer. Set the flag "
            'in both configs, also in that of the expert.'
        )


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
    for key, value in extra.items():
        storage.set(key, value)
    return _batch_of(storage, size, _Form(length, lambda: states.by_step(length, size), step, rest, frozenset(extra)))


def joined(batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """
    Overview:
        Return one batch of the sequences of all batches, in their order. Its leaves are copies, of which its elements
        are views. The states in its elements are those of the batches. Only states may be None in some rows, see
        ``unrolled.can_be_joined``.
    Raises:
        - SchemaMismatch: The batches differ in their leaves or in the length of their sequences.
    """
    forms = [batch._form for batch in batches]
    whole = forms[0].whole_keys | (frozenset(OWN_KEYS) & set(batches[0].keys()))

    @cache
    def states() -> List[List[Any]]:
        return [[each for part in step for each in part] for step in zip(*[form.states() for form in forms])]

    items = [dict(_items(batch._detach())) for batch in batches]
    rows_of_states = None
    if all(STATE in each for each in items) and _have_none([form.step for form in forms]):
        rows_of_states = StepRows(states())
        for each in items:
            del each[STATE]
    storage = create_storage(_joined_trees('', items, lambda key: 0 if key in whole else 1))
    if rows_of_states is not None:
        storage.set(STATE, rows_of_states)
    return _batch_of(storage, sum(map(len, batches)), forms[0]._replace(states=states, whole_keys=whole))


def _have_none(schemas: List[Schema]) -> bool:
    """Return whether states are None in some rows of these schemas, but not in all."""
    found = [_child(schema.root, STATE) or nodes.NOTHING for schema in schemas]
    if len(set(found)) == 1 and not has_optional(found[0]):
        return False
    if not any(node == nodes.NOTHING or has_optional(node) for node in found):
        return False
    present = {node.node if isinstance(node, nodes.Optional) else node for node in found} - {nodes.NOTHING}
    if len(present) > 1:
        raise _differ(STATE, ', '.join(map(str, found)))
    return True


def _batch_of(storage: Any, size: int, form: _Form) -> SequenceBatch:
    items = dict(_items(storage))
    steps = {key: value for key, value in items.items() if key not in form.whole_keys}

    def elements() -> List[Dict[str, Any]]:
        made: List[Dict[str, Any]] = _steps(steps, form.length, size, form.step.root)
        for key in form.whole_keys:
            node = None if form.rest is None else _child(form.rest.root, key)
            for element, each in zip(made, _rows(items[key], size, node)):
                element[key] = each
        if STATE in steps:
            for element, of_sequence in zip(made, zip(*form.states())):
                element[STATE] = list(of_sequence)
        return made

    batch = SequenceBatch.of(ttorch.Tensor(storage), size, elements)
    assert isinstance(batch, SequenceBatch)
    batch.__dict__['_form'] = form  # as ``of`` sets the list
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
    values = [value._detach() if isinstance(value, ttorch.Tensor) else value for value in values]
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        kinds = {(value.dtype, (*value.shape[:axis], *value.shape[axis + 1 :])) for value in values}
        if len(kinds) > 1:
            raise _differ(path, ', '.join(f'{value.dtype} {tuple(value.shape)}' for value in values))
        return torch.cat(values, axis)
    if all(isinstance(value, (TreeStorage, dict)) for value in values):
        return _joined_trees(f'{path}.', values, lambda key: axis)
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


def _rows(value: Any, size: int, node: Optional[nodes.Node]) -> List[Any]:
    """Return each sequence's part of a leaf ``(B, ...)``, or of a tree or list of such leaves."""
    if value is None:
        return [None] * size
    if isinstance(value, ttorch.Tensor):
        value = value._detach()
    if isinstance(value, (dict, TreeStorage)):
        parts = {key: _rows(each, size, _child(node, key)) for key, each in _items(value)}
        return [{key: rows[place] for key, rows in parts.items()} for place in range(size)]
    if isinstance(node, nodes.Positional):
        places = [_rows(each, size, child) for each, child in zip(value, node.items)]
        return [_like(value, list(row)) for row in zip(*places)]
    return list(_as_pushed(value, node))


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
