"""Killed at any moment, a buffer of whole episodes with a path is sound; and the test would notice if it were not."""

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
from test_durable import copy, images_at_lines, kill_at_line, put

from ding_store.buffer import StoreBuffer
from ding_store.buffer.elements import growing_file
from ding_store.buffer.elements.packed_elements import PackedElements
from ding_store.buffer.elements.packet_file import PacketFile

#: ``scripts/crash.sh`` asks for more.
KILLS = int(os.environ.get('DING_STORE_KILLS', '40')) // 4

CAPACITY, MAX_CHUNK = 40, 5


def episode(row: int, version: int = 0) -> List[Dict[str, Any]]:
    """Everything follows from the row number and the version; all but the last step have a next one."""
    length = 2 + (row * 7 + version * 3) % 23
    frames = torch.arange(row, row + length * 500).reshape(length, 500) * (version + 1)
    return [
        {'frame': frame, 'row': row, 'version': version, 'sum': zlib.crc32(frame.numpy().tobytes())} for frame in frames
    ]


class Episodes(Opened):
    capacity = CAPACITY


class EpisodeWorker(Episodes, Worker):
    """The same with whole episodes."""

    def push(self, first: int) -> int:
        rows = range(first, first + self.random.randint(1, MAX_CHUNK))
        self.buffer.extend_elements([episode(row) for row in rows], [{'row': row} for row in rows])
        return rows.stop

    def update(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self.buffer.update(str(row), episode(row, 1))


def verify(path: str, words: Any) -> List[str]:
    return verified(Episodes, path, lambda opened: _findings(opened.buffer, words))


def _findings(buffer: StoreBuffer, words: Any) -> Iterator[str]:
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
    for item in buffer:
        row, version = int(item.index), item.data[0]['version']
        if not _are_equal(item.data, episode(row, version)) or item.meta != {'row': row}:
            yield f'row {row} is torn, or its meta: {item.meta}'
        if version != bool(is_updated(row)) and (version or row < words[UPDATED]):
            yield f'row {row} is of version {version}'
    words[PUSHED] = next_row


def _are_equal(one: List[Dict[str, Any]], other: List[Dict[str, Any]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
        for a, b in zip(one, other)
    )


def test_packed_buffer_killed_anywhere_is_sound(tmp_path: Path) -> None:
    found = crash_repeatedly(
        tmp_path / 'replay',
        KILLS,
        seed=KILLS,
        worker=EpisodeWorker,
        verify=verify,
        reached=lambda words: words[UPDATED] > CAPACITY,
    )
    assert found == []
    # Bytes of episodes that left were used again.
    newest = sum(len(step['frame']) * 8 for row in range(CAPACITY) for step in episode(row))
    file = tmp_path / 'replay' / 'packed'
    assert 0 < file.stat().st_size < 4 * newest + growing_file._STEP_BYTES


# Killed at every line


def steps(i: int, length: int = 2) -> List[Dict[str, Any]]:
    return [{'x': torch.full((3,), float(i)), 't': t} for t in range(length)]


def read(path: Path) -> List[tuple]:
    buffer = StoreBuffer(6, path=str(path))
    assert buffer.check() == []
    found = [(item.index, [(step['t'], step['x'].tolist()) for step in item.data], item.meta) for item in buffer]
    buffer.close()
    return found


#: What becomes of five elements, the last of so many steps and the others of two: they are packed for the sake of one
#: more; others from a save; none. How many there are then, and a file of the buffer's source that does it.
CHANGES = {
    'pack': (2, lambda buffer, directory: buffer.push(steps(5, 3), {'i': 5}), 6, 'elements/packet_file.py'),
    'load': (2, lambda buffer, directory: buffer.load_data(str(directory / 'save')), 5, 'saving/loads.py'),
    'clear': (3, lambda buffer, directory: buffer.clear(), 0, 'table/table.py'),
}


@pytest.mark.parametrize('name', CHANGES)
def test_packed_buffer_killed_at_any_line_is_sound(name: str, tmp_path: Path) -> None:
    length, change, count, file = CHANGES[name]
    save, model = StoreBuffer(6), StoreBuffer(6, path=str(tmp_path / 'model'))
    for i in range(5):
        save.push(steps(i + 10, i + 2), {'i': i + 10})
        model.push(steps(i, length if i == 4 else 2), {'i': i})
    save.save_data(str(tmp_path / 'save'))
    model.close()

    def opened() -> StoreBuffer:
        return StoreBuffer(6, path=str(directory))

    def act(buffer: StoreBuffer) -> None:
        change(buffer, tmp_path)

    directory, before = tmp_path / 'copy', read(tmp_path / 'model')
    copy(tmp_path / 'model', directory)
    buffer = opened()
    images = images_at_lines(directory, lambda: act(buffer), file)
    buffer.close()
    after = read(directory)
    assert len(after) == count
    for image, line in images.found.items():
        put(image, directory)
        assert read(directory) in (before, after), f'line {line}'
    for line in images.lines_to_kill_at():
        copy(tmp_path / 'model', directory)
        kill_at_line(line, opened, act)
        assert read(directory) in (before, after), f'line {line}'


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


class FreesTooEarly(PackedElements):
    """Lets an episode's bytes be written to while it still counts."""

    def update(self, rows: np.ndarray, slots: np.ndarray, element: Any) -> None:
        self._packets.removed(slots)
        columns = self._write([element])
        linger()
        self._table.update(rows, columns)


@pytest.mark.parametrize(
    ('name', 'wrong'), [('packed_elements.PacketFile', NamesFirst), ('stores.PackedElements', FreesTooEarly)]
)
def test_packed_buffer_written_in_a_wrong_order_is_found(
    name: str, wrong: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f'ding_store.buffer.elements.{name}', wrong)
    assert noticed(tmp_path / 'replay', worker=EpisodeWorker, verify=verify)
