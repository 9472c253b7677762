"""The actors of dizoo_configs/ray_job.py on a real Ray, where it is installed."""

import os
import signal
import sys
import tempfile

import pytest
from jobs import ROOT, TINY, job, status
from redis_server import left_by_runs

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
