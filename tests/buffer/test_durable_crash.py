"""Killed at any moment, a buffer with a path is sound; and the test would notice if it were not."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

import numpy as np
import pytest
from crashes import CAPACITY, UPDATED, crash_repeatedly, linger, noticed

from ding_store.buffer.elements import elements
from ding_store.buffer.persistence.commits import encode_note
from ding_store.buffer.table.table import Table

#: ``scripts/crash.sh`` asks for more.
KILLS = int(os.environ.get('DING_STORE_KILLS', '40'))


def test_table_killed_anywhere_is_sound(tmp_path: Path) -> None:
    found = crash_repeatedly(tmp_path / 'replay', KILLS, seed=KILLS, reached=lambda words: words[UPDATED] > CAPACITY)
    assert found == []


class PublishesFirst(Table):
    """Makes rows live before their bytes are there."""

    @contextmanager
    def writing(
        self, num_rows: int, skipped: int = 0, note: Optional[Mapping[str, Any]] = None
    ) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        with self.write_lock:
            slots, _ = self._allocate(num_rows, skipped)
            first = self.index.next_row + skipped
            self._publish(slots, skipped, note, None if note is None else encode_note(note))
            linger()
            yield slots, np.arange(first, first + num_rows)


class CommitsRowsBeforeTheirNote(Table):
    """Makes rows live with one record, and their note with another."""

    def _commit(self, note: Optional[Mapping[str, Any]], encoded: Optional[bytes]) -> None:
        super()._commit(None, None)
        linger()
        super()._commit(note, encoded)


class EvictsTooLate(Table):
    """Takes the oldest rows out when their slots are overwritten already."""

    def _store(self, slots: np.ndarray, columns: Any, skipped: int) -> None:
        numbers = self.index.row_of_slot
        gone = numbers[slots].copy()
        numbers[slots] = self._late[slots]
        super()._store(slots, columns, skipped)
        linger()
        numbers[slots] = gone

    def _allocate(self, num_rows: int, skipped: int) -> Tuple[np.ndarray, np.ndarray]:
        self._late = self.index.row_of_slot.copy()
        return super()._allocate(num_rows, skipped)


class Unhurried(Dict[str, np.ndarray]):
    """Columns that are written one after the other, with a while in between."""

    def items(self) -> Any:
        for item in super().items():
            linger()
            yield item


class UpdatesWithoutRecord(Table):
    """Overwrites rows in place, and keeps nothing to do it again from."""

    def as_stored(self, columns: Any, narrowed: Any = ()) -> Any:
        return Unhurried(super().as_stored(columns, narrowed))

    def _overwrite(self, rows: np.ndarray, slots: np.ndarray, columns: Any) -> None:
        for name, values in columns.items():
            self.columns[name][slots] = values


@pytest.mark.parametrize('wrong', [PublishesFirst, CommitsRowsBeforeTheirNote, EvictsTooLate, UpdatesWithoutRecord])
def test_table_written_in_a_wrong_order_is_found(wrong: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, 'Table', wrong)
    assert noticed(tmp_path / 'replay')
