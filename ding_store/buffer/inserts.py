"""The inserts of a buffer or a view: its limiter waits for them, and its sampler gets their priorities."""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.elements import Elements
from ding_store.buffer.metas.metas import Meta
from ding_store.buffer.samplers.base import priorities_of
from ding_store.buffer.samplers.removers import Reservoir
from ding_store.buffer.samples import Samples
from ding_store.buffer.table.frame_references import with_wide_values
from ding_store.buffer.table.specs import Columns
from ding_store.buffer.table.table import Keep
from ding_store.columns import Schema

Metas = Optional[Sequence[Optional[Dict[Any, Any]]]]


class Inserts:
    """
    Overview:
        Adds rows for one buffer or view. ``StoreBuffer`` describes the arguments and results.
    Arguments:
        - elements (:obj:`Elements`): The elements to which rows are added.
        - samples (:obj:`Samples`): Its sampler and its limiter.
    """

    def __init__(self, elements: Elements, samples: Samples) -> None:
        self._elements, self._samples = elements, samples

    def push(self, data: Any, meta: Optional[Dict[Any, Any]]) -> Tuple[int, Meta]:
        """Add one element. Return its row number and its meta."""
        with self._samples.inserting(1):
            if self._elements.reservoir is None:
                return self._elements.push(data, meta)
            return self._push_kept(self._elements.reservoir, data, meta)

    def columns(
        self,
        columns: Columns,
        schema: Optional[Schema],
        priority: Optional[Any],
        commit: Optional[Mapping[str, Any]],
        meta: Optional[Dict[Any, Any]],
        narrowed: Collection[str],
    ) -> Array:
        """Add rows that are columns already."""
        # The table refuses rows without columns later.
        num_rows = len(next(iter(columns.values()), ()))
        values, keep = (None, None) if priority is None else self._checked(priority, num_rows)

        def add(kept: Optional[Array]) -> Array:
            chosen = columns if kept is None else {name: _rows_of(each, kept) for name, each in columns.items()}
            return self._elements.extend(chosen, schema, commit, keep, meta, narrowed)

        with self._samples.inserting(num_rows):
            rows = self._add(num_rows, add, commit)
        return rows if values is None else self._prioritized(rows, values)

    def elements(
        self, elements: Sequence[Any], metas: Metas, priority: Optional[Any], commit: Optional[Mapping[str, Any]]
    ) -> Array:
        """Add elements together."""
        values, keep = self._checked(priority, len(elements))
        if not len(elements):
            return self.one_by_one(elements, metas, priority, commit, self.push)

        def add(kept: Optional[Array]) -> Array:
            if kept is None:
                return self._elements.append(elements, metas, commit, keep)
            places = kept.tolist()
            chosen_metas = None if metas is None else [metas[place] for place in places]
            return self._elements.append([elements[place] for place in places], chosen_metas, commit, keep)

        with self._samples.inserting(len(elements)):
            rows = self._add(len(elements), add, commit)
        return self._prioritized(rows, values)

    def one_by_one(
        self,
        elements: Sequence[Any],
        metas: Metas,
        priority: Optional[Any],
        commit: Optional[Mapping[str, Any]],
        push: Callable[..., Any],
    ) -> Array:
        """Add elements with one ``push`` each, through a buffer's middleware. ``commit`` follows them."""
        values, _ = self._checked(priority, len(elements))
        pairs = zip(elements, metas or [None] * len(elements))
        rows = np.array([int(push(data, meta=meta).index) for data, meta in pairs], np.int64)
        if commit is not None:
            self._elements.table.commit(commit)
        return self._prioritized(rows, values)

    def decoded(
        self, columns: Columns, schema: Optional[Schema], meta: Optional[Dict[Any, Any]], narrowed: Collection[str]
    ) -> Tuple[List[Any], Metas]:
        """Return the elements of columns, and a meta for each."""
        known = schema or self._elements.schema
        if known is None:
            raise TypeError('columns need a schema to pass through middleware. Pass schema=, or push an element.')
        elements = known.decode(with_wide_values(columns, narrowed))
        return elements, None if meta is None else [dict(meta) for _ in elements]

    def _push_kept(self, reservoir: Reservoir, data: Any, meta: Optional[Dict[Any, Any]]) -> Tuple[int, Meta]:
        """Add one element if the reservoir keeps it."""
        found: List[Meta] = []

        def add(kept: Array) -> Array:
            row, stored = self._elements.push(data, meta)
            found.append(stored)
            return np.array([row], np.int64)

        row = int(reservoir.add(1, add)[0])
        return row, found[0] if found else dict(meta or {})

    def _add(
        self, num_rows: int, add: Callable[[Optional[Array]], Array], commit: Optional[Mapping[str, Any]]
    ) -> Array:
        """
        Overview:
            Add rows, or those that the reservoir keeps.
        Arguments:
            - add (:obj:`Callable`): Receives the places of the rows to add, or None for all. Returns their numbers.
        """
        elements = self._elements
        if elements.reservoir is None or not num_rows:
            return add(None)
        calls: List[Array] = []

        def add_kept(kept: Array) -> Array:
            calls.append(kept)
            return add(kept)

        rows = elements.reservoir.add(num_rows, add_kept)
        if commit is not None and not calls:
            elements.table.commit(commit)
        return rows

    def _checked(self, priority: Optional[Any], num_rows: int) -> Tuple[Optional[Array], Optional[Keep]]:
        """Return checked priorities, and the function that records them before their rows become live."""
        if priority is None:
            return None, None
        priorities = priorities_of(self._samples.sampler)
        values = priorities.check(priority, num_rows)
        return values, priorities.recording(values)

    def _prioritized(self, rows: Array, values: Optional[Array]) -> Array:
        """Pass the priorities of new rows to the sampler. Return the row numbers."""
        if values is not None:
            priorities_of(self._samples.sampler).insert(rows, values)
        return rows


def _rows_of(column: Any, places: Array) -> Any:
    return [column[place] for place in places.tolist()] if isinstance(column, list) else column[places]
