"""kill -9 of servers, writers and readers: every entry is seen once, none torn, and who restarts goes on."""

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from needs import IS_LONG
from processes import child

from ding_store.errors import StoreClosed, StoreUnavailable
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.shared_memory import rings
from ding_store.storage.shared_memory.mapped_files import PAGE
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

STREAM = 'experience'


@pytest.fixture(params=['own_server', 'forgetful_server'])
def mortal_server(request):
    return request.getfixturevalue(request.param)


def test_kill_of_the_server_loses_nothing_of_living_processes(mortal_server):
    total, writers = 400, 2
    seen = []
    enough = [threading.Event() for _ in range(4)]

    def write(number):
        with RedisStore(mortal_server.url, 'run') as store:
            for i in range(total):
                store.append(STREAM, {}, chunk(i * writers + number))
            done.wait(WAIT_S)  # A writer that leaves takes its copies along.

    def read():
        with RedisStore(mortal_server.url, 'run') as store:
            reader = Reader(store, STREAM, 'learner')
            while len(seen) < total * writers:
                seen.extend(number_of(entry) for entry in reader.read(16, timeout_s=WAIT_S))
                if random.random() < 0.3:
                    reader.ack()
                for i, event in enumerate(enough):
                    if len(seen) >= (i + 1) * 120:
                        event.set()
            reader.ack()
            return reader

    done = threading.Event()
    with ThreadPoolExecutor() as pool:
        threads = [pool.submit(write, number) for number in range(writers)]
        reading = pool.submit(read)
        try:
            for event in enough:
                assert event.wait(WAIT_S), len(seen)
                mortal_server.restart()
            reader = reading.result(WAIT_S)
        finally:
            done.set()
        for thread in threads:
            thread.result(WAIT_S)
    assert sorted(seen) == list(range(total * writers))
    for number in range(writers):
        mine = [one for one in seen if one % writers == number]
        assert mine == sorted(mine)
    assert reader.num_lost == 0


def test_idle_writer_resends_after_a_restart(forgetful_server):
    with RedisStore(forgetful_server.url, 'run') as store, RedisStore(forgetful_server.url, 'run') as other:
        for i in range(3):
            store.append(STREAM, {}, chunk(i))
        forgetful_server.restart()
        store.get('weights')  # Whatever it does next.
        assert [number_of(entry) for entry in other.read(STREAM)] == [0, 1, 2]


def test_reader_that_waits_survives_a_restart(forgetful_server):
    with RedisStore(forgetful_server.url, 'run') as store, RedisStore(forgetful_server.url, 'run') as other:
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(store.read, STREAM, timeout_s=WAIT_S)
            forgetful_server.restart()
            other.append(STREAM, {}, chunk(5))
            assert [number_of(entry) for entry in waiting.result(WAIT_S)] == [5]


def test_durable_server_keeps_entries_of_dead_writers(own_server):
    with RedisStore(own_server.url, 'run') as store:
        store.put('weights', {}, chunk(1))
        for i in range(5):
            place = store.append(STREAM, {}, chunk(i))
    own_server.restart()
    with RedisStore(own_server.url, 'run') as store:
        reader = Reader(store, STREAM, 'learner')
        assert [number_of(entry) for entry in reader.read()] == [0, 1, 2, 3, 4]
        assert store.get('weights').version == 1
        # Another life of the server: it cannot know itself whether it kept everything.
        assert reader.cursor.epoch != place.epoch
        assert store.append(STREAM, {}, chunk(5)) == (reader.cursor.epoch, 6)
        assert [number_of(entry) for entry in reader.read()] == [5]


def test_restarted_durable_server_repeats_no_entry_to_readers(own_server):
    with RedisStore(own_server.url, 'run') as store:
        reader = Reader(store, STREAM, 'learner')
        for i in range(5):
            store.append(STREAM, {}, chunk(i))
        assert len(reader.read()) == 5
        own_server.restart()
        assert store.append(STREAM, {}, chunk(5)).number == 6
        assert [number_of(entry) for entry in reader.read()] == [5]
        assert (reader.num_duplicates, reader.num_lost) == (5, 0)


def test_append_while_the_server_stays_away_is_kept(forgetful_server):
    with RedisStore(forgetful_server.url, 'run', reconnect_timeout_s=0.2) as store:
        store.append(STREAM, {}, chunk(0))
        forgetful_server.kill()
        with pytest.raises(StoreUnavailable, match='redis.sock'):
            store.append(STREAM, {}, chunk(1))
        with pytest.raises(StoreUnavailable):
            store.get('weights')
        forgetful_server.start()
        # What was not confirmed is kept, and comes before anything new.
        store.append(STREAM, {}, chunk(2))
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1, 2]


@pytest.mark.parametrize('first', ['an append', 'nothing'])
def test_append_without_a_server_is_kept_whatever_comes_first(forgetful_server, first):
    """It may look after other streams, or tell the list of names: what it says of the entry is the same."""
    with RedisStore(forgetful_server.url, 'run', reconnect_timeout_s=0.2, check_every_s=0.001) as store:
        if first == 'an append':
            store.append(STREAM, {}, chunk(0))
        forgetful_server.kill()
        for number in (1, 2):
            with pytest.raises(StoreUnavailable):
                store.append(STREAM, {}, chunk(number))
        forgetful_server.start()
        store.flush()
        assert [number_of(entry) for entry in store.read(STREAM)] == ([0, 1, 2] if first == 'an append' else [1, 2])
        assert list(store.info().streams) == [STREAM]


def test_append_without_a_server_and_ring_space_is_kept(own_server, tmp_path, monkeypatch):
    monkeypatch.setattr(rings, 'FIRST_BYTES', PAGE)
    options = dict(host_cache_dir=str(tmp_path), reconnect_timeout_s=0.2)
    with open_store(own_server.url, 'run', **options) as store, open_store(own_server.url, 'run', **options) as other:
        reader = Reader(other, STREAM, 'learner')
        store.append(STREAM, {}, chunk(0))
        for number in range(1, 5):
            store.append(STREAM, {}, chunk(number, 300))
        own_server.kill()
        for number in range(5, 9):
            with pytest.raises(StoreUnavailable):
                store.append(STREAM, {}, chunk(number, 300))
        own_server.start()
        store.flush()
        assert [number_of(entry) for entry in reader.read()] == list(range(9))
        reader.ack()


def test_close_ends_the_wait_for_a_server(forgetful_server):
    store = RedisStore(forgetful_server.url, 'run')
    forgetful_server.kill()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.get, 'weights', 0, WAIT_S * 2)
        eventually(lambda: store.client.server.connection._session is None, 'the loss is noticed')
        store.close()
        with pytest.raises(StoreClosed):
            waiting.result(WAIT_S)


def test_kill_of_writers_tears_and_doubles_nothing(redis_server):
    run, num_kills = f'writers-{os.getpid()}', 100 if IS_LONG else 30

    def write(pipe):
        with RedisStore(redis_server.url, run) as store:
            for i in range(100_000):
                store.append(STREAM, {}, chunk(i, size=2000))

    with RedisStore(redis_server.url, run) as store:
        reader = Reader(store, STREAM, 'learner')
        sequences = {}
        for _ in range(num_kills):
            with child(write):
                upto, count = random.randint(1, 60), 0
                before = set(sequences)
                while count < upto:
                    entries = reader.read(8, timeout_s=WAIT_S)
                    assert entries, 'the writer stopped'
                    count += sum(entry.writer not in before for entry in entries)  # Not what the last one left.
                    self_check(entries, sequences)
                    reader.ack()
        while entries := reader.read():
            self_check(entries, sequences)
        reader.ack()
        assert len(sequences) == num_kills
        assert (reader.num_lost, reader.num_duplicates, reader.lag()) == (0, 0, 0)
        assert store.info().streams[STREAM].pending_bytes == 0
        store.delete(STREAM)


def self_check(entries, sequences):
    for entry in entries:
        assert entry.sequence == sequences.get(entry.writer, 0) + 1
        assert number_of(entry) == entry.sequence - 1
        sequences[entry.writer] = entry.sequence


def test_killed_reader_continues_after_its_ack(redis_server):
    run = f'readers-{os.getpid()}'
    total = 120

    def read(pipe):
        with RedisStore(redis_server.url, run) as store:
            reader = Reader(store, STREAM, 'learner')
            while True:
                entries = reader.read(3, timeout_s=0.01)
                print('read', *map(number_of, entries), file=pipe)
                reader.ack()
                print('acked', *map(number_of, entries), file=pipe)

    seen, acked = [], set()
    with RedisStore(redis_server.url, run) as store:
        store.register(STREAM, 'learner')
        for i in range(total):
            store.append(STREAM, {}, chunk(i))
        while store.register(STREAM, 'learner').number < total:
            with child(read) as (pid, pipe):
                again = set()
                said = [pipe.readline() for _ in range(random.randint(2, 30))]
                os.kill(pid, signal.SIGKILL)
                for line in [*said, *pipe]:  # up to its last word: it may be ahead of what we have read
                    word, *numbers = line.split()
                    if word == 'read':
                        again |= acked & {int(number) for number in numbers}
                        seen += map(int, numbers)
                    else:
                        acked |= {int(number) for number in numbers}
                assert not again
        assert sorted(set(seen)) == list(range(total))
        assert store.register(STREAM, 'learner').number == total
