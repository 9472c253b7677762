"""Headers that another program wrote, with the right checksums: what they say is refused by name."""

import json
import os
import random
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest
import torch
from queues import persistent_queue

from ding_store.buffer import RateLimiter, StoreBuffer
from ding_store.errors import ConfigError, CorruptPayload, FormatMismatch, SchemaMismatch, StoreError

CAPACITY = 8
NAMES = ['', '.', '..', 'header', 'rows', 'commit', 'lock', 'packed', '/etc/hostname', '../victim', 'a/../000.column']
NAMES += ['{victim}', '../000.column', '000.column/', './000.column', '000.column\0', '٠٠٠.column', '000.column\n']
LIES: List[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    1 << 31,
    1 << 62,
    1 << 63,
    1 << 64,
    -(1 << 63),
    10**30,
    0.5,
    1e308,
    float('nan'),
]
LIES += [
    '',
    'x',
    '<f4',
    '|O',
    'O',
    'M8[ns]',
    '<f4,<f4',
    '(2,)<f4',
    'V0',
    [],
    [[]],
    [-1],
    [1 << 62],
    [0.5],
    [None],
    {},
    {'a': 1},
]
LIES += [[1] * 40, [[1]] * 3, 'k/255', *NAMES]


def filled(path: Path, kind: str) -> StoreBuffer:
    buffer = StoreBuffer(CAPACITY, path=str(path), limiter=RateLimiter(1, max_insert=9, max_sample=1))
    persistent_queue(buffer)
    for i in range(5):
        element = {'x': torch.full((2,), i / 7), 'n': i, 'empty': torch.ones(0)}
        if kind == 'frames':
            element['stack'] = torch.full((2, 1024), i, dtype=torch.uint8)
        buffer.push([{'x': torch.ones(1)}] * (i + 1) if kind == 'episodes' else element, {'i': i})
    return buffer


def read(path: Path) -> List[Tuple[str, str, Any]]:
    buffer = StoreBuffer(CAPACITY, path=str(path), limiter=RateLimiter(1, max_insert=9, max_sample=1))
    try:
        persistent_queue(buffer)
        found = [(item.index, str(item.data), item.meta) for item in buffer]
        return [*found, ('wrong', '', buffer.check())] if buffer.check() else found
    finally:
        buffer.close()


def write_header(path: Path, fields: Any) -> None:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    (path / 'header').write_bytes(b'%08x\n' % zlib.crc32(text) + text)


def places(tree: Any, at: Tuple[Any, ...] = ()) -> Iterator[Tuple[Any, ...]]:
    """Where something stands in nested dicts and lists."""
    yield at
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from places(tree[key], (*at, key))


def changed(tree: Any, at: Tuple[Any, ...], change: Any) -> Any:
    """A copy with another value there, or without it (``...``)."""
    if not at:
        return change
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    if change is ... and len(at) == 1:
        del copy[at[0]]
    else:
        copy[at[0]] = changed(tree[at[0]], at[1:], change)
    return copy


@pytest.mark.parametrize('kind', ['columns', 'episodes', 'frames'])
def test_header_with_a_false_field_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / 'table', tmp_path / 'victim'
    victim.write_bytes(bytes(range(256)) * 64)
    filled(path, kind).close()
    truth, files = read(path), {file: file.read_bytes() for file in path.iterdir()}
    fields: Dict[str, Any] = json.loads(files[path / 'header'].split(b'\n', 1)[1])
    rng, wrong = random.Random(1), []
    tries = [(at, lie) for at in places(fields) for lie in [*LIES, ...]]
    for at, lie in rng.sample(tries, 80):
        lie = lie.replace('{victim}', str(victim)) if isinstance(lie, str) else lie
        write_header(path, changed(fields, at, lie) if at or lie is not ... else b'')
        try:
            found = read(path)
        except (CorruptPayload, FormatMismatch, ConfigError):
            found = truth
        except BaseException as e:  # noqa: BLE001  whatever it is, it is a finding
            wrong.append(f'{at} = {lie!r:.80}: {e!r:.200}')
        if found != truth and at[:1] not in (('next_row',), ('first_row',), ('num_skipped',), ('info',)):
            wrong.append(f'{at} = {lie!r:.80}: {found}')
        for file in path.iterdir():
            if file not in files:
                file.unlink()
        for file, content in files.items():
            file.write_bytes(content)
    assert not wrong, '\n'.join(wrong)
    assert victim.read_bytes() == bytes(range(256)) * 64
    assert read(path) == truth


@pytest.mark.parametrize('name', ['{victim}', '../victim', 'link.column', '900.column'])
def test_columns_file_with_a_foreign_path_is_not_opened(tmp_path: Path, name: str) -> None:
    path, victim = tmp_path / 'table', tmp_path / 'victim'
    filled(path, 'columns').close()
    victim.write_bytes(b'of the victim' * 1000)
    for link in ('link.column', '900.column'):
        (path / link).symlink_to(victim)
    fields = json.loads((path / 'header').read_bytes().split(b'\n', 1)[1])
    fields['columns'][0]['file'] = name.replace('{victim}', str(victim))
    write_header(path, fields)
    with pytest.raises((CorruptPayload, ConfigError)):
        StoreBuffer(CAPACITY, path=str(path))
    assert victim.read_bytes() == b'of the victim' * 1000


@pytest.mark.parametrize(
    'text', [b'', b'[]', b'null', b'"x"', b'1', b'{}', b'[' * 100_000, b'9' * 5000, b'\xff', b'{"version": 4}', b'NaN']
)
def test_header_that_is_no_header_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    filled(tmp_path, 'columns').close()
    write_header(tmp_path, text)
    with pytest.raises(CorruptPayload, match='header'):
        StoreBuffer(CAPACITY, path=str(tmp_path))


def test_save_with_a_false_field_is_refused_by_name(tmp_path: Path) -> None:
    """Its checksums are right: whoever writes one may say anything in it."""
    from ding_store.buffer.saving.save_files import MAGIC

    name, buffer = tmp_path / 'save', filled(tmp_path / 'table', 'frames')
    buffer.save_data(str(name))
    buffer.close()
    data = name.read_bytes()[len(MAGIC) :]
    length, tail = int.from_bytes(data[:8], 'little'), 12 + 16
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    start = len(body) - tail - int.from_bytes(body[-tail:][:8], 'little')
    index, blocks = json.loads(body[start:-tail]), body[:start]
    rng, loaded, wrong = random.Random(2), StoreBuffer(CAPACITY), []
    loaded.push({'y': torch.ones(3)})
    tries = [(0, at, lie) for at in places(header) for lie in [*LIES, ...]]
    tries += [(1, at, lie) for at in places(index) for lie in [*LIES, ...]]
    for part, at, lie in rng.sample(tries, 400):
        if not at or lie is ... and not isinstance(at[-1], str):
            continue
        heads = [header, index]
        heads[part] = changed(heads[part], at, lie)
        first = json.dumps(heads[0]).encode()
        if at[0] != 'checksums' and isinstance(heads[1].get('checksums'), dict):
            heads[1] = {**heads[1], 'checksums': {**heads[1]['checksums'], 'header': zlib.crc32(first)}}
        last = json.dumps(heads[1]).encode()
        ends = len(last).to_bytes(8, 'little') + zlib.crc32(last).to_bytes(4, 'little') + body[-16:]
        name.write_bytes(MAGIC + len(first).to_bytes(8, 'little') + first + blocks + last + ends)
        try:
            loaded.load_data(str(name))
        except (CorruptPayload, FormatMismatch, SchemaMismatch):
            assert len(loaded) in (1, 5), (at, lie)
        except BaseException as e:  # noqa: BLE001  whatever it is, it is a finding
            wrong.append(f'{at} = {lie!r:.80}: {e!r:.200}')
    assert not wrong, '\n'.join(wrong)


def test_metas_record_with_a_false_field_is_refused_by_name(tmp_path: Path) -> None:
    from ding_store.buffer.metas import meta_json

    rows = (2).to_bytes(4, 'little') + np.array([1, 2], '<i8').tobytes()
    texts = [
        b'',
        b'[1]',
        b'{"dict": 1}',
        b'{"dict": [[1]]}',
        b'{"array": ["|O", [1], ""]}',
        b'{"tensor": ["<f4", [-1], ""]}',
    ]
    texts += [b'{"x": 1}', b'{"a": 1, "b": 2}', b'{"dict": [[{"dict": []}, 1]]}', b'\xff', b'{"list": ' * 5000, b'7']
    for record in [*(rows + text for text in texts), b'', b'\x01', b'\xff\xff\xff\xff', rows]:
        with pytest.raises(CorruptPayload):
            meta_json.decode(record)


def test_crafted_table_raises_no_other_error(tmp_path: Path) -> None:
    """No file of a table, whatever is in it, is anything but a StoreError."""
    filled(tmp_path, 'columns').close()
    rng, wrong = np.random.default_rng(3), []
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for file, content in files.items():
        for size in (0, 1, 7, 8, 64, 4096, len(content), len(content) + 1):
            file.write_bytes(rng.bytes(size))
            try:
                read(tmp_path)
            except StoreError:
                pass
            except BaseException as e:  # noqa: BLE001  whatever it is, it is a finding
                wrong.append(f'{file.name} of {size} bytes: {e!r:.200}')
            for other in tmp_path.iterdir():
                if other not in files:
                    os.unlink(other)
            for other, old in files.items():
                other.write_bytes(old)
    assert not wrong, '\n'.join(wrong)
