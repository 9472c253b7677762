"""Frames that are kept once in a directory: what its files say, a kill at any line, a full disk, and damage."""

import errno
import json
import logging
import os
from contextlib import closing
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch
from test_durable import copy, images_at_lines, num_descriptors, put

from ding_store import free_space
from ding_store.buffer import StoreBuffer
from ding_store.buffer.elements.save_blocks import ColumnBlocks
from ding_store.buffer.persistence import table_directory, table_header
from ding_store.buffer.saving import saves
from ding_store.buffer.table import columns
from ding_store.buffer.table.column_memory import ColumnMemory
from ding_store.errors import CorruptPayload, FormatMismatch, NotEnoughSpace

FRAMES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3000, 32, 33), np.uint8))
SIZE = 8


def element(i: int) -> Dict[str, torch.Tensor]:
    """An element with three frames in two stacks. It shares two of them with the next element."""
    return {'obs': FRAMES[i : i + 2].clone(), 'next_obs': FRAMES[i + 1 : i + 3].clone(), 'number': torch.tensor([i])}


def number(data: Any) -> int:
    i = int(data['number'])
    assert all(torch.equal(data[name], value) for name, value in element(i).items())
    return i


def numbers(buffer: StoreBuffer) -> Dict[str, int]:
    return {item.index: number(item.data) for item in buffer}


def filled(path: Path, count: int = SIZE + 3, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(SIZE, path=str(path), **options)
    for i in range(count):
        buffer.push(element(i))
    return buffer


def num_frames(buffer: StoreBuffer) -> List[int]:
    return [each.pool.num_used for each in buffer.table.columns.shared.values()]


def fields_of(path: Path) -> Any:
    return json.loads((path / 'header').read_bytes().split(b'\n', 1)[1])


def test_frames_of_a_reopened_buffer_are_found_again(tmp_path: Path) -> None:
    filled(tmp_path, 6).close()
    with closing(StoreBuffer(SIZE, path=str(tmp_path), share_frames=False)) as buffer:
        assert numbers(buffer) == {str(i): i for i in range(6)}
        assert num_frames(buffer) == [8, 8]
        buffer.push(element(5))
        buffer.push(element(6))
        assert num_frames(buffer) == [9, 9]
        assert buffer.check() == []


def test_header_of_shared_frames_is_refused_by_older_versions(tmp_path: Path, monkeypatch: Any) -> None:
    filled(tmp_path).close()
    assert fields_of(tmp_path)['version'] == 5
    monkeypatch.setattr(table_header, 'VERSION_OF_FRAMES', 6)
    with pytest.raises(FormatMismatch, match='has version 5, but'):
        StoreBuffer(SIZE, path=str(tmp_path))


def test_header_without_shared_frames_is_of_the_older_version(tmp_path: Path) -> None:
    filled(tmp_path, share_frames=False).close()
    fields = fields_of(tmp_path)
    assert fields['version'] == 4
    assert all('frames' not in column for column in fields['columns'])
    # It stays as it is.
    with closing(StoreBuffer(SIZE, path=str(tmp_path))) as buffer:
        buffer.push(element(11))
        assert num_frames(buffer) == []
        assert list(numbers(buffer).values()) == list(range(4, 12))


def test_frames_that_do_not_recur_give_their_files_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = StoreBuffer(1200, path=str(tmp_path))
    rows = [{'obs': FRAMES[2 * i : 2 * i + 2].clone(), 'number': torch.tensor([i])} for i in range(600)]
    with caplog.at_level(logging.INFO):
        buffer.extend_elements(rows)
        buffer.extend_elements([{**each, 'obs': each['obs'] ^ 255} for each in rows[:500]])
    assert "column 'obs' shares no frames from now on" in caplog.text
    assert fields_of(tmp_path)['version'] == 4
    assert len(list(tmp_path.glob('*.column'))) == 2
    assert buffer.check() == []
    buffer.close()
    with closing(StoreBuffer(1200, path=str(tmp_path))) as buffer:
        assert torch.equal(buffer[1003].data['obs'], rows[403]['obs'] ^ 255)
        assert buffer.check() == []


def test_table_larger_than_memory_shares_no_frames(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(free_space, 'available_memory', lambda: SIZE * 4 * FRAMES[0].nbytes // 8 - 1)
    with caplog.at_level(logging.INFO), closing(filled(tmp_path)) as buffer:
        assert num_frames(buffer) == []
        assert numbers(buffer) == {str(i): i for i in range(3, 11)}
    assert caplog.text.count("the columns ['next_obs', 'obs'] share no frames: even an eighth") == 1


# Saves


def test_save_has_each_frame_of_a_block_once(tmp_path: Path) -> None:
    sizes = {}
    for share_frames in ('auto', False):
        buffer = StoreBuffer(120, share_frames=share_frames)
        buffer.extend_elements([element(i) for i in range(120)])
        buffer.save_data(str(tmp_path / 'save'))
        sizes[share_frames] = (tmp_path / 'save').stat().st_size
        for path in (None, str(tmp_path / f'table {share_frames}')):
            with closing(StoreBuffer(100, path=path)) as loaded:
                loaded.load_data(str(tmp_path / 'save'))
                assert list(numbers(loaded).values()) == list(range(20, 120))
                assert num_frames(loaded) == [102, 102]
                assert loaded.check() == []
    assert sizes['auto'] < 122 * FRAMES[0].nbytes + 20_000
    assert sizes[False] > 480 * FRAMES[0].nbytes


def test_save_of_frames_is_refused_by_older_versions(tmp_path: Path, monkeypatch: Any) -> None:
    buffer = StoreBuffer(SIZE)
    buffer.push(element(0))
    buffer.save_data(str(tmp_path / 'save'))
    monkeypatch.setattr(saves, 'VERSION_OF_FRAMES', 6)
    with pytest.raises(FormatMismatch, match='has format 5, but'):
        buffer.load_data(str(tmp_path / 'save'))


def test_save_during_which_sharing_ends_has_all_rows(tmp_path: Path, monkeypatch: Any) -> None:
    buffer = StoreBuffer(40)
    buffer.extend_elements([element(i) for i in range(30)])
    write, calls = ColumnBlocks._write_block, []

    def write_and_end(blocks: ColumnBlocks, rows: np.ndarray) -> np.ndarray:
        if not calls:
            end_sharing(buffer)
        calls.append(len(rows))
        return write(blocks, rows)

    monkeypatch.setattr(saves, 'FEW_BYTES', 1000)  # so that rows are saved before the lock is taken
    monkeypatch.setattr(ColumnBlocks, '_write_block', write_and_end)
    buffer.save_data(str(tmp_path / 'save'))
    assert len(calls) > 1
    with closing(StoreBuffer(40)) as loaded:
        loaded.load_data(str(tmp_path / 'save'))
        assert list(numbers(loaded).values()) == [*range(30), 50]


# Killed at every line


def extend(buffer: StoreBuffer) -> None:
    buffer.extend_elements([element(i) for i in range(20, 24)], commit={'cursor': 1})


def delete_and_push(buffer: StoreBuffer) -> None:
    buffer.delete(['4', '5', '8'])
    buffer.push(element(30))


def update(buffer: StoreBuffer) -> None:
    buffer.update('7', element(40))


def end_sharing(buffer: StoreBuffer) -> None:
    buffer.table.shape._convert('obs', buffer.table.columns.specs['obs'])
    buffer.push(element(50))


#: What is done, the rows that it may remove, and those that it adds or changes.
WORK: Dict[str, Tuple[Callable[[StoreBuffer], Any], List[int], Dict[str, int]]] = {
    'extend': (extend, [3, 4, 5, 6], {str(11 + k): 20 + k for k in range(4)}),
    'delete and push': (delete_and_push, [4, 5, 8], {'11': 30}),
    'update': (update, [], {'7': 40}),
    'no more sharing': (end_sharing, [3], {'11': 50}),
}


@pytest.mark.parametrize('name', WORK)
def test_shared_frames_killed_at_any_line_are_whole(name: str, tmp_path: Path) -> None:
    act, removed, new = WORK[name]
    filled(tmp_path / 'model').close()
    directory = tmp_path / 'copy'
    copy(tmp_path / 'model', directory)
    buffer = StoreBuffer(SIZE, path=str(directory))
    images = images_at_lines(directory, lambda: act(buffer), 'table/columns.py')
    after = numbers(buffer)
    buffer.close()
    before = {str(i): i for i in range(3, 11)}
    assert set(after.items()) - set(before.items()) == set(new.items())
    for image, line in images.found.items():
        put(image, directory)
        buffer = StoreBuffer(SIZE, path=str(directory))
        assert buffer.check() == [], f'line {line}'
        found = numbers(buffer)
        kept = {index: value for index, value in before.items() if int(index) not in removed and index not in new}
        others = {index: value for index, value in found.items() if index not in kept}
        assert {index: found.get(index) for index in kept} == kept, f'line {line}'
        assert set(others.items()) <= set(before.items()) | set(new.items()), f'line {line}'
        # What a kill left may be free: the next rows overwrite no frame that is not.
        buffer.extend_elements([element(i) for i in range(60, 63)])
        assert set(numbers(buffer).items()) <= set(found.items()) | {
            (str(buffer.table.next_row - 3 + k), 60 + k) for k in range(3)
        }
        assert buffer.check() == [], f'line {line}'
        buffer.close()


# A full disk


def fill(buffer: StoreBuffer) -> None:
    for i in range(990):
        buffer.push(element(3 * i))


@pytest.mark.parametrize('small_disk', ['3m'], indirect=True)
def test_push_without_room_for_frames_changes_nothing(small_disk: Path) -> None:
    buffer = StoreBuffer(4000, path=str(small_disk / 'table'))
    with pytest.raises(NotEnoughSpace, match='no room for'):
        fill(buffer)
    held = numbers(buffer)
    assert len(held) > 100
    with pytest.raises(NotEnoughSpace):
        buffer.extend_elements([element(1 + 3 * i) for i in range(100)])
    with pytest.raises(NotEnoughSpace):
        buffer.update('0', element(2995))
    assert numbers(buffer) == held
    assert buffer.check() == []
    buffer.delete(['4', '5'])
    buffer.push(element(2995))
    assert buffer.check() == []
    buffer.close()


def fail_at(place: int, error: Exception, context: pytest.MonkeyPatch) -> None:
    """Let one call of ``ColumnMemory._array`` fail."""
    array, calls = ColumnMemory._array, iter(range(100))

    def fail(*arguments: Any, **named: Any) -> Any:
        if next(calls) == place:
            raise error
        return array(*arguments, **named)

    context.setattr(ColumnMemory, '_array', fail)


@pytest.mark.parametrize('is_exact', [True, False])
def test_header_without_room_leaves_the_columns(is_exact: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """A column becomes wider, and another should share frames no more: a full disk leaves both as they were."""

    def row(i: int, noise: float = 0.0) -> Dict[str, torch.Tensor]:
        return {name: value.float() / 255 + noise for name, value in element(i).items() if name != 'number'}

    def fail(*arguments: Any) -> Any:
        raise NotEnoughSpace(errno.ENOSPC, 'the disk is full')

    buffer = StoreBuffer(SIZE, path=str(tmp_path))
    buffer.extend_elements([row(3 * i) for i in range(SIZE)])
    files = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(columns, 'JUDGED_ROWS', 1)
    monkeypatch.setattr(columns, 'MIN_RATIO', 9)
    monkeypatch.setattr(table_directory, 'prepare_header', fail)
    if is_exact:
        buffer.table.shape.judge_sharing()
    else:
        with pytest.raises(NotEnoughSpace):
            buffer.push(row(0, 0.1))
    assert sorted(os.listdir(tmp_path)) == files
    assert len(num_frames(buffer)) == 2
    assert buffer.check() == []
    monkeypatch.undo()
    buffer.push(row(100, 0.0 if is_exact else 0.1))
    buffer.close()
    with closing(StoreBuffer(SIZE, path=str(tmp_path))) as buffer:
        assert buffer.check() == []
        assert torch.equal(buffer[2].data['obs'], row(9)['obs'])
        assert torch.equal(buffer[7].data['obs'], row(100, 0.0 if is_exact else 0.1)['obs'])


def test_opening_of_frames_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    filled(tmp_path).close()
    before = num_descriptors()
    for place in range(4):
        with pytest.MonkeyPatch.context() as context:
            fail_at(place, OSError(errno.ENOMEM, 'no memory'), context)
            with pytest.raises(OSError, match='no memory'):
                StoreBuffer(SIZE, path=str(tmp_path))
    assert num_descriptors() == before


def test_frames_without_room_leave_no_files(tmp_path: Path) -> None:
    buffer = StoreBuffer(SIZE, path=str(tmp_path))
    before, files = num_descriptors(), sorted(os.listdir(tmp_path))
    for place in range(5):
        with pytest.MonkeyPatch.context() as context:
            fail_at(place, NotEnoughSpace(errno.ENOSPC, 'the disk is full'), context)
            with pytest.raises(NotEnoughSpace):
                buffer.push(element(0))
        assert sorted(os.listdir(tmp_path)) == files
    assert num_descriptors() == before
    buffer.push(element(0))
    assert numbers(buffer) == {'0': 0}
    buffer.close()


# Damage


@pytest.mark.parametrize('bad', [-1, SIZE * 4])
def test_reference_to_no_frame_is_refused_and_reported(bad: int, tmp_path: Path) -> None:
    buffer = filled(tmp_path, 5)
    column = buffer.table.columns.current['next_obs'].stored
    column[2, 1] = bad
    assert buffer.check() == ['a row refers to a frame that does not exist']
    buffer.close()
    before = num_descriptors()
    with pytest.raises(CorruptPayload, match=r"column 'next_obs' of slot 2 refers to a frame that does not exist"):
        StoreBuffer(SIZE, path=str(tmp_path))
    assert num_descriptors() == before


def test_reference_of_a_row_that_was_never_committed_is_ignored(tmp_path: Path) -> None:
    buffer = filled(tmp_path, 5)
    buffer.table.columns.current['obs'].stored[5:] = -7
    buffer.close()
    with closing(StoreBuffer(SIZE, path=str(tmp_path))) as buffer:
        assert numbers(buffer) == {str(i): i for i in range(5)}
        assert buffer.check() == []


def test_lost_hashes_only_keep_frames_twice(tmp_path: Path) -> None:
    filled(tmp_path, 4).close()
    (file,) = {column['frames']['hashes'] for column in fields_of(tmp_path)['columns'] if 'frames' in column}
    size = (tmp_path / file).stat().st_size
    (tmp_path / file).write_bytes(bytes(size))
    with closing(StoreBuffer(SIZE, path=str(tmp_path))) as buffer:
        for i in range(3, 9):
            buffer.push(element(i))
        assert list(numbers(buffer).values()) == [2, 3, 3, 4, 5, 6, 7, 8]
        assert buffer.check() == []
