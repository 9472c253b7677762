"""Whole jobs in real processes, started as users start them."""

import itertools
import os
import re
import signal
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import DEADLINE_S, PIPELINES, ROLES, ROOT, TINY, ding_store, job, records, status, table
from prometheus_client.parser import text_string_to_metric_families
from scalars import scalars

from ding_store.launch.plot import POINTER
from ding_store.metrics.history import read_history
from ding_store.metrics.record import AXES, COLUMNS
from ding_store.storage.embedded.private_server import running
from ding_store.storage.testing import eventually

pytest.importorskip('ding')
pytest.importorskip('gym')
pytestmark = pytest.mark.timeout(600)

#: DI-engine's own tag of the return.
RETURN_TAG = 'basic/eval_episode_return_mean'
DQN_EXAMPLE = 'ding.example.dqn'
MAIN = str(ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py')


def tiny(trace, *arguments):
    return ['--', 'python', TINY, '--trace', str(trace), *map(str, arguments)]


def members(cwd, role, state='alive', run='r'):
    if running(Path(cwd, '.ding_store', run)) is None:
        return []
    return [m for m in status(cwd, run)['members'] if m['role'] == role and m['state'] == state]


def assert_private(directory):
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def rows_of_joined(cwd):
    """How many rows the first collector has made that joined later."""
    return sum(m['figures'].get('rows', 0) for m in members(cwd, 'collector') if m['node_id'] == 100)


def balanced(text):
    rows = table(text)
    assert rows['rows appended'] == rows['rows ingested'] > 0, text
    assert rows['chunks lost'] == 0
    return rows


def assert_recorded(directory, rows):
    """TensorBoard has the figures that every run with roles and a replay has, and the history ends with the table's."""
    found, history = scalars(directory), read_history(str(directory))
    tags = {f'store/{name}' for name in COLUMNS} - {f'store/{name}' for name in AXES}
    optional = ['checkpoint_overhead', 'learner_checkpoint', 'collector_wait_weights', 'learner_wait_ranks']
    optional += ['workers', 'updates_used', 'updates_dropped', 'stragglers', 'staleness', 'staleness_max']
    assert tags - set(found) <= {f'store/{name}' for name in optional}
    assert found[RETURN_TAG][-1][1] == pytest.approx(rows['last evaluation return'], abs=0.1)
    last = history[-1]
    assert (last['env_step'], last['train_iter']) == (rows['env steps'], rows['train iterations'])
    assert last['replay_bytes'] > last['replay_rows'] > 0
    assert found['store/replay_rows'][-1] == (last['env_step'], last['replay_rows'])


def test_cartpole_converges_and_its_counts_agree(tmp_path):
    with job(ding_store('run', '--run', 'r', '--roles', ROLES, '--', 'python', MAIN), tmp_path) as run:
        assert run.wait() == 0, run.text
        rows = balanced(run.text)
    assert rows['last evaluation return'] >= 195
    # Stock serial needs 1.0-3.1k env steps over its seeds; two collectors and a later evaluation may add to that.
    assert 500 < rows['env steps'] < 8000
    assert_recorded(tmp_path / 'cartpole_dqn_seed0', rows)

    # Five updates per eight steps, less those that stock skips too (until there are 64 rows) and the last chunks.
    updates = 5 * (rows['env steps'] - 56) / 8
    assert 0.95 * updates <= rows['train iterations'] <= updates
    assert 'finished: evaluator: mean return' in run.text
    # All lines of the loggers have one format, those of DI-engine's too.
    log = Path(tmp_path, '.ding_store/r/logs/learner-0.log').read_text()
    for text in ('ding_store: ', 'Stopping parallel worker'):
        assert re.search(rf'^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d learner-0: {text}', log, re.M), log
    assert 'INFO' not in log


@pytest.mark.long
@pytest.mark.parametrize('late', ['learner=4', 'collector=4', 'evaluator=4'])
def test_job_trains_in_any_start_order(tmp_path, late):
    options = ['--delay', late, '--set', 'wait_warn_s=60', '--json', tmp_path / 'figures.json']
    arguments = ['run', '--run', 'r', '--roles', ROLES, *options]
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--max-train-iter', 200)), tmp_path) as run:
        assert run.wait() == 0, run.text
        balanced(run.text)
    # Four members, each to the end of its script: nobody was stuck, killed or told to go.
    ends = [r for r in records(tmp_path / 'trace') if r['event'] == 'end']
    assert sorted(r['node'] for r in ends) == [0, 1, 2, 3]
    assert 'waiting for' not in ''.join(p.read_text() for p in Path(tmp_path, '.ding_store/r/logs').iterdir())


def test_collector_failing_after_the_end_does_not_fail_the_run(tmp_path):
    script = tmp_path / 'main.py'
    script.write_text(
        'import runpy, sys\n'
        'from ding.framework import task\n'
        f'runpy.run_path({TINY!r}, run_name="__main__")\n'
        'sys.exit(3 if task.router.node_id == 2 else 0)\n'
    )
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,evaluator=1,collector=1', '--', 'python', script]
    options = ['--trace', tmp_path / 'trace', '--max-train-iter', 100]
    with job(ding_store(*arguments, *map(str, options)), tmp_path) as run:
        assert run.wait() == 0, run.text
    assert 'collector (node 2' in run.text
    assert 'failed with exit code 3' in run.text


@pytest.mark.parametrize('cpu_roles', [pytest.param('', marks=pytest.mark.long), 'collector,evaluator'])
def test_roles_without_a_gpu_do_not_see_one(tmp_path, cpu_roles):
    script = tmp_path / 'main.py'
    script.write_text(
        'import os, runpy\n'
        'from ding.framework import task\n'
        'seen = os.environ.get("CUDA_VISIBLE_DEVICES")\n'
        f'open(f"{tmp_path}/{{task.router.node_id}}.seen", "w").write(repr(seen))\n'
        f'runpy.run_path({TINY!r}, run_name="__main__")\n'
    )
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,evaluator=1,collector=1']
    command = ['--', 'python', script, '--trace', tmp_path / 'trace', '--max-train-iter', 20]
    whole = ding_store(*arguments, f'--cpu-roles={cpu_roles}', *map(str, command))
    with job(whole, tmp_path, CUDA_VISIBLE_DEVICES='0,1') as run:
        assert run.wait() == 0, run.text
    hidden = "''" if cpu_roles else "'0,1'"
    assert [(tmp_path / f'{node}.seen').read_text() for node in (0, 1, 2)] == ["'0,1'", hidden, hidden]


def test_collector_joins_a_running_job_and_leaves_with_it(tmp_path):
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,collector=1']
    trace = tmp_path / 'trace'
    with job(ding_store(*arguments, *tiny(trace, '--max-train-iter', 100_000, '--watch')), tmp_path) as run:
        run.wait_for(lambda: 'replay' in run.text and members(tmp_path, 'collector'), 'a collector')
        join = ding_store('join', '--role', 'collector', '--run', 'r', *tiny(tmp_path / 'trace'))
        with job(join, tmp_path, name='join') as joined:
            joined.wait_for(lambda: rows_of_joined(tmp_path), 'rows of the joined collector')
            # Its first chunk came soon after it began: the learner had taken few of the other's in between.
            (begun,) = [r['env_step'] for r in records(trace) if r['event'] == 'begin' and r['node'] == 100]
            chunks = [r for r in records(trace) if r['event'] == 'watch']
            of_the_first = itertools.takewhile(lambda r: max(r['env_ids']) < 1 << 32, chunks)
            assert sum(r['rows'] for r in of_the_first) - begun < 8 * 300
            os.killpg(run.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal: the whole group
            assert run.wait() == 1
            joined.wait()
    assert "collector-100: joined run 'r', which now has learner=1, collector=2" in joined.text
    assert 'interrupted: ending the run' in run.text
    assert 'Traceback' not in run.text
    assert running(tmp_path / '.ding_store' / 'r') is not None  # kept for its grace: the next start goes on with it


@pytest.mark.long
def test_job_with_a_replaced_collector_converges(tmp_path):
    roles = 'learner=1,collector=2'  # the evaluator comes last, so that the job does not end before
    with job(ding_store('run', '--run', 'r', '--roles', roles, '--', 'python', MAIN), tmp_path) as run:
        run.wait_for(lambda: len(members(tmp_path, 'collector')) == 2, 'collectors')
        killed, stopped = (member['pid'] for member in members(tmp_path, 'collector'))
        os.kill(stopped, signal.SIGSTOP)  # so that it is the new one on whom the job depends
        os.kill(killed, signal.SIGKILL)
        join = ding_store('join', '--role', 'collector', '--run', 'r', '--', 'python', MAIN)
        with job(join, tmp_path, name='join') as joined:
            joined.wait_for(lambda: rows_of_joined(tmp_path), 'rows of the joined collector')
            os.kill(stopped, signal.SIGCONT)
            join = ding_store('join', '--role', 'evaluator', '--run', 'r', '--', 'python', MAIN)
            with job(join, tmp_path, name='evaluator') as evaluator:
                assert run.wait() == 0, run.text
                assert joined.wait() == 0, joined.text
                assert evaluator.wait() == 0, evaluator.text
    rows = table(run.text)
    assert rows['last evaluation return'] >= 195
    # What the dead one had not reported is there, too.
    assert rows['rows ingested'] == rows['rows appended (at least: 1 collector gave no last report)']
    assert rows['chunks lost'] == 0


def test_collector_that_raises_ends_only_itself(tmp_path):
    # DI-engine's task tells the mesh to finish when an exception leaves it: the others must not hear of that.
    arguments, stop = ['run', '--run', 'r', '--roles', ROLES, '--restarts', 0], tmp_path / 'stop'
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--until', stop, '--fail', 2)), tmp_path) as run:
        run.wait_for(lambda: 'the run goes on without it' in run.text, 'the failure')
        (dead,) = members(tmp_path, 'collector', 'failed')
        reason = 'given up after 1 early end in a row; last: RuntimeError: as asked for by --fail'
        assert (dead['node_id'], dead['reason']) == (2, reason)
        train_on(run, tmp_path)
        stop.touch()
        assert run.wait() == 0, run.text
    assert 'finished: learner finished' in run.text


@pytest.mark.parametrize(('line', 'tells'), [("raise RuntimeError('no such environment')", False), ('pass', True)])
def test_process_that_raises_before_joining_ends_no_run(tmp_path, line, tells):
    """The exchangers, which keep that from the mesh, are not there yet; it would pass for an end in order."""
    (tmp_path / 'main.py').write_text(
        'from ding.framework import task\n'
        "task.emit = lambda event, *values, **options: open('told', 'a').write(event)\n"
        f'with task.start(async_mode=False):\n    {line}\n'
    )
    with job(ding_store('join', '--wait', '--role', 'collector', '--', 'python', 'main.py'), tmp_path) as joined:
        assert joined.wait() == (0 if tells else 1), joined.text
    assert ('no such environment' in joined.text) == (not tells)
    assert (tmp_path / 'told').exists() == tells


def test_learner_that_raises_leaves_a_run_to_resume(tmp_path):
    arguments = ['run', '--run', 'r', '--roles', ROLES]
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--fail', 0)), tmp_path) as run:
        assert run.wait() == 1, run.text
    assert 'cannot go on without its learner' in run.text
    assert ' launcher: failed: learner (node 0' in run.text
    assert 'launcher: finished' not in run.text
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,collector=1']
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--max-train-iter', 50)), tmp_path) as run:
        assert run.wait() == 0, run.text
    # Rows that the first learner had not taken are in the second one's replay.
    assert 'had failed (learner (node 0' in run.text
    assert 'going on with it' in run.text


@pytest.mark.parametrize('was_killed', [False, pytest.param(True, marks=pytest.mark.long)])
def test_run_left_by_one_script_is_refused_to_another(tmp_path, was_killed):
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,collector=1']
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--max-train-iter', 100_000)), tmp_path) as run:
        run.wait_for(lambda: last_trained(tmp_path) >= 100, 'training')
        os.kill(run.process.pid if was_killed else members(tmp_path, 'learner')[0]['pid'], signal.SIGKILL)
        run.wait()
    other = tmp_path / 'other.py'
    other.write_text(f"import runpy\nrunpy.run_path({TINY!r}, run_name='__main__')\n")
    said = []

    def is_judged_by_script():
        with job(ding_store(*arguments, '--', 'python', other, '--trace', tmp_path / 'trace'), tmp_path) as run:
            assert run.wait() == 2, run.text
            said.append(run.text)
        return 'is running already' not in run.text

    eventually(is_judged_by_script, 'all of the first have left')
    assert f"run 'r' was of {Path(TINY).stem}" in said[-1]
    assert 'this is other. Name this run with --run NAME' in said[-1]
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--max-train-iter', 50)), tmp_path) as run:
        assert run.wait() == 0, run.text
    assert ('had failed' in run.text) != was_killed, 'its end was not forgotten by who was refused'


def test_run_of_a_script_that_failed_early_is_free_for_others(tmp_path):
    (tmp_path / 'wrong.py').write_text("raise SystemExit('no such config')\n")
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,collector=1']
    with job(ding_store(*arguments, '--', 'python', tmp_path / 'wrong.py'), tmp_path) as run:
        assert run.wait() == 1, run.text
    assert 'no such config' in run.text
    assert 'on the store' not in run.text
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--max-train-iter', 50)), tmp_path) as run:
        assert run.wait() == 0, run.text


def test_learner_that_exits_early_ends_the_run(tmp_path):
    script = tmp_path / 'main.py'
    script.write_text(
        'import runpy, sys\nfrom ding.framework import task\n'
        'if task.router.node_id == 0:\n    sys.exit(0)\n'
        f"runpy.run_path({TINY!r}, run_name='__main__')\n"
    )
    command = ['run', '--run', 'r', '--roles', 'learner=1,collector=1', '--', 'python', script]
    with job(ding_store(*command, '--trace', tmp_path / 'trace'), tmp_path) as run:
        assert run.wait() == 1, run.text
    assert 'learner (node 0' in run.text
    assert 'ended before the run did' in run.text


def test_killed_learner_ends_the_job_by_name(tmp_path):
    arguments = ['run', '--run', 'r', '--roles', ROLES]
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--max-train-iter', 100_000)), tmp_path) as run:
        pid = run.wait_for(lambda: members(tmp_path, 'learner'), 'learner')[0]['pid']
        os.kill(pid, signal.SIGKILL)
        assert run.wait() == 1
    assert 'learner (node' in run.text
    assert 'was killed by SIGKILL' in run.text
    assert 'cannot go on without its learner' in run.text


def is_running(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize('number', [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_processes_end_with_their_launcher(tmp_path, number):
    arguments = ['run', '--run', 'r', '--roles', ROLES]
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--max-train-iter', 100_000)), tmp_path) as run:
        run.wait_for(lambda: len(members(tmp_path, 'collector')) == 2, 'collectors')
        pids = [m['pid'] for m in status(tmp_path)['members']]
        os.kill(run.process.pid, number)
        assert run.wait() == (1 if number == signal.SIGTERM else -signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while any(map(is_running, pids)):
            assert time.monotonic() < deadline, [pid for pid in pids if is_running(pid)]
            time.sleep(0.05)
    assert len(pids) >= 3
    assert ('interrupted' in run.text) == (number == signal.SIGTERM)


@pytest.mark.parametrize('watch', [pytest.param(False, marks=pytest.mark.long), True])
def test_middleware_of_the_learner_sees_each_chunk_once(tmp_path, watch):
    extra, stop = ['--watch'] if watch else [], tmp_path / 'stop'
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,collector=2']

    def seen():
        return [r for r in records(tmp_path / 'trace') if r['event'] == 'watch']

    def are_both_seen():  # each collector's envs keep apart from the other's
        return len({i for r in seen() for i in r['env_ids']}) > 8

    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--until', stop, *extra)), tmp_path) as run:
        run.wait_for(lambda: last_trained(tmp_path) >= 100 and (not watch or are_both_seen()), 'rows of both')
        stop.touch()
        assert run.wait() == 0, run.text
        rows = table(run.text)
    log = Path(tmp_path, '.ding_store/r/logs/learner-0.log').read_text()
    if watch:
        assert 'experience passes watch' in log
        assert sum(r['rows'] for r in seen()) == rows['env steps'] - (rows['rows appended'] - rows['rows ingested'])
    else:
        assert 'columns go into the replay directly' in log
        assert not seen()


def rewards_in_stock_parallel_mode(monkeypatch, num_steps):
    """Shape of a reward after DI-engine's own enhancer of a collector, and then of the learner it was sent to."""
    import torch
    import treetensor.torch as ttorch
    from ding.framework import task
    from ding.framework.middleware.functional.enhancer import nstep_reward_enhancer
    from easydict import EasyDict

    cfg = EasyDict(policy=dict(nstep=num_steps, discount_factor=0.97))
    step = dict(obs=torch.zeros(4), next_obs=torch.zeros(4), reward=torch.ones(1), done=torch.tensor([False]))
    ctx = SimpleNamespace(trajectories=[ttorch.as_tensor(step) for _ in range(20)], trajectory_end_idx=[19])
    monkeypatch.setattr(task.router, 'is_active', True)
    for role in (task.role.COLLECTOR, task.role.LEARNER):
        monkeypatch.setattr(task, '_roles', {role}, raising=False)
        nstep_reward_enhancer(cfg)(ctx)
    return list(ctx.trajectories[0].reward.shape)


def test_nstep_is_applied_as_often_as_in_plain_di_engine(tmp_path, monkeypatch):
    stock = rewards_in_stock_parallel_mode(monkeypatch, 3)
    arguments = ['run', '--run', 'r', '--roles', 'learner=1,collector=1']
    flags = ['--nstep', 3, '--watch']
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', *flags)), tmp_path) as run:
        seen = run.wait_for(
            lambda: [r for r in records(tmp_path / 'trace') if r['event'] == 'watch'], 'a chunk in the middleware'
        )
    assert seen[0]['reward'] == stock


@pytest.mark.long
def test_unmodified_example_under_ditask(tmp_path):
    ditask = [sys.executable, '-c', 'from ding.entry.cli_ditask import cli_ditask; cli_ditask()', '--package', '.']
    ditask += [
        '--main',
        f'{DQN_EXAMPLE}.main',
        '--parallel-workers',
        '3',
        '--topology',
        'mesh',
        '--startup-interval',
        '0',
    ]
    with job(ding_store('run', '--run', 'r', '--explain', '--', *ditask), tmp_path) as run:
        assert run.wait(280) == 0, run.text
    assert 'columns go into the replay directly' in run.text
    assert run.text.count('for ding.framework.middleware.ContextExchanger') == 3
    assert 'leaves alone' in run.text
    assert re.search(r'ding_store: policy main v1 \(lag 0\) at train iteration 0', run.text)
    assert 'Timeout when waiting' not in run.text


@pytest.mark.long
def test_ditask_worker_that_is_late_leaves_with_the_others(tmp_path):
    (tmp_path / 'late.py').write_text(
        'import sys, time\n'
        'from pathlib import Path\n'
        'from ding.framework import task\n'
        f'sys.path.insert(0, {os.path.dirname(TINY)!r})\n'
        "sys.argv[1:] = ['--trace', 'trace', '--max-train-iter', '50']\n"
        'import tiny_dqn\n'
        'def ended():\n'
        "    return Path('trace').exists() and Path('trace').read_text().count('\"end\"') == 3\n"
        'def main():\n'
        '    deadline = time.monotonic() + 120\n'
        '    while task.router.node_id == 3 and not ended() and time.monotonic() < deadline:\n'
        '        time.sleep(0.05)\n'
        '    tiny_dqn.main()\n'
    )
    ditask = [sys.executable, '-c', 'from ding.entry.cli_ditask import cli_ditask; cli_ditask()', '--package', '.']
    ditask += ['--main', 'late.main', '--parallel-workers', '4', '--topology', 'mesh', '--startup-interval', '0']
    with job(ding_store('run', '--run', 'r', '--set', 'wait_warn_s=60', '--', *ditask), tmp_path) as run:
        assert run.wait() == 0, run.text
    ends = {r['node']: r for r in records(tmp_path / 'trace') if r['event'] == 'end'}
    assert sorted(ends) == [0, 1, 2, 3]
    assert 'waiting for' not in run.text


@pytest.mark.long
def test_unmodified_example_in_one_process(tmp_path):
    command = ding_store('run', '--run', 'r', '--explain', '--', sys.executable, '-m', DQN_EXAMPLE)
    with job(command, tmp_path) as run:
        assert run.wait() == 0, run.text
    assert 'ding.data.DequeBuffer' in run.text
    assert 'uses ding_store.buffer.StoreBuffer for ding.data.DequeBuffer' in run.text
    assert not Path(tmp_path, '.ding_store').exists()  # one process needs no server


class TestRunningJob:
    """What a running job refuses. It goes on."""

    ARGUMENTS = ['run', '--run', 'r', '--roles', 'learner=1,collector=1']

    @pytest.fixture(scope='class')
    def cwd(self, tmp_path_factory):
        cwd = tmp_path_factory.mktemp('running')
        with job(ding_store(*self.ARGUMENTS, *tiny(cwd / 'trace')), cwd) as run:
            run.wait_for(lambda: members(cwd, 'learner') and members(cwd, 'collector'), 'its members')
            yield cwd
            assert status(cwd)['finished'] is None
            assert run.process.poll() is None, run.text

    def refused(self, cwd, *arguments, code=2):
        with job(ding_store(*arguments), cwd, name='refused') as other:
            assert other.wait() == code, other.text
        return other.text

    def test_second_job_in_a_running_run_is_refused(self, cwd):
        text = self.refused(cwd, *self.ARGUMENTS, *tiny(cwd / 'other'))
        assert "run 'r' is running already" in text

    def test_joining_a_second_learner_is_refused(self, cwd):
        for node_id in ([], ['--node-id', '7']):
            join = ['join', '--role', 'learner', '--run', 'r', *node_id, *tiny(cwd / 'other')]
            assert 'has a learner already' in self.refused(cwd, *join)

    def test_status_of_an_unknown_run_names_the_existing_ones(self, cwd):
        text = self.refused(cwd, 'status', '--run', 'q')
        assert "run 'q' is not running" in text
        assert 'running there: r' in text
        assert not Path(cwd, '.ding_store', 'q').exists()

    def test_second_collector_whose_elements_differ_is_refused(self, cwd):
        join = ['join', '--role', 'collector', '--run', 'r', *tiny(cwd / 'other', '--obs', 6)]
        text = self.refused(cwd, *join, code=1)
        assert all(part in text for part in ('SchemaMismatch', 'obs', '(4,)', '(6,)')), text
        eventually(lambda: members(cwd, 'collector', 'failed'), 'the failed one is reported')


def test_job_starts_with_a_collector_waiting_for_it(tmp_path):
    join = ding_store('join', '--wait', '--role', 'collector', '--run', 'r', *tiny(tmp_path / 't'))
    with job(join, tmp_path, name='join') as joined:
        joined.wait_for(lambda: members(tmp_path, 'collector'), 'the collector that waits')
        arguments = ['run', '--run', 'r', '--roles', 'learner=1,collector=1', '--delay', 'learner=1']
        with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--max-train-iter', 200)), tmp_path) as run:
            assert run.wait() == 0, run.text
            balanced(run.text)
        assert joined.wait() == 0, joined.text
    assert 'all processes had left' in run.text


def test_join_of_an_unknown_run_starts_nothing(tmp_path):
    join = ding_store('join', '--role', 'collector', '--run', 'q', *tiny(tmp_path / 'trace'))
    with job(join, tmp_path, name='join') as joined:
        assert joined.wait() == 2
    assert "run 'q' is not running" in joined.text
    assert not Path(tmp_path, '.ding_store').exists()


@pytest.mark.parametrize('victim', ['server_pid', pytest.param('supervisor_pid', marks=pytest.mark.long)])
def test_death_of_the_embedded_server_is_a_pause(tmp_path, victim):
    arguments, stop = ['run', '--run', 'r', '--roles', ROLES], tmp_path / 'stop'
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--until', stop)), tmp_path) as run:
        run.wait_for(lambda: last_trained(tmp_path) >= 100, 'training')
        os.kill(getattr(running(tmp_path / '.ding_store' / 'r'), victim), signal.SIGKILL)
        run.wait_for(lambda: 'lost the connection' in run.text, 'word of the loss')
        train_on(run, tmp_path)
        stop.touch()
        assert run.wait() == 0, run.text
        balanced(run.text)


@pytest.mark.parametrize('plane', ['auto', pytest.param('off', marks=pytest.mark.long)])
def test_memory_loss_of_the_server_is_a_pause(tmp_path, forgetful_server, plane):
    """Writers announce again, readers and members make themselves known again, and the books balance."""
    settings = f'store_options={{"host_plane": "{plane}"}}'
    options, stop = ['--store', forgetful_server.url, '--set', settings], tmp_path / 'stop'
    arguments = ['run', '--run', 'r', *options, '--roles', ROLES, *tiny(tmp_path / 'trace', '--until', stop)]
    with job(ding_store(*arguments), tmp_path) as run:
        run.wait_for(lambda: last_trained(tmp_path) >= 100, 'training')
        forgetful_server.restart()
        train_on(run, tmp_path)
        stop.touch()
        assert run.wait() == 0, run.text
        balanced(run.text)
    assert_private(tmp_path / '.ding_store' / 'r' / 'logs')


def test_server_at_maxmemory_is_a_pause(tmp_path, forgetful_server):
    options, stop = ['--store', forgetful_server.url, '--set', 'heartbeat_s=0.2'], tmp_path / 'stop'
    arguments = ['run', '--run', 'r', *options, '--roles', ROLES, *tiny(tmp_path / 'trace', '--until', stop)]
    with job(ding_store(*arguments), tmp_path) as run, forgetful_server.client() as client:

        def all_know():
            logs = [log.read_text() for log in Path(tmp_path, '.ding_store/r/logs').glob('*.log')]
            num_processes = 4  # of ROLES
            return len(logs) == num_processes and all('is at its maxmemory' in log for log in logs)

        run.wait_for(lambda: last_trained(tmp_path) >= 100, 'training')
        client.config_set('maxmemory', 1)
        run.wait_for(all_know, 'all of them to hear of it')
        client.config_set('maxmemory', 0)
        train_on(run, tmp_path)
        stop.touch()
        assert run.wait() == 0, run.text
        balanced(run.text)


def last_trained(cwd):
    """DI-engine's trainer logs every hundredth iteration."""
    log = Path(cwd, '.ding_store/r/logs/learner-0.log')
    return int((re.findall(r'Train Iter\((\d+)\)', log.read_text() if log.exists() else '') or [0])[-1])


def train_on(run, cwd, iterations=200):
    before = last_trained(cwd)
    run.wait_for(lambda: last_trained(cwd) >= before + iterations, 'further training')


def test_free_learner_trains_while_the_server_is_away(tmp_path, own_server):
    options, stop = ['--store', own_server.url, '--set', 'train_ratio=free'], tmp_path / 'stop'
    arguments = ['run', '--run', 'r', *options, '--roles', 'learner=1,collector=1']
    arguments += tiny(tmp_path / 'trace', '--until', stop)
    with job(ding_store(*arguments), tmp_path) as run:
        run.wait_for(lambda: last_trained(tmp_path) >= 100, 'training')
        own_server.kill()
        train_on(run, tmp_path)
        own_server.start()
        stop.touch()
        assert run.wait() == 0, run.text
        balanced(run.text)
    log = Path(tmp_path, '.ding_store/r/logs/learner-0.log').read_text()
    assert log.count('the store is away') == 1


def test_finished_run_leaves_no_server_and_its_name_is_free(tmp_path):
    for _ in range(2):
        arguments = ['run', '--run', 'r', '--roles', 'learner=1,collector=1']
        with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--max-train-iter', 50)), tmp_path) as run:
            assert run.wait() == 0, run.text
            assert balanced(run.text)['train iterations'] == 55  # 50 rounded up to whole collects, from 0 again
    assert running(tmp_path / '.ding_store' / 'r') is None


def test_status_watch_does_not_keep_a_finished_run(tmp_path):
    arguments, stop = ['run', '--run', 'r', '--roles', 'learner=1,collector=1'], tmp_path / 'stop'
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--until', stop)), tmp_path) as run:
        run.wait_for(lambda: running(tmp_path / '.ding_store' / 'r'), 'a server')
        with job(ding_store('status', '--run', 'r', '--watch', '0.1'), tmp_path, name='status') as watch:
            run.wait_for(lambda: 'last report' in watch.text, 'a look at it')
            with job(ding_store('metrics', '--run', 'r', '--port', '0'), tmp_path, name='metrics') as exporter:
                run.wait_for(lambda: scraped(exporter).get('ding_store_train_iterations_total', 0) > 0, 'training')
                stop.touch()
                assert run.wait() == 0, run.text
                assert exporter.wait() == 0, exporter.text
            assert run.wait() == 0, run.text
            assert watch.wait() == 0, watch.text


def scraped(exporter):
    """Name -> value of the series of a run's exporter; empty until it serves."""
    url = re.search(r'http://\S+', exporter.text)
    if url is None:
        return {}
    with urllib.request.urlopen(url[0], timeout=60) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def test_stopped_run_ends_in_all_processes_and_can_resume(tmp_path):
    arguments = ['run', '--run', 'r', '--checkpoint', '--roles', 'learner=1,collector=1']
    with job(ding_store(*arguments, *tiny(tmp_path / 'trace', '--ckpt')), tmp_path) as run:
        run.wait_for(
            lambda: any(m['figures'].get('train_iter', 0) > 50 for m in members(tmp_path, 'learner')), 'training'
        )
        run.wait_for((tmp_path / '.ding_store' / 'r' / 'logs' / POINTER).exists, 'the path of the history, for ls')
        with job(ding_store('stop', '--run', 'r'), tmp_path, name='stop') as stop:
            assert stop.wait() == 0, stop.text
        assert run.wait() == 1, run.text
    assert 'ended: stopped by ding-store stop' in run.text
    assert 'run the same command again to resume' in run.text


def test_trainer_before_the_pusher_gets_no_batch_twice(tmp_path):
    """Chunks that are left at the end of a run pass the same middleware, each with a context of its own."""
    script = PIPELINES / 'trained_before_pushed.py'
    roles = ('--roles', 'learner=1,collector=1', '--set', 'max_lead=8')
    with job(ding_store('run', *roles, '--', 'python', script, tmp_path), tmp_path) as run:
        assert run.wait() == 0, run.text
        balanced(run.text)


@pytest.mark.parametrize(
    ('exchanger', 'said'),
    [
        ('context', 'are the learner'),
        ('model', "publish the policy 'main'"),
    ],
)
def test_second_learner_process_is_refused(tmp_path, exchanger, said):
    script = PIPELINES / 'two_learners.py'
    roles = ('--roles', 'learner=1,collector=2')
    with job(ding_store('run', *roles, '--', 'python', script, exchanger), tmp_path) as run:
        refusal = f"ConfigError: two processes {said} of run 'default': pid .* and pid "
        run.wait_for(lambda: re.search(refusal, run.text), 'the refusal')
