"""
The recurrent states of a batch: a dict of tensors per agent, step and sequence. DI-engine's policies look at those of
the first step or two, and to make all of them would take longer than to gather the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ding_store.buffer.array_types import Array
from ding_store.columns import Schema, nodes

#: The recurrent state before each step, which policies want as T lists of B states.
STATE = 'prev_state'


class States:
    """
    Overview:
        The states before ``T * B`` steps, the first step of all sequences first.
    Arguments:
        - schema (:obj:`Schema`): Of a step.
        - columns (:obj:`Mapping`): Of the steps, ``(T * B, ...)``.
    """

    def __init__(self, schema: Schema, columns: Mapping[str, Array]) -> None:
        self._schema, self._later = _of_states(schema)
        names = () if self._schema is None else self._schema.columns()
        self._columns = {name: columns[name] for name in names if name in columns}

    def by_step(self, length: int, size: int) -> List[List[Any]]:
        """
        Returns:
            - states (:obj:`List[List[Any]]`): For each of ``length`` steps the states of all ``size`` sequences. Where
              they are dicts or lists, those of a step are made when somebody looks at one of them.
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
    """The schema of the states alone, None where all of them are None; and what may stand for one, if anything may."""
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
    """Whether these are lists of tensors, whose items torch.stack reads past all methods."""
    items = [state.item] if isinstance(state, nodes.Unrolled) else state.items
    return any(isinstance(item, nodes.Leaf) for item in items)


class _Step:
    """The states of one step, which come together."""

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
    Every method of ``kind`` looks, and so do operators with another of these: C code reads what it is given past the
    methods, but operators ask the more special type first.
    """

    def decorate(made: type) -> type:
        for name, method in vars(kind).items():
            if callable(method) and name not in vars(made) and name not in _BLIND:
                setattr(made, name, _filled_first(method))
        return made

    return decorate


#: What neither reads items nor changes them.
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
