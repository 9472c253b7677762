"""What a machine may do to a store: its memory disk is full, its clocks jump, its processes are spawned anew."""

import errno
import itertools
import multiprocessing
import os
import random
import subprocess
import time

import numpy as np
import pytest
from needs import lacking

from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.testing import WAIT_S, chunk, number_of

_RUNS = (f'machine{number}' for number in itertools.count())
STREAM = 'experience'


@pytest.fixture
def opened(redis_server, tmp_path):
    run, stores = f'{next(_RUNS)}-{os.getpid()}', []

    def open_one(**options):
        options.setdefault('host_cache_dir', str(tmp_path / 'cache'))
        stores.append(open_store(redis_server.url, run, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 100 MB: a /dev/shm as containers have it."""
    path = tmp_path / 'shm'
    path.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', 'size=100m', 'tmpfs', str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        lacking(f'needs the right to mount a tmpfs: {done.stderr.strip()}')
    try:
        yield path
    finally:
        subprocess.run(['umount', '-l', str(path)], capture_output=True, timeout=20, check=True)


def fill_up(path):
    with open(path, 'wb', buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017 it is no error of ours


def test_a_memory_disk_that_fills_up_costs_nothing(opened, small_disk):
    """While somebody else takes all there is, payloads go over the wire; no page is written that is not there."""
    writer, near = (opened(host_cache_dir=str(small_disk)) for _ in range(2))
    reader, seen, planes = Reader(near, STREAM, 'learner'), [], set()
    filler, total = small_disk / 'filler', 60

    def read():
        entries = reader.read(timeout_s=WAIT_S)
        for entry in entries:
            number = entry.header['number']
            assert (entry.arrays['x'] == number).all()
            assert entry.validate()
            seen.append(number)
            planes.add('wire' if entry.guard is None else 'host')
        reader.ack()

    for number in range(total):
        if number == 10:
            fill_up(filler)
        writer.append(STREAM, {'number': number}, {'x': np.full(1_000_000, number, np.uint8)})
        if number in (5, 30, 40):
            read()
            version = writer.put('weights', {}, {'x': np.full(4_000_000, number, np.uint8)})
            found = near.get('weights', timeout_s=WAIT_S)
            assert found.version == version
            assert (found.arrays['x'] == number).all()
            del found
        if number == 50:
            filler.unlink()
    while len(seen) < total:
        read()
    assert (seen, reader.num_lost, planes) == (list(range(total)), 0, {'host', 'wire'})


def test_clocks_that_jump_change_nothing(opened, monkeypatch):
    """The time of day goes to and fro by years at every look at it."""
    rng = random.Random(1)
    true_time = time.time
    monkeypatch.setattr(time, 'time', lambda: true_time() + rng.uniform(-3e8, 3e8))
    monkeypatch.setattr(time, 'time_ns', lambda: int(time.time() * 1e9))
    writer, near = opened(), opened()
    reader, seen = Reader(near, STREAM, 'learner'), []
    for number in range(200):
        writer.append(STREAM, {}, chunk(number))
        if number % 20 == 0:
            assert writer.put('weights', {}, {'x': np.full(10_000, number)}) == number // 20 + 1
            assert near.get('weights', number // 20, WAIT_S).arrays['x'][0] == number
            seen += map(number_of, reader.read(timeout_s=WAIT_S))
            reader.ack()
        if number == 100:
            writer.close()
            writer = opened()
    while len(seen) < 200:
        seen += map(number_of, reader.read(timeout_s=WAIT_S))
        reader.ack()
    assert (seen, reader.num_lost, reader.num_duplicates) == (list(range(200)), 0, 0)
    assert reader.read(timeout_s=0.05) == []
    near.tidy()


def in_child(store, numbers, said):
    """Of a spawned process: the store came pickled, and opens itself here."""
    for number in numbers:
        store.append(STREAM, {}, chunk(number))
    said.put((getattr(store, 'host', ''), store.writer, int(store.get('weights').arrays['x'][0])))
    store.close()


@pytest.mark.parametrize('plane', ['auto', 'off'])
def test_a_spawned_child_uses_the_store_it_was_given(opened, plane):
    parent = opened(host_plane=plane)
    reader = Reader(opened(host_plane=plane), STREAM, 'learner')
    parent.put('weights', {}, {'x': np.full(10_000, 7)})
    parent.append(STREAM, {}, chunk(0))
    context = multiprocessing.get_context('spawn')
    said = context.Queue()
    child = context.Process(target=in_child, args=(parent, range(1, 5), said))
    child.start()
    host, writer, weight = said.get(timeout=WAIT_S)
    child.join(WAIT_S)
    assert child.exitcode == 0
    assert weight == 7
    assert writer != parent.writer
    assert plane == 'off' or host == parent.host
    parent.append(STREAM, {}, chunk(5))
    seen = []
    while len(seen) < 6:
        seen += map(number_of, reader.read(timeout_s=WAIT_S))
        reader.ack()
    assert (seen, reader.num_lost) == (list(range(6)), 0)
