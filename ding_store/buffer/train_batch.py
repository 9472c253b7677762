"""The config pipeline's batches: one collated tree that can also be used as the list of its elements."""

from __future__ import annotations

import copy
import sys
import weakref
from types import FrameType
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Union

import treetensor.torch as ttorch
from ding.utils.data import default_collate

#: Keys that the buffer adds to elements but not to the batch. They identify the rows.
IDS = ('replay_unique_id', 'replay_buffer_idx')
#: All keys that the buffer adds to elements. Elements of other buffers may lack them.
OWN_KEYS = (*IDS, 'IS', 'priority_IS')


class Deferred:
    """A value of an element that is computed at its first read."""

    def made(self) -> Any:
        raise NotImplementedError


class Element(Dict[str, Any]):
    """
    Overview:
        One element of a TrainBatch. Its tensors are views of the batch, so changing them in place changes the batch. If
        a key is set, added or removed, the batch is collated from its elements from then on.
    """

    __slots__ = ('_batch',)

    def __init__(self, batch: TrainBatch, items: Any) -> None:
        super().__init__(items)
        # The batch holds its elements. If they held the batch as well, only the garbage collector could free it. Its
        # arrays would then not be warm for the next batch.
        self._batch = weakref.ref(batch)

    def _changed(self, key: str = '') -> None:
        batch = self._batch()
        if batch is not None:
            batch.use_elements(key)

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        made = _made(value)
        if made is not value:
            super().__setitem__(key, made)
        return made

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> Any:
        return self.plain().items()

    def values(self) -> Any:
        return self.plain().values()

    def plain(self) -> Dict[str, Any]:
        """Return a dict of its values, with all deferred values computed."""
        return {key: self[key] for key in self}

    def __setitem__(self, key: str, value: Any) -> None:
        self._changed(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._changed(key)
        super().__delitem__(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._changed()
        super().update(*args, **kwargs)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._changed(key)
        return super().setdefault(key, default)

    def pop(self, *args: Any) -> Any:
        self._changed(args[0])
        return _made(super().pop(*args))

    def __copy__(self) -> Dict[str, Any]:
        return self.plain()

    def __deepcopy__(self, memo: Dict[int, Any]) -> Dict[str, Any]:
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> Any:
        return dict, (self.plain(),)


class TrainBatch(ttorch.Tensor):
    """
    Overview:
        A collated batch with leaves ``(B, ...)`` that also behaves like the list of B dicts: ``len``, ``[i]``,
        iteration, ``+``. Entries, reward models and learners expect that list. ``default_collate`` returns the batch
        itself if it equals the collated list. Otherwise, or if elements were changed, it collates the elements.
    """

    # None in a subtree: treetensor makes subtrees as objects of this class, and they behave as plain trees.
    _size: Optional[int] = None
    _made: Optional[List[Element]] = None
    _by_element = False
    _cat_1dim = True
    _make: Callable[[], List[Dict[str, Any]]]
    #: Keys that may change in elements without a new collation, because no code reads them from the batch.
    _own_keys: FrozenSet[str] = frozenset()

    @classmethod
    def of(
        cls,
        tree: ttorch.Tensor,
        size: int,
        make_elements: Callable[[], List[Dict[str, Any]]],
        cat_1dim: bool = True,
    ) -> TrainBatch:
        """
        Arguments:
            - tree (:obj:`ttorch.Tensor`): The collated batch.
            - size (:obj:`int`): B.
            - make_elements (:obj:`Callable`): Returns the B elements as dicts. Called when they are first read.
            - cat_1dim (:obj:`bool`): True if leaves of shape ``(1,)`` became ``(B,)`` in the batch.
        """
        # From the tree's storage: the constructor would convert values that are not tensors, such as lists of states.
        batch = cls(tree._detach())
        # In ``__dict__``: set as attributes of a tree, they would become its leaves.
        batch.__dict__.update(_size=size, _make=make_elements, _cat_1dim=cat_1dim)
        return batch

    def use_elements(self, key: str = '') -> None:
        """Collate the elements from now on, because they changed. ``key`` names the only key that changed."""
        if key not in self._own_keys:
            self.__dict__['_by_element'] = True

    def elements(self) -> List[Element]:
        made = self._made
        if made is None:
            made = self.__dict__['_made'] = [Element(self, items) for items in self._make()]
        return made

    def json(self) -> Any:
        """
        Overview:
            Return the collated dict that policies train on. ``default_collate`` calls this method without its own
            ``cat_1dim``, which depends on the policy. Therefore the method reads ``cat_1dim`` from its caller's frame.
            The result equals ``default_collate`` of the list of elements.
        """
        if self._size is None:
            return super().json()
        caller: Optional[FrameType] = sys._getframe(1)
        if caller is None or caller.f_code is not default_collate.__code__:
            caller = None
        cat_1dim = self._cat_1dim if caller is None else caller.f_locals['cat_1dim']
        if self._by_element or (caller is not None and not self._is_collated_for(caller.f_back, cat_1dim)):
            elements = [{k: v for k, v in each.items() if k not in IDS} for each in self.elements()]
            return default_collate(elements, cat_1dim=cat_1dim)
        return super().json()

    def _is_collated_for(self, caller: Optional[FrameType], cat_1dim: bool) -> bool:
        """Return whether this batch equals ``default_collate`` of the elements, for a caller with this argument."""
        return bool(cat_1dim) == self._cat_1dim

    def __len__(self) -> int:
        return super().__len__() if self._size is None else self._size

    def __iter__(self) -> Iterator[Element]:
        return super().__iter__() if self._size is None else iter(self.elements())

    def __getitem__(self, key: Union[int, slice, str]) -> Any:
        if self._size is None or (isinstance(key, str) and not self._by_element):
            return super().__getitem__(key)
        if isinstance(key, str):
            return self.json()[key]
        return self.elements()[key]

    def __add__(self, other: Sequence[Any]) -> List[Any]:
        return _mixed([*self, *other])

    def __radd__(self, other: Sequence[Any]) -> List[Any]:
        return _mixed([*other, *self])

    def __copy__(self) -> List[Any]:
        return list(self)

    def __deepcopy__(self, memo: Dict[int, Any]) -> List[Any]:
        return copy.deepcopy([element.plain() for element in self], memo)

    def __reduce__(self) -> Any:
        return list, ([element.plain() for element in self],)


def _made(value: Any) -> Any:
    """Return a value with all deferred parts computed, or the value itself if it has none."""
    if isinstance(value, Deferred):
        return value.made()
    if type(value) is dict:
        made = {key: _made(each) for key, each in value.items()}
        return made if any(made[key] is not value[key] for key in value) else value
    return value


def _mixed(elements: List[Any]) -> List[Any]:
    """Return elements of several buffers without the buffer keys that only some of them have."""
    lacking = [key for key in OWN_KEYS if len({key in element for element in elements}) > 1]
    if not lacking:
        return elements
    return [{key: value for key, value in element.items() if key not in lacking} for element in elements]
