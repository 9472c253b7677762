"""
CartPole from a recorded run: CQL and BC from ding_store's data set, and from DI-engine's own format of the same rows.

    python scripts/learn_offline.py                  an hour: records a DQN run and trains both ways, five seeds
    python scripts/learn_offline.py --seeds 0 --page docs/results/learn-offline.md    the same with one seed

Each seed has its own recorded run, in DIRECTORY/seedS. Each training's curve is a file there. Started again, the
command keeps what is there. ``--plot FILE`` draws the curves.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py'
ALGORITHMS, KINDS = ('cql', 'bc'), ('hdf5', 'store')
#: No run ends at this return: the recorded run and the trainings have a fixed length.
_NEVER = 10_000
_EVAL_EVERY = 250
#: The score is the mean of so many evaluations at the end.
_LAST = 4
Curve = List[Tuple[int, float]]
Curves = Dict[Tuple[str, str, int], Curve]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4])
    parser.add_argument('--env-steps', type=int, default=20_000, help='length of the recorded run, default 20000')
    parser.add_argument('--iterations', type=int, default=5_000, help='training iterations, default 5000')
    parser.add_argument('--dir', default=str(ROOT / 'runs' / 'learn_offline'), help='directory of the runs')
    parser.add_argument('--page', metavar='FILE', help='write a page with the table')
    parser.add_argument('--plot', metavar='FILE', help='draw the curves to an SVG file')
    parser.add_argument('--one', nargs=3, metavar=('ALGORITHM', 'KIND', 'SEED'), help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory = Path(options.dir).resolve()
    if options.one:
        algorithm, kind, seed = options.one
        train(directory / f'seed{seed}', algorithm, kind, int(seed), options.iterations)
        return 0

    data, curves = {}, {}
    for seed in options.seeds:
        place = directory / f'seed{seed}'
        place.mkdir(parents=True, exist_ok=True)
        check_settings(place, options)
        data[seed] = recorded(place, seed, options.env_steps)
        for algorithm in ALGORITHMS:
            for kind in KINDS:
                curves[algorithm, kind, seed] = trained(place, algorithm, kind, seed, options)
    text = table(data, curves, options.seeds)
    print(text)
    if options.plot:
        plot(curves, options)
    if options.page:
        Path(options.page).write_text(page(text, options))
    return 0


def command(*words: object, cwd: Path) -> None:
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore', 'OMP_NUM_THREADS': '1'}
    print('---', *map(str, words[2:]), file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f'exit status {done.returncode}: {" ".join(map(str, words))}')


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
    main.policy.collect = EasyDict(data_type=kind, data_path=str(place / ('data' if kind == 'store' else 'data.hdf5')))
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


def score(curve: Curve) -> float:
    return statistics.mean(value for _, value in curve[-_LAST:])


def table(data: Dict[int, Dict[str, Any]], curves: Curves, seeds: List[int]) -> str:
    """Return Markdown tables: what was recorded, and the scores of each algorithm and format."""
    lines = ['| seed | rows | episodes | mean return of the recorded run |', '|---|---|---|---|']
    for seed in seeds:
        found = data[seed]
        lines.append(f'| {seed} | {found["rows"]:,} | {found["episodes"]} | {found["mean_return"]:.1f} |')
    lines += ['', "| | DI-engine's HDF5 | data set of ding_store |", '|---|---|---|']
    for algorithm in ALGORITHMS:
        cells = []
        for kind in KINDS:
            values = [score(curves[algorithm, kind, seed]) for seed in seeds]
            cells.append(f'{statistics.mean(values):.1f} ({", ".join(f"{value:.1f}" for value in values)})')
        lines.append(f'| {algorithm.upper()} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def plot(curves: Curves, options: argparse.Namespace) -> None:
    """Draw returns over iterations: a colour for each algorithm, lines for our format and dots for DI-engine's."""
    import matplotlib

    matplotlib.use('svg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for algorithm, color in zip(ALGORITHMS, ('tab:blue', 'tab:orange')):
        for kind, style in zip(KINDS, ('o', '-')):
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

{text}

* The rows are those of a learning policy, which explores. So BC learns to play as the run did, not as its end.
* Both formats have the same rows. HDF5 has them episode by episode, and the data set as they were collected. So the
  same seed draws other batches. `tests/datasets/test_training.py` shows that rows in one order train the same model.

See [Record a run and train from it](../howto/data-sets.md).
"""


if __name__ == '__main__':
    sys.exit(main())
