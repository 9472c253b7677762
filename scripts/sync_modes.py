#!/usr/bin/env python3
"""
Does asynchronous training lose to synchronous? CartPole with A2C's workers, each mode, 1, 2 and 4 workers, five seeds.

    python scripts/sync_modes.py                                        # all 90 runs: an hour or two on two cores
    python scripts/sync_modes.py --modes gradients async --workers 2 --seeds 0 1
    python scripts/sync_modes.py --plot                                 # only print the tables and draw the plot

Every run is `ding-store run --roles worker=N` of dizoo_configs/cartpole/cartpole_a2c_main.py. Worker 0 evaluates, and
writes a line per evaluation to DIRECTORY/MODE-N-sSEED/curve.jsonl: env steps of all workers, seconds, mean return.
Started again, the command keeps runs that ended and begins the others anew, so it can be interrupted.

Returns over env steps depend little on the machine's load. Returns over wall time do.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path
from statistics import fmean
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

os.environ.setdefault('OMP_NUM_THREADS', '1')  # torch reads it when it is imported
import learn  # noqa: E402

ROOT = learn.ROOT
MAIN = 'dizoo_configs.cartpole.cartpole_a2c_main'
#: Mode -> its settings of ``store.learners``.
MODES: Dict[str, Dict[str, Any]] = {
    'gradients': {},
    'async': {'max_staleness': 8},
    'average': {'period': 4},
    'elastic': {'period': 4, 'rho': 0.3},
    'gossip': {'period': 4},
    'hogwild': {},
}
BASE = 'gradients'
WORKERS = (1, 2, 4)
NUM_SEEDS = 5
ENV_STEPS, NUM_EVALUATIONS, EPISODES = 60_000, 15, 10
#: Env steps of a worker per training iteration: the config's n_sample.
STEPS_PER_ITERATION = 80
MEASURES = {'steps': 'return, mean over env steps', 'time': 'return, mean over the first {time_s:.0f} s'}
RULE = (
    "Rule: a mode has an effect if its mean differs from that of {base!r} with as many workers by more than the seeds' "
    'spread. The spread is the larger one of both ranges (largest minus smallest seed). A conclusion needs {num_seeds} '
    'seeds of both.'
)
BEGIN, END = '<!-- table: scripts/sync_modes.py -->', '<!-- end of table -->'


class ForkedRun(learn.Run):
    """A run whose `ding-store` command is forked from this process, which has imported DI-engine: it starts at once."""

    def start(self, arguments: List[str], environment: Dict[str, str], out: Any) -> ForkedCommand:
        return ForkedCommand(arguments, environment, self.directory, out.fileno())


class ForkedCommand:
    """What `subprocess.Popen` is, for a `ding-store` command in a fork of this process."""

    def __init__(self, arguments: List[str], environment: Dict[str, str], directory: Path, out: int) -> None:
        context = multiprocessing.get_context('fork')
        self.process = context.Process(target=_command, args=(arguments, environment, directory, out, os.getpid()))
        self.process.start()
        self.terminate, self.kill, self.wait = self.process.terminate, self.process.kill, self.process.join

    def poll(self) -> Optional[int]:
        return self.process.exitcode

    returncode = property(poll)


def _command(arguments: List[str], environment: Dict[str, str], directory: Path, out: int, parent: int) -> None:
    from ding_store.cli import main
    from ding_store.launch.user_script import exit_process
    from ding_store.parent_death import end_with

    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with(parent, signal.SIGKILL)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        for stream in (1, 2):
            os.dup2(out, stream)
        sys.argv = ['ding-store', *arguments]
        code = main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        exit_process(code)


class Cell(NamedTuple):
    """All runs of a mode with a number of workers: seed -> curve."""

    mode: str
    workers: int
    curves: Dict[int, List[Dict[str, Any]]]

    def returns(self, measure: str, time_s: float) -> List[float]:
        """Return each seed's mean return: over env steps, or over the first seconds."""
        if measure == 'steps':
            return [_mean(curve, 'env_step', math.inf) for curve in self.curves.values()]
        return [_mean(curve, 'seconds', time_s) for curve in self.curves.values()]

    @property
    def steps_per_s(self) -> float:
        last = [curve[-1] for curve in self.curves.values()]
        return sum(each['env_step'] for each in last) / max(1e-9, sum(each['seconds'] for each in last))


def _mean(curve: Sequence[Dict[str, Any]], axis: str, end: float) -> float:
    """Return the mean of a curve over an axis, from its first evaluation on. Each return counts until the next one."""
    points = [point for point in curve if point[axis] <= end] or list(curve[:1])
    places = [point[axis] for point in points[1:]] + [min(end, curve[-1][axis])]
    total = places[-1] - points[0][axis]
    if total <= 0:
        return float(points[-1]['mean_return'])
    spans = zip(points, [points[0][axis], *places], places)
    return sum(point['mean_return'] * (after - before) for point, before, after in spans) / total


def run_one(workers: int, seed: int, env_steps: int, minutes: float) -> None:
    """Train as one worker, in the run's directory. Worker 0 writes the curve."""
    from ding_store.environment import read_environment
    from dizoo_configs.command import Options

    rank = int(read_environment().rank or 0)
    if rank:
        os.makedirs(f'worker-{rank}', exist_ok=True)
        os.chdir(f'worker-{rank}')
    settings = {
        **learn.ENVS,
        # Evaluations are work of worker 0 alone, for which the others may wait.
        'env.evaluator_env_num': EPISODES,
        'env.n_evaluator_episode': EPISODES,
        'exp_name': 'cartpole_a2c',
        'policy.eval.evaluator.eval_freq': max(1, env_steps // (NUM_EVALUATIONS * STEPS_PER_ITERATION * workers)),
    }
    given = Options(seed=seed, max_env_step=env_steps, env_manager='base', settings=tuple(settings.items()))
    learn.train(MAIN, given, minutes)


def read_cells(directory: Path) -> List[Cell]:
    """Return the cells of the runs that reached their last env step, by workers and mode."""
    found: Dict[Tuple[int, str], Dict[int, Any]] = {}
    for own in sorted(directory.glob('*-*-s*')):
        mode, workers, seed = own.name.split('-')
        ended, curve = own / 'ended', learn.read_curve(own)
        if ended.exists() and ended.read_text() == learn.STEPS and len(curve) > 1:
            found.setdefault((int(workers), mode), {})[int(seed[1:])] = curve
    order = sorted(found, key=lambda key: (key[0], list(MODES).index(key[1])))
    return [Cell(mode, workers, dict(sorted(found[workers, mode].items()))) for workers, mode in order]


def time_of(cells: Sequence[Cell]) -> float:
    """Return the seconds that all runs trained for."""
    return min((curve[-1]['seconds'] for cell in cells for curve in cell.curves.values()), default=0.0)


def compare(cell: Cell, base: Cell, measure: str, time_s: float, num_seeds: int = NUM_SEEDS) -> Dict[str, Any]:
    """Compare two cells by ``RULE``."""
    values, others = cell.returns(measure, time_s), base.returns(measure, time_s)
    difference = fmean(values) - fmean(others)
    spread = max(max(each) - min(each) for each in (values, others))
    seeds = min(len(values), len(others))
    effect = 'none shown' if abs(difference) <= spread else 'more' if difference > 0 else 'less'
    if seeds < num_seeds:
        effect = f'no conclusion: {seeds} of {num_seeds} seeds'
    return dict(measure=measure, difference=difference, spread=spread, effect=effect)


def conclusions(cells: Sequence[Cell]) -> List[Dict[str, Any]]:
    """Compare each mode with the synchronous one of as many workers, and each with more workers with one worker."""
    by = {(cell.mode, cell.workers): cell for cell in cells}
    time_s, found = time_of(cells), []
    for cell, measure in itertools.product(cells, MEASURES):
        for base in ((BASE, cell.workers), (cell.mode, 1)):
            if base in by and base != (cell.mode, cell.workers):
                names = dict(mode=cell.mode, workers=cell.workers, base_mode=base[0], base_workers=base[1])
                found.append({**names, **compare(cell, by[base], measure, time_s)})
    return found


#: Effect -> how a sentence says it, of one mode and of several.
VERDICTS = {
    'more': ('returns more', 'return more'),
    'less': ('returns less', 'return less'),
    'none shown': ('shows no effect', 'show no effect'),
    'open': ('has too few seeds', 'have too few seeds'),
}


def sentences(cells: Sequence[Cell]) -> List[str]:
    """Answer the question in five sentences. An effect is stated only where ``RULE`` shows one."""
    found = {
        (each['mode'], each['workers'], each['base_mode'], each['base_workers'], each['measure']): each
        for each in conclusions(cells)
    }

    def grouped(keys: Sequence[Tuple[Any, ...]], names: Sequence[str], is_plural: bool) -> List[Tuple[str, List[str]]]:
        """Return names of comparisons by what a sentence says of them. Effects have their size."""
        by: Dict[str, List[str]] = {}
        for key, name in zip(keys, names):
            if key in found:
                effect = found[key]['effect']
                number = f' ({found[key]["difference"]:+.1f})' if effect in ('more', 'less') else ''
                by.setdefault(effect if effect in VERDICTS else 'open', []).append(name + number)
        return [(VERDICTS[effect][is_plural], by[effect]) for effect in VERDICTS if effect in by]

    def of_mode(mode: str, measure: str, is_plural: bool = False) -> str:
        """Return what was found for a mode against the synchronous one."""
        keys = [(mode, workers, BASE, workers, measure) for workers in WORKERS]
        parts = [
            f'{said} with {listed(names)} worker{"s" * (len(names) > 1 or names[0][0] != "1")}'
            for said, names in grouped(keys, list(map(str, WORKERS)), is_plural)
        ]
        return listed(parts) or ('were not run' if is_plural else 'was not run')

    def of_modes(*modes: str) -> str:
        """Return the same for several modes. Those of which the same was found are named together."""
        by: Dict[str, List[str]] = {}
        for mode in modes:
            by.setdefault(of_mode(mode, 'steps'), []).append(mode)
        names = {said: listed([f"'{mode}'" for mode in several]) for said, several in by.items()}
        return ', and '.join(
            f'{names[said]} {of_mode(several[0], "steps", len(several) > 1)}' for said, several in by.items()
        )

    def of_more(workers: int, measure: str) -> str:
        """Return what was found for several workers against one of the same mode."""
        keys = [(mode, workers, mode, 1, measure) for mode in MODES]
        found = grouped(keys, [f"'{mode}'" for mode in MODES], True)
        parts = [f'{said} in {listed(names) if len(found) > 1 else "any mode"}' for said, names in found]
        return f'{workers} workers {listed(parts, ", and ") or "were not run"}'

    def of_all(measure: str) -> str:
        return '; '.join(of_more(workers, measure) for workers in WORKERS[1:])

    others = [mode for mode in MODES if mode not in (BASE, 'async')]
    return [
        f'Over env steps, asynchronous training {of_mode("async", "steps")}, compared with synchronous training.',
        f'Over wall time, asynchronous training {of_mode("async", "time")}, compared with synchronous training.',
        f'Over env steps, {of_modes(*others)}, compared with synchronous training.',
        f'In as many env steps as one worker, {of_all("steps")}.',
        f'In the same time as one worker, {of_all("time")}.',
    ]


def listed(parts: Sequence[str], last: str = ' and ') -> str:
    return last.join(filter(None, [', '.join(parts[:-1]), *parts[-1:]]))


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    lines = [head, ['---'] * len(head), *others]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def missing(cells: Sequence[Cell], modes: Sequence[str], workers: Sequence[int], seeds: Sequence[int]) -> List[str]:
    """Return which runs there should be, and are not."""
    there = {(cell.mode, cell.workers): cell.curves.keys() for cell in cells}
    gone = []
    for mode, number in itertools.product(modes, workers):
        left = [seed for seed in seeds if seed not in there.get((mode, number), ())]
        if left:
            gone.append(
                f'{mode} with {number}' + (f': seeds {", ".join(map(str, left))}' if len(left) < len(seeds) else '')
            )
    return ['all'] if len(gone) == len(modes) * len(workers) and not cells else gone


def report(cells: Sequence[Cell], modes: Sequence[str], workers: Sequence[int], seeds: Sequence[int]) -> str:
    """Return the tables and the sentences, in Markdown."""
    time_s = time_of(cells)
    texts = {name: text.format(time_s=time_s) for name, text in MEASURES.items()}
    rows = [['workers', 'mode', 'seeds', *texts.values(), 'env steps/s']]
    rows[0] += [f'effect against {BASE}, over env steps', 'over wall time']
    found = {
        (each['mode'], each['workers'], each['measure']): each
        for each in conclusions(cells)
        if each['base_mode'] == BASE and each['base_workers'] == each['workers']
    }
    for cell in cells:
        means = []
        for measure in MEASURES:
            values = cell.returns(measure, time_s)
            means.append(f'{fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})')
        effects = [found.get((cell.mode, cell.workers, measure), {}).get('effect', '') for measure in MEASURES]
        seen = ', '.join(map(str, cell.curves))
        rows.append([str(cell.workers), cell.mode, seen, *means, f'{cell.steps_per_s:,.0f}', *effects])
    out = 'Returns are means over the seeds, and in brackets the smallest and the largest seed.\n\n'
    if cells:
        out += table(rows) + '\n' + ''.join(f'{i}. {text}\n' for i, text in enumerate(sentences(cells), 1)) + '\n'
    gone = missing(cells, modes, workers, seeds)
    rule = RULE.format(base=BASE, num_seeds=NUM_SEEDS)
    return f'{out}{rule}\n\nMissing runs: {"; ".join(gone) if gone else "none"}.\n'


def as_json(cells: Sequence[Cell]) -> Dict[str, Any]:
    time_s = time_of(cells)
    found = [
        dict(
            mode=cell.mode,
            workers=cell.workers,
            seeds=list(cell.curves),
            env_steps_per_s=cell.steps_per_s,
            **{measure: cell.returns(measure, time_s) for measure in MEASURES},
        )
        for cell in cells
    ]
    return dict(time_s=time_s, cells=found, conclusions=conclusions(cells))


def plot(cells: Sequence[Cell], directory: Path) -> None:
    """Draw mean returns over env steps and over wall time, a column per number of workers."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    import numpy as np

    numbers = sorted({cell.workers for cell in cells})
    figure, axes = plt.subplots(2, len(numbers), figsize=(5 * len(numbers), 7), squeeze=False, sharey=True)
    for row, (axis, label) in enumerate((('env_step', 'env steps of all workers'), ('seconds', 'seconds'))):
        for column, number in enumerate(numbers):
            for cell in (each for each in cells if each.workers == number):
                curves = [([p[axis] for p in c], [p['mean_return'] for p in c]) for c in cell.curves.values()]
                grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 50)
                values = np.array([np.interp(grid, x, y) for x, y in curves])
                color = f'C{list(MODES).index(cell.mode)}'
                axes[row, column].plot(grid, values.mean(0), color=color, label=cell.mode)
                axes[row, column].fill_between(grid, values.min(0), values.max(0), color=color, alpha=0.1)
            axes[row, column].set(xlabel=label, title=f'{number} worker{"s" * (number > 1)}' if not row else '')
        axes[row, 0].set_ylabel(f'mean return of {EPISODES} episodes')
    axes[0, 0].legend(fontsize='small')
    figure.tight_layout()
    figure.savefig(directory / 'sync_modes.svg', metadata={'Date': None})
    print(f'curves in {directory / "sync_modes.svg"}')


def write_page(path: Path, text: str) -> None:
    """Write the tables into a page, between its two marks."""
    before, begin, after = path.read_text().partition(BEGIN + '\n')
    if not begin or END not in after:
        raise SystemExit(f'{path} lacks the lines {BEGIN!r} and {END!r}. Add them, in this order.')
    path.write_text(f'{before}{begin}{text}{END}{after.partition(END)[2]}')


def run_all(given: argparse.Namespace, directory: Path) -> None:
    """Run all runs that have not ended before."""
    from ding_store.launch.user_script import preload

    about = directory / 'sync_modes.json'
    if about.exists() and (had := json.loads(about.read_text())['env_steps']) != given.env_steps:
        raise SystemExit(
            f'{directory} has runs with {had:,} env steps, not {given.env_steps:,}. Use --env-steps {had}, or another '
            '--directory.'
        )
    about.write_text(json.dumps(dict(env_steps=given.env_steps)) + '\n')
    runs = {}
    for seed, number, mode in itertools.product(given.seeds, given.workers, given.modes):
        settings = {'sync': mode, **MODES[mode]}
        one = ['--one', str(number), str(seed), '--env-steps', str(given.env_steps), '--minutes', str(given.minutes)]
        command = ['run', '--run', 'sync', '--roles', f'worker={number}']
        command += ['--set', f'learners={settings!r}', '--', 'python', str(Path(__file__).resolve()), *one]
        runs[directory / f'{mode}-{number}-s{seed}'] = (given.env_steps, command)
    preload()
    importlib.import_module('torch._dynamo')  # each worker's first step of an optimizer needs it
    learn.run_all(runs, given.minutes, 1, kind=ForkedRun)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--modes', nargs='+', choices=list(MODES), default=list(MODES), metavar='MODE')
    parser.add_argument('--workers', type=int, nargs='+', default=list(WORKERS), help='numbers of workers (1 2 4)')
    parser.add_argument('--seeds', type=int, nargs='+', default=list(range(NUM_SEEDS)), help='seeds (0 to 4)')
    parser.add_argument('--env-steps', type=int, default=ENV_STEPS, help=f'last env step of each run ({ENV_STEPS})')
    parser.add_argument('--minutes', type=float, default=10.0, help='minutes after which a run ends (10)')
    parser.add_argument('--directory', type=Path, default=Path('runs/sync_modes'))
    parser.add_argument('--plot', action='store_true', help='only print the tables and draw the plot')
    parser.add_argument('--page', type=Path, metavar='FILE', help='write the tables into this page, too')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the figures and the conclusions there')
    parser.add_argument('--one', type=int, nargs=2, metavar=('WORKERS', 'SEED'), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if min(given.workers) < 1:
        parser.error(f'--workers ({min(given.workers)}) must be at least 1')
    if given.env_steps < 1:
        parser.error(f'--env-steps ({given.env_steps}) must be at least 1')
    if not 0 < given.minutes < math.inf:
        parser.error(f'--minutes ({given.minutes:g}) must be above 0, and finite')
    return given


def main() -> None:
    given = parse()
    sys.path.insert(0, str(ROOT))
    if given.one:
        run_one(*given.one, given.env_steps, given.minutes)
        return
    from ding_store.launch.termination import signals_as_interrupt

    directory = given.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with signals_as_interrupt():
            if not given.plot:
                run_all(given, directory)
            cells = read_cells(directory)
            text = report(cells, given.modes, given.workers, given.seeds)
            print(text)
            if given.page:
                picture = os.path.relpath(directory / 'sync_modes.svg', given.page.resolve().parent)
                shown = f'![returns over env steps and wall time, by mode and workers]({picture})\n\n' if cells else ''
                write_page(given.page, shown + text)
            if given.json:
                given.json.write_text(json.dumps(as_json(cells)) + '\n')
            if cells:
                plot(cells, directory)
    except KeyboardInterrupt:
        raise SystemExit('interrupted: the same command begins anew the runs that have not ended') from None


if __name__ == '__main__':
    main()
