"""
Change the code in plausible wrong ways, one at a time, and check that the named tests fail.

    python scripts/mutants.py                    # all mutants of mutants.json
    python scripts/mutants.py outbox 'lua-.*'    # those whose names match one of these patterns
    python scripts/mutants.py --jobs 2           # two at a time

The changes are made in a copy of the project, in a temporary directory. First the named tests run there on unchanged
code.
Exit status 1 if a mutant survives or does not apply, or if a named test fails on unchanged code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Dict, Iterator, List, Optional, Sequence

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix('.json')
#: The parts of the project that the tests need.
COPIED = ('ding_store', 'dizoo_configs', 'docs', 'scripts', 'tests', 'pyproject.toml', 'setup.py', 'README.md')
#: numba compiles the loops in these directories and does not notice changes in files that they import: no mutants here.
COMPILED = ('ding_store/buffer/kernels/', 'ding_store/compiled/')

FOUND, SURVIVED = 'found', 'SURVIVED'
HUNG = 'found: hangs'
DOES_NOT_APPLY = 'DOES NOT APPLY'
BROKEN = 'BROKEN'  # the tests were not run, for example since a file cannot be imported
FAILS_WITHOUT = 'TESTS FAIL WITHOUT IT'


@dataclass
class Mutant:
    """
    Overview:
        One wrong change of one file.
    Arguments:
        - breaks (:obj:`str`): What a user would see.
        - file (:obj:`str`): The path in the project.
        - old (:obj:`str`): The text that is replaced. The file has it once.
        - new (:obj:`str`): The text in its place.
        - tests (:obj:`List[str]`): Node ids for pytest. At least one of these tests must fail.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: List[str]

    def applies(self, root: Path = ROOT) -> bool:
        path = root / self.file
        return path.exists() and self.old != self.new and path.read_text().count(self.old) == 1


@dataclass
class Outcome:
    """What became of one mutant."""

    name: str
    outcome: str
    seconds: float = 0.0
    test: str = ''  # the first test that failed

    @property
    def is_good(self) -> bool:
        return self.outcome in (FOUND, HUNG)


def read_mutants() -> List[Mutant]:
    return [Mutant(**fields) for fields in json.loads(LIST.read_text())]


class Copy:
    """
    Overview:
        A copy of the project in which one process of pytest runs at a time.
    Arguments:
        - deadline_s (:obj:`float`): After this time pytest and all processes that it started are killed.
    """

    def __init__(self, directory: Path, deadline_s: float) -> None:
        self.root, self._deadline_s = directory, deadline_s

    def play(self, mutant: Mutant) -> Outcome:
        if not mutant.applies(self.root):
            return Outcome(mutant.name, DOES_NOT_APPLY)
        begin = time.monotonic()
        with self._changed(mutant):
            done = self.run(mutant.tests)
        seconds = time.monotonic() - begin
        if done is None:
            return Outcome(mutant.name, HUNG, seconds)
        if done.returncode == 0:
            return Outcome(mutant.name, SURVIVED, seconds)
        failed = failures(done.stdout)
        if done.returncode > 1 or (done.returncode == 1 and not failed):
            sys.stderr.write(done.stdout[-3000:])
            return Outcome(mutant.name, BROKEN, seconds)
        return Outcome(mutant.name, FOUND, seconds, failed[0] if failed else f'signal {-done.returncode}')

    def run(
        self, tests: Sequence[str], first_only: bool = True, deadline_s: Optional[float] = None
    ) -> Optional[subprocess.CompletedProcess[str]]:
        """Run these tests; None if they are not done at the deadline."""
        label = uuid.uuid4().hex
        options = ['-n', '0', '-q', '-rfE', '--tb=short', '-p', 'no:cacheprovider', '--hypothesis-seed=0']
        command = [sys.executable, '-m', 'pytest', *options, *(['-x'] if first_only else []), *tests]
        with tempfile.TemporaryDirectory(prefix='m', ignore_cleanup_errors=True) as temporary:
            environment = {**os.environ, 'PYTHONPATH': str(self.root), 'OMP_NUM_THREADS': '1', 'TMPDIR': temporary}
            environment.update(HYPOTHESIS_STORAGE_DIRECTORY=temporary, DING_STORE_MUTANT=label)
            environment.pop('CI', None)  # what failing tests leave behind is removed here
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace')
            process = subprocess.Popen(command, cwd=self.root, env=environment, start_new_session=True, **pipes)
            try:
                output, _ = process.communicate(timeout=deadline_s or self._deadline_s)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
            finally:
                kill_labelled(label)
                process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, output)

    @contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        text, status = path.read_text(), path.stat()
        try:
            path.write_text(text.replace(mutant.old, mutant.new))
            drop_bytecode(path)
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            drop_bytecode(path)


def drop_bytecode(path: Path) -> None:
    """Python takes bytecode for fresh if size and second of the file are the same."""
    for compiled in (path.parent / '__pycache__').glob(f'{path.stem}.*.pyc'):
        compiled.unlink()


def kill_labelled(label: str) -> None:
    """Kill the processes that inherited this label; tests start servers and workers in sessions of their own."""
    wanted = f'DING_STORE_MUTANT={label}'.encode()
    for entry in Path('/proc').iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if wanted in (entry / 'environ').read_bytes().split(b'\0'):
                    os.kill(int(entry.name), signal.SIGKILL)


def failures(output: str) -> List[str]:
    return re.findall(r'^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$', output, re.MULTILINE)


def is_of(test: str, selection: str) -> bool:
    return test == selection or test.startswith((f'{selection}[', f'{selection}::'))


def copied(directory: Path) -> Path:
    directory.mkdir()
    for name in COPIED:
        source, target = ROOT / name, directory / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            shutil.copy2(source, target)
    return directory


def unchanged(copy: Copy, mutants: Sequence[Mutant]) -> Dict[str, Outcome]:
    """Mutants of which a test fails, or hangs, on unchanged code."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    begin = time.monotonic()
    done = copy.run(tests, first_only=False, deadline_s=1200.0)
    seconds = time.monotonic() - begin
    failed = ['tests'] if done is None else failures(done.stdout)
    print(f'{len(tests)} tests on unchanged code: {len(failed)} failed, {seconds:.0f} s', flush=True)
    if done is not None and done.returncode != 0 and not failed:
        raise SystemExit(f'the named tests cannot be run:\n{done.stdout[-3000:]}')
    found = {}
    for mutant in mutants:
        mine = [each for each in failed if each == 'tests' or any(is_of(each, test) for test in mutant.tests)]
        if mine:
            found[mutant.name] = Outcome(mutant.name, FAILS_WITHOUT, seconds, mine[0])
    return found


def play_all(mutants: Sequence[Mutant], num_jobs: int, deadline_s: float) -> List[Outcome]:
    with tempfile.TemporaryDirectory(prefix='mutants', ignore_cleanup_errors=True) as directory:
        copies: SimpleQueue[Copy] = SimpleQueue()
        first = Copy(copied(Path(directory, '0')), deadline_s)
        failing = unchanged(first, mutants)
        copies.put(first)
        for number in range(1, num_jobs):
            # With what numba has compiled for the first one.
            other = shutil.copytree(first.root, Path(directory, str(number)))
            copies.put(Copy(other, deadline_s))

        def play(mutant: Mutant) -> Outcome:
            if mutant.name in failing:
                outcome = failing[mutant.name]
            else:
                copy = copies.get()
                try:
                    outcome = copy.play(mutant)
                finally:
                    copies.put(copy)
            print(f'{outcome.name:42} {outcome.outcome:14} {outcome.seconds:5.1f} s  {outcome.test}', flush=True)
            return outcome

        pool = ThreadPoolExecutor(num_jobs)
        try:
            return list(pool.map(play, mutants))
        finally:
            pool.shutdown(cancel_futures=True)  # as after Ctrl-C


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('patterns', nargs='*', metavar='PATTERN', help='play those whose names match one of these')
    parser.add_argument('--list', action='store_true', help='print the mutants, and what each of them breaks')
    parser.add_argument('--jobs', type=int, default=1, metavar='N', help='mutants at a time (default: %(default)s)')
    parser.add_argument('--deadline', type=float, default=120.0, metavar='S', help='of each (default: %(default)g s)')
    parser.add_argument('--json', metavar='FILE', help='write the outcomes there')
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f'--jobs ({options.jobs}) must be >= 1')
    wanted = options.patterns or ['']
    mutants = [each for each in read_mutants() if any(re.search(pattern, each.name) for pattern in wanted)]
    if not mutants:
        parser.error(f'no mutant matches {" ".join(options.patterns)}; --list prints their names')
    if options.list:
        for mutant in mutants:
            print(f'{mutant.name:42} {mutant.breaks}')
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.monotonic()
    outcomes = play_all(mutants, options.jobs, options.deadline)
    bad = [each for each in outcomes if not each.is_good]
    print(f'{len(outcomes) - len(bad)} of {len(outcomes)} mutants found, {time.monotonic() - begin:.0f} s')
    for each in bad:
        print(f'{each.outcome}: {each.name} {each.test}')
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + '\n')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
