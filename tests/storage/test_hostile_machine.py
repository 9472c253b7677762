"""What a machine may do to a store: its memory disk is full, its clocks jump, its processes are spawned anew."""

import errno
import itertools
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from needs import lacking
from redis_server import RedisServer

import ding_store
from ding_store.errors import StoreUnavailable
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        lacking(f'needs the right to mount a tmpfs: {done.stderr.strip()}')
    try:
        yield path
    finally:
        subprocess.run(['umount', '-l', str(path)], capture_output=True, timeout=60, check=True)


def fill_up(path):
    with open(path, 'wb', buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017 it is no error of ours


def test_memory_disk_that_fills_up_loses_nothing(opened, small_disk):
    """While somebody else takes all there is, payloads go over the wire; no page is written that is not there."""
    writer, near = (opened(host_cache_dir=str(small_disk)) for _ in range(2))
    reader, seen, transports = Reader(near, STREAM, 'learner'), [], set()
    filler, total = small_disk / 'filler', 60

    def read():
        entries = reader.read(timeout_s=WAIT_S)
        for entry in entries:
            number = entry.header['number']
            assert (entry.arrays['x'] == number).all()
            assert entry.validate()
            seen.append(number)
            transports.add('wire' if entry.guard is None else 'host')
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
    assert (seen, reader.num_lost, transports) == (list(range(total)), 0, {'host', 'wire'})


@pytest.fixture
def stuck_server(redis_binary, tmp_path):
    """Its last snapshot failed, as on a full disk: it takes no writes until ``heal``."""
    gone = tmp_path / 'gone'
    gone.mkdir()
    with RedisServer(redis_binary, '--dir', str(gone)) as server, server.client() as client:
        gone.rmdir()
        client.config_set('save', '3600 1')

        def fail():
            client.set('x', 1)
            client.bgsave()
            eventually(lambda: client.info('persistence')['rdb_last_bgsave_status'] == 'err', 'it cannot write')
            client.config_set('stop-writes-on-bgsave-error', 'yes')

        server.fail, server.heal = fail, lambda: client.config_set('stop-writes-on-bgsave-error', 'no')
        yield server


def test_writers_wait_for_a_server_with_a_full_disk(stuck_server, tmp_path, caplog):
    """Whoever writes waits, the learner trains on, and nothing is appended twice."""
    options = dict(run='run', host_cache_dir=str(tmp_path / 'cache'))
    with open_store(stuck_server.url, **options) as writer, open_store(stuck_server.url, **options) as near:
        reader = Reader(near, STREAM, 'learner')
        for number in range(2):
            writer.append(STREAM, {}, chunk(number))
        near.put('news', {'at': 0}, {})
        stuck_server.fail()
        assert [number_of(entry) for entry in reader.read()] == [0, 1]
        with near.nonblocking(), pytest.raises(StoreUnavailable, match='cannot write'):
            reader.ack()
        with near.nonblocking():
            near.advance(STREAM, 'learner', reader.cursor, 'news', {'at': 1})  # whose reply is not waited for
            with pytest.raises(StoreUnavailable, match='cannot write'):
                near.flush()
        with ThreadPoolExecutor() as pool:
            appending = pool.submit(writer.append, STREAM, {}, chunk(2))
            eventually(lambda: caplog.text.count('cannot write') == 2, 'each has said it')
            stuck_server.heal()
            appending.result(WAIT_S)
        near.flush()
        assert near.get('news').header == {'at': 1}
        assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [2]
        reader.ack()
        assert (reader.num_lost, reader.num_duplicates) == (0, 0)
        assert caplog.text.count('cannot write') == 2, 'once'


def test_server_with_a_full_disk_is_named_after_the_timeout(stuck_server):
    with open_store(stuck_server.url, 'run', reconnect_timeout_s=0.2) as store:
        store.append(STREAM, {}, chunk(0))
        stuck_server.fail()
        for call in (lambda: store.append(STREAM, {}, chunk(1)), lambda: store.put('v', {}, {})):
            with pytest.raises(StoreUnavailable, match='redis.sock cannot write.*MISCONF.*disk'):
                call()
        stuck_server.heal()
        store.append(STREAM, {}, chunk(2))
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1, 2], 'it was kept, as where a reply is lost'


def test_nonblocking_call_does_not_wait_for_disk_space(stuck_server):
    with open_store(stuck_server.url, 'run', host_plane='off') as store, ThreadPoolExecutor() as pool:
        arrays = {'x': np.zeros(100_000)}
        store.put('weights', {}, arrays)
        stuck_server.fail()
        putting = pool.submit(store.put, 'weights', {}, {'x': np.ones(100_000)})
        eventually(store.client.server._values._sent['weights'].lock.locked, 'it waits with the lock of the value')
        with store.nonblocking(), pytest.raises(StoreUnavailable, match='cannot write'):
            store.put('weights', {}, arrays)
        assert not putting.done()
        stuck_server.heal()
        assert putting.result(WAIT_S) == 2
        assert store.get('weights').arrays['x'][0] == 1


def test_full_disk_is_logged_once_each_time(stuck_server, caplog):
    """Also where nobody waits for it."""
    with open_store(stuck_server.url, 'run') as store, store.nonblocking():
        for times in (1, 2):
            store.put('v', {}, {})
            stuck_server.fail()
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match='cannot write'):
                    store.put('v', {}, {})
                store.get('v')
            assert caplog.text.count('cannot write') == times
            stuck_server.heal()


def test_package_reads_no_clock_that_jumps():
    """The time of day is not looked at: neither the server's, nor that of a process but to be told to others."""
    root = Path(ding_store.__file__).parent
    clocks = re.compile(r"\btime\.time\b|\btime_ns\b|\bdatetime\b(?! import timedelta)|call\('TIME'")
    files = [path for ending in ('py', 'lua') for path in root.rglob(f'*.{ending}')]
    asking = {str(path.relative_to(root)) for path in files if clocks.search(path.read_text())}
    # When weights were sent, for another host. Dates that users read: of a report, a member, a record or files.
    dates = {'compare/results.py', 'launch/clean.py', 'launch/status.py', 'metrics/record.py', 'run/session.py'}
    assert asking == {'middleware/weights.py', *dates}


def test_clock_set_back_with_memory_loss_delivers_payloads(opened, redis_server):
    """Nothing but who asks for a value's payload is numbered by its clock."""
    writer, far = opened(check_every_s=0.1), opened(host_plane='off')
    wants = far.client.server.keys.of_value('weights')[2]
    with redis_server.client() as client:
        writer.put('weights', {}, {'x': np.full(10_000, 1)})
        client.xadd(wants, {'v': 1}, id=f'{10**15}-0')  # milliseconds: in 30,000 years
        eventually(lambda: far.client.get('weights').payload, 'its writer heard of it')
        client.delete(wants)
        writer.put('weights', {}, {'x': np.full(10_000, 2)})
        assert far.get('weights', 1, WAIT_S).arrays['x'][0] == 2


@pytest.fixture
def set_clock(tmp_path, monkeypatch):
    """Sets how many seconds the time of day is off for all processes that are started from now on."""
    compiler = shutil.which('cc') or shutil.which('gcc')
    if compiler is None:
        pytest.skip('needs a C compiler, for a clock that jumps')
    library, file = tmp_path / 'clock.so', tmp_path / 'clock'
    words = [compiler, '-shared', '-fPIC', '-o', str(library), str(Path(__file__).with_name('clock.c')), '-ldl']
    subprocess.run(words, check=True, timeout=60)

    def set_clock(seconds):
        new = file.with_suffix('.new')
        new.write_text(str(seconds))
        new.replace(file)

    set_clock(0)
    monkeypatch.setenv('CLOCK_FILE', str(file))
    monkeypatch.setenv('LD_PRELOAD', str(library))
    return set_clock


@pytest.fixture
def jumping_server(set_clock, redis_binary, monkeypatch):
    with RedisServer(redis_binary) as server, server.client() as client:
        set_clock(DAY_S)
        assert abs(client.time()[0] - DAY_S - time.time()) < WAIT_S, 'its clock can be set'
        yield server


DAY_S = 86400
WRITE = """
import sys, time
import numpy as np
from ding_store.storage import open_store
from ding_store.storage.testing import WAIT_S, chunk
url, plane, directory, total = *sys.argv[1:4], int(sys.argv[4])
times = []
with open_store(url, 'run', host_plane=plane, host_cache_dir=directory) as store:
    for number in range(total):
        times.append(time.time())
        store.append('experience', {}, chunk(number, (8, 2000, 50_000)[number % 3]))
        store.put('weights', {}, {'x': np.full(20_000, number)})
    print(any(after < before for before, after in zip(times, times[1:])), flush=True)
    store.get('finished', timeout_s=WAIT_S)
"""


@pytest.mark.parametrize('transport', ['auto', 'off'])
def test_clocks_that_jump_lose_nothing(jumping_server, set_clock, tmp_path, transport):
    """Those of the server and of a writer, by hours and days, back and forth, while a reader's goes on as ever."""
    total, rng = 150, random.Random(3)
    options = dict(host_plane=transport, host_cache_dir=str(tmp_path / 'cache'))
    with open_store(jumping_server.url, 'run', **options) as store:
        reader, seen, weights = Reader(store, STREAM, 'learner'), [], []
        words = [sys.executable, '-c', WRITE, jumping_server.url, transport, options['host_cache_dir'], str(total)]
        writer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            while len(seen) < total:
                entries = reader.read(3, timeout_s=WAIT_S)
                assert entries, seen
                seen += map(number_of, entries)
                set_clock(rng.choice([0, 3600, -3600, DAY_S, -DAY_S, 40 * DAY_S]))
                reader.ack()
                weights.append(int(store.get('weights', timeout_s=WAIT_S).arrays['x'][-1]))
            assert writer.stdout.readline().strip() == 'True', 'its clock went back'
            assert store.get('weights').arrays['x'][-1] == total - 1
            store.put('finished', {}, {})
            assert writer.wait(WAIT_S) == 0
        finally:
            writer.kill()
            writer.communicate()
    assert (seen, reader.num_lost, reader.num_duplicates) == (list(range(total)), 0, 0)
    assert weights == sorted(weights)


@pytest.mark.parametrize('what', ['entry', 'value'])
def test_clock_set_back_at_the_server_ends_waits(jumping_server, set_clock, what):
    """Redis tells by it when a blocked command is over: it is after a socket timeout, and what comes is heard of."""
    options = dict(socket_timeout_s=1.0, check_every_s=0.5)
    with open_store(jumping_server.url, 'run', host_plane='off', **options) as store:
        with (
            open_store(jumping_server.url, 'run') as other,
            jumping_server.client() as client,
            ThreadPoolExecutor() as pool,
        ):
            call = {
                'entry': lambda wait_s: store.read(STREAM, timeout_s=wait_s),
                'value': lambda wait_s: store.get('v', 0, wait_s),
            }
            waiting = pool.submit(call[what], 2.0)
            eventually(lambda: client.info('clients')['blocked_clients'] == 1, 'it waits')
            set_clock(-DAY_S)
            assert not waiting.result(WAIT_S / 2)
            waiting = pool.submit(call[what], WAIT_S)
            eventually(lambda: client.info('clients')['blocked_clients'] == 1, 'it waits')
            set_clock(-2 * DAY_S)
            other.append(STREAM, {}, chunk(0))
            other.put('v', {}, {})
            assert waiting.result(WAIT_S / 2)


def in_child(store, numbers, said):
    """Of a spawned process: the store came pickled, and opens itself here."""
    for number in numbers:
        store.append(STREAM, {}, chunk(number))
    said.put((getattr(store, 'host', ''), store.writer, int(store.get('weights').arrays['x'][0])))
    store.close()


@pytest.mark.parametrize('transport', ['auto', 'off'])
def test_spawned_child_uses_a_pickled_store(opened, transport):
    parent = opened(host_plane=transport)
    reader = Reader(opened(host_plane=transport), STREAM, 'learner')
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
    assert transport == 'off' or host == parent.host
    parent.append(STREAM, {}, chunk(5))
    seen = []
    while len(seen) < 6:
        seen += map(number_of, reader.read(timeout_s=WAIT_S))
        reader.ack()
    assert (seen, reader.num_lost) == (list(range(6)), 0)
