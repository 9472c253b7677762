"""
CartPole DQN and Hopper SAC with one learner and with several, over seeds.

    python scripts/several_learners.py                     both tasks, one and two learners
    python scripts/several_learners.py hopper --seeds 0 --max-env-step 3000
    python scripts/several_learners.py --page docs/results/several-learners.md

Each run's figures are in DIRECTORY/TASK-learnersN-seedS.json. Started again, the command keeps the runs that are there.
Hopper needs scripts/setup.sh --extra mujoco.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from pages import write_page

ROOT = Path(__file__).resolve().parent.parent
#: Task -> its main, its settings, its last env step, its seeds, and how a run ends.
TASKS: Dict[str, Dict[str, Any]] = {
    'cartpole': dict(
        main='cartpole/cartpole_dqn_main.py',
        settings=(),
        max_env_step=30_000,
        seeds=(0, 1, 2, 3, 4),
        end='A run ends when the mean return of an evaluation reaches 195, or after {:,} env steps.',
    ),
    'hopper': dict(
        main='mujoco/hopper_sac_main.py',
        settings=(
            'env.stop_value=1000000000',
            'env.evaluator_env_num=20',
            'env.n_evaluator_episode=20',
            'policy.cuda=false',
            'policy.random_collect_size=1000',
            'policy.collect.n_sample=8',
            'policy.learn.update_per_collect=8',
            'policy.eval.evaluator.eval_freq=2000',
        ),
        max_env_step=12_000,
        seeds=(0, 1, 2),
        end='A run ends after {:,} env steps. An evaluation has 20 episodes.',
    ),
}
#: Figures of the table: title, key, form.
ROWS = (
    ('env steps', 'env_step', '{:.0f}'),
    ('train iterations', 'train_iter', '{:.0f}'),
    ('train iterations per env step', 'ratio', '{:.3f}'),
    ('last evaluation return', 'eval_value', '{:.1f}'),
    ('train iteration of this evaluation', 'eval_iter', '{:.0f}'),
)
Runs = Dict[Tuple[int, int], Dict]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tasks', nargs='*', choices=[[], *TASKS], default=[], help='default: all')
    parser.add_argument('--seeds', type=int, nargs='+', help='default: those of the task')
    parser.add_argument('--learners', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--max-env-step', type=int, help='default: that of the task')
    parser.add_argument('--minutes', type=float, default=30.0, help='the time of a run, at most')
    parser.add_argument('--dir', default=str(ROOT / 'runs' / 'several_learners'), help='directory of the figures')
    parser.add_argument('--page', metavar='FILE', help='write the tables into this page, between its marks')
    options = parser.parse_args()

    directory = Path(options.dir)
    directory.mkdir(parents=True, exist_ok=True)
    faults = 0
    for task in options.tasks or TASKS:
        seeds = options.seeds or TASKS[task]['seeds']
        last_step = options.max_env_step or TASKS[task]['max_env_step']
        runs: Runs = {}
        for seed in seeds:
            for num in options.learners:
                path = directory / f'{task}-learners{num}-seed{seed}.json'
                if not path.exists():
                    print(f'--- {task}, {num} learners, seed {seed}', file=sys.stderr, flush=True)
                    figures = run(task, num, seed, last_step, options.minutes)
                    if figures['code']:
                        raise SystemExit(
                            f'the run ended with exit status {figures["code"]}. Start this again for the rest'
                        )
                    path.write_text(json.dumps(figures, indent=1))
                runs[num, seed] = json.loads(path.read_text())
                if runs[num, seed]['max_env_step'] != last_step:
                    raise SystemExit(f'{path} is of a run with another last env step. Name another --dir.')
        text = f'{TASKS[task]["end"].format(last_step)}\n\n{table(runs, options.learners, seeds)}\n'
        print(f'{task}: {text}', flush=True)
        if options.page:
            write_page(Path(options.page), f'scripts/several_learners.py {task}', text)
        faults += sum(each['rows_appended'] != each['rows_ingested'] for each in runs.values())
    return 1 if faults else 0


def run(task: str, num: int, seed: int, last_step: int, minutes: float) -> Dict:
    """Run a job, and return its figures."""
    with tempfile.TemporaryDirectory(prefix='several-learners-') as directory:
        out = Path(directory, 'figures.json')
        main = ROOT / 'dizoo_configs' / TASKS[task]['main']
        command = [sys.executable, '-m', 'ding_store.cli', 'run', '--run', f'{task}-{num}-{seed}']
        command += ['--roles', f'learner={num},collector=2,evaluator=1', '--json', str(out), '--', 'python', str(main)]
        command += ['--seed', str(seed), '--max-env-step', str(last_step)]
        command += [word for setting in TASKS[task]['settings'] for word in ('--set', setting)]
        environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore'}
        job = subprocess.Popen(command, cwd=directory, env=environment)
        try:
            code = job.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(60)
        record = json.loads(out.read_text()) if out.exists() else {}
    names = (
        'env_step',
        'train_iter',
        'eval_value',
        'eval_iter',
        'rows_appended',
        'rows_ingested',
        'chunks_lost',
        'reason',
    )
    found = {name: record.get(name) for name in names}
    ratio = (found['train_iter'] or 0) / max(found['env_step'] or 0, 1)
    return {**found, 'code': code, 'ratio': ratio, 'max_env_step': last_step}


def table(runs: Runs, learners: Sequence[int], seeds: Sequence[int]) -> str:
    """Return a Markdown table: the median over the seeds, and in brackets each seed."""
    titles = [f'{num} learner{"s" * (num > 1)}' for num in learners]
    lines = [f'| | {" | ".join(titles)} |', f'|---|{"---|" * len(titles)}']
    for title, key, form in ROWS:
        cells: List[str] = []
        for num in learners:
            values = [runs[num, seed][key] for seed in seeds if runs[num, seed][key] is not None]
            middle = form.format(statistics.median(values)) if values else '-'
            cells.append(f'{middle} ({", ".join(form.format(value) for value in values)})')
        lines.append(f'| {title} | {" | ".join(cells)} |')
    lost = [sum(runs[num, seed]['chunks_lost'] or 0 for seed in seeds) for num in learners]
    return '\n'.join([*lines, f'| chunks lost | {" | ".join(map(str, lost))} |'])


if __name__ == '__main__':
    sys.exit(main())
