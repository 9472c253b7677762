"""One contract, six stores: on one Redis, on two and in memory, with shared memory and without."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from redis_cluster import RedisCluster
from redis_server import RedisServer, left_by_runs

from ding_store.errors import VersionConflict
from ding_store.storage import open_store
from ding_store.storage.encoding.framing import seal
from ding_store.storage.memory.log import Log
from ding_store.storage.memory.store import Memory, MemoryStore
from ding_store.storage.options import HostOptions
from ding_store.storage.redis.groups import NUM_GROUPS, slot_of, tag_of
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.shards.placement import shard_of
from ding_store.storage.shared_memory import rings, shared_values
from ding_store.storage.shared_memory.mapped_files import PAGE
from ding_store.storage.shared_memory.ring import RingReader
from ding_store.storage.shared_memory.transports import is_reference, unpack
from ding_store.storage.testing import StoreTests

_RUNS = (f'run{number}' for number in itertools.count())


def damaged(payload: bytes) -> bytes:
    return payload[:-1] + bytes([payload[-1] ^ 1])


def ring_of(directory: Path, payload: bytes) -> Path:
    """Return the file that a reference leads to."""
    (path,) = directory.rglob(f'{unpack(payload).file}*')
    return path


def payload_in(directory: Path, payload: bytes) -> bytes:
    """Return a payload from the ring that it refers to, or as it is."""
    if not is_reference(payload):
        return payload
    reference = unpack(payload)
    return seal(RingReader(str(ring_of(directory, payload))).view(reference.start, reference.length))


@pytest.fixture
def shared_directory(tmp_path, monkeypatch):
    """The directory of host caches with small rings. Values have slots, however small they are."""
    monkeypatch.setattr(rings, 'FIRST_BYTES', 16 * PAGE)
    monkeypatch.setattr(shared_values, 'SLOTS_FROM_BYTES', 0)
    return tmp_path


class LocalLog(Log):
    """A stream whose readers are all on one host, also before the first one registers."""

    def _choose_transport(self):
        self.host = self.common_host


class LocalMemory(Memory):
    host = ''

    def log(self, stream):
        log = super().log(stream)
        log.__class__, log.common_host, log.host = LocalLog, self.host, self.host
        return log


class TestMemoryStore(StoreTests):
    def open(self, **options):
        return open_store('memory://', **options)

    def another(self, store, **options):
        return store.another(**options)

    def lose_memory(self, store):
        store.lose_memory()

    def raw_log(self, store: MemoryStore, stream):
        records = store.snapshot().logs[stream].records
        return [(number, one.writer, one.sequence, one.payload) for number, one in sorted(records.items())]

    def raw_damage(self, store, stream, number):
        state = store.snapshot()
        record = state.logs[stream].records[number]
        record.payload = damaged(record.payload)
        store.lose_memory(keep=state)


class TestMemoryStoreWithSharedMemory(TestMemoryStore):
    """Every payload is in shared memory, except a writer's first of a stream."""

    @pytest.fixture(autouse=True)
    def _directory(self, shared_directory):
        self.directory = shared_directory

    def open(self, **options):
        memory = LocalMemory()
        store = MemoryStore(memory=memory, host=HostOptions(host_cache_dir=str(self.directory)), **options)
        memory.host = store.host
        return store

    def raw_log(self, store, stream):
        return [(*row[:3], payload_in(self.directory, row[3])) for row in super().raw_log(store, stream)]


class TestRedisStore(StoreTests):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server: RedisServer):
        self.server = redis_server
        with redis_server.client() as self.client:
            yield

    def open(self, **options):
        return RedisStore(self.server.url, next(_RUNS), **options)

    def another(self, store: RedisStore, **options):
        return RedisStore(self.server.url, store.run, **{**store.__reduce__()[1][3], **options})

    def lose_memory(self, store):
        self.client.flushall()

    def raw_log(self, store, stream):
        rows = self.client.xrange(f'ding:{{{store.run}/{stream}/0}}:log')
        return [(int(i.split(b'-')[0]), f[b'w'].decode(), int(f[b's']), f[b'p']) for i, f in rows]

    def raw_damage(self, store, stream, number):
        key = f'ding:{{{store.run}/{stream}/0}}:log'
        ((redis_id, fields),) = self.client.xrange(key, f'{number}-0', f'{number}-0')
        fields[b'p'] = damaged(fields[b'p'])
        self.client.delete(key)
        self.client.xadd(key, fields, redis_id)

    def test_large_payloads(self, store):
        array = np.random.default_rng(0).integers(0, 256, 20_000_000, np.uint8)
        store.append('s', {}, {'x': array})
        np.testing.assert_array_equal(store.read('s')[0].arrays['x'], array)


class TestRedisStoreWithSharedMemory(TestRedisStore):
    @pytest.fixture(autouse=True)
    def _directory(self, shared_directory):
        self.directory = shared_directory
        self.options = {}

    def open(self, **options):
        store = open_store(self.server.url, f'shared-{next(_RUNS)}', host_cache_dir=str(self.directory), **options)
        self.options[store.run] = options
        return store

    def another(self, store, **options):
        options = {**self.options[store.run], **options}
        return open_store(self.server.url, store.run, host_cache_dir=str(self.directory), **options)

    def raw_log(self, store, stream):
        return [(*row[:3], payload_in(self.directory, row[3])) for row in super().raw_log(store, stream)]


@pytest.fixture(scope='module')
def other_server(redis_binary):
    with RedisServer(redis_binary) as server:
        yield server


class TestShardedStore(TestRedisStore):
    """Each stream and value is on one of two servers."""

    @pytest.fixture(autouse=True)
    def _servers(self, redis_server: RedisServer, other_server: RedisServer):
        self.url = f'{redis_server.url} {other_server.url}'
        with redis_server.client() as one, other_server.client() as other:
            self.clients = one, other
            yield

    def open(self, **options):
        return RedisStore(self.url, next(_RUNS), **options)

    def another(self, store: RedisStore, **options):
        return RedisStore(self.url, store.run, **{**store.__reduce__()[1][3], **options})

    def lose_memory(self, store):
        for client in self.clients:
            client.flushall()

    def raw_log(self, store, stream):
        self.client = self.clients[shard_of(stream, 2)]
        return super().raw_log(store, stream)

    def raw_damage(self, store, stream, number):
        self.client = self.clients[shard_of(stream, 2)]
        super().raw_damage(store, stream, number)


class TestShardedStoreWithSharedMemory(TestShardedStore):
    @pytest.fixture(autouse=True)
    def _directory(self, shared_directory):
        self.directory = shared_directory
        self.options = {}

    def open(self, **options):
        store = open_store(self.url, f'shared-{next(_RUNS)}', host_cache_dir=str(self.directory), **options)
        self.options[store.run] = options
        return store

    def another(self, store, **options):
        options = {**self.options[store.run], **options}
        return open_store(self.url, store.run, host_cache_dir=str(self.directory), **options)

    def raw_log(self, store, stream):
        return [(*row[:3], payload_in(self.directory, row[3])) for row in super().raw_log(store, stream)]


class TestClusterStore(TestRedisStore):
    """Streams and values are on three nodes of a cluster."""

    @pytest.fixture(autouse=True)
    def _cluster(self, redis_cluster: RedisCluster):
        self.cluster = redis_cluster

    def open(self, **options):
        return RedisStore(self.cluster.url(), next(_RUNS), **options)

    def another(self, store: RedisStore, **options):
        return RedisStore(self.cluster.url(), store.run, **{**store.__reduce__()[1][3], **options})

    def lose_memory(self, store):
        self.cluster.flush()

    def raw_log(self, store, stream):
        rows = self.node_of(store, stream).xrange(self.log_of(store, stream))
        return [(int(i.split(b'-')[0]), f[b'w'].decode(), int(f[b's']), f[b'p']) for i, f in rows]

    def raw_damage(self, store, stream, number):
        key, node = self.log_of(store, stream), self.node_of(store, stream)
        ((redis_id, fields),) = node.xrange(key, f'{number}-0', f'{number}-0')
        fields[b'p'] = damaged(fields[b'p'])
        node.delete(key)
        node.xadd(key, fields, redis_id)

    def log_of(self, store, stream):
        return f'ding:{{{tag_of(store.run, shard_of(stream, NUM_GROUPS))}}}/{stream}:log'

    def node_of(self, store, stream):
        return self.cluster.node_of(slot_of(tag_of(store.run, shard_of(stream, NUM_GROUPS)))).raw


@pytest.mark.long
class TestClusterStoreWithSharedMemory(TestClusterStore):
    @pytest.fixture(autouse=True)
    def _directory(self, shared_directory):
        self.directory = shared_directory
        self.options = {}

    def open(self, **options):
        store = open_store(self.cluster.url(), f'shared-{next(_RUNS)}', host_cache_dir=str(self.directory), **options)
        self.options[store.run] = options
        return store

    def another(self, store, **options):
        options = {**self.options[store.run], **options}
        return open_store(self.cluster.url(), store.run, host_cache_dir=str(self.directory), **options)

    def raw_log(self, store, stream):
        return [(*row[:3], payload_in(self.directory, row[3])) for row in super().raw_log(store, stream)]


def test_retired_run_leaves_no_key(redis_server):
    url = redis_server.url
    with open_store(url, run='retired') as store:
        store.append('experience', {}, {})
        store.register('experience', 'learner')
        store.put('weights/main', {}, {})
        store.add('collectors', 1)
        lease = store.put('lease', {}, {})
        store.retire(last=('weights/main',))
        with pytest.raises(VersionConflict):  # a lease that is given up behind the end
            store.put('lease', {}, {}, lease)
    with redis_server.client() as client:
        assert not left_by_runs(client, 'ding:{retired*')
