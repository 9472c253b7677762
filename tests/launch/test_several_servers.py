"""Jobs on several Redis servers."""

import json
from dataclasses import replace

import pytest
from jobs import ROLES, ROOT, TINY, ding_store, job, status, table
from redis_cluster import wait_until
from redis_server import RedisServer, left_by_runs

from ding_store.config import StoreConfig
from ding_store.datasets import DataSet
from ding_store.environment import ENV_URL
from ding_store.errors import ConfigError, StoreUnavailable
from ding_store.launch.status import Look, show_status
from ding_store.metrics.slow import why_slow
from ding_store.storage import open_store
from ding_store.storage.redis.groups import NUM_GROUPS, slot_of, tag_of
from ding_store.storage.redis.store import open_to_read
from ding_store.storage.shards.placement import shard_of
from ding_store.storage.testing import eventually

pytest.importorskip('ding')
pytest.importorskip('gym')

MAIN = str(ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py')


def rows_of(text):
    rows = table(text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, text
    assert rows['chunks lost'] == 0
    return rows


def assert_clean(servers):
    for server in servers:
        with server.client() as client:
            assert client.info('commandstats')['cmdstat_evalsha']['calls'] > 10, 'it was used'
            left = left_by_runs(client)
            assert left == [], client.smembers(left[0])


def test_job_on_two_servers_ends_in_order(tmp_path, redis_binary):
    with RedisServer(redis_binary) as one, RedisServer(redis_binary) as other:
        arguments = ['run', '--run', 'r', '--store', f'{one.url} {other.url}', '--roles', 'learner=1,collector=1']
        arguments += ['--set', "learners={'partitions': 2}", '--set', f'record={tmp_path / "set"}']
        arguments += ['--', 'python', TINY, '--trace', tmp_path / 'trace', '--max-train-iter', 50]
        with job(ding_store(*arguments), tmp_path) as run:
            assert run.wait() == 0, run.text
        assert len(DataSet(tmp_path / 'set')) == rows_of(run.text)['rows appended']
        assert_clean((one, other))


def test_status_names_a_server_that_is_away(capsys, monkeypatch, redis_binary):
    monkeypatch.setattr('ding_store.launch.status.RATE_S', 0.0)
    names = [f'v/{number}' for number in range(4)]
    with RedisServer(redis_binary) as one, RedisServer(redis_binary) as other:
        config = StoreConfig(True, f'{one.url} {other.url}', 'r', store_options={'connect_timeout_s': 0.1})
        with open_store(config.url, 'r') as store:
            for name in names:
                store.put(name, {}, {})
        other.kill()
        assert show_status(config, as_json=True, every_s=None) == 0
        found = json.loads(capsys.readouterr().out)
        assert sorted(found['values']) == names[::2]
        assert found['server'].startswith(('redis ', 'valkey '))
        assert 'memory' not in found['server']
        (reason,) = found['servers_away']
        assert f'unix://{other.socket} is away: ' in reason
        show_status(config, as_json=False, every_s=None)
        assert 'what a server has is missing here' in capsys.readouterr().out
        swapped = replace(config, url=f'{other.url} {one.url}')
        with pytest.raises(ConfigError, match='in the same order'):
            show_status(swapped, as_json=True, every_s=None)
        one.kill()
        with pytest.raises(StoreUnavailable, match='cannot be reached'):
            show_status(config, as_json=True, every_s=None)


def test_status_sees_servers_leave_and_return(redis_binary):
    def values_and_away():
        found = look.read(0.0)
        return sorted(found['values']), [reason.split(' is away')[0] for reason in found['servers_away']]

    with RedisServer(redis_binary) as one, RedisServer(redis_binary, '--appendonly', 'yes') as other:
        url = f'{one.url} {other.url}'
        with open_store(url, 'r') as store:
            store.put('v/0', {}, {})
            store.put('v/1', {}, {})
        other.kill()
        store, find_away = open_to_read(url, 'r', connect_timeout_s=0.1)
        with store:
            look = Look(store, find_away)
            assert values_and_away() == (['v/0'], [f'look: {other.url}'])
            status = look.read(0.0)
            assert f'look: {other.url} is away' in why_slow(status)[0].found
            assert why_slow(status)[0].fails
            other.start()
            eventually(lambda: values_and_away() == (['v/0', 'v/1'], []), 'it is seen')
            one.kill()
            assert values_and_away() == (['v/1'], [f'look: {one.url}'])
            other.kill()
            assert values_and_away() == ([], [f'look: {one.url}', f'look: {other.url}'])
            other.start()
            eventually(lambda: values_and_away()[0] == ['v/1'], 'it is seen again')


def test_job_in_a_cluster_ends_in_order(tmp_path, redis_cluster):
    redis_cluster.flush()
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,collector=1', '--', 'python', TINY]
    arguments += ['--trace', tmp_path / 'trace', '--max-train-iter', 50]
    with job(ding_store(*arguments), tmp_path, **{ENV_URL: redis_cluster.url()}) as run:
        assert run.wait() == 0, run.text
    rows_of(run.text)
    assert [key for key in redis_cluster.keys('*') if not key.endswith(':ends')] == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_cartpole_in_a_cluster_lives_through_a_failover(tmp_path, redis_cluster):
    def num_rows():
        members = status(tmp_path, store=redis_cluster.url(user=''))['members']
        return sum(member['figures'].get('rows', 0) for member in members if member['role'] == 'collector')

    redis_cluster.flush()
    slot = slot_of(tag_of('r', shard_of('experience', NUM_GROUPS)))
    arguments = ['run', '--run', 'r', '--store', redis_cluster.url(user=''), '--roles', ROLES]
    with job(ding_store(*arguments, '--', 'python', MAIN, '--max-env-step', 800), tmp_path) as run:
        run.wait_for(num_rows, 'rows')
        former = next(one for one in redis_cluster.pair() if one in redis_cluster.nodes_with_slots())
        if redis_cluster.node_of(slot) is not former:
            redis_cluster.move(slot, former)
        former.kill()
        wait_until(lambda: redis_cluster.node_of(slot) is not former, 'the replica has the slot')
        redis_cluster.bring_back()
        before = num_rows()
        run.wait_for(lambda: num_rows() > before, 'more rows')
        others = [one for one in redis_cluster.nodes_with_slots() if one not in redis_cluster.pair()]
        redis_cluster.move(slot, others[0])
        moved_at = num_rows()
        run.wait_for(lambda: num_rows() > moved_at, 'more rows')
        assert run.wait() == 0, run.text
    assert rows_of(run.text)['rows appended'] > 700
    assert [key for key in redis_cluster.keys('*') if not key.endswith(':ends')] == []


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize('number', [0, 1])
def test_cartpole_lives_through_the_death_of_one_server(tmp_path, redis_binary, number):
    kept = '--appendonly', 'yes', '--appendfsync', 'always'
    with RedisServer(redis_binary, *kept) as one, RedisServer(redis_binary, *kept) as other:
        url = f'{one.url} {other.url}'

        def num_rows():
            members = status(tmp_path, store=url)['members']
            return sum(member['figures'].get('rows', 0) for member in members if member['role'] == 'collector')

        arguments = ['run', '--run', 'r', '--store', url, '--roles', ROLES, '--', 'python', MAIN, '--max-env-step', 800]
        with job(ding_store(*arguments), tmp_path) as run:
            run.wait_for(num_rows, 'rows')
            (one, other)[number].restart()
            before = num_rows()
            run.wait_for(lambda: num_rows() > before, 'more rows')
            assert run.wait() == 0, run.text
        assert rows_of(run.text)['rows appended'] > 700
        assert_clean((one, other))
