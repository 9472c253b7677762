"""``--checkpoint`` of the mains: a learner that is killed goes on, with its replay of real elements."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from jobs import PIPELINES as HERE
from jobs import ROLES, ROOT, ding_store, job, status
from needs import need_extra

pytest.importorskip('ding')
sys.path.insert(0, str(HERE))
from tiny import PIPELINES, arguments  # noqa: E402

pytestmark = pytest.mark.timeout(300)


def log_of(directory):
    path = Path(directory, '.ding_store/r/logs/learner-0.log')
    return path.read_text(errors='replace') if path.exists() else ''


@pytest.mark.parametrize('name', ['pong_r2d2'])
def test_a_killed_learner_goes_on(tmp_path, name):
    _, _, _, extra, module = PIPELINES[name]
    need_extra(module, extra)
    main, *options = arguments(name)
    command = ['run', '--run', 'r', '--roles', ROLES, '--', 'python', str(ROOT / main), *options]
    with job(ding_store(*command, '--max-train-iter', 10**6, '--checkpoint'), tmp_path, PYTHONUNBUFFERED='1') as run:
        run.wait_for(lambda: 'checkpoint of iteration' in log_of(tmp_path), 'a checkpoint')
        members = status(tmp_path, '--run', 'r')['members']
        os.kill(next(m['pid'] for m in members if m['role'] == 'learner'), signal.SIGKILL)
        run.wait_for(lambda: 'resuming from' in log_of(tmp_path), 'a learner that goes on')
        resumed = int(re.search(r'resuming from .*: train iteration (\d+)', log_of(tmp_path))[1])
        assert resumed > 0
        run.wait_for(lambda: max(iterations(log_of(tmp_path))) > resumed, 'checkpoint of what it trained since')


def iterations(log):
    return [int(n) for n in re.findall(r'checkpoint of iteration (\d+)', log)]
