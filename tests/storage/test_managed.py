"""Managed services: other policies, no run_id, a proxy for several servers, idle connections that are cut."""

import logging
import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest
from managed import ManagedProxy
from redis_server import RedisServer, left_by_runs
from test_contract import TestRedisStore as OnRedis

from ding_store.errors import ServerFull, StoreError, StoreUnsuitable
from ding_store.storage import open_store
from ding_store.storage.redis.scripts import load_scripts
from ding_store.storage.redis.server_checks import examine
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of


def without_run_id(facts, number):
    """As Dragonfly's INFO, with the default policy of most services."""
    facts.pop('run_id')
    facts['maxmemory_policy'] = 'volatile-lru'


def of_another_server(facts, number):
    """As INFO through a proxy whose connections lead to several servers."""
    facts['run_id'] = secrets.token_hex(20)


class TestStoreOnServiceWithoutRunId(OnRedis):
    """The contract, through a proxy whose INFO has no run_id."""

    @pytest.fixture(autouse=True)
    def _proxy(self, _server):
        with ManagedProxy(self.server.socket, without_run_id) as self.proxy:
            yield

    def open(self, **options):
        return self._through_the_proxy(super().open(**options))

    def another(self, store, **options):
        return RedisStore(self.proxy.url, store.run, **{**store.__reduce__()[1][3], **options})

    def _through_the_proxy(self, store):
        store.close()
        return self.another(store)


@pytest.fixture
def service(forgetful_server):
    with ManagedProxy(forgetful_server.socket, without_run_id) as proxy:
        yield proxy


def test_server_that_evicts_only_volatile_keys_is_accepted_once_warned(forgetful_server, caplog):
    with forgetful_server.client() as client:
        client.config_set('maxmemory-policy', 'volatile-lru')
        with open_store(forgetful_server.url) as store:
            store.append('s', {}, chunk(0))
            client.client_kill_filter(_type='normal', skipme=True)
            store.append('s', {}, chunk(1))
            assert [number_of(entry) for entry in store.read('s')] == [0, 1]
    (warned,) = [one.message for one in caplog.records if 'maxmemory-policy' in one.message]
    assert 'volatile-lru' in warned
    assert 'parameter group' in warned


def test_volatile_policy_at_maxmemory_loses_nothing(forgetful_server):
    """The server evicts the parts that are in transit, and nothing else."""
    with forgetful_server.client() as client, RedisStore(forgetful_server.url, 'run') as store:
        client.config_set('maxmemory-policy', 'volatile-lru')
        for number in range(3):
            store.append('s', {}, chunk(number, 1_000_000))
        client.config_set('maxmemory', client.info('memory')['used_memory'] + 2_500_000)
        with pytest.raises(StoreError) as caught:
            store.append('s', {}, chunk(3, 3_000_000))
        assert isinstance(caught.value, ServerFull) or isinstance(caught.value.__cause__, ServerFull)
        assert client.info('stats')['evicted_keys'] > 0
        client.config_set('maxmemory', 0)
        store.append('s', {}, chunk(4, 1_000_000))
        read = [number_of(entry) for entry in store.read('s')]
        assert [number for number in read if number != 3] == [0, 1, 2, 4]
        assert all(entry.arrays for entry in store.read('s'))


def test_active_replica_is_refused():
    with pytest.raises(StoreUnsuitable, match='active replica'):
        examine({'redis_version': '6.3.4', 'role': 'active-replica'}, 'a')


def test_service_without_run_id_that_restarts_gets_lost_entries_again(forgetful_server, service):
    with RedisStore(service.url, 'run', check_every_s=0.1) as store, RedisStore(service.url, 'run') as other:
        for number in range(3):
            store.append('s', {}, chunk(number))
        assert [number_of(entry) for entry in other.read('s')] == [0, 1, 2]
        before = store.client.server.generation('s')
        forgetful_server.restart()
        store.append('s', {}, chunk(3))
        assert [number_of(entry) for entry in other.read('s')] == [0, 1, 2, 3]
        assert store.client.server.generation('s') not in ('', before)


def test_retired_run_on_service_leaves_no_key(forgetful_server, service):
    with RedisStore(service.url, 'run') as store, forgetful_server.client() as client:
        store.append('s', {}, chunk(0))
        assert client.ttl('ding:{run}:generation') > 86400
        store.retire()
        assert not left_by_runs(client)


@pytest.mark.parametrize('how', ['key', 'run_id'])
def test_connections_to_several_servers_need_the_key(forgetful_server, how):
    """With the key, threads use connections side by side in one session."""
    with ManagedProxy(forgetful_server.socket, of_another_server) as proxy:
        options = dict(server_generation=how, reconnect_timeout_s=0.5)
        with RedisStore(proxy.url, 'run', **options) as store, ThreadPoolExecutor(4) as pool:
            reads = [pool.submit(store.read, 's', timeout_s=0.5) for _ in range(4)]
            failures = [type(read.exception(WAIT_S)) for read in reads]
            store.append('s', {}, chunk(0))
            number = store.client.availability.num_sessions
    assert (number == 1) == (how == 'key')
    assert how == 'run_id' or failures == [type(None)] * 4


def test_idle_connections_that_are_cut_are_no_warning(redis_binary, caplog):
    """Services close connections after some minutes without a command. This server does so after a second."""
    caplog.set_level(logging.INFO)
    with RedisServer(redis_binary, '--timeout', '1') as server, RedisStore(server.url, 'run') as store:
        store.append('s', {}, chunk(0))
        eventually(lambda: store.is_away, 'the server closes the connection')
        store.append('s', {}, chunk(1))
        assert [number_of(entry) for entry in store.read('s')] == [0, 1]
    told = [one.levelname for one in caplog.records if 'lost the connection' in one.message]
    assert told
    assert set(told) == {'INFO'}


def test_scripts_declare_that_they_use_other_keys():
    """Dragonfly reads this in the first line only. A server that is not Dragonfly reads a comment."""
    assert all(script.text.startswith(b'--!df flags=allow-undeclared-keys\n') for script in load_scripts().values())
