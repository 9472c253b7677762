"""Learners that no launcher starts: torchrun's processes, and learners that join from another host."""

import sys
from pathlib import Path

import pytest
from jobs import ROOT, TINY, ding_store, job, records, table

pytest.importorskip('ding')
pytest.importorskip('gym')
pytestmark = pytest.mark.timeout(300)

MAIN = str(ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py')
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']


def tiny(cwd, iterations=60):
    return ['--', 'python', TINY, '--trace', str(Path(cwd, 'trace')), '--max-train-iter', str(iterations)]


def ends_of_learners(cwd):
    return [each for each in records(cwd / 'trace') if each['event'] == 'end' and each['roles'] == ['learner']]


def test_learner_that_joins_trains_with_the_launchers(tmp_path, redis_server):
    store = ['--store', redis_server.url, '--run', 'joined-learner']
    start = ding_store('run', *store, '--roles', 'learner=1,collector=1', '--learners', 2, *tiny(tmp_path))
    join = ding_store('join', *store, '--role', 'learner', '--wait', '--learners', 2, *tiny(tmp_path))
    with job(start, tmp_path) as run:
        run.wait_for(lambda: 'logs in' in run.text, 'its start')
        with job(join, tmp_path, name='join') as joined:
            assert run.wait() == 0, run.text
            assert joined.wait() == 0, joined.text
    assert 'as learner, node 0, rank 1 of 2' in joined.text
    rows = table(run.text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, run.text
    ends = ends_of_learners(tmp_path)
    assert len({each['pid'] for each in ends}) == 2
    assert len({each['train_iter'] for each in ends}) == 1
    assert sum(each['replay'] for each in ends) == rows['rows ingested']


@pytest.mark.long
def test_torchrun_starts_the_learners_of_a_script_with_the_flag(tmp_path, redis_server):
    name, script = 'torchrun-learners', [MAIN, '--max-train-iter', '60']
    where = ['--store', redis_server.url, '--run', name]
    environment = dict(DING_STORE_URL=redis_server.url, DING_STORE_RUN=name)
    collect = ding_store('join', *where, '--role', 'collector', '--wait', '--learners', 2, '--', 'python', *script)
    with job([*TORCHRUN, *script], tmp_path, name='torchrun', **environment) as ranks:
        with job(collect, tmp_path, name='collector') as collector:
            assert ranks.wait() == 0, ranks.text
            assert collector.wait() == 0, collector.text
    assert 'rank 1 of 2 learners is connected' in ranks.text


@pytest.mark.long
def test_torchrun_without_python_starts_join(tmp_path):
    roles = ['--roles', 'learner=0,collector=1', '--learners', 2]
    join = [*TORCHRUN, '--no-python', *ding_store('join', '--run', 'r', '--role', 'learner', *tiny(tmp_path))]
    with job(ding_store('run', '--run', 'r', *roles, *tiny(tmp_path)), tmp_path) as run:
        run.wait_for(lambda: 'logs in' in run.text, 'its start')
        with job(join, tmp_path, name='torchrun') as ranks:
            assert run.wait() == 0, run.text
            assert ranks.wait() == 0, ranks.text
    rows = table(run.text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, run.text
    assert sum(each['replay'] for each in ends_of_learners(tmp_path)) == rows['rows ingested']
