#!/usr/bin/env python3
"""
Cost of a recorder: iterations per second of a run with store.record, beside the same run without it.

    python scripts/recording_cost.py                              # ten pairs of 40 seconds: about 20 minutes
    python scripts/recording_cost.py --pairs 3 --seconds 15

The two runs of a pair take turns in being first. Each is a CartPole DQN of one learner and two collectors, with the
recorder as a further process of the same host. The rate is that of the run's history, without its beginning. The table
has the rates, and the ratio pair by pair with its median. Where processes take turns on few cores, rates of equal runs
differ by more than the recorder costs. So the table also has the recorder's share of the CPU time of all processes of
the run.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, Iterator, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TINY = ROOT / 'tests' / 'pipelines' / 'tiny_dqn.py'
START_S, END_S = 300.0, 120.0
#: Records of the history that are left out at its beginning.
WARM_UP = 2


class Measured(NamedTuple):
    """Training iterations per second of a run, and the share of its CPU time that its recorder took."""

    rate: float
    recorder: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--pairs', type=int, default=10, help='pairs of runs (default: %(default)s)')
    parser.add_argument('--seconds', type=float, default=40.0, help='seconds of each run (default: %(default)s)')
    parser.add_argument('--json', metavar='FILE', help='write all rates to FILE')
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        order = [False, True] if number % 2 else [True, False]
        found = {is_recorded: measured_run(is_recorded, options.seconds) for is_recorded in order}
        plain, recorded = found[False], found[True]
        pairs.append((plain.rate, *recorded))
        share = f'the recorder took {100 * recorded.recorder:.1f} % of the CPU time'
        print(f'pair {number + 1}: {plain.rate:.1f} iterations/s, recorded {recorded.rate:.1f}; {share}', flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(pairs, indent=1))
    ratios = sorted(recorded / plain for plain, recorded, _ in pairs)
    shares = sorted(100 * share for _, _, share in pairs)
    print(f'recorded / plain: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}')
    print(f"the recorder's CPU time: median {statistics.median(shares):.1f} %, {shares[0]:.1f} to {shares[-1]:.1f} %")
    return 0


def measured_run(is_recorded: bool, seconds: float) -> Measured:
    """Run a job, and measure it."""
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
            before = cpu_seconds(job.pid)
            time.sleep(seconds)
            spent = {name: value - before[name] for name, value in cpu_seconds(job.pid).items()}
            (directory / 'end').touch()
            if job.wait(END_S):
                raise SystemExit(f'the job failed:\n{(directory / "log").read_text()[-3000:]}')
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(END_S)
        if is_recorded and not any((directory / 'set').iterdir()):
            raise SystemExit('nothing was recorded')
        if is_recorded and not spent['recorder']:
            raise SystemExit('the process of the recorder was not found among those of the job')
        return Measured(rate_in(directory), spent['recorder'] / sum(spent.values()))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def wait_for_training(directory: Path, job: subprocess.Popen) -> None:
    """Wait for the first record of the run's history."""
    deadline = time.monotonic() + START_S
    while not list(directory.rglob('metrics.jsonl')):
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f'the job did not train:\n{(directory / "log").read_text()[-3000:]}')
        time.sleep(0.2)


def cpu_seconds(pid: int) -> Dict[str, float]:
    """Return the CPU seconds of the recorder, which is a child of the learner, and of all other processes of a job."""
    found = {'recorder': 0.0, 'others': 0.0}
    for each, log, log_of_parent in tree(pid):
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f'/proc/{each}/stat').read_text().rpartition(')')[2].split()
            is_recorder = log == log_of_parent and log.startswith('learner')
            spent_s = (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')
            found['recorder' if is_recorder else 'others'] += spent_s
    return found


def tree(pid: int, log_of_parent: str = '') -> Iterator[Tuple[int, str, str]]:
    """Yield a process and all its descendants, each with the name of its log file and its parent's."""
    with contextlib.suppress(OSError):
        log = os.path.basename(os.readlink(f'/proc/{pid}/fd/1'))
        yield pid, log, log_of_parent
        for path in Path(f'/proc/{pid}/task').glob('*/children'):
            for child in path.read_text().split():
                yield from tree(int(child), log)


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
