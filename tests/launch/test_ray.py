"""The actors of dizoo_configs/ray_job.py on a real Ray, where it is installed."""

import os
import signal
import sys
import tempfile

import pytest
from jobs import ROOT, TINY, job, status
from redis_server import left_by_runs

from ding_store.storage import open_store

pytest.importorskip('ding')
pytest.importorskip('ray')
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def parent_of(pid):
    with open(f'/proc/{pid}/stat') as file:
        return int(file.read().rpartition(')')[2].split()[1])


def test_actors_that_are_killed_come_back_and_nothing_is_lost(tmp_path, redis_server):
    def working():
        return {
            m['pid']
            for m in status(tmp_path, 'ray', redis_server.url)['members']
            if m['role'] == 'collector' and m['state'] == 'alive' and m['figures'].get('rows')
        }

    options = ['--cpus', '0.2', '--checkpoint', tmp_path / 'checkpoints']
    script = [TINY, '--ckpt', '--trace', tmp_path / 'trace', '--until', tmp_path / 'stop']
    command = [sys.executable, ROOT / 'dizoo_configs' / 'ray_job.py', *options, '--', 'python', *script]
    with tempfile.TemporaryDirectory() as directory:  # Ray's sockets are there: their paths must be short
        variables = dict(DING_STORE_URL=redis_server.url, RAY_TMPDIR=directory)
        with job([str(word) for word in command], tmp_path, **variables) as run:
            first, second = run.wait_for(lambda: sorted(working()) if len(working()) == 2 else None, 'rows of both')
            os.kill(parent_of(first), signal.SIGKILL)  # the actor
            os.kill(second, signal.SIGKILL)  # the process alone
            run.wait_for(lambda: len(working() - {first, second}) == 2, 'rows of the two in their places')
            (tmp_path / 'stop').touch()
            assert run.wait() == 0, run.text
    assert 'ray_job: learner has ended with status 0' in run.text
    with redis_server.client() as client:
        assert left_by_runs(client) == []


def test_actors_of_a_running_cluster_get_the_variables_of_the_driver(tmp_path, redis_server):
    (tmp_path / 'main.py').write_text(
        'import os, signal, sys\n'
        'from ding.framework import task\n'
        'if task.router.node_id < 100:\n'
        '    signal.pause()\n'
        "print(os.environ['DING_STORE_SENTINEL_USER'], file=open('seen', 'w'))\n"
        'sys.exit(3)\n'
    )
    options = ['--cpus', '0.2', '--collectors', '1', '--restarts', '1', '--', 'python', 'main.py']
    with tempfile.TemporaryDirectory() as directory:
        ray = [sys.executable, '-m', 'ray.scripts.scripts', 'start', '--head', '--block', '--port=0', '--num-cpus=1']
        ray.append('--include-dashboard=false')
        with job(ray, tmp_path, name='cluster', RAY_TMPDIR=directory) as cluster:
            try:
                cluster.wait_for(lambda: '--block' in cluster.text, 'the cluster')
                variables = dict(DING_STORE_URL=redis_server.url, RAY_TMPDIR=directory, DING_STORE_SENTINEL_USER='me')
                command = [sys.executable, ROOT / 'dizoo_configs' / 'ray_job.py', *options]
                with job([str(word) for word in command], tmp_path, **variables) as run:
                    assert run.wait() == 3, run.text
            finally:
                cluster.process.terminate()  # it ends the processes of the cluster
                cluster.wait()
    assert (tmp_path / 'seen').read_text() == 'me\n'
    assert 'ray_job: collector 0 is given up' in run.text
    assert 'ray_job: the run cannot go on without its collector' in run.text
    with open_store(redis_server.url, 'ray') as store:
        store.clear()
