"""Reader of the first format of saves: all row numbers, one column after the other, and the pickled extras."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import IO, Any, Dict, Iterator, List, Optional, Tuple

import numpy as np

from ding_store import free_space
from ding_store.buffer.array_types import Array
from ding_store.buffer.saving.saves import load_extras
from ding_store.buffer.table.column_memory import ColumnSpec
from ding_store.errors import CorruptPayload

VERSION = 1


@dataclass
class Header:
    """The header of a save of the first format."""

    num_rows: int
    next_row: int
    schema: Optional[Dict[str, Any]]
    columns: List[Tuple[str, str, List[int]]]
    num_extra_bytes: int
    version: int = VERSION

    @property
    def specs(self) -> Dict[str, ColumnSpec]:
        return {name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in self.columns}

    @property
    def num_bytes(self) -> int:
        row_bytes = 8 + sum(dtype.itemsize * prod(shape) for dtype, shape in self.specs.values())
        return self.num_rows * row_bytes + self.num_extra_bytes


class OldSave:
    """A save of the first format, read after its magic. It has the interface of ``saves.Save``."""

    def __init__(self, file: IO[bytes], fields: Dict[str, Any], file_name: str) -> None:
        self._file, self._name = file, file_name
        try:
            self._header = Header(**fields)
        except TypeError as e:
            raise CorruptPayload(f'{file_name!r} has no readable header') from e
        self._start = file.tell() + 8 * self._header.num_rows
        there = os.fstat(file.fileno()).st_size - file.tell()
        if there != self._header.num_bytes:
            raise CorruptPayload(
                f'{file_name!r} is truncated: {free_space.format_bytes(self._header.num_bytes)} must follow its '
                f'header, but {free_space.format_bytes(there)} do ({self._header.num_bytes} and {there} bytes)'
            )
        self.rows = np.frombuffer(file.read(8 * self._header.num_rows), np.int64)
        self.next_row, self.schema, self.specs = self._header.next_row, self._header.schema, self._header.specs
        #: Not stored in this format. The first rows decide which columns can be bytes.
        self.narrow: Optional[List[str]] = None
        self.has_checksums = False

    def verify(self) -> None:
        """
        Overview:
            Check the row numbers, because this format has no checksums.
        Raises:
            - CorruptPayload: The row numbers are invalid.
        """
        if (np.diff(self.rows) <= 0).any() or (len(self.rows) and not 0 <= self.rows[-1] < self.next_row):
            raise CorruptPayload('its row numbers do not grow')

    def extras(self) -> Any:
        self._file.seek(-self._header.num_extra_bytes, os.SEEK_END)
        return load_extras(self._file, self._name)

    def read(self, skipped: int, chunk_bytes: int) -> Iterator[Dict[str, Array]]:
        """Yield the columns of the rows after the first ``skipped``, in chunks."""
        specs = self._header.specs
        widths = {name: dtype.itemsize * prod(shape) for name, (dtype, shape) in specs.items()}
        offsets, place = {}, self._start
        for name, width in widths.items():
            offsets[name] = place
            place += width * self._header.num_rows
        step = max(1, chunk_bytes // max(1, sum(widths.values())))
        for first in range(skipped, self._header.num_rows, step):
            count = min(step, self._header.num_rows - first)
            columns = {}
            for name, (dtype, shape) in specs.items():
                self._file.seek(offsets[name] + first * widths[name])
                data = self._file.read(count * widths[name])
                columns[name] = np.frombuffer(data, dtype).reshape((count, *shape))
            yield columns
