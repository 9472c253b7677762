"""Storage of elements that columns cannot hold: Python objects in this process, or packed if the table has a path."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Union

from ding_store.buffer.elements import packed_elements as packed
from ding_store.buffer.elements.object_elements import ObjectElements
from ding_store.buffer.elements.packed_elements import PackedElements
from ding_store.buffer.table.column_memory import ColumnMemory
from ding_store.buffer.table.table import Table
from ding_store.columns import NotColumnar


class NonColumnar:
    """The part of ``Elements`` that stores elements outside of columns."""

    table: Table
    #: None if all elements are in columns.
    objects: Union[None, ObjectElements, PackedElements]

    def _pack(self, elements: Iterable[Any], num_rows: int, regions: ColumnMemory) -> None:
        """Pack elements, and write their places to new columns in ``regions``."""
        column = self.objects if isinstance(self.objects, PackedElements) else PackedElements(self.table)
        regions.add(packed.SPECS)
        regions.reserve(num_rows)
        for name, values in column.store(elements).items():
            regions.columns[name][:num_rows] = values

    def _new_objects(self) -> Union[ObjectElements, PackedElements]:
        return ObjectElements() if self.table.table_dir is None else PackedElements(self.table)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        """Free the space of elements that were packed for rows that did not become live."""
        if isinstance(self.objects, PackedElements):
            self.objects.give_back()
        elif self.table.table_dir is not None:
            packed.remove_leftover(self.table.table_dir)

    def _refuse_objects(self, reason: NotColumnar) -> None:
        if self.table.table_dir is not None:
            raise packed.refusal(self.table.table_dir.path, reason) from reason
