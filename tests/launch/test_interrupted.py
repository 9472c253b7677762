"""Trainings that are told to end, by Ctrl-C or a scheduler's SIGTERM: what was trained is on the disk, and they end."""

import os
import signal
import sys

import pytest
from jobs import DEADLINE_S, PIPELINES, TINY, ding_store, job, status

pytest.importorskip('ding')
pytest.importorskip('gym')
torch = pytest.importorskip('torch')
pytestmark = pytest.mark.timeout(600)
#: The first checkpoint is made at once, and the next one by who is told to end.
RUN = ['run', '--run', 'r', '--checkpoint', '--set', 'checkpoint={"interval_s": 1e6}']
TINY_ARGUMENTS = ['--trace', 'trace', '--ckpt', '--max-train-iter', '1000000']
#: Iterations that come after the first checkpoint.
TRAINED = 20


def ditask(tmp_path):
    (tmp_path / 'main.py').write_text(
        f'import sys\nsys.path.insert(0, {str(PIPELINES)!r})\nsys.argv[1:] = {TINY_ARGUMENTS}\n'
        'from tiny_dqn import main\n'
    )
    command = [sys.executable, '-c', 'from ding.entry.cli_ditask import cli_ditask; cli_ditask()', '--package', '.']
    return [*command, '--main', 'main.main', '--parallel-workers', '3', '--topology', 'mesh', '--startup-interval', '0']


def saved(tmp_path):
    """Train iterations of the checkpoints there are, each of which can be read."""
    paths = (tmp_path / 'checkpoints' / 'r').glob('iteration_*.pth.tar')
    return sorted(torch.load(path)['ding_store']['counters']['train_iter'] for path in paths)


def trained(tmp_path, store=None):
    members = status(tmp_path, store=store)['members']
    return max((each['figures'].get('train_iter', 0) for each in members if each['role'] == 'learner'), default=0)


def logs(tmp_path):
    return ''.join(path.read_text(errors='replace') for path in tmp_path.glob('.ding_store/r/logs/learner-*.log'))


@pytest.mark.parametrize(
    ('kind', 'number', 'everybody'),
    [
        pytest.param('ditask', signal.SIGINT, True, marks=pytest.mark.long),
        pytest.param('ditask', signal.SIGTERM, False, marks=pytest.mark.long),
        ('roles', signal.SIGTERM, False),
        pytest.param('roles', signal.SIGHUP, True, marks=pytest.mark.long),
    ],
)
def test_interrupted_run_saves_what_it_trained(tmp_path, kind, number, everybody):
    """A terminal tells the whole group, as Slurm and systemd do; Kubernetes tells the first process."""
    roles = ['--roles', 'learner=1,collector=2']
    command = [*roles, '--', 'python', TINY, *TINY_ARGUMENTS] if kind == 'roles' else ['--', *ditask(tmp_path)]
    with job(ding_store(*RUN, *command), tmp_path) as run:
        run.wait_for(lambda: 'checkpoint of iteration' in run.text + logs(tmp_path), 'a checkpoint')
        (first,) = saved(tmp_path)
        known = run.wait_for(lambda: (n := trained(tmp_path)) > first + TRAINED and n, 'iterations after it')
        assert saved(tmp_path) == [first]
        for _ in range(1 + (number == signal.SIGHUP)):  # of a terminal that is closed kernel and shell both say so
            (os.killpg if everybody else os.kill)(run.process.pid, number)
        assert run.wait() != 0, run.text
        if kind == 'roles':
            assert 'ended: interrupted' in run.text
            assert f'its checkpoints are in {tmp_path}/checkpoints/' in run.text
    before, last = saved(tmp_path)
    assert (before, last >= known) == (first, True)


def test_interrupted_run_saves_while_the_store_is_away(tmp_path, own_server):
    """Ctrl-C is not to wait for it: nobody would, and who kills the launcher kills the learner before it has saved."""
    options = ['--store', own_server.url, '--set', f'reconnect_timeout_s={2 * DEADLINE_S}']
    command = [*RUN, *options, '--roles', 'learner=1,collector=2', '--', 'python', TINY, *TINY_ARGUMENTS]
    with job(ding_store(*command), tmp_path) as run:
        run.wait_for(lambda: 'checkpoint of iteration' in logs(tmp_path), 'a checkpoint')
        (first,) = saved(tmp_path)
        run.wait_for(lambda: trained(tmp_path, own_server.url) > first + TRAINED, 'iterations after it')
        own_server.kill()
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait() == 1, run.text
    assert 'ended: interrupted' in run.text
    assert saved(tmp_path)[-1] > first


@pytest.mark.parametrize('number', [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_script_signalled_twice_at_once_saves_what_it_trained(tmp_path, number):
    """By who tells the whole group, and by its launcher, which hands on what it was told."""
    command = ding_store(*RUN, '--', sys.executable, TINY, *TINY_ARGUMENTS, '--fail', 99)
    with job(command, tmp_path) as run:
        run.wait_for(lambda: 'Training: Train Iter(100)' in run.text, 'iterations')
        os.killpg(run.process.pid, number)
        assert run.wait() == 128 + number, run.text
    assert 'checkpoint of iteration' in run.text.partition('signal received')[2]
    assert saved(tmp_path)[-1] >= 100
