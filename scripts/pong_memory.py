#!/usr/bin/env python3
"""
Pong DQN with one amount of replay memory: 200,000 rows that share frames, beside 25,000 rows of plain DI-engine.

    scripts/setup.sh --extra atari
    python scripts/pong_memory.py                       # 180,000 env steps; hours of one core per run
    python scripts/pong_memory.py --kinds store --seeds 0 1
    python scripts/pong_memory.py --plot                # only print the table and draw the curves

25,000 rows of the store without sharing take 1.5 GB (61.6 KB each). In the same memory about 200,000 rows fit that
share frames. Plain DI-engine keeps frames as float32, so its 25,000 rows take four times as much. The kind "plain" is
the store with 25,000 rows and without sharing, whose rows are those of plain DI-engine.

Every run is a process with collector and learner, and writes to DIRECTORY/KIND-sSEED/curve.jsonl. Stopped by Ctrl-C or
SIGTERM, and started again, the command keeps runs that have ended. Runs of the store go on from their last checkpoint.
Plain DI-engine keeps no replay, so its runs begin anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import learn
from pages import table, write_page

ROOT = learn.ROOT
MAX_ENV_STEP = 180_000
EVALUATIONS = 'policy.eval.evaluator.eval_freq'
REPLAY = 'policy.other.replay_buffer.replay_buffer_size'
#: Settings of scripts/learn.py, but with frames of the usual size.
SETTINGS = {
    key: value
    for key, value in learn.TASKS['pong']['settings'].items()
    if key not in ('env.frame_size', 'policy.model.obs_shape', REPLAY)
}


class Kind(NamedTuple):
    title: str
    size: int
    settings: Dict[str, Any] = {}
    is_stock: bool = False


KINDS = {
    'store': Kind('store, frames shared', 200_000),
    'stock': Kind('plain DI-engine', 25_000, is_stock=True),
    'plain': Kind('store, frames not shared', 25_000, {'store.share_frames': False}),
}


def options(name: str, seed: int, max_env_step: int) -> Any:
    from dizoo_configs.command import Options

    kind = KINDS[name]
    settings = {
        **SETTINGS,
        **kind.settings,
        EVALUATIONS: max(1, SETTINGS[EVALUATIONS] * max_env_step // learn.TASKS['pong']['max_env_step']),
        REPLAY: kind.size,
        'exp_name': f'pong_{name}_seed{seed}',
    }
    return Options(
        seed=seed,
        stock=kind.is_stock,
        max_env_step=max_env_step,
        env_manager='base',
        settings=tuple(settings.items()),
        checkpoint=not kind.is_stock,
    )


class Replay:
    """Finds the replay of a main, to measure it."""

    def __init__(self) -> None:
        from dizoo_configs import builder

        self._replay: Any = None
        self._first_step: Optional[int] = None
        make = builder.pipeline

        def watched(*args: Any, **kwargs: Any) -> Any:
            parts = make(*args, **kwargs)
            replay = parts.replay

            def made(cfg: Any) -> Any:
                self._replay = replay(cfg)
                return self._replay

            parts.replay = made
            return parts

        builder.pipeline = watched

    def measure(self, ctx: Any, is_evaluated: bool) -> Dict[str, Any]:
        if self._first_step is None:
            self._first_step = int(ctx.env_step)
            print(f'the first round ends at env step {self._first_step}, with {self._replay.count()} rows', flush=True)
        if not is_evaluated:
            return {}
        status = Path('/proc/self/status').read_text().split('\n')
        resident = [1024 * int(line.split()[1]) for line in status if line.startswith('VmRSS')]
        return dict(
            rows=self._replay.count(),
            replay_bytes=getattr(self._replay, 'num_bytes', None),
            process_bytes=resident[0],
            first_step=self._first_step,
        )


def run_one(name: str, seed: int, max_env_step: int, minutes: float) -> None:
    """Train one run in this process, which is the run's own, in the run's directory."""
    given, replay = options(name, seed, max_env_step), Replay()
    learn.train(learn.TASKS['pong']['main'], given, minutes, replay.measure, resumes=not KINDS[name].is_stock)


def run_all(given: argparse.Namespace, directory: Path) -> None:
    about = directory / 'about.json'
    if about.exists() and (had := json.loads(about.read_text())['env_steps']) != given.env_steps:
        raise SystemExit(
            f'{directory} has runs with {had:,} env steps, not {given.env_steps:,}. Use --env-steps {had}, or another '
            '--directory.'
        )
    about.write_text(json.dumps(dict(env_steps=given.env_steps)) + '\n')
    runs = {}
    for seed, name in itertools.product(given.seeds, given.kinds):
        rest = ['--env-steps', str(given.env_steps), '--minutes', str(given.minutes)]
        arguments = [str(Path(__file__).resolve()), '--one', name, str(seed), *rest]
        runs[directory / f'{name}-s{seed}'] = (given.env_steps, arguments)
    learn.run_all(runs, given.minutes, given.jobs, leave_s=60.0)


def read_runs(directory: Path) -> Dict[str, List[Dict[str, Any]]]:
    names = [f'{name}-s' for name in KINDS]
    found = {own.name: learn.read_curve(own) for name in names for own in sorted(directory.glob(f'{name}*'))}
    return {name: curve for name, curve in found.items() if curve}


def report(curves: Dict[str, List[Dict[str, Any]]]) -> str:
    """Return a table of all runs in Markdown."""
    rows = [['run', 'replay size', 'env steps', 'rows held', 'bytes of the replay', 'memory of the process']]
    rows[0] += ['resumed at env step', 'return at the end', 'best return']
    for name, curve in curves.items():
        kind, last = KINDS[name.partition('-')[0]], curve[-1]
        held = last['replay_bytes']
        starts = sorted({point['first_step'] for point in curve})[1:]
        rows.append(
            [
                f'{kind.title}, seed {name.rpartition("-s")[2]}',
                f'{kind.size:,}',
                f'{last["env_step"]:,}',
                f'{last["rows"]:,}',
                'not counted' if held is None else f'{held / 1e9:.3f} GB',
                f'{last["process_bytes"] / 1e9:.2f} GB',
                ', '.join(f'{start:,}' for start in starts) or '-',
                f'{last["mean_return"]:.2f}',
                f'{max(point["mean_return"] for point in curve):.2f}',
            ]
        )
    return table(rows)


def plot(curves: Dict[str, List[Dict[str, Any]]], directory: Path) -> None:
    """Draw returns over env steps, one line per run."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    for name, curve in curves.items():
        number, kind = list(KINDS).index(name.partition('-')[0]), KINDS[name.partition('-')[0]]
        steps, values = zip(*((point['env_step'], point['mean_return']) for point in curve))
        label = f'{kind.title}, {kind.size:,} rows, seed {name.rpartition("-s")[2]}'
        axis.plot(steps, values, color=f'C{number}', label=label)
    axis.set(xlabel='env steps', ylabel=f'mean return of {learn.EPISODES} episodes', title='Pong DQN')
    axis.legend(fontsize='small')
    figure.tight_layout()
    figure.savefig(directory / 'pong_memory.svg', metadata={'Date': None})
    print(f'curves in {directory / "pong_memory.svg"}')


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kinds', nargs='+', choices=list(KINDS), default=['store', 'stock'])
    parser.add_argument('--seeds', type=int, nargs='+', default=[0])
    parser.add_argument('--env-steps', type=int, default=MAX_ENV_STEP, help=f'last env step ({MAX_ENV_STEP})')
    parser.add_argument('--minutes', type=float, default=1440.0, help='minutes after which a run ends (1440)')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time, one core each (1)')
    parser.add_argument('--directory', type=Path, default=Path('runs/pong_memory'))
    parser.add_argument('--plot', action='store_true', help='only print the table and draw the existing curves')
    parser.add_argument('--page', type=Path, metavar='FILE', help='also write the table into this page')
    parser.add_argument('--one', nargs=2, metavar=('KIND', 'SEED'), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    for name in ('env_steps', 'jobs'):
        if getattr(given, name) < 1:
            parser.error(f'--{name.replace("_", "-")} ({getattr(given, name)}) must be at least 1')
    if not 0 < given.minutes < math.inf:
        parser.error(f'--minutes ({given.minutes:g}) must be above 0, and finite')
    return given


def main() -> None:
    given = parse()
    if given.one:
        run_one(given.one[0], int(given.one[1]), given.env_steps, given.minutes)
        return
    sys.path.insert(0, str(ROOT))
    from ding_store.launch.termination import signals_as_interrupt

    directory = given.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with signals_as_interrupt():
            if not given.plot:
                run_all(given, directory)
            curves = read_runs(directory)
            if not curves:
                raise SystemExit(f'{directory} has no runs yet')
            text = report(curves)
            print(text)
            if given.page:
                write_page(given.page, 'scripts/pong_memory.py', text)
            plot(curves, directory)
    except KeyboardInterrupt:
        raise SystemExit('interrupted: the same command goes on') from None


if __name__ == '__main__':
    main()
