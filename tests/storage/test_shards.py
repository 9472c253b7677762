"""A run on two servers: where each name is, which processes may use it, and what goes on while one of them is away."""

import contextlib
import itertools
import pickle
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from redis_server import RedisServer, left_by_runs

from ding_store import errors
from ding_store.config import StoreConfig, split_urls
from ding_store.doctor import FAIL, OK
from ding_store.doctor.redis_checks import check_servers
from ding_store.environment import Environment
from ding_store.storage import client as client_module
from ding_store.storage import open_store
from ding_store.storage import store as store_module
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.memory.server import Memory, MemoryServer
from ding_store.storage.protocol import Server
from ding_store.storage.shards.placement import shard_of
from ding_store.storage.shards.server_list import NAME, ServerList
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of
from ding_store.storage.urls import address_of, check_url, names_several, servers_of

_RUNS = (f'shards-{number}' for number in itertools.count())
#: Names on the first and on the second server.
FIRST, SECOND = 's/0', 's/1'
#: One call may take this long while another server is away. With ``reconnect_timeout_s``, it would be 60 s.
DEADLINE_S = 20.0


@pytest.fixture(scope='module')
def servers(redis_binary):
    with RedisServer(redis_binary) as one, RedisServer(redis_binary) as other:
        yield one, other


@pytest.fixture
def run():
    return next(_RUNS)


def url_of(servers):
    return ' '.join(server.url for server in servers)


@pytest.fixture
def second_returns(servers):
    """A test may kill the second server."""
    yield servers[1]
    servers[1].kill()
    servers[1].start()


@contextlib.contextmanager
def in_time():
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < DEADLINE_S


def append_and_read(store, stream, number):
    store.append(stream, {}, chunk(number))
    return [number_of(entry) for entry in store.read(stream)][-1]


# --- placement


def test_place_of_a_name_never_changes():
    names = ('experience', 'progress', 'members', 'finish', 'weights/main', 'experience/schema')
    assert [shard_of(name, 3) for name in names] == [0, 2, 1, 0, 1, 2]
    assert {shard_of(name, 1) for name in names} == {0}


def test_partitions_are_spread_evenly_with_their_values():
    for kind in ('experience', 'progress'):
        assert [shard_of(f'{kind}/{p}', 3) for p in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert shard_of('12', 7) != 12 % 7, 'it is no partition of a stream'
    counts = Counter(shard_of(f'name-{number}', 3) for number in range(3000))
    assert all(900 < count < 1100 for count in counts.values())


def test_names_are_on_their_servers(servers, run):
    with open_store(url_of(servers), run, host_plane='off') as store:
        for name in (FIRST, SECOND):
            store.append(name, {}, chunk(0))
            store.put(name, {}, {})
            store.add(name, 1)
        for number, server in enumerate(servers):
            with server.client() as client:
                name = f's/{number}'
                assert client.smembers(f'ding:{{{run}}}:index') == {
                    f'{kind}:{one}'.encode() for kind, one in (('stream', name), ('value', name), ('value', NAME))
                }
                assert client.hgetall(f'ding:{{{run}}}:counters') == {name.encode(): b'1'}
        info = store.info()
        assert (list(info.streams), info.values, info.counters) == (
            [FIRST, SECOND],
            {FIRST: 1, SECOND: 1},
            {FIRST: 1, SECOND: 1},
        )
        assert info.address == store.address == url_of(servers)


def test_retired_run_leaves_no_key_on_any_server(servers, run):
    with open_store(url_of(servers), run) as store:
        for name in (FIRST, SECOND):
            store.append(name, {}, chunk(0))
            store.put(name, {}, {})
        store.retire(last=(FIRST,))
    for server in servers:
        with server.client() as client:
            assert left_by_runs(client, f'ding:{{{run}*') == []


# --- URLs and the list of servers


@pytest.mark.parametrize(
    ('url', 'servers'),
    [
        ('redis+shards://a:1,b', ['redis://a:1', 'redis://b']),
        (
            'rediss+shards://u:p@a,[::1]:2/3?ssl_ca_certs=f',
            [f'rediss://u:p@{host}/3?ssl_ca_certs=f' for host in ('a', '[::1]:2')],
        ),
        ('redis+shards://a', ['redis://a']),
        ('unix:///a b  redis+sentinel://s,t/m', ['unix:///a b', 'redis+sentinel://s,t/m']),
        ('embedded://my dir', ['embedded://my dir']),
        ('redis://a', ['redis://a']),
    ],
)
def test_url_names_its_servers(url, servers):
    check_url(url)
    assert servers_of(url) == servers
    assert names_several(url) == ('shards' in url or len(servers) > 1)
    assert address_of(url) == ' '.join(map(address_of, servers))
    assert ':p@' not in address_of(url)


@pytest.mark.parametrize(
    ('url', 'error'),
    [
        ('redis://a embedded://x', 'the list of servers has embedded://x. Use only URLs of redis, '),
        ('memory:// redis://a', 'the list of servers has memory://'),
        ('redis+shards://a,,b', 'malformed. Separate the addresses of the servers by commas'),
        ('redis+shards://u:s/t@a,b', 'malformed'),
        ('redis+shards://a,b,a', 'has redis://a twice. Name each server once.'),
        ('redis+shards://a,b?check_every_s=1', 'pass check_every_s as keyword arguments'),
        ('redis+shards://a,b/run', 'names no database'),
    ],
)
def test_bad_list_of_servers_is_refused(url, error):
    with pytest.raises(errors.ConfigError) as caught:
        open_store(url)
    assert error in str(caught.value)
    assert 's/t' not in str(caught.value)


def test_config_has_a_list_of_urls_and_no_password():
    servers = ['redis://a:1', 'redis+sentinel://s,t/m']
    config = StoreConfig.from_block({'url': servers}, environment=Environment())
    assert config.url == 'redis://a:1 redis+sentinel://s,t/m'
    assert split_urls(config.url) == servers
    with pytest.raises(errors.ConfigError, match='store.url has a password'):
        StoreConfig.from_block({'url': ['redis://a:1', 'redis://:secret@b']}, environment=Environment())
    with pytest.raises(errors.ConfigError, match='store.url must be a string'):
        StoreConfig.from_block({'url': [1, 2]}, environment=Environment())
    for url, is_safe in (('redis://:p@a redis://b', False), ('redis://:p@a redis://:p@b', True)):
        with contextlib.nullcontext() if is_safe else pytest.raises(errors.ConfigError, match='allow_pickle'):
            StoreConfig.from_block({'allow_pickle': True}, environment=Environment(url=url))


def test_process_with_another_list_is_refused(servers, run, redis_server):
    one, other, third = (server.url for server in (*servers, redis_server))
    with open_store([one, other], run) as store:
        store.append(FIRST, {}, chunk(0))
        for urls in ([other, one], [one], [other], [one, third], [third, other], [one, other, third]):
            with pytest.raises(errors.ConfigError) as caught:
                open_store(urls, run)
            assert f'run {run!r} is on the servers {one} {other}, and this process names {" ".join(urls)}' in str(
                caught.value
            )
            assert 'in the same order in all processes' in str(caught.value)
        with open_store(f'{one}  {other}', run) as same, pickle.loads(pickle.dumps(same)) as copied:  # noqa: S301
            assert append_and_read(copied, SECOND, 1) == 1
    with redis_server.client() as client:
        assert list(client.scan_iter(f'ding:{{{run}*')) == [], 'a process that was refused writes nothing'


def test_list_is_refused_where_one_server_has_all_names(servers, run):
    with open_store(servers[0].url, run) as store:
        store.append(SECOND, {}, chunk(0))
    with pytest.raises(errors.ConfigError, match=f"run '{run}' has 's/1' on {servers[0].url}, where processes"):
        open_store(url_of(servers), run)


def test_two_first_processes_agree_on_one_list(servers, run):
    """Both found no list when they opened. The second one to write is refused, and writes nothing."""
    with open_store(url_of(servers), run) as one, open_store(url_of(servers[::-1]), run) as other:
        one.put(FIRST, {}, {})
        with pytest.raises(errors.ConfigError, match='is on the servers'):
            other.put(FIRST, {'other': 1}, {})
        assert one.get(FIRST).header == {}


@pytest.mark.parametrize('is_the_same', [True, False])
def test_list_published_during_a_check_is_compared(is_the_same):
    memories = Memory(), Memory()
    ours = [MemoryServer(memory, 'run', 'ours') for memory in memories]
    for server, address in zip(ours, ('redis://a', 'redis://b')):
        server.address = address
    others = [MemoryServer(memory, 'run', 'others') for memory in memories]
    for server, address in zip(others, ('redis://a', 'redis://b' if is_the_same else 'redis://c')):
        server.address = address
    info = ours[0].info

    def publish_first():
        ServerList('run', others).publish(0)
        return info()

    ours[0].info = publish_first
    with contextlib.nullcontext() if is_the_same else pytest.raises(errors.ConfigError, match='redis://c'):
        ServerList('run', ours).check()


def test_looking_at_a_run_leaves_nothing(servers, run):
    with open_store(url_of(servers), run) as store:
        assert store.info().streams == {}
        assert store.get(FIRST) is None
        assert not store.forget(FIRST, 'reader')
    for server in servers:
        with server.client() as client:
            assert list(client.scan_iter(f'ding:{{{run}}}*')) == []


def test_server_that_lost_its_memory_gets_the_list_again(servers, run, second_returns):
    with open_store(url_of(servers), run) as store:
        store.put(SECOND, {}, {})
        second_returns.restart()
        store.put(SECOND, {}, {})  # It connects anew.
        store.put(SECOND, {}, {})
        with second_returns.client() as client:
            assert client.sismember(f'ding:{{{run}}}:index', f'value:{NAME}')


# --- one server away


def test_store_opens_while_one_server_is_away(servers, run, second_returns, caplog):
    with open_store(url_of(servers), run) as store:
        store.append(FIRST, {}, chunk(0))
    second_returns.kill()
    with in_time(), pytest.raises(errors.ConfigError, match='is on the servers'):
        open_store(url_of(servers[::-1]), run, connect_timeout_s=0.1)
    with open_store(url_of(servers), run, connect_timeout_s=0.1) as store, ThreadPoolExecutor() as pool:
        (warning,) = caplog.messages
        assert warning.startswith(f'connect: {second_returns.url} cannot be reached. Start a redis-server there')
        assert warning.endswith('Until it is back, calls for its names wait')
        with in_time():
            assert append_and_read(store, FIRST, 1) == 1
            assert (store.is_away, store.is_away_for(FIRST), store.is_away_for(SECOND)) == (True, False, True)
            with store.nonblocking(), pytest.raises(errors.StoreUnavailable, match=second_returns.url):
                store.add(SECOND, 1)
        waiting = pool.submit(append_and_read, store, SECOND, 2)
        second_returns.start()
        assert waiting.result(WAIT_S) == 2
        assert not store.is_away


def test_run_begins_with_all_of_its_servers(servers, run, second_returns):
    second_returns.kill()
    with in_time(), pytest.raises(errors.StoreUnavailable, match='A run begins with all of its servers') as caught:
        open_store(url_of(servers), run, connect_timeout_s=0.1)
    assert f'{second_returns.url} cannot be reached' in str(caught.value)
    with in_time(), pytest.raises(errors.StoreUnavailable, match='redis://127.0.0.1:1 cannot be reached'):
        open_store('redis://127.0.0.1:1 redis://127.0.0.1:2', run, connect_timeout_s=0.1)


@pytest.mark.parametrize('host_plane', ['auto', 'off'])
def test_calls_go_on_while_another_server_is_away(servers, run, second_returns, host_plane):
    options = {'check_every_s': 0.01, 'max_pending_bytes': 5000, 'host_plane': host_plane}
    with open_store(url_of(servers), run, **options) as store:
        readers = [Reader(store, stream, 'r') for stream in (FIRST, SECOND)]
        for number in range(3):
            store.append(FIRST, {}, chunk(number))
            store.append(SECOND, {}, chunk(number))
        store.put(FIRST, {}, {'x': np.zeros(100_000)})
        store.put(SECOND, {}, {'x': np.zeros(100_000)})
        second_returns.kill()
        with in_time():
            eventually(lambda: store.is_away_for(SECOND), 'it is noticed')
            assert (store.is_away, store.is_away_for(FIRST)) == (True, False)
            for number in range(3, 100):
                store.append(FIRST, {}, chunk(number), timeout_s=WAIT_S)
                assert [number_of(entry) for entry in readers[0].read()][-1] == number
                readers[0].ack(wait=number % 2 == 0)
            assert store.put(FIRST, {}, {}) == 2
            assert store.get(FIRST, newer_than=1).version == 2
            assert store.get(FIRST, newer_than=2, timeout_s=0.1) is None
            assert store.add(FIRST, 1) == 1
            assert store.stream_info(FIRST).last == 100
            assert store.delete(FIRST)
            with store.nonblocking(), pytest.raises(errors.StoreUnavailable, match=second_returns.url):
                store.add(SECOND, 1)
        second_returns.start()
        assert store.add(SECOND, 1) == 1
        numbers = []
        while len(numbers) < 3:  # Its writer sends them again.
            entries = readers[1].read(timeout_s=WAIT_S)
            numbers += [number_of(entry) for entry in entries]
            assert entries
        assert numbers == [0, 1, 2]
        assert not store.is_away


def test_server_returns_for_a_process_that_calls_only_others(servers, run, second_returns):
    """Its entries are sent again, although no call is about them."""
    with open_store(url_of(servers), run, check_every_s=0.05) as store, open_store(url_of(servers), run) as other:
        Reader(other, SECOND, 'r')
        store.append(SECOND, {}, chunk(7))
        second_returns.kill()
        eventually(lambda: store.is_away_for(SECOND), 'it is noticed')
        second_returns.start()

        def is_sent_again():
            store.add(FIRST, 1)
            stream = other.stream_info(SECOND)
            return stream is not None and stream.last == 1

        eventually(is_sent_again, 'it is sent again')


def test_close_without_one_server_sends_the_rest(servers, run, second_returns, caplog, monkeypatch):
    for module in (client_module, store_module):
        monkeypatch.setattr(module, 'LEAVE_S', 0.2)
    store = open_store(url_of(servers), run, host_plane='off')
    with open_store(url_of(servers), run) as other:
        readers = [Reader(other, stream, 'r') for stream in (FIRST, SECOND)]
        for stream in (FIRST, SECOND):
            store.append(stream, {}, chunk(1))
        with servers[0].client() as client:
            client.flushall()
        second_returns.kill()
        with in_time():
            store.close()
        assert [number_of(entry) for entry in readers[0].read()] == [1]
        assert f'closed with 1 unacked entries of {SECOND!r} while the server is unreachable' in caplog.text
        second_returns.start()


# --- commands that concern several servers


@pytest.mark.parametrize('names', [(FIRST, 'p/0'), (FIRST, 'p/1')])
def test_advance_waits_for_no_server(servers, run, names, monkeypatch):
    stream, value = names
    with open_store(url_of(servers), run) as store:
        reader = Reader(store, stream, 'r')
        places = [store.append(stream, {}, chunk(number)) for number in range(4)]
        assert len(reader.read()) == 4
        reader.advance(places[0], value, {'at': 0})
        store.flush()
        for server in servers:
            server.signal(signal.SIGSTOP)  # It cannot reply.
        try:
            with in_time():
                reader.advance(places[1], value, {'at': 1})
        finally:
            for server in servers:
                server.signal(signal.SIGCONT)
        store.flush()
        assert (store.get(value).header, store.stream_info(stream).readers) == ({'at': 1}, {'r': 2})
        reader.advance(places[2], value, {'at': 2})
        reader.advance(places[3], value, {'at': 3, 'text': 'x' * 2_000_000})
        assert (store.get(value).header['at'], store.stream_info(stream).readers) == (3, {'r': 4})


def test_advance_is_sent_again_after_a_lost_reply(servers, run, second_returns):
    with open_store(url_of(servers), run) as store, open_store(url_of(servers), run) as other:
        reader = Reader(store, FIRST, 'r')
        places = [store.append(FIRST, {}, chunk(number)) for number in range(2)]
        reader.advance(places[0], 'p/1', {'at': 0})
        store.flush()
        second_returns.signal(signal.SIGSTOP)
        reader.advance(places[1], 'p/1', {'at': 1})
        second_returns.restart()
        store.flush()
        assert other.get('p/1').header == {'at': 1}
        assert other.stream_info(FIRST).readers == {'r': 2}


def test_flush_raises_after_all_servers_were_flushed(servers, run):
    class Broken(errors.StoreError):
        pass

    with open_store(url_of(servers), run) as store:
        one, other = store.client.server._servers
        calls = []

        def broken():
            calls.append('one')
            raise Broken

        one.flush, other.flush = broken, lambda: calls.append('other')
        with pytest.raises(Broken):
            store.flush()
        assert calls == ['one', 'other']


def test_backfills_of_both_servers_arrive(servers, run, tmp_path):
    """A process has a thread for each server, which waits for requests of readers on other hosts."""
    with (
        open_store(url_of(servers), run, host_cache_dir=str(tmp_path / 'a')) as store,
        open_store(url_of(servers), run, host_cache_dir=str(tmp_path / 'b')) as far,
    ):
        for stream in (FIRST, SECOND):
            Reader(store, stream, 'near')
            store.append(stream, {}, chunk(0))
            for number in (1, 2):
                store.append(stream, {}, chunk(number))
            store.put(stream, {}, {'x': np.arange(100_000)})
        assert len(store._streams._keepers) == len(store._values._fillers) == 2
        for stream in (FIRST, SECOND):
            reader = Reader(far, stream, 'far')
            numbers = []
            while len(numbers) < 3:
                numbers += [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)]
            assert numbers == [0, 1, 2]
            assert far.get(stream, timeout_s=WAIT_S).arrays['x'][-1] == 99_999


def test_wait_for_names_of_both_servers_sees_either(servers, run):
    with open_store(url_of(servers), run) as store:
        server: Server = store.client.server
        for name in (FIRST, SECOND):
            server.put(name, None, b'x' * 44)
        known = server.wait_for_requests({FIRST: '', SECOND: ''}, 0.01)
        for name in (FIRST, SECOND):
            server.request_version(name)
            now = server.wait_for_requests(known, 0.2)
            assert {one for one in now if now[one] != known[one]} == {name}
            known = now
        thread = threading.Thread(target=server.wait_for_transports, args=({FIRST: 99, SECOND: 99}, 0.1))
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_versions_continue_on_each_server(servers, run):
    with open_store(url_of(servers), run) as store:
        for name in (FIRST, SECOND):
            store.set_start_version(name, 41)
            assert store.put(name, {}, {}) == 42
            assert store.decide(f'd/{name[-1]}', {}) == 1
            assert store.uphold(f'd/{name[-1]}')


def test_lost_decision_is_upheld_by_the_generation_of_its_server(servers, run, second_returns):
    with open_store(url_of(servers), run) as store:
        store.decide(SECOND, {'is': 'decided'}, 0)
        second_returns.restart()
        assert store.uphold(SECOND)
        assert store.get(SECOND).header == {'is': 'decided'}
        store.delete(SECOND)
        assert not store.uphold(SECOND), 'it was deleted, and its server has lost nothing'


# --- doctor


def test_doctor_checks_each_server_and_the_list(servers, run, second_returns):
    url = url_of(servers)
    _, store, *found = check_servers(url, run)
    assert [one.status for one in (store, *found)] == [OK, OK, OK]
    assert [one.name for one in found] == ['server', 'server']
    assert found[1].found.startswith(f'2 of 2, {servers[1].url}: redis 6.2')
    with open_store(url, run) as used:
        used.put(FIRST, {}, {})
    _, store, *found = check_servers(url_of(servers[::-1]), run)
    assert (store.status, store.fix) == (
        FAIL,
        'use the URLs of the other processes, in their order: see docs/howto/shards.md',
    )
    assert [one.status for one in found] == [OK, OK]
