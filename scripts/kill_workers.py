#!/usr/bin/env python3
"""
Kill workers of a job at random moments, worker 0 with the parameter server included, and check that training goes on.

    python scripts/kill_workers.py                        # 10 kills, about 3 minutes
    python scripts/kill_workers.py --kills 50 --sync gradients --workers 3

The job is `ding-store run --roles worker=N --checkpoint` of dizoo_configs/cartpole/cartpole_a2c_main.py. After each
kill, the launcher must start the worker again, it must train, and the number of updates must grow. At the end, the run
must end in order, and no worker may have failed by itself. tests/learners/test_worker_deaths.py counts each gradient.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Optional

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_a2c_main.py'
#: Seconds after which a worker that was killed must train again.
LIMIT_S = 600.0


def figures(directory: str) -> Dict[str, Any]:
    """Return the run's members and updates. Empty: its server does not answer."""
    sys.path.insert(0, str(ROOT))
    from ding_store.config import StoreConfig
    from ding_store.errors import StoreError
    from ding_store.launch.status import check_running, read_status
    from ding_store.run.session import RunSession
    from ding_store.storage.urls import embedded_url

    config = StoreConfig(enable=True, url=embedded_url(f'{directory}/.ding_store'), run='kills')
    with contextlib.suppress(StoreError):
        check_running(config)
        with RunSession(config).store as store:
            return read_status(store, 0.0)
    return {}


def trained(directory: str) -> Dict[int, Dict[str, Any]]:
    """Return the living workers that have trained, by rank."""
    found = [each for each in figures(directory).get('members', []) if each['state'] == 'alive']
    return {each['figures']['rank']: each for each in found if each['figures'].get('train_iter', 0) > 2}


def wait_for(condition: Callable[[], Any], what: str, job: subprocess.Popen, out: Path) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        if job.poll() is not None:
            break
        time.sleep(0.3)
    raise SystemExit(f'no {what} within {LIMIT_S:.0f} s, or the job ended:\n{out.read_text()[-4000:]}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=10, help='number of kills (default: %(default)s)')
    parser.add_argument('--workers', type=int, default=2, help='number of workers (default: %(default)s)')
    parser.add_argument('--sync', default='async', help='mode of store.learners.sync (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the choice of victims (default: %(default)s)')
    given = parser.parse_args()
    choose = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, 'out')
        job = start(given, directory, out)
        try:
            wait_for(lambda: len(trained(directory)) == given.workers, 'trained workers', job, out)
            for number in range(given.kills):
                time.sleep(choose.uniform(0.0, 2.0))
                victim = choose.randrange(given.workers)
                pid = trained(directory).get(victim, {}).get('pid')
                if pid is None:
                    continue
                began = time.monotonic()
                os.kill(pid, signal.SIGKILL)

                def again(victim: int = victim, pid: Optional[int] = pid) -> bool:
                    found = trained(directory)
                    return len(found) == given.workers and found[victim]['pid'] != pid

                wait_for(again, f'successor of worker {victim}', job, out)
                took_s = time.monotonic() - began
                counts = figures(directory)['figures']['updates']
                print(f'kill {number + 1}: worker {victim} trains again after {took_s:.1f} s; {counts}', flush=True)
            subprocess.run(
                [sys.executable, '-m', 'ding_store.cli', 'stop', '--run', 'kills'], cwd=directory, check=False,
                env=environment(),
            )  # fmt: skip
            job.wait(LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        text = out.read_text()
        failed = [line for line in text.splitlines() if 'failed with exit code' in line]
        if failed:
            raise SystemExit('workers failed by themselves:\n' + '\n'.join(failed) + text[-3000:])
        print(f'{text.count("was killed by SIGKILL")} kills, {text.count("started again as")} restarts, no failure')


def environment() -> Dict[str, str]:
    return {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}


def start(given: argparse.Namespace, directory: str, out: Path) -> subprocess.Popen:
    settings = {'path': f'{directory}/saved', 'interval_s': 1.0, 'max_restarts': 10 * given.kills}
    command = [sys.executable, '-m', 'ding_store.cli', 'run', '--run', 'kills', '--roles', f'worker={given.workers}']
    command += ['--set', f'checkpoint={settings!r}', '--set', f"learners={{'sync': {given.sync!r}}}", '--', 'python']
    command += [str(MAIN), '--set', 'env.stop_value=1000']
    with open(out, 'wb') as file:
        return subprocess.Popen(
            command, cwd=directory, env=environment(), stdout=file, stderr=file, start_new_session=True
        )


if __name__ == '__main__':
    main()
