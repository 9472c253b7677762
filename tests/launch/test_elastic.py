"""Runs whose collectors die, come back, become more and fewer."""

import os
import re
import signal

import pytest
from jobs import TINY, ding_store, job, records, status, table

from ding_store.config import StoreConfig
from ding_store.run.ending import FINISH, clear_ended_run
from ding_store.run.scale import Target, put_target, target_of
from ding_store.run.several_learners import decide_num_learners
from ding_store.storage import open_store
from ding_store.storage.embedded.private_server import running
from ding_store.storage.urls import embedded_url

pytest.importorskip('ding')
pytest.importorskip('gym')
pytestmark = pytest.mark.timeout(600)


def tiny(cwd, *arguments):
    words = ['--trace', cwd / 'trace', '--until', cwd / 'stop', *arguments]
    return ['--', 'python', TINY, *map(str, words)]


def members(cwd, role='collector', state='alive'):
    if running(cwd / '.ding_store' / 'r') is None:
        return []
    return [m for m in status(cwd)['members'] if m['role'] == role and m['state'] == state]


def working(cwd):
    """The node ids of collectors that have sent experience."""
    return {m['node_id'] for m in members(cwd) if m['figures'].get('rows')}


def command(cwd, *arguments, code=0):
    with job(ding_store(*arguments), cwd, name='command') as run:
        assert run.wait() == code, run.text
        assert 'Traceback' not in run.text
        return run.text


def stop(run, cwd):
    (cwd / 'stop').touch()
    assert run.wait() == 0, run.text
    rows = table(run.text)
    appended = next(value for name, value in rows.items() if name.startswith('rows appended'))
    assert rows['rows ingested'] == appended == rows['env steps'] > 0, run.text
    assert rows['chunks lost'] == 0
    assert rows['rows ingested'] % 8 == 0
    return rows


def test_dead_collector_and_evaluator_are_started_again(tmp_path):
    roles = 'learner=1,evaluator=1,collector=2'
    with job(ding_store('run', '--run', 'r', '--roles', roles, *tiny(tmp_path)), tmp_path) as run:
        run.wait_for(lambda: working(tmp_path) == {2, 3}, 'rows of both')
        (evaluator,) = members(tmp_path, 'evaluator')
        killed = members(tmp_path)[0]
        os.kill(killed['pid'], signal.SIGKILL)
        os.kill(evaluator['pid'], signal.SIGKILL)
        run.wait_for(lambda: len(re.findall(r'started again as (collector|evaluator)', run.text)) == 2, 'others')
        run.wait_for(lambda: working(tmp_path) == {2, 3}, 'rows of the one in its place')
        run.wait_for(lambda: members(tmp_path, 'evaluator'), 'an evaluator')
        (dead,) = [m for m in status(tmp_path)['members'] if m['pid'] == killed['pid']]
        assert (dead['state'], dead['reason']) == (
            'failed',
            'it was killed by SIGKILL, and is started again in 1 s',
        )
        (evaluator,) = members(tmp_path, 'evaluator')
        os.kill(evaluator['pid'], signal.SIGTERM)
        run.wait_for(lambda: members(tmp_path, 'evaluator', 'left'), 'the end of the evaluator alone')
        run.wait_for(lambda: members(tmp_path, 'evaluator'), 'another evaluator')
        # What the dead one appended after its last report is in the replay, though no report of it counts it.
        assert 'rows appended (at least: 1 collector gave no last report)' in stop(run, tmp_path)
    assert 'finished: learner finished' in run.text


def test_collector_that_dies_at_once_is_given_up_by_name(tmp_path):
    options = ['run', '--run', 'r', '--roles', 'learner=1,collector=2', '--restarts', 1]
    with job(ding_store(*options, *tiny(tmp_path, '--broken', 3)), tmp_path) as run:
        run.wait_for(lambda: 'the run goes on without it' in run.text, 'the end of one')
        (dead,) = members(tmp_path, state='failed')
        assert dead['node_id'] == 3
        assert dead['reason'] == 'given up after 2 early ends in a row; last: it failed with exit code 1'
        assert run.text.count('as asked for by --broken') >= 2  # the last lines of its log
        run.wait_for(lambda: working(tmp_path) == {2}, 'rows of the other')
        assert re.search(r'^  ding-store join --role collector --run r ', run.text, re.M)
        stop(run, tmp_path)


@pytest.mark.parametrize(('role', 'node'), [('collector', 2), ('evaluator', 1)])
def test_run_whose_last_one_is_given_up_fails_by_name(tmp_path, redis_server, role, node):
    options = ['run', '--run', 'r', '--roles', 'learner=1,collector=1,evaluator=1', '--restarts', 0]
    options += ['--store', redis_server.url]
    with job(ding_store(*options, *tiny(tmp_path, '--broken', node)), tmp_path) as run:
        assert run.wait() == 1, run.text
    assert f'cannot go on without its {role}' in run.text
    assert f'failed: {role} (node {node}' in run.text
    with open_store(redis_server.url, 'r') as store:
        # Otherwise a launcher that resumes it on another host would wait for this one to start collectors.
        assert store.get('host/0').header['is_released']
        store.clear()


def test_scale_starts_and_retires_collectors(tmp_path):
    with job(ding_store('run', '--run', 'r', '--roles', 'learner=1,collector=1', *tiny(tmp_path)), tmp_path) as run:
        run.wait_for(lambda: working(tmp_path) == {2}, 'rows')
        assert "run 'r': 3 collectors" in command(tmp_path, 'scale', 'collector=3', '--run', 'r')
        run.wait_for(lambda: working(tmp_path) == {2, 100, 101}, 'rows of two more')
        command(tmp_path, 'scale', 'collector=1', '--run', 'r')
        run.wait_for(lambda: len(members(tmp_path)) == 1, 'the end of two')
        left = members(tmp_path, state='left')
        assert {m['reason'] for m in left} == {'it was asked to leave'}
        assert len(left) == 2
        for words, text in (
            (['collector=auto'], 'has no bounds'),
            (['collector=0'], 'should read like'),
            (['learner=2'], 'only collectors'),
        ):
            assert text in command(tmp_path, 'scale', *words, '--run', 'r', code=2)
        before = [r['env_step'] for r in records(tmp_path / 'trace') if r['event'] == 'begin']
        command(tmp_path, 'scale', 'collector=2', '--run', 'r')
        run.wait_for(lambda: working(tmp_path) == {2, 100}, 'the freed node id again')
        assert len(before) == 3
        stop(run, tmp_path)
    assert 'SIGKILL' not in run.text


def test_joined_host_starts_its_share_and_leaves_in_order(tmp_path):
    launcher = ding_store('run', '--run', 'r', '--roles', 'learner=1,collector=1', *tiny(tmp_path))
    with job(launcher, tmp_path) as run:
        run.wait_for(lambda: working(tmp_path), 'rows')
        join = ding_store('join', '--role', 'collector', '--capacity', 2, '--run', 'r', *tiny(tmp_path))
        with job(join, tmp_path, name='agent') as agent:
            agent.wait_for(lambda: 'starts up to 2 collectors' in agent.text, 'the agent')
            command(tmp_path, 'scale', 'collector=3', '--run', 'r')
            agent.wait_for(lambda: len(working(tmp_path)) == 3, 'rows of three')
            assert 'collector-100' not in ''.join(p.name for p in (tmp_path / '.ding_store/r/logs').glob('*.log'))
            os.kill(agent.process.pid, signal.SIGTERM)
            assert agent.wait() == 0, agent.text
            # The launcher starts those that the host no longer does.
            run.wait_for(lambda: len(working(tmp_path)) == 3, 'three again')
        stop(run, tmp_path)


def test_host_that_waits_learns_the_number_of_learners(tmp_path):
    url = embedded_url(f'{tmp_path}/.ding_store')
    with open_store(url, 'r') as store:  # an earlier job of this name was interrupted, as before a requeue
        put_target(store, Target(1, 1, 10))
        store.decide(FINISH, {'reason': 'interrupted', 'failed': True, 'parent': None}, 0)
    (tmp_path / 'main.py').write_text(
        'import os, signal\n'
        "print(os.environ.get('DING_STORE_LEARNERS'), file=open('learners', 'w'), flush=True)\n"
        'signal.pause()\n'
    )
    options = ['--wait', '--role', 'collector', '--capacity', 1, '--run', 'r', '--', 'python', 'main.py']
    with job(ding_store('join', *options), tmp_path, name='agent') as agent:
        waits = "waiting for the launcher of run 'r', which has ended: interrupted"
        agent.wait_for(lambda: waits in agent.text, 'the agent')
        with open_store(url, 'r') as store:
            # As a launcher does that resumes the run. The host must not go on with the earlier target.
            clear_ended_run(store, StoreConfig(url=url, run='r'))
            assert target_of(store) is None
            decide_num_learners(store, 2, started=2)
            put_target(store, Target(1, 1, 10))
            known = tmp_path / 'learners'
            agent.wait_for(lambda: known.exists() and known.read_text().endswith('\n'), 'a collector')
        assert known.read_text() == '2\n'
        os.kill(agent.process.pid, signal.SIGTERM)
        assert agent.wait() == 0, agent.text


def test_host_that_waits_for_no_launcher_leaves_at_a_signal(tmp_path):
    options = ['--wait', '--role', 'collector', '--capacity', 1, '--run', 'r', '--', 'python', TINY]
    with job(ding_store('join', *options), tmp_path, name='agent') as agent:
        agent.wait_for(lambda: 'waiting for the launcher' in agent.text, 'the agent')
        os.kill(agent.process.pid, signal.SIGTERM)
        assert agent.wait() == 0, agent.text
        assert 'left the run' in agent.text


def test_run_with_bounds_sizes_itself(tmp_path):
    sleeps = ['--collect-s', 0.2, '--train-s', 0.06]  # three and a bit are needed
    options = ['run', '--run', 'r', '--roles', 'learner=1,collector=1..6', '--set', 'heartbeat_s=0.5']
    with job(ding_store(*options, *tiny(tmp_path, *sleeps)), tmp_path) as run:
        found = run.wait_for(lambda: re.search(r'collectors: 1 become (\d), because (.*)', run.text), 'a change')
        assert found[2].startswith('the learner waits for experience')
        run.wait_for(lambda: len(working(tmp_path)) >= int(found[1]) > 1, 'rows of all')
        assert 'outside of 1..6' in command(tmp_path, 'scale', 'collector=9', '--run', 'r', code=2)
        stop(run, tmp_path)
