"""A job whose Redis server is replaced twice while it trains."""

import pytest
from jobs import ROLES, ROOT, ding_store, job, status, table
from sentinel_group import ASK_PASSWORD, SentinelGroup, wait_until

from ding_store.environment import ENV_SENTINEL_PASSWORD, ENV_URL

pytest.importorskip('ding')
pytest.importorskip('gym')

MAIN = str(ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py')


@pytest.mark.long
@pytest.mark.timeout(600)
def test_cartpole_lives_through_two_failovers(tmp_path, redis_binary, monkeypatch):
    with SentinelGroup(redis_binary) as group:
        monkeypatch.setenv(ENV_URL, group.url())
        monkeypatch.setenv(ENV_SENTINEL_PASSWORD, ASK_PASSWORD)

        def env_steps():
            members = status(tmp_path, store=group.url())['members']
            return sum(one['figures'].get('rows', 0) for one in members if one['role'] == 'collector')

        arguments = ['run', '--run', 'r', '--roles', ROLES, '--', 'python', MAIN, '--max-env-step', 800]
        with job(ding_store(*arguments), tmp_path) as run:
            run.wait_for(env_steps, 'rows')
            former = group.primary()
            former.kill()
            group.wait_for_failover(former)
            group.restart_as_replica(former)
            steps = env_steps()
            run.wait_for(lambda: env_steps() > steps, 'more rows')
            second = group.primary()
            group.plan_failover()
            assert group.wait_for_failover(second) is former
            assert run.wait() == 0, run.text
        wait_until(group.is_complete, 'the second primary is a replica')
        rows = table(run.text)
        assert rows['rows appended'] == rows['rows ingested'] > 700, run.text
        assert rows['chunks lost'] == 0
        assert [key for key in former.client.keys('*') if not key.endswith(':ends')] == []
