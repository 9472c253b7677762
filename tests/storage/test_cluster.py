"""``redis+cluster://``: a run in a Redis cluster, whose slots move and whose nodes die."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import redis
from flow import Flow
from redis_cluster import PASSWORD, free_port, wait_until
from redis_server import RedisServer

from ding_store import errors
from ding_store.doctor.cluster_checks import check_cluster
from ding_store.doctor.finding import OK, WARN
from ding_store.doctor.redis_checks import check_servers
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis import parts
from ding_store.storage.redis.groups import NUM_GROUPS, NUM_SLOTS, ClusterNodes, Group, slot_of, tag_of
from ding_store.storage.redis.server import RedisServer as ClusterNode
from ding_store.storage.redis.store import open_to_read
from ding_store.storage.shards.placement import shard_of
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of
from ding_store.storage.urls import ClusterUrl, address_of, check_url

_RUNS = (f'cluster-{number}' for number in itertools.count())
#: Streams whose slots are on the first, the second and the third primary of a cluster with equal ranges.
FIRST, SECOND, THIRD = 's/0', 's/2', 's/1'


@pytest.fixture
def run():
    return next(_RUNS)


@pytest.fixture
def cluster(redis_cluster):
    yield redis_cluster
    redis_cluster.bring_back()


def slot_for(run, name):
    return slot_of(tag_of(run, shard_of(name, NUM_GROUPS)))


def other_than(cluster, node):
    return next(one for one in cluster.nodes_with_slots() if one is not node)


# --- keys and slots


def test_slots_of_a_run_never_change(redis_cluster):
    slots = [slot_of(tag_of('run', group)) for group in range(NUM_GROUPS)]
    assert slots == [646, 12051, 7301, 15004, 4950, 9450, 1457, 12813, 6732, 9666, 4073, 15843]
    for group in range(NUM_GROUPS):
        key = f'ding:{{{tag_of("run", group)}}}/experience:log'
        assert redis_cluster.nodes[0].ask('CLUSTER', 'KEYSLOT', key) == slots[group]


@pytest.mark.parametrize('run', ['run', 'pong-dqn_7', 'x' * 200])
def test_partitions_are_on_different_nodes(run):
    slots = [slot_of(tag_of(run, group)) for group in range(NUM_GROUPS)]
    for num_nodes in (2, 3, 4):
        assert len({slot * num_nodes // NUM_SLOTS for slot in slots[:num_nodes]}) == num_nodes
    assert sorted(slot * NUM_GROUPS // NUM_SLOTS for slot in slots) == list(range(NUM_GROUPS)), 'all nodes are used'


def test_all_keys_of_a_name_are_in_one_slot(cluster, run):
    with open_store(cluster.url(), run, host_plane='off') as store:
        for name in (FIRST, 'weights/main'):
            store.register(name, 'learner')
            store.append(name, {}, {'x': np.arange(200_000)})
            store.put(name, {}, {'x': np.arange(200_000)})
            store.add(name, 1)
            prefix = f'ding:{{{tag_of(run, shard_of(name, NUM_GROUPS))}}}'
            keys = cluster.keys(f'{prefix}*')
            assert {cluster.nodes[0].ask('CLUSTER', 'KEYSLOT', key) for key in keys} == {slot_for(run, name)}
            assert sum(':part:' in key for key in keys) > 2
            assert {f'{prefix}:index', f'{prefix}:counters', f'{prefix}/{name}:log'} <= set(keys)
        store.retire()
    assert [key for key in cluster.keys(f'*{run}*') if not key.endswith(':ends')] == []


# --- opening


def refused(error, url, match):
    with pytest.raises(error, match=match) as caught:
        open_store(url, connect_timeout_s=0.1)
    assert PASSWORD not in str(caught.value)


def test_wrong_urls_are_refused_and_name_the_fix(redis_cluster, redis_server):
    node = redis_cluster.nodes[0].address
    refused(
        errors.StoreUnsuitable,
        f'redis://ding:{PASSWORD}@{node}',
        r'is part of a Redis cluster. Use redis\+cluster:// with the addresses of its nodes',
    )
    refused(errors.StoreDenied, redis_cluster.url(user='ding:wrong@'), 'denies access.*DING_STORE_URL')
    refused(errors.StoreUnavailable, 'redis+cluster://127.0.0.1:1,127.0.0.1:2', 'no node of redis.*replies')


def test_single_server_is_no_cluster(redis_binary):
    with RedisServer(redis_binary, '--port', str(port := free_port())):
        refused(errors.StoreUnsuitable, f'redis+cluster://127.0.0.1:{port}', 'is no Redis cluster. Use redis://')


def test_one_node_that_replies_is_enough(redis_cluster, run):
    url = f'redis+cluster://ding:{PASSWORD}@127.0.0.1:1,{redis_cluster.nodes[2].address}'
    with open_store(url, run) as store:
        assert [store.put(f'v/{number}', {}, {}) for number in range(NUM_GROUPS)] == [1] * NUM_GROUPS
        assert store.info().address == f'redis+cluster://127.0.0.1:1,{redis_cluster.nodes[2].address}'
        assert store.info().server.startswith(('redis ', 'valkey '))


def test_opening_connects_once_to_each_node(redis_cluster, run):
    with open_store(redis_cluster.url(), run) as store:
        groups = [store.client.server.availability_of(f's/{group}') for group in range(NUM_GROUPS)]
        assert sum(group.num_sessions for group in groups) == 3


def test_groups_share_the_connections_to_a_node(cluster, run):
    def num_connections():
        lists = [node.client.client_list() for node in cluster.nodes_with_slots()]
        return sum(one['user'] == 'ding' for clients in lists for one in clients)

    with open_store(cluster.url(), run) as store:
        for group in range(NUM_GROUPS):
            store.put(f'v/{group}', {}, {})
            store.append(f's/{group}', {}, chunk(0))
        assert num_connections() == 3, 'one thread needs one connection to each node'
        source = cluster.node_of(slot_for(run, SECOND))
        others = [f'v/{group}' for group in range(NUM_GROUPS) if group != shard_of(SECOND, NUM_GROUPS)]
        stay = [name for name in others if cluster.node_of(slot_for(run, name)) is source]
        cluster.move(slot_for(run, SECOND), other_than(cluster, source))
        store.append(SECOND, {}, chunk(1))
        assert not any(store.is_away_for(name) for name in stay)
        assert {store.put(name, {}, {}) for name in stay} == {2}
        sessions = [store.client.server.availability_of(name).num_sessions for name in stay]
        assert sessions == [1] * len(stay), 'a group that leaves disturbs no other one'
        store.retire()
    eventually(lambda: num_connections() == 0, 'all connections are closed')


def test_each_search_begins_with_another_node(monkeypatch):
    """A node that is cut off from the others would name the same dead primary again and again."""
    nodes, asked = ClusterNodes('redis+cluster://a:1,b:2,[::1]'), []

    def execute(self, host, *words):
        asked.append(host)
        return [[0, 5460, [b'a', 1]], [5461, 16383, [b'', 9], [b'::2', 3]]]

    monkeypatch.setattr(ClusterNodes, 'execute', execute)
    group = Group(nodes, 'run', 0)
    assert group.find_primary() == 'redis://a:1'
    assert [each.primary for each in nodes.ranges] == ['a:1', 'a:9']
    assert [each.replicas for each in nodes.ranges] == [(), ('[::2]:3',)]
    for _ in range(4):
        group.find_primary()
    assert asked[:4] == ['a:1', 'b:2', '[::1]:6379', '[::2]:3']


def test_node_without_slots_is_passed_over(monkeypatch):
    """Such as one that was reset: the nodes that were known before are asked again."""
    nodes, slots = ClusterNodes('redis+cluster://a:1'), {'a:1': [[0, 16383, [b'b', 2]]], 'b:2': []}
    monkeypatch.setattr(ClusterNodes, 'execute', lambda self, host, *words: slots[host])
    assert [each.primary for each in nodes.find()] == ['b:2']
    slots['a:1'], slots['b:2'] = [], [[0, 16383, [b'b', 2]]]
    for _ in range(3):
        assert [each.primary for each in nodes.find()] == ['b:2']
    assert nodes.failures == {'a:1': 'it knows no slots'}
    slots['b:2'] = []
    with pytest.raises(redis.ConnectionError, match='a:1: it knows no slots, b:2: it knows no slots'):
        nodes.find()
    assert [each.primary for each in nodes.ranges] == ['b:2']


def test_url_names_some_nodes():
    url = 'rediss+cluster://u:p%40@[::1]:5,b?ssl_ca_certs=f'
    check_url(url)
    assert ClusterUrl.parse(url).hosts == ('[::1]:5', 'b:6379')
    assert ClusterUrl.parse(url).node_url('c:7') == 'rediss://u:p%40@c:7?ssl_ca_certs=f'
    assert address_of(url) == 'rediss+cluster://[::1]:5,b'


def test_large_payloads_are_read_from_replicas_of_the_slot(cluster, run):
    """Also after the replica has become the primary, and the other way round."""
    array, replica = np.arange(500_000), cluster.replica()
    with open_store(cluster.url(), run, host_plane='off') as writer:
        writer.append(FIRST, {}, {'x': array})
        for name in (FIRST, SECOND):
            writer.put(name, {}, {'x': array})
        with open_store(cluster.url(), run, host_plane='off') as store:
            for _ in range(2):
                cluster.wait_until_whole()
                replica, primary = cluster.replica(), cluster.node_of(slot_for(run, FIRST))
                wait_until_it_has_all(primary, replica)
                replica.client.config_resetstat()
                assert np.array_equal(store.read(FIRST)[0].arrays['x'], array)
                assert all(np.array_equal(store.get(name).arrays['x'], array) for name in (FIRST, SECOND))
                assert replica.client.info('commandstats')['cmdstat_get']['calls'] == 9
                cluster.plan_failover(replica)


def wait_until_it_has_all(primary, replica):
    def has_all():
        behind = replica.client.info('replication')['slave_repl_offset']
        return primary.client.info('replication')['master_repl_offset'] == behind

    wait_until(has_all, 'the replica has all')


def test_doctor_shows_the_nodes_and_what_a_failover_needs(cluster):
    found = {finding.name: finding for finding in check_servers(cluster.url())}
    assert found['store'].status == OK
    assert (found['cluster'].status, found['cluster'].found) == (
        OK,
        '4 of 4 nodes reply, 3 primaries, 16,384 of 16,384 slots',
    )
    replica = cluster.replica()
    assert f'replica {replica.address}, 0 bytes behind' in found['replicas'].found
    assert found['replicas'].found.count('no replica') == 2
    assert found['replicas'].fix.startswith('start a replica of each primary')
    assert found['replica reads'].found == f'large payloads are read from replicas: {replica.address}'
    replica.ask('ACL', 'SETUSER', 'ding', '-readonly')
    reads = next(finding for finding in check_cluster(cluster.url()) if finding.name == 'replica reads')
    assert (reads.status, reads.fix.partition(':')[0]) == (WARN, 'add the right +readonly to its user')
    replica.ask('ACL', 'SETUSER', 'ding', '+readonly')
    replica.kill()
    nodes = next(finding for finding in check_cluster(cluster.url()) if finding.name == 'cluster')
    assert nodes.status == WARN
    assert f'3 of 4 nodes reply, 3 primaries, 16,384 of 16,384 slots; {replica.address}: ' in nodes.found


# --- slots that move


def test_stream_is_read_while_its_slot_moves(cluster, run):
    slot = slot_for(run, FIRST)
    with Flow(cluster.url(), run, FIRST, host_plane='off') as flow:
        for _ in range(3):
            source = cluster.node_of(slot)
            for number, _ in enumerate(cluster.moving(slot, other_than(cluster, source))):
                if number < 3:
                    eventually(lambda: True, 'a moment passes')
            flow.go_on()
            assert cluster.node_of(slot) is not source


def test_no_script_runs_while_a_slot_moves(cluster, run, monkeypatch):
    """All keys that the scripts declare are here, and the parts of an entry are gone: an ack must wait."""
    monkeypatch.setattr(parts, 'INLINE_BYTES', 1000)
    monkeypatch.setattr(parts, 'PART_BYTES', 400)
    slot, tag = slot_for(run, FIRST), tag_of(run, shard_of(FIRST, NUM_GROUPS))
    with open_store(cluster.url(), run, host_plane='off') as store:
        reader = Reader(store, FIRST, 'r')
        places = [store.append(FIRST, {}, chunk(number, 200)) for number in range(3)]
        source = cluster.node_of(slot)
        missing = [f'ding:{{{tag}}}/{FIRST}:{part}' for part in ('filled', 'ends', 'planes', 'room')]
        for key in missing:  # as after a backfill, a delete and a change of transport
            if not source.client.exists(key):
                source.client.hset(key, 'x', 'y') if key.endswith('filled') else source.client.set(key, '0')
        assert len(reader.read()) == 3
        target = other_than(cluster, source)
        cluster.begin_to_move(slot, source, target)
        for key in source.client.scan_iter(f'ding:{{{tag}}}*:part:*'):
            source.ask('MIGRATE', '127.0.0.1', target.port, key, 0, 5000)
        before = source.client.hgetall(f'ding:{{{tag}}}/{FIRST}:meta')
        with store.nonblocking(), pytest.raises(errors.StoreUnavailable, match='TRYAGAIN|ASK|moving this slot'):
            store.ack(FIRST, 'r', places[1])
        assert source.client.hgetall(f'ding:{{{tag}}}/{FIRST}:meta') == before
        assert source.client.xlen(f'ding:{{{tag}}}/{FIRST}:log') == 3
        for key in source.client.scan_iter(f'ding:{{{tag}}}*'):
            source.ask('MIGRATE', '127.0.0.1', target.port, key, 0, 5000)
        for node in (target, source):
            node.ask('CLUSTER', 'SETSLOT', slot, 'NODE', target.id)
        store.ack(FIRST, 'r', places[1])


def test_value_and_counter_follow_their_slot(cluster, run):
    """What is sent again because a slot moved takes effect once."""
    slot = slot_for(run, SECOND)
    with open_store(cluster.url(), run) as store, open_store(cluster.url(), run) as other:
        version = store.put(SECOND, {}, {'x': np.arange(100_000)})
        for number in range(1, 4):
            cluster.move(slot, other_than(cluster, cluster.node_of(slot)))
            assert store.add(SECOND, 1) == number
            version = store.decide(SECOND, {'number': number}, version)
            assert other.get(SECOND).header == {'number': number}
            assert other.add(SECOND, 0) == number
        assert version == 4
        assert other.put(SECOND, {}, {'x': np.arange(100_000)}) == 5
        assert store.get(SECOND).arrays['x'][-1] == 99_999


@pytest.mark.parametrize('call', ['read', 'get', 'wait_for_version', 'append'])
def test_call_that_blocks_follows_its_slot(cluster, run, call):
    calls = {
        'read': lambda store: [number_of(entry) for entry in store.read(FIRST, timeout_s=WAIT_S)],
        'get': lambda store: store.get(FIRST, timeout_s=WAIT_S).version,
        'wait_for_version': lambda store: bool(wait_for_version(store)),
        'append': lambda store: store.append('f/0', {}, chunk(1, 80), timeout_s=WAIT_S).number,
    }
    with open_store(cluster.url(), run, max_pending_bytes=1000) as store, open_store(cluster.url(), run) as other:
        reader = Reader(other, 'f/0', 'learner')
        store.append('f/0', {}, chunk(0, 80))
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(calls[call], store)
            source = cluster.node_of(slot_for(run, FIRST))
            eventually(lambda: source.client.info('clients')['blocked_clients'] > 0, 'it waits')
            cluster.move(slot_for(run, FIRST), other_than(cluster, source))
            other.append(FIRST, {}, chunk(5))
            other.put(FIRST, {}, {})
            assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [0]
            while call == 'append' and not waiting.done():
                reader.ack()  # It is refused once: the other node begins a new epoch with it.
                reader.read(timeout_s=0.1)
            assert waiting.result(WAIT_S) == {'read': [5], 'get': 1, 'wait_for_version': True, 'append': 2}[call]


def wait_for_version(store):
    while not store.wait_for_version(FIRST, 1, timeout_s=1.0):
        pass
    return True


# --- nodes that die


def test_killed_primary_is_replaced_by_its_replica(cluster, run):
    with Flow(cluster.url(), run, FIRST, host_plane='off') as flow:
        former = cluster.node_of(slot_for(run, FIRST))
        former.kill()
        flow.go_on()
        assert cluster.node_of(slot_for(run, FIRST)) is not former


def test_planned_failover_loses_nothing(cluster, run):
    with Flow(cluster.url(), run, FIRST) as flow:
        former = cluster.node_of(slot_for(run, FIRST))
        cluster.plan_failover(cluster.replica())
        wait_until(lambda: cluster.node_of(slot_for(run, FIRST)) is not former, 'the replica has the slot')
        flow.go_on()


def test_node_without_replica_delays_only_its_names(cluster, run, monkeypatch, caplog):
    options = {'reconnect_timeout_s': 0.3, 'check_every_s': 0.1, 'host_plane': 'off'}
    with open_store(cluster.url(), run, **options) as store, Flow(cluster.url(), run, FIRST, host_plane='off') as flow:
        store.append(SECOND, {}, chunk(0))
        node = cluster.node_of(slot_for(run, SECOND))
        node.kill()
        eventually(lambda: store.is_away_for(SECOND), 'it is noticed')
        with pytest.raises(errors.StoreUnavailable, match=f'{node.address}, which has slot .*Start it or a replica'):
            store.add(SECOND, 1)
        assert store.add(FIRST, 1) == 1
        assert not store.is_away_for(FIRST)
        with monkeypatch.context() as patched:
            connect = Mock(side_effect=ClusterNode.connect)
            patched.setattr(ClusterNode, 'connect', lambda server: connect(server))
            found, find_away = open_to_read(cluster.url(), run, connect_timeout_s=0.01)
        with found:
            assert len(find_away()) == 1
            assert found.info().counters == {FIRST: 1}
        num_on_it = sum(cluster.node_of(slot_of(tag_of(run, group))) is node for group in range(NUM_GROUPS))
        assert num_on_it > 1
        assert connect.call_count == 3, 'one try for all groups of a node'
        with open_store(cluster.url(), run, connect_timeout_s=0.01) as late:
            assert f'connect: redis://{node.address}, which has' in caplog.text
            assert late.add(FIRST, 1) == 2
        flow.go_on()
        with contextlib.suppress(errors.AppendUnsettled):
            store.append(SECOND, {}, chunk(1))
        node.start()
        cluster.wait_until_whole()
        store.flush()
        assert [number_of(entry) for entry in store.read(SECOND)] == [0, 1]


@pytest.mark.long
def test_cluster_that_is_down_is_waited_for(cluster, run):
    for node in cluster.nodes:
        node.client.config_set('cluster-require-full-coverage', 'yes')
    with open_store(cluster.url(), run, reconnect_timeout_s=0.3) as store:
        store.add(FIRST, 1)
        node = cluster.node_of(slot_for(run, SECOND))
        node.kill()
        wait_until(lambda: 'cluster_state:fail' in cluster.nodes[0].ask('CLUSTER', 'INFO'), 'it is down')
        with pytest.raises(errors.StoreUnavailable, match='cluster-require-full-coverage to no'):
            store.add(FIRST, 1)
        node.start()
        wait_until(cluster.is_whole, 'it is up')
        assert store.add(FIRST, 1) == 2


def test_advice_of_all_nodes_is_logged_once(cluster, run, caplog):
    for node in cluster.nodes:
        node.client.config_set('maxmemory-policy', 'volatile-lru')
    try:
        with open_store(cluster.url(), run) as store:
            assert len(store.info().values) == 0  # It connects each group.
            assert caplog.text.count('volatile-lru') == 1
            assert 'volatile-lru' in store.client.server.advice
    finally:
        for node in cluster.nodes:
            node.client.config_set('maxmemory-policy', 'noeviction')
