"""Jobs with several learners in real processes: what they share, how they end, and what a killed one does to them."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from jobs import TINY, ding_store, job, records, status, table

from ding_store.datasets import DataSet, episodes_of
from ding_store.storage.embedded.private_server import running

pytest.importorskip('ding')
pytest.importorskip('gym')
pytestmark = pytest.mark.timeout(600)

ROLES = 'learner=2,evaluator=1,collector=2'


def several(cwd, *options, iterations=60):
    command = ['--', 'python', TINY, '--ckpt', '--trace', str(Path(cwd, 'trace')), '--max-train-iter', str(iterations)]
    return ding_store('run', '--run', 'r', '--roles', ROLES, *options, *command)


def learners(cwd):
    if running(Path(cwd, '.ding_store', 'r')) is None:
        return {}
    found = [each for each in status(cwd, 'r')['members'] if each['role'] == 'learner']
    return {each['figures']['rank']: each for each in found if each['state'] == 'alive' and 'rank' in each['figures']}


def trained(cwd):
    """Return the living learners once both have trained."""
    found = learners(cwd)
    return found if len(found) == 2 and all(each['figures'].get('train_iter') for each in found.values()) else None


def log_of(cwd, rank):
    return Path(cwd, f'.ding_store/r/logs/learner-{rank}.log').read_text()


def test_two_learners_share_experience_that_is_recorded(tmp_path):
    settings = ['--set', "learners={'partitions': 4}", '--set', f'record={tmp_path / "set"}']
    with job(several(tmp_path, *settings), tmp_path) as run:
        assert run.wait() == 0, run.text
    rows = table(run.text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, run.text
    assert rows['chunks lost'] == 0
    ends = [each for each in records(tmp_path / 'trace') if each['event'] == 'end' and each['roles'] == ['learner']]
    assert len(ends) == 2
    assert len({(each['train_iter'], each['env_step']) for each in ends}) == 1
    assert ends[0]['train_iter'] >= 60
    assert min(each['replay'] for each in ends) > 0
    assert sum(each['replay'] for each in ends) == rows['rows ingested']
    # Five updates per eight steps, as with one learner, but for those before a batch was there.
    assert 0.7 * 5 * (rows['env steps'] - 128) / 8 <= rows['train iterations'] <= 5 * rows['env steps'] / 8
    assert 'rank 1 of 2 learners is connected' in log_of(tmp_path, 1)
    assert not list(tmp_path.glob('tiny_dqn_*'))  # rank 1 writes no files
    data = DataSet(tmp_path / 'set')
    assert len(data) == rows['rows appended']
    episodes = episodes_of(data)
    for steps in map(data.columns, map(episodes.rows, range(len(episodes.lengths)))):
        assert np.array_equal(steps['obs'][1:], steps['next_obs'][:-1])


GROWTH = 'replay_growth={"start": 400, "env_steps": 800}'


@pytest.mark.long
@pytest.mark.parametrize('settings', [('train_ratio=free', GROWTH), ('samples_per_insert=40', 'error_buffer=640')])
def test_learners_with_another_ratio_share_the_experience(tmp_path, settings):
    options = [word for each in settings for word in ('--set', each)]
    with job(several(tmp_path, *options, iterations=400), tmp_path) as run:
        assert run.wait() == 0, run.text
    rows = table(run.text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, run.text
    assert rows['chunks lost'] == 0
    ends = [each for each in records(tmp_path / 'trace') if each['event'] == 'end' and each['roles'] == ['learner']]
    assert len({(each['train_iter'], each['env_step']) for each in ends}) == 1


def test_killed_learner_ends_a_run_without_checkpoints(tmp_path):
    with job(several(tmp_path, iterations=10**6), tmp_path) as run:
        found = run.wait_for(lambda: trained(tmp_path), 'two learners that train')
        os.kill(found[1]['pid'], signal.SIGKILL)
        assert run.wait() == 1
    assert re.search(r'learner rank 1 .* was killed by SIGKILL', run.text), run.text
    assert 'it cannot go on without its learner' in run.text


@pytest.mark.long
def test_killed_learner_is_started_again_with_all_others(tmp_path):
    settings = ['--set', "learners={'partitions': 4}"]
    with job(several(tmp_path, '--checkpoint', 'saved', *settings, iterations=400), tmp_path) as run:
        found = run.wait_for(lambda: trained(tmp_path), 'two learners that train')
        os.kill(found[1]['pid'], signal.SIGKILL)
        assert run.wait() == 0, run.text
    assert 'all learners stop, and are started again together' in run.text
    assert run.text.count('restart 1 of 5') == 2
    rows = table(run.text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, run.text
    assert rows['chunks lost'] == 0


@pytest.mark.long
@pytest.mark.parametrize(('found', 'num'), [(2, 1), (1, 2)])
def test_run_goes_on_with_another_number_of_learners(tmp_path, found, num):
    until = tmp_path / 'until'

    def start(number):
        roles = ['--roles', f'learner={number},evaluator=1,collector=2', '--checkpoint', 'saved']
        command = ['python', TINY, '--ckpt', '--trace', tmp_path / 'trace', '--until', until]
        return job(ding_store('run', '--run', 'r', *roles, '--', *command), tmp_path, name=f'of-{number}')

    def train_iter():
        members = status(tmp_path, 'r')['members'] if running(tmp_path / '.ding_store' / 'r') is not None else []
        counts = [each['figures'].get('train_iter', 0) for each in members if each['role'] == 'learner']
        return max(counts, default=0)

    with start(found) as run:
        before = run.wait_for(train_iter, 'training')
        with job(ding_store('stop', '--run', 'r'), tmp_path, name='stop') as stop:
            stop.wait()
        assert run.wait() == 1, run.text
    with start(num) as refused:
        assert refused.wait() == 2, refused.text
    assert f'ding-store reshard CHECKPOINT --run r --learners {num}' in refused.text
    with job(ding_store('reshard', 'saved', '--run', 'r', '--learners', num), tmp_path, name='reshard') as reshard:
        assert reshard.wait() == 0, reshard.text
    with start(num) as run:
        run.wait_for(lambda: train_iter() > before + 50, 'more training')
        until.touch()
        assert run.wait() == 0, run.text
    rows = table(run.text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, run.text
    assert rows['chunks lost'] == 0
    ends = [each for each in records(tmp_path / 'trace') if each['event'] == 'end' and each['roles'] == ['learner']]
    assert sum(each['replay'] for each in ends[-num:]) == rows['rows ingested']
