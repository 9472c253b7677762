"""Jobs whose learners or workers share updates at their own pace, in real processes."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from jobs import PIPELINES, ROOT, TINY, ding_store, job, records, status, table

from ding_store.metrics.history import read_history
from ding_store.run.health import seen_in
from ding_store.storage.embedded.private_server import running

pytest.importorskip('ding')
pytest.importorskip('gym')
pytestmark = pytest.mark.timeout(600)

LEARNERS = 'learner=2,evaluator=1,collector=1'
WORKER = PIPELINES / 'tiny_a2c.py'


def learners(cwd, sync, *options, end=('--max-train-iter', 30)):
    trace = ['--ckpt', '--trace', Path(cwd, 'trace'), *end]
    settings = ['--set', f'learners={sync!r}', *options]
    return ding_store('run', '--run', 'r', '--roles', LEARNERS, *settings, '--', 'python', TINY, *trace)


def workers(cwd, number, sync, *options, iterations=30):
    trace = ['--trace', Path(cwd, 'trace'), '--max-train-iter', iterations]
    settings = ['--set', f'learners={sync!r}', *options]
    return ding_store('run', '--run', 'r', '--roles', f'worker={number}', *settings, '--', 'python', WORKER, *trace)


def alive(cwd, role):
    if running(Path(cwd, '.ding_store', 'r')) is None:
        return {}
    found = [each for each in status(cwd, 'r')['members'] if each['role'] == role and each['state'] == 'alive']
    return {each['figures']['rank']: each for each in found if each['figures'].get('train_iter')}


def ends(cwd):
    return [
        each
        for each in records(Path(cwd, 'trace'))
        if each['event'] == 'end' and each.get('roles', ['learner']) == ['learner']
    ]


@pytest.mark.parametrize(
    'sync',
    [
        'async',
        *(
            pytest.param(sync, marks=pytest.mark.long)
            for sync in ('gradients', 'average', 'elastic', 'gossip', 'hogwild')
        ),
    ],
)
def test_learners_share_updates_and_ingest_each_row_once(tmp_path, sync):
    with job(learners(tmp_path, {'sync': sync}), tmp_path) as run:
        assert run.wait() == 0, run.text
    rows = table(run.text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, run.text
    assert rows['chunks lost'] == 0
    assert len(ends(tmp_path)) == 2
    logs = [Path(tmp_path, f'.ding_store/r/logs/learner-{rank}.log').read_text() for rank in (0, 1)]
    assert all(f"rank {rank} of 2 shares its updates (sync '{sync}')" in log for rank, log in enumerate(logs))


@pytest.mark.long
def test_a_killed_learner_is_started_again_alone(tmp_path):
    command = learners(tmp_path, {'sync': 'async'}, '--checkpoint', 'saved', end=('--until', tmp_path / 'done'))
    with job(command, tmp_path) as run:
        found = run.wait_for(lambda: alive(tmp_path, 'learner').get(1), 'rank 1 that trains')
        os.kill(found['pid'], signal.SIGKILL)
        run.wait_for(lambda: alive(tmp_path, 'learner').get(1, found)['pid'] != found['pid'], 'another rank 1')
        (tmp_path / 'done').touch()
        assert run.wait() == 0, run.text
    rows = table(run.text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, run.text
    assert re.search(r'started again as learner rank 1 .*it begins with the newest parameters', run.text), run.text
    assert 'all learners stop' not in run.text


def test_workers_run_an_unmodified_script_to_its_end(tmp_path):
    command = workers(tmp_path, 2, {'sync': 'async', 'max_staleness': 3}, '--json', tmp_path / 'figures.json')
    health = tmp_path / 'health'
    with job(command, tmp_path, DING_STORE_HEALTH=str(health)) as run:
        run.wait_for(lambda: {each.name for each in seen_in(str(health))} == {'worker-0', 'worker-1'}, 'signs of both')
        assert run.wait() == 0, run.text
    found = ends(tmp_path)
    assert len(found) == 2
    assert max(each['train_iter'] for each in found) >= 30
    first = {}
    for each in records(tmp_path / 'trace'):
        if each['event'] == 'collected':
            first.setdefault(each['pid'], each['obs'])
    assert len(first) == 2
    assert len(set(map(tuple, first.values()))) == 2  # they play other episodes
    assert sorted(each['evaluations'] >= 0 for each in found) == [False, True]  # worker 0 alone evaluates
    rows = table(run.text)
    assert rows['env steps'] >= max(each['env_step'] for each in found) > 16 * 28
    assert len(list(tmp_path.glob('tiny_a2c*'))) == 1  # worker 1 writes no files
    figures = json.loads((tmp_path / 'figures.json').read_text())
    used, dropped = (figures['updates'][f'updates_{name}'] for name in ('used', 'dropped_stale'))
    sent = figures['updates']['updates_sent']
    assert 0 < sent - 2 <= used + dropped <= sent  # at the end, the last one of each worker may be on its way
    assert sum(count for name, count in figures['staleness'].items() if name.isdecimal()) == used
    assert figures['staleness']['max'] <= 3
    history = read_history(str(tmp_path / 'tiny_a2c'))
    assert 0 < history[-1]['updates_used'] <= used
    assert 0 < history[-1]['env_step'] <= rows['env steps']


@pytest.mark.long
def test_workers_with_replays_keep_them_with_the_checkpoints(tmp_path):
    def gorila(number):
        script = ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py', '--config', 'cartpole_gorila'
        options = '--run', 'r', '--roles', 'worker=2', '--checkpoint', 'saved'
        return ding_store('run', *options, '--', 'python', *script, '--max-train-iter', number)

    with job(gorila(10**6), tmp_path) as run:
        run.wait_for(lambda: len(alive(tmp_path, 'worker')) == 2, 'two workers that train')
        run.wait_for(lambda: list((tmp_path / 'saved').glob('iteration_*')), 'a checkpoint')
        os.kill(run.process.pid, signal.SIGTERM)
        run.wait()
    assert {each.name for each in (tmp_path / 'saved' / 'replay').iterdir()} == {'rank-0-of-2', 'rank-1-of-2'}
    with job(gorila(30), tmp_path) as run:
        assert run.wait() == 0, run.text
    assert 'goes on from its checkpoints' in run.text
    assert 'resuming from' in (tmp_path / '.ding_store/r/logs/worker-0.log').read_text()


def test_workers_join_and_leave_a_running_job(tmp_path, redis_server):
    place = '--store', redis_server.url

    def join(*options, number=10**6):
        script = WORKER, '--trace', tmp_path / 'trace', '--max-train-iter', number
        settings = *place, '--run', 'r', '--set', "learners={'sync': 'async'}"
        return ding_store('join', *settings, *options, '--', 'python', *script)

    def ranks():
        found = [each for each in status(tmp_path, store=redis_server.url)['members'] if each['state'] == 'alive']
        return {each['figures']['rank'] for each in found if each['figures'].get('train_iter')}

    with job(workers(tmp_path, 1, {'sync': 'async'}, *place, iterations=10**6), tmp_path) as run:
        run.wait_for(lambda: 'logs in' in run.text, 'its start')
        with job(join('--role', 'worker', '--wait'), tmp_path, name='join') as joined:
            joined.wait_for(lambda: ranks() == {0, 100}, 'two workers that train')
            os.kill(joined.process.pid, signal.SIGTERM)
            assert joined.wait() == 128 + signal.SIGTERM, joined.text
        assert re.search("joined run 'r', which now has worker=[12]\n", joined.text), joined.text
        with job(join('--role', 'collector'), tmp_path, name='collector') as refused:
            assert refused.wait() == 2
            assert "run 'r' has workers, so no collector can join it. Join with --role worker" in refused.text
        assert run.process.poll() is None
        with job(join('--role', 'worker', number=5), tmp_path, name='last') as last:
            assert last.wait() == 0, last.text
        assert run.wait() == 0, run.text
    assert 'worker 100 finished at env step' in run.text
    assert len(ends(tmp_path)) == 3
    assert table(run.text)['env steps'] == max(each['env_step'] for each in ends(tmp_path))
    assert len(list(tmp_path.glob('tiny_a2c*'))) == 1  # Worker 0 alone writes files.


@pytest.mark.long
def test_killed_worker_is_started_again_and_status_counts(tmp_path):
    command = workers(tmp_path, 2, {'sync': 'async', 'max_staleness': 3}, iterations=10**6)
    with job(command, tmp_path) as run:
        found = run.wait_for(lambda: len(alive(tmp_path, 'worker')) == 2 and alive(tmp_path, 'worker'), 'two workers')
        os.kill(found[1]['pid'], signal.SIGKILL)
        run.wait_for(lambda: 'started again as worker rank 1' in run.text, 'a restart')
        run.wait_for(lambda: alive(tmp_path, 'worker').get(1, found[1])['pid'] != found[1]['pid'], 'another worker 1')
        seen = status(tmp_path)['figures']
        assert seen['num_workers'] >= 1
        assert seen['updates']['updates_used'] > 0
        assert sum(count for name, count in seen['staleness'].items() if name.isdecimal()) > 0
        assert seen['staleness']['max'] <= 3
        os.kill(alive(tmp_path, 'worker')[0]['pid'], signal.SIGKILL)
        assert run.wait() == 1
    assert re.search(r'worker rank 0 .* was killed by SIGKILL', run.text)
    assert 'it cannot go on without its worker' in run.text


@pytest.mark.long
def test_workers_start_again_after_redis_lost_its_memory(tmp_path, forgetful_server):
    place = '--store', forgetful_server.url

    def living(rank):
        found = [each for each in status(tmp_path, store=forgetful_server.url)['members'] if each['state'] == 'alive']
        found = [each['pid'] for each in found if each['figures'].get('train_iter') and each['figures']['rank'] == rank]
        return found[-1] if found else None

    def kill_and_wait(run, rank, pid):
        os.kill(pid, signal.SIGKILL)
        run.wait_for(lambda: f'started again as worker rank {rank}' in run.text, f'a restart of worker {rank}')
        run.wait_for(lambda: living(rank) not in (None, pid), f'another worker {rank}')

    command = workers(tmp_path, 2, {'sync': 'async'}, *place, '--checkpoint', 'saved', iterations=10**6)
    with job(command, tmp_path) as run:
        run.wait_for(lambda: living(0) and living(1), 'two workers')
        run.wait_for(lambda: list((tmp_path / 'saved').glob('iteration_*')), 'a checkpoint')
        first, second = living(0), living(1)
        forgetful_server.kill()
        forgetful_server.start()
        kill_and_wait(run, 1, second)
        kill_and_wait(run, 0, first)
        assert re.search('started again as worker rank 1 .*; it begins with the newest parameters', run.text), run.text
        assert re.search('started again as worker rank 0 .* 1 of 5; it goes on from its checkpoint', run.text), run.text
