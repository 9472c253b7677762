"""Whole jobs whose processes are killed, and go on."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from jobs import DEADLINE_S, ROLES, ROOT, TINY, ding_store, job, records, status, table

from ding_store.storage.embedded.private_server import running

pytest.importorskip('ding')
pytest.importorskip('gym')
from ding_store.buffer import Prioritized, StoreBuffer  # noqa: E402
from ding_store.middleware.collector_exchanger import ENV_ID_BITS  # noqa: E402

pytestmark = pytest.mark.timeout(600)
PER_MAIN = str(ROOT / 'tests' / 'launch' / 'cartpole_priorities.py')
#: Of each kill, after a checkpoint or after the kill before it.
KILL_WITHIN_S = 3.0


def log_of(cwd, role='learner-0'):
    path = Path(cwd, '.ding_store', 'r', 'logs', f'{role}.log')
    return path.read_text(errors='replace') if path.exists() else ''


def num_checkpoints(cwd):
    return log_of(cwd).count('ding_store: checkpoint of iteration')


def pid_of(cwd, text, role):
    """Of the present process of a role: the launcher says when it is another."""
    again = re.findall(rf'started again as {role} \(node \d, pid (\d+)\)', text)
    if again:
        return int(again[-1])
    members = status(cwd)['members']
    return next(m['pid'] for m in members if m['role'] == role)


def kill(run, cwd, role):
    pid = pid_of(cwd, run.text, role)
    before = run.text.count('started again as')
    os.kill(pid, signal.SIGKILL)
    run.wait_for(lambda: run.text.count('started again as') > before, f'another {role}')


def assert_each_row_once(path, size):
    """The table is sound, and holds as many rows as were counted, no two of them the same."""
    buffer = StoreBuffer(size, path=str(path))
    try:
        assert buffer.check() == []
        rows = buffer.table.rows_by_age()
        note = buffer.committed
        assert note['rows'] == buffer.table.next_row == len(rows)
        columns = buffer.table.gather(rows)
        # Each episode has an id of its own; some begin in the same state. A float would not tell all ids apart.
        _, episodes = np.unique(columns['env_data_id'], return_inverse=True)
        moves = np.concatenate([columns['obs'], columns['next_obs'], episodes.reshape(-1, 1)], axis=1)
        assert len(np.unique(moves, axis=0)) == len(rows)
        # Each knows which version of the policy collected it; a collector's versions only grow.
        versions = np.array([buffer.get_by_index(str(row)).meta['policy_version'] for row in rows[::7]])
        whose = columns['env_data_id'].reshape(-1)[::7] >> ENV_ID_BITS
        assert versions.max() > 1
        for collector in np.unique(whose):
            assert (np.diff(versions[whose == collector]) >= 0).all()
        return note
    finally:
        buffer.close()


def stop(pid):
    """Let it stand still, and all its threads with it: what it has mapped is then what a kill leaves."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while any(status_of(task) not in ('T', None) for task in Path(f'/proc/{pid}/task').iterdir()):
        assert time.monotonic() < deadline, f'{pid} does not stop'


def status_of(task):
    """None where it has ended meanwhile."""
    try:
        return task.joinpath('stat').read_text().rpartition(')')[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def priorities_in(path, copy):
    """As a learner finds them there that opens the table now."""
    if not path.exists():
        return {'rows': 0}
    shutil.copytree(path, copy)
    buffer = StoreBuffer(20000, path=str(copy), sampler=Prioritized(alpha=0.6, beta=0.4))
    try:
        return {'rows': buffer.count(), 'state': {n: array.tolist() for n, array in buffer.sampler.state().items()}}
    finally:
        buffer.close()


@pytest.mark.long
def test_cartpole_converges_after_three_kills_of_its_learner(tmp_path):
    seed = int(os.environ.get('DING_STORE_TEST_SEED', random.SystemRandom().randrange(10**6)))
    rng = random.Random(seed)
    delays = [rng.uniform(0, KILL_WITHIN_S) for _ in range(3)]
    print(f'DING_STORE_TEST_SEED={seed}: killed after {delays} s')  # noqa: T201 shown with a failure
    begun, left = tmp_path / 'begun', []
    main = ['python', PER_MAIN, begun, '--config', 'cartpole_dqn_per', '--checkpoint']
    # The evaluator, which ends it, comes after the last kill.
    command = ['run', '--run', 'r', '--roles', 'learner=1,collector=2', '--', *main]
    with job(ding_store(*command), tmp_path) as run:
        for number, delay in enumerate(delays):
            seen = num_checkpoints(tmp_path)
            if number != 1:  # which may come while it starts
                run.wait_for(lambda seen=seen: num_checkpoints(tmp_path) > seen, 'a checkpoint')
            time.sleep(delay)  # not to wait for something: to kill it just anywhere
            pid = pid_of(tmp_path, run.text, 'learner')
            stop(pid)
            left.append(priorities_in(tmp_path / 'checkpoints/r/replay', tmp_path / f'copy{number}'))
            kill(run, tmp_path, 'learner')
        last = pid_of(tmp_path, run.text, 'learner')
        join = ding_store('join', '--role', 'evaluator', '--run', 'r', '--', *main)
        with job(join, tmp_path, name='join') as joined:
            assert run.wait() == 0, run.text
            assert joined.wait() == 0, joined.text
    rows = table(run.text)
    assert rows['last evaluation return'] >= 195
    assert rows['rows appended'] == rows['rows ingested'] > 0, run.text
    assert rows['chunks lost'] == 0
    assert run.text.count('was killed by SIGKILL') == 3
    assert 'restart 3 of 5' in run.text
    assert 2 <= log_of(tmp_path).count('resuming from') <= 3
    lives = [int(pid) for pid in re.findall(r'started again as learner \(node \d, pid (\d+)\)', run.text)]
    assert lives[-1] == last
    found = {each.pop('pid'): each for each in records(begun)}
    assert found[last]['rows'] > 0
    for before, pid in zip(left, lives):
        if pid in found:  # else it was killed before it had opened the table
            assert found[pid] == before
    assert len(np.unique(found[last]['state']['mass'])) > 1
    note = assert_each_row_once(tmp_path / 'checkpoints/r/replay', 20000)
    assert note['rows'] == rows['rows ingested']
    assert note['env_step'] == rows['env steps']


def test_same_command_resumes_after_all_were_killed(tmp_path):
    tiny = ['--', 'python', TINY, '--trace', tmp_path / 'trace', '--ckpt', '--max-train-iter']
    command = ['run', '--run', 'r', '--checkpoint', '--roles', ROLES]
    with job(ding_store(*command, *tiny, 100_000), tmp_path) as run:
        run.wait_for(lambda: num_checkpoints(tmp_path) >= 2 and len(begins(tmp_path)) == 2, 'checkpoints')
        kill(run, tmp_path, 'evaluator')
        server = running(tmp_path / '.ding_store' / 'r')
        pids = [server.supervisor_pid, server.server_pid]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    first = begins(tmp_path)
    known = max(int(n) for n in re.findall(r'checkpoint of iteration (\d+)', log_of(tmp_path)))
    wanted = known + 1000  # so many that both collectors have begun by then
    with job(ding_store(*command, *tiny, wanted), tmp_path, name='again') as run:
        assert run.wait() == 0, run.text
    assert f"run 'r' goes on from its checkpoints in {tmp_path / 'checkpoints' / 'r'}" in run.text
    resumed = int(re.search(r'resuming from .*: train iteration (\d+)', log_of(tmp_path))[1])
    assert resumed >= known
    # Collectors explore no more than a run does that has come so far.
    again = begins(tmp_path)[len(first) :]
    assert len(again) == len(first) == 2
    assert min(one['env_step'] for one in again) > max(one['env_step'] for one in first)
    assert max(one['eps'] for one in again) < min(one['eps'] for one in first)
    wanted = max(wanted, resumed)
    assert wanted <= table(run.text)['train iterations'] < wanted + 50
    assert_each_row_once(tmp_path / 'checkpoints/r/replay', 20000)
    # It has ended in order: the next one begins afresh, with no row of this one.
    with job(ding_store(*command, *tiny, 50), tmp_path, name='afresh') as run:
        assert run.wait() == 0, run.text
    assert 'goes on from its checkpoints' not in run.text
    assert table(run.text)['train iterations'] == 55
    note = assert_each_row_once_of(tmp_path, run)
    assert note['env_step'] == table(run.text)['env steps']


def begins(cwd):
    """What collectors explored with in their first iterations."""
    return [record for record in records(Path(cwd, 'trace')) if record['event'] == 'begin']


def assert_each_row_once_of(cwd, run):
    buffer = StoreBuffer(20000, path=str(cwd / 'checkpoints/r/replay'))
    try:
        assert len(buffer) == buffer.committed['rows'] == table(run.text)['rows ingested']
        return buffer.committed
    finally:
        buffer.close()


@pytest.mark.long
def test_learner_that_fails_repeatedly_ends_the_run(tmp_path):
    script = tmp_path / 'main.py'
    script.write_text(
        'from ding.framework import task\n'
        'from dizoo_configs import builder\n'
        'from dizoo_configs.cartpole import cartpole_dqn_config, cartpole_dqn_main as cartpole\n'
        'cartpole_dqn_config.main_config.store.checkpoint = dict(max_restarts=1)\n'
        'def fail(ctx):\n'
        '    if ctx.total_step == 12:\n'
        "        raise RuntimeError('as asked for')\n"
        'if task.router.node_id == 0:\n'
        '    builder.stock_saver = lambda *args, **kwargs: fail\n'
        'cartpole.main()\n'
    )
    command = ding_store('run', '--run', 'r', '--roles', 'learner=1,collector=1', '--', 'python', script)
    with job(command, tmp_path) as run:
        assert run.wait() == 1, run.text
    assert 'restart 1 of 1' in run.text
    assert 'was done 1 times already (store.checkpoint.max_restarts)' in run.text
    assert 'cannot go on without its learner' in run.text
