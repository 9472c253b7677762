"""The batch script of `ding-store slurm`: its form, and its commands run as processes beside stand-ins of Slurm's."""

import contextlib
import os
import re
import signal
import subprocess

import pytest
from jobs import DING_STORE, TINY, Job, ding_store, environment, job, table
from redis_server import find_binary, left_by_runs

pytest.importorskip('ding')
pytest.importorskip('gym')
pytestmark = pytest.mark.timeout(600)
ROLES = 'learner=1,collector=2'


def script(cwd, *options, roles=ROLES, command=('python', 'main.py')):
    words = ['slurm', '--run', 'pong', '--roles', roles, '--time', '1:00:00', *options, '--', *command]
    with job(ding_store(*words), cwd, name='slurm') as made:
        return made.wait(), made.text


def test_script_has_two_parts_with_their_options(tmp_path):
    options = ['--per-node', 4, '--learner=--partition=gpu --gres=gpu:1', '--collectors=--partition=cpu']
    code, text = script(tmp_path, *options, '--set', 'max_lead=4', roles='learner=1,collector=2..10,evaluator=1')
    assert code == 0, text
    learner, collectors = text.split('#SBATCH hetjob\n')
    assert re.findall('^#SBATCH --(?:partition|gres).*$', learner, re.M) == [
        '#SBATCH --partition=gpu',
        '#SBATCH --gres=gpu:1',
    ]
    assert '#SBATCH --partition=cpu\n' in collectors
    assert '#SBATCH --nodes=3\n' in collectors
    assert '--signal=B:TERM@660' in learner
    assert text.count('--set max_lead=4') == 2
    assert subprocess.run(['bash', '-n'], input=text, text=True, capture_output=True, timeout=60).stderr == ''


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        (['--time', 'soon'], 'should read like'),
        (['--learner=partition=gpu'], 'should be an option of sbatch'),
        (['--roles', 'worker=4'], 'has no collectors'),
        (['--roles', 'learner=1,collector=0'], 'has no collectors'),
        (['--store', 'redis://host'], 'Export DING_STORE_URL'),
    ],
)
def test_script_with_a_wrong_option_is_refused(tmp_path, options, reason):
    code, text = script(tmp_path, *options)
    assert code == 2, text
    assert reason in text
    assert 'Traceback' not in text


#: ``srun`` starts the command here, as on one node. ``scancel`` signals it. ``scontrol`` notes what it was asked.
SRUN = """#!/bin/bash
echo $$ >> "$TMPDIR/steps"
trap 'kill -TERM $pid 2>/dev/null' TERM
while [[ "$1" == --* ]]; do shift; done
"$@" &
pid=$!
code=0
wait $pid || code=$?
while kill -0 $pid 2>/dev/null; do wait $pid || code=$?; done
exit $code
"""


@pytest.fixture
def slurm(tmp_path):
    """Variables of a job on a node whose Slurm is played."""
    if find_binary() is None:
        pytest.skip('needs a redis-server')
    bin_ = tmp_path / 'bin'
    bin_.mkdir()
    programs = {
        'srun': SRUN,
        'scancel': '#!/bin/bash\nkill -TERM $(cat "$TMPDIR/steps") 2>/dev/null; rm "$TMPDIR/steps"\n',
        'scontrol': f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n',
        'ding-store': f'#!/bin/bash\nexec {" ".join(DING_STORE)} "$@"\n',
        'hostname': '#!/bin/bash\necho 127.0.0.1\n',
    }
    for name, text in programs.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    (tmp_path / 'main.py').write_text(
        f'import runpy, sys\nsys.argv[1:] = ["--ckpt", "--trace", {str(tmp_path / "trace")!r}, "--until", '
        f'{str(tmp_path / "stop")!r}]\nrunpy.run_path({TINY!r}, run_name="__main__")\n'
    )
    return environment(PATH=f'{bin_}:{os.environ["PATH"]}', SLURM_JOB_ID='7', TMPDIR=str(tmp_path))


class Batch(Job):
    """The batch script, as slurmd runs it on the first node of the job."""

    def __init__(self, cwd, variables, name):
        self.out = cwd / f'{name}.out'
        with open(self.out, 'wb') as out:
            options = dict(cwd=cwd, env=variables, stdout=out, stderr=out, start_new_session=True)
            self.process = subprocess.Popen(['bash', 'job.sbatch'], **options)

    def close(self):
        self.kill_group()


@pytest.mark.long
@pytest.mark.parametrize('redis', ['of the job', 'lasting'])
def test_job_at_its_time_limit_is_queued_again_and_resumes(tmp_path, slurm, redis_server, redis):
    if redis == 'lasting':  # it has the end of the first job when the second one's collectors start
        slurm['DING_STORE_URL'] = redis_server.url
    code, text = script(tmp_path, '--per-node', 2)
    assert code == 0, text
    (tmp_path / 'job.sbatch').write_text(text)
    with contextlib.closing(Batch(tmp_path, slurm, 'first')) as first:
        first.wait_for(lambda: list((tmp_path / 'checkpoints' / 'pong').glob('iteration_*')), 'a checkpoint')
        os.kill(first.process.pid, signal.SIGTERM)  # as --signal=B: does, the script alone
        assert first.wait() == 1, first.text
    assert (tmp_path / 'asked').read_text() == 'requeue 7\n'
    assert 'the collectors of this host leave the run' in first.text
    with contextlib.closing(Batch(tmp_path, slurm, 'second')) as second:
        second.wait_for(lambda: re.search(r'train iters [1-9]', second.text), 'training')
        (tmp_path / 'stop').touch()
        assert second.wait() == 0, second.text
    log = (tmp_path / '.ding_store' / 'pong' / 'logs' / 'learner-0.log').read_text()
    assert 'resuming from' in log, log
    before, rows = table(first.text), table(second.text)
    assert rows['chunks lost'] == 0
    assert rows['rows ingested'] > before['rows ingested'] > 0, first.text + second.text
    if redis == 'of the job':
        # The second Redis begins without the first one's reports. The replay, and so what was ingested, goes on.
        assert rows['rows ingested'] - rows['rows appended'] >= before['rows ingested'], first.text + second.text
    else:
        with redis_server.client() as client:
            assert left_by_runs(client) == []
    assert not list(tmp_path.glob('ding_store-slurm-*'))
