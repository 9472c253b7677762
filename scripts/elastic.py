"""
What a run does whose collectors change in number, or are killed. It runs tests/pipelines/tiny_dqn.py with environments
and a learner that sleep, so that a machine with two cores is enough.

    python scripts/elastic.py sizing --seconds 120      --roles collector=2..16: the number and the learner's wait
    python scripts/elastic.py scale                     seconds from `ding-store scale` to a new collector's first chunk
    python scripts/elastic.py preemption --seconds 600  env steps/s with all collectors killed every 20 s, and without
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ding_store.config import StoreConfig  # noqa: E402
from ding_store.launch.status import Look  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402

PIPELINE = ROOT / 'tests' / 'pipelines' / 'tiny_dqn.py'
DEADLINE_S = 300.0


class Run:
    """A run in a temporary directory, and a look at its status."""

    def __init__(self, directory: str, roles: str, sleeps: List[str]) -> None:
        self.directory = Path(directory)
        self.environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore'}
        script = [str(PIPELINE), '--trace', f'{directory}/trace', '--until', f'{directory}/stop', *sleeps]
        command = ['run', '--run', 'r', '--roles', roles, '--', 'python', *script]
        with open(self.directory / 'run.out', 'wb') as out:
            options: Dict[str, Any] = dict(cwd=directory, env=self.environment, stdout=out, stderr=out)
            words = [sys.executable, '-m', 'ding_store.cli', *command]
            self.process = subprocess.Popen(words, start_new_session=True, **options)
        self.config = StoreConfig.from_block({'url': f'embedded://{directory}/.ding_store', 'run': 'r'})

    @property
    def text(self) -> str:
        return (self.directory / 'run.out').read_text(errors='replace')

    @contextlib.contextmanager
    def look(self) -> Iterator[Look]:
        """Wait for the first env steps, and give a look at the run."""
        deadline = time.monotonic() + DEADLINE_S
        while not (self.directory / 'trace').exists():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)
        with RunSession(self.config).store as store:
            yield Look(store)

    def wait_for(self, number: int, look: Look) -> None:
        """Wait until this many collectors have sent rows."""
        deadline = time.monotonic() + DEADLINE_S
        while sum(bool(member['figures'].get('rows')) for member in collectors_of(look.read(0.0))) < number:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, f'no {number} collectors within {DEADLINE_S:g} s: {self.text}'
            time.sleep(0.02)

    def command(self, *words: str) -> None:
        command = [sys.executable, '-m', 'ding_store.cli', *words, '--run', 'r']
        subprocess.run(command, cwd=self.directory, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def stop(self) -> str:
        (self.directory / 'stop').touch()
        try:
            code = self.process.wait(60.0)
        except subprocess.TimeoutExpired:
            code = -1
        text = self.text
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        assert code == 0, text
        return text


@contextlib.contextmanager
def running(roles: str, *sleeps: str) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix='ding-store-elastic-') as directory:
        run = Run(directory, roles, list(sleeps))
        try:
            yield run
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()


def collectors_of(status: Dict[str, Any]) -> List[Dict[str, Any]]:
    found: List[Dict[str, Any]] = [m for m in status['members'] if m['role'] == 'collector' and m['state'] == 'alive']
    return found


def show_sizing(seconds: float, collect_s: float, train_s: float) -> Dict[str, Any]:
    """Print the number of collectors and the learner's wait every five seconds. Return the last 30 s of it."""
    waits: List[float] = []
    with running('learner=1,collector=2..16', '--collect-s', str(collect_s), '--train-s', str(train_s)) as run:
        with run.look() as look:
            begin = time.monotonic()
            look.read(0.0)
            while time.monotonic() - begin < seconds:
                time.sleep(5.0)
                status = look.read(0.0)
                waits.append(status['shares'].get('learner_wait_experience', float('nan')))
                print(
                    f'{time.monotonic() - begin:5.0f} s  {len(collectors_of(status)):2} collectors  '
                    f'learner waits {waits[-1]:4.0%}'
                )
            number = len(collectors_of(status))
        text = run.stop()
    print(*(line for line in text.splitlines() if 'collectors: ' in line), sep='\n')
    last = waits[-6:]
    found = {'collectors': number, 'learner_wait_last_30_s': round(sum(last) / len(last), 4), 'goal': 0.1}
    print(found)
    return found


def show_scale() -> Dict[str, Any]:
    """Print the seconds from the end of `ding-store scale` to the first chunk of the new collector."""
    with running('learner=1,collector=1', '--collect-s', '0.05') as run:
        with run.look() as look:
            run.wait_for(1, look)
            run.command('scale', 'collector=2')
            begin = time.monotonic()
            run.wait_for(2, look)
            found = {'seconds': round(time.monotonic() - begin, 2), 'goal': 5.0}
        run.stop()
    print(found)
    return found


def steps_per_s(seconds: float, every_s: float, number: int) -> Dict[str, float]:
    """Return the env steps/s of a run, all of whose collectors are killed every ``every_s`` seconds. 0: never."""
    with running(f'learner=1,collector={number}', '--collect-s', '0.2') as run:
        with run.look() as look:
            run.wait_for(number, look)
            first, begin, kills = look.read(0.0)['figures']['rows_ingested'], time.monotonic(), 0
            kill_at = begin + every_s
            while time.monotonic() - begin < seconds:
                time.sleep(0.2)
                if every_s and time.monotonic() >= kill_at:
                    kill_at += every_s
                    for member in collectors_of(look.read(0.0)):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(member['pid'], signal.SIGKILL)
                            kills += 1
            rows = look.read(0.0)['figures']['rows_ingested'] - first
            rate = rows / (time.monotonic() - begin)
        text = run.stop()
    assert 'given up' not in text, text
    return {'env_steps_per_s': round(rate, 1), 'kills': kills}


def show_preemption(seconds: float, every_s: float, number: int) -> Dict[str, Any]:
    begin = time.monotonic()
    subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', 'from ding_store.launch.user_script import import_di_engine as f; f()'],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        check=True,
    )
    import_s = time.monotonic() - begin
    plain, killed = steps_per_s(seconds, 0.0, number), steps_per_s(seconds, every_s, number)
    share = killed['env_steps_per_s'] / plain['env_steps_per_s']
    goal = 0.9 * max(0.0, 1.0 - import_s / every_s)
    found = {
        'plain': plain,
        'killed': killed,
        'share': round(share, 3),
        'import_s': round(import_s, 1),
        'goal': round(goal, 3),
    }
    print(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=('sizing', 'scale', 'preemption'))
    parser.add_argument('--seconds', type=float, default=120.0, help='of each run (default: 120)')
    parser.add_argument('--every', type=float, default=20.0, metavar='S', help='seconds between kills (default: 20)')
    parser.add_argument('--collectors', type=int, default=3, help='for preemption (default: 3)')
    parser.add_argument('--collect-s', type=float, default=0.4, help='sleep of a collection, for sizing (default: 0.4)')
    parser.add_argument('--train-s', type=float, default=0.05, help='sleep of an iteration (default: 0.05)')
    parser.add_argument('--json', metavar='FILE')
    options = parser.parse_args()
    if options.what == 'sizing':
        found = show_sizing(options.seconds, options.collect_s, options.train_s)
    elif options.what == 'scale':
        found = show_scale()
    else:
        found = show_preemption(options.seconds, options.every, options.collectors)
    if options.json:
        Path(options.json).write_text(json.dumps(found))


if __name__ == '__main__':
    main()
