#!/usr/bin/env python3
"""
Learning curves: Pong DQN, Hopper SAC and GoBigger DQN, on the store and in plain DI-engine, with several seeds.

    scripts/setup.sh --extra atari --extra mujoco --extra gobigger
    python scripts/learn.py gobigger                  # half an hour of one core, and 8 GB, per run
    python scripts/learn.py hopper --seeds 0 1 --minutes 30
    python scripts/learn.py --plot                    # only draw the existing curves

Every run is a process with one collector and the learner, so that both sides do the same work. It ends at its env steps
or after its minutes. It writes a line per evaluation to DIRECTORY/TASK-KIND-sSEED/curve.jsonl: env step, train
iteration, seconds, mean return over 20 episodes. Started again, the command keeps runs that reached their env steps or
had as many minutes, and begins the others anew. No run outlives the command. A random policy's returns are measured
first. The plot shows their mean and 3 standard deviations.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torch.nn import LeakyReLU

ROOT = Path(__file__).resolve().parent.parent
EPISODES = 20
ENVS = {
    # All runs continue until the same env step.
    'env.stop_value': 10**9,
    # DI-engine's evaluator seeds each env only once: a second episode would repeat its first one.
    'env.evaluator_env_num': EPISODES,
    'env.n_evaluator_episode': EPISODES,
    'policy.cuda': False,
}
#: Content of file ``ended`` if a run reached its last env step. Otherwise the file has the run's minutes.
STEPS = 'env steps'

#: Task -> its main, its last env step, and its settings: DI-engine's own, smaller where two cores are too few.
TASKS = {
    'pong': dict(
        main='dizoo_configs.atari.atari_dqn_main',
        max_env_step=185_000,
        settings={
            **ENVS,
            # Pong's episodes differ even so: they begin with a number of no-ops that numpy draws.
            'env.evaluator_env_num': 4,
            'env.frame_size': 64,
            'policy.model.obs_shape': [4, 64, 64],
            'policy.model.encoder_hidden_size_list': [16, 32, 64],
            # With ReLU, one of 16 filters was active after 150,000 steps, at twice this learning rate.
            'policy.model.activation': LeakyReLU(0.1),
            'policy.other.replay_buffer.replay_buffer_size': 60_000,
            'policy.other.eps.decay': 40_000,
            'policy.other.eps.end': 0.02,
            'policy.nstep': 5,
            'policy.learn.update_per_collect': 96,
            'policy.learn.target_update_freq': 500,
            'policy.eval.evaluator.eval_freq': 20_000,
        },
    ),
    'hopper': dict(
        main='dizoo_configs.mujoco.hopper_sac_main',
        max_env_step=30_000,
        settings={
            **ENVS,
            'policy.random_collect_size': 5_000,
            'policy.collect.n_sample': 8,
            'policy.learn.update_per_collect': 8,
            'policy.eval.evaluator.eval_freq': 5_000,
        },
    ),
    # Matches of a minute against the bots that eat the nearest ball. Returns are the growth of the logarithm of a
    # player's score. The last env step is that of the fifth evaluation.
    'gobigger': dict(
        main='dizoo_configs.gobigger.gobigger_dqn_main',
        max_env_step=17_000,
        settings={
            **ENVS,
            'env.match_frames': 1_200,
            'env.bot_level': 1,
            'env.reward_scale': 50.0,
            'env.reward_clip': 2.0,
            'policy.priority': False,
            'policy.discount_factor': 0.9,
            'policy.learn.update_per_collect': 16,
            'policy.learn.learning_rate': 0.0005,
            'policy.learn.target_update_freq': 100,
            'policy.other.eps.decay': 4_000,
            'policy.other.replay_buffer.replay_buffer_size': 20_000,
            'policy.eval.evaluator.eval_freq': 1_000,
        },
    ),
}


def options(task: str, kind: str, seed: int):
    from dizoo_configs.command import Options

    settings = {**TASKS[task]['settings'], 'exp_name': f'{task}_{kind}_seed{seed}'}
    return Options(
        seed=seed,
        stock=kind == 'stock',
        max_env_step=TASKS[task]['max_env_step'],
        env_manager='base',
        settings=tuple(settings.items()),
    )


def run_one(task_name: str, kind: str, seed: int, minutes: float) -> None:
    """Train one run in this process, which is the run's own, in the run's directory."""
    train(TASKS[task_name]['main'], options(task_name, kind, seed), minutes)


def train(main: str, given, minutes: float, measure=lambda ctx, is_evaluated: {}, resumes: bool = False) -> None:
    """
    Train by a main in this process, and write its curve into the working directory. `measure` is called at the end of
    each round of the loop, with whether it evaluated the policy. It returns further figures for a point of the curve.
    With `resumes`, the run may go on from a checkpoint. The curve then keeps the points before it.
    """
    import importlib

    from ding.framework import task

    curve = Path('curve.jsonl')
    before = read_curve(Path()) if resumes else []
    if not before:
        curve.write_text('')
    Path('ended').unlink(missing_ok=True)
    began, seen, run, ended_by = time.monotonic(), [None], task.run, [STEPS]

    def note(ctx) -> None:
        nonlocal began
        if before:
            # What the run trained after its last checkpoint, it trains again.
            kept = [point for point in before if point['env_step'] < ctx.env_step]
            curve.write_text(''.join(json.dumps(point) + '\n' for point in kept))
            began -= kept[-1]['seconds'] if kept else 0.0
            before.clear()
        seconds = time.monotonic() - began
        is_evaluated = seen[0] != (ctx.last_eval_iter, ctx.last_eval_value) and ctx.last_eval_value > -1e9
        further = measure(ctx, is_evaluated)
        if is_evaluated:
            seen[0] = (ctx.last_eval_iter, ctx.last_eval_value)
            point = dict(env_step=int(ctx.env_step), train_iter=int(ctx.train_iter), seconds=seconds, **further)
            with curve.open('a') as out:
                out.write(json.dumps({**point, 'mean_return': float(ctx.last_eval_value)}) + '\n')
        if seconds > 60 * minutes and not task.finish:
            task.finish, ended_by[0] = True, str(minutes)

    def timed_run() -> None:
        task.use(note)
        run()

    task.run = timed_run
    importlib.import_module(main).main(given)
    Path('ended').write_text(ended_by[0])


def has_ended(directory: Path, minutes: float) -> bool:
    """Return True if a run reached its last env step, or had at least as many minutes as it would have now."""
    path = directory / 'ended'
    return path.exists() and (path.read_text() in (STEPS, '') or float(path.read_text()) >= minutes)


def random_returns(task_name: str, directory: Path) -> list:
    """Return 20 episodes' returns of a policy that draws its actions. They are measured once."""
    path = directory / f'{task_name}-random.json'
    if path.exists():
        return json.loads(path.read_text())
    import importlib

    import numpy as np
    from ding.envs import get_env_cls

    module = importlib.import_module(TASKS[task_name]['main'])
    main_config, create_config = options(task_name, 'store', 0).configs(module.CONFIGS[0])
    env_class = get_env_cls(create_config.env)
    env = env_class(env_class.create_evaluator_env_cfg(main_config.env)[0])
    env.seed(0, dynamic_seed=True)
    returns = []
    for episode in range(EPISODES):
        env.reset()
        if not episode:
            env.action_space.seed(0)
        step = env.step(env.random_action())
        while not step.done:
            step = env.step(env.random_action())
        returns.append(float(np.asarray(step.info['eval_episode_return']).reshape(())))
    path.write_text(json.dumps(returns))
    return returns


class Run:
    """
    A run in another process, which executes `arguments` of this interpreter. Its output and curve are in its directory.
    """

    def __init__(self, directory: Path, max_env_step: int, arguments: list):
        self.name, self.directory, self.max_env_step = directory.name, directory, max_env_step
        self.directory.mkdir(exist_ok=True)
        # One thread each, so that simultaneous runs do not share cores.
        environment = {'OMP_NUM_THREADS': '1', **os.environ, 'PYTHONPATH': str(ROOT)}
        with open(self.directory / 'out', 'wb') as out:
            self.process = self.start(arguments, environment, out)

    def start(self, arguments: list, environment: dict, out):
        from ding_store.parent_death import end_with

        return subprocess.Popen(
            [sys.executable, *arguments], cwd=self.directory, env=environment, stdout=out, stderr=out,
            preexec_fn=functools.partial(end_with, os.getpid(), signal.SIGKILL),
        )  # fmt: skip

    def has_ended(self) -> bool:
        if self.process.poll() is None:
            return False
        if self.process.returncode:
            out = self.directory / 'out'
            print(out.read_text(errors='replace')[-3000:], file=sys.stderr)
            raise SystemExit(f'{self.name} failed; its output is in {out}')
        return True

    def __str__(self) -> str:
        points = read_curve(self.directory)
        last = points[-1] if points else dict(env_step=0, mean_return=float('nan'), seconds=0.0)
        share = min(1.0, last['env_step'] / self.max_env_step)
        bar = '#' * int(12 * share) + '.' * (12 - int(12 * share))
        return f'{self.name} [{bar}] {last["env_step"]:,} steps, return {last["mean_return"]:.1f}'


def read_curve(directory: Path) -> list:
    path = directory / 'curve.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def learn(tasks: list, kinds: list, seeds: list, minutes: float, jobs: int, directory: Path) -> None:
    """Run all runs that have not ended before."""
    runs = {}
    for task in tasks:
        returns = random_returns(task, directory)
        print(f'{task}: a random policy returns {sum(returns) / len(returns):.1f} over {len(returns)} episodes')
        for seed, kind in itertools.product(seeds, kinds):
            arguments = [str(Path(__file__).resolve()), task, '--one', kind, str(seed), '--minutes', str(minutes)]
            runs[directory / f'{task}-{kind}-s{seed}'] = (TASKS[task]['max_env_step'], arguments)
    run_all(runs, minutes, jobs)


def run_all(runs: dict, minutes: float, jobs: int, leave_s: float = 0.0, kind=Run) -> None:
    """
    Run all runs that have not ended before, `jobs` at a time, with a line of progress. `runs` has for each directory
    the run's last env step and its arguments. If interrupted, runs have `leave_s` seconds to write a last checkpoint.
    `kind` is the class of runs.
    """
    waiting, running = list(runs.items()), []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                own, (max_env_step, arguments) = waiting.pop(0)
                if has_ended(own, minutes):
                    print(f'{own.name} has ended before; remove {own} to run it again')
                else:
                    running.append(kind(own, max_env_step, arguments))
            time.sleep(2.0)
            if sys.stdout.isatty():
                print('\r\x1b[K' + '   '.join(map(str, running)), end='', flush=True)
            for run in [run for run in running if run.has_ended()]:
                running.remove(run)
                print(f'\r\x1b[K{run}' if sys.stdout.isatty() else run, flush=True)
    finally:
        for run in running:
            if leave_s:
                run.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.process.wait(leave_s)
            run.process.kill()
            run.process.wait()


def plot(directory: Path) -> None:
    """Draw all curves in one picture, and print a line for each task and kind."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    tasks = [task for task in TASKS if (directory / f'{task}-random.json').exists()]
    if not tasks:
        raise SystemExit(f'{directory} has no runs yet')
    figure, axes = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 3.6), squeeze=False)
    for axis, task in zip(axes[0], tasks):
        returns = json.loads((directory / f'{task}-random.json').read_text())
        mean = sum(returns) / len(returns)
        sigma = (sum((each - mean) ** 2 for each in returns) / (len(returns) - 1)) ** 0.5
        bound = mean + 3 * sigma
        of_mean = mean + 3 * sigma / len(returns) ** 0.5
        axis.axhline(mean, color='grey', linestyle=':', label='random policy, mean and 3 sigma')
        axis.axhspan(2 * mean - bound, bound, color='grey', alpha=0.15)
        curves = {kind: curves_of(directory, task, kind) for kind in ('store', 'stock')}
        last = min((curve[-1]['env_step'] for kind in curves for curve in curves[kind].values()), default=0)
        for kind, color in (('store', 'tab:blue'), ('stock', 'tab:orange')):
            for (seed, curve), style in zip(curves[kind].items(), itertools.cycle(('-', '--', ':', '-.'))):
                steps, values = zip(*((point['env_step'], point['mean_return']) for point in curve))
                axis.plot(steps, values, color=color, linestyle=style, label=f'{kind}, seed {seed}')
            points = itertools.chain.from_iterable(curves[kind].values())
            ends = [point['mean_return'] for point in points if point['env_step'] == last]
            if ends:
                said = ', '.join(f'{value:.4g}' for value in ends)
                print(
                    f'{task:<9} {kind}: {said} at {last:,} env steps; random {mean:.3g}, + 3 sigma of its mean '
                    f'{of_mean:.3g}, of an episode {bound:.3g}'
                )
        axis.set(title=task, xlabel='env steps', ylabel=f'mean return of {EPISODES} episodes')
        axis.legend(fontsize='small')
    figure.tight_layout()
    figure.savefig(directory / 'learning.svg')
    print(f'curves in {directory / "learning.svg"}')


def curves_of(directory: Path, task: str, kind: str) -> dict:
    """Return seed -> curve. The runs of a task are evaluated at the same env steps."""
    runs = sorted(directory.glob(f'{task}-{kind}-s*'))
    return {own.name.rpartition('-s')[2]: curve for own in runs if (curve := read_curve(own))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tasks', nargs='*', metavar='TASK', help=', '.join(TASKS))
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1])
    parser.add_argument('--kinds', nargs='+', choices=['store', 'stock'], default=['store', 'stock'])
    parser.add_argument('--minutes', type=float, default=60.0, help='minutes after which a run ends (60)')
    parser.add_argument('--jobs', type=int, default=2, help='runs at a time, one core each (2)')
    parser.add_argument('--directory', type=Path, default=Path('runs/learning'))
    parser.add_argument('--plot', action='store_true', help='only draw the existing curves')
    parser.add_argument('--one', nargs=2, metavar=('KIND', 'SEED'), help=argparse.SUPPRESS)
    given = parser.parse_args()
    for task in set(given.tasks) - set(TASKS):
        parser.error(f'no task {task!r}; there are: {", ".join(TASKS)}')
    if not given.tasks and not given.plot:
        parser.error(f'name a task ({", ".join(TASKS)}), or --plot')
    if given.jobs < 1:
        parser.error(f'--jobs ({given.jobs}) must be at least 1')
    if not 0 < given.minutes < math.inf:
        parser.error(f'--minutes ({given.minutes:g}) must be above 0, and finite')
    if given.one:
        run_one(given.tasks[0], given.one[0], int(given.one[1]), given.minutes)
        return
    sys.path.insert(0, str(ROOT))
    from ding_store.launch.termination import signals_as_interrupt

    directory = given.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with signals_as_interrupt():
            if not given.plot:
                learn(given.tasks, given.kinds, given.seeds, given.minutes, given.jobs, directory)
            plot(directory)
    except KeyboardInterrupt:
        raise SystemExit('interrupted: the same command begins anew the runs that have not ended') from None


if __name__ == '__main__':
    main()
