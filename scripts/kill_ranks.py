"""
Kill random learners of a job at random moments, and check that no row is lost and none is in a replay twice.

    python scripts/kill_ranks.py                    30 kills in one CartPole job with two learners
    python scripts/kill_ranks.py --kills 5 --seed 3

After each kill, the launcher starts all learners again from the last checkpoint. At the end the job finishes in order.
Then the rows that collectors appended must be the rows in the replays, and their sum over the partitions.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / 'tests' / 'pipelines' / 'tiny_dqn.py'
RUN = 'kill-ranks'
#: Time that the learners may take from their start until they train, and the job from the last kill to its end.
DEADLINE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=30)
    parser.add_argument('--learners', type=int, default=2)
    parser.add_argument('--collectors', type=int, default=1)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument(
        '--longest', type=float, default=8.0, help='seconds from a start, or a checkpoint, to the kill, at most'
    )
    parser.add_argument('--json', metavar='FILE', help='write the figures to FILE')
    parser.add_argument('--keep', action='store_true', help='keep the directory of the job')
    options = parser.parse_args()

    directory = Path(tempfile.mkdtemp(prefix='kill-ranks-'))
    try:
        figures = run(options, directory)
    finally:
        if options.keep:
            say(f'the files of the job are in {directory}')
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))
    say(json.dumps(figures))
    return 0 if not figures['faults'] else 1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(options: argparse.Namespace, directory: Path) -> Dict:
    chance, until, trace = random.Random(options.seed), directory / 'until', directory / 'trace'
    command = [sys.executable, '-m', 'ding_store.cli', 'run', '--run', RUN, '--checkpoint', str(directory / 'saved')]
    command += ['--set', f'checkpoint={{"max_restarts": {options.kills + 1}, "interval_s": 1.0}}']
    command += ['--set', f'peer_timeout_s={DEADLINE_S}']  # many kills in a row leave no time to train
    command += ['--roles', f'learner={options.learners},collector={options.collectors},evaluator=1', '--', 'python']
    command += [str(TINY), '--ckpt', '--trace', str(trace), '--until', str(until)]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
    log = directory / 'job.out'
    with open(log, 'wb') as out:
        job = subprocess.Popen(command, cwd=directory, env=environment, stdout=out, stderr=out, start_new_session=True)
    kills: List[Dict] = []
    try:
        known: set = set()
        for number in range(options.kills):
            learners = wait_for_learners(job, log, options.learners, known)
            known |= set(learners)
            trains = chance.random() < 0.5  # else it may die while it starts, connects or resumes
            if trains:
                wait_for_training(job, log, directory)
            pause_s = chance.uniform(0.0, options.longest)
            time.sleep(pause_s)
            rank = chance.randrange(options.learners)
            try:
                os.kill(learners[rank], signal.SIGKILL)
            except ProcessLookupError:
                say(f'rank {rank} had ended by itself')
            kills.append(dict(rank=rank, after_s=round(pause_s, 2), trained=trains))
            since = 'a checkpoint' if trains else 'its start'
            say(f'kill {number + 1} of {options.kills}: rank {rank}, {pause_s:.1f} s after {since}')
        wait_for_learners(job, log, options.learners, known)
        wait_for_training(job, log, directory)
        until.touch()
        code = job.wait(DEADLINE_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return checked(log.read_text(errors='replace'), trace, code, kills)


def wait_for_learners(job: subprocess.Popen, log: Path, num: int, known: set) -> List[int]:
    """Return the pids of the learners by rank, once all have been started that are not known yet."""

    def look() -> List[int]:
        found = {rank: pid for pid, rank in learners_of(job.pid).items() if pid not in known}
        return [found[rank] for rank in range(num)] if len(found) == num else []

    return wait_for(look, job, log)


def wait_for_training(job: subprocess.Popen, log: Path, directory: Path) -> None:
    """Wait until the learners have trained together, and have written another checkpoint."""
    saved = directory / 'saved'

    def newest() -> int:
        found = [int(match[1]) for name in os.listdir(saved) if (match := re.match(r'iteration_(\d+)\.pth', name))]
        return max(found, default=0)

    before = newest()
    wait_for(lambda: newest() > before, job, log)


def wait_for(condition, job: subprocess.Popen, log: Path):
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        if job.poll() is not None:
            raise SystemExit(f'the job ended:\n{log.read_text(errors="replace")[-3000:]}')
        time.sleep(0.1)
    raise SystemExit(f'nothing for {DEADLINE_S:.0f} s:\n{log.read_text(errors="replace")[-3000:]}')


def learners_of(launcher: int) -> Dict[int, int]:
    """Return pid -> rank of the launcher's processes that are learners."""
    found = {}
    for child in Path(f'/proc/{launcher}/task').glob('*/children'):
        for pid in map(int, child.read_text().split()):
            try:
                output = os.readlink(f'/proc/{pid}/fd/1')
            except OSError:
                continue  # it has ended
            match = re.search(r'/learner-(\d+)\.log$', output)
            if match:
                found[pid] = int(match[1])
    return found


def checked(text: str, trace: Path, code: int, kills: List[Dict]) -> Dict:
    """Return the figures of the job, with its faults."""
    table = {name: float(value) for name, value in re.findall(r'^(\S.*?\S)\s{2,}(-?[\d.]+)\s*$', text, re.M)}
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    ends = [each for each in records if each['event'] == 'end' and each['roles'] == ['learner']]
    appended, ingested = table.get('rows appended', -1), table.get('rows ingested', -2)
    in_replays = sum(each['replay'] for each in ends)
    faults = []
    if code:
        faults.append(f'the job ended with {code}: {text[-2000:]}')
    if appended != ingested:
        faults.append(f'{appended:.0f} rows appended, {ingested:.0f} ingested')
    if in_replays != ingested:
        faults.append(f'{in_replays} rows in the replays, {ingested:.0f} ingested')
    if table.get('chunks lost'):
        faults.append(f'{table["chunks lost"]:.0f} chunks lost')
    if len({each['train_iter'] for each in ends}) != 1:
        faults.append(f'the learners ended at different iterations: {[each["train_iter"] for each in ends]}')
    return dict(kills=kills, appended=appended, ingested=ingested, in_replays=in_replays, faults=faults)


if __name__ == '__main__':
    sys.exit(main())
