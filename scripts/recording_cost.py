#!/usr/bin/env python3
"""
Cost of a recorder: iterations per second of a run with store.record, beside the same run without it.

    python scripts/recording_cost.py                              # ten pairs of 40 seconds: about 20 minutes
    python scripts/recording_cost.py --pairs 3 --seconds 15

The two runs of a pair take turns in being first. Each is a CartPole DQN of one learner and two collectors, with the
recorder as a further process of the same host. The rate is that of the run's history, without its beginning. The table
has the rates, and the ratio pair by pair with its median.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TINY = ROOT / 'tests' / 'pipelines' / 'tiny_dqn.py'
START_S, END_S = 300.0, 120.0
#: Records of the history that are left out at its beginning.
WARM_UP = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--pairs', type=int, default=10, help='pairs of runs (default: %(default)s)')
    parser.add_argument('--seconds', type=float, default=40.0, help='seconds of each run (default: %(default)s)')
    parser.add_argument('--json', metavar='FILE', help='write all rates to FILE')
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        order = [False, True] if number % 2 else [True, False]
        rates = {is_recorded: rate_of_run(is_recorded, options.seconds) for is_recorded in order}
        pairs.append((rates[False], rates[True]))
        print(f'pair {number + 1}: {rates[False]:.1f} iterations/s, recorded {rates[True]:.1f}', flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(pairs, indent=1))
    ratios = sorted(recorded / plain for plain, recorded in pairs)
    cost = 100 * (1 - statistics.median(ratios))
    print(f'recorded / plain: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}')
    print(f'the recorder costs {cost:.1f} % of the iterations per second')
    return 0


def rate_of_run(is_recorded: bool, seconds: float) -> float:
    """Run a job, and return its training iterations per second."""
    directory = Path(tempfile.mkdtemp(prefix='recording'))
    try:
        command = [sys.executable, '-m', 'ding_store.cli', 'run', '--roles', 'learner=1,collector=2', '--run', 'cost']
        if is_recorded:
            command += ['--set', f'record={directory / "set"}']
        command += ['--', 'python', str(TINY), '--trace', str(directory / 'trace'), '--until', str(directory / 'end')]
        environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
        with open(directory / 'log', 'w') as log:
            job = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
        try:
            wait_for_training(directory, job)
            time.sleep(seconds)
            (directory / 'end').touch()
            if job.wait(END_S):
                raise SystemExit(f'the job failed:\n{(directory / "log").read_text()[-3000:]}')
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(END_S)
        if is_recorded and not any((directory / 'set').iterdir()):
            raise SystemExit('nothing was recorded')
        return rate_in(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def wait_for_training(directory: Path, job: subprocess.Popen) -> None:
    """Wait for the first record of the run's history."""
    deadline = time.monotonic() + START_S
    while not list(directory.rglob('metrics.jsonl')):
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f'the job did not train:\n{(directory / "log").read_text()[-3000:]}')
        time.sleep(0.2)


def rate_in(directory: Path) -> float:
    """Return iterations per second between the records after the warm-up and the last one."""
    from ding_store.metrics.history import read_history

    (path,) = directory.rglob('metrics.jsonl')
    records = read_history(str(path))[WARM_UP:]
    if len(records) < 2:
        raise SystemExit('the run is too short: its history has too few records. Raise --seconds.')
    first, last = records[0], records[-1]
    return (last['train_iter'] - first['train_iter']) / (last['time'] - first['time'])


if __name__ == '__main__':
    sys.exit(main())
