"""A buffer with a path: closed and made again, refused where it should be, and killed at any line of what is rare."""

import errno
import gc
import json
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Set, Tuple

import numpy as np
import pytest
import torch
from crashes import Child
from elements import number, transition

import ding_store.buffer as buffer_package
from ding_store.buffer import Prioritized, StoreBuffer, Table, limited
from ding_store.buffer.metas.metas import MetaStore
from ding_store.buffer.persistence import table_directory as durable_module
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.table.column_memory import ColumnMemory
from ding_store.buffer.table.durability import Durability
from ding_store.errors import (
    ConfigError,
    CorruptPayload,
    FormatMismatch,
    NotEnoughSpace,
    SchemaMismatch,
    StoreClosed,
    StoreError,
    TableLocked,
)


def filled(path: Path, size: int = 10, count: int = 14, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, path=str(path), **options)
    for i in range(count):
        buffer.push(transition(i), {'i': i, 'half': i / 2} if i % 2 else None)
    return buffer


def contents(buffer: StoreBuffer) -> List[tuple]:
    return [(item.index, number(item.data), item.meta) for item in buffer]


@pytest.mark.parametrize('fsync', [False, True])
def test_reopened_buffer_continues_where_it_stopped(tmp_path: Path, fsync: bool) -> None:
    buffer = filled(tmp_path, fsync=fsync)
    buffer.delete(['6', '9'])
    buffer.update('8', transition(80), {'a': (1, 'x'), 3: np.float32(0.5)})
    buffer.extend(buffer.schema.encode([transition(14)]), commit={'cursor': ['a', 3], 'marks': {'w': 9}})
    expected, schema = contents(buffer), buffer.schema
    buffer.close()
    assert len(buffer) == 0

    again = StoreBuffer(10, path=str(tmp_path), fsync=fsync)
    assert contents(again) == expected
    assert again.schema == schema
    assert again.committed == {'cursor': ['a', 3], 'marks': {'w': 9}}
    assert again.check() == []
    # Two slots are free, and used before anybody has to leave.
    assert [again.push(transition(i)).index for i in (15, 16)] == ['15', '16']
    assert [item.index for item in again] == ['4', '5', '7', '8', '10', '11', '12', '13', '14', '15', '16'][-10:]
    assert again.sample_batch(5).data.reward.shape == (5,)
    again.close()


def test_reopened_buffer_has_metas_written_after_the_push(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    for item in buffer.sample(10):
        item.meta['priority'] = number(item.data) * 1.5
    given = {'list': [1]}
    buffer.update('7', meta=given)
    buffer[4].meta['more'] = torch.ones(2)
    buffer.update('5', meta={})
    expected = {item.index: item.meta for item in buffer}
    buffer.close()
    again = StoreBuffer(10, path=str(tmp_path))
    for item in again:
        assert str(item.meta) == str(expected[item.index])
        assert item.index in '578' or item.meta['priority'] == number(item.data) * 1.5
    again.close()


def test_metas_that_no_file_can_hold_are_refused(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    expected = contents(buffer)
    with pytest.raises(SchemaMismatch, match='type object'):
        buffer.push(transition(1), {'a': object()})
    assert contents(buffer) == expected
    buffer.close()


def test_record_of_metas_stays_small(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    for i in range(3000):
        buffer.push(transition(i), {'i': i, 'text': 'x' * 2000})
    assert os.path.getsize(tmp_path / 'metas') < 4 << 20
    expected = [item.meta for item in buffer]
    buffer.close()
    again = StoreBuffer(10, path=str(tmp_path))
    assert [item.meta for item in again] == expected
    again.close()


def test_reopened_buffer_has_its_wider_schema(tmp_path: Path) -> None:
    buffer = StoreBuffer(5, path=str(tmp_path))
    buffer.push({'x': torch.ones(1), 'y': None})
    buffer.push({'x': torch.ones(1), 'y': torch.full((2,), 3.0)})
    buffer.close()
    buffer = StoreBuffer(5, path=str(tmp_path))
    assert [item.data['y'] if item.data['y'] is None else item.data['y'].tolist() for item in buffer] == [None, [3, 3]]
    with pytest.raises(SchemaMismatch):
        buffer.push(transition(1))
    buffer.clear()
    buffer.push(transition(7))
    buffer.close()
    buffer = StoreBuffer(5, path=str(tmp_path))
    assert contents(buffer) == [('2', 7, {})]
    assert len(list(tmp_path.glob('*.column'))) == len(buffer.table.columns)
    buffer.close()


def test_buffer_with_a_path_refuses_python_objects(tmp_path: Path) -> None:
    buffer = StoreBuffer(5, path=str(tmp_path))
    for element in ('text', {'x': object()}, [{'x': 'text'}], []):
        with pytest.raises(SchemaMismatch, match=r'Python objects.*path=None'):
            buffer.push(element)
    buffer.push([torch.ones(1)] * 2)
    with pytest.raises(SchemaMismatch):
        buffer.push({'x': torch.ones(1)})
    with pytest.raises(SchemaMismatch, match=r'a list of dicts among lists of other values than dicts.*str'):
        buffer.push([{'x': 'text'}] * 3)
    with pytest.raises(SchemaMismatch, match=r'Python objects.* hold a str.*path=None'):
        buffer.push(['text'] * 3)
    assert len(buffer) == 1
    assert buffer.schema is not None
    buffer.push([torch.ones(1)] * 3)
    with pytest.raises(SchemaMismatch, match=r'Python objects.* hold a str.*path=None'):
        buffer.push(['text'] * 2)
    assert [len(item.data) for item in buffer] == [2, 3]
    buffer.close()


@pytest.mark.parametrize('note', [{'a': object()}, {'a': os.urandom(1 << 19).hex()}, ['a']])
def test_notes_that_cannot_be_committed_are_refused(tmp_path: Path, note: Any) -> None:
    buffer = filled(tmp_path)
    expected = contents(buffer)
    with pytest.raises(SchemaMismatch, match='commit'):
        buffer.extend(buffer.schema.encode([transition(14)]), commit=note)
    assert contents(buffer) == expected
    assert buffer.committed is None
    buffer.commit({'alone': 1})
    assert buffer.committed == {'alone': 1}
    buffer.close()


def snapshot(path: Path) -> dict:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}


def header_of(path: Path, **changes: Any) -> None:
    text = json.loads((path / 'header').read_bytes().split(b'\n', 1)[1])
    changed = json.dumps({**text, **changes}).encode()
    (path / 'header').write_bytes(b'%08x\n' % zlib.crc32(changed) + changed)


def cut(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, os.path.getsize(path / name) // 2)


def overwrite(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(data) and None


@pytest.mark.parametrize(
    ('damage', 'error', 'message'),
    [
        (lambda path: header_of(path, version=6), FormatMismatch, 'version 6'),
        (lambda path: header_of(path, capacity=11), ConfigError, r'capacity 11, not 10.*resize'),
        (overwrite('header', b'12345678\n{}'), CorruptPayload, 'checksum'),
        (overwrite('header', b'garbage'), CorruptPayload, 'header'),
        (cut('000.column'), CorruptPayload, r'000.column.* has .* bytes, but .* are needed'),
        (lambda path: os.unlink(path / '001.column'), CorruptPayload, r'001.column.* is missing'),
        (cut('rows'), CorruptPayload, 'rows'),
        (cut('commit'), CorruptPayload, 'commit'),
        (overwrite('commit', bytes(1 << 20)), CorruptPayload, 'no whole commit record'),
        (lambda path: os.unlink(path / 'lock'), ConfigError, 'not the directory of a table'),
        (lambda path: os.unlink(path / 'header'), CorruptPayload, 'header.* is missing'),
    ],
)
def test_damaged_table_is_refused_and_not_changed(
    tmp_path: Path, damage: Callable[[Path], None], error: type, message: str
) -> None:
    filled(tmp_path).close()
    damage(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(StoreError, match=message) as raised:
        StoreBuffer(10, path=str(tmp_path))
    assert type(raised.value) is error
    after = snapshot(tmp_path)
    assert {name: after[name][0] for name in before} == {name: data for name, (data, _) in before.items()}


def test_table_with_other_columns_or_size_is_refused(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with pytest.raises(ConfigError, match='capacity 10, not 12'):
        StoreBuffer(12, path=str(tmp_path))
    with pytest.raises(SchemaMismatch, match='other'):
        Table({'other': (np.dtype(np.int8), ())}, 10, str(tmp_path))
    assert len(StoreBuffer(10, path=str(tmp_path))) == 10


def test_open_table_is_locked_for_other_processes(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    with pytest.raises(TableLocked, match='open already'):
        StoreBuffer(10, path=str(tmp_path))

    def refused(tell: Callable[[], None]) -> None:
        with pytest.raises(TableLocked):
            StoreBuffer(10, path=str(tmp_path))
        # A forked worker may read what its parent has open, and write nothing.
        assert number(buffer[0].data) == 4
        for write in (lambda: buffer.push(transition(1)), lambda: buffer.delete('5'), buffer.clear):
            with pytest.raises(StoreClosed, match='forked'):
                write()

    assert Child(refused).wait() == 0
    buffer.close()
    StoreBuffer(10, path=str(tmp_path)).close()


def test_check_finds_a_damaged_table(tmp_path: Path) -> None:
    buffer = filled(tmp_path)
    buffer.table.index.row_of_slot[3] = buffer.table.index.row_of_slot[4]
    assert any('two slots' in finding for finding in buffer.check())
    header_of(tmp_path, info=None)
    assert any('header' in finding for finding in buffer.check())
    buffer.close()


def test_push_that_failed_loses_no_later_row(tmp_path: Path) -> None:
    table = Table({'x': (np.dtype(np.int64), ())}, 10, str(tmp_path))
    table.extend({'x': np.arange(3)})
    with pytest.raises(KeyboardInterrupt), table.writing(1):
        raise KeyboardInterrupt
    assert table.check() == []
    table.clear()
    assert table.check() == []
    table.close()
    for expected in ([3], [3, 4]):
        table = Table({}, 10, str(tmp_path))
        table.extend({'x': np.ones(1, np.int64)})
        assert table.rows_by_age().tolist() == expected
        assert table.check() == []
        table.close()


def num_descriptors() -> int:
    gc.collect()  # Those of other tests.
    return len(os.listdir('/proc/self/fd'))


@pytest.mark.parametrize(
    'place', [(durable_module, 'prepare_header'), (SlotValues, 'successor'), (durable_module.Journal, 'reserve')]
)
def test_load_that_fails_leaves_no_file_open(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, full = str(tmp_path / 'save'), os.strerror(errno.ENOSPC)
    buffer = filled(tmp_path / 'table', sampler=Prioritized())
    buffer.save_data(name)
    buffer.load_data(name)  # From here on it has a record of where sequences end.
    before = num_descriptors(), sorted(os.listdir(tmp_path / 'table'))

    def fail(*arguments: Any, **named: Any) -> None:
        raise NotEnoughSpace(errno.ENOSPC, full)

    monkeypatch.setattr(*place, fail)
    for _ in range(3):
        with pytest.raises(NotEnoughSpace, match=full):
            buffer.load_data(name)
    assert (num_descriptors(), sorted(os.listdir(tmp_path / 'table'))) == before
    monkeypatch.undo()
    buffer.load_data(name)
    assert (num_descriptors(), buffer.check()) == (before[0], [])
    buffer.close()


@pytest.mark.parametrize(
    'place',
    [
        (durable_module.TableDirectory, '_recover'),
        (Durability, 'redo'),
        (MetaStore, 'restore'),
        (ColumnMemory, '_array'),
    ],
)
def test_opening_that_fails_leaves_no_file_open(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).close()
    before = num_descriptors()

    def fail(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.ENOMEM, 'no memory')

    monkeypatch.setattr(*place, fail)
    for _ in range(3):
        with pytest.raises(OSError, match='no memory'):
            StoreBuffer(10, path=str(tmp_path))
        assert num_descriptors() == before
    monkeypatch.undo()
    StoreBuffer(10, path=str(tmp_path)).close()
    assert num_descriptors() == before


def test_update_record_is_removed_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power cut would bring it back: it is of a row number, which others may have since."""
    done = []
    for name in ('ftruncate', 'fsync', 'fdatasync'):
        call = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda descriptor, *arguments, call=call, name=name: (
                done.append((name, os.readlink(f'/proc/self/fd/{descriptor}'))),
                call(descriptor, *arguments),
            ),
        )
    buffer = filled(tmp_path, fsync=True)
    done.clear()
    buffer.update('8', transition(80))
    redo = [name for name, path in done if path == str(tmp_path / 'redo')]
    assert redo == ['fsync', 'ftruncate', 'fsync']
    buffer.close()


# Killed at every line

SOURCE = os.path.dirname(buffer_package.__file__) + os.sep
#: Files of a directory: their names and bytes.
Image = Tuple[Tuple[str, bytes], ...]


class KilledAtLine:
    """Kills its process when so many lines of the buffer's source have run."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == 'line':
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), 9)
        return self


class Images:
    """
    What a kill at each line of the buffer's source would leave of a directory. A killed process takes nothing with it:
    what it wrote or mapped is in the files at once.
    """

    def __init__(self, directory: Path) -> None:
        self.num_lines = 0
        #: Files of the source that ran.
        self.files: Set[str] = set()
        #: Images that differ, with the first line at which each was there.
        self.found: Dict[Image, int] = {}
        self._directory = directory
        self._last: Image = ()

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(SOURCE):
            return None
        if event == 'line':
            self.num_lines += 1
            self.files.add(path[len(SOURCE) :])
            image = self._read()
            if image != self._last:  # cheaper than the hash of megabytes
                self._last = image
                self.found.setdefault(image, self.num_lines)
        return self

    def lines_to_kill_at(self) -> Iterable[int]:
        """Where a process is killed indeed; ``scripts/crash.sh`` asks for every line."""
        every = int(os.environ.get('DING_STORE_LINES', '0'))
        lines = list(self.found.values())
        return range(1, self.num_lines + 1, every) if every else [lines[len(lines) // 2]]

    def _read(self) -> Image:
        with os.scandir(self._directory) as entries:
            return tuple(sorted((entry.name, Path(entry.path).read_bytes()) for entry in entries))


def images_at_lines(directory: Path, act: Callable[[], Any], file: str) -> Images:
    """Do this, and look at the directory at each line; ``file`` of the source must be among those that ran."""
    images = Images(directory)
    sys.settrace(images)
    try:
        act()
    finally:
        sys.settrace(None)
    assert len(images.found) > 3
    assert file in images.files
    return images


def put(image: Image, directory: Path) -> None:
    """Have these files in a directory, and no others."""
    shutil.rmtree(directory)
    directory.mkdir()
    for name, data in image:
        (directory / name).write_bytes(data)


def copy(model: Path, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(model, directory)


def kill_at_line(line: int, open_buffer: Callable[[], StoreBuffer], act: Callable[[StoreBuffer], Any]) -> None:
    """Do this in a child, until it is killed."""

    def work(tell: Callable[[], None]) -> None:
        buffer = open_buffer()
        sys.settrace(KilledAtLine(line))
        act(buffer)

    assert Child(work).wait() == -9


def add_optional(buffer: StoreBuffer) -> None:
    element = transition(30)
    element.obs.state = None
    buffer.push(element, {'i': 30})


def start_again(buffer: StoreBuffer) -> None:
    buffer.clear()
    buffer.push({'other': torch.ones(3)}, {'i': 1})


def extend(buffer: StoreBuffer) -> None:
    columns = buffer.schema.encode([transition(i) for i in range(14, 18)])
    buffer.extend(columns, commit={'cursor': 1})


def patch(buffer: StoreBuffer) -> None:
    columns = buffer.schema.encode([transition(i) for i in PATCHED.values()])
    buffer.update_if_present(list(PATCHED), columns)


#: Row -> the number of its element after ``patch``.
PATCHED = {'12': 72, '6': 66, '8': 68, '3': 63}

#: What is done, and a file of the buffer's source that does it.
RARE = {
    # Two of those that stay have to move.
    'shrink': (lambda buffer: buffer.resize(6), 'table/shape.py'),
    'grow': (lambda buffer: buffer.resize(17), 'table/shape.py'),
    'optional': (add_optional, 'table/shape.py'),
    'clear': (start_again, 'table/shape.py'),
    'extend': (extend, 'table/writes.py'),
    'update': (lambda buffer: buffer.update('8', transition(80), {'i': 80}), 'table/writes.py'),
    'patch': (patch, 'table/writes.py'),
    'load': (
        lambda buffer: buffer.load_data(str(Path(buffer.table.table_dir.path).parent / 'save')),
        'saving/loads.py',
    ),
    'metas': (
        lambda buffer: buffer._elements.metas._journal.rewrite(buffer._elements.metas._records()),
        'metas/metas.py',
    ),
}


def sampled(path: Path, size: int = 10) -> StoreBuffer:
    """A buffer that keeps uses and priorities."""
    return StoreBuffer(size, path=str(path), sampler=limited(Prioritized(seed=0), max_times_sampled=99))


def kept(buffer: StoreBuffer) -> Dict[str, tuple]:
    """Uses and priorities."""
    rows, sampler = buffer.table.rows_by_age(), buffer.sampler
    values = zip(sampler.uses_of(rows).tolist(), sampler.sampler.priorities.of(rows).tolist())
    return dict(zip(map(str, rows.tolist()), values))


@pytest.mark.parametrize('name', RARE)
def test_table_killed_at_any_line_is_sound(name: str, tmp_path: Path) -> None:
    filled(tmp_path / 'model').close()
    model = sampled(tmp_path / 'model')
    model.sample_batch(40, replace=True)
    model.update_priorities(model.table.rows_by_age(), np.arange(10.0) + 1)
    before, kept_before = contents(model), kept(model)
    assert len(set(kept_before.values())) == 10
    model.close()
    save = StoreBuffer(10)
    for i in range(6, 12):
        save.push(transition(i), {'loaded': i})
    save.save_data(str(tmp_path / 'save'))
    directory, act = tmp_path / 'copy', RARE[name][0]
    copy(tmp_path / 'model', directory)
    buffer = sampled(directory)
    images = images_at_lines(directory, lambda: act(buffer), RARE[name][1])
    buffer.close()
    for image, line in images.found.items():
        put(image, directory)
        check_killed(name, directory, line, before, kept_before)
    for line in images.lines_to_kill_at():
        copy(tmp_path / 'model', directory)
        kill_at_line(line, lambda: sampled(directory), act)
        check_killed(name, directory, line, before, kept_before)


def check_killed(name: str, path: Path, line: int, before: List[tuple], kept_before: Dict[str, tuple]) -> None:
    """What was killed at a line opens, and has what it had or should get; and it goes on."""
    buffer = reopened(path)
    assert buffer.check() == [], f'line {line}'
    check_rare(name, buffer, before)
    if name != 'load' or contents(buffer) == before:
        assert all(each == kept_before.get(index, each) for index, each in kept(buffer).items()), f'line {line}'
    buffer.push({'other': torch.ones(3)} if 'other' in buffer.table.columns else transition(5))
    assert buffer.check() == []
    buffer.close()


def reopened(path: Path) -> StoreBuffer:
    for size in (10, 6, 17):
        try:
            return sampled(path, size)
        except ConfigError:
            pass
    raise AssertionError('it is of none of the expected sizes')


def check_rare(name: str, buffer: StoreBuffer, before: List[tuple]) -> None:
    if 'other' in buffer.table.columns:
        assert [(item.index, item.data['other'].tolist()) for item in buffer] in ([], [('14', [1.0, 1.0, 1.0])])
        return
    if name in ('load', 'clear'):
        others = [(str(i), i + 6, {'loaded': i + 6}) for i in range(6)] if name == 'load' else []
        assert contents(buffer) in (before, others)
        return
    found = {item.index: item for item in buffer}
    new = [index for index in found if int(index) >= 14]
    if name == 'extend':
        assert new in ([], ['14', '15', '16', '17'])
        assert [number(found[index].data) for index in new] == list(map(int, new))
        assert buffer.committed == ({'cursor': 1} if new else None)
    for index, value, meta in before:
        if index in found and not (name == 'update' and index == '8') and not (name == 'patch' and index in PATCHED):
            assert (number(found[index].data), found[index].meta) == (value, meta)
    least = {'shrink': 6, 'extend': 6, 'optional': 9}.get(name, 10)
    kept = [index for index, _, _ in before]
    assert list(found)[: len(found) - len(new)] == kept[len(kept) - (len(found) - len(new)) :]
    assert len(found) - len(new) >= least
    if name == 'patch':
        numbers = [number(found[index].data) for index in PATCHED if index in found]
        assert numbers in ([12, 6, 8], [72, 66, 68])
    if name == 'update':
        assert (number(found['8'].data), found['8'].meta) in ((8, {}), (80, {}), (80, {'i': 80}))


# Priorities


def test_reopened_buffer_has_its_priorities(tmp_path: Path) -> None:
    buffer = filled(tmp_path, sampler=Prioritized(seed=0))
    columns = buffer.schema.encode([transition(14), transition(15)])
    buffer.extend(columns, priority=[7.0, 0.25])
    buffer.sample_batch(4)
    buffer.update_priorities(np.array([7, 9, 7, 1]), np.array([3.0, 2.0, 5.0, 99.0]))
    expected = buffer.sampler.priorities.of(buffer.table.rows_by_age())
    buffer.close()
    buffer = StoreBuffer(10, path=str(tmp_path), sampler=Prioritized(seed=0))
    rows = buffer.table.rows_by_age()
    assert buffer.sampler.priorities.of(rows) == pytest.approx(expected)
    found = dict(zip(rows.tolist(), expected))
    assert [round(found[row], 6) for row in (7, 8, 9, 14, 15)] == [5.0, 1.0, 2.0, 7.0, 0.25]
    assert buffer.sampler.step == 1
    assert buffer.sampler.priorities.max_priority == 7.0
    # A row that takes over a slot does not inherit what was there.
    buffer.resize(8)
    rows = buffer.extend(columns)
    buffer.close()
    buffer = StoreBuffer(8, path=str(tmp_path), sampler=Prioritized(seed=0))
    assert buffer.sampler.priorities.of(rows) == pytest.approx([7.0, 7.0])
    assert buffer.sampler.priorities.of(np.array([14, 15])) == pytest.approx([7.0, 0.25])
    assert buffer.check() == []
    buffer.close()


# A number that becomes wider


def counted(i: float, late: Any = None) -> Dict[str, Any]:
    return {'number': i, 'late': late, 'x': torch.full((3,), float(i))}


#: It needs a wider column and another one.
WIDER = counted(0.5, torch.ones(2))


def numbers_of(buffer: StoreBuffer) -> List[Any]:
    assert all(item.data['x'].tolist() == [float(item.data['number'])] * 3 for item in buffer)
    return [item.data['number'] for item in buffer]


def with_integers(path: Path) -> StoreBuffer:
    buffer = StoreBuffer(10, path=str(path))
    buffer.extend_elements([counted(i) for i in range(5)])
    return buffer


def test_wider_number_without_room_for_its_header_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    buffer = with_integers(tmp_path)
    before = num_descriptors(), sorted(os.listdir(tmp_path))

    def fail(*arguments: Any, **named: Any) -> None:
        raise NotEnoughSpace(errno.ENOSPC, 'the disk is full')

    monkeypatch.setattr(durable_module, 'prepare_header', fail)
    for _ in range(2):
        with pytest.raises(NotEnoughSpace):
            buffer.push(WIDER)
    assert (num_descriptors(), sorted(os.listdir(tmp_path))) == before
    assert buffer.check() == []
    monkeypatch.undo()
    buffer.push(counted(5))
    assert numbers_of(buffer) == [0, 1, 2, 3, 4, 5]
    buffer.close()
    buffer = StoreBuffer(10, path=str(tmp_path))
    assert buffer.check() == []
    assert numbers_of(buffer) == [0, 1, 2, 3, 4, 5]
    buffer.push(WIDER)
    buffer.close()
    buffer = StoreBuffer(10, path=str(tmp_path))
    assert buffer.check() == []
    assert numbers_of(buffer) == [0, 1, 2, 3, 4, 5, 0.5]
    buffer.close()


def test_number_that_widens_is_sound_after_kills_at_any_line(tmp_path: Path) -> None:
    with_integers(tmp_path / 'model').close()
    directory = tmp_path / 'copy'
    copy(tmp_path / 'model', directory)
    buffer = StoreBuffer(10, path=str(directory))
    images = images_at_lines(directory, lambda: buffer.push(WIDER), 'table/shape.py')
    buffer.close()

    def check(line: int) -> None:
        for extra in (7, None):
            buffer = StoreBuffer(10, path=str(directory))
            assert buffer.check() == [], f'line {line}'
            expected = [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0.5]
            assert numbers_of(buffer) in (expected if extra else [[*each, 7] for each in expected]), f'line {line}'
            if extra:
                buffer.push(counted(extra))
            buffer.close()

    for image, line in images.found.items():
        put(image, directory)
        check(line)
    for line in images.lines_to_kill_at():
        copy(tmp_path / 'model', directory)
        kill_at_line(line, lambda: StoreBuffer(10, path=str(directory)), lambda buffer: buffer.push(WIDER))
        check(line)
