"""``redis+sentinel://``: the store follows the primary that the sentinels name."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from flow import STREAM, Flow
from proxy import Proxy
from sentinel_group import ASK_PASSWORD, PASSWORD, STOP, SentinelGroup

from ding_store import errors
from ding_store.doctor.finding import FAIL, OK
from ding_store.doctor.sentinel_checks import check_sentinels
from ding_store.environment import ENV_SENTINEL_PASSWORD
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of


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


def test_blocked_calls_continue_after_a_planned_failover(group):
    """Until the sentinels demote the former primary, after 10 s, there are two. Here it is demoted at once."""
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
        eventually(lambda: former.client.info('clients')['blocked_clients'] >= 3, 'they wait')
        group.plan_failover()
        primary = group.wait_for_failover(former)
        flow.go_on()  # at the former primary
        with RedisStore(group.url(), 'planned') as other:
            other.append(STREAM, {}, chunk(5))
            other.put('weights', {}, {})
            reader = Reader(other, 'full', 'learner')
            assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [0]
            reader.ack()
        former.client.replicaof('127.0.0.1', primary.port)
        assert [work.result(WAIT_S) for work in blocked[:2]] == [[5], 1]
        blocked[2].result(WAIT_S)
        flow.go_on()


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
