"""Opening stores: URLs, options, other processes, and servers that will not do."""

import contextlib
import http.server
import multiprocessing
import os
import pickle
import re
import socketserver
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis_server import RedisServer

import ding_store.storage
from ding_store import errors
from ding_store.storage import open_store
from ding_store.storage.base import OLDEST
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.memory.store import MemoryStore
from ding_store.storage.protocol import GONE, WAITING
from ding_store.storage.redis import resp
from ding_store.storage.redis.replies import ReplyKind, code_of, meaning_of
from ding_store.storage.redis.server_checks import examine
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, FaultyStore, chunk, number_of
from ding_store.storage.urls import SentinelUrl, address_of, check_url


def copied(store):
    return pickle.loads(pickle.dumps(store))  # noqa: S301 our own bytes


def test_importing_storage_imports_no_backend():
    code = (
        'import sys, ding_store.storage, ding_store.storage.memory.store, ding_store.storage.exactly_once.reader\n'
        'print([m for m in ("redis", "torch", "ding", "treetensor", "hypothesis", "pytest") if m in sys.modules])'
    )
    assert subprocess.check_output([sys.executable, '-c', code], text=True).strip() == '[]'


def test_storage_all_is_complete():
    for name in ding_store.storage.__all__:
        assert getattr(ding_store.storage, name) is not None
    with pytest.raises(AttributeError):
        ding_store.storage.nothing  # noqa: B018


#: Options of redis-py, which takes most of them out of a URL; and some of its own.
PY_OPTIONS = (
    'decode_responses=True',
    'socket_timeout=1',
    'protocol=3',
    'max_connections=1',
    'encoding=latin1',
    'parser_class=x',
    'redis_connect_func=x',
    'retry_on_timeout=1',
    'health_check_interval=1',
    'ssl_certfile=x',
)


@pytest.mark.parametrize(
    ('url', 'match'),
    [
        ('redis+sentinel://h', 'names no primary'),
        ('rediss+sentinel://h,i:1/', 'names no primary'),
        ('redis+sentinel://h/a/b', 'names no primary'),
        ('redis+sentinel://h,/m', 'Separate the addresses'),
        ('redis+sentinel://h:port/m', 'Separate the addresses'),
        ('redis+sentinel://user:secret@h;i/m', 'Separate the addresses'),
        ('redis+sentinel://:secret/x@h/m', 'percent-encode'),
        ('redis+sentinel://h/m?db=x', 'names no database.*mymaster'),
        ('redis+sentinel://h/m?ssl_certfile=x', 'malformed'),
        ('redis+sentinel://h/m?reconnect_timeout_s=1', 'keyword'),
        ('redis+cluster://h,', 'Separate the addresses of the nodes'),
        ('redis+cluster://user:secret@h;i', 'Separate the addresses of the nodes'),
        ('rediss+cluster://:secret/x@h', 'percent-encode'),
        ('redis+cluster://h/0', 'names a database. A cluster has only one'),
        ('redis+cluster://h?db=1', 'names a database'),
        ('redis+cluster://h?ssl_certfile=x', 'malformed'),
        ('redis+cluster://h?reconnect_timeout_s=1', 'keyword'),
        ('redis+clusters://h', r'did you mean redis\+cluster://'),
        ('reds://user:secret@h', r'did you mean redis(s)?://'),
        ('localhost:6379', 'redis://localhost:6379'),
        ('', 'known are'),
        ('redis://h?overflow=block', 'keyword'),
        ('redis://h:port', 'malformed'),
        ('redis://h?nonsense=1', 'malformed'),
        ('memory://somewhere', 'no address'),
        ('redis://h/x', 'names no database'),
        ('redis://h/1/2', 'names no database'),
        ('redis://h/-1', 'names no database'),
        ('redis://h/0?db=1', 'names no database'),
        ('redis://h?db=x', 'names no database'),
        ('unix:///s.sock?db=', 'names no database'),
        ('redis://h/0#1', 'percent-encode'),
        ('unix:///a#b.sock', 'percent-encode'),
        *((f'redis://h?{rest}', 'query.*malformed.*client_name') for rest in PY_OPTIONS),
    ],
)
def test_urls_that_are_invalid_are_refused(url, match):
    with pytest.raises(errors.ConfigError, match=match) as caught:
        open_store(url)
    assert 'secret' not in str(caught.value)


@pytest.mark.parametrize('run', ['', 'a/b', 'a{b}', 'a:b', '..', None])
def test_run_names_that_are_invalid_are_refused(run):
    for url in ('memory://', 'redis://localhost'):
        with pytest.raises(errors.ConfigError, match='run name'):
            open_store(url, run)


@pytest.mark.parametrize(
    ('options', 'match'),
    [
        ({'reconect_timeout_s': 1}, "did you mean 'reconnect_timeout_s'"),
        ({'reconnect_timeout_s': -1}, 'reconnect_timeout_s'),
        ({'stream_options': {'s': {'overflo': 1}}}, 'overflo'),
        ({'stream_options': {'s': {'overflow': 'sometimes'}}}, 'overflow'),
        ({'stream_options': {'a b': {}}}, 'stream name'),
        ({'max_block_s': -1}, 'max_block_s'),
        ({'max_block_s': None}, 'max_block_s .None. must be a number'),
        ({'check_every_s': None}, 'check_every_s .None. must be a number'),
        ({'reconnect_timeout_s': '60'}, "reconnect_timeout_s .'60'. must be a number"),
        ({'stream_options': {'s': 3}}, 'stream_options .*must map names'),
        ({'host_cache_dir': 5}, 'host_cache_dir .5. must be a path'),
    ],
)
def test_options_that_are_invalid_are_refused(options, match):
    with pytest.raises(errors.ConfigError, match=match):
        open_store('redis://localhost', **options)


@contextlib.contextmanager
def fake_server(info):
    """Says this to each INFO, and OK to all else."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while line := self.rfile.readline():
                words = [self.rfile.readline() and self.rfile.readline().strip() for _ in range(int(line[1:]))]
                text = info.encode()
                self.wfile.write(b'$%d\r\n%b\r\n' % (len(text), text) if words[0] == b'INFO' else b'+OK\r\n')

    with socketserver.ThreadingTCPServer(('127.0.0.1', 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f'redis://127.0.0.1:{server.server_address[1]}'
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ('info', 'match'),
    [
        ('role:master', '6.2 is needed'),
        ('redis_version:unstable', '6.2 is needed'),
        ('redis_version:7.2.4\r\nredis_mode:sentinel', r'Sentinel.*Use redis\+sentinel://HOST:PORT/NAME'),
    ],
)
def test_other_server_is_refused_by_name(info, match):
    with fake_server(info) as url, pytest.raises(errors.StoreUnsuitable, match=match):
        open_store(url)


def test_another_program_is_no_redis_server(tmp_path):
    with http.server.HTTPServer(('127.0.0.1', 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            with pytest.raises(errors.StoreUnsuitable, match='no Redis server'):
                open_store(f'redis://127.0.0.1:{server.server_address[1]}')
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ('url', 'hosts', 'server'),
    [
        ('redis+sentinel://a,b:1/m', ['a:26379', 'b:1'], 'redis://10.0.0.1:6379'),
        ('rediss+sentinel://u:p%40@[::1]:5,b/m?db=1', ['[::1]:5', 'b:26379'], 'rediss://u:p%40@10.0.0.1:6379?db=1'),
    ],
)
def test_sentinel_url_names_sentinels_and_server(url, hosts, server):
    check_url(url)
    parts = SentinelUrl.parse(url)
    assert (list(parts.hosts), parts.primary) == (hosts, 'm')
    assert parts.server_url('10.0.0.1', 6379) == server
    assert parts.server_url('fe80::1', 7).endswith('[fe80::1]:7' + server.partition('6379')[2])


def test_sentinel_url_has_defaults_for_hung_primaries():
    def timeouts(url, **options):
        with RedisStore(url, connect=False, **options) as store:
            return store.client.server.connection._options.socket_timeout_s, store.client.check_every_s

    assert timeouts('redis://h') == (10.0, 5.0)
    assert timeouts('redis+sentinel://h/m') == (3.0, 2.0)
    assert timeouts('rediss+sentinel://h/m', socket_timeout_s=4.0, check_every_s=1.0) == (4.0, 1.0)


def test_database_that_does_not_exist_is_refused(forgetful_server):
    with pytest.raises(errors.ConfigError, match='no such database.*databases'):
        open_store(f'{forgetful_server.url}?db=99')


def test_address_without_a_server_is_refused():
    for url in ('redis://user:secret@127.0.0.1:1/0', 'unix:///nowhere/redis.sock'):
        with pytest.raises(errors.StoreUnavailable, match='Start a redis-server') as caught:
            open_store(url, connect_timeout_s=0)
        assert 'secret' not in str(caught.value)
        assert address_of(url) in str(caught.value)


def test_missing_package_names_the_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'redis', None)
    monkeypatch.delitem(sys.modules, 'ding_store.storage.redis.store')
    monkeypatch.delitem(sys.modules, 'ding_store.storage.redis.server')
    monkeypatch.delitem(sys.modules, 'ding_store.storage.redis.connection')
    with pytest.raises(errors.ConfigError, match='pip install'):
        open_store('redis://localhost')


def test_server_with_a_password_denies_access_without_it(redis_binary):
    with RedisServer(redis_binary, '--requirepass', 'secret') as server:
        for url in (server.url, f'unix://:wrong@{server.socket}'):
            with pytest.raises(errors.StoreDenied, match='denies access') as caught:
                open_store(url)
            assert 'wrong' not in str(caught.value)
            assert 'DING_STORE_URL' in str(caught.value)
        with open_store(f'unix://:secret@{server.socket}') as store:
            assert store.add('n', 1) == 1
            assert 'secret' not in store.info().address


def test_user_without_a_right_is_refused(forgetful_server):
    with forgetful_server.client() as client:
        client.acl_setuser('guest', enabled=True, nopass=True, keys='*', commands=['+info', '+ping'])
    with open_store(f'unix://guest@{forgetful_server.socket}') as store:
        with pytest.raises(errors.StoreDenied, match='add to'):
            store.add('n')


def test_server_that_evicts_is_refused(forgetful_server):
    with forgetful_server.client() as client:
        client.config_set('maxmemory-policy', 'allkeys-lru')
    with pytest.raises(errors.StoreUnsuitable, match='allkeys-lru.*noeviction'):
        open_store(forgetful_server.url)


def facts(**changes):
    return {'redis_version': '7.2.4', 'maxmemory_policy': 'noeviction', **changes}


def test_server_unfit_for_the_store_is_refused():
    assert examine(facts(), 'a') == 'redis 7.2.4'
    assert (
        examine(facts(valkey_version='8.0.1', cluster_enabled='0', loading='0', role='master'), 'a') == 'valkey 8.0.1'
    )
    for changes, match in (({'redis_version': '6.0.16'}, '6.2 is needed'), ({'cluster_enabled': '1'}, 'cluster')):
        with pytest.raises(errors.StoreUnsuitable, match=match):
            examine(facts(**changes), 'a')
    for changes, code in (({'loading': '1'}, 'LOADING'), ({'role': 'slave'}, 'READONLY')):
        with pytest.raises(redis.RedisError) as caught:
            examine(facts(**changes), 'a')
        assert code_of(caught.value) == code
        assert meaning_of(caught.value).answer is ReplyKind.RECONNECT


def test_at_maxmemory_acks_still_make_room(forgetful_server):
    with forgetful_server.client() as client, open_store(forgetful_server.url) as store:
        store.register('s', 'r')
        for number in range(-9, 1):
            place = store.append('s', {}, chunk(number, size=50_000))  # no large buffers anywhere, which come and go
        # Clearly below what is used, and clearly above what is left after the ack.
        client.config_set('maxmemory', client.info('memory')['used_memory'] - 250_000)
        with pytest.raises(errors.ServerFull, match='maxmemory'):
            store.append('s', {}, chunk(1))
        store.ack('s', 'r', place)
        store.append('s', {}, chunk(2))
        assert [number_of(entry) for entry in store.read('s', place)] == [2]


def test_at_maxmemory_readers_continue(forgetful_server):
    """Also those who had something to say themselves that nobody has acked, or that found no memory."""
    client, store = forgetful_server.client(), RedisStore(forgetful_server.url, check_every_s=1e-6)
    with client, store, RedisStore(forgetful_server.url) as other:
        other.register('members', 'r')
        said = store.append('members', {}, chunk(0))
        place = other.append('s', {}, chunk(1))

        def check_reads():
            assert [number_of(entry) for entry in store.read('s')] == [1]
            assert store.read('s', place) == []
            assert store.stream_info('s').last == 1

        client.config_set('maxmemory', 1)
        check_reads()
        other.ack('members', 'r', said)
        check_reads()
        assert store.client.own_writer.num_unacked('members') == 0, 'it hears of acks'
        with pytest.raises(errors.ServerFull, match='maxmemory'):
            store.append('members', {}, chunk(2))
        check_reads()
        client.config_set('maxmemory', 0)
        store.read('s')
        store.append('members', {}, chunk(3))
        assert [number_of(entry) for entry in other.read('members', said)] == [3], 'nothing was appended by the other'


@pytest.mark.parametrize('size', [1000, 1_000_000], ids=['whole', 'in parts'])
def test_append_unsettled_at_maxmemory_is_kept(forgetful_server, size, monkeypatch):
    """The first try came through, its reply was lost, and the second one found no memory."""
    with forgetful_server.client() as client, RedisStore(forgetful_server.url) as store:
        store.append('s', {}, chunk(1))
        send_request = store.client.server.append

        def lossy(said):
            send_request(said)
            client.config_set('maxmemory', 1)
            monkeypatch.setattr(store.client.own_writer.stream_writer('s').outbox, 'send_request', send_request)
            return send_request(said) if size == 1000 else refused()

        def refused():
            raise errors.ServerFull('as the parts of a second try are')

        monkeypatch.setattr(store.client.own_writer.stream_writer('s').outbox, 'send_request', lossy)
        assert store.append('s', {}, chunk(2, size)).number == 2
        with pytest.raises(errors.ServerFull):
            store.append('s', {}, chunk(3))
        client.config_set('maxmemory', 0)
        assert store.append('s', {}, chunk(3)).number == 3
        assert [number_of(entry) for entry in store.read('s')] == [1, 2, 3]


def test_append_unsettled_before_a_flush_is_resent_later(forgetful_server, monkeypatch):
    with forgetful_server.client() as client, RedisStore(forgetful_server.url) as store:
        store.append('s', {}, chunk(1))
        outbox = store.client.own_writer.stream_writer('s').outbox
        send_request = outbox.send_request

        def lossy(said):
            send_request(said)
            client.flushall()  # And its epoch with it.
            monkeypatch.setattr(outbox, 'send_request', send_request)
            store.client.server.keys.list_name('stream', 's', again=True)
            client.config_set('maxmemory', 1)
            return send_request(said)

        monkeypatch.setattr(outbox, 'send_request', lossy)
        with pytest.raises(errors.AppendUnsettled, match='maxmemory.*sent later'):
            store.append('s', {}, chunk(2))
        client.config_set('maxmemory', 0)
        store.append('s', {}, chunk(3))
        assert [number_of(entry) for entry in store.read('s')] == [1, 2, 3]


def test_wait_for_a_backfill_continues_at_maxmemory(forgetful_server):
    with forgetful_server.client() as client, RedisStore(forgetful_server.url) as store:
        place = store.append('s', {}, chunk(0))
        (record,) = store.client.read('s', OLDEST, 1, 0.0)
        client.config_set('maxmemory', 1)
        assert store.client.server.read_backfill('s', record).fate == WAITING
        assert store.client.wait_for_backfill('s', record, 0.01) is None
        client.config_set('maxmemory', 0)
        store.register('s', 'r')
        store.ack('s', 'r', place)
        assert store.client.server.read_backfill('s', record).fate == GONE


def test_backfill_with_a_damaged_place_is_refused_by_entry(redis_server):
    with redis_server.client() as client, RedisStore(redis_server.url, 'no-place') as store:
        store.append('s', {}, chunk(0))
        (record,) = store.client.read('s', OLDEST, 1, 0.0)
        client.hset('ding:{no-place/s/0}:filled', '1', b'DGP\x02 is the beginning of a place')
        for call in (
            lambda: store.client.wait_for_backfill('s', record, 0.0),
            lambda: store.client.server.read_backfill('s', record).fate,
        ):
            with pytest.raises(errors.CorruptPayload, match="entry 1 of 's'") as raised:
                call()
            assert raised.value.entry_id == record.id


def test_payload_too_large_for_redis_is_refused(redis_server, monkeypatch):
    monkeypatch.setattr('ding_store.storage.redis.server.RedisServer.max_payload_bytes', 1000)
    with open_store(redis_server.url, 'large') as store:
        for call in (store.append, store.put):
            with pytest.raises(errors.NotEnoughSpace, match='1000'):
                call('s', {}, chunk(1, 1000))


def test_store_is_pickled_as_its_address(redis_server):
    with RedisStore(redis_server.url, 'pickled', max_pending_bytes=5000) as store:
        store.append('s', {}, chunk(1))
        with copied(store) as twin:
            assert (twin.run, twin.address) == (store.run, store.address)
            assert twin.writer != store.writer
            with pytest.raises(errors.StreamFull, match='5000'):
                twin.append('s', {}, chunk(2, 5000))
            twin.append('s', {}, chunk(2))
        assert [entry.sequence for entry in store.read('s')] == [1, 1]
    # Nothing is connected before it is used.
    assert copied(store).client.server.connection._session is None


def _append_in_child(store, queue):
    store.append('s', {}, chunk(2))
    queue.put((store.writer, store.append('s', {}, chunk(3)).number))
    store.close()


def test_forked_store_is_a_separate_writer(redis_server):
    context = multiprocessing.get_context('fork')
    with RedisStore(redis_server.url, f'fork-{os.getpid()}') as store, ThreadPoolExecutor() as pool:
        store.append('s', {}, chunk(1))
        waiting = pool.submit(store.get, 'v', 0, WAIT_S)  # A connection in use while we fork.
        queue = context.Queue()
        process = context.Process(target=_append_in_child, args=(store, queue))
        process.start()
        writer, number = queue.get(timeout=WAIT_S)
        process.join(WAIT_S)
        assert (process.exitcode, number) == (0, 3)
        assert writer != store.writer
        store.append('s', {}, chunk(4))
        assert [(entry.writer == writer, entry.sequence) for entry in store.read('s')] == [
            (False, 1),
            (True, 1),
            (True, 2),
            (False, 2),
        ]
        store.put('v', {}, {})
        assert waiting.result(WAIT_S).version == 1


def _use_in_child(store, queue):
    try:
        store.append('s', {}, {})
    except errors.StoreClosed as e:
        queue.put(str(e))


def test_memory_is_refused_in_another_process():
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    with MemoryStore() as store:
        process = context.Process(target=_use_in_child, args=(store, queue))
        process.start()
        assert 'embedded://' in queue.get(timeout=WAIT_S)
        process.join(WAIT_S)
        with pytest.raises(errors.ConfigError, match='another process'):
            pickle.dumps(store)


def test_embedded_store_starts_its_server(tmp_path, monkeypatch, redis_binary):
    from ding_store.storage.embedded.private_server import stop_server

    monkeypatch.chdir(tmp_path)
    with open_store('embedded://', run='pong') as store:
        store.append('s', {}, chunk(1))
        with copied(store) as twin:
            monkeypatch.chdir('/')
            assert [number_of(entry) for entry in twin.read('s')] == [1]
        assert store.address == f'embedded://{tmp_path}/.ding_store/pong'
    stop_server(tmp_path / '.ding_store' / 'pong')


#: Names that a file system takes, and that mean something else in a URL.
ODD_NAMES = ['exp#1', 'exp?db=2', '100%25', 'a b', 'a@b:c', """it's "so\"""", '[x]', '实验-é']


@pytest.mark.parametrize('name', ODD_NAMES)
def test_embedded_url_accepts_any_directory(tmp_path, name, redis_binary):
    from ding_store.storage.embedded.private_server import stop_server

    root = tmp_path / name
    with open_store(f'embedded://{root}', run='pong') as store:
        store.append('s', {}, chunk(1))
        assert store.address == f'embedded://{root}/pong'
        assert (root / 'pong' / 'lock').exists()
        with copied(store) as twin:
            assert [number_of(entry) for entry in twin.read('s')] == [1]
    assert os.listdir(tmp_path) == [name]
    stop_server(root / 'pong')


def test_embedded_server_with_an_odd_tmpdir_is_reached(tmp_path, monkeypatch, redis_binary):
    from ding_store.storage.embedded.private_server import stop_server

    with tempfile.TemporaryDirectory(prefix='a#b%25?') as directory:
        monkeypatch.setenv('TMPDIR', directory)
        with open_store(f'embedded://{tmp_path}', run='pong') as store:
            assert store.put('v', {}, {}) == 1
            assert os.listdir(directory) == [f'ding-store-{os.geteuid()}']
        stop_server(tmp_path / 'pong')


@pytest.mark.parametrize(
    ('url', 'fix'),
    [
        ('localhost:6379', 'redis://localhost:6379'),
        ('10.0.0.5:6379/1', 'redis://10.0.0.5:6379/1'),
        ('localhost', 'redis://localhost'),
        ('/run/redis.sock', 'unix:///run/redis.sock'),
        ('redis:localhost', 'redis://'),
        ('embedded:dir', 'embedded://'),
        ('redis://localhost/0#x', '%23'),
        ('unix:///run/a#1.sock', '%23'),
    ],
)
def test_open_store_suggests_the_nearest_url(url, fix):
    with pytest.raises(errors.ConfigError, match=re.escape(fix)):
        open_store(url)


def test_faulty_store_fails_at_the_given_call():
    with MemoryStore() as memory:
        lossy = FaultyStore(memory, fail_after=1, after=True)
        lossy.append('s', {}, {})
        with pytest.raises(errors.StoreUnavailable):
            lossy.append('s', {}, {})
        assert len(lossy.read('s')) == 2
        dead = FaultyStore(memory, num_faults=2)
        for _ in range(2):
            with pytest.raises(errors.StoreUnavailable):
                dead.append('s', {}, {})
        assert dead.info().streams['s'].last == 2


class TestReader:
    @pytest.fixture
    def store(self):
        with MemoryStore(max_pending_bytes=2000, overflow='drop_oldest') as store:
            yield store

    def test_dropped_entries_are_counted_once(self, store, caplog):
        reader = Reader(store, 's', 'r')
        store.append('s', {}, chunk(0))
        assert len(reader.read()) == 1
        for i in range(1, 20):
            store.append('s', {}, chunk(i))
        entries = reader.read()
        assert [number_of(entry) for entry in entries] == list(range(20 - len(entries), 20))
        assert reader.num_lost == 19 - len(entries) > 0
        store.append('s', {}, chunk(20))
        assert len(reader.read()) == 1
        assert reader.num_lost == 19 - len(entries)
        assert len([record for record in caplog.records if 'were lost' in record.message]) == 1

    def test_marks_let_a_new_reader_continue(self, store):
        first = Reader(store, 's', 'r')
        store.append('s', {}, chunk(1))
        assert len(first.read()) == 1
        assert first.marks == {store.writer: 1}
        # Not acked, but committed by its owner: seen again, and skipped; and as nobody else would, acked.
        second = Reader(store, 's', 'r', marks=first.marks)
        assert second.read() == []
        assert (second.num_duplicates, second.lag()) == (1, 0)
        assert store.info().streams['s'].floor == 1

    def test_duplicates_are_not_acked_while_work_is_outstanding(self, store):
        reader = Reader(store, 's', 'r')
        store.append('s', {}, chunk(1))
        (entry,) = reader.read()
        store.lose_memory(keep=store.snapshot())
        assert reader.read() == []
        assert store.info().streams['s'].floor == 0
        reader.ack(entry.id)
        assert store.info().streams['s'].floor == 1

    def test_start_now_skips_earlier_entries_that_are_resent(self, store):
        store.append('s', {}, chunk(1))
        reader = Reader(store, 's', 'r', start='now')
        store.lose_memory()
        store.append('s', {}, chunk(2))
        assert [number_of(entry) for entry in reader.read()] == [2]
        assert reader.num_lost == 0

    def test_start_now_of_a_restarted_reader_skips_acked_entries(self, store):
        """What it had acked, or was there before it first came, is announced again for one that lags."""
        Reader(store, 's', 'slow')
        for i in range(3):
            store.append('s', {}, chunk(i))
        reader = Reader(store, 's', 'r', start='now')
        for i in range(3, 6):
            store.append('s', {}, chunk(i))
        reader.ack(reader.read(2)[-1].id)
        again = Reader(store, 's', 'r', start='now')
        store.lose_memory()
        store.append('s', {}, chunk(6))
        seen = [number_of(entry) for entry in again.read()]
        # All of one writer: which of its entries are acked is known by the number of its newest alone.
        assert seen[-1] == 6
        assert again.num_lost == 0
        again.ack()
        last = Reader(store, 's', 'r', start='now')
        store.lose_memory()
        store.append('s', {}, chunk(7))
        assert [number_of(entry) for entry in last.read()] == [7]

    def test_sequence_gap_in_a_new_epoch_is_a_loss(self, store):
        reader = Reader(store, 's', 'r')
        store.append('s', {}, chunk(0))
        reader.read()
        for i in range(1, 20):
            store.append('s', {}, chunk(i))
        store.lose_memory()
        store.append('s', {}, chunk(20))
        entries = reader.read()
        assert reader.num_lost == number_of(entries[0]) - 1 > 0

    def test_ephemeral_readers_leave_no_trace(self, store):
        with Reader(store, 's', 'viewer', durable=False), Reader(store, 's', 'learner'):
            assert store.info().streams['s'].durable == {'viewer': False, 'learner': True}
        assert store.info().streams['s'].durable == {'learner': True}


def test_commands_are_packed_alike_without_hiredis(monkeypatch):
    arguments = ('EVALSHA', 'é', 3, b'\x00\r\n', -1, '')
    packed = resp.pack(arguments)
    large = (*arguments, bytes(5000))
    assert b''.join(resp.pieces(large)) == resp.pack(large)
    assert resp.pieces(arguments) == [packed]
    monkeypatch.setattr(resp, '_PACK_COMMAND', None)
    assert resp.pack(arguments) == packed
    assert b''.join(resp.pieces(large)) == resp.pack(large)
