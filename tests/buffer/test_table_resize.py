"""A live buffer of another size: in memory, in unlinked files and with a path; with metas, groups and priorities."""

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from elements import number, transition

from ding_store.buffer import Prioritized, StoreBuffer, Table, limited
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table import column_memory
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import NotEnoughData, NotEnoughSpace


@pytest.fixture(params=['memory', 'files', 'path'])
def options(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    if request.param == 'files':
        monkeypatch.setattr(column_memory.free_space, 'available_memory', lambda: 1000)
        monkeypatch.setattr(column_memory.free_space, 'roomiest_directory', lambda: str(tmp_path))
    return {'path': str(tmp_path / 'replay')} if request.param == 'path' else {}


def numbers(buffer: StoreBuffer) -> List[int]:
    return [number(item.data) for item in buffer]


def test_resize_shrinks_and_grows(options: dict) -> None:
    buffer = StoreBuffer(10, **options)
    for i in range(17):
        buffer.push(transition(i), {'group': i % 3})
    buffer.delete(['9', '12'])
    buffer.resize(5)
    assert numbers(buffer) == [11, 13, 14, 15, 16]
    assert [item.meta['group'] for item in buffer] == [2, 1, 2, 0, 1]
    assert buffer.size == buffer.table.capacity == buffer.view().size == 5
    assert sorted(map(len, buffer.sample(3, groupby='group'))) == [1, 2, 2]
    buffer.resize(8)
    assert sorted(map(len, buffer.sample(3, groupby='group'))) == [1, 2, 2]
    for i in range(17, 25):
        buffer.push(transition(i), {'group': i})
    assert numbers(buffer) == list(range(17, 25))
    assert buffer.check() == []
    assert len(buffer.sample(8, groupby='group')) == 8
    buffer.close()


def test_resize_gives_rows_without_metas_no_others(options: dict) -> None:
    buffer = StoreBuffer(6, **options)
    buffer.extend_elements([transition(i) for i in range(6)], [{'group': 0}] * 4 + [None] * 2)
    buffer.resize(2)  # 4 and 5 move to where others were, who had metas.
    assert [(item.index, item.meta) for item in buffer] == [('4', {}), ('5', {})]
    with pytest.raises(NotEnoughData):
        buffer.sample(1, groupby='group')
    buffer.close()


def test_resize_keeps_priorities(options: dict) -> None:
    buffer = StoreBuffer(10, sampler=Prioritized(seed=0), **options)
    rows = buffer.extend_elements([transition(i) for i in range(14)], priority=np.arange(14.0) + 1)
    for size in (6, 30):
        buffer.resize(size)
        assert buffer.sampler.priorities.of(rows[-6:]) == pytest.approx(np.arange(9.0, 15.0))
        assert set(buffer.sample_batch(6, replace=True).rows) <= set(rows[-6:])
    buffer.close()


def test_resize_keeps_python_objects() -> None:
    buffer = StoreBuffer(6)
    for i in range(9):
        buffer.push(f'element {i}', {'i': i})
    buffer.resize(3)
    buffer.resize(4)
    buffer.push('last')
    assert [item.data for item in buffer] == ['element 6', 'element 7', 'element 8', 'last']
    assert [item.meta for item in buffer] == [{'i': 6}, {'i': 7}, {'i': 8}, {}]


@pytest.mark.parametrize('size', [0, -1, 2.5, None])
def test_resize_to_an_invalid_size_changes_nothing(size: Any) -> None:
    buffer = StoreBuffer(4)
    buffer.push(transition(1))
    with pytest.raises(TypeError, match='size'):
        buffer.resize(size)
    assert (buffer.size, numbers(buffer)) == (4, [1])


def prioritized(**options: Any) -> StoreBuffer:
    """Rows 4 to 13, each with its number for a priority."""
    buffer = StoreBuffer(10, sampler=Prioritized(seed=0), **options)
    buffer.extend_elements([transition(i) for i in range(14)], priority=np.arange(14.0))
    return buffer


def check_rows(buffer: StoreBuffer, size: int, rows: range) -> None:
    assert (buffer.size, numbers(buffer), buffer.check()) == (size, list(rows), [])
    assert buffer.sampler.priorities.of(np.array(rows)) == pytest.approx(np.array(rows))
    assert set(buffer.sample_batch(64, replace=True).rows) <= set(rows)


def resize_and_reopen(buffer: StoreBuffer, size: int, options: dict) -> None:
    rows = range(14 - min(size, buffer.count()), 14)
    buffer.resize(size)
    check_rows(buffer, size, rows)
    buffer.close()
    if options:
        buffer = StoreBuffer(size, sampler=Prioritized(seed=0), **options)
        check_rows(buffer, size, rows)
        buffer.close()


@pytest.mark.parametrize('size', [4, 20])
def test_resize_on_a_full_disk_changes_nothing(size: int, small_disk: Path) -> None:
    options = {'path': str(small_disk / 'replay')}
    buffer = prioritized(**options)
    with open(small_disk / 'filler', 'wb', buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    with pytest.raises(NotEnoughSpace):
        buffer.resize(size)
    check_rows(buffer, 10, range(4, 14))
    (small_disk / 'filler').unlink()
    resize_and_reopen(buffer, size, options)


@pytest.mark.parametrize('size', [4, 20])
def test_resize_that_cannot_map_columns_changes_nothing(
    size: int, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = prioritized(**options)
    array = column_memory.ColumnMemory._array

    def fail(self: Any, name: str, *arguments: Any, **named: Any) -> Any:
        if name == list(self.columns)[-1]:
            raise OSError(errno.ENOMEM, 'no memory')
        return array(self, name, *arguments, **named)

    monkeypatch.setattr(column_memory.ColumnMemory, '_array', fail)
    with pytest.raises(OSError, match='no memory'):
        buffer.resize(size)
    check_rows(buffer, 10, range(4, 14))
    monkeypatch.undo()
    resize_and_reopen(buffer, size, options)


@pytest.mark.parametrize('size', [4, 20])
def test_resize_on_a_failing_disk_loses_the_oldest_at_most(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {'path': str(tmp_path / 'replay')}
    buffer = prioritized(**options)

    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, 'the disk is broken')

    monkeypatch.setattr(os, 'replace', fail)
    with pytest.raises(OSError, match='broken'):
        buffer.resize(size)
    monkeypatch.undo()
    check_rows(buffer, 10, range(10 if size == 4 else 4, 14))
    resize_and_reopen(buffer, size, options)


def test_resize_keeps_uses_and_priorities_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: Path) -> StoreBuffer:
        return StoreBuffer(10, path=str(path), sampler=limited(Prioritized(seed=0), max_times_sampled=9))

    buffer = opened(tmp_path / 'replay')
    buffer.extend_elements([transition(i) for i in range(10)], priority=np.arange(10.0) + 1)
    buffer.sample_batch(30, replace=True)
    rows = np.arange(6, 10)
    expected = buffer.sampler.uses_of(rows).tolist()
    assert min(expected) > 0
    copies: List[Path] = []

    def copied(name: str) -> None:
        method = getattr(RowIndex, name)

        def copy_after(*arguments: Any) -> Any:
            result = method(*arguments)
            copies.append(tmp_path / str(len(copies)))
            shutil.copytree(tmp_path / 'replay', copies[-1])
            return result

        monkeypatch.setattr(RowIndex, name, copy_after)

    for name in ('remove', 'relocations', 'relocate'):
        copied(name)
    buffer.resize(4)
    monkeypatch.undo()
    assert len(copies) == 3
    for path in copies:
        found = opened(path)
        assert found.sampler.uses_of(rows).tolist() == expected
        assert found.sampler.sampler.priorities.of(rows) == pytest.approx(rows + 1)
        assert found.check() == []
        found.close()
    buffer.close()


def test_resize_with_a_power_cut_loses_no_row_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is stored between two flushes, any page may be on the disk."""
    buffer = StoreBuffer(10, path=str(tmp_path), fsync=True)
    buffer.extend_elements([transition(i) for i in range(14)])
    flushed = [buffer.table.index.row_of_slot.copy()]
    sync, move = TableDirectory.sync_numbers, column_memory.ColumnMemory.move

    def sync_numbers(table_dir: TableDirectory) -> None:
        sync(table_dir)
        flushed.append(table_dir.numbers.copy())

    def checked_move(self: column_memory.ColumnMemory, source: np.ndarray, target: np.ndarray) -> None:
        assert len(target)
        assert (flushed[-1][target] == EMPTY).all(), 'the row there might live, with the bytes of another'
        move(self, source, target)

    monkeypatch.setattr(TableDirectory, 'sync_numbers', sync_numbers)
    monkeypatch.setattr(column_memory.ColumnMemory, 'move', checked_move)
    buffer.resize(4)
    for before, after in zip(flushed, flushed[1:]):
        for row in range(10, 14):
            assert ((before == row) & (after == row)).any(), f'row {row} is in none of both, or moved'
    assert set(flushed[-1][:4]) == {10, 11, 12, 13}
    buffer.close()


def test_resize_frees_disk_space(tmp_path: Path) -> None:
    table = Table({'block': (np.dtype(np.uint8), (1 << 16,))}, 100, str(tmp_path))
    table.extend({'block': np.ones((100, 1 << 16), np.uint8)})
    (file,) = tmp_path.glob('*.column')
    before = file.stat().st_blocks
    table.shape.resize(10)
    assert file.stat().st_blocks <= before // 5
    assert (table.gather(table.rows_by_age())['block'] == 1).all()
    table.close()


def test_resize_during_reads_and_writes_tears_no_row(options: dict) -> None:
    buffer = StoreBuffer(50, **options)
    buffer.extend_elements([transition(i) for i in range(50)])
    wrong: List[Any] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                for item in buffer.sample(8):
                    if number(item.data) != int(item.index):
                        wrong.append((item.index, number(item.data)))
        except BaseException as e:  # noqa: BLE001  told to the test below
            wrong.append(e)

    def write() -> None:
        try:
            i = 50
            while not done.is_set():
                buffer.push(transition(i))
                i += 1
        except BaseException as e:  # noqa: BLE001  told to the test below
            wrong.append(e)

    threads = [threading.Thread(target=each) for each in (read, read, write)]
    for thread in threads:
        thread.start()
    for size in [20, 70, 9, 100, 33] * 10:
        buffer.resize(size)
        assert buffer.check() == []
    done.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    buffer.close()
