"""Files of the host plane that this process may not open: the wire plane serves, and nothing is lost silently."""

import contextlib
import ctypes
import itertools
import os
import struct

import numpy as np
import pytest

from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.shared_memory import shared_values
from ding_store.storage.testing import WAIT_S, chunk, number_of

_RUNS = (f'unreadable{number}' for number in itertools.count())
_VERSION_3 = 0x20080522  # of the kernel's capabilities
_DAC = 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def bound_by_modes():
    """Root passes over the mode of files: not this thread, in this block."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack('<Ii', _VERSION_3, 0), ctypes.create_string_buffer(24)
    assert libc.capget(header, data) == 0
    before = data.raw
    effective = struct.unpack_from('<I', before)[0] & ~_DAC
    lowered = struct.pack('<I', effective) + before[4:]
    assert libc.capset(header, lowered) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@pytest.fixture
def opened(redis_server, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_values, 'SLOTS_FROM_BYTES', 0)
    run, stores = f'{next(_RUNS)}-{os.getpid()}', []

    def open_one(**options):
        stores.append(open_store(redis_server.url, run, host_cache_dir=str(tmp_path / 'a'), **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def files(tmp_path, ending):
    return list((tmp_path / 'a').rglob(f'*{ending}'))


def forbidden(path):
    path.chmod(0)


def replaced_by_a_loop(path):
    path.unlink()
    path.symlink_to(path)


def damaged(path):
    with open(path, 'r+b') as file:
        file.write(b'nothing!')


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def read_until(reader, count):
    """The numbers of so many entries, none of which is read in place."""
    seen = []
    while len(seen) < count:
        entries = reader.read(timeout_s=WAIT_S)
        assert entries, seen
        assert all(entry.guard is None for entry in entries)
        seen += map(number_of, entries)
    return seen


@pytest.mark.parametrize('harm', [forbidden, replaced_by_a_loop, damaged])
def test_rings_and_slots_unreadable_are_read_over_the_wire(opened, tmp_path, harm):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'learner')
    for number in range(3):
        writer.append('s', {}, chunk(number))
    writer.put('weights', {}, {'x': np.arange(1000)})
    paths = files(tmp_path, '.ring') + files(tmp_path, '.slots')
    assert len(paths) == 2
    with bound_by_modes():
        for path in paths:
            harm(path)
        seen = read_until(reader, 3)
        assert near.get('weights', timeout_s=WAIT_S).arrays['x'][-1] == 999
        writer.append('s', {}, chunk(3))
        assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [3]
        reader.ack()
        assert (seen, reader.num_lost) == ([0, 1, 2], 0)
        for store in (near, writer):
            store.close()


def test_directory_made_unreadable_loses_nothing(opened, tmp_path):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'learner')
    for number in range(2):
        writer.append('s', {}, chunk(number))
    (ring,) = files(tmp_path, '.ring')
    with bound_by_modes():
        ring.parent.chmod(0)
        try:
            seen = read_until(reader, 2)
            writer.append('s', {}, chunk(2, size=5_000_000))  # for which its ring has no room
            seen += read_until(reader, 1)
            assert (seen, reader.num_lost) == ([0, 1, 2], 0)
            assert writer.put('weights', {}, {'x': np.arange(1000)}) == 1
            assert near.get('weights', timeout_s=WAIT_S).arrays['x'][-1] == 999
            near.tidy()
            for store in (near, writer):
                store.close()
        finally:
            ring.parent.chmod(0o700)


LARGE = {'x': np.full(400_000, 7, np.uint8)}  # over the wire it goes in parts


@pytest.mark.parametrize('harm', [forbidden, replaced_by_a_loop, damaged, cut])
def test_value_with_unreadable_copies_is_fetched_again(opened, tmp_path, harm):
    writer, near, late = opened(host_plane='off'), opened(), opened()
    writer.put('weights', {}, LARGE)
    near.get('weights')
    near.close()
    (path,) = files(tmp_path, '.copies')
    with bound_by_modes():
        harm(path)
        for version in (1, 2):
            found = late.get('weights')
            assert found.version == version
            assert (found.arrays['x'] == 7).all()
            writer.put('weights', {}, LARGE)
        late.close()


@pytest.mark.parametrize('ending', ['.readers', '.payload'])
@pytest.mark.parametrize('harm', [forbidden, replaced_by_a_loop, cut])
def test_downloads_unreadable_are_fetched_by_each_reader(opened, tmp_path, harm, ending):
    writer, near, late = opened(host_plane='off'), opened(), opened()
    readers = [Reader(near, 's', name) for name in ('one', 'other')]
    for number in range(2):
        writer.append('s', {'number': number}, LARGE)
    assert len(readers[0].read()) == 2
    reader = Reader(late, 's', 'late') if ending == '.payload' else None
    with bound_by_modes():
        for path in files(tmp_path, ending):
            harm(path)
        reader = reader or Reader(late, 's', 'late')
        entries = reader.read()
        assert [entry.header['number'] for entry in entries] == [0, 1]
        assert all((entry.arrays['x'] == 7).all() for entry in entries)
        reader.ack()
        late.close()
