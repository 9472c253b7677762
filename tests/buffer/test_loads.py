"""Loads that fail: whatever is wrong has a name, and the buffer is as it was, also when it is opened again."""

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import torch
from ding.data import DequeBuffer
from elements import number, transition
from test_files import contents, filled
from test_threads import run_all

from ding_store.buffer import StoreBuffer
from ding_store.buffer.persistence import journal
from ding_store.buffer.saving import save_files
from ding_store.buffer.table import reads as table_reads
from ding_store.buffer.table.outputs import WarmOutputs
from ding_store.errors import CorruptPayload, FormatMismatch, NotEnoughSpace, SchemaMismatch


def numbered(size: int = 40, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, **options)
    for i in range(30):
        buffer.push(transition(i), {'i': i, 'half': i / 2})
    return buffer


def test_load_on_a_full_disk_changes_nothing(tmp_path: Path, small_disk: Path) -> None:
    large, name = StoreBuffer(300), str(tmp_path / 'large')
    large.extend({'block': np.ones((300, 1 << 15), np.uint8)})
    large.save_data(name)
    buffer = filled_in(small_disk / 'table')
    expected = contents(buffer)
    with pytest.raises(NotEnoughSpace, match='MiB more are needed'):
        buffer.load_data(name)
    assert contents(buffer) == expected
    assert buffer.check() == []
    assert len(list((small_disk / 'table').glob('*.column'))) == len(buffer.table.columns)
    buffer.close()
    buffer = StoreBuffer(300, path=str(small_disk / 'table'))
    assert contents(buffer) == expected
    # What fits is loaded after it.
    small = numbered()
    small.save_data(name)
    buffer.load_data(name)
    assert contents(buffer) == contents(small)
    buffer.close()


def test_table_opens_on_a_full_disk(small_disk: Path) -> None:
    path, filler = str(small_disk / 'table'), small_disk / 'filler'
    with contextlib.closing(filled_in(small_disk / 'table')) as buffer:
        expected = contents(buffer)
    for is_full in (True, False):
        if is_full:
            with open(filler, 'wb', buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
        with contextlib.closing(StoreBuffer(300, path=path)) as buffer:
            assert contents(buffer) == expected
            assert buffer.check() == []
            if is_full:
                with pytest.raises(NotEnoughSpace):
                    buffer.push(transition(10), {'text': 'x' * (2 << 20)})
                assert contents(buffer) == expected
                filler.unlink()


def test_push_after_opening_on_a_full_disk_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metas are long enough to be compacted, for which there is no room; for one more there is."""
    path = str(tmp_path)
    with contextlib.closing(StoreBuffer(2000, path=path)) as buffer:
        for i in range(2000):
            buffer.push(transition(i), {'text': f'{i:1500}'})
    reserve = journal.reserve
    tries: List[str] = []

    def full(descriptor: int, file: str, start: int, num_bytes: int) -> None:
        if os.path.basename(file).endswith('.new'):
            tries.append(file)
            raise NotEnoughSpace(errno.ENOSPC, 'full')
        reserve(descriptor, file, start, num_bytes)

    monkeypatch.setattr(journal, 'reserve', full)
    for num_rows in (2000, 2002):
        del tries[:]
        with contextlib.closing(StoreBuffer(2000, path=path)) as buffer:
            assert buffer.table.next_row == num_rows
            for i in range(2):
                buffer.push(transition(i), {'text': 'new'})
            assert buffer.count() == 2000
            assert [item.meta['text'].strip() for item in (buffer[0], buffer[-1])] == [str(num_rows - 1998), 'new']
            assert buffer.check() == []
        assert len(tries) == 1


@pytest.mark.parametrize('num_left', [1, 3])
def test_opening_on_a_full_disk_drops_metas_of_a_killed_push(
    num_left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on record of the rows that did not come is not those of later ones."""
    path, later = str(tmp_path), [{'text': f'later {i}'} for i in range(3)]
    with contextlib.closing(StoreBuffer(9, path=path)) as buffer:
        for i in range(3):
            buffer.push(transition(i), {'text': f'{i:1500}'})
        metas = buffer._elements.metas
        # As far as a push gets that is killed before its rows are committed.
        metas.record(metas.encode(np.arange(3, 3 + num_left), later[:num_left]))

    def full(descriptor: int, name: str, start: int, num_bytes: int) -> None:
        if start + num_bytes > os.fstat(descriptor).st_size:
            raise NotEnoughSpace(errno.ENOSPC, 'full')

    with monkeypatch.context() as patch:
        patch.setattr(journal, 'reserve', full)
        with contextlib.closing(StoreBuffer(9, path=path)) as buffer:
            buffer.push(transition(3), {'text': 'other 3'})
    with contextlib.closing(StoreBuffer(9, path=path)) as buffer:
        for i in (4, 5):
            buffer.push(transition(i))
        assert [item.meta.get('text', '').strip() for item in buffer] == ['0', '1', '2', 'other 3', '', '']
    with contextlib.closing(StoreBuffer(9, path=path)) as buffer:
        assert [item.meta.get('text', '').strip() for item in buffer] == ['0', '1', '2', 'other 3', '', '']


def test_load_of_episodes_without_room_frees_their_space(tmp_path: Path, small_disk: Path) -> None:
    def episode(i: int, length: int) -> List[Any]:
        return [{'x': torch.full((500,), i)} for _ in range(length)]

    large, name = StoreBuffer(100), str(tmp_path / 'large')
    large.extend_elements([episode(i, 10 + i % 2) for i in range(100)])
    large.save_data(name)
    buffer = StoreBuffer(100, path=str(small_disk / 'table'))
    buffer.extend_elements([episode(i, 1 + i % 2) for i in range(5)])
    free = shutil.disk_usage(small_disk).free
    for _ in range(2):
        with pytest.raises(NotEnoughSpace, match='packed'):
            buffer.load_data(name)
        assert shutil.disk_usage(small_disk).free >= free
        assert [int(item.data[-1]['x'][0]) for item in buffer] == [0, 1, 2, 3, 4]
    row = buffer.push(episode(7, 3)).index
    assert torch.equal(buffer.get_by_index(row).data[2]['x'], torch.full((500,), 7))
    assert buffer.check() == []
    buffer.close()


def filled_in(path: Path) -> StoreBuffer:
    buffer = StoreBuffer(300, path=str(path))
    for i in range(10):
        buffer.push(transition(i), {'i': i})
    return buffer


def test_load_of_metas_without_room_changes_nothing(tmp_path: Path, small_disk: Path) -> None:
    large, name = StoreBuffer(60), str(tmp_path / 'large')
    for i in range(60):
        large.push(transition(i), {'text': str(i) * 100_000})
    large.save_data(name)
    buffer = filled_in(small_disk / 'table')
    expected = contents(buffer)
    with pytest.raises(NotEnoughSpace):
        buffer.load_data(name)
    buffer.close()
    buffer = StoreBuffer(300, path=str(small_disk / 'table'))
    assert contents(buffer) == expected
    buffer.push(transition(1), {'i': 1})
    assert buffer.check() == []
    buffer.close()


def flipped(data: bytes, random: np.random.Generator) -> bytes:
    damaged = bytearray(data)
    damaged[random.integers(len(data))] ^= 1 << random.integers(8)
    return bytes(damaged)


def test_load_of_a_save_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    name, random = tmp_path / 'save', np.random.default_rng(0)
    numbered().save_data(str(name))
    data = name.read_bytes()
    buffer = StoreBuffer(40, path=str(tmp_path / 'table'))
    buffer.push(transition(77), {'a': 1})
    for _ in range(300):
        name.write_bytes(flipped(data, random))
        with pytest.raises((CorruptPayload, FormatMismatch)):
            buffer.load_data(str(name))
    assert contents(buffer) == [('0', 77, {'a': 1})]
    name.write_bytes(data)
    buffer.load_data(str(name))
    assert [number(item.data) for item in buffer] == list(range(30))
    buffer.close()


def stock_file(path: Path, shapes: List[int]) -> bytes:
    stock = DequeBuffer(10)
    for shape in shapes:
        stock.push({'x': torch.zeros(shape)})
    stock.save_data(str(path))
    return path.read_bytes()


def test_load_of_a_truncated_di_engine_file_is_refused(tmp_path: Path) -> None:
    name = tmp_path / 'stock.hkl'
    data = stock_file(name, [3] * 5)
    buffer = filled()
    expected = contents(buffer)
    for keep in (10, len(data) // 2, len(data) - 10):
        name.write_bytes(data[:keep])
        with pytest.raises(CorruptPayload, match='stock.hkl'):
            buffer.load_data(str(name))
    assert contents(buffer) == expected


def test_load_of_mixed_di_engine_elements_is_refused(tmp_path: Path) -> None:
    name = tmp_path / 'stock.hkl'
    stock_file(name, [3, 3, 3, 4])
    buffer = filled()
    expected = contents(buffer)
    with pytest.raises(SchemaMismatch, match='x'):
        buffer.load_data(str(name))
    assert contents(buffer) == expected


def test_load_of_objects_into_a_path_is_refused(tmp_path: Path) -> None:
    objects, name = StoreBuffer(5), str(tmp_path / 'objects')
    objects.push('text')
    objects.save_data(name)
    buffer = filled_in(tmp_path / 'table')
    expected = contents(buffer)
    with pytest.raises(SchemaMismatch, match='Python objects'):
        buffer.load_data(name)
    strange = StoreBuffer(5)
    strange.push(transition(1), {'what': {1, 2}})
    strange.save_data(name)
    with pytest.raises(SchemaMismatch, match='set'):
        buffer.load_data(name)
    assert contents(buffer) == expected
    assert buffer.check() == []
    buffer.close()
    memory = StoreBuffer(5)
    memory.load_data(name)
    assert [item.meta for item in memory] == [{'what': {1, 2}}]


def test_load_failing_halfway_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = str(tmp_path / 'save')
    numbered().save_data(name)
    buffer = filled_in(tmp_path / 'table')
    expected, read = contents(buffer), save_files.saves.Save._read_part
    monkeypatch.setattr(save_files, 'BLOCK_BYTES', 400)

    def failing(self: Any, block: int, first: int, count: int) -> Any:
        if first > 10:
            raise OSError(5, 'the disk is gone')
        return read(self, block, first, count)

    monkeypatch.setattr(save_files.saves.Save, '_read_part', failing)
    with pytest.raises(OSError, match='gone'):
        buffer.load_data(name)
    assert contents(buffer) == expected
    assert buffer.check() == []
    buffer.close()


@pytest.mark.parametrize('has_path', [False, True])
def test_sample_during_a_load_has_old_or_new_rows_only(has_path, tmp_path, monkeypatch):
    saves = {
        'columns': [{'x': torch.full((3,), i)} for i in range(4)],
        'other columns': [{'y': torch.full((2,), float(i))} for i in range(4)],
        'lists': [[{'x': torch.full((3,), i)}] * (1 + i) for i in range(4)],
    }
    for name, elements in saves.items():
        save = StoreBuffer(4)
        for element in elements:
            save.push(element, {'of': name})
        save.save_data(str(tmp_path / name))
    buffer = StoreBuffer(4, path=str(tmp_path / 'kept') if has_path else None)
    found = []

    def replace_and_sample(*arguments, **named):
        replace(*arguments, **named)

        # The new rows are there from here on, for all threads but this one, which has the lock for writers.
        def sample():
            found.extend(buffer.sample(4, groupby=None))

        run_all(sample)

    replace = buffer.table.shape.replace
    monkeypatch.setattr(buffer.table.shape, 'replace', replace_and_sample)
    for name in ('columns', 'lists', 'other columns', 'lists', 'columns', 'other columns'):
        buffer.load_data(str(tmp_path / name))
        assert [item.meta for item in found] == [{'of': name}] * 4
        drawn = sorted(int(item.index) for item in found)
        assert drawn == [0, 1, 2, 3]
        for item in found:
            assert str(item.data) == str(saves[name][int(item.index)])
        found.clear()
    buffer.close()


@pytest.mark.parametrize('other', [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 2)])
def test_sample_overtaken_by_a_load_is_drawn_again(other: torch.Tensor, tmp_path: Path, monkeypatch: Any) -> None:
    save, buffer = StoreBuffer(2), StoreBuffer(2)
    for _ in range(2):
        save.push({'x': other})
        buffer.push({'x': torch.zeros(3)})
    save.save_data(str(tmp_path / 'save'))
    monkeypatch.setattr(table_reads, 'QUICK_BYTES', -1)
    gather, loaded = WarmOutputs.gather, []

    def gather_of_others(outputs: WarmOutputs, columns: Any, slots: np.ndarray, cold: Any) -> Any:
        """Other columns come between those two."""
        if not loaded:
            loaded.append(True)
            run_all(lambda: buffer.load_data(str(tmp_path / 'save')))
            columns = buffer.table.columns.current
        return gather(outputs, columns, slots, cold)

    monkeypatch.setattr(WarmOutputs, 'gather', gather_of_others)
    for item in buffer.sample(2):
        assert item.data['x'].dtype == other.dtype
        assert item.data['x'].shape == other.shape


def test_load_during_a_resize_keeps_the_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, name = StoreBuffer(200), str(tmp_path / 'save')
    buffer.extend({'r': np.arange(200.0)})
    buffer.save_data(name)
    saved, others = save_files._saved, []

    def beside(*arguments: Any) -> Any:
        loaded = saved(*arguments)
        others.append(threading.Thread(target=buffer.resize, args=(60,)))
        others[0].start()
        others[0].join(0.2)  # as far as it comes
        return loaded

    monkeypatch.setattr(save_files, '_saved', beside)
    buffer.load_data(name)
    others[0].join(60)
    assert buffer.count() == 60
    assert buffer.gather_batch(buffer.table.rows_by_age()).data.r.tolist() == list(range(140, 200))
    assert buffer.check() == []


@pytest.mark.parametrize('order', ['<', '>'])
def test_load_reads_arrays_of_either_byte_order(order: str, tmp_path: Path) -> None:
    """A ValueError would be taken for a shortage by DI-engine's fetcher, which then waits for ever."""
    buffer = StoreBuffer(10)
    for i in range(4):
        buffer.push({'obs': np.full(3, i, f'{order}f4'), 'step': np.full(2, i, f'{order}i8')})
    assert buffer.sample(1)[0].data['obs'].dtype == np.dtype(f'{order}f4')
    data = buffer.gather_batch(np.arange(4)).data
    assert data.obs.tolist() == [[float(i)] * 3 for i in range(4)]
    assert data.step.tolist() == [[i] * 2 for i in range(4)]
