"""The host cache's directory: private, bounded, the same for all processes of a host, cleaned up by the living."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from forks import child
from inside import cache_of
from jobs import ding_store, environment

from ding_store.errors import ConfigError, NotEnoughSpace, StoreTimeout
from ding_store.storage import Reader, open_store
from ding_store.storage.shared_memory import cache_root
from ding_store.storage.shared_memory.cache_dir import cache_name, collect_garbage, open_cache_dir
from ding_store.storage.shared_memory.mapped_files import PAGE, is_claimed
from ding_store.storage.shared_memory.ring import RingReader
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of


@pytest.fixture
def opened(tmp_path):
    """Open the cache in tmp_path; all are closed in the end."""
    caches = []

    def open_one(run='run', **options):
        caches.append(open_cache_dir(run, str(tmp_path), **options))
        return caches[-1]

    yield open_one
    for cache in caches:
        cache.close(is_over=True)


def die_with_a_ring(tmp_path, run, num_bytes=PAGE):
    """A process makes a ring and is killed."""
    reading, writing = os.pipe()

    def work():
        cache = open_cache_dir(run, str(tmp_path))
        ring = cache.create_ring(num_bytes, {'writer': 'w'})
        os.write(writing, ring.path.encode())
        time.sleep(WAIT_S)
        cache.close()

    with child(work) as pid:
        path = os.read(reading, 4096).decode()
        assert is_claimed(path)
        os.kill(pid, signal.SIGKILL)
    os.close(reading)
    os.close(writing)
    return path


@contextlib.contextmanager
def stopped_with_the_lock(tmp_path):
    """A process, of another run, that is stopped while it holds the lock of the whole cache."""

    def work():
        with open_cache_dir('other', str(tmp_path))._locked():
            os.kill(os.getpid(), signal.SIGSTOP)

    with child(work) as pid:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        yield pid


def test_cache_directory_and_files_are_private(tmp_path, opened):
    ring = opened().create_ring(PAGE, {})
    for directory, _, files in os.walk(opened().root):
        assert os.stat(directory).st_mode & 0o777 == 0o700
        for file in files:
            assert os.stat(os.path.join(directory, file)).st_mode & 0o777 == 0o600
    assert ring.path.startswith(str(tmp_path))


def test_cache_host_name_is_the_same_in_all_processes(tmp_path, opened):
    code = 'import sys\nfrom ding_store.storage.shared_memory.cache_dir import open_cache_dir\n'
    code += 'print(open_cache_dir("run", sys.argv[1]).host)'
    host = subprocess.check_output([sys.executable, '-c', code, str(tmp_path)], text=True).strip()
    assert host == opened().host
    assert host != opened('other').host  # Its files are elsewhere.
    # The same path in another container is another directory: a marker of its own.
    os.unlink(os.path.join(opened().root, 'marker'))
    assert opened().host != host


def test_cache_files_of_one_process_are_found_by_others(opened):
    ring = opened().create_ring(PAGE, {})
    region = ring.reserve(4)
    region.buffer[:] = b'abcd'
    ring.commit(region)
    name = os.path.basename(ring.path).split('.')[0]
    assert bytes(RingReader(opened().path_of(name)).view(0, 4)) == b'abcd'


def test_cache_files_of_dead_processes_are_found(tmp_path, opened):
    cache = opened()
    path = die_with_a_ring(tmp_path, 'run')
    mine = cache.create_ring(PAGE, {})
    (found,) = cache.orphans()
    assert found == (path, {'writer': 'w'})
    cache.remove([path])
    assert cache.orphans() == []
    assert os.path.exists(mine.path)


def test_cache_is_bounded_and_removes_files_of_dead_runs(tmp_path, opened):
    dead = die_with_a_ring(tmp_path, 'gone', 8 * PAGE)
    unread = die_with_a_ring(tmp_path, 'run', PAGE)
    cache = opened(max_bytes=16 * PAGE)
    cache.create_ring(4 * PAGE, {})
    assert os.path.exists(dead)  # There was room: whoever resumes that run may want it.
    cache.create_ring(4 * PAGE, {})
    assert not os.path.exists(dead)
    assert os.path.exists(unread)  # Of a run that is alive: only its own members know what was read.
    with pytest.raises(NotEnoughSpace, match='host_cache_bytes'):
        cache.create_ring(16 * PAGE, {})
    assert cache.used_bytes() <= 16 * PAGE


def test_cache_files_half_written_by_dead_processes_are_removed(tmp_path, opened):
    cache = opened(max_bytes=8 * PAGE)
    new = cache.path_of('x') + '.abc.new'
    with open(new, 'wb') as file:
        file.write(bytes(7 * PAGE))
    cache.create_ring(2 * PAGE, {})
    assert not os.path.exists(new)


def test_cache_files_of_runs_without_processes_are_removed(tmp_path, opened):
    paths = [die_with_a_ring(tmp_path, run) for run in ('gone', 'run')]
    opened('run')
    assert sum(one.num_bytes for one in collect_garbage(str(tmp_path))) == 2 * PAGE
    assert [os.path.exists(path) for path in paths] == [False, True]
    assert list(collect_garbage(str(tmp_path / 'nowhere'))) == []


def test_cache_directory_of_a_run_is_removed_by_its_last_user(tmp_path):
    first, second = (open_cache_dir('run', str(tmp_path)) for _ in range(2))
    directory = os.path.dirname(first.path_of('x'))
    first.close()
    first.close()
    assert os.path.isdir(directory)
    second.close()
    assert not os.path.exists(directory)
    path = die_with_a_ring(tmp_path, 'run')
    open_cache_dir('run', str(tmp_path)).close()
    assert os.path.exists(path)  # Unread, perhaps.
    open_cache_dir('run', str(tmp_path)).close(is_over=True)
    assert not os.path.exists(path)


def test_cache_directory_with_a_wrong_mode_is_refused(tmp_path):
    root = open_cache_dir('run', str(tmp_path)).root
    os.chmod(root, 0o755)
    with pytest.raises(ConfigError, match='0700'):
        open_cache_dir('run', str(tmp_path))
    (tmp_path / 'x').mkdir()
    os.symlink('/tmp', tmp_path / 'x' / os.path.basename(root))
    with pytest.raises(ConfigError, match='0700'):
        open_cache_dir('run', str(tmp_path / 'x'))


def test_cache_lock_of_a_stopped_process_blocks_no_other(tmp_path, opened, redis_server, monkeypatch):
    """All goes over the wire, until it goes on."""
    monkeypatch.setattr(cache_root, 'PATIENCE_S', 0.05)
    cache, run = opened(), f'stopped-{os.getpid()}'
    store, other = (open_store(redis_server.url, run, host_cache_dir=str(tmp_path)) for _ in range(2))
    reader = Reader(other, 's', 'first')

    def use():
        with pytest.raises(StoreTimeout):
            cache.create_ring(PAGE, {})
        assert store.tidy() == 0
        store.append('s', {}, chunk(1))
        readers = [reader, Reader(other, 's', 'second')]
        for (entry,) in (one.read(timeout_s=WAIT_S) for one in readers):
            assert (number_of(entry), entry.guard) == (1, None)
        assert store.put('weights', {}, {'x': np.arange(100_000)}) == 1
        assert other.get('weights', timeout_s=WAIT_S).arrays['x'][-1] == 99_999
        with open_store(redis_server.url, run, host_cache_dir=str(tmp_path)) as late:
            assert late.host == ''
            assert late.get('weights', timeout_s=WAIT_S).version == 1
        with pytest.raises(StoreTimeout, match='stopped'):
            list(collect_garbage(str(tmp_path)))
        for one in (store, other):
            one.close()

    with ThreadPoolExecutor() as pool, stopped_with_the_lock(tmp_path) as pid:
        pool.submit(use).result(WAIT_S)
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: not is_claimed(os.path.join(cache.root, 'lock')), 'it goes on')
        cache.create_ring(PAGE, {})


def test_cache_file_creation_does_not_wait_for_long(tmp_path, redis_server, monkeypatch):
    """An append and a put have another way, and look again: who opens a store has the patience, since it has none."""
    monkeypatch.setattr(cache_root, 'PATIENCE_S', 10 * WAIT_S)
    run = f'bounded-{os.getpid()}'
    store, other = (open_store(redis_server.url, run, host_cache_dir=str(tmp_path)) for _ in range(2))
    with store, other, ThreadPoolExecutor() as pool:
        reader = Reader(other, 's', 'first')
        store.append('s', {}, chunk(0))  # which hears where the readers are

        def use(number):
            store.append('s', {}, chunk(number))
            store.put('weights', {}, {'x': np.full(100_000, number)})
            return other.get('weights').arrays['x'][-1], bool(store.client.get('weights').reference)

        with stopped_with_the_lock(tmp_path) as pid:
            assert [pool.submit(use, number).result(WAIT_S) for number in (1, 2)] == [(1, False), (2, False)]
            os.kill(pid, signal.SIGCONT)
            for thread in threading.enumerate():
                if thread.name == 'ding-store-claim':  # Who was not waited for: it takes the lock, and gives it back.
                    thread.join(WAIT_S)
            eventually(lambda: not is_claimed(os.path.join(cache_of(store).root, 'lock')), 'it goes on')
            assert use(3) == (3, True)
        entries = reader.read()
        assert [number_of(entry) for entry in entries] == [0, 1, 2, 3]
        assert [entry.guard is not None for entry in entries] == [False, False, False, True]


def test_cache_lock_of_a_stopped_process_makes_no_directory(tmp_path, monkeypatch, caplog):
    """It would be on another host than the others of its run."""
    monkeypatch.setattr(cache_root, 'PATIENCE_S', 0.05)
    roots = [tmp_path / 'a', tmp_path / 'b']
    for root in roots:
        root.mkdir()
    monkeypatch.setattr(cache_root, 'directories', lambda: list(map(str, roots)))
    monkeypatch.setattr(cache_root, 'free_bytes', lambda _: 1 << 30)
    dead = die_with_a_ring(roots[1], 'gone')
    with stopped_with_the_lock(roots[0]):
        with pytest.raises(StoreTimeout, match='stopped'):
            open_cache_dir('run')
        garbage = collect_garbage()
        assert [os.path.basename(next(garbage).run)] == ['gone']
        with pytest.raises(StoreTimeout, match='stopped'):
            next(garbage)
    assert not os.path.exists(dead)
    roots[0].joinpath(cache_root.root_in('')).chmod(0o755)
    other = open_cache_dir('run')
    assert other.root.startswith(str(roots[1]))
    assert f"the host cache is in '{other.root}'" in caplog.text
    assert str(roots[0]) in caplog.text
    other.close(is_over=True)


def test_cache_directory_is_chosen_by_free_space(monkeypatch, tmp_path):
    free = {'/dev/shm': 64 << 20, '/a': 5 << 30, '/b': 9 << 30}
    monkeypatch.setattr(cache_root, 'directories', lambda: list(free))
    monkeypatch.setattr(cache_root, 'free_bytes', free.__getitem__)
    monkeypatch.setattr(os, 'access', lambda *_: True)
    assert cache_root.candidates('run') == ['/b', '/a', '/dev/shm']
    free['/dev/shm'] = 2 << 30
    assert cache_root.candidates('run') == ['/dev/shm', '/b', '/a']
    # Wherever the run is already, whatever is free by now.
    monkeypatch.setattr(os.path, 'isdir', lambda path: path.startswith('/a/'))
    assert cache_root.candidates('run')[0] == '/a'


def test_cache_directory_that_was_renamed_raises(opened):
    cache = opened()
    os.rename(cache.root, cache.root + '-gone')
    with pytest.raises(FileNotFoundError):
        cache.create_ring(PAGE, {})
    cache.close()
    assert not os.path.exists(cache.root)


def test_cache_without_a_usable_directory_is_refused(monkeypatch):
    monkeypatch.setattr(cache_root, 'directories', lambda: ['/proc'])
    with pytest.raises(NotEnoughSpace, match='host_cache_dir'):
        open_cache_dir('run')


_HOLDER = """
import sys, time
from ding_store.storage.shared_memory.cache_dir import open_cache_dir
cache = open_cache_dir(sys.argv[2], sys.argv[1])
ring = cache.create_ring(1 << 20, {})
print(ring.path, flush=True)
time.sleep(600)
"""


#: Of the runs whose caches are cleaned.
URL = 'redis://localhost:1'


def test_clean_removes_only_files_of_dead_processes(tmp_path):
    holders = {}
    for run in ('dead', 'alive'):
        command = [sys.executable, '-c', _HOLDER, str(tmp_path), cache_name(run, URL)]
        holders[run] = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        paths = {run: holder.stdout.readline().strip() for run, holder in holders.items()}
        holders['dead'].kill()
        holders['dead'].wait(60)

        def clean(*arguments):
            command = ding_store('clean', 'dead', 'alive', '--store', URL, '--dir', tmp_path, *arguments)
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150)
            assert done.returncode == 0, done.stderr
            return done.stdout

        (found,) = json.loads(clean('--dry-run', '--json'))
        assert found['path'] == os.path.dirname(paths['dead'])
        assert found['num_bytes'] == (1 << 20) + PAGE
        assert all(map(os.path.exists, paths.values()))
        assert '1.05 MB were freed' in clean()
        assert [run for run, path in paths.items() if os.path.exists(path)] == ['alive']
        assert not os.path.exists(os.path.dirname(paths['dead']))
    finally:
        for holder in holders.values():
            holder.kill()
            holder.communicate()
