"""Saving and loading: formats, atomicity, and saves while others write."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from ding.data import DequeBuffer
from ding.framework.middleware import buffer_saver
from elements import number, transition

from ding_store.buffer import StoreBuffer
from ding_store.buffer.elements import save_blocks
from ding_store.buffer.saving import saves
from ding_store.buffer.saving.save_files import MAGIC
from ding_store.errors import CorruptPayload, FormatMismatch


def contents(buffer: StoreBuffer) -> List[tuple]:
    return [(item.index, number(item.data), item.meta) for item in buffer]


def filled(size: int = 10, count: int = 14) -> StoreBuffer:
    buffer = StoreBuffer(size)
    for i in range(count):
        buffer.push(transition(i), {'i': i, 'half': i / 2} if i % 2 else None)
    buffer.delete('7')
    return buffer


@pytest.mark.parametrize('size', [4, 10, 30])
def test_save_is_read_into_a_table_of_any_size(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_blocks, 'BLOCK_BYTES', 200)
    buffer, name = filled(), tmp_path / 'save'
    buffer.save_data(str(name))
    loaded = StoreBuffer(size, path=str(tmp_path / 'table'))
    loaded.push(transition(99))
    loaded.load_data(str(name))
    assert contents(loaded) == contents(buffer)[-size:]
    assert loaded.push(transition(20)).index == '14'
    assert loaded.check() == []
    expected = contents(loaded)
    loaded.close()
    again = StoreBuffer(size, path=str(tmp_path / 'table'))
    assert contents(again) == expected
    again.close()


@pytest.mark.parametrize('version', [1, 3, 6])
def test_save_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    buffer, name = filled(), tmp_path / 'save'
    header = json.dumps({'version': version}).encode()
    name.write_bytes(MAGIC + len(header).to_bytes(8, 'little') + header)
    with pytest.raises(FormatMismatch, match=f'format {version},'):
        buffer.load_data(str(name))
    assert len(buffer) == 9


def test_damage_is_found_before_anything_changes(tmp_path: Path) -> None:
    buffer, name = filled(), tmp_path / 'save'
    buffer.save_data(str(name))
    data, expected = name.read_bytes(), contents(buffer)
    for keep in range(0, len(data), max(1, len(data) // 60)):
        name.write_bytes(data[:keep])
        with pytest.raises(CorruptPayload):
            buffer.load_data(str(name))
    name.write_bytes(data[:-30] + bytes([data[-30] ^ 1]) + data[-29:])
    with pytest.raises(CorruptPayload):
        buffer.load_data(str(name))
    assert contents(buffer) == expected


class VersionedWriter(threading.Thread):
    """Pushes, updates and deletes, and remembers what was there after each of them."""

    def __init__(self, buffer: StoreBuffer) -> None:
        super().__init__()
        self.buffer, self.done = buffer, threading.Event()
        self.states: List[Dict[int, int]] = []
        self.state: Dict[int, int] = {}

    def push(self, count: int) -> None:
        first = self.buffer.table.next_row
        rows = self.buffer.extend({'value': np.repeat(np.arange(first, first + count)[:, None], 500, axis=1)})
        self.state.update((row, row) for row in rows.tolist())
        for row in sorted(self.state)[: -self.buffer.size]:
            del self.state[row]
        self.states.append(dict(self.state))

    def run(self) -> None:
        random = np.random.RandomState(0)
        while not self.done.is_set():
            rows = np.array(sorted(self.state))
            if random.rand() < 0.4:
                self.push(int(random.randint(1, 9)))
            elif random.rand() < 0.8:
                chosen = random.choice(rows, 20, replace=False)
                values = chosen + random.randint(1, 1 << 40)
                self.buffer.table.update(chosen, {'value': np.repeat(values[:, None], 500, axis=1)})
                self.state.update(zip(chosen.tolist(), values.tolist()))
                self.states.append(dict(self.state))
            else:
                row = int(random.choice(rows))
                self.buffer.delete(str(row))
                del self.state[row]
                self.states.append(dict(self.state))


@pytest.mark.parametrize('few_bytes', [0, 100_000])
def test_save_during_writes_is_of_one_moment(tmp_path: Path, few_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_blocks, 'BLOCK_BYTES', 40_000)
    monkeypatch.setattr(saves, 'FEW_BYTES', few_bytes)
    buffer = StoreBuffer(300)
    writer = VersionedWriter(buffer)
    writer.push(300)
    writer.start()
    try:
        num_saves = 0
        while num_saves < 15 or len(writer.states) <= 20:
            assert num_saves < 1000, 'nobody writes'
            buffer.save_data(str(tmp_path / str(num_saves)))
            num_saves += 1
    finally:
        writer.done.set()
        writer.join(60)
    for i in range(num_saves):
        loaded = StoreBuffer(300)
        loaded.load_data(str(tmp_path / str(i)))
        rows = loaded.table.rows_by_age()
        values = loaded.table.gather(rows)['value']
        assert (values == values[:, :1]).all()
        assert dict(zip(rows.tolist(), values[:, 0].tolist())) in writer.states


def test_save_during_a_schema_change_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, changed = filled(), []
    write_rows = saves.SaveWriter._write_rows

    def change_once(writer: Any, rows: np.ndarray) -> None:
        write_rows(writer, rows)
        if not changed:
            changed.append(True)
            buffer.clear()
            buffer.push({'other': torch.ones(3)}, {'a': 1})

    monkeypatch.setattr(saves, 'FEW_BYTES', 0)
    monkeypatch.setattr(saves.SaveWriter, '_write_rows', change_once)
    buffer.save_data(str(tmp_path / 'save'))
    loaded = StoreBuffer(5)
    loaded.load_data(str(tmp_path / 'save'))
    assert [(item.index, item.data['other'].tolist(), item.meta) for item in loaded] == [('14', [1.0] * 3, {'a': 1})]


def test_save_by_the_di_engine_saver_can_be_loaded(tmp_path: Path) -> None:
    buffer = filled()
    save = buffer_saver(SimpleNamespace(exp_name=str(tmp_path)), buffer, every_envstep=10, replace=False)
    for step in (0, 5, 12):
        save(SimpleNamespace(env_step=step))
    names = sorted(file for file in tmp_path.rglob('*') if file.is_file())
    assert len(names) == 2
    loaded = StoreBuffer(10)
    loaded.load_data(str(names[0]))
    assert contents(loaded) == contents(buffer)


def test_load_of_a_di_engine_file_keeps_metas(tmp_path: Path) -> None:
    stock, name = DequeBuffer(5), str(tmp_path / 'stock.hkl')
    for i in range(7):
        stock.push(transition(i), {'i': i})
    stock.save_data(name)
    loaded = StoreBuffer(4, path=str(tmp_path / 'table'))
    loaded.load_data(name)
    assert [(value, meta) for _, value, meta in contents(loaded)] == [(i, {'i': i}) for i in range(3, 7)]
    loaded.close()


class TooLarge:
    """What there is no memory for when it is loaded."""

    def __reduce__(self) -> Any:
        return bytearray, (1 << 62,)


def test_save_that_cannot_be_loaded_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'of_a_project.py').write_text('class Note:\n    pass\n')
    with monkeypatch.context() as there:
        there.syspath_prepend(str(tmp_path))
        import of_a_project

        buffers = [StoreBuffer(4), StoreBuffer(4)]
        for buffer, note in zip(buffers, (of_a_project.Note(), TooLarge())):
            buffer.push(transition(1), {'note': note})
            buffer.save_data(str(tmp_path / f'save{buffers.index(buffer)}'))
    monkeypatch.delitem(sys.modules, 'of_a_project')
    loaded = filled()
    expected = contents(loaded)
    with pytest.raises(FormatMismatch, match=r'save0.* of_a_project\.Note'):
        loaded.load_data(str(tmp_path / 'save0'))
    with pytest.raises(MemoryError):
        loaded.load_data(str(tmp_path / 'save1'))
    assert contents(loaded) == expected
