"""``redis+sentinel://``: the store follows the primary that the sentinels name."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis
from flow import STREAM, Flow
from proxy import Proxy
from sentinel_group import ASK_PASSWORD, CONTINUE, PASSWORD, STOP, SentinelGroup, wait_until

from ding_store import errors
from ding_store.doctor.finding import FAIL, OK
from ding_store.doctor.sentinel_checks import check_sentinels
from ding_store.environment import ENV_SENTINEL_PASSWORD
from ding_store.storage import open_store
from ding_store.storage.encoding.value_parts import unpack
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.sentinels import Sentinels
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

#: More than one part.
LARGE = {'x': np.arange(1_000_000)}


@pytest.fixture(scope='module')
def shared(redis_binary):
    with SentinelGroup(redis_binary) as group:
        yield group


@pytest.fixture
def group(shared, monkeypatch):
    """A primary, a replica that can replace it, and three sentinels: each test brings back what it takes away."""
    monkeypatch.setenv(ENV_SENTINEL_PASSWORD, ASK_PASSWORD)
    return shared


def replica_of(group):
    (replica,) = [one for one in group.servers if one is not group.primary()]
    return replica


def findings(url):
    return {finding.name: finding for finding in check_sentinels(url)}


def test_doctor_shows_all_that_a_failover_needs(group):
    found = findings(group.url())
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(found, OK)
    assert '3 of 3 reply, quorum 2' in found['sentinels'].found
    assert f'primary {group.primary().address}; replica {replica_of(group).address}, ' in found['replicas'].found
    assert found['replica reads'].found.endswith(f'from a replica: {replica_of(group).address}')
    assert 'not set' in found['min-replicas'].found
    assert 'begins 1 s after' in found['failover'].found
    one, other, _ = group.sentinels
    two = f'redis+sentinel://ding:{PASSWORD}@{one.address},{other.address}/mymaster'
    assert 'there are 3' in findings(two)['sentinels'].found
    primary, replica = group.primary().client, replica_of(group).client
    replica.config_set('maxmemory-policy', 'allkeys-lru')
    primary.config_set('min-replicas-to-write', '1')
    try:
        found = findings(group.url())
        assert 'maxmemory-policy allkeys-lru' in found['replicas'].found
        assert 'set; 1 good' in found['min-replicas'].found
        replica.execute_command('ACL', 'SETUSER', 'ding', 'resetpass', '>other')
        assert 'users and passwords' in findings(group.url())['replicas'].fix
    finally:
        replica.execute_command('ACL', 'SETUSER', 'ding', 'resetpass', f'>{PASSWORD}')
        replica.config_set('maxmemory-policy', 'noeviction')
        primary.config_set('min-replicas-to-write', '0')


def refused(error, url, match):
    with pytest.raises(error, match=match) as caught:
        open_store(url, connect_timeout_s=0.1)
    assert PASSWORD not in str(caught.value)
    assert ASK_PASSWORD not in str(caught.value)


def test_wrong_urls_are_refused_and_name_the_fix(group, monkeypatch):
    sentinel, server, replica = group.sentinels[0].address, group.primary().address, replica_of(group).address
    refused(errors.ConfigError, group.url(name='other'), "does not know 'other'.*one of its names.*: mymaster")
    refused(errors.StoreDenied, group.url(user='ding:wrong@'), 'denies access.*DING_STORE_URL')
    refused(errors.StoreUnavailable, 'redis+sentinel://127.0.0.1:1/mymaster', 'no sentinel.*replies. Start the')
    refused(
        errors.StoreUnsuitable,
        f'redis://:{ASK_PASSWORD}@{sentinel}',
        r'is a Redis Sentinel.*Use redis\+sentinel://HOST:PORT/mymaster',
    )
    refused(
        errors.StoreUnavailable,
        f'redis://ding:{PASSWORD}@{replica}',
        f'read-only replica. Put the address of the primary into the URL. Cause: its primary is {server}',
    )
    monkeypatch.setenv(ENV_SENTINEL_PASSWORD, 'wrong')
    refused(errors.StoreDenied, group.url(), f'sentinels deny access.*{ENV_SENTINEL_PASSWORD}')
    monkeypatch.delenv(ENV_SENTINEL_PASSWORD)
    refused(errors.StoreDenied, group.url(), f'sentinels deny access.*{ENV_SENTINEL_PASSWORD}')
    url = f'redis+sentinel://ding:{PASSWORD}@{server}/mymaster'
    refused(errors.StoreUnsuitable, url, 'no sentinel.*use redis:// for a server')


def test_one_sentinel_that_replies_is_enough(group):
    address = group.sentinels[2].address
    url = f'redis+sentinel://ding:{PASSWORD}@127.0.0.1:1,{address}/mymaster?db=0'
    with open_store(url, 'one') as store:
        assert store.put('weights', {}, {}) == 1
        assert store.info().address == f'redis+sentinel://127.0.0.1:1,{address}/mymaster'


def test_sentinel_that_names_a_former_primary_is_passed_over(monkeypatch):
    """It was cut off, or restarted with the configuration of before the failover."""
    late, right, away = (1, b'1'), (2, b'2'), None
    views = dict(zip('abc', [right] * 3))

    def ask(self, host, command, name):
        view = views[host.partition(':')[0]]
        if view is None:
            raise redis.TimeoutError('Timeout reading from socket')
        epoch, port = view
        return [b'h', port] if command.startswith('GET') else [b'config-epoch', str(epoch).encode()]

    monkeypatch.setattr(Sentinels, 'ask', ask)
    sentinels = Sentinels('redis+sentinel://a,b,c/m')

    def found(*now):
        views.update(zip('abc', now))
        return sentinels.find_primary()

    assert found(right, right, right) == 'redis://h:2'
    assert found(away, late, right) == 'redis://h:2'
    assert found(away, late, away) == 'redis://h:2'
    assert found(away, late, (3, b'3')) == 'redis://h:3', 'a failover'
    assert found((0, b'1'), (0, b'1'), away) == 'redis://h:1', 'an operator configured most of them anew'


def test_killed_primary_is_replaced_and_nothing_is_lost(group):
    with Flow(group.url(), 'killed') as flow:
        former = group.primary()
        former.kill()
        flow.go_on()
        assert group.primary() is not former
    group.restart_as_replica(former)


def test_hung_primary_counts_as_away_after_three_seconds(group):
    with Flow(group.url(), 'hung', host_plane='off') as flow:
        former = group.primary()
        former.signal(STOP)
        flow.go_on()
        assert group.primary() is not former
    former.kill()
    group.restart_as_replica(former)


def test_lagging_replica_gets_what_it_lacks_from_writers(group):
    former, replica = group.primary(), replica_of(group)
    with Flow(group.url(), 'lagging', host_plane='off') as flow:
        with Proxy(('127.0.0.1', former.port)) as proxy:
            replica.client.replicaof('127.0.0.1', proxy.port)  # The sentinels undo this after 8 s.
            group.wait_for_link(replica)
            flow.go_on()
            proxy.black_hole()
            for _ in range(20):
                flow.go_on()
            behind = former.client.info('replication')['master_repl_offset']
            former.kill()
            proxy.cut()
            assert replica.client.info('replication')['slave_repl_offset'] < behind
            flow.go_on()
        assert group.primary() is replica
    group.restart_as_replica(former)


def test_primary_without_replicas_keeps_what_it_refuses(group):
    """Its min-replicas-to-write is 1, and its replica is gone: no call raises, nothing is appended twice."""
    primary, replica = group.primary(), replica_of(group)
    with Flow(group.url(), 'alone') as flow:
        primary.client.config_set('min-replicas-to-write', '1')
        try:
            replica.kill()
            eventually(lambda: primary.client.info('replication')['min_slaves_good_slaves'] == 0, 'it refuses')
            group.restart_as_replica(replica)
            flow.go_on()
        finally:
            primary.client.config_set('min-replicas-to-write', '0')


@contextlib.contextmanager
def large_payloads(group, run, **options):
    """Put a value and append an entry, both in parts. Yield a store that reads them when the replica has them."""
    primary, replica = group.primary(), replica_of(group)
    with open_store(group.url(), run, host_plane='off') as writer:
        writer.append(STREAM, {}, LARGE)
        writer.put('weights', {}, LARGE)
        wait_until(lambda: gap(primary, replica) == 0, 'the replica has all')
        for server in (primary, replica):
            server.client.config_resetstat()
        with open_store(group.url(), run, host_plane='off', **options) as reader:
            yield reader
        writer.retire()


def gap(primary, replica):
    behind = replica.client.info('replication')['slave_repl_offset']
    return primary.client.info('replication')['master_repl_offset'] - behind


def num_gets(server):
    return server.client.info('commandstats').get('cmdstat_get', {'calls': 0})['calls']


def read_both(store):
    assert np.array_equal(store.read(STREAM)[0].arrays['x'], LARGE['x'])
    assert np.array_equal(store.get('weights').arrays['x'], LARGE['x'])


def test_large_payloads_are_read_from_the_replica(group, caplog):
    caplog.set_level('INFO', 'ding_store')
    with large_payloads(group, 'replica') as store:
        read_both(store)
        assert (num_gets(group.primary()), num_gets(replica_of(group))) == (0, 17)
        assert f'large payloads are read from the replica redis://{replica_of(group).address}' in caplog.text
    with large_payloads(group, 'primary', read_replicas=False) as store:
        read_both(store)
        assert (num_gets(group.primary()), num_gets(replica_of(group))) == (17, 0)


def test_parts_that_a_replica_lacks_come_from_the_primary(group):
    replica = replica_of(group).client
    with large_payloads(group, 'lacking') as store:
        replica.config_set('replica-read-only', 'no')
        try:
            replica.delete(*[key for key in replica.scan_iter('ding:{lacking/*:part:*') if key[-1] in '26'])
        finally:
            replica.config_set('replica-read-only', 'yes')
        read_both(store)
        assert (num_gets(group.primary()), num_gets(replica_of(group))) == (4, 17)


@pytest.mark.parametrize('fault', ['hung', 'stale', 'denied'])
def test_replica_that_fails_is_not_asked_again_at_once(group, fault, caplog):
    replica = replica_of(group)
    with large_payloads(group, fault) as store:
        if fault == 'hung':
            replica.signal(STOP)
        elif fault == 'stale':
            replica.client.config_set('replica-serve-stale-data', 'no')
            replica.client.replicaof('127.0.0.1', 1)
        else:
            replica.client.execute_command('ACL', 'SETUSER', 'ding', '-get')
        try:
            read_both(store)
            assert num_gets(group.primary()) == 17
            assert ('. Give its user the rights in docs/howto/security.md' in caplog.text) == (fault == 'denied')
        finally:
            replica.signal(CONTINUE)
            replica.client.execute_command('ACL', 'SETUSER', 'ding', '+get')
            replica.client.config_set('replica-serve-stale-data', 'yes')
            if fault == 'stale':
                replica.client.replicaof('127.0.0.1', group.primary().port)
            wait_until(group.is_complete, 'the sentinels see the replica')


def test_value_is_whole_if_the_replica_dies_while_it_is_read(group):
    replica = replica_of(group)
    with large_payloads(group, 'dying') as store:
        server = store.client.server
        parts = unpack(server.get('weights').payload)
        payload = bytearray(parts.num_bytes)
        targets = [memoryview(payload)[at : at + part.num_bytes] for part, at in zip(parts.parts, parts.offsets)]
        assert server.fetch_parts('weights', list(zip(parts.parts, targets)), replica.kill)
        assert 0 < num_gets(group.primary()) <= len(parts.parts)
        assert payload[-LARGE['x'].nbytes :] == LARGE['x'].tobytes()
        read_both(store)
    group.restart_as_replica(replica)


def test_blocked_calls_continue_after_a_planned_failover(group):
    """The sentinels name another primary, and the former one stays a primary: here they have no right to demote it."""
    with (
        RedisStore(group.url(), 'planned', max_pending_bytes=1000) as store,
        Flow(group.url(), 'flow') as flow,
        ThreadPoolExecutor(3) as pool,
    ):
        store.register('full', 'learner')
        store.append('full', {}, chunk(0, 80))
        blocked = [
            pool.submit(lambda: [number_of(entry) for entry in store.read(STREAM, timeout_s=WAIT_S)]),
            pool.submit(lambda: store.get('weights', timeout_s=WAIT_S).version),
            pool.submit(lambda: store.append('full', {}, chunk(1, 80), timeout_s=WAIT_S)),
        ]
        former = group.primary()
        former.client.execute_command('ACL', 'SETUSER', 'sentinel', '-slaveof')
        eventually(lambda: former.client.info('clients')['blocked_clients'] >= 3, 'they wait')
        group.plan_failover()
        primary = group.wait_for_failover(former)
        eventually(lambda: set(users_at(former)) == {'default', 'sentinel'}, 'all have left it')
        assert former.client.info('replication')['role'] == 'master'
        flow.go_on()
        with RedisStore(group.url(), 'planned') as other:
            other.append(STREAM, {}, chunk(5))
            other.put('weights', {}, {})
            reader = Reader(other, 'full', 'learner')
            assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [0]
            reader.ack()
        assert [work.result(WAIT_S) for work in blocked[:2]] == [[5], 1]
        blocked[2].result(WAIT_S)
        assert 'ding' not in users_at(former)
    former.client.execute_command('ACL', 'SETUSER', 'sentinel', '+slaveof')
    former.client.replicaof('127.0.0.1', primary.port)


def users_at(server):
    return [one['user'] for one in server.client.client_list()]


def test_known_primary_is_kept_without_sentinels(group, caplog):
    """Behind the tests of failovers: the sentinels do not see a replica at once."""
    primary = group.primary()
    with Flow(group.url(), 'blind') as flow:
        for sentinel in group.sentinels:
            sentinel.kill()
        primary.client.client_kill_filter(_type='normal')
        flow.go_on()
        assert 'names a primary' in caplog.text
        refused(errors.StoreUnavailable, group.url(), 'no sentinel.*replies. Start the sentinels')
    for sentinel in group.sentinels:
        sentinel.start()


def test_no_replica_left_is_an_error_that_names_the_primary(group):
    """The last test: nothing is left."""
    primary = group.primary()
    with RedisStore(group.url(), 'lost', reconnect_timeout_s=1.0) as store:
        store.put('weights', {}, {})
        for server in group.servers:
            server.kill()
        with pytest.raises(errors.StoreUnavailable, match=f'{primary.address}, the primary of .* cannot be reached'):
            store.put('weights', {}, {})
    found = findings(group.url())['replicas']
    assert found.status is FAIL
    assert f'primary {primary.address}: ' in found.found
