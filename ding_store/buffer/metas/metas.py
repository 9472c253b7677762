"""Metas of rows. A row without a meta takes no memory. Small metas such as ``{'env': 3}`` are shared between rows."""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Hashable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

import numpy as np
from ding.utils import fastcopy

from ding_store.buffer.array_types import Array
from ding_store.buffer.forks import tell_of_forks
from ding_store.buffer.interrupts import finish
from ding_store.buffer.metas import meta_json
from ding_store.buffer.metas.groups import Groups
from ding_store.buffer.persistence.journal import Journal
from ding_store.buffer.table.rows import RowIndex

#: Types of values that are worth sharing, because equal values are frequent. Floats such as priorities rarely repeat.
_SHARED_TYPES = (int, str, bool, type(None))
#: With this many different shared metas the table of shared metas starts anew.
_MAX_SHARED = 1 << 16

Shared = Tuple[Tuple[str, type, Any], ...]


class RowMeta(Dict[Any, Any]):
    """
    Overview:
        The meta of a row that has no meta yet, or a shared one. The first change to it makes it the meta of this row
        alone. Middleware may therefore write to the metas of sampled rows, and rows without writes take no memory.
    """

    __slots__ = ('_table_dir', '_slot', '_row')

    def __init__(self, table_dir: MetaStore, slot: int, row: int, items: Any = ()) -> None:
        super().__init__(items)
        self._table_dir, self._slot, self._row = table_dir, slot, row

    def __setitem__(self, key: Any, value: Any) -> None:
        self._change(lambda: super(RowMeta, self).__setitem__(key, value))

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._change(lambda: super(RowMeta, self).pop(key, None))

    def update(self, *args: Any, **kwargs: Any) -> None:
        items = dict(*args, **kwargs)
        self._change(lambda: super(RowMeta, self).update(items))

    def __ior__(self, other: Any) -> RowMeta:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._change(lambda: super(RowMeta, self).setdefault(key, default))
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        self._change(lambda: super(RowMeta, self).pop(key, None))
        return value

    def popitem(self) -> Tuple[Any, Any]:
        if not self:
            raise KeyError('popitem(): dictionary is empty')
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        self._change(super().clear)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: Any) -> Any:
        from copy import deepcopy

        return deepcopy(dict(self), memo)

    def _change(self, change: Callable[[], object]) -> None:
        """Apply a change that may be repeated, and store the result as the row's meta: both or neither."""

        def changed() -> None:
            change()
            self._table_dir.adopt(self._slot, self._row, self)

        finish(changed)


# DI-engine's ``fastcopy`` handles only exact types. The copy is a plain dict without a row.
fastcopy.dispatch[RowMeta] = dict

Meta = Dict[Any, Any]
Held = Union[None, Shared, Meta]


class MetaStore:
    """
    Overview:
        Metas by slot. For every key that was used for grouping, also the group of every slot as a number. The caller
        holds the table's locks.
    Arguments:
        - index (:obj:`RowIndex`): The index of the table.
        - lock: The write lock of the table.
        - journal (:obj:`Optional[Journal]`): Stores metas for the next process. Changes inside a list, dict or array of
          a meta are not noticed.
    """

    def __init__(self, index: RowIndex, lock: ContextManager[Any], journal: Optional[Journal] = None) -> None:
        self._lock = lock
        tell_of_forks(self)
        self._index = index
        self._journal = journal
        self._held: List[Held] = []  # Shorter than the table if no slot beyond has a meta.
        self._shared: Dict[Shared, Shared] = {}
        self._groups: Dict[Hashable, Groups] = {}

    def before_fork(self) -> None:
        """Do nothing before a fork."""

    def after_fork(self, missed: Set[int]) -> None:
        """Drop the journal in the forked process: it belongs to the parent."""
        self._journal = None

    @property
    def is_used(self) -> bool:
        """True if any slot may have a meta or a group."""
        return bool(self._held or self._groups)

    def restore(self) -> None:
        """
        Load the metas of live rows from the journal. Remove the other records from it, if there is space for a rewrite.
        """
        if self._journal is None:
            return
        journal, start, end = self._journal, 0, 0
        unborn: List[int] = []  # Starts of the records of rows that never became live, because of a kill.
        for record in journal.read():
            rows, meta = meta_json.decode(record)
            with self._index.lock:
                slots, found = self._index.find(rows)
            if (rows >= self._index.next_row).any():
                unborn.append(start)
            start = journal.end
            if found.any():
                end = start
            for slot, row in zip(slots[found].tolist(), rows[found].tolist()):
                self.put(slot, row, meta, record=False)
        # Metas of rows that left do no harm. Metas of rows that never became live would later belong to other rows.
        if unborn and unborn[0] < end:
            journal.rewrite(self._records())
        elif not journal.try_rewrite(self._records()) and unborn:
            journal.cut(unborn)

    def encode(self, rows: Array, metas: Optional[Sequence[Optional[Mapping[Any, Any]]]]) -> List[bytes]:
        """
        Overview:
            Encode the metas of new rows as records, and reserve space for them.
        Raises:
            - SchemaMismatch: A meta holds a value that cannot be stored.
            - NotEnoughSpace: The disk is full.
        """
        if self._journal is None or metas is None:
            return []
        records = self._encoded(rows, metas)
        self._journal.reserve(records)
        return records

    def _encoded(self, rows: Array, metas: Sequence[Optional[Mapping[Any, Any]]]) -> List[bytes]:
        starts = [i for i, meta in enumerate(metas) if i == 0 or meta != metas[i - 1]]
        ends = [*starts[1:], len(metas)]
        return [meta_json.encode(rows[i:k], metas[i] or {}) for i, k in zip(starts, ends) if metas[i]]

    def record(self, records: List[bytes]) -> None:
        """Append the records of ``encode`` to the journal."""
        if self._journal is None or not records:
            return
        if self._journal.wants_compaction:
            # Without a rewrite the records have reserved space already. No error may come while rows are being written.
            self._journal.try_rewrite(self._records(), records)
        self._journal.append(records)

    def put(self, slot: int, row: int, meta: Optional[Mapping[Any, Any]], record: bool = True) -> None:
        """Set or remove the meta of a slot's row. A dict that cannot be shared is stored itself, without a copy."""
        if record:
            records = self._encoded_one(slot, row, meta)

            def put() -> None:
                self.record(records)
                if self._journal is not None:
                    self._journal.sync()
                self.put(slot, row, meta, record=False)

            finish(put)
            return
        held = self._to_held(meta)
        if self._journal is not None and isinstance(held, dict):
            # Wrap it, so that later changes to it are noticed.
            held = RowMeta(self, slot, row, held)
        if slot >= len(self._held):
            if held is None:
                self._regroup(slot, None)
                return
            self._held.extend([None] * (slot + 1 - len(self._held)))
        self._held[slot] = held
        self._regroup(slot, meta)

    def encode_shared(self, rows: Array, meta: Mapping[Any, Any]) -> List[bytes]:
        """Encode one meta for all rows, like ``encode``."""
        if self._journal is None or not meta:
            return []
        records = [meta_json.encode(rows, meta)]
        self._journal.reserve(records)
        return records

    def put_shared(self, slots: Array, rows: Array, meta: Mapping[Any, Any]) -> None:
        """Give many rows one meta, like ``put``. Its record is in the journal already."""
        held = self._to_held(meta)
        if isinstance(held, dict) or self._groups or not len(slots):
            for slot, row in zip(slots.tolist(), rows.tolist()):
                self.put(slot, row, dict(meta), record=False)
            return
        self._held.extend([None] * (int(slots.max()) + 1 - len(self._held)))
        first = int(slots[0])
        if (slots == np.arange(first, first + len(slots))).all():
            self._held[first : first + len(slots)] = [held] * len(slots)
        else:
            for slot in slots.tolist():
                self._held[slot] = held

    def drop(self, slots: Array) -> None:
        """Remove the metas of slots that are free or have new rows without metas."""
        if self._held:
            for slot in slots[slots < len(self._held)].tolist():
                self._held[slot] = None
        for groups in self._groups.values():
            groups.leave(slots, self._row_of_slot[slots] >= 0)

    def get(self, slot: int, row: int) -> Meta:
        """Return the meta of a slot's row, as a dict that the caller may modify."""
        held = self._held[slot] if slot < len(self._held) else None
        if isinstance(held, dict):
            return held
        if held is None:
            return RowMeta(self, slot, row)
        return RowMeta(self, slot, row, [(key, value) for key, _, value in held])

    def peek(self, slot: int) -> Mapping[Any, Any]:
        """Return the meta of a slot's row for reading only."""
        return self.get(slot, -1)

    def values_of(self, key: Any) -> Tuple[Array, List[Any]]:
        """
        Overview:
            Return the values under a key in all metas that have it. Takes the locks itself and reads no element.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers ``(n,)``, oldest first.
            - values (:obj:`List[Any]`): One value per row.
        """
        with self._lock, self._index.lock:
            slots = self._index.slots_by_age()
            slots = slots[slots < len(self._held)].astype(np.intp)
            found = [
                (row, meta[key])
                for slot, row in zip(slots.tolist(), self._row_of_slot[slots].tolist())
                for meta in ([] if self._held[slot] is None else [self.peek(slot)])
                if key in meta
            ]
        return np.array([row for row, _ in found], np.int64), [value for _, value in found]

    def adopt(self, slot: int, row: int, meta: RowMeta) -> None:
        """Store a modified meta as the row's own, if the row is still in the table."""
        with self._lock:
            slot = self._slot_of(slot, row)
            if slot < 0:
                return
            records = self._encoded_one(slot, row, meta)

            def adopt() -> None:
                self.record(records)
                if slot >= len(self._held):
                    self._held.extend([None] * (slot + 1 - len(self._held)))
                self._held[slot] = meta
                self._regroup(slot, meta)

            finish(adopt)

    def groups(self, key: Hashable) -> Groups:
        """Return the groups of rows by a key. The first call for a key reads all metas, later calls are free."""
        groups = self._groups.get(key)
        if groups is None:
            groups = Groups(self._index.capacity)
            self._assign_all(groups, key)
            self._groups[key] = groups
        return groups

    def known_groups(self, key: Hashable) -> Optional[Groups]:
        """Return the groups of a key if there was a call of ``groups`` for it. Needs no lock."""
        return self._groups.get(key)

    def group_keys(self) -> List[Hashable]:
        return list(self._groups)

    def forget_groups(self) -> None:
        self._groups = {}

    def records_of(self, rows: Array, metas: Sequence[Optional[Mapping[Any, Any]]]) -> List[bytes]:
        """Encode the metas of rows that replace all others. Raises the same errors as ``encode``."""
        return [] if self._journal is None else self._encoded(rows, metas)

    def clear(self, record: bool = True) -> None:
        """Remove all metas, and with ``record`` also those in the journal."""
        self._held, self._shared = [], {}
        for groups in self._groups.values():
            groups.clear()
        if record and self._journal is not None:
            self._journal.rewrite([])

    def close(self) -> None:
        """Remove all metas from memory, and leave the journal unchanged."""
        self._held, self._shared, self._groups, self._journal = [], {}, {}, None

    def moving(self, source: Array, target: Array, capacity: int) -> Callable[[], None]:
        """
        Prepare a move of rows to other slots. Call the returned function when the table has ``capacity`` slots. It may
        be called again.
        """
        moved = self._held[:]
        for old, new in zip(source.tolist(), target.tolist()):
            held = moved[old] if old < len(moved) else None
            if held is not None or new < len(moved):
                # Move a missing meta as well: an earlier row of the target slot may have had one.
                moved.extend([None] * (new + 1 - len(moved)))
                moved[new] = held
        del moved[capacity:]

        def resize() -> None:
            self._held = moved
            for key, groups in self._groups.items():
                groups.codes = np.full(capacity, Groups.NONE, np.int64)
                self._assign_all(groups, key)

        return resize

    @property
    def _row_of_slot(self) -> Array:
        return self._index.row_of_slot

    def _slot_of(self, slot: int, row: int) -> int:
        """Return the present slot of a row that was in this slot, or -1 if the row is gone."""
        if row < 0 or (slot < self._index.capacity and self._row_of_slot[slot] == row):
            return slot if row >= 0 else -1
        with self._index.lock:
            slots, found = self._index.find(np.array([row], np.int64))
        return int(slots[0]) if found[0] else -1

    def _encoded_one(self, slot: int, row: int, meta: Optional[Mapping[Any, Any]]) -> List[bytes]:
        """Encode the new meta of a live row that may have had another, like ``encode``."""
        if self._journal is None:
            return []
        return self.encode(np.array([row], np.int64), [meta]) or self._encode_none(slot, row)

    def _encode_none(self, slot: int, row: int) -> List[bytes]:
        """Encode that a row has no meta, if it had one."""
        if slot >= len(self._held) or self._held[slot] is None:
            return []
        assert self._journal is not None
        records = [meta_json.encode(np.array([row], np.int64), {})]
        self._journal.reserve(records)
        return records

    def _records(self) -> Iterator[bytes]:
        """Encode all metas of live rows, with one record for all rows that share a meta."""
        slots_of: Dict[int, List[int]] = {}
        for slot in range(len(self._held)):
            if self._held[slot] is not None and self._row_of_slot[slot] >= 0:
                slots_of.setdefault(id(self._held[slot]), []).append(slot)
        for slots in slots_of.values():
            yield meta_json.encode(self._row_of_slot[slots], self.peek(slots[0]))

    def _to_held(self, meta: Optional[Mapping[Any, Any]]) -> Held:
        if not meta:
            # Do not store an empty dict of the caller. Later writes to the row's meta are stored.
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

    def _assign_all(self, groups: Groups, key: Hashable) -> None:
        for slot in range(len(self._held)):
            if self._held[slot] is not None:
                self._assign(groups, key, slot, self.peek(slot))

    def _assign(self, groups: Groups, key: Hashable, slot: int, meta: Mapping[Any, Any]) -> None:
        code = groups.code(meta[key]) if key in meta else Groups.NONE
        # A row that is being written is not live yet. A live row moves to another group.
        groups.move(slot, code, self._row_of_slot[slot] >= 0)
