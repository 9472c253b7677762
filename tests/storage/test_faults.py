"""Dead writers and readers, slow readers, damaged streams: what is lost is counted, what is left is read."""

import collections
import contextlib
import functools
import importlib.util
import json
import os
import random
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis
from inside import set_patience
from processes import child

from ding_store.errors import (
    ConfigError,
    CorruptPayload,
    PayloadLost,
    StoreClosed,
    StoreTimeout,
)
from ding_store.storage import open_store
from ding_store.storage.encoding import framing as wire
from ding_store.storage.encoding.compression import CODECS
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.memory.store import MemoryStore
from ding_store.storage.redis import connection, parts
from ding_store.storage.redis.server_checks import ServerGeneration, make_client
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.shared_memory import rings
from ding_store.storage.shared_memory.transports import is_reference
from ding_store.storage.testing import WAIT_S, abandon, chunk, eventually, number_of

STREAM = 'experience'
LOG = 'ding:{run/experience/0}:log'
QUICK = {'check_every_s': 0.1}


def write_and_wait(url, numbers):
    """The work of a child: append, say so, and stay alive."""

    def work(pipe):
        with RedisStore(url, 'run', **QUICK) as store:
            for number in numbers:
                store.append(STREAM, {}, chunk(number))
            print('done', file=pipe)
            while True:
                store.get('nothing', timeout_s=1.0)

    return work


def read_until(reader, count):
    deadline, numbers = time.monotonic() + WAIT_S, []
    while len(numbers) < count:
        assert time.monotonic() < deadline, numbers
        numbers += [number_of(entry) for entry in reader.read(timeout_s=0.2)]
    return numbers


class TestEmptyAfterACrash:
    @pytest.mark.parametrize('is_again', [False, True])
    def test_living_writers_lose_nothing_and_dead_ones_are_counted(self, forgetful_server, caplog, is_again):
        """Also by a reader that is killed, too, and started again."""
        with RedisStore(forgetful_server.url, 'run', **QUICK) as store:
            reader = Reader(store, STREAM, 'learner', loss_grace_s=WAIT_S)
            with child(write_and_wait(forgetful_server.url, range(10, 15))) as (_, living):
                assert living.readline().strip() == 'done'
                with child(write_and_wait(forgetful_server.url, range(7))) as (_, dying):
                    assert dying.readline().strip() == 'done'
                    reader.losses.looked_at = 0  # Else it looks once a second.
                    assert len(reader.read(max_entries=3)) == 3
                committed = json.dumps({'marks': reader.marks, 'heads': reader.heads()})
                forgetful_server.restart()
                if is_again:
                    reader = Reader(store, STREAM, 'learner', **json.loads(committed), loss_grace_s=WAIT_S)
                numbers = read_until(reader, 2)
                assert numbers == [13, 14]
                assert reader.num_lost == 0
                reader.losses.deadline = 0.0  # The grace is over.
                assert reader.read() == []
            assert reader.num_lost == 7
            assert len([one for one in caplog.records if '7 entries were lost' in one.message]) == 1

    def test_loss_without_a_living_writer_is_counted(self, forgetful_server):
        with RedisStore(forgetful_server.url, 'run', **QUICK) as store:
            reader = Reader(store, STREAM, 'learner', loss_grace_s=0.3)
            with child(write_and_wait(forgetful_server.url, range(4))) as (_, dying):
                assert dying.readline().strip() == 'done'
                reader.losses.looked_at = 0
                assert len(reader.read(max_entries=1)) == 1
            forgetful_server.restart()

            def is_counted():
                reader.read(timeout_s=0.1)
                return reader.num_lost == 3

            eventually(is_counted, 'the loss is counted')

    def test_server_restarted_from_its_file_omits_removed_readers(self, own_server):
        with RedisStore(own_server.url, 'run', **QUICK) as store, RedisStore(own_server.url, 'run') as writer:
            for reader in ('dead', 'present'):
                store.register(STREAM, reader)
                store.ack(STREAM, reader, writer.append(STREAM, {}, chunk(0)))
            assert store.forget(STREAM, 'dead')
            own_server.restart()
            writer.append(STREAM, {}, chunk(1))
            assert store.stream_info(STREAM).durable == {'present': True}

    def test_durable_server_loses_nothing_with_its_writer(self, own_server):
        with RedisStore(own_server.url, 'run', **QUICK) as store:
            reader = Reader(store, STREAM, 'learner', loss_grace_s=0.0)
            with child(write_and_wait(own_server.url, range(4))) as (_, dying):
                assert dying.readline().strip() == 'done'
                reader.losses.looked_at = 0
                assert len(reader.read(max_entries=1)) == 1
            own_server.restart()
            assert read_until(reader, 3) == [1, 2, 3]
            assert reader.num_lost == 0

    @pytest.mark.parametrize('is_late', [False, True])
    def test_resent_entries_are_not_lost_for_a_slow_reader(self, is_late):
        """Of one that it knew and of one that was new to it; where they are late it is counted, and counted back."""
        with MemoryStore() as store, store.another() as known, store.another() as new:
            reader = Reader(store, STREAM, 'learner', loss_grace_s=0.0)
            known.append(STREAM, {}, chunk(0))
            assert [number_of(entry) for entry in reader.read()] == [0]
            reader.ack()
            for number in range(1, 6):
                known.append(STREAM, {}, chunk(number))
            for number in range(6, 11):
                new.append(STREAM, {}, chunk(number))
            reader.losses.looked_at = 0
            seen = [number_of(entry) for entry in reader.read(1)]
            store.lose_memory()
            if is_late:
                reader.losses.looked_at = 0
                assert (reader.read(), reader.num_lost) == ([], 9)
            known.append(STREAM, {}, chunk(11))
            new.append(STREAM, {}, chunk(12))
            while reader.lag():
                reader.losses.looked_at = 0
                seen += map(number_of, reader.read(1))
                assert is_late or reader.num_lost == 0
            assert (sorted(seen), reader.num_lost) == (list(range(1, 13)), 0)

    def test_resent_entries_dropped_before_a_read_are_lost(self):
        options = {'max_pending_bytes': 10_000, 'overflow': 'drop_oldest'}
        with MemoryStore(**options) as store, store.another(**options) as writer, store.another(**options) as other:
            reader = Reader(store, STREAM, 'learner', loss_grace_s=0.0)
            for number in range(6):
                writer.append(STREAM, {}, chunk(number))
            reader.losses.looked_at = 0
            seen = [number_of(entry) for entry in reader.read(1)]
            store.lose_memory()
            writer.flush()
            writer.get('nothing')
            writer.append(STREAM, {}, chunk(6))
            for number in range(7, 20):
                other.append(STREAM, {}, chunk(number, 1000))
            for _ in range(3):
                reader.losses.looked_at = 0
                seen += map(number_of, reader.read())
            assert (seen[:1], seen[-1]) == ([0], 19)
            assert reader.num_lost >= 5

    def test_entries_dropped_during_a_read_are_counted(self, forgetful_server, monkeypatch):
        """Also where drops of a writer that was never seen are counted by their numbers, and missed by nobody."""
        options = {'max_pending_bytes': 1 << 22, 'overflow': 'drop_oldest'}
        stores = [RedisStore(forgetful_server.url, 'run', **options) for _ in range(3)]
        with contextlib.ExitStack() as stack:
            unknown, writer, store = [stack.enter_context(one) for one in stores]
            reader, count, seen = Reader(store, STREAM, 'learner'), 0, []

            def append(one, *sizes):
                nonlocal count
                for size in sizes:
                    one.append(STREAM, {}, chunk(count, size))
                    count += 1

            def read():
                seen.extend(map(number_of, reader.read()))
                reader.ack()

            append(writer, 8)
            read()
            append(unknown, 8, 8)
            append(writer, *[1 << 17] * 4)
            read()
            append(writer, 8, 1 << 17, 8, 8)
            fetch = store.client.server._parts.fetch

            def fetching(*arguments):
                monkeypatch.setattr(store.client.server._parts, 'fetch', fetch)
                append(writer, *[1 << 17] * 3)
                return fetch(*arguments)

            monkeypatch.setattr(store.client.server._parts, 'fetch', fetching)
            for _ in range(4):
                read()
            assert seen[-1] == count - 1
            assert reader.num_lost == count - len(seen) > 2

    def test_entries_of_a_late_writer_are_no_longer_lost(self):
        with MemoryStore() as store, store.another() as other:
            reader = Reader(store, STREAM, 'learner', loss_grace_s=0.0)
            for i in range(5):
                other.append(STREAM, {}, chunk(i))
            reader.losses.looked_at = 0
            assert len(reader.read(max_entries=2)) == 2
            store.lose_memory()
            reader.losses.looked_at = 0
            assert reader.read() == []
            assert reader.num_lost == 3
            other.append(STREAM, {}, chunk(5))
            assert [number_of(entry) for entry in reader.read()] == [2, 3, 4, 5]
            assert reader.num_lost == 0

    @pytest.mark.parametrize('when', ['away', 'behind', 'in grace', 'before'])
    def test_restarted_reader_counts_losses_seen_before(self, when):
        """Also what that had read and not committed; ``when`` it is away, as seen from the loss, or is killed again."""

        def look(one):
            one.losses.looked_at = 0
            return [number_of(entry) for entry in one.read()]

        def again(committed, grace_s=WAIT_S):
            return Reader(store, STREAM, 'learner', **json.loads(committed), loss_grace_s=grace_s)

        with MemoryStore() as store, store.another() as living, store.another() as dying, store.another() as done:
            reader = Reader(store, STREAM, 'learner')
            done.append(STREAM, {}, chunk(20))
            for number in range(5):
                living.append(STREAM, {}, chunk(10 + number))
                dying.append(STREAM, {}, chunk(number))
            reader.losses.looked_at = 0
            seen = [number_of(entry) for entry in reader.read(5)]
            assert seen == [20, 10, 0, 11, 1]
            committed = json.dumps({'marks': reader.marks, 'heads': reader.heads()})
            assert len(reader.read(2)) == 2  # and is killed, before it commits these
            reader = again(committed)
            if when == 'before':
                assert look(reader) == [12, 2, 13, 3, 14, 4]
                committed = json.dumps({'marks': reader.marks, 'heads': reader.heads()})
            abandon(dying)  # It will not announce again.
            store.lose_memory()
            if when in ('behind', 'in grace'):
                assert look(reader) == []
                if when == 'in grace':
                    committed = json.dumps({'marks': reader.marks, 'heads': reader.heads()})
            reader = again(committed) if when != 'behind' else reader
            living.append(STREAM, {}, chunk(15))
            assert look(reader) == ([15] if when == 'before' else [12, 13, 14, 15])
            assert reader.num_lost == 0
            reader.losses.deadline = 0.0
            assert (look(reader), reader.num_lost) == ([], 0 if when == 'before' else 3)
            reader = again(json.dumps({'marks': reader.marks, 'heads': reader.heads()}), grace_s=0.0)
            store.lose_memory()
            living.append(STREAM, {}, chunk(16))
            assert (look(reader), look(reader), reader.num_lost) == ([16], [], 0)


@pytest.mark.parametrize('transport', ['auto', 'off'])
def test_memory_lost_during_a_read_skips_no_entry(forgetful_server, tmp_path, monkeypatch, transport):
    """It had told of three entries, of which the second has its payload in parts, and forgot these."""
    options = dict(host_plane=transport, host_cache_dir=str(tmp_path), max_pending_bytes=1 << 24)
    with open_store(forgetful_server.url, 'run', **options) as writer:
        with open_store(forgetful_server.url, 'run', **options) as other:
            for number, size in enumerate((8, 50_000, 8)):
                writer.append(STREAM, {}, chunk(number, size))
            reader = Reader(other, STREAM, 'learner')
            parts = other.client.server._parts
            fetch = parts.fetch

            def restarted(*arguments):
                monkeypatch.undo()
                forgetful_server.restart()
                return fetch(*arguments)

            monkeypatch.setattr(parts, 'fetch', restarted)
            seen = [number_of(entry) for entry in reader.read()]
            writer.flush()
            writer.get('nothing')
            seen += read_until(reader, 3 - len(seen))
            reader.ack()
            assert (seen, reader.num_lost) == ([0, 1, 2], 0)


def test_killed_reader_continues_from_its_marks(redis_server, tmp_path):
    """Rows and marks in one file that is replaced whole, as a table commits them: each entry once."""
    run, total, file = f'marks-{os.getpid()}', 150, tmp_path / 'table.json'

    def ingest(pipe):
        table = json.loads(file.read_text()) if file.exists() else {'rows': [], 'marks': {}}
        with RedisStore(redis_server.url, run) as store:
            reader = Reader(store, STREAM, 'learner', marks=table['marks'])
            while True:
                table['rows'] += [number_of(entry) for entry in reader.read(4, timeout_s=0.05)]
                print('read', file=pipe)
                (tmp_path / 'new').write_text(json.dumps({'rows': table['rows'], 'marks': reader.marks}))
                os.replace(tmp_path / 'new', file)
                print('committed', len(table['rows']), file=pipe)
                reader.ack()
                print('acked', file=pipe)

    with RedisStore(redis_server.url, run) as store:
        store.register(STREAM, 'learner')
        for i in range(total):
            store.append(STREAM, {}, chunk(i))
        committed = 0
        while committed < total:
            with child(ingest) as (_, pipe):
                for _ in range(random.randint(1, 20)):
                    word, *count = pipe.readline().split()
                    committed = int(count[0]) if word == 'committed' else committed
        assert json.loads(file.read_text())['rows'] == list(range(total))


class TestDeadReaders:
    def test_dead_durable_reader_holds_entries_until_forgotten(self, redis_server, capsys):
        from ding_store.cli import main

        run = f'dead-{os.getpid()}'
        command = ['forget', '--store', redis_server.url, '--run', run, '--stream', STREAM, '--reader', 'learner']
        with RedisStore(redis_server.url, run, max_pending_bytes=2000) as store:
            Reader(store, STREAM, 'learner')  # and it never comes back
            append = functools.partial(store.append, STREAM, {}, chunk(0), timeout_s=0.05)
            with pytest.raises(StoreTimeout):
                collections.deque(iter(append, None), maxlen=0)
            assert store.info().streams[STREAM].pending_bytes <= 2000
            living = Reader(store, STREAM, 'second')
            living.read()
            living.ack()
            with pytest.raises(StoreTimeout):
                append()
            assert main(command) == 0
            append()
            capsys.readouterr()
            assert main(command) == 1
            assert f"'{STREAM}' has no reader 'learner'; it has: second" in capsys.readouterr().err
            command[command.index(run)] = 'another'
            assert main(command) == 1
            assert "run 'another' at unix://" in capsys.readouterr().err

    def test_stream_drops_the_oldest_for_a_killed_durable_reader(self, redis_server):
        run, total = f'killed-{os.getpid()}', 60

        def read(pipe):
            with RedisStore(redis_server.url, run) as store:
                reader = Reader(store, STREAM, 'learner')
                print(*map(number_of, reader.read(2, timeout_s=WAIT_S)), file=pipe)
                reader.ack()
                print('acked', file=pipe)
                store.get('nothing', timeout_s=WAIT_S)

        with RedisStore(redis_server.url, run, max_pending_bytes=2000, overflow='drop_oldest') as store:
            store.append(STREAM, {}, chunk(0))
            with child(read) as (_, pipe):
                assert [pipe.readline().strip() for _ in range(2)] == ['0', 'acked']
            for number in range(1, total):
                store.append(STREAM, {}, chunk(number))
                assert store.stream_info(STREAM).pending_bytes <= 2000
            num_dropped = store.stream_info(STREAM).num_dropped
            again = Reader(store, STREAM, 'learner', marks={store.writer: 1})
            seen = [number_of(entry) for entry in again.read()]
            assert len(seen) + num_dropped == total - 1
            assert again.num_lost == num_dropped
            assert seen == list(range(total - len(seen), total))
            assert store.forget(STREAM, 'learner')
            assert store.stream_info(STREAM).pending_bytes == 0
            store.append(STREAM, {}, chunk(total))

    def test_forget_of_the_only_reader_makes_room(self, redis_server):
        """Nobody is left to ack for it: writers go on, up to the limit once more, for whoever comes next."""
        from ding_store.cli import main

        run = f'only-{os.getpid()}'
        with RedisStore(redis_server.url, run, max_pending_bytes=2000) as store:
            Reader(store, STREAM, 'learner')
            append = functools.partial(store.append, STREAM, {}, chunk(0), timeout_s=0.05)
            with pytest.raises(StoreTimeout):
                collections.deque(iter(append, None), maxlen=0)
            words = ['--store', redis_server.url, '--run', run, '--stream', STREAM, '--reader', 'learner']
            assert main(['forget', *words]) == 0
            assert store.info().streams[STREAM].pending_bytes == 0
            last = append()
            assert [entry.id for entry in Reader(store, STREAM, 'next').read()] == [last]

    def test_ephemeral_reader_holds_no_entry(self, redis_server):
        run = f'viewer-{os.getpid()}'
        with RedisStore(redis_server.url, run, max_pending_bytes=2000) as store:
            Reader(store, STREAM, 'viewer', durable=False)
            reader = Reader(store, STREAM, 'learner')
            for i in range(100):
                store.append(STREAM, {}, chunk(i), timeout_s=0.05)
                reader.read()
                reader.ack()
            assert store.info().streams[STREAM].pending_bytes == 0


def rss_bytes():
    with open('/proc/self/statm') as statm:
        return int(statm.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


@pytest.mark.parametrize('overflow', ['block', 'drop_oldest'])
def test_memory_is_bounded_when_the_reader_is_slow(forgetful_server, overflow):
    """Thirty times the limit goes through; neither the server nor the writer ever holds much more than the limit."""
    limit, size, total = 2_000_000, 100_000, 600
    with forgetful_server.client() as client, ThreadPoolExecutor() as pool:
        base = client.info('memory')['used_memory']
        store = RedisStore(forgetful_server.url, 'run', max_pending_bytes=limit, overflow=overflow)
        other = RedisStore(forgetful_server.url, 'run')
        with store, other:
            reader = Reader(other, STREAM, 'learner')
            done, turns = [], threading.Semaphore(0)

            def read():
                count = 0
                while not (done and reader.lag() == 0):
                    # Eight of twenty; a writer that waits for the reader cannot tell it when.
                    turns.acquire(timeout=0.015 if overflow == 'block' or done else WAIT_S)
                    count += len(reader.read(8, timeout_s=0.02))
                    reader.ack()
                return count

            reading = pool.submit(read)
            used = held = begin = 0
            try:
                array = np.zeros(size, np.uint8)
                for i in range(total):
                    store.append(STREAM, {'i': i}, {'x': array}, timeout_s=WAIT_S)
                    if i % 20 == 0:
                        turns.release()
                        used = max(used, client.info('memory')['used_memory'] - base)
                        held = max(held, rss_bytes())
                        if i == 100:
                            begin = held
            finally:
                done.append(True)
                turns.release()
            count = reading.result(WAIT_S)
            stream = other.info().streams[STREAM]
    assert (stream.num_dropped > 0) == (overflow == 'drop_oldest') == (reader.num_lost > 0)
    # Dropped are also entries that were read and not yet acked.
    assert count + reader.num_lost == total
    assert reader.num_lost <= stream.num_dropped
    assert used < 3 * limit + 8_000_000, f'Redis held {used} bytes'
    assert held - begin < 4 * limit + 20_000_000, f'this process grew by {held - begin} bytes'


def own_memory(pid='self'):
    """Of a process, without the files that it maps."""
    with open(f'/proc/{pid}/status') as status:
        (words,) = (line.split() for line in status if line.startswith('RssAnon'))
    return int(words[1]) * 1024


def size_if_there(path):
    """Of a file that its owner may remove at any moment, as a writer does with a ring that it needs no more."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize('overflow', ['block', 'drop_oldest'])
@pytest.mark.parametrize('transport', ['auto', 'off'])
def test_memory_of_two_processes_and_of_their_files_is_bounded(
    forgetful_server, tmp_path, monkeypatch, transport, overflow
):
    """
    Forty times the limit, in payloads above what is inline: in rings of this host, or in parts. The reader takes two
    when the stream is full, and when something was dropped since it last did.
    """
    limit, size, total = 4_000_000, 400_000, 400
    monkeypatch.setattr(rings, 'FIRST_BYTES', 1 << 20)
    options = dict(host_plane=transport, host_cache_dir=str(tmp_path), max_pending_bytes=limit, overflow=overflow)

    def write(pipe):
        memory = []
        with open_store(forgetful_server.url, 'run', **options) as store:
            for number in range(total):
                array = np.full(size, number % 251, np.uint8)
                store.append(STREAM, {'number': number}, {'x': array}, timeout_s=WAIT_S)
                memory.append(own_memory())
            store.put('done', {'grown': max(memory) - memory[20]}, {})
            store.get('finished', timeout_s=WAIT_S)

    peaks, seen, first, left_out = collections.Counter(), [], {}, 0

    def num_left_out():
        return store.info().streams[STREAM].num_dropped

    def look():
        peaks['server'] = max(peaks['server'], client.info('memory')['used_memory'])
        peaks['files'] = max(peaks['files'], sum(map(size_if_there, tmp_path.rglob('*.*'))))
        peaks['reader'] = max(peaks['reader'], own_memory())

    def is_time():
        is_full = store.stream_info(STREAM).pending_bytes > limit - 2 * size
        is_slow = overflow == 'block' or num_left_out() > left_out
        return is_full and is_slow or store.get('done') is not None

    with open_store(forgetful_server.url, 'run', **options) as store, forgetful_server.client() as client:
        reader = Reader(store, STREAM, 'learner')
        with child(write):
            while store.get('done') is None or reader.lag():
                eventually(is_time, 'the stream is full')
                left_out = num_left_out()
                for entry in reader.read(2):
                    is_right = (entry.arrays['x'] == entry.header['number'] % 251).all()
                    # What is dropped while it is looked at, its writer writes over.
                    assert is_right or overflow == 'drop_oldest' and not entry.validate()
                    seen.append(entry.header['number'])
                entry = None
                reader.ack()
                look()
                first = first or dict(peaks)
            grown = store.get('done').header['grown']
            store.put('finished', {}, {})
    assert len(seen) + reader.num_lost == total
    assert seen == sorted(set(seen))
    assert (reader.num_lost > 0) == (overflow == 'drop_oldest')
    assert peaks['server'] < (2 if transport == 'auto' else 3) * limit + 8_000_000, peaks
    assert (1 if transport == 'auto' else 0) * limit / 2 <= peaks['files'] <= 2.5 * limit, peaks
    assert grown < 2 * limit + 8_000_000
    assert peaks['reader'] - first['reader'] < 2 * limit + 8_000_000


def test_store_closed_during_connect_keeps_no_connection(redis_server, monkeypatch):
    store, made = RedisStore(redis_server.url, 'run', connect=False), []

    def make_and_close(*args):
        made.append(make_client(*args))
        store.close()
        return made[-1]

    monkeypatch.setattr(connection, 'make_client', make_and_close)
    with pytest.raises(StoreClosed):
        store.client.server.connection.connect()
    (client,) = made
    assert [connection._sock for connection in client.connection_pool._available_connections] == [None]


def test_connect_of_a_closed_store_does_not_wait(redis_server, monkeypatch):
    """With TLS that takes some milliseconds, and close() can shut no connection that is not there yet."""
    connect, greet = redis.UnixDomainSocketConnection._connect, ServerGeneration.greet
    connects, is_closed, sent = threading.Event(), threading.Event(), []
    store = RedisStore(redis_server.url, 'run')

    def slowly(connection):
        connects.set()
        assert is_closed.wait(WAIT_S)
        return connect(connection)

    def greeted(generation, connection):
        greet(generation, connection)
        connection.send_command = connection.send_packed_command = refuse

    def refuse(*words, **options):
        sent.append(words)
        raise redis.ConnectionError('too late')

    with ThreadPoolExecutor() as pool:
        first = pool.submit(store.get, 'nothing', timeout_s=WAIT_S)
        with redis_server.client() as client:
            eventually(lambda: client.info('clients')['blocked_clients'], 'it waits, with the only connection')
        monkeypatch.setattr(redis.UnixDomainSocketConnection, '_connect', slowly)
        monkeypatch.setattr(ServerGeneration, 'greet', greeted)
        second = pool.submit(store.get, 'nothing', timeout_s=WAIT_S)
        assert connects.wait(WAIT_S)
        store.close()
        is_closed.set()
        for waiting in (first, second):
            with pytest.raises(StoreClosed):
                waiting.result(WAIT_S)
    assert sent == []


def test_waiting_reader_sees_a_flush_without_a_disconnect(redis_server):
    """It asks for what is behind the number it knows; the new epoch counts from 1."""
    with RedisStore(redis_server.url, 'flushed', **QUICK) as store, RedisStore(redis_server.url, 'flushed') as other:
        reader = Reader(other, STREAM, 'learner')
        for i in range(5):
            store.append(STREAM, {}, chunk(i))
        assert len(reader.read()) == 5
        reader.ack()
        store.append(STREAM, {}, chunk(5))
        assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [5]
        reader.ack()
        store.get('nothing')  # The writer hears of the acks, and lets its copies go.
        store.client.own_writer.check(now=True)
        with redis_server.client() as client:
            client.flushall()
        store.append(STREAM, {}, chunk(6))
        assert read_until(reader, 1) == [6]
        assert reader.cursor.number == 1
        assert reader.num_lost == 0
        store.clear()


class TestDamage:
    @pytest.fixture
    def store(self, redis_server):
        with redis_server.client() as client:
            client.delete(LOG)
        with RedisStore(redis_server.url, 'run') as store:
            store.delete(STREAM)
            yield store
            store.delete(STREAM)

    @staticmethod
    def damage(client, number, change):
        """Put something else where an entry was, under its id, the entries behind it kept."""
        rows = client.xrange(LOG, f'{number}-0')
        for redis_id, _ in rows:
            client.xdel(LOG, redis_id)
        client.delete(LOG)
        for redis_id, fields in rows:
            client.xadd(LOG, change(dict(fields)) if redis_id == rows[0][0] else fields, id=redis_id)

    CHANGES = {
        'payload': lambda fields: {**fields, b'p': fields[b'p'][:-70] + b'\xff' + fields[b'p'][-69:]},
        'truncated': lambda fields: {**fields, b'p': fields[b'p'][:30]},
        'empty': lambda fields: {**fields, b'p': b''},
        'foreign': lambda fields: {b'hello': b'world'},
        'writer': lambda fields: {**fields, b'w': b'\xff\xfe'},
        'sequence': lambda fields: {**fields, b's': b'one'},
    }

    @pytest.mark.parametrize('kind', CHANGES)
    def test_damaged_entry_stops_or_is_skipped(self, redis_server, kind):
        with RedisStore(redis_server.url, 'run') as store, redis_server.client() as client:
            store.delete(STREAM)
            client.delete(LOG)
            stopping, skipping = Reader(store, STREAM, 'stop'), Reader(store, STREAM, 'skip', on_corrupt='skip')
            first = store.append(STREAM, {}, chunk(0)).number
            for i in range(1, 4):
                store.append(STREAM, {}, chunk(i))
            entries = stopping.read(max_entries=1) + skipping.read(max_entries=1)
            assert [number_of(entry) for entry in entries] == [0, 0]
            self.damage(client, first + 1, self.CHANGES[kind])
            for _ in range(2):
                with pytest.raises(CorruptPayload, match=f"entry {first + 1} of 'experience'") as caught:
                    stopping.read()
            assert caught.value.entry_id == (stopping.cursor.epoch, first + 1)
            numbers = [number_of(entry) for _ in range(2) for entry in skipping.read()]
            assert numbers == [2, 3]
            assert (skipping.num_corrupt, skipping.num_lost, skipping.num_duplicates) == (1, 0, 0)
            skipping.ack()
            assert skipping.lag() == 0
            store.delete(STREAM)
            client.delete(LOG)

    def test_foreign_id_between_entries_is_counted_once(self, store, redis_server):
        with redis_server.client() as client:
            reader = Reader(store, STREAM, 'learner', on_corrupt='skip')
            place = store.append(STREAM, {}, chunk(0))
            client.xadd(LOG, {'x': 'y'}, id=f'{place.number}-7')
            assert len(reader.read()) == 1
            assert reader.read() == []
            assert reader.num_corrupt <= 1
            store.append(STREAM, {}, chunk(1))
            assert [number_of(entry) for entry in reader.read()] == [1]

    @pytest.mark.parametrize('is_removed', [False, True])
    @pytest.mark.parametrize('on_corrupt', ['skip', 'stop'])
    def test_foreign_id_above_the_entries_blocks_nothing(self, store, redis_server, on_corrupt, is_removed):
        """One as the server gives it, from its clock, is above all numbers to come: also once it is removed."""
        with redis_server.client() as client, RedisStore(redis_server.url, 'run') as other:
            reader, seen, sizes = Reader(other, STREAM, 'learner', on_corrupt=on_corrupt), [], (8, 50_000)
            for number in range(4):
                store.append(STREAM, {}, chunk(number, sizes[number % 2]))
            seen += [number_of(entry) for entry in reader.read(2)]
            reader.ack()
            foreign = client.xadd(LOG, {'x': 'y'})
            seen += [number_of(entry) for entry in reader.read()]
            if is_removed:
                client.xdel(LOG, foreign)
            elif on_corrupt == 'skip':
                assert reader.read() == []
                reader.ack()
                assert reader.lag() == 0
            else:
                with pytest.raises(CorruptPayload, match=f'entry {foreign.decode()[:-2]} '):
                    reader.read()
            for number in range(4, 8):
                (store, other)[number % 2].append(STREAM, {}, chunk(number, sizes[number % 2]))
            seen += read_until(reader, 4)
            reader.ack()
            assert seen == list(range(8))
            assert (reader.num_lost, reader.num_corrupt) == (0, int(on_corrupt == 'skip' and not is_removed))
            assert store.stream_info(STREAM).pending_bytes == 0

    def test_foreign_id_above_the_versions_of_a_value_blocks_nothing(self, store, redis_server):
        with redis_server.client() as client:
            store.put('weights', {}, {'x': np.zeros(3)})
            client.xadd(store.client.server.keys.of_value('weights')[0], {'x': 'y'})
            assert store.put('weights', {}, {'x': np.ones(3)}) == 2
            assert store.get('weights', 1).arrays['x'][0] == 1

    def test_on_corrupt_with_a_wrong_value_is_refused(self, store):
        with pytest.raises(ConfigError, match='on_corrupt'):
            Reader(store, STREAM, 'learner', on_corrupt='ignore')

    def test_hostile_payloads_are_refused_or_read(self, redis_server):
        """1e5 hostile payloads: random bytes, and changes of real ones, half of them with a right checksum."""
        rng = random.Random(7)
        examples = [wire.encode({'env_step': 3}, {'x': np.arange(6), 'y': np.ones((2, 3), np.float32)})]
        for codec in CODECS.values():
            if importlib.util.find_spec(codec.module):
                examples.append(wire.encode({}, chunk(1, 200), codec.name))
        before, good = rss_bytes(), 0
        for case in range(100_000):
            payload = hostile(rng, examples[case // 4 % len(examples)], case)
            try:
                header, arrays = wire.decode(payload)
            except CorruptPayload:
                continue
            good += 1
            assert isinstance(header, dict)
            assert sum(array.nbytes for array in arrays.values()) <= max(2000, len(payload))
        assert 0 < good < 50_000
        assert rss_bytes() - before < 200_000_000

    def test_random_entries_in_a_stream_are_read_or_refused(self, store, redis_server):
        rng = random.Random(8)
        example = wire.encode({}, chunk(1))
        reader = Reader(store, STREAM, 'learner', on_corrupt='skip')
        total = 2000
        begin = store.append(STREAM, {}, chunk(1)).number
        with redis_server.client() as client:
            pipe = client.pipeline(transaction=False)
            for number in range(begin + 1, begin + total):
                names = rng.sample([b'e', b'w', b's', b'p', rng.randbytes(3)], rng.randint(1, 5))
                fields = {name: rng.randbytes(rng.randint(0, 40)) for name in names}
                if rng.random() < 0.5:
                    fields = {b'e': b'x', b'w': b'w', b's': b'%d' % rng.randint(-5, 5), b'p': hostile(rng, example, 1)}
                pipe.xadd(LOG, fields, id=f'{number}-0')
            pipe.execute()
            deadline = time.monotonic() + 5 * WAIT_S  # each has a warning
            while reader.cursor.number < begin + total - 1:
                assert time.monotonic() < deadline
                reader.read(max_entries=256)
            store.append(STREAM, {}, chunk(2))
            assert read_until(reader, 1) == [2], 'it goes on'
            client.delete(LOG)
        assert reader.num_corrupt > total // 2

    def test_random_places_and_references_are_read_or_refused(self, redis_server, tmp_path):
        """What says where a payload is, half of the places with a right checksum."""
        rng, run, total = random.Random(9), f'elsewhere-{os.getpid()}', 400
        log = LOG.replace('run', run)
        with open_store(redis_server.url, run, host_cache_dir=str(tmp_path)) as store, redis_server.client() as client:
            store.client.server.patience_s = 0.0
            set_patience(store, 0.0)
            reader = Reader(store, STREAM, 'learner', on_corrupt='skip')
            store.append(STREAM, {}, chunk(1))  # The first one goes over the wire.
            begin = store.append(STREAM, {}, chunk(1)).number
            place = parts.Parted(f'ding:{{{run}/experience/0/w}}:1:ab:part:', 1 << 20, 3 << 20).pack()
            examples = [place, client.xrevrange(log, count=1)[0][1][b'p']]
            assert is_reference(examples[1])
            for number in range(begin + 1, begin + total):
                payload = elsewhere(rng, examples[number % 2])
                client.xadd(log, {b'e': b'x', b'w': b'w', b's': b'%d' % number, b'p': payload}, id=f'{number}-0')
            before, deadline = rss_bytes(), time.monotonic() + 5 * WAIT_S
            while reader.cursor.number < begin + total - 1:
                assert time.monotonic() < deadline
                for entry in reader.read(max_entries=256):
                    assert number_of(entry) == 1
            assert reader.num_corrupt > total // 4
            store.put('weights', {}, {'x': np.arange(10_000)})
            value = store.client.server.keys.of_value('weights')[0]
            good = client.xrevrange(value, count=1)[0][1][b'r']
            for number in range(2, total):
                client.xadd(value, {b'r': elsewhere(rng, good)}, id=f'{number}-0', maxlen=1, approximate=False)
                with contextlib.suppress(CorruptPayload, PayloadLost):
                    assert store.get('weights').arrays['x'][-1] == 9_999
            assert rss_bytes() - before < 200_000_000
            client.delete(log)


def elsewhere(rng, example):
    payload = changed(rng, example, rng.randint(1, 2))
    if rng.random() < 0.5:
        payload[4:8] = struct.pack('<I', zlib.crc32(payload[8:]))
    return bytes(payload)


def changed(rng, example, how):
    payload = bytearray(example)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(payload))
        if how == 1:
            payload[start] ^= 1 << rng.randrange(8)
        else:
            payload[start : start + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
    return payload


def hostile(rng, example, case):
    if case % 4 == 0:
        return rng.randbytes(rng.randint(0, 200))
    payload = changed(rng, example, case % 4)
    if case % 2 and len(payload) > 20:
        payload[8:16] = struct.pack('<Q', len(payload))
        payload[4:8] = struct.pack('<I', zlib.crc32(payload[8:]))
    return bytes(payload)


class TestTruncatedLog:
    """A power cut leaves an append-only file without its end."""

    def test_living_writers_resend_lost_entries(self, own_server):
        with RedisStore(own_server.url, 'run', **QUICK) as store, RedisStore(own_server.url, 'run', **QUICK) as other:
            reader = Reader(other, STREAM, 'learner')
            for i in range(20):
                store.append(STREAM, {}, chunk(i))
            seen = [number_of(entry) for entry in reader.read(max_entries=7)]
            own_server.kill()
            (file,) = [one for one in own_server.directory.rglob('*.aof') if one.stat().st_size]
            os.truncate(file, file.stat().st_size * 6 // 10)
            own_server.start()
            store.append(STREAM, {}, chunk(20))
            seen += read_until(reader, 14)
            assert seen == list(range(21))
            assert reader.num_lost == 0


def test_store_is_away_as_soon_as_its_server_dies(own_server):
    with RedisStore(own_server.url, 'run') as store:
        store.put('value', {}, {})
        assert not store.is_away
        own_server.kill()
        assert store.is_away
        own_server.start()
        assert store.is_away, 'nobody has asked since'
        store.put('value', {}, {})
        assert not store.is_away
        with own_server.client() as client:
            client.client_kill_filter(_type='normal', skipme=True)
        eventually(lambda: store.is_away, 'a connection that was closed is noticed')
        assert store.put('value', {}, {}) == 3
        assert not store.is_away
