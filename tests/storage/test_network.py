"""Connections that are cut, slow or silent: no entry twice, none missing, and every wait has an end."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from proxy import DOWN, UP, Proxy

from ding_store.errors import StoreTimeout, StoreUnavailable
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

STREAM = 'experience'
#: A silent connection is given up early, so that partitions need not be long.
QUICK = {'socket_timeout_s': 0.4, 'check_every_s': 0.2}


@pytest.fixture
def proxy(forgetful_server):
    with Proxy(forgetful_server.socket) as proxy:
        yield proxy


def write(store, numbers, size=8):
    for number in numbers:
        store.append(STREAM, {}, chunk(number, size))


def read_all(reader, total, seen):
    deadline = time.monotonic() + 2 * WAIT_S
    while len(seen) < total and time.monotonic() < deadline:
        seen.extend(number_of(entry) for entry in reader.read(16, timeout_s=1.0))
        reader.ack()
    return seen


def test_append_cut_at_any_byte_arrives_once(forgetful_server, proxy):
    """Before the command, in its middle, between command and reply, in the middle of the reply."""
    with RedisStore(proxy.url(), 'run', **QUICK) as store, RedisStore(forgetful_server.url, 'run') as other:
        reader = Reader(other, STREAM, 'learner')
        write(store, range(2))
        sent = proxy.num_bytes[UP]
        write(store, [2])
        num_bytes = proxy.num_bytes[UP] - sent
        cuts = [(UP, at) for at in range(1, num_bytes + 1, 61)] + [(DOWN, at) for at in range(1, 60, 7)]
        for number, (direction, at) in enumerate(cuts, 3):
            proxy.cut_after(at, direction)
            write(store, [number])
        total = 3 + len(cuts)
        assert read_all(reader, total, []) == list(range(total))
        assert (reader.num_lost, reader.num_duplicates) == (0, 0)
        assert proxy.num_connections > len(cuts) // 2


def test_ack_without_a_wait_is_sent_again(forgetful_server, proxy):
    """Cut at any byte of it or of its reply, by the read that follows: else the stream stays full for ever."""
    with RedisStore(proxy.url(), 'run', **QUICK) as store, RedisStore(forgetful_server.url, 'run') as other:
        reader = Reader(store, STREAM, 'learner')
        for number in range(2):
            write(other, [number])
            reader.read()
            sent = proxy.num_bytes[UP]
            reader.ack()
        cuts = [(UP, at) for at in range(1, proxy.num_bytes[UP] - sent, 61)] + [(DOWN, 1), (DOWN, 3)]
        for number, (direction, at) in enumerate(cuts, 2):
            write(other, [number])
            assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [number]
            proxy.cut_after(at, direction)
            reader.ack(wait=False)
            assert reader.read() == []
            stream = other.stream_info(STREAM)
            assert stream.floor == stream.last == number + 1
        assert (reader.num_lost, reader.num_duplicates) == (0, 0)
        assert proxy.num_cuts == len(cuts) > 5


def test_put_with_a_cut_reply_creates_one_version(proxy):
    with RedisStore(proxy.url(), 'run', **QUICK) as store:
        store.put('v', {}, {})
        for version, at in enumerate((1, 3, 7), 2):
            proxy.cut_after(at, DOWN)
            assert store.put('v', {'version': version}, {}) == version
            assert store.get('v').header == {'version': version}
        assert proxy.num_cuts == 3


def test_close_does_not_wait_for_an_absent_server(forgetful_server, proxy):
    with RedisStore(proxy.url(), 'run', **QUICK) as store, RedisStore(forgetful_server.url, 'run') as other:
        reader = Reader(store, STREAM, 'learner')
        write(other, [0])
        reader.read()
        proxy.black_hole()
        reader.ack(wait=False)
        store.close()
        proxy.heal()
        assert len(other.read(STREAM, other.register(STREAM, 'learner'))) in (0, 1)


@pytest.mark.parametrize(('size', 'total'), [(300, 600), (400_000, 40)])
def test_cuts_in_any_command_lose_nothing(proxy, size, total):
    """Reader and writer on the same bad network; payloads below and above the size that travels in parts."""
    random = np.random.default_rng(5)
    done = threading.Event()

    def cut():
        while not done.is_set():
            before = proxy.num_cuts  # Read first: the cut may come at once.
            # On average some connections' greetings long: else nobody ever gets to the point.
            proxy.cut_after(int(random.integers(1, max(60_000, size * 30))), (UP, DOWN)[int(random.integers(2))])
            while proxy.num_cuts == before and not done.wait(0.01):
                pass

    with RedisStore(proxy.url(), 'run') as store, RedisStore(proxy.url(), 'run') as other, ThreadPoolExecutor() as pool:
        reader = Reader(other, STREAM, 'learner')
        cutting = pool.submit(cut)
        try:
            seen = []
            while proxy.num_cuts < 8 and len(seen) < 50 * total:  # where cuts come is drawn: some rounds see few
                count = len(seen) + total
                writing = pool.submit(write, store, range(len(seen), count), size)
                read_all(reader, count, seen)
                writing.result(WAIT_S)
        finally:
            done.set()
        cutting.result(WAIT_S)
    assert seen == list(range(count))
    assert reader.num_lost == 0
    assert proxy.num_cuts >= 8


def test_writer_waits_until_a_partition_ends(forgetful_server, proxy):
    """Silence for several socket timeouts: the writer goes on when it ends, and the swallowed append counts once."""
    with RedisStore(proxy.url(), 'run', **QUICK) as store, RedisStore(forgetful_server.url, 'run') as other:
        reader = Reader(other, STREAM, 'learner')
        write(store, range(3))
        proxy.black_hole()
        with ThreadPoolExecutor() as pool:
            writing = pool.submit(write, store, range(3, 6))
            # Sent more than once into the silence: a new connection after every timeout.
            before = proxy.num_connections
            eventually(lambda: proxy.num_connections >= before + 3, 'the writer tries again')
            assert not writing.done()
            proxy.heal()
            writing.result(WAIT_S)
        assert read_all(reader, 6, []) == list(range(6))
        assert (reader.num_lost, reader.num_duplicates) == (0, 0)


def test_reader_waits_until_a_partition_ends(forgetful_server, proxy):
    with RedisStore(proxy.url(), 'run', **QUICK) as store, RedisStore(forgetful_server.url, 'run') as other:
        reader = Reader(store, STREAM, 'learner')
        write(other, range(3))
        assert len(reader.read()) == 3
        proxy.black_hole()
        write(other, range(3, 6))
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(read_all, reader, 3, [])
            before = proxy.num_connections
            eventually(lambda: proxy.num_connections >= before + 2, 'the reader tries again')
            proxy.heal()
            assert reading.result(WAIT_S) == [3, 4, 5]
        assert (reader.num_lost, reader.num_duplicates) == (0, 0)


def test_partition_longer_than_the_timeout_raises(proxy):
    with RedisStore(proxy.url(), 'run', reconnect_timeout_s=0.5, **QUICK) as store:
        write(store, [0])
        proxy.black_hole()
        for call in (lambda: write(store, [1]), lambda: store.get('weights'), lambda: store.read(STREAM)):
            begin = time.monotonic()
            with pytest.raises(StoreUnavailable, match=str(proxy.port)):
                call()
            # Noticed after one socket timeout, then the patience, and the last try's own timeout: less than 2 s.
            assert time.monotonic() - begin < WAIT_S / 2
        proxy.heal()
        # The append whose fate was unknown was kept: it comes before the next.
        write(store, [2])
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1, 2]


def test_waits_end_without_any_reply(proxy):
    with RedisStore(proxy.url(), 'run', reconnect_timeout_s=0.3, max_pending_bytes=2000, **QUICK) as store:
        write(store, [0], 150)
        with pytest.raises(StoreTimeout):
            store.append(STREAM, {}, chunk(1, 150), timeout_s=0.1)
        proxy.black_hole()
        for call in (
            lambda: store.read('other', timeout_s=0.2),
            lambda: store.get('weights', timeout_s=0.2),
            lambda: store.append(STREAM, {}, chunk(1, 150), timeout_s=0.2),
        ):
            begin = time.monotonic()
            with pytest.raises((StoreUnavailable, StoreTimeout)):
                call()
            assert time.monotonic() - begin < WAIT_S / 2
        begin = time.monotonic()
        store.close()
        assert time.monotonic() - begin < WAIT_S / 2  # a few round trips, not a time-out


def test_latency_of_100_ms_costs_round_trips_only(forgetful_server, proxy):
    proxy.latency_s = 0.05  # each way
    with RedisStore(proxy.url(), 'run') as store, RedisStore(forgetful_server.url, 'run') as other:
        assert proxy.num_round_trips < 15
        write(store, [0])  # Loads the scripts.
        before, begin = proxy.num_round_trips, time.monotonic()
        write(store, range(1, 6))
        assert proxy.num_round_trips - before == 5, 'one each'
        assert time.monotonic() - begin >= 5 * 0.1
        with ThreadPoolExecutor() as pool:
            reader = Reader(store, STREAM, 'learner')
            assert read_all(reader, 6, []) == list(range(6))
            waiting = pool.submit(reader.read, 16, WAIT_S)
            begin = time.monotonic()
            write(other, [6])
            assert [number_of(entry) for entry in waiting.result(WAIT_S)] == [6]
            assert time.monotonic() - begin < WAIT_S / 2  # a few round trips, not a time-out


def test_slow_connection_is_not_taken_for_lost(forgetful_server, proxy):
    """A payload whose way takes longer than the socket timeout arrives at once, as no part of it does."""
    proxy.bytes_per_s = 5_000_000
    slow = RedisStore(proxy.url(), 'run', socket_timeout_s=1.5, check_every_s=0.5)
    with slow as store, RedisStore(forgetful_server.url, 'run') as other:
        connections = proxy.num_connections
        store.append(STREAM, {}, {'x': np.arange(1_200_000)})
        (entry,) = other.read(STREAM)
        assert entry.arrays['x'][-1] == 1_199_999
        (entry,) = store.read(STREAM)
        assert entry.arrays['x'][-1] == 1_199_999
        assert proxy.num_connections <= connections + 1  # one for scripts, one for the rest: none was made anew
