#!/usr/bin/env python3
"""
What a replay's size does: return over env steps and iterations/s, for fixed sizes and for replays that grow.

    python scripts/buffer_size.py cartpole
    python scripts/buffer_size.py cartpole --sizes 1000 5000 1000-5000 --seeds 0 1 2
    python scripts/buffer_size.py hopper --minutes 30     # needs scripts/setup.sh --extra mujoco; pong: --extra atari
    python scripts/buffer_size.py --plot                  # only print the tables and draw the plot
    python scripts/buffer_size.py cartpole --plot --page docs/results/buffer-size.md

A size such as 1000-5000 grows from 1,000 elements to 5,000 over the run's env steps (store.replay_growth). Every run is
a process on the store with collector and learner. It writes a line per evaluation to DIRECTORY/TASK-SIZE-sSEED/
curve.jsonl. Started again, the command keeps runs that ended and begins the others anew, so it can be interrupted.

Returns over env steps do not depend on the machine's load. Iterations/s do. They count rounds without an evaluation.
Iterations per second of CPU depend on it less.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import learn

ROOT = learn.ROOT
#: Task -> its main, its last env step, its settings, and the number of seeds that a conclusion needs.
TASKS: Dict[str, Dict[str, Any]] = {
    'cartpole': dict(
        main='dizoo_configs.cartpole.cartpole_dqn_main',
        max_env_step=10_000,
        settings={**learn.ENVS, 'policy.eval.evaluator.eval_freq': 625},
        num_seeds=5,
    ),
    'hopper': dict(learn.TASKS['hopper'], num_seeds=3),
    'pong': dict(learn.TASKS['pong'], num_seeds=3),
}
SIZES = ('1000', '10000', '100000', '1000000')
#: Of each task's last env step, when the shares of the default growing replays are full.
BEGIN, END = '<!-- table: scripts/buffer_size.py {} -->', '<!-- end of table -->'
RULE = (
    'Rule: with {num_seeds} seeds or more, a size has an effect if its mean differs from the mean of the largest fixed '
    "size by more than the seeds' spread: the larger one of both sizes' ranges (largest minus smallest seed)."
)
MEASURES = {'whole': 'mean over the whole run', 'end': 'mean over its last third'}


class Size(NamedTuple):
    """A fixed size, or one that grows from ``start``."""

    full: int
    start: Optional[int] = None

    @classmethod
    def parse(cls, text: str) -> Size:
        first, dash, last = text.partition('-')
        if not (first.isdecimal() and int(first) and (not dash or (last.isdecimal() and int(first) < int(last)))):
            raise argparse.ArgumentTypeError(f'{text!r} must be a size such as 1000, or a growing one such as 1000-5000')
        return cls(int(last), int(first)) if dash else cls(int(first))

    def __str__(self) -> str:
        return str(self.full) if self.start is None else f'{self.start}-{self.full}'

    @property
    def label(self) -> str:
        return f'{self.full:,}' if self.start is None else f'{self.start:,} to {self.full:,}'


class Loop:
    """Measures the loop of a run, in rounds without an evaluation."""

    def __init__(self) -> None:
        self.session: Any = None
        self.iterations, self.seconds, self.cpu_s = 0, 0.0, 0.0
        self._last = (0, time.monotonic(), time.process_time())

    def measure(self, ctx: Any, is_evaluated: bool) -> Dict[str, Any]:
        now = (int(ctx.train_iter), time.monotonic(), time.process_time())
        if not is_evaluated and now[0] > self._last[0]:
            self.iterations += now[0] - self._last[0]
            self.seconds += now[1] - self._last[1]
            self.cpu_s += now[2] - self._last[2]
        self._last = now
        if not is_evaluated:
            return {}
        replay = self.session.replays[0]
        return dict(
            iterations=self.iterations,
            training_s=self.seconds,
            training_cpu_s=self.cpu_s,
            size=int(replay.size),
            rows=replay.count(),
            bytes=replay.num_bytes or 0,
        )


def options(task: str, size: Size, seed: int, max_env_step: int) -> Any:
    from dizoo_configs.command import Options

    settings = {
        **TASKS[task]['settings'],
        'exp_name': f'{task}_{size}_seed{seed}',
        'policy.other.replay_buffer.replay_buffer_size': size.full,
    }
    if size.start is not None:
        settings['store.replay_growth'] = dict(start=size.start, env_steps=max_env_step)
    return Options(seed=seed, max_env_step=max_env_step, env_manager='base', settings=tuple(settings.items()))


def run_one(task: str, size: Size, seed: int, max_env_step: int, minutes: float) -> None:
    """Train one run in this process, which is the run's own, in the run's directory."""
    from dizoo_configs import builder

    loop, pipeline = Loop(), builder.pipeline

    def recording(*args: Any, **kwargs: Any) -> Any:
        parts = pipeline(*args, **kwargs)
        loop.session = parts.session
        return parts

    builder.pipeline = recording
    learn.train(TASKS[task]['main'], options(task, size, seed, max_env_step), minutes, loop.measure)


class Cell(NamedTuple):
    """All runs of a task with one size: seed -> curve."""

    size: Size
    curves: Dict[int, List[Dict[str, Any]]]

    def returns(self, measure: str) -> List[float]:
        """Return each seed's mean return, over the evaluations after the first one, which precedes all training."""
        values = [[point['mean_return'] for point in curve[1:]] for curve in self.curves.values()]
        return [fmean(each if measure == 'whole' else each[-math.ceil(len(each) / 3) :]) for each in values]

    def rate(self, seconds: str) -> float:
        last = [curve[-1] for curve in self.curves.values()]
        return sum(each['iterations'] for each in last) / max(1e-9, sum(each[seconds] for each in last))

    @property
    def num_bytes(self) -> int:
        return max(curve[-1]['bytes'] for curve in self.curves.values())

    def spread(self, measure: str) -> float:
        values = self.returns(measure)
        return max(values) - min(values)

    def equals(self, other: Cell) -> bool:
        """Return True if all seeds that both have learned the same, evaluation by evaluation."""
        common = self.curves.keys() & other.curves.keys()
        return bool(common) and all(
            [point['mean_return'] for point in self.curves[seed]]
            == [point['mean_return'] for point in other.curves[seed]]
            for seed in common
        )


def read_cells(directory: Path, task: str) -> List[Cell]:
    """Return the cells of the runs that reached their last env step, by size."""
    found: Dict[Size, Dict[int, Any]] = {}
    for own in sorted(directory.glob(f'{task}-*-s*')):
        size, _, seed = own.name.removeprefix(f'{task}-').rpartition('-s')
        ended, curve = own / 'ended', learn.read_curve(own)
        if ended.exists() and ended.read_text() == learn.STEPS and len(curve) > 1:
            found.setdefault(Size.parse(size), {})[int(seed)] = curve
    return [Cell(size, dict(sorted(curves.items()))) for size, curves in sorted(found.items(), key=_order)]


def _order(item: Any) -> Any:
    return item[0].start is not None, item[0].full, item[0].start or 0


def conclusions(cells: List[Cell], num_seeds: int) -> List[Dict[str, Any]]:
    """Compare each size with the largest fixed one, by ``RULE``."""
    fixed = [cell for cell in cells if cell.size.start is None]
    if not fixed:
        return []
    base, found = fixed[-1], []
    enough = [cell for cell in fixed if len(cell.curves) >= num_seeds]
    base = enough[-1] if enough else base
    for cell in cells:
        if cell is base:
            continue
        seeds = min(len(cell.curves), len(base.curves))
        for measure in MEASURES:
            difference = fmean(cell.returns(measure)) - fmean(base.returns(measure))
            spread = max(cell.spread(measure), base.spread(measure))
            if seeds < num_seeds:
                verdict = f'no conclusion: {seeds} of {num_seeds} seeds'
            elif cell.equals(base):
                verdict = 'none: the curves are equal'
            else:
                verdict = 'an effect' if abs(difference) > spread else 'none shown'
            found.append(
                dict(
                    size=str(cell.size),
                    base=str(base.size),
                    measure=measure,
                    difference=difference,
                    spread=spread,
                    verdict=verdict,
                )
            )
    return found


def rows_of(cells: List[Cell]) -> List[List[str]]:
    rows = [['size', 'seeds', *MEASURES.values(), 'iterations/s', 'per CPU second', 'replay bytes', 'as']]
    for number, cell in enumerate(cells):
        returns = []
        for measure in MEASURES:
            values = cell.returns(measure)
            returns.append(f'{fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})')
        rates = [f'{cell.rate(seconds):.0f}' for seconds in ('training_s', 'training_cpu_s')]
        same = [other.size.label for other in cells[:number] if cell.equals(other)]
        rows.append(
            [
                cell.size.label,
                ', '.join(map(str, cell.curves)),
                *returns,
                *rates,
                f'{cell.num_bytes:,}',
                same[0] if same else '',
            ]
        )
    return rows


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    lines = [head, ['---'] * len(head), *others]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def missing(cells: List[Cell], task: str, sizes: Sequence[Size], seeds: Sequence[int]) -> List[str]:
    there = {(cell.size, seed) for cell in cells for seed in cell.curves}
    gone: Dict[Size, List[int]] = {}
    for size in sizes:
        for seed in seeds:
            if (size, seed) not in there:
                gone.setdefault(size, []).append(seed)
    return [f'{size.label}: seeds {", ".join(map(str, each))}' for size, each in gone.items()]


def report(cells: List[Cell], task: str, sizes: Sequence[Size], seeds: Sequence[int]) -> str:
    """Return the tables of a task, in Markdown."""
    num_seeds = TASKS[task]['num_seeds']
    last_step = max(curve[-1]['env_step'] for cell in cells for curve in cell.curves.values())
    out = f'{task}, up to env step {last_step:,}; {learn.EPISODES} episodes per evaluation; means and ranges over seeds.\n\n'
    out += table(rows_of(cells)) + '\n'
    found = conclusions(cells, num_seeds)
    if found:
        lines = [['size', 'compared with', 'return', 'difference', "seeds' spread", 'effect']]
        for each in found:
            lines.append(
                [
                    Size.parse(each['size']).label,
                    Size.parse(each['base']).label,
                    MEASURES[each['measure']],
                    f'{each["difference"]:+.1f}',
                    f'{each["spread"]:.1f}',
                    each['verdict'],
                ]
            )
        out += table(lines) + '\n'
    out += RULE.format(num_seeds=num_seeds) + '\n'
    gone = missing(cells, task, sizes, seeds)
    return out + f'\nMissing: {"; ".join(gone) if gone else "nothing"}.\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tasks', nargs='*', metavar='TASK', help=', '.join(TASKS))
    parser.add_argument('--sizes', type=Size.parse, nargs='+', default=[Size.parse(size) for size in SIZES])
    parser.add_argument('--seeds', type=int, nargs='+')
    parser.add_argument('--env-steps', type=int)
    parser.add_argument('--minutes', type=float, default=60.0, help='minutes after which a run ends (60)')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time, one core each (1)')
    parser.add_argument('--directory', type=Path, default=Path('runs/buffer_size'))
    parser.add_argument('--plot', action='store_true', help='only draw the existing curves')
    parser.add_argument('--one', nargs=2, metavar=('SIZE', 'SEED'), help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if given.one:
        run_one(given.tasks[0], Size.parse(given.one[0]), int(given.one[1]), given.env_steps, given.minutes)
        return
    directory = given.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for task in given.tasks:
        seeds = given.seeds or range(TASKS[task]['num_seeds'])
        if not given.plot:
            steps = given.env_steps or TASKS[task]['max_env_step']
            runs = {}
            for size in given.sizes:
                for seed in seeds:
                    arguments = [str(Path(__file__).resolve()), task, '--one', str(size), str(seed), '--env-steps', str(steps), '--minutes', str(given.minutes)]
                    runs[directory / f'{task}-{size}-s{seed}'] = (steps, arguments)
            learn.run_all(runs, given.minutes, given.jobs)
        print(report(read_cells(directory, task), task, given.sizes, seeds))


if __name__ == '__main__':
    main()
