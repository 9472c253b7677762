"""
Compare the speed of two commits: run one command in both, in turn, and print ratios with their intervals.

    python scripts/ab.py HEAD~20 HEAD --figures 'sample/elements_per_s' -- \\
        python -m benchmarks replay --buffers ding_store --scale 0.2 --json {json}
    python scripts/ab.py v0.1.0 . --pairs 5 -- python scripts/profile_loop.py hopper_sac --turns 1 --json {json}

Each commit is checked out into a new git worktree. `.` stands for the working tree as it is. The command runs
in the root of the checkout, with the checkout first on PYTHONPATH. It writes its figures as JSON to the path that
replaces `{json}`. One warm-up per side compiles what numba keeps, and is not counted. Each pair runs both sides. The
side that runs first alternates. Both commits must have the command.

Interrupted by Ctrl-C or SIGTERM, it prints the pairs that are done.
A ratio above 1 means that the second commit is faster. The interval is the percentile bootstrap (95 %) of the median of
the pairs' ratios. "slower" is printed if the upper end of the interval is below 0.95. The exit code is 1 if any figure
is slower, and 2 if the command fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np

NO_SLOWER = 0.95
RESAMPLES = 10_000
NAME_KEYS = ('workload', 'element', 'name', 'mb', 'loop')
"""Keys of a JSON object whose value names the object within its list."""


def flatten(figures: Any, path: str = '') -> Iterator[Tuple[str, float]]:
    """Yield (path, number) for each number in a JSON document. Lists of objects are keyed by the object's name."""
    if isinstance(figures, bool):
        return
    if isinstance(figures, (int, float)):
        yield path, float(figures)
    elif isinstance(figures, dict):
        for key, value in figures.items():
            yield from flatten(value, f'{path}/{key}' if path else str(key))
    elif isinstance(figures, list):
        for index, value in enumerate(figures):
            names = [str(value[key]) for key in NAME_KEYS if isinstance(value, dict) and key in value]
            name = names[0].partition(':')[0] if names else str(index)
            yield from flatten(value, f'{path}/{name}' if path else name)


def is_lower_better(name: str) -> bool:
    """Return True if a figure is a time or a size rather than a rate."""
    leaf = name.rpartition('/')[2]
    return not re.search(r'per_s$', leaf) and bool(re.search(r'(_s|_ms|_us|seconds|bytes\w*)$', leaf)) or '/ms/' in name


def interval(ratios: Sequence[float], seed: int = 0) -> Tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the median of these ratios."""
    values = np.asarray(ratios, float)
    picks = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(low), float(high)


def ratios_of(name: str, pairs: Sequence[Tuple[Dict[str, float], Dict[str, float]]]) -> List[float]:
    """Return the second side's speed relative to the first's, per pair in which both sides have this figure."""
    both = [(first[name], second[name]) for first, second in pairs if first.get(name) and second.get(name)]
    return [first / second if is_lower_better(name) else second / first for first, second in both]


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check a commit out into a worktree that is removed at the end. `.` is the working tree itself."""
    root = Path(__file__).resolve().parents[1]
    if commit == '.':
        yield root
        return
    with tempfile.TemporaryDirectory(prefix='ding-ab-') as directory:
        place = Path(directory) / 'checkout'
        git = ['git', '-C', str(root), 'worktree']
        subprocess.run([*git, 'add', '--quiet', '--detach', str(place), commit], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, 'remove', '--force', str(place)], check=True)


def run(command: Sequence[str], place: Path) -> Dict[str, float]:
    """Run the command in a checkout and return its figures by path."""
    with tempfile.TemporaryDirectory(prefix='ding-ab-') as directory:
        path = Path(directory) / 'figures.json'
        words = [word.replace('{json}', str(path)) for word in command]
        # Run the commands of this interpreter. PYTHONPATH precedes its site-packages, so they import the checkout.
        words[0] = shutil.which(words[0], path=os.path.dirname(sys.executable)) or words[0]
        env = dict(os.environ, PYTHONPATH=str(place))
        done = subprocess.run(words, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode or not path.exists():
            print(done.stdout[-3000:], file=sys.stderr)
            print(f'ab.py: exit code {done.returncode}, or no figures, of: {" ".join(words)}', file=sys.stderr)
            sys.exit(2)
        return dict(flatten(json.loads(path.read_text())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('first', help='a commit, or . for the working tree')
    parser.add_argument('second', help='a commit, or . for the working tree')
    parser.add_argument('--pairs', type=int, default=9, help='number of runs of both sides (default: 9)')
    parser.add_argument(
        '--figures', default='', metavar='REGEX', help='pattern of the figures to compare (default: all)'
    )
    parser.add_argument('--json', metavar='FILE', help='write the ratios of all figures to FILE')
    parser.add_argument('command', nargs='+', help='the command, after --. It writes its figures to {json}')
    given = parser.parse_args()
    if not any('{json}' in word for word in given.command):
        parser.error('the command has no {json}: it must write its figures to a file')
    pairs: List[Tuple[Dict[str, float], Dict[str, float]]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` and Ctrl-C keep the pairs that are done
    with checkout(given.first) as first, checkout(given.second) as second:
        for side in (first, second):
            run(given.command, side)
        try:
            for index in range(given.pairs):
                order = (first, second) if index % 2 == 0 else (second, first)
                found = {side: run(given.command, side) for side in order}
                pairs.append((found[first], found[second]))
                print(f'pair {index + 1} of {given.pairs}', file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            if not pairs:
                raise
            print(f'interrupted after {len(pairs)} of {given.pairs} pairs', file=sys.stderr)
    names = [name for name in pairs[0][0] if re.search(given.figures, name) and ratios_of(name, pairs)]
    if not names:
        print(f'ab.py: no figure matches {given.figures!r}; known are {", ".join(pairs[0][0])}', file=sys.stderr)
        return 2
    width = max(map(len, names))
    print(f'{"figure":{width}}  {given.first:>11}  {given.second:>11}   ratio  95 % interval')
    kept = {}
    for name in names:
        ratios = ratios_of(name, pairs)
        low, high = interval(ratios)
        sides = [median(side[name] for side in sides if name in side) for sides in zip(*pairs)]
        kept[name] = {'ratio': median(ratios), 'low': low, 'high': high, 'pairs': ratios}
        verdict = 'slower' if high < NO_SLOWER else ''
        columns = f'{sides[0]:11.5g}  {sides[1]:11.5g}  {median(ratios):6.3f}  {low:.3f} - {high:.3f}'
        print(f'{name:{width}}  {columns}  {verdict}'.rstrip())
    if given.json:
        Path(given.json).write_text(json.dumps(kept, indent=1))
    return int(any(figure['high'] < NO_SLOWER for figure in kept.values()))


if __name__ == '__main__':
    sys.exit(main())
