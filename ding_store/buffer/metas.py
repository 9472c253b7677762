"""Meta information of rows: nothing for a row without any, a shared tuple for the likes of ``{'env': 3}``."""

from __future__ import annotations

from typing import Any, ContextManager, Dict, Hashable, List, Mapping, Optional, Tuple, Union

from ding.utils import fastcopy

from ding_store.buffer.arrays import Array
from ding_store.buffer.groups import Groups

#: Values that are worth sharing: few different ones. Floats (priorities) nearly never are equal.
_SHARED_TYPES = (int, str, bool, type(None))
#: So many different shared metas, then equal ones are no longer found in the old.
_MAX_SHARED = 1 << 16

Shared = Tuple[Tuple[str, type, Any], ...]


class RowMeta(Dict[Any, Any]):
    """
    Overview:
        The meta of a row that has none of its own yet. Whoever changes it makes it the row's own: so middleware may
        write into the metas of what it sampled, and rows that nobody writes to cost nothing.
    """

    __slots__ = ('_home', '_slot', '_row')

    def __init__(self, home: MetaStore, slot: int, row: int, items: Any = ()) -> None:
        super().__init__(items)
        self._home, self._slot, self._row = home, slot, row

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._changed()

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._changed()

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self._changed()

    def __ior__(self, other: Any) -> RowMeta:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: Any, default: Any = None) -> Any:
        value = super().setdefault(key, default)
        self._changed()
        return value

    def pop(self, *args: Any) -> Any:
        value = super().pop(*args)
        self._changed()
        return value

    def popitem(self) -> Tuple[Any, Any]:
        item = super().popitem()
        self._changed()
        return item

    def clear(self) -> None:
        super().clear()
        self._changed()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: Any) -> Any:
        from copy import deepcopy

        return deepcopy(dict(self), memo)

    def _changed(self) -> None:
        self._home.adopt(self._slot, self._row, self)


# DI-engine's quick copy knows exact types only; a copy belongs to nobody.
fastcopy.dispatch[RowMeta] = dict

Meta = Dict[Any, Any]
Held = Union[None, Shared, Meta]


class MetaStore:
    """
    Overview:
        Metas by slot, and for every key that was grouped by, the group of every slot as a number. The caller has the
        table's locks.
    Arguments:
        - row_of_slot (:obj:`np.ndarray`): The table's row numbers by slot.
        - lock: The table's, for writers.
    """

    def __init__(self, row_of_slot: Array, lock: ContextManager[Any]) -> None:
        self._lock = lock
        self._row_of_slot = row_of_slot
        self._held: List[Held] = []  # Shorter than the table while the slots beyond have none.
        self._shared: Dict[Shared, Shared] = {}
        self._groups: Dict[Hashable, Groups] = {}

    @property
    def is_used(self) -> bool:
        """Whether any slot may have a meta or a group."""
        return bool(self._held or self._groups)

    def put(self, slot: int, meta: Optional[Mapping[Any, Any]]) -> None:
        """Give a slot's row a meta, or none. A dict that cannot be shared is kept itself."""
        held = self._to_held(meta)
        if slot >= len(self._held):
            if held is None:
                self._regroup(slot, None)
                return
            self._held.extend([None] * (slot + 1 - len(self._held)))
        self._held[slot] = held
        self._regroup(slot, meta)

    def drop(self, slots: Array) -> None:
        """Slots have new rows without metas, or none."""
        if self._held:
            for slot in slots[slots < len(self._held)].tolist():
                self._held[slot] = None
        for groups in self._groups.values():
            groups.codes[slots] = Groups.NONE

    def get(self, slot: int, row: int) -> Meta:
        """The meta of a slot's row, as a dict that may be written to."""
        held = self._held[slot] if slot < len(self._held) else None
        if isinstance(held, dict):
            return held
        if held is None:
            return RowMeta(self, slot, row)
        return RowMeta(self, slot, row, [(key, value) for key, _, value in held])

    def peek(self, slot: int) -> Mapping[Any, Any]:
        """As ``get``, to be read only."""
        return self.get(slot, -1)

    def adopt(self, slot: int, row: int, meta: RowMeta) -> None:
        """A meta was written to: it is the row's own from now on, if the row is still there."""
        with self._lock:
            if row >= 0 and self._row_of_slot[slot] == row:
                if slot >= len(self._held):
                    self._held.extend([None] * (slot + 1 - len(self._held)))
                self._held[slot] = meta
                self._regroup(slot, meta)

    def groups(self, key: Hashable) -> Groups:
        """Who belongs together by a key; the first call for a key looks at all metas, later ones cost nothing."""
        groups = self._groups.get(key)
        if groups is None:
            groups = self._groups[key] = Groups(len(self._row_of_slot))
            for slot in range(len(self._held)):
                if self._held[slot] is not None:
                    self._assign(groups, key, slot, self.peek(slot))
        return groups

    def group_keys(self) -> List[Hashable]:
        return list(self._groups)

    def forget_groups(self) -> None:
        self._groups = {}

    def clear(self) -> None:
        self._held, self._shared, self._groups = [], {}, {}

    def _to_held(self, meta: Optional[Mapping[Any, Any]]) -> Held:
        if not meta:
            # An empty dict of the caller's is not worth keeping: what is written to a row's meta later is.
            return None
        if type(meta) is not dict or not all(isinstance(value, _SHARED_TYPES) for value in meta.values()):
            return meta if isinstance(meta, dict) else dict(meta)
        # The types are part of the key because 1 == True.
        shared = tuple((key, type(value), value) for key, value in meta.items())
        if len(self._shared) >= _MAX_SHARED:
            self._shared = {}
        return self._shared.setdefault(shared, shared)

    def _regroup(self, slot: int, meta: Optional[Mapping[Any, Any]]) -> None:
        for key, groups in self._groups.items():
            self._assign(groups, key, slot, meta or {})

    @staticmethod
    def _assign(groups: Groups, key: Hashable, slot: int, meta: Mapping[Any, Any]) -> None:
        groups.codes[slot] = groups.code(meta[key]) if key in meta else Groups.NONE
