"""The element store that a table has at present, and its changes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterator, Optional, Sequence

import numpy as np

from ding_store.buffer.elements import forms
from ding_store.buffer.elements.element_store import ElementStore, NoElements
from ding_store.buffer.elements.raw_columns import fill_values
from ding_store.buffer.elements.stores import new_store, opened_store
from ding_store.buffer.sequences.sequences import Sequences
from ding_store.buffer.table.narrowing import candidates
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.columns.ragged import ALL, Names
from ding_store.errors import ConfigError, SchemaMismatch


class CurrentStore:
    """
    Overview:
        Holds the table's store, and puts another in its place: for elements that do not fit, or for other contents. The
        caller holds the table's write lock.
    Arguments:
        - table (:obj:`Table`): The table, which may have elements in its directory.
        - sequences (:obj:`Sequences`): Its sequences, which drop what they read of columns that are replaced.
        - ragged (:obj:`Union[str, Collection]`): The ragged leaves of the elements, see ``StoreBuffer``.
    Raises:
        - ConfigError: The table's directory holds elements with other ragged leaves.
    """

    def __init__(self, table: Table, sequences: Sequences, ragged: Names = ()) -> None:
        self._table, self._sequences = table, sequences
        self._path = None if table.table_dir is None else table.table_dir.path
        self.store: ElementStore = opened_store(table)
        self.ragged = ragged if isinstance(ragged, str) else tuple(ragged)
        self._check_ragged()

    def _check_ragged(self) -> None:
        """Compare the ragged leaves with those that the table's directory has. Without elements, these are replaced."""
        schema = self.store.schema
        stored = tuple(schema.ragged) if schema is not None else ()
        if not self.ragged:
            self.ragged = stored
        elif self.store.takes_any or (schema is not None and not _has_ragged(schema, self.ragged)):
            if len(self._table):
                raise ConfigError(
                    f'ragged ({self.ragged!r}) differs from that of the elements in {self._path!r}, which is {stored}. '
                    'Leave it out, or name another directory.'
                )
            self.store = NoElements(self._table)

    def clear(self) -> None:
        """Take notice that all elements were deleted. Columns stay for the next elements, other stores do not."""
        self.store.give_back()
        if self.store.schema is None:
            self.store.remove()
            self.store = NoElements(self._table)

    def close(self) -> None:
        """Take notice that the table was closed. Files stay for the next process."""
        self.store = NoElements(self._table)

    def check_fit(self, elements: Sequence[Any]) -> None:
        """Raise SchemaMismatch if an empty buffer would not accept these elements."""
        forms.check_fit(elements, self._path, self.ragged)

    def make_fit(self, elements: Sequence[Any]) -> None:
        """Change the store after a mismatch, so that it takes these elements as well. Raise if none can."""
        schema = self.store.schema
        if schema is None or not len(self._table):
            form = forms.first_form(elements, self._path, self.ragged)
            first = {} if form.schema is None else form.schema.encode(elements[:1])
            self.start(form.schema, () if form.schema is None else candidates(form.schema.columns(), first))
        else:
            form = forms.next_form(schema, self.store.merged, elements, self._path, self.ragged)
            if form.schema is None:
                self._move_out_of_columns()
            else:
                self.widen(form.schema)
        form.tell()

    def start(self, schema: Optional[Schema], narrow: Collection[str] = ()) -> None:
        """Delete all elements, and prepare a store. ``narrow`` names columns to store as bytes, see ``candidates``."""
        if schema is not None and schema == self.store.schema:
            return
        store = new_store(self._table, schema)
        with self.changing_to(store) as become:
            self._table.shape.replace_columns(store.specs, store.info, narrow, become)

    def widen(self, schema: Schema) -> None:
        """Extend the columns to those of a schema that was merged with the present one."""
        if schema == self.store.schema:
            return
        store, known = self.store.widened(schema) or new_store(self._table, schema), self._table.columns.specs
        added = {name: spec for name, spec in store.specs.items() if name not in known}
        wider = {name: spec for name, spec in store.specs.items() if known.get(name, spec) != spec}
        with self.changing_to(store) as become:
            self._table.shape.add_columns(added, fill_values(added, known), store.info, become, wider)

    def _move_out_of_columns(self) -> None:
        with self._table.index.lock:
            slots = self._table.index.slots_by_age().astype(np.intp)
        elements, store = self.store.take(slots, False)(), new_store(self._table, None)
        with self.changing_to(store) as become:
            self._table.shape.convert(store.specs, store.info, slots, store.adopt(slots, elements), become)

    @contextmanager
    def changing_to(self, store: ElementStore) -> Iterator[Callable[[], None]]:
        """
        Yield the function that puts this store in the place of the present one, once its columns are in the table. It
        may be called again. If an exception comes first, free the space of what the store holds.
        """
        former = self.store

        def become() -> None:
            self._sequences.drop_columns()
            store.begin()
            self.store = store
            if former.file != store.file:
                former.remove()

        try:
            yield become
        except BaseException:
            store.give_back()
            former.give_back()
            raise


def _has_ragged(schema: Schema, names: Names) -> bool:
    """Return whether exactly these leaves of a schema are ragged."""
    try:
        # A leaf that is None so far may be ragged later.
        return schema.with_ragged(names) == schema and (names == ALL or set(schema.ragged) <= set(names))
    except SchemaMismatch:
        return False
