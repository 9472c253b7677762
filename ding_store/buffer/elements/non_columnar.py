"""Storage of elements that columns cannot hold: Python objects in this process, or packed if the table has a path."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Union

from ding_store.buffer.elements import packed
from ding_store.buffer.elements.objects import ObjectColumn
from ding_store.buffer.elements.packed import PackedColumn
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.table import Table
from ding_store.columns import NotColumnar


class NonColumnar:
    """The part of ``Elements`` that stores elements outside of columns."""

    table: Table
    #: None if all elements are in columns.
    objects: Union[None, ObjectColumn, PackedColumn]

    def _pack(self, elements: Iterable[Any], num_rows: int, columns: TableColumns) -> None:
        """Pack elements, and write their places to new columns."""
        column = self.objects if isinstance(self.objects, PackedColumn) else PackedColumn(self.table)
        columns.add(packed.SPECS)
        columns.reserve(num_rows)
        columns.fill(0, column.store(elements))

    def _new_objects(self) -> Union[ObjectColumn, PackedColumn]:
        return ObjectColumn() if self.table.table_dir is None else PackedColumn(self.table)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        """Free the space of elements that were packed for rows that did not become live."""
        if isinstance(self.objects, PackedColumn):
            self.objects.give_back()
        elif self.table.table_dir is not None:
            packed.remove_leftover(self.table.table_dir)

    def _refuse_objects(self, reason: NotColumnar) -> None:
        if self.table.table_dir is not None:
            raise packed.refusal(self.table.table_dir.path, reason) from reason
