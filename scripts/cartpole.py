"""
CartPole DQN through the store and in plain DI-engine: the job of scripts/run.sh, and the comparison over seeds.

    scripts/run.sh                                    one seed, progress, and the table
    python scripts/cartpole.py --seeds 0 1 2 3 4      interleaved over seeds: each, medians, maxima
    python scripts/cartpole.py --seeds 0 --busy       the same with other load on all cores
"""

import argparse
import glob
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parent.parent
MAIN = ROOT / 'dizoo_configs' / 'cartpole' / 'cartpole_dqn_main.py'
ROLES = 'learner=1,evaluator=1,collector=2'
TIMEOUT_S = 600
LOG = 'cartpole.log'
TITLES = {'store': 'ding_store', 'serial': 'DI-engine, serial', 'parallel': 'DI-engine, ditask'}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0])
    parser.add_argument('--no-compare', action='store_true', help='leave out plain DI-engine')
    parser.add_argument(
        '--no-parallel', action='store_true', help="compare with DI-engine's serial mode only, not with ditask"
    )
    parser.add_argument('--busy', action='store_true', help='load every core with another process meanwhile')
    parser.add_argument('--json', metavar='FILE', help='write all figures to FILE after each run')
    parser.add_argument('--dir', default=str(ROOT / 'runs' / 'cartpole'), help='directory for the files of runs')
    options = parser.parse_args()

    kinds = ['store'] + ([] if options.no_compare else ['serial'])
    if not (options.no_compare or options.no_parallel):
        kinds.append('parallel')
    os.makedirs(options.dir, exist_ok=True)
    results = {kind: [] for kind in kinds}
    with Busy(options.busy):
        for seed in options.seeds:
            for kind in kinds:
                say(f'--- {TITLES[kind]}, seed {seed}')
                results[kind].append(RUN[kind](seed, Path(options.dir)))
                if options.json:
                    Path(options.json).write_text(json.dumps(results, indent=1))
    if len(kinds) * len(options.seeds) > 1:  # a single run through the store has printed its own table
        show(options.seeds, results)
    return 0 if all(r['code'] == 0 for runs in results.values() for r in runs) else 1


def say(text: str) -> None:
    sys.stderr.write(text + '\n')
    sys.stderr.flush()


class Busy:
    """One process per core that computes as long as the comparison runs."""

    def __init__(self, on: bool) -> None:
        self._count = os.cpu_count() if on else 0

    def __enter__(self) -> None:
        self._processes = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(self._count)]

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def run_store(seed: int, directory: Path, quiet: bool = False) -> dict:
    with tempfile.NamedTemporaryFile(suffix='.json') as out:
        command = [sys.executable, '-m', 'ding_store.cli', 'run', '--run', f'cartpole-{seed}-{os.getpid()}']
        command += ['--roles', ROLES, '--json', out.name, '--', 'python', str(MAIN), '--seed', str(seed)]
        wall_s, code = timed(command, directory, {}, quiet)
        record = json.loads(Path(out.name).read_text() or '{}')
    return figures(code, wall_s, record)


def run_stock(seed: int, directory: Path, command: list) -> dict:
    with tempfile.TemporaryDirectory() as out:
        path = os.path.join(out, 'stopwatch')
        extra = {'STOPWATCH_FILE': path, 'STOPWATCH_SEED': str(seed), 'OMP_NUM_THREADS': '1'}
        wall_s, code = timed(command, directory, extra, quiet=True)
        records = [json.loads(Path(name).read_text()) for name in glob.glob(path + '.*')]
    record = next((r for r in records if r['role'] in ('serial', 'learner')), {})
    evaluator = next((r for r in records if r['role'] == 'evaluator'), record)
    return figures(code, wall_s, {**record, 'eval_value': evaluator.get('eval_value')})


def run_serial(seed: int, directory: Path) -> dict:
    return run_stock(seed, directory, [sys.executable, '-u', str(ROOT / 'scripts' / 'stock_cartpole.py')])


def run_parallel(seed: int, directory: Path) -> dict:
    ditask = [sys.executable, '-c', 'from ding.entry.cli_ditask import cli_ditask; cli_ditask()']
    where = ['--package', str(ROOT / 'scripts'), '--main', 'stock_cartpole.main']
    return run_stock(seed, directory, ditask + where + ['--parallel-workers', '4', '--topology', 'mesh'])


RUN = {'store': run_store, 'serial': run_serial, 'parallel': run_parallel}


def timed(command: list, directory: Path, environment: dict, quiet: bool) -> tuple:
    """Return wall time and exit code of a command. ``quiet`` writes its output, which may be long, to directory/LOG."""
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore', **environment}
    log = directory / LOG
    begin = time.monotonic()
    with open(log, 'wb') as out:
        streams = {'stdout': out, 'stderr': out} if quiet else {}
        # A visible command receives Ctrl-C from the terminal, like this process. A quiet one has its own process
        # group, and receives the signal from here, with its workers.
        process = subprocess.Popen(command, cwd=directory, env=environment, start_new_session=quiet, **streams)
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            end(process, signal.SIGINT, quiet)
            end(process, signal.SIGKILL, quiet)
    if code:
        say(f'exit code {code}' + (f'; see {log}' if quiet else ''))
    return time.monotonic() - begin, code


def end(process: subprocess.Popen, number: int, with_group: bool) -> None:
    """Signal what is left of a command. A ditask that is killed alone leaves its workers."""
    try:
        os.killpg(process.pid, number) if with_group else process.send_signal(number)
        process.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def figures(code: int, wall_s: float, record: dict) -> dict:
    loop_s = record['ended_s'] - record['began_s'] if record.get('ended_s') else math.nan
    steps, iterations = record.get('env_step', 0), record.get('train_iter', 0)
    result = {'code': code, 'wall_s': wall_s, 'loop_s': loop_s, 'env_step': steps, 'train_iter': iterations}
    result.update(steps_per_s=steps / loop_s, iters_per_s=iterations / loop_s, ratio=iterations / max(steps, 1))
    result['failed'] = int(code != 0)
    result['eval_value'] = record.get('eval_value')
    for name in ('rows_appended', 'rows_ingested', 'chunks_lost'):
        result[name] = record.get(name)
    return result


ROWS = {
    'wall_s': ('wall time of the whole command (s)', '{:.1f}'),
    'loop_s': ('first env step to the end (s)', '{:.2f}'),
    'env_step': ('env steps', '{:.0f}'),
    'train_iter': ('train iterations', '{:.0f}'),
    'steps_per_s': ('env steps/s', '{:.0f}'),
    'iters_per_s': ('train iterations/s', '{:.0f}'),
    'ratio': ('train iterations per env step', '{:.3f}'),
    'eval_value': ('last evaluation return', '{:.1f}'),
    'rows_appended': ('rows appended', '{:.0f}'),
    'rows_ingested': ('rows ingested', '{:.0f}'),
    'chunks_lost': ('chunks lost', '{:.0f}'),
    'failed': ('failed', '{:.0f}'),
}


def show(seeds: list, results: dict) -> None:
    from ding_store.launch.progress import table

    count = len(next(iter(results.values())))
    print()
    if count > 1:
        for kind, runs in results.items():
            print(f'{TITLES[kind]}, seed by seed')
            print(table([(str(seed), cells([run], statistics.median)) for seed, run in zip(seeds, runs)]) + '\n')
        print(f'medians over {count} seeds; chunks lost and exit codes other than 0 are sums')
    print(table([(TITLES[kind], cells(runs, statistics.median)) for kind, runs in results.items()]))
    if count > 1:
        print(f'\nmaxima over {count} seeds')
        print(table([(TITLES[kind], cells(runs, max)) for kind, runs in results.items()]))


def cells(runs: list, over: Callable) -> dict:
    """Return a column of the table: ``over`` all runs, but sums for losses and failures, which a median would hide."""
    made = {}
    for name, (title, form) in ROWS.items():
        known = [run[name] for run in runs if run[name] is not None and run[name] == run[name]]
        how = sum if name in ('chunks_lost', 'failed') else over
        made[title] = form.format(how(known)) if known else '-'
    return made


if __name__ == '__main__':
    sys.exit(main())
