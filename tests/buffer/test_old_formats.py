"""What earlier versions wrote, as they wrote it: saves of format 3 and headers of tables; older saves: test_files."""

import json
import pickle
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
from test_durable import contents, filled
from test_loads import flipped
from test_packed import episode, numbers

from ding_store.buffer import Prioritized, StoreBuffer, limited
from ding_store.buffer.saving import saves
from ding_store.buffer.saving.save_files import MAGIC
from ding_store.errors import CorruptPayload, FormatMismatch
from ding_store.storage.encoding.checksum import checksum


def save_3(buffer: StoreBuffer, path: Path) -> None:
    """Of episodes in a path it had the columns that say where they are, and themselves pickled."""
    table, items, schema = buffer.table, list(buffer), buffer.schema
    rows = table.rows_by_age()
    columns = table.columns
    header = json.dumps(
        {
            'version': 3,
            'schema': None if schema is None else schema.to_json(),
            'columns': [(name, column.dtype.str, list(column.shape[1:])) for name, column in columns.items()],
            'narrow': sorted(table.narrow),
        }
    ).encode()
    blocks = [rows[:3], rows[3:]]
    parts = [block_of(buffer, block) for block in blocks]
    metas = [(place, dict(item.meta)) for place, item in enumerate(items) if item.meta]
    extras = pickle.dumps((metas, None if schema is not None else [item.data for item in items]), protocol=4)
    index = json.dumps(
        {
            'blocks': [len(block) for block in blocks],
            'num_rows': len(rows),
            'next_row': table.next_row,
            'num_extra_bytes': len(extras),
            'checksums': {
                'header': zlib.crc32(header),
                'blocks': [checksum([part], len(part)) for part in parts],
                'rows': zlib.crc32(rows.tobytes()),
                'extras': zlib.crc32(extras),
            },
        }
    ).encode()
    start = [MAGIC, len(header).to_bytes(8, 'little'), header, *parts, rows.tobytes(), extras, index]
    ends = [len(index).to_bytes(8, 'little'), zlib.crc32(index).to_bytes(4, 'little'), saves._END]
    path.write_bytes(b''.join(start + ends))


def block_of(buffer: StoreBuffer, rows: np.ndarray) -> bytes:
    slots = buffer.table.index.find(rows)[0]
    return b''.join([rows.tobytes(), *(column[slots].tobytes() for column in buffer.table.columns.values())])


def of_columns(path: Path) -> StoreBuffer:
    return filled(path)


def of_episodes(path: Path) -> StoreBuffer:
    buffer = StoreBuffer(10, path=str(path))
    for i in range(14):
        buffer.push(episode(i), {'i': i} if i % 2 else None)
    return buffer


@pytest.mark.parametrize('has_path', [False, True])
@pytest.mark.parametrize(('make', 'read'), [(of_columns, contents), (of_episodes, numbers)])
def test_saves_of_format_3(make: Callable, read: Callable, has_path: bool, tmp_path: Path) -> None:
    buffer, name = make(tmp_path / 'saved'), tmp_path / 'save'
    save_3(buffer, name)
    data, random = name.read_bytes(), np.random.default_rng(0)
    loaded = StoreBuffer(6, path=str(tmp_path / 'kept') if has_path else None)
    for _ in range(30):
        name.write_bytes(flipped(data, random))
        with pytest.raises((CorruptPayload, FormatMismatch)):
            loaded.load_data(str(name))
    assert loaded.count() == 0
    name.write_bytes(data)
    loaded.load_data(str(name))
    assert read(loaded) == read(buffer)[-6:]
    assert loaded.table.next_row == 14
    assert loaded.check() == []
    loaded.close()
    buffer.close()


#: What a version of the header had no field for.
LATER: Dict[int, List[str]] = {1: ['generation', 'next_row', 'num_skipped', 'first_row'], 2: ['first_row'], 3: []}


def become(version: int, path: Path) -> None:
    """Files as they were before version 4: without marks, checksums, copies of commits, and beginnings of journals."""
    for file in path.iterdir():
        if file.name.startswith('marks'):
            file.unlink()
        elif file.name.startswith(('metas', 'redo')):
            file.write_bytes(file.read_bytes()[24:])
        elif '.values' in file.name:
            words = np.fromfile(file, np.uint64)
            words[512::2] &= np.uint64((1 << 48) - 1)
            words[2:4] = 0
            words.tofile(file)
        elif file.name == 'commit' or file.name.endswith('.record'):
            content = bytearray(file.read_bytes())
            for start in (0, len(content) // 2):
                content[start + 2048 : start + 2080] = bytes(32)
            file.write_bytes(content)
    fields: Dict[str, Any] = json.loads((path / 'header').read_bytes().split(b'\n', 1)[1])
    for name in LATER[version]:
        assert version > 1 or fields[name] == 0
        del fields[name]
    text = json.dumps({**fields, 'version': version}).encode()
    (path / 'header').write_bytes(b'%08x\n' % zlib.crc32(text) + text)


@pytest.mark.parametrize('version', [1, 2, 3])
@pytest.mark.parametrize(('make', 'read'), [(of_columns, contents), (of_episodes, numbers)])
def test_tables_with_an_older_header(version: int, make: Callable, read: Callable, tmp_path: Path) -> None:
    path = tmp_path / 'table'
    buffer = make(path)
    if version >= 2:
        # Of another generation.
        buffer.save_data(str(tmp_path / 'save'))
        buffer.load_data(str(tmp_path / 'save'))
    expected = read(buffer)
    buffer.close()
    become(version, path)
    buffer = StoreBuffer(10, path=str(path))
    assert read(buffer) == expected
    assert buffer.check() == []
    item = buffer[-1]
    assert buffer.push(item.data, item.meta).index == '14'
    buffer.clear()
    buffer.close()
    buffer = StoreBuffer(10, path=str(path))
    assert buffer.count() == 0
    assert buffer.table.next_row == 15
    buffer.close()


def test_tables_that_had_no_checksums_keep_priorities_and_uses(tmp_path: Path) -> None:
    def opened() -> StoreBuffer:
        return StoreBuffer(10, path=str(tmp_path), sampler=limited(Prioritized(epsilon=0.0), max_times_sampled=9))

    with closing(opened()) as buffer:
        for i in range(14):
            buffer.push({'x': np.ones(1)}, {'i': i})
        rows = buffer.table.rows_by_age()
        buffer.sample_batch(8)
        buffer.update_priorities(rows, 1.0 + rows)
        uses, step = buffer.sampler.uses_of(rows).tolist(), buffer.sampler.sampler.step
    become(3, tmp_path)
    for _ in range(2):
        with closing(opened()) as buffer:
            assert buffer.sampler.sampler.priorities_of(rows) == pytest.approx(1.0 + rows)
            assert buffer.sampler.uses_of(rows).tolist() == uses
            assert buffer.sampler.sampler.step == step
            assert [item.meta['i'] for item in buffer] == list(range(4, 14))
            assert buffer.check() == []


@pytest.mark.parametrize('converted', ['metas', 'priority.values', 'marks'])
def test_conversion_that_was_killed_is_done_again(converted: str, tmp_path: Path) -> None:
    """Some files are of this version already, and the header is not."""
    with closing(StoreBuffer(10, path=str(tmp_path), sampler=Prioritized())) as buffer:
        for i in range(14):
            buffer.push({'x': np.ones(1)}, {'i': i})
        priorities = buffer.sampler.priorities_of(buffer.table.rows_by_age()).tolist()
    kept = (tmp_path / converted).read_bytes()
    become(3, tmp_path)
    (tmp_path / converted).write_bytes(kept)
    (tmp_path / 'metas.new').write_bytes(b'half made')
    with closing(StoreBuffer(10, path=str(tmp_path), sampler=Prioritized())) as buffer:
        assert [item.meta['i'] for item in buffer] == list(range(4, 14))
        assert buffer.sampler.priorities_of(buffer.table.rows_by_age()).tolist() == priorities
        assert buffer.check() == []
