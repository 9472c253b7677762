"""An Atari job with checkpoints whose Redis primary is killed twice: each row that was appended is ingested once.

    python scripts/failover_job.py

Needs ``scripts/setup.sh --extra atari``. A primary, a replica and three sentinels run with the files of
docs/howto/sentinel.md. `ding-store run` trains a small DQN on Pong: a learner, two collectors and an evaluator. When
rows arrive, the primary is killed, and comes back as a replica. Then the other one is killed. The job ends at
``--env-steps``. The exit status is 1 if it failed, if a row was lost or doubled, or if it wrote no checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

from ding_store.config import StoreConfig
from ding_store.environment import ENV_SENTINEL_PASSWORD, ENV_URL
from ding_store.launch.status import read_status
from ding_store.run.session import RunSession
from ding_store.storage.embedded.binary import find_server

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / 'tests' / part) for part in ('', 'pipelines')]

from jobs import table  # noqa: E402
from sentinel_group import ASK_PASSWORD, SentinelGroup  # noqa: E402
from tiny import ATARI_DQN  # noqa: E402

RUN, ROLES = 'failover-job', 'learner=1,evaluator=1,collector=2'
WAIT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--env-steps', type=int, default=3000, help='end of the job (default: %(default)s)')
    parser.add_argument('--keep', action='store_true', help='keep the directory with logs and checkpoints')
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix='failover'))
    os.environ[ENV_SENTINEL_PASSWORD] = ASK_PASSWORD
    try:
        with SentinelGroup(str(find_server())) as group:
            os.environ[ENV_URL] = group.url()
            job = start(options.env_steps, directory)
            try:
                fail_over_twice(group, job)
                job.wait(WAIT_S)
            finally:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
        return judge(job.returncode, directory)
    finally:
        if options.keep:
            print(f'logs and checkpoints are in {directory}')
        else:
            shutil.rmtree(directory, ignore_errors=True)


def start(env_steps: int, directory: Path) -> subprocess.Popen[bytes]:
    settings = [f'--set={key}={value}' for key, value in ATARI_DQN.items()]
    command: List[Any] = [sys.executable, '-m', 'ding_store.cli', 'run', '--run', RUN, '--roles', ROLES, '--checkpoint']
    command += ['--', 'python', '-u', ROOT / 'dizoo_configs' / 'atari' / 'atari_dqn_main.py', '--env-manager', 'base']
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore', 'OMP_NUM_THREADS': '1'}
    with open(directory / 'job.out', 'wb') as out:
        return subprocess.Popen(
            [*map(str, command), *settings, '--max-env-step', str(env_steps)],
            **dict(cwd=directory, env=environment, stdout=out, stderr=out, start_new_session=True),
        )


def fail_over_twice(group: SentinelGroup, job: subprocess.Popen[bytes]) -> None:
    rows = wait_for_rows(group.url(), job, 100)
    for number in (1, 2):
        former, killed_at = group.primary(), time.monotonic()
        former.kill()
        group.wait_for_failover(former)
        other_s = time.monotonic() - killed_at
        rows = wait_for_rows(group.url(), job, rows + 100)
        print(
            f'failover {number}: another primary after {other_s:.1f} s, more rows after '
            f'{time.monotonic() - killed_at:.1f} s, {rows:.0f} rows then',
            flush=True,
        )
        group.restart_as_replica(former)


def wait_for_rows(url: str, job: subprocess.Popen[bytes], least: float) -> float:
    """Return the number of rows that collectors appended, when it is ``least`` or more."""
    deadline = time.monotonic() + WAIT_S
    with RunSession(StoreConfig(enable=True, url=url, run=RUN)).store as store:
        while True:
            members: List[Dict[str, Any]] = read_status(store, 0.0)['members']
            rows = float(sum(one['figures'].get('rows', 0) for one in members if one['role'] == 'collector'))
            if rows >= least:
                return rows
            if job.poll() is not None or time.monotonic() >= deadline:
                raise SystemExit(
                    f'the job has {rows:.0f} rows, and ended with {job.poll()}: see its output with --keep'
                )
            time.sleep(0.2)


def judge(status: int, directory: Path) -> int:
    text = (directory / 'job.out').read_text(errors='replace')
    rows = table(text)
    checkpoints = sorted((directory / 'checkpoints' / RUN).glob('iteration_*.pth.tar'), key=os.path.getmtime)
    for name in ('rows appended', 'rows ingested', 'chunks lost'):
        print(f'{name:15}{rows.get(name, float("nan")):10.0f}')
    print(f'{"checkpoints":15}{len(checkpoints):10}, the last one: {checkpoints[-1].name if checkpoints else "none"}')
    print(f'{"exit status":15}{status:10}')
    is_exact = rows.get('rows appended', -1) == rows.get('rows ingested', -2) and rows.get('chunks lost') == 0
    if not is_exact or status:
        print(text[-4000:])
    return int(bool(status) or not is_exact or not checkpoints)


if __name__ == '__main__':
    sys.exit(main())
