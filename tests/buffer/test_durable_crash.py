"""Killed at any moment, a buffer with a path is sound; and the test would notice if it were not."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Tuple

import numpy as np
import pytest
from crashes import CAPACITY, UPDATED, crash_repeatedly, linger, noticed

from ding_store.buffer.persistence.commits import encode_note
from ding_store.buffer.table import table as table_module
from ding_store.buffer.table.durability import Durability
from ding_store.buffer.table.writes import RowWrites

#: ``scripts/crash.sh`` asks for more.
KILLS = int(os.environ.get('DING_STORE_KILLS', '40'))


def test_table_killed_anywhere_is_sound(tmp_path: Path) -> None:
    found = crash_repeatedly(tmp_path / 'replay', KILLS, seed=KILLS, reached=lambda words: words[UPDATED] > CAPACITY)
    assert found == []


class PublishesFirst(RowWrites):
    """Makes rows live before their bytes are there."""

    @contextmanager
    def writing(
        self, num_rows: int, skipped: int = 0, note: Optional[Mapping[str, Any]] = None
    ) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        slots, _ = self.allocate(num_rows)
        first = self._index.next_row + skipped
        self.publish(slots, skipped, note, None if note is None else encode_note(note))
        linger()
        yield slots, np.arange(first, first + num_rows)


class CommitsRowsBeforeTheirNote(Durability):
    """Makes rows live with one record, and their note with another."""

    def commit(self, note: Optional[Mapping[str, Any]], encoded: Optional[bytes]) -> None:
        super().commit(None, None)
        linger()
        super().commit(note, encoded)


class EvictsTooLate(RowWrites):
    """Takes the oldest rows out when their slots are overwritten already."""

    def allocate(self, num_rows: int) -> Tuple[np.ndarray, np.ndarray]:
        self._late = self._index.row_of_slot.copy()
        return super().allocate(num_rows)

    @contextmanager
    def writing(
        self, num_rows: int, skipped: int = 0, note: Optional[Mapping[str, Any]] = None
    ) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        with super().writing(num_rows, skipped, note) as (slots, rows):
            numbers = self._index.row_of_slot
            gone = numbers[slots].copy()
            numbers[slots] = self._late[slots]
            yield slots, rows
            linger()
            numbers[slots] = gone


class UpdatesWithoutRecord(Durability):
    """Overwrites rows in place, and keeps nothing to do it again from."""

    def overwrite(self, rows: np.ndarray, columns: Any, write: Any) -> None:
        slots, _ = self._index.find(rows)
        for name, values in columns.items():
            linger()
            self._columns.overwrite(slots, {name: values})


@pytest.mark.parametrize('wrong', [PublishesFirst, CommitsRowsBeforeTheirNote, EvictsTooLate, UpdatesWithoutRecord])
def test_table_written_in_a_wrong_order_is_found(wrong: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, wrong.__base__.__name__, wrong)
    assert noticed(tmp_path / 'replay')
