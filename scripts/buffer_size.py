#!/usr/bin/env python3
"""
What a replay's size does: return over env steps and iterations/s, for fixed sizes and for replays that grow.

    python scripts/buffer_size.py cartpole
    python scripts/buffer_size.py cartpole --sizes 1000 5000 1000-5000 --seeds 0 1 2
    python scripts/buffer_size.py hopper --minutes 30     # needs scripts/setup.sh --extra mujoco; pong: --extra atari
    python scripts/buffer_size.py cartpole --plot         # only print the tables and draw the plot

A size such as 1000-5000 grows from 1,000 elements to 5,000 over the run's env steps (store.replay_growth). Every run is
a process on the store with collector and learner. It writes a line per evaluation to DIRECTORY/TASK-SIZE-sSEED/
curve.jsonl. Started again, the command keeps runs that ended and begins the others anew, so it can be interrupted.

Returns over env steps do not depend on the machine's load. Iterations/s do. They count rounds without an evaluation.
Iterations per second of CPU depend on it less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import learn
from pages import table, write_page

ROOT = learn.ROOT
EVALUATIONS = 'policy.eval.evaluator.eval_freq'
#: Task -> its main, last env step and settings, the default sizes, and the number of seeds that a conclusion needs.
TASKS: Dict[str, Dict[str, Any]] = {
    'cartpole': dict(
        main='dizoo_configs.cartpole.cartpole_dqn_main',
        max_env_step=10_000,
        settings={**learn.ENVS, EVALUATIONS: 625},
        sizes=('1000', '3000', '10000', '1000000', '1000-5000'),
        num_seeds=5,
    ),
    'hopper': dict(
        learn.TASKS['hopper'], sizes=('1000', '3000', '10000', '30000', '1000000', '1000-15000'), num_seeds=3
    ),
    'pong': dict(learn.TASKS['pong'], sizes=('1000', '10000', '100000', '1000000', '1000-100000'), num_seeds=3),
}
MEASURES = {'whole': 'return, mean of the whole run', 'end': 'return, mean of its last third'}
RULE = (
    'Rule: a size has an effect if its mean differs from that of the size it is compared with by more than the '
    "seeds' spread. The spread is the larger one of both sizes' ranges (largest minus smallest seed). "
    'A conclusion needs {num_seeds} seeds of both. The size compared with is the largest fixed one that has as many.'
)


class Size(NamedTuple):
    """A fixed size, or one that grows from ``start``."""

    full: int
    start: Optional[int] = None

    @classmethod
    def parse(cls, text: str) -> Size:
        first, dash, last = text.partition('-')
        if not (first.isdecimal() and int(first) and (not dash or (last.isdecimal() and int(first) < int(last)))):
            raise argparse.ArgumentTypeError(
                f'{text!r} must be a size such as 1000, or a growing one such as 1000-5000'
            )
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

    known = TASKS[task]['settings'], TASKS[task]['max_env_step']
    settings = {
        **known[0],
        EVALUATIONS: max(1, known[0][EVALUATIONS] * max_env_step // known[1]),
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
    """Compare each size with the largest fixed one that has enough seeds, by ``RULE``."""
    fixed = [cell for cell in cells if cell.size.start is None]
    enough = [cell for cell in fixed if len(cell.curves) >= num_seeds] or fixed
    found = []
    for cell, measure in itertools.product(cells, MEASURES):
        if not enough or cell is enough[-1]:
            continue
        base = enough[-1]
        difference = fmean(cell.returns(measure)) - fmean(base.returns(measure))
        spread = max(cell.spread(measure), base.spread(measure))
        seeds = min(len(cell.curves), len(base.curves))
        verdict = 'yes' if abs(difference) > spread else 'none shown'
        if cell.equals(base):
            # Without seeds that only one of both has.
            verdict, difference = 'none: equal curves', 0.0
        elif seeds < num_seeds:
            verdict = f'no conclusion: {seeds} of {num_seeds} seeds'
        values = dict(measure=measure, difference=difference, spread=spread, effect=verdict)
        found.append(dict(size=str(cell.size), base=str(base.size), **values))
    return found


def rows_of(cells: List[Cell]) -> List[List[str]]:
    rows = [
        ['size', 'seeds', *MEASURES.values(), 'iterations/s', 'iterations per CPU second', 'bytes', 'same curves as']
    ]
    for number, cell in enumerate(cells):
        returns = [cell.returns(measure) for measure in MEASURES]
        same = [other.size.label for other in cells[:number] if cell.equals(other)]
        rows.append(
            [
                cell.size.label,
                ', '.join(map(str, cell.curves)),
                *(f'{fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})' for values in returns),
                *(f'{cell.rate(seconds):.0f}' for seconds in ('training_s', 'training_cpu_s')),
                f'{cell.num_bytes:,}',
                *(same[:1] or ['']),
            ]
        )
    return rows


def missing(cells: List[Cell], sizes: Sequence[Size], seeds: Sequence[int]) -> List[str]:
    """Return which runs there should be, and are not."""
    there = {cell.size: cell.curves.keys() for cell in cells}
    gone = {size: [seed for seed in seeds if seed not in there.get(size, ())] for size in sizes}
    return [f'{size.label}: seeds {", ".join(map(str, each))}' for size, each in gone.items() if each]


def report(cells: List[Cell], task: str, sizes: Sequence[Size], seeds: Sequence[int]) -> str:
    """Return the tables of a task, in Markdown."""
    num_seeds = TASKS[task]['num_seeds']
    last_step = max((curve[-1]['env_step'] for cell in cells for curve in cell.curves.values()), default=0)
    out = (
        f'{task}, {len(cells)} sizes, evaluated until env step {last_step:,} with {learn.EPISODES} episodes each. '
        'Returns are means over the seeds, and in brackets the smallest and the largest seed.\n\n'
    )
    if cells:
        out += table(rows_of(cells)) + '\n'
    lines = [['size', 'compared with', 'measure', 'difference', 'spread', 'effect']]
    for each in conclusions(cells, num_seeds):
        names = Size.parse(each['size']).label, Size.parse(each['base']).label, MEASURES[each['measure']]
        lines.append([*names, f'{each["difference"]:+.1f}', f'{each["spread"]:.1f}', each['effect']])
    if len(lines) > 1:
        out += table(lines) + '\n'
    gone = missing(cells, sizes, seeds)
    return f'{out}{RULE.format(num_seeds=num_seeds)}\n\nMissing runs: {"; ".join(gone) if gone else "none"}.\n'


def as_json(cells: List[Cell], task: str) -> Dict[str, Any]:
    rates = {'iterations_per_s': 'training_s', 'iterations_per_cpu_s': 'training_cpu_s'}
    sizes = [
        dict(
            size=str(cell.size),
            seeds=list(cell.curves),
            bytes=cell.num_bytes,
            **{measure: cell.returns(measure) for measure in MEASURES},
            **{name: cell.rate(seconds) for name, seconds in rates.items()},
        )
        for cell in cells
    ]
    return dict(sizes=sizes, conclusions=conclusions(cells, TASKS[task]['num_seeds']))


def plot(found: Dict[str, List[Cell]], directory: Path) -> None:
    """Draw mean returns over env steps with the seeds' ranges, and below each seed's return over the size."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(6 * len(found), 7), squeeze=False)
    for (task, cells), (curves, ends) in zip(found.items(), axes.T):
        for number, cell in enumerate(cells):
            points = list(zip(*cell.curves.values()))
            steps = [each[0]['env_step'] for each in points]
            values = [[point['mean_return'] for point in each] for each in points]
            style = '-' if cell.size.start is None else '--'
            curves.plot(steps, list(map(fmean, values)), style, color=f'C{number}', label=cell.size.label)
            curves.fill_between(steps, list(map(min, values)), list(map(max, values)), color=f'C{number}', alpha=0.1)
            for measure, marker in zip(MEASURES, 'ox'):
                returns = cell.returns(measure)
                name = MEASURES[measure] if not number else None
                ends.plot([number] * len(returns), returns, marker, color=f'C{number}', label=name, fillstyle='none')
        curves.set(title=task, xlabel='env steps', ylabel=f'mean return of {learn.EPISODES} episodes')
        curves.legend(fontsize='small', title='replay size')
        ends.set_xticks(range(len(cells)), [cell.size.label for cell in cells])
        ends.set(xlabel='replay size', ylabel='return of each seed')
        ends.legend(fontsize='small')
    figure.tight_layout()
    figure.savefig(directory / 'buffer_size.svg', metadata={'Date': None})
    print(f'curves in {directory / "buffer_size.svg"}')


def run_all(given: argparse.Namespace, task: str, seeds: Sequence[int], directory: Path) -> None:
    """Run all runs of a task that have not ended before."""
    env_steps = given.env_steps or TASKS[task]['max_env_step']
    about = directory / f'{task}.json'
    if about.exists() and (had := json.loads(about.read_text())['env_steps']) != env_steps:
        raise SystemExit(
            f'{directory} has runs of {task} with {had:,} env steps, not {env_steps:,}. Use --env-steps {had}, or '
            'another --directory.'
        )
    about.write_text(json.dumps(dict(env_steps=env_steps)) + '\n')
    runs = {}
    for seed, size in itertools.product(seeds, given.sizes or default_sizes(task)):
        steps = ['--env-steps', str(env_steps), '--minutes', str(given.minutes)]
        arguments = [str(Path(__file__).resolve()), task, '--one', str(size), str(seed), *steps]
        runs[directory / f'{task}-{size}-s{seed}'] = (env_steps, arguments)
    learn.run_all(runs, given.minutes, given.jobs)


def default_sizes(task: str) -> List[Size]:
    return [Size.parse(size) for size in TASKS[task]['sizes']]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tasks', nargs='*', metavar='TASK', help=', '.join(TASKS))
    parser.add_argument('--sizes', type=Size.parse, nargs='+', metavar='SIZE', help="sizes (the task's own)")
    parser.add_argument('--seeds', type=int, nargs='+', metavar='SEED', help='seeds (5 for cartpole, 3 for others)')
    parser.add_argument('--env-steps', type=int, help="last env step of each run (the task's own)")
    parser.add_argument('--minutes', type=float, default=60.0, help='minutes after which a run ends (60)')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time, one core each (1)')
    parser.add_argument('--directory', type=Path, default=Path('runs/buffer_size'))
    parser.add_argument('--plot', action='store_true', help='only print the tables and draw the plot')
    parser.add_argument('--page', type=Path, metavar='FILE', help='write the tables into this page, too')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the figures and the conclusions there')
    parser.add_argument('--one', nargs=2, metavar=('SIZE', 'SEED'), help=argparse.SUPPRESS)
    given = parser.parse_args()
    for task in set(given.tasks) - set(TASKS):
        parser.error(f'no task {task!r}; there are: {", ".join(TASKS)}')
    if not given.tasks:
        parser.error(f'name a task: {", ".join(TASKS)}')
    for name, least in (('jobs', 1), ('env_steps', 1)):
        if getattr(given, name) is not None and getattr(given, name) < least:
            parser.error(f'--{name.replace("_", "-")} ({getattr(given, name)}) must be at least {least}')
    if not 0 < given.minutes < math.inf:
        parser.error(f'--minutes ({given.minutes:g}) must be above 0, and finite')
    return given


def main() -> None:
    given = parse()
    sys.path.insert(0, str(ROOT))
    if given.one:
        size, seed = Size.parse(given.one[0]), int(given.one[1])
        run_one(given.tasks[0], size, seed, given.env_steps, given.minutes)
        return
    from ding_store.launch.termination import signals_as_interrupt

    directory = given.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    found = {}
    try:
        with signals_as_interrupt():
            for task in given.tasks:
                seeds = given.seeds or list(range(TASKS[task]['num_seeds']))
                if not given.plot:
                    run_all(given, task, seeds, directory)
                found[task] = cells = read_cells(directory, task)
                text = report(cells, task, given.sizes or default_sizes(task), seeds)
                print(text)
                if given.page:
                    write_page(given.page, f'scripts/buffer_size.py {task}', text)
            if given.json:
                given.json.write_text(json.dumps({task: as_json(cells, task) for task, cells in found.items()}) + '\n')
            if any(found.values()):
                plot(found, directory)
    except KeyboardInterrupt:
        raise SystemExit('interrupted: the same command begins anew the runs that have not ended') from None


if __name__ == '__main__':
    main()
