"""Killed at any moment, a buffer with ragged leaves and a path is sound; and the test would notice if it were not."""

import os
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest
import torch
from crashes import (
    DELETED,
    PUSHED,
    UPDATED,
    Opened,
    Worker,
    crash_repeatedly,
    is_deleted,
    is_updated,
    linger,
    noticed,
    verified,
)

from ding_store.buffer import MemoryBank, StoreBuffer
from ding_store.buffer.elements import growing_file
from ding_store.buffer.elements.packet_file import PacketFile
from ding_store.buffer.elements.ragged_elements import RaggedElements

#: ``scripts/crash.sh`` asks for more.
KILLS = int(os.environ.get('DING_STORE_KILLS', '40')) // 8

CAPACITY, MAX_CHUNK = 40, 5
RAGGED = ('units', 'edges')


def element(row: int, version: int = 0) -> Dict[str, Any]:
    """Everything follows from the row number and the version."""
    length = (row * 7 + version * 3) % 23
    units = torch.arange(row, row + length * 300).reshape(length, 300) * (version + 1)
    edges = np.full((row * 5 % 4, 700), row + version, np.int32)
    return {
        'units': units,
        'edges': edges,
        'row': row,
        'version': version,
        'sum': zlib.crc32(units.numpy().tobytes() + edges.tobytes()),
    }


class Kept(Opened):
    capacity = CAPACITY
    options = {'ragged': RAGGED}


class RaggedWorker(Kept, Worker):
    """The same with ragged leaves."""

    def push(self, first: int) -> int:
        rows = range(first, first + self.random.randint(1, MAX_CHUNK))
        self.buffer.extend_elements([element(row) for row in rows], [{'row': row} for row in rows])
        return rows.stop

    def update(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self.buffer.update(str(row), element(row, 1))


def verify(path: str, words: Any) -> List[str]:
    return verified(Kept, path, lambda opened: _findings(opened.buffer, words, path))


def _findings(buffer: StoreBuffer, words: Any, path: str) -> Iterator[str]:
    next_row, rows = buffer.table.next_row, buffer.table.rows_by_age()
    if not words[PUSHED] <= next_row <= words[PUSHED] + MAX_CHUNK:
        yield f'next row is {next_row}, pushed were {words[PUSHED]}'
    wanted = np.arange(next_row)
    missing = np.setdiff1d(wanted[~is_deleted(wanted)][-(CAPACITY - MAX_CHUNK - 1) :], rows)
    if len(missing):
        yield f'rows {missing[:9]} of {len(missing)} are missing'
    undead = rows[is_deleted(rows) & (rows < words[DELETED])]
    if len(undead):
        yield f'rows {undead[:9]} were deleted'
    reader = MemoryBank.open(path)
    if reader.rows().tolist() != rows.tolist():
        yield f'a reader finds rows {reader.rows()}'
    for item, read in zip(buffer, reader.gather(rows)):
        row, version = int(item.index), item.data['version']
        if any(not _are_equal(each, element(row, version)) for each in (item.data, read)) or item.meta != {'row': row}:
            yield f'row {row} is torn, or its meta: {item.meta}'
        if version != bool(is_updated(row)) and (version or row < words[UPDATED]):
            yield f'row {row} is of version {version}'
    words[PUSHED] = next_row


def _are_equal(one: Dict[str, Any], other: Dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one
    )


def test_ragged_buffer_killed_anywhere_is_sound(tmp_path: Path) -> None:
    found = crash_repeatedly(
        tmp_path / 'replay',
        KILLS,
        seed=KILLS,
        worker=RaggedWorker,
        verify=verify,
        reached=lambda words: words[UPDATED] > CAPACITY,
    )
    assert found == []
    # Bytes of rows that left were used again.
    newest = sum(element(row)['units'].nbytes + element(row)['edges'].nbytes for row in range(CAPACITY))
    file = tmp_path / 'replay' / 'packed'
    assert 0 < file.stat().st_blocks * 512 < 4 * newest + growing_file._STEP_BYTES


class NamesFirst(PacketFile):
    """Makes rows live before their packets are there."""

    late: List[Any] = []

    def _write(self, packets: Any, starts: Any) -> None:
        self.late.append((packets, starts))

    def published(self, slots: np.ndarray) -> None:
        linger()
        while self.late:
            super()._write(*self.late.pop())

    def published_one(self, slot: int) -> None:
        self.published(np.array([slot]))


class FreesTooEarly(RaggedElements):
    """Lets the bytes of an element be written to while it still counts."""

    def update(self, rows: np.ndarray, slots: np.ndarray, element: Any) -> None:
        self._packets.removed(slots)
        columns, items = self.schema.encode_ragged([element])
        places = self._write(items, 1)
        linger()
        self._table.update(rows, {**columns, **places})


@pytest.mark.parametrize(
    ('name', 'wrong'), [('ragged_elements.PacketFile', NamesFirst), ('stores.RaggedElements', FreesTooEarly)]
)
def test_ragged_buffer_written_in_a_wrong_order_is_found(
    name: str, wrong: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f'ding_store.buffer.elements.{name}', wrong)
    assert noticed(tmp_path / 'replay', worker=RaggedWorker, verify=verify)
