"""``--checkpoint`` of the mains: a learner that is killed goes on, with its replay of real elements."""

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from jobs import PIPELINES as HERE
from jobs import ROOT, ding_store, job, records, status
from needs import need_extra

pytest.importorskip('ding')
sys.path.insert(0, str(HERE))
from tiny import PIPELINES, arguments  # noqa: E402

pytestmark = pytest.mark.timeout(600)


def log_of(directory):
    path = Path(directory, '.ding_store/r/logs/learner-0.log')
    return path.read_text(errors='replace') if path.exists() else ''


def need_extra_of(name):
    _, _, extra, module = PIPELINES[name]
    if extra:
        need_extra(module, extra)


def kill_learner_and_wait(run, directory):
    """Kill it as soon as there is a checkpoint, and wait for one of what it trained after it was started again."""
    run.wait_for(lambda: 'checkpoint of iteration' in log_of(directory), 'a checkpoint')
    members = status(directory)['members']
    os.kill(next(m['pid'] for m in members if m['role'] == 'learner'), signal.SIGKILL)
    run.wait_for(lambda: 'resuming from' in log_of(directory), 'a learner that goes on')
    resumed = int(re.search(r'resuming from .*: train iteration (\d+)', log_of(directory))[1])
    assert resumed > 0
    run.wait_for(lambda: max(iterations(log_of(directory))) > resumed, 'a checkpoint of what it trained since')


def iterations(log):
    return [int(n) for n in re.findall(r'checkpoint of iteration (\d+)', log)]


@pytest.mark.long
@pytest.mark.parametrize('name', ['pong_r2d2', 'cartpole_ppo'])
def test_killed_learner_resumes_with_its_replay(tmp_path, name):
    need_extra_of(name)
    main, *options = arguments(name)
    # Without an evaluator, which might end it before.
    command = ['run', '--run', 'r', '--roles', 'learner=1,collector=2', '--', 'python', str(ROOT / main), *options]
    with job(ding_store(*command, '--max-train-iter', 10**6, '--checkpoint'), tmp_path, PYTHONUNBUFFERED='1') as run:
        kill_learner_and_wait(run, tmp_path)


@pytest.mark.parametrize(
    ('name', 'module', 'policy', 'max_use'),
    [
        ('pong_impala', 'atari.atari_impala_main', 'IMPALAPolicy', 1),
        pytest.param('qbert_ppo', 'atari.atari_ppo_main', 'PPOOffPolicy', 3, marks=pytest.mark.long),
    ],
    ids=['queue', 'at random'],
)
def test_rows_of_a_resumed_learner_are_used_at_most_max_use(tmp_path, name, module, policy, max_use):
    need_extra_of(name)
    _, *options = arguments(name)
    script = ['python', HERE / 'count_uses.py', tmp_path / 'uses', module, policy]
    command = ['run', '--run', 'r', '--checkpoint', '--roles', 'learner=1,collector=2', '--', *script, *options]
    with job(ding_store(*command, '--max-train-iter', 10**6), tmp_path, PYTHONUNBUFFERED='1') as run:
        kill_learner_and_wait(run, tmp_path)
        run.wait_for(lambda: len(collectors(uses_in(tmp_path))) == 2, 'elements of both collectors')
        run.wait_for(lambda: max(uses_in(tmp_path).values()) >= max_use, 'as many uses as are allowed')
    assert len({batch['pid'] for batch in records(tmp_path / 'uses')}) == 2, 'two lives of the learner'
    assert max(uses_in(tmp_path).values()) == max_use


def uses_in(directory):
    """How often each element was trained on."""
    return Counter(number for batch in records(directory / 'uses') for number in batch['numbers'])


def collectors(numbers):
    return {number // 10**6 for number in numbers}
