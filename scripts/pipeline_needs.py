#!/usr/bin/env python3
"""
What our pipelines need of a replay, beside the published table: sizes, rates, memory, and storage's share of the time.

    python scripts/pipeline_needs.py                       # all eight, on the store and in plain DI-engine
    python scripts/pipeline_needs.py sac qmix --seconds 20 --turns 3
    python scripts/pipeline_needs.py --plot --page docs/results/pipelines.md    # only print the tables, and write them

Each window is a process with one thread, which has environments, collector and learner, as in scripts/profile_loop.py:
the mains of dizoo_configs with smaller models, and elements as long as their configs say. Both sides take turns. After
the clock has stopped, the memory of the replay is measured at the moment before a sample.

Each window is written to DIRECTORY/JOB-SIDE-TURN.json. Started again, the command keeps the windows that are there, so
it can be interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'scripts')]

import profile_loop  # noqa: E402
from pages import commit_name, machine_name, table, write_page  # noqa: E402

from benchmarks.machine import QUIET_CORES, busy_cores  # noqa: E402
from benchmarks.output import say  # noqa: E402
from ding_store.compare.rows import ROWS, Row  # noqa: E402
from ding_store.compare.units import number, size_text  # noqa: E402

SIDES = ('stock', 'store')
_SEQUENCES = {'policy.model.encoder_hidden_size_list': [8, 8, 64]}

#: Job of the published table -> main, config and settings. Models are small, and elements as long as in the config.
LOOPS = {
    'dqn': ('atari.atari_dqn_main', 'atari.qbert_dqn_per_config', profile_loop.ATARI),
    'ppo': profile_loop.LOOPS['qbert_ppo'],
    'r2d2': (
        'atari.atari_r2d2_main', 'atari.qbert_r2d2_config',
        {**profile_loop.ATARI, **_SEQUENCES, 'policy.learn.batch_size': 16, 'policy.learn.update_per_collect': 4},
    ),
    'impala': (
        'atari.atari_impala_main', 'atari.qbert_impala_config',
        {**profile_loop.ATARI, **profile_loop.HEADS, **_SEQUENCES},
    ),
    'sac': profile_loop.LOOPS['hopper_sac'],
    'qmix': profile_loop.LOOPS['smax_qmix'],
    'masac': profile_loop.LOOPS['smax_masac'],
    'gobigger': profile_loop.LOOPS['gobigger_dqn'],
}  # fmt: skip
JOBS: Dict[str, Row] = {row.name: row for row in ROWS}


class Side(NamedTuple):
    """The medians over the windows of one job on one side."""

    windows: List[Dict[str, Any]]

    def of(self, name: str) -> float:
        return median(window[name] for window in self.windows)

    def ms(self, *parts: str) -> float:
        """Return milliseconds per iteration that are spent in these parts."""
        return median(sum(window['ms'].get(part, 0.0) for part in parts) for window in self.windows)

    @property
    def parts(self) -> Dict[str, float]:
        """Each part's share of an iteration."""
        names = [part for part in profile_loop.PARTS if self.ms(part)]
        whole = sum(map(self.ms, names))
        return {name: self.ms(name) / whole for name in names}

    @property
    def storage(self) -> float:
        """The share of an iteration in pushes and samples, which include collating and new priorities."""
        return sum(self.parts.get(part, 0.0) for part in ('push', 'sample'))

    def us_per(self, part: str, rate: str) -> float:
        """Return microseconds per element that is added or sampled."""
        return 1e3 * self.ms(part) * self.of('train_iter') / max(1e-9, self.of(rate))

    def cores_at(self, row: Row) -> float:
        """Return the share of a core that pushes and samples would take at the published rates."""
        push, sample = self.us_per('push', 'adds_per_s'), self.us_per('sample', 'samples_per_s')
        return 1e-6 * (row.adds_per_s * push + row.samples_per_s * sample)

    @property
    def bytes_per_row(self) -> float:
        """Memory per element of the replay: the growth by copies of it, or the bytes of its rows and frames."""
        return self.of('memory_bytes') / max(1.0, self.of('rows'))


def read_sides(directory: Path, job: str) -> Dict[str, Side]:
    """Return the sides of a job that have windows."""
    found = {}
    for side in SIDES:
        windows = [json.loads(path.read_text()) for path in sorted(directory.glob(f'{job}-{side}-*.json'))]
        if windows:
            found[side] = Side(windows)
    return found


def pair(sides: Dict[str, Side], show: Any) -> List[str]:
    """Return a cell for plain DI-engine and one for the store."""
    return [show(sides[side]) if side in sides else '' for side in SIDES]


def needs_table(found: Dict[str, Dict[str, Side]]) -> str:
    titles = ['length', 'bytes of an element', 'adds/s', 'samples/s']
    head = ['job', *(f'published {title}' for title in titles), 'ours: bytes of an element']
    rows = [[*head, 'adds/s, plain', 'store', 'samples/s, plain', 'store']]
    for job, sides in found.items():
        row, any_side = JOBS[job], next(iter(sides.values()))
        rates = [number(row.adds_per_s), number(row.samples_per_s), size_text(any_side.of('element_bytes'))]
        adds = pair(sides, lambda side: number(side.of('adds_per_s')))
        samples = pair(sides, lambda side: number(side.of('samples_per_s')))
        rows.append([row.title, f'{row.length:,}', row.published, *rates, *adds, *samples])
    return table(rows)


def time_table(found: Dict[str, Dict[str, Side]]) -> str:
    rows = [['job', 'iterations/s, plain', 'store', 'push and sample, plain', 'store', 'largest part, store']]
    rows[0] += [
        'us per add, plain',
        'store',
        'us per sample, plain',
        'store',
        'cores at published rates, plain',
        'store',
    ]
    for job, sides in found.items():
        row = JOBS[job]
        parts = sides['store'].parts if 'store' in sides else {}
        largest = max(parts, key=lambda part: parts[part]) if parts else ''
        rows.append(
            [
                row.title,
                *pair(sides, lambda side: number(side.of('train_iter'))),
                *pair(sides, lambda side: f'{100 * side.storage:.1f} %'),
                f'{largest}, {100 * parts[largest]:.0f} %' if largest else '',
                *pair(sides, lambda side: number(side.us_per('push', 'adds_per_s'))),
                *pair(sides, lambda side: number(side.us_per('sample', 'samples_per_s'))),
                *pair(sides, lambda side, row=row: f'{side.cores_at(row):.3f}'),
            ]
        )
    return table(rows)


def memory_table(found: Dict[str, Dict[str, Side]]) -> str:
    rows = [['job', 'rows measured, plain', 'store', 'bytes per row, plain', 'store', 'times less']]
    rows[0] += ['published length, projected: plain', 'store']
    for job, sides in found.items():
        row = JOBS[job]
        each = [sides[side].bytes_per_row for side in SIDES if side in sides]
        rows.append(
            [
                row.title,
                *pair(sides, lambda side: f'{side.of("rows"):,.0f}'),
                *pair(sides, lambda side: size_text(side.bytes_per_row)),
                f'{each[0] / each[1]:.1f}' if len(each) == 2 and each[1] else '',
                *pair(sides, lambda side, row=row: size_text(row.length * side.bytes_per_row)),
            ]
        )
    return table(rows)


def machine_state(found: Dict[str, Dict[str, Side]]) -> str:
    """Return a sentence on the machine, the commits, and the load by other processes."""
    windows = [window for sides in found.values() for side in sides.values() for window in side.windows]
    commits, dates, machines = ({window[key] for window in windows} for key in ('commit', 'date', 'machine'))
    loads = [window['other_cores'] for window in windows]
    minutes, shortest = (sum(window['wall_s'] for window in windows) / 60, min(window['seconds'] for window in windows))
    state = 'quiet' if max(loads) <= QUIET_CORES else 'busy' if median(loads) > QUIET_CORES else 'busy at times'
    return (
        f'Measured on {" to ".join(sorted({min(dates), max(dates)}))} at commit {", ".join(sorted(commits))}, on '
        f'{"; ".join(sorted(machines))}. {len(windows)} windows of {shortest:.0f} s and more took {minutes:.1f} min '
        f'with their starts. **The machine was {state}**: just before the windows other processes used '
        f'{median(loads):.2f} cores (median), and {max(loads):.2f} at most.\n'
    )


def report(directory: Path) -> str:
    """Return all tables in Markdown."""
    found = {job: sides for job in LOOPS if (sides := read_sides(directory, job))}
    if not found:
        raise SystemExit(f'{directory} has no windows yet. Leave out --plot to measure some.')
    took = {
        job: sum(window['wall_s'] for side in sides.values() for window in side.windows) for job, sides in found.items()
    }
    missing = [f'{job} {side}' for job in LOOPS for side in SIDES if side not in found.get(job, {})]
    parts = [machine_state(found)]
    parts.append(f'Seconds per job: {", ".join(f"{job} {value:.0f}" for job, value in took.items())}. Not measured: ')
    parts[-1] += f'{", ".join(missing) or "nothing"}.\n'
    return '\n'.join([*parts, needs_table(found), time_table(found), memory_table(found)])


def as_json(directory: Path) -> Dict[str, Any]:
    """Return the figures of the tables."""
    figures: Dict[str, Any] = {}
    for job in LOOPS:
        for side, each in read_sides(directory, job).items():
            names = ('element_bytes', 'adds_per_s', 'samples_per_s', 'train_iter', 'rows', 'other_cores')
            found = {name: each.of(name) for name in names}
            found.update(storage_share=each.storage, parts=each.parts, bytes_per_row=each.bytes_per_row)
            found.update(cores_at_published_rates=each.cores_at(JOBS[job]), windows=len(each.windows))
            figures.setdefault(job, {})[side] = found
    return figures


def measure(job: str, side: str, turn: int, given: argparse.Namespace, directory: Path) -> None:
    """Measure a window, unless it is there."""
    path = directory / f'{job}-{side}-{turn}.json'
    if path.exists():
        say(f'{path.name} is there; remove it to measure it again')
        return
    say(f'{job} {side}, window {turn + 1} of {given.turns}')
    other_cores, began = busy_cores(0.5), time.monotonic()
    figures = profile_loop.measure(job, side, given.seconds, '', script=__file__)
    date = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d')
    about = dict(commit=commit_name(), date=date, machine=machine_name(), other_cores=other_cores)
    new = path.with_suffix('.new')
    new.write_text(json.dumps({**figures, **about, 'wall_s': time.monotonic() - began}, indent=1) + '\n')
    new.replace(path)


def measure_all(given: argparse.Namespace, directory: Path) -> int:
    """Measure all windows that are not there. Return 1 if some gave no figures."""
    failed = 0
    for job in given.jobs or LOOPS:
        try:
            for turn in range(given.turns):
                for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                    measure(job, side, turn, given, directory)
        except profile_loop.NoExtra as error:
            failed = failed or int(bool(given.jobs))
            sys.stderr.write(f'{error}\n')
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed = 1
            sys.stderr.write(f'{error}\n')
    return failed


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('jobs', nargs='*', metavar='JOB', help=f'jobs to measure (default: all of {" ".join(LOOPS)})')
    parser.add_argument('--seconds', type=float, default=8.0, help='seconds per window (8)')
    parser.add_argument('--turns', type=int, default=1, help='windows per job and side (1)')
    parser.add_argument('--directory', type=Path, default=Path('runs/pipelines'))
    parser.add_argument('--plot', action='store_true', help='only print the tables of the windows that are there')
    parser.add_argument('--page', type=Path, metavar='FILE', help='write the tables into this page, too')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the figures there')
    parser.add_argument('--child', nargs=3, metavar=('JOB', 'SIDE', 'OUT'), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    for job in given.jobs:
        if job not in LOOPS:
            parser.error(f'no job {job!r}; known are {", ".join(LOOPS)}')
    if not 0 < given.seconds < math.inf:
        parser.error(f'--seconds ({given.seconds:g}) must be above 0, and finite')
    if given.turns < 1:
        parser.error(f'--turns ({given.turns}) must be at least 1')
    return given


def main() -> int:
    given = parse()
    profile_loop.LOOPS.update(LOOPS)
    if given.child:
        from replay_traffic import Traffic

        job, side, out = given.child
        profile_loop.run_one(job, side, given.seconds, out, Traffic())
        return 0
    from ding_store.launch.termination import signals_as_interrupt

    directory = given.directory.resolve()
    failed = 0
    try:
        with signals_as_interrupt():
            if not given.plot:
                directory.mkdir(parents=True, exist_ok=True)
                failed = measure_all(given, directory)
            text = report(directory)
            print(text)
            if given.page:
                write_page(given.page, 'scripts/pipeline_needs.py', text)
            if given.json:
                given.json.write_text(json.dumps(as_json(directory), indent=1) + '\n')
    except KeyboardInterrupt:
        raise SystemExit('interrupted: the same command goes on with the windows that are missing') from None
    return failed


if __name__ == '__main__':
    sys.exit(main())
