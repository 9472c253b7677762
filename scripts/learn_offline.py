"""
CartPole from a recorded run: CQL and BC from ding_store's data set, and from DI-engine's own format of the same rows.

    python scripts/learn_offline.py                                    an hour: five seeds
    python scripts/learn_offline.py --seeds 0 1 2 --env-steps 10000    about 20 minutes: three seeds
    python scripts/learn_offline.py --page docs/results/learn-offline.md    the same, and writes the results page

Each seed has its own recorded DQN run, in DIRECTORY/seedS. Both formats are trained from with the same seed. The data
set has its rows in another order than HDF5, so the same seed draws other batches. A third, shorter training reads the
data set in HDF5's order: it must repeat the curve of HDF5 exactly, or the exit status is 1.

Each recorded run and each curve is kept. Stop the command with Ctrl-C, and start it again to go on.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, Dict, List, Tuple

from pages import commit_name, machine_name

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py'
ALGORITHMS = ('cql', 'bc')
#: What a training reads: DI-engine's file, the data set in the order of that file, and the data set as it is.
KINDS = {'hdf5': "DI-engine's HDF5", 'ordered': "data set in HDF5's order", 'store': 'data set'}
#: The training in HDF5's order ends after so many iterations.
_CHECKED = 1_000
#: No run ends at this return: the recorded run and the trainings have a fixed length.
_NEVER = 10_000
_EVAL_EVERY = 250
#: The score is the mean of so many evaluations at the end.
_LAST = 4
#: Seconds in which a child process ends after Ctrl-C, and then after SIGINT, before it is killed.
_PATIENCE_S = (5, 30)
Curve = List[Tuple[int, float]]
Curves = Dict[Tuple[str, str, int], Curve]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4], help='default 0 1 2 3 4')
    parser.add_argument('--env-steps', type=int, default=20_000, help='length of the recorded run, default 20000')
    parser.add_argument('--iterations', type=int, default=5_000, help='training iterations, default 5000')
    parser.add_argument(
        '--dir', default=str(ROOT / 'runs' / 'learn_offline'), help='directory of the runs, default runs/learn_offline'
    )
    parser.add_argument('--page', metavar='FILE', help='write a page with the table')
    parser.add_argument('--plot', metavar='FILE', help='draw the curves to an SVG file')
    parser.add_argument('--one', nargs=3, metavar=('ALGORITHM', 'KIND', 'SEED'), help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory = Path(options.dir).resolve()
    if options.one:
        algorithm, kind, seed = options.one
        train(directory / f'seed{seed}', algorithm, kind, int(seed), options.iterations)
        return 0

    try:
        return run(directory, options)
    except KeyboardInterrupt:
        raise SystemExit(f'stopped. The same command goes on with what is in {directory}.') from None


def run(directory: Path, options: argparse.Namespace) -> int:
    data, curves = {}, {}
    progress = Progress(len(options.seeds) * (1 + len(ALGORITHMS) * len(KINDS)))
    for seed in options.seeds:
        place = directory / f'seed{seed}'
        place.mkdir(parents=True, exist_ok=True)
        check_settings(place, options)
        progress.say(f'seed {seed}: record {options.env_steps:,} env steps')
        data[seed] = recorded(place, seed, options.env_steps)
        for algorithm in ALGORITHMS:
            for kind, name in KINDS.items():
                progress.say(f'seed {seed}: train {algorithm.upper()} from {name}')
                curves[algorithm, kind, seed] = trained(place, algorithm, kind, seed, options)
    different = [
        f'{algorithm.upper()} with seed {seed}'
        for algorithm in ALGORITHMS
        for seed in options.seeds
        if not is_repeated(curves[algorithm, 'hdf5', seed], curves[algorithm, 'ordered', seed])
    ]
    text = table(data, curves, options.seeds, different)
    print(text)
    if options.plot:
        plot(curves, options)
    if options.page:
        Path(options.page).write_text(page(text, options))
    return 1 if different else 0


class Progress:
    """Prints each step before it begins, with the number of steps and the minutes since the start."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._number, self._begin_s = num_steps, 0, time.monotonic()

    def say(self, step: str) -> None:
        self._number += 1
        minutes = (time.monotonic() - self._begin_s) / 60
        print(f'{self._number} of {self._num_steps}, {minutes:.1f} min: {step}', file=sys.stderr, flush=True)


def command(*words: object, cwd: Path) -> None:
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore', 'OMP_NUM_THREADS': '1'}
    process = subprocess.Popen([sys.executable, *map(str, words)], cwd=cwd, env=environment, stdout=subprocess.DEVNULL)
    try:
        process.wait()
    except KeyboardInterrupt:
        end(process)
        raise
    if process.returncode:
        raise SystemExit(f'exit status {process.returncode}: {" ".join(map(str, words))}')


def end(process: 'subprocess.Popen[bytes]') -> None:
    """End a child process. Ctrl-C of a terminal reaches it as well, but a signal to this process alone does not."""
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S[0])
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S[1])
    finally:  # also after a second Ctrl-C
        process.kill()
        process.wait()


def check_settings(place: Path, options: argparse.Namespace) -> None:
    """Refuse to go on with the files of other settings."""
    path, wanted = place / 'settings.json', {'env_steps': options.env_steps, 'iterations': options.iterations}
    if path.exists() and json.loads(path.read_text()) != wanted:
        raise SystemExit(
            f'{place} was made with {path.read_text()}, not with {json.dumps(wanted)}. Name another --dir.'
        )
    path.write_text(json.dumps(wanted))


def recorded(place: Path, seed: int, env_steps: int) -> Dict[str, Any]:
    """Record a DQN run and export it, unless that was done. Return what is in it."""
    facts = place / 'data.json'
    if not facts.exists():
        for name in ('data', 'data.hdf5'):
            path = place / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        words = ['--seed', seed, '--max-env-step', env_steps, '--set', f'env.stop_value={_NEVER}']
        roles = ['--roles', 'learner=1,collector=1,evaluator=1', '--run', f'learn-offline-{seed}']
        record = ['--set', f'record={place / "data"}']
        command('-m', 'ding_store.cli', 'run', *roles, *record, '--', 'python', MAIN, *words, cwd=place)
        command('-m', 'ding_store.cli', 'data', 'export', place / 'data', place / 'data.hdf5', cwd=place)
        from ding_store.datasets import DataSet, episodes_of

        data = DataSet(str(place / 'data'))
        returns = episodes_of(data).returns.tolist()
        found = {'rows': len(data), 'episodes': len(returns), 'mean_return': statistics.mean(returns)}
        facts.write_text(json.dumps(found))
    return dict(json.loads(facts.read_text()))


def trained(place: Path, algorithm: str, kind: str, seed: int, options: argparse.Namespace) -> Curve:
    """Train in a process, unless that was done. Return pairs of iterations and returns."""
    path = place / f'{algorithm}-{kind}.json'
    if not path.exists():
        words = ['--dir', place.parent, '--iterations', options.iterations, '--one', algorithm, kind, seed]
        command(Path(__file__).resolve(), *words, cwd=place)
    curve: Curve = [tuple(pair) for pair in json.loads(path.read_text())]
    return curve


def train(place: Path, algorithm: str, kind: str, seed: int, iterations: int) -> None:
    """Train by DI-engine's own entry for offline training, and write the returns of its evaluations."""
    from copy import deepcopy

    import torch
    from ding.entry import serial_entry_offline
    from easydict import EasyDict

    if algorithm == 'cql':
        from dizoo.classic_control.cartpole.config.cartpole_cql_config import create_config, main_config
    else:
        from dizoo.classic_control.cartpole.config.cartpole_bc_config import create_config, main_config
    main, create = deepcopy(main_config), deepcopy(create_config)
    main.exp_name = f'{algorithm}-{kind}'
    main.import_names = ['ding_store.datasets']
    main.env.stop_value = _NEVER
    main.policy.nstep = 1
    main.policy.learn.train_epoch = iterations  # ``max_train_iter`` ends it
    main.policy.learn.learning_rate = 0.001
    main.policy.eval.evaluator.eval_freq = _EVAL_EVERY
    collect = {'hdf5': ('hdf5', 'data.hdf5')}.get(kind, ('store', 'data'))
    main.policy.collect = EasyDict(data_type=collect[0], data_path=str(place / collect[1]))
    if kind == 'ordered':
        iterations = min(iterations, _CHECKED)
        order_as_hdf5(serial_entry_offline)
    curve: Curve = []

    class Evaluator(serial_entry_offline.InteractionSerialEvaluator):
        def eval(self, save: Any = None, train_iter: int = -1, *others: Any, **named: Any) -> Any:
            stop, info = super().eval(save, train_iter, *others, **named)
            curve.append((train_iter, float(statistics.mean(map(float, info['eval_episode_return'])))))
            return stop, info

    serial_entry_offline.InteractionSerialEvaluator = Evaluator
    torch.manual_seed(seed)
    serial_entry_offline.serial_pipeline_offline((main, create), seed=seed, max_train_iter=iterations)
    path = place / f'{algorithm}-{kind}.json'
    path.with_suffix('.new').write_text(json.dumps(curve))
    path.with_suffix('.new').rename(path)


def order_as_hdf5(entry: Any) -> None:
    """Let DI-engine's entry read the rows of a data set in the order of an export: episode by episode."""
    from torch.utils.data import Subset

    from ding_store.datasets import episodes_of

    create = entry.create_dataset

    def created(cfg: Any) -> Any:
        dataset = create(cfg)
        return Subset(dataset, episodes_of(dataset.data_set).order.tolist())

    entry.create_dataset = created


def is_repeated(curve: Curve, shorter: Curve) -> bool:
    """Return whether a training repeated the first part of another, with the same returns at the same iterations."""
    return bool(shorter) and curve[: len(shorter)] == shorter


def score(curve: Curve) -> float:
    return statistics.mean(value for _, value in curve[-_LAST:])


def table(data: Dict[int, Dict[str, Any]], curves: Curves, seeds: List[int], different: List[str]) -> str:
    """Return Markdown tables: what was recorded, and the scores of each algorithm and format."""
    lines = ['| seed | rows | episodes | mean return of the recorded run |', '|---|---|---|---|']
    for seed in seeds:
        found = data[seed]
        lines.append(f'| {seed} | {found["rows"]:,} | {found["episodes"]} | {found["mean_return"]:.1f} |')
    lines += [
        '',
        f'| | {KINDS["hdf5"]} | {KINDS["store"]} | difference | its standard error |',
        '|---|---|---|---|---|',
    ]
    for algorithm in ALGORITHMS:
        scores = {kind: [score(curves[algorithm, kind, seed]) for seed in seeds] for kind in ('hdf5', 'store')}
        cells = [
            f'{statistics.mean(values):.1f} ({", ".join(f"{value:.1f}" for value in values)})'
            for values in scores.values()
        ]
        pairs = [ours - theirs for theirs, ours in zip(scores['hdf5'], scores['store'])]
        error = f'{statistics.stdev(pairs) / len(pairs) ** 0.5:.1f}' if len(pairs) > 1 else 'one seed'
        lines.append(f'| {algorithm.upper()} | {" | ".join(cells)} | {statistics.mean(pairs):+.1f} | {error} |')
    total = len(ALGORITHMS) * len(seeds)
    said = f"{total - len(different)} of {total} trainings in HDF5's order repeat the curve of HDF5 exactly."
    return '\n'.join([*lines, '', said + (f' Others: {", ".join(different)}.' if different else '')])


def plot(curves: Curves, options: argparse.Namespace) -> None:
    """Draw returns over iterations: a colour for each algorithm, lines for our format and dots for DI-engine's."""
    import matplotlib

    matplotlib.use('svg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for algorithm, color in zip(ALGORITHMS, ('tab:blue', 'tab:orange')):
        for kind, style in (('hdf5', 'o'), ('store', '-')):
            for seed in options.seeds:
                iterations, values = zip(*curves[algorithm, kind, seed])
                label = f'{algorithm.upper()}, {kind}' if seed == options.seeds[0] else None
                axes.plot(iterations, values, style, color=color, label=label, markersize=3, linewidth=1)
    axes.set(xlabel='training iterations', ylabel='mean return of an evaluation')
    axes.legend()
    figure.savefig(options.plot)


def page(text: str, options: argparse.Namespace) -> str:
    seeds = ' '.join(map(str, options.seeds))
    length = f'--env-steps {options.env_steps} --iterations {options.iterations}'
    return f"""# Offline training from a recorded run

A CartPole DQN run of {options.env_steps:,} env steps is recorded and exported to DI-engine's HDF5. CQL and BC then
train for {options.iterations:,} iterations from each format, by DI-engine's own `serial_pipeline_offline`. A score is
the mean return of the last {_LAST} evaluations, of 5 episodes each. Each cell has the mean over the seeds, and in
brackets each seed. This command makes the page:

```sh
python scripts/learn_offline.py --seeds {seeds} {length} --page docs/results/learn-offline.md
```

Measured until {date.today()}, at commit {commit_name()}, on {machine_name()}.

{text}

* The rows are those of a learning policy, which explores. So BC learns to play as the run did, not as its end.
* Both formats have the same rows. HDF5 has them episode by episode, and the data set as they were collected. So the
  same seed draws other batches, and the scores of one seed differ. Each epoch is a random permutation of the same rows
  in both, so a difference of the means is chance.
* The same seed in the same order trains the same model. Each seed trains once more from the data set, with the rows in
  HDF5's order, for {min(_CHECKED, options.iterations):,} iterations. The last line above counts the equal curves.

See [Record a run and train from it](../howto/data-sets.md).
"""


if __name__ == '__main__':
    sys.exit(main())
