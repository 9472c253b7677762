"""One contract, every backend."""

import itertools

import numpy as np
import pytest
from redis_server import RedisServer, left_by_runs

from ding_store.storage import open_store
from ding_store.storage.memory import MemoryStore
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import StoreTests

_RUNS = (f'run{number}' for number in itertools.count())


def damaged(payload: bytes) -> bytes:
    return payload[:-1] + bytes([payload[-1] ^ 1])


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


class TestRedisStore(StoreTests):
    @pytest.fixture(autouse=True)
    def _server(self, redis_server: RedisServer):
        self.server = redis_server
        with redis_server.client() as self.client:
            yield

    def open(self, **options):
        return RedisStore(self.server.url, next(_RUNS), **options)

    def another(self, store: RedisStore, **options):
        return RedisStore(self.server.url, store.run, **{**store.__reduce__()[1][2], **options})

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


def test_retired_run_leaves_no_key(redis_server):
    url = redis_server.url
    with open_store(url, run='retired') as store:
        store.append('experience', {}, {})
        store.register('experience', 'learner')
        store.put('weights/main', {}, {})
        store.add('collectors', 1)
        store.retire(last=('weights/main',))
    with redis_server.client() as client:
        assert not left_by_runs(client, 'ding:{retired*')
