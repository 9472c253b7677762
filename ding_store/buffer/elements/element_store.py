"""The base class of element stores. A table keeps its elements in one store: as columns, as objects or as packets."""

from __future__ import annotations

from typing import IO, Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.save_blocks import Blocks
from ding_store.buffer.table.outputs import Output
from ding_store.buffer.table.specs import Columns, ColumnSpec
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.errors import SchemaMismatch

#: Writes elements into the slots that were allocated for them, all or none.
Write = Callable[[Array], None]
#: Makes the elements of a copy that is known to be whole.
Make = Callable[[], List[Any]]


class ElementStore:
    """
    Overview:
        The elements of a table's rows, in one form that never changes. For another form or another schema, ``Elements``
        puts another store in its place. What a read copied is therefore decoded as it was stored. Writers hold the
        table's write lock. A read calls ``take`` or ``gather`` as the copy of ``Table.read``.
    """

    #: The leaves of an element. None if elements are not in columns.
    schema: Optional[Schema] = None
    #: The columns that this store needs in the table.
    specs: Dict[str, ColumnSpec] = {}
    #: Whether ``take`` reads nothing slower than memory, so that it may run with the index locked.
    is_in_memory = True
    #: Whether elements of every form fit, so that columns are decoded before they are added.
    takes_any = False
    #: The path of the file that holds elements, beside the table's own files.
    file: Optional[str] = None

    def __init__(self, table: Table) -> None:
        self._table = table

    @property
    def info(self) -> Any:
        """The JSON that describes this store in the header of a table with a path."""
        return None

    def begin(self) -> None:
        """Get ready to be the table's store. Its columns and rows are in the table. May be called again."""

    # Reads.

    def take(self, slots: Array, is_warm: bool = True) -> Make:
        """
        Copy the elements of these slots, whatever they hold. ``is_warm`` puts columns into memory that was used before
        and is free now.
        """
        raise NotImplementedError(f'{type(self).__name__} must override take')

    def gather(self, slots: Array) -> Tuple[Schema, Columns, Output]:
        """
        Overview:
            Copy the columns of these slots into one batch. Return their schema, the columns, and the batch's memory.
        Raises:
            - SchemaMismatch: The elements are not in columns.
        """
        raise SchemaMismatch('elements stored as Python objects cannot be collated into a batch. Use sample().')

    def take_steps(self, slots: Array) -> Any:
        """
        Overview:
            Copy elements that are sequences themselves, step by step. Return their ``StepReader`` and what it took.
        Raises:
            - SchemaMismatch: The elements are not in columns, or are not sequences of one length.
        """
        raise SchemaMismatch('Python objects cannot become a time-major batch. Use sample().')

    # Writes.

    def prepare(self, elements: Sequence[Any]) -> Write:
        """
        Overview:
            Do all that may fail or take long before new rows get their slots. ``give_back`` follows if they get none.
        Raises:
            - SchemaMismatch: An element does not fit. Nothing changed.
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        raise NotImplementedError(f'{type(self).__name__} must override prepare')

    def writing(self, element: Any) -> Optional[Callable[[int], None]]:
        """
        Return a function that writes one element into a slot and cannot fail. Return None if ``prepare`` must do it.
        ``give_back`` follows if the element gets no slot.
        """
        return None

    def update(self, rows: Array, slots: Array, element: Any) -> None:
        """Replace the element of one row. Raises the same errors as ``prepare``."""
        raise NotImplementedError(f'{type(self).__name__} must override update')

    def merged(self, schema: Schema) -> Schema:
        """
        Overview:
            Return the schema that also holds elements of another schema.
        Raises:
            - SchemaMismatch: There is none, or it would change an integer of a live row.
        """
        raise SchemaMismatch('the elements are not in columns')

    def widened(self, schema: Schema) -> Optional[ElementStore]:
        """Return a store for a schema from ``merged`` that shares a file with this one. None if no file is shared."""
        return None

    def adopt(self, slots: Array, elements: Iterable[Any]) -> Columns:
        """
        Overview:
            Store elements of rows that come from another store or from a save, before this store is the table's.
        Returns:
            - columns (:obj:`Columns`): The values of ``specs`` for these elements.
        """
        raise NotImplementedError(f'{type(self).__name__} must override adopt')

    def drop(self, slots: Array) -> None:
        """Forget the elements of slots that were deleted."""

    def give_back(self) -> None:
        """Free the space of elements that were prepared or adopted, and whose rows did not become live."""

    def remove(self) -> None:
        """Delete ``file``, when no row needs it. May be called again."""

    def moving(self, source: Array, target: Array, capacity: int) -> Callable[[], None]:
        """
        Prepare a move of elements to other slots. Call the returned function when there are ``capacity`` slots. It may
        be called again.
        """
        return _do_nothing

    # Saves and checks.

    def rows_beyond(self, max_bytes: Optional[int]) -> Array:
        """Return the row numbers of the oldest rows that must leave, so that packets have at most so many bytes."""
        return np.empty(0, np.int64)

    @property
    def packet_bytes(self) -> int:
        """The size of what elements have outside of columns, if that is known."""
        return 0

    @property
    def num_bytes(self) -> int:
        """The approximate size of all elements in a save."""
        return len(self._table) * self._table.columns.row_bytes

    def blocks(self, file: IO[bytes], is_current: Callable[[], bool]) -> Blocks:
        """Return the writer of a save's blocks. ``is_current`` tells whether this is still the table's store."""
        return Blocks()

    def objects(self, slots: Array) -> Optional[List[Any]]:
        """Return the elements that a save pickles. None if its blocks hold them."""
        return None

    def findings(self) -> List[str]:
        """Return one sentence per defect of elements that are not in columns."""
        return []


class NoElements(ElementStore):
    """The store before the first element, and after ``clear`` of elements that were not in columns."""

    def take(self, slots: Array, is_warm: bool = True) -> Make:
        return list

    def prepare(self, elements: Sequence[Any]) -> Write:
        raise SchemaMismatch('there is no store yet: the first elements decide which')

    def update(self, rows: Array, slots: Array, element: Any) -> None:
        self.prepare([element])


def _do_nothing() -> None:
    pass
