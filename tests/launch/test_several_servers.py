"""Jobs on several Redis servers."""

import pytest
from jobs import ROLES, ROOT, TINY, ding_store, job, status, table
from redis_server import RedisServer, left_by_runs

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
        arguments += ['--', 'python', TINY, '--trace', tmp_path / 'trace', '--max-train-iter', 50]
        with job(ding_store(*arguments), tmp_path) as run:
            assert run.wait() == 0, run.text
        rows_of(run.text)
        assert_clean((one, other))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize('number', [0, 1])
def test_cartpole_lives_through_the_death_of_one_server(tmp_path, redis_binary, number):
    kept = '--appendonly', 'yes', '--appendfsync', 'always'
    with RedisServer(redis_binary, *kept) as one, RedisServer(redis_binary, *kept) as other:
        url = f'{one.url} {other.url}'

        def num_rows():
            members = status(tmp_path, '--run', 'r', '--store', url)['members']
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
