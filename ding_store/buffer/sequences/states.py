"""
Recurrent states of a batch, computed at the first read.

The states are dicts of tensors per agent, step and sequence. DI-engine's policies read those of the first one or two
steps. Computing all of them would take longer than gathering the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ding_store.buffer.array_types import Array
from ding_store.columns import Schema, nodes

#: The recurrent state before each step. Policies expect T lists of B states.
STATE = 'prev_state'


class States:
    """
    Overview:
        The states before ``T * B`` steps, the first steps of all sequences first.
    Arguments:
        - schema (:obj:`Schema`): The schema of a step.
        - columns (:obj:`Mapping`): The columns of the steps, ``(T * B, ...)``.
    """

    def __init__(self, schema: Schema, columns: Mapping[str, Array]) -> None:
        self._schema, self._later = _of_states(schema)
        names = () if self._schema is None else self._schema.columns()
        self._columns = {name: columns[name] for name in names if name in columns}

    def by_step(self, length: int, size: int) -> List[List[Any]]:
        """
        Returns:
            - states (:obj:`List[List[Any]]`): For each of ``length`` steps the states of all ``size`` sequences. States
              that are dicts or lists are computed, for a whole step, when one of them is first read.
        """
        if self._schema is None:
            return [[None] * size] * length
        later = self._later
        if later is None:
            every = self.decode(0, length * size)
            return [every[begin : begin + size] for begin in range(0, len(every), size)]
        steps = [_Step(self, step * size, size) for step in range(length)]
        return [[later(step, place) for place in range(size)] for step in steps]

    def decode(self, first: int, end: int) -> List[Any]:
        assert self._schema is not None
        made = self._schema.decode({name: column[first:end] for name, column in self._columns.items()})
        return [element[STATE] for element in made]


@lru_cache(maxsize=16)
def _of_states(schema: Schema) -> Tuple[Optional[Schema], Optional[Callable[[_Step, int], Any]]]:
    """Return the schema of the states, None if all are None, and the class for states computed later, if any."""
    root = schema.root
    assert isinstance(root, nodes.Mapping)
    part = nodes.Mapping('dict', tuple((key, child) for key, child in root.items if key == STATE))
    if not nodes.leaf_names(part):
        return None, None
    ((_, state),) = part.items
    if isinstance(state, nodes.Mapping):
        return Schema(part), LaterDict if state.kind == 'dict' else None
    is_list = isinstance(state, nodes.Unrolled) or (isinstance(state, nodes.Positional) and state.kind == 'list')
    return Schema(part), LaterList if is_list and not _holds_leaves(state) else None


def _holds_leaves(state: Any) -> bool:
    """Return whether these are lists of tensors. torch.stack reads their items without calling a method."""
    items = [state.item] if isinstance(state, nodes.Unrolled) else state.items
    return any(isinstance(item, nodes.Leaf) for item in items)


class _Step:
    """The states of one step, which are computed together."""

    __slots__ = ('_states', '_first', '_size', '_made')

    def __init__(self, states: States, first: int, size: int) -> None:
        self._states, self._first, self._size = states, first, size
        self._made: Optional[List[Any]] = None

    def __getitem__(self, place: int) -> Any:
        if self._made is None:
            self._made = self._states.decode(self._first, self._first + self._size)
        return self._made[place]


def _fill(value: Any) -> None:
    if isinstance(value, (LaterDict, LaterList)) and value.step is not None:
        step, value.step = value.step, None
        value.take(step[value.place])


def _looking(kind: type) -> Callable[[type], type]:
    """
    Wrap every method of ``kind`` so that it first computes the object and its arguments. This also covers operators:
    C code reads the items of its arguments directly, but an operator calls the method of the subclass first.
    """

    def decorate(made: type) -> type:
        for name, method in vars(kind).items():
            if callable(method) and name not in vars(made) and name not in _BLIND:
                setattr(made, name, _filled_first(method))
        return made

    return decorate


#: Methods that neither read nor change items.
_BLIND = ('__new__', '__init__', '__getattribute__', '__hash__', '__class_getitem__', '__sizeof__')


def _filled_first(method: Callable) -> Callable:
    def looked_at(self: Any, *args: Any, **kwargs: Any) -> Any:
        _fill(self)
        for each in args:
            _fill(each)
        return method(self, *args, **kwargs)

    return looked_at


@_looking(dict)
class LaterDict(Dict[Any, Any]):
    __slots__ = ('step', 'place')

    def __init__(self, step: _Step, place: int) -> None:
        self.step: Optional[_Step] = step
        self.place = place

    def take(self, made: Dict[Any, Any]) -> None:
        dict.update(self, made)

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)

    __reduce_ex__ = lambda self, protocol: self.__reduce__()  # noqa: E731


@_looking(list)
class LaterList(List[Any]):
    __slots__ = ('step', 'place')

    def __init__(self, step: _Step, place: int) -> None:
        self.step: Optional[_Step] = step
        self.place = place

    def take(self, made: List[Any]) -> None:
        list.extend(self, made)

    def __radd__(self, other: List[Any]) -> List[Any]:
        return [*other, *self]

    def __reduce__(self) -> Any:
        return list, (list(self),)
