"""Checkpoint files: torch reads them, they read torch's, and nothing in them is run."""

import contextlib
import io
import os
import resource
import threading
import zipfile
import zlib
from collections import OrderedDict

import numpy as np
import pytest
import torch

from ding_store.checkpoint import archive
from ding_store.checkpoint.archive import check_state, read_state, write_state
from ding_store.errors import CorruptPayload


def state_of(size=300):
    torch.manual_seed(size)
    return {
        'model': OrderedDict(a=torch.randn(size, 7), b=torch.arange(5, dtype=torch.int16), scalar=torch.tensor(3.5)),
        'half': [torch.ones(3, 5, dtype=torch.bfloat16), torch.empty(0), (torch.tensor(True), 'text', None)],
        'count': 3,
        7: 0.25,
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_archive_written_is_read_by_torch(tmp_path, monkeypatch):
    filled = []
    monkeypatch.setattr(archive, '_fill', lambda *args, fill=archive._fill: filled.append(fill(*args)) or filled[-1])
    path = str(tmp_path / 'a.pth.tar')
    write_state(path, state_of())
    assert same(torch.load(path, weights_only=True), state_of())
    assert same(read_state(path), state_of())
    assert os.listdir(tmp_path) == ['a.pth.tar']
    assert filled == [True]  # by our own writes, not by torch.save under the interpreter's lock


def test_archive_write_syncs_bytes_then_name_before_it_returns(tmp_path, monkeypatch):
    """Which no kill can show, only a power cut."""
    path, done = str(tmp_path / 'a.pth.tar'), []
    fsync, replace = os.fsync, os.replace

    def sync(descriptor):
        done.append(('fsync', os.readlink(f'/proc/self/fd/{descriptor}')))
        fsync(descriptor)

    def rename(source, target):
        done.append(('replace', source, target))
        replace(source, target)

    monkeypatch.setattr(os, 'fsync', sync)
    monkeypatch.setattr(os, 'replace', rename)
    write_state(path, state_of())
    assert done == [('fsync', f'{path}.new'), ('replace', f'{path}.new', path), ('fsync', str(tmp_path))]


def test_archive_keeps_tensors_that_share_or_skip_memory(tmp_path):
    path, base = str(tmp_path / 'a.pth.tar'), torch.arange(24.0).reshape(4, 6)
    state = {'whole': base, 'view': base[1:], 'column': base[:, 2], 'twice': [base, base]}
    write_state(path, state)
    assert same(torch.load(path), state)


def test_archive_of_an_unknown_layout_is_written_by_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, 'leaves', lambda tree: [torch.zeros(2)])
    path = str(tmp_path / 'a.pth.tar')
    write_state(path, state_of())
    assert same(torch.load(path, weights_only=True), state_of())


def test_archive_keeps_numpy_arrays(tmp_path):
    path = str(tmp_path / 'a.pth.tar')
    torch.save({'mean': np.arange(3.0), 'count': np.int64(4), 'flags': np.array([True])}, path)
    read = read_state(path)
    assert read['mean'].tolist() == [0, 1, 2]
    assert read['count'] == 4


class Evil:
    def __reduce__(self):
        return (os.mkdir, ('evil',))


def test_archive_that_is_no_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'model': Evil()}, 'evil.pth.tar')
    write_state('cut.pth.tar', state_of())
    whole = (tmp_path / 'cut.pth.tar').read_bytes()
    (tmp_path / 'cut.pth.tar').write_bytes(whole[: len(whole) // 2])
    (tmp_path / 'empty.pth.tar').write_bytes(b'')
    (tmp_path / 'text.pth.tar').write_bytes(b'no checkpoint')
    torch.save([1, 2], 'list.pth.tar')
    for name in ('evil', 'cut', 'empty', 'text', 'list'):
        with pytest.raises(CorruptPayload, match=f'{name}.pth.tar'):
            read_state(f'{name}.pth.tar')
    assert not (tmp_path / 'evil').exists()


@pytest.mark.parametrize('owns_memory', [True, False])
def test_archive_that_could_not_be_read_is_not_written(tmp_path, owns_memory):
    path, tensor = str(tmp_path / 'a.pth.tar'), torch.arange(6.0)
    write_state(path, state_of(10))
    with pytest.raises(CorruptPayload, match='mkdir'):
        write_state(path, {'model': {'w': tensor if owns_memory else tensor[1:]}, 'other': Evil()})
    assert same(torch.load(path), state_of(10))
    assert os.listdir(tmp_path) == ['a.pth.tar']


@pytest.mark.parametrize('kind', [lambda: (lambda: 0), threading.Lock, lambda: (i for i in ())])
def test_archive_of_unpicklable_objects_raises_corrupt_payload(tmp_path, kind):
    write_state(str(tmp_path / 'a'), state_of())
    with pytest.raises(CorruptPayload, match='cannot be written'):
        write_state(str(tmp_path / 'a'), {**state_of(), 'odd': kind()})
    assert os.listdir(tmp_path) == ['a']
    read_state(str(tmp_path / 'a'))


def test_archive_write_on_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    path = str(tmp_path / 'a.pth.tar')
    write_state(path, state_of(10))

    def full(*args):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'pwrite', full)
    with pytest.raises(OSError, match='No space'):
        write_state(path, state_of(20))
    assert same(torch.load(path), state_of(10))
    assert os.listdir(tmp_path) == ['a.pth.tar']


@pytest.mark.parametrize('owns_memory', [True, False])
def test_archive_that_torch_cannot_write_raises_os_error(tmp_path, owns_memory):
    path, tensor = str(tmp_path / 'a.pth.tar'), torch.zeros(100_000)
    write_state(path, state_of(10))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r'could not be written, \d+ bytes are left|File too large'):
            write_state(path, {'w': tensor if owns_memory else tensor[1:]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert same(torch.load(path), state_of(10))
    assert os.listdir(tmp_path) == ['a.pth.tar']


def test_archive_has_the_entries_of_torch_save(tmp_path):
    path, plain = str(tmp_path / 'a.pth.tar'), io.BytesIO()
    write_state(path, state_of())
    torch.save(state_of(), plain)
    sizes = [
        [(info.filename.partition('/')[2], info.file_size) for info in zipfile.ZipFile(file).infolist()]
        for file in (path, plain)
    ]
    assert [one for one in sizes[0] if one[0].startswith('data/')] == [
        one for one in sizes[1] if one[0].startswith('data/')
    ]


def flipped(path, place, bit=3):
    with open(path, 'r+b') as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def test_archive_checksums_are_those_of_its_bytes(tmp_path):
    path = str(tmp_path / 'a.pth.tar')
    write_state(path, state_of())
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert all(info.CRC for info in file.infolist() if info.file_size)


def test_archive_damaged_anywhere_is_refused_or_unchanged(tmp_path):
    path, expected = str(tmp_path / 'a.pth.tar'), state_of(20)
    write_state(path, expected)
    size, noticed = os.path.getsize(path), []
    for place in np.random.default_rng(0).choice(size, 400, replace=False).tolist():
        flipped(path, place)
        try:
            check_state(path)
            assert same(read_state(path), expected), place
        except CorruptPayload as error:
            noticed.append(str(error))
        flipped(path, place)
    assert len(noticed) > 100
    assert all(path in text for text in noticed)
    check_state(path)


def test_archive_with_a_damaged_pickle_is_refused_by_name(tmp_path):
    """Without its checksum: of those that ``store.checkpoint.load`` names nobody knows who wrote them."""
    path = str(tmp_path / 'a.pth.tar')
    write_state(path, state_of(20))
    with zipfile.ZipFile(path) as file:
        (info,) = [info for info in file.infolist() if info.filename.endswith('data.pkl')]
    size = os.path.getsize(path)
    for place in range(info.header_offset, min(info.header_offset + info.file_size + 100, size)):
        flipped(path, place)
        with contextlib.suppress(CorruptPayload):
            read_state(path)
        flipped(path, place)


def test_archive_without_checksums_is_read(tmp_path, monkeypatch):
    """As they were written at first."""
    path = str(tmp_path / 'a.pth.tar')
    monkeypatch.setattr(zlib, 'crc32', lambda data, value=0: 0)
    write_state(path, state_of())
    monkeypatch.undo()
    check_state(path)
    assert same(read_state(path), state_of())
