"""Sampled batches: the result type of a buffer, and the config pipeline's, which is also the list of its elements."""

from __future__ import annotations

import copy
import sys
import weakref
from types import FrameType
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch
import treetensor.torch as ttorch
from ding.utils.data import default_collate, timestep_collate

from ding_store.buffer.array_types import Array


class Batch(NamedTuple):
    """
    Overview:
        A sample as one batch. ``data``: a collated tree with leaves ``(B, ...)``, valid while any part of it is
        referenced. ``rows``: row numbers ``(B,)``. ``elements()``: the B elements, as views of the same memory.
        ``weights``: importance weights ``(B,)``, None for uniform samples.

        Ragged leaves are padded with zeros to the longest of the batch. ``lengths``: leaf -> the lengths without
        padding, ``(B,)``. Elements are not padded.

        A batch of sequences has leaves ``(T, B, ...)``, rows and lengths ``(T, B)``, and B lists of T elements, which
        are padded.
    """

    data: ttorch.Tensor
    rows: Array
    elements: Callable[[], List[Any]]
    weights: Optional[Array] = None
    lengths: Mapping[str, Array] = {}

    def mask(self, name: str) -> torch.Tensor:
        """
        Overview:
            Return where a ragged leaf has values, bool ``(B, longest)``: False at padding.
        Raises:
            - KeyError: The leaf is not ragged.
        """
        return mask_of(self.lengths, name)


def mask_of(lengths: Mapping[str, Array], name: str) -> torch.Tensor:
    """Return where a ragged leaf has values, see ``Batch.mask``."""
    if name not in lengths:
        raise KeyError(f'{name!r} is not ragged. The ragged leaves are {sorted(lengths)}.')
    found = lengths[name]
    return torch.from_numpy(np.arange(found.max(initial=0)) < found[..., None])


#: Keys that the buffer adds to elements but not to the batch. They identify the rows.
_ID = 'replay_unique_id'
IDS = (_ID, 'replay_buffer_idx')
#: All keys that the buffer adds to elements. Elements of other buffers may lack them.
OWN_KEYS = (*IDS, 'IS', 'priority_IS')


class Collation(NamedTuple):
    """A running call of ``default_collate``, for which a batch makes its collated dict."""

    cat_1dim: bool
    #: Whether its caller stacks lists of steps, and leaves tensors unchanged.
    stacks_steps: bool


def running_collation() -> Optional[Collation]:
    """
    Overview:
        Return the call of ``default_collate`` that called the caller of this function, if there is one.

        This is the only place that reads stack frames. For a tree, ``default_collate`` calls ``json`` without any
        argument and uses nothing else of the tree. Its ``cat_1dim`` and its caller depend on the policy. Without them
        a batch cannot tell whether it equals the collated list, and each policy would have to collate the list again.
    """
    frame = sys._getframe(2)
    if frame.f_code is not default_collate.__code__:
        return None
    return Collation(bool(frame.f_locals['cat_1dim']), frame.f_back is not None and _stacks_steps(frame.f_back))


def _stacks_steps(caller: FrameType) -> bool:
    if caller.f_code is timestep_collate.__code__:
        return True
    # Compared by name, because importing the policies of DI-engine takes seconds.
    return (caller.f_code.co_name, caller.f_globals.get('__name__')) == ('_data_preprocess_learn', 'ding.policy.impala')


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


class _AsList:
    """The list that a TrainBatch is as well: its size, its elements, and whether these differ from the batch."""

    __slots__ = ('size', 'make', 'made', 'cat_1dim', 'by_element')

    def __init__(self, size: int, make: Callable[[], List[Dict[str, Any]]], cat_1dim: bool) -> None:
        self.size, self.make, self.cat_1dim = size, make, cat_1dim
        self.made: Optional[List[Element]] = None
        self.by_element = False


class TrainBatch(ttorch.Tensor):
    """
    Overview:
        A collated batch with leaves ``(B, ...)`` that also behaves like the list of B dicts: ``len``, ``[i]``,
        iteration, ``+``. Entries, reward models and learners expect that list. ``default_collate`` returns the batch
        itself if it equals the collated list. Otherwise, or if elements were changed, it collates the elements.
    """

    # None in a subtree: treetensor makes subtrees as objects of this class, and they behave as plain trees.
    _list: Optional[_AsList] = None
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
        # The tree's own way to set an attribute makes it a leaf, and it refuses ``object.__setattr__``.
        batch.__dict__['_list'] = _AsList(size, make_elements, cat_1dim)
        return batch

    def use_elements(self, key: str = '') -> None:
        """Collate the elements from now on, because they changed. ``key`` names the only key that changed."""
        if self._list is not None and key not in self._own_keys:
            self._list.by_element = True

    def elements(self) -> List[Element]:
        assert self._list is not None
        if self._list.made is None:
            self._list.made = [Element(self, items) for items in self._list.make()]
        return self._list.made

    def json(self) -> Any:
        """
        Overview:
            Return the collated dict that policies train on, also for a call of ``default_collate``. The result equals
            ``default_collate`` of the list of elements.
        """
        if self._list is None:
            return super().json()
        collation = running_collation()
        if self._list.by_element or (collation is not None and not self._is_collated_for(collation)):
            elements = [{k: v for k, v in each.items() if k not in IDS} for each in self.elements()]
            return default_collate(elements, cat_1dim=self._list.cat_1dim if collation is None else collation.cat_1dim)
        return super().json()

    def _is_collated_for(self, collation: Collation) -> bool:
        """Return whether this batch equals what this call would make of the list of elements."""
        return self._list is not None and collation.cat_1dim == self._list.cat_1dim

    def __len__(self) -> int:
        return super().__len__() if self._list is None else self._list.size

    def __iter__(self) -> Iterator[Element]:
        return super().__iter__() if self._list is None else iter(self.elements())

    def __getitem__(self, key: Union[int, slice, str]) -> Any:
        if self._list is None or (isinstance(key, str) and not self._list.by_element):
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
    """
    Return elements of several buffers without the buffer keys that only some of them have. Ids become texts if those of
    another buffer are.
    """
    lacking = [key for key in OWN_KEYS if len({key in element for element in elements}) > 1]
    if lacking:
        elements = [{key: value for key, value in element.items() if key not in lacking} for element in elements]
    if len({isinstance(element.get(_ID), str) for element in elements}) > 1:
        elements = [{**dict(element.items()), _ID: str(element[_ID])} for element in elements]
    return elements
