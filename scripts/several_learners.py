"""
CartPole DQN with one learner and with several, over seeds: env steps until the policy reaches the stop value.

    python scripts/several_learners.py                     one and two learners, five seeds
    python scripts/several_learners.py --seeds 0 --learners 1 2 --page docs/results/several-learners.md

Each run's figures are in DIRECTORY/learnersN-seedS.json. Started again, the command keeps the runs that are there.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py'
#: Figures of the table: title, key, form.
ROWS = (
    ('env steps', 'env_step', '{:.0f}'),
    ('train iterations', 'train_iter', '{:.0f}'),
    ('train iterations per env step', 'ratio', '{:.3f}'),
    ('last evaluation return', 'eval_value', '{:.1f}'),
)
Runs = Dict[Tuple[int, int], Dict]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4])
    parser.add_argument('--learners', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--max-env-step', type=int, default=30_000, help='a run ends here if its policy is not good')
    parser.add_argument('--minutes', type=float, default=30.0, help='the time of a run, at most')
    parser.add_argument('--dir', default=str(ROOT / 'runs' / 'several_learners'), help='directory of the figures')
    parser.add_argument('--page', metavar='FILE', help='write a page with the table')
    options = parser.parse_args()

    directory = Path(options.dir)
    directory.mkdir(parents=True, exist_ok=True)
    runs: Runs = {}
    for seed in options.seeds:
        for num in options.learners:
            path = directory / f'learners{num}-seed{seed}.json'
            if not path.exists():
                print(f'--- {num} learners, seed {seed}', file=sys.stderr, flush=True)
                record = run(num, seed, options)
                path.write_text(json.dumps(record, indent=1))
            runs[num, seed] = json.loads(path.read_text())
    text = table(runs, options.learners, options.seeds)
    print(text)
    if options.page:
        Path(options.page).write_text(page(text, options))
    faults = [each for each in runs.values() if each['code'] or each['rows_appended'] != each['rows_ingested']]
    return 1 if faults else 0


def run(num: int, seed: int, options: argparse.Namespace) -> Dict:
    """Run a job, and return its figures."""
    with tempfile.TemporaryDirectory(prefix='several-learners-') as directory:
        out = Path(directory, 'figures.json')
        command = [sys.executable, '-m', 'ding_store.cli', 'run', '--run', f'learners{num}-{seed}']
        command += ['--roles', f'learner={num},collector=2,evaluator=1', '--json', str(out), '--', 'python', str(MAIN)]
        command += ['--seed', str(seed), '--max-env-step', str(options.max_env_step)]
        environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore'}
        job = subprocess.Popen(command, cwd=directory, env=environment)
        try:
            code = job.wait(60 * options.minutes)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGINT)
                job.wait(60)
        record = json.loads(out.read_text()) if out.exists() else {}
    names = ('env_step', 'train_iter', 'eval_value', 'rows_appended', 'rows_ingested', 'chunks_lost', 'reason')
    found = {name: record.get(name) for name in names}
    return {**found, 'code': code, 'ratio': (found['train_iter'] or 0) / max(found['env_step'] or 0, 1)}


def table(runs: Runs, learners: Sequence[int], seeds: Sequence[int]) -> str:
    """Return a Markdown table: each seed, and the median over the seeds."""
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


def page(text: str, options: argparse.Namespace) -> str:
    command = f'python scripts/several_learners.py --seeds {" ".join(map(str, options.seeds))}'
    return f"""# One and several learners

CartPole DQN through the store with two collectors, until the mean return of an evaluation reaches 195, or for
{options.max_env_step:,} env steps. Each cell has the median over the seeds, and in brackets the value of each seed.
This command makes the page:

```sh
{command} --page docs/results/several-learners.md
```

{text}

`python -m benchmarks learners` measures the speed. See [Train with several learners](../howto/several-learners.md).
"""


if __name__ == '__main__':
    sys.exit(main())
