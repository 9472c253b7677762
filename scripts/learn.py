#!/usr/bin/env python3
"""
Learning curves: Pong DQN, Hopper SAC and GoBigger DQN, store and stock, several seeds, in one plot.

    scripts/setup.sh --extra atari --extra mujoco --extra gobigger
    python scripts/learn.py pong                      # about an hour per run on two cores
    python scripts/learn.py hopper --seeds 0 1 --minutes 30
    python scripts/learn.py --plot                    # only draw what there is

Every run is a process of its own (one collector and the learner in it, so that store and stock do the same work), ends
at its env steps or after its minutes, and writes a line per evaluation to DIRECTORY/TASK-KIND-sSEED/curve.jsonl: env
step, train iteration, seconds, mean return over 20 episodes. Started again, runs that ended are left as they are, and
the others begin anew. A random policy's returns are measured first; the plot shows their mean and 3 standard
deviations.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EPISODES = 20
#: No stop value: all runs go on to the same env step.
ENVS = {'env.stop_value': 10**9, 'env.evaluator_env_num': 4, 'env.n_evaluator_episode': EPISODES, 'policy.cuda': False}

#: Task -> its main, where it ends, and its settings: DI-engine's own, made smaller where two cores are too few.
TASKS = {
    'pong': dict(
        main='dizoo_configs.atari.atari_dqn_main',
        max_env_step=400_000,
        settings={
            **ENVS,
            'policy.model.encoder_hidden_size_list': [16, 32, 128],
            'policy.other.replay_buffer.replay_buffer_size': 50_000,
            'policy.other.eps.decay': 30_000,
            'policy.learn.update_per_collect': 12,
            'policy.learn.learning_rate': 0.0003,
            'policy.eval.evaluator.eval_freq': 5_000,
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
    # Matches of a minute; returns are the growth of the logarithm of a player's score.
    'gobigger': dict(
        main='dizoo_configs.gobigger.gobigger_dqn_main',
        max_env_step=50_000,
        settings={
            **ENVS,
            'env.match_frames': 1_200,
            'policy.learn.update_per_collect': 16,
            'policy.other.replay_buffer.replay_buffer_size': 20_000,
            'policy.eval.evaluator.eval_freq': 2_000,
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
    """In a process of its own, in the run's directory."""
    import importlib

    from ding.framework import task

    curve = Path('curve.jsonl')
    curve.write_text('')
    began, seen, run = time.monotonic(), [None], task.run

    def note(ctx) -> None:
        seconds = time.monotonic() - began
        if seen[0] != (ctx.last_eval_iter, ctx.last_eval_value) and ctx.last_eval_value > -1e9:
            seen[0] = (ctx.last_eval_iter, ctx.last_eval_value)
            point = dict(env_step=int(ctx.env_step), train_iter=int(ctx.train_iter), seconds=seconds)
            with curve.open('a') as out:
                out.write(json.dumps({**point, 'mean_return': float(ctx.last_eval_value)}) + '\n')
        if seconds > 60 * minutes:
            task.finish = True

    def timed_run() -> None:
        task.use(note)
        run()

    task.run = timed_run
    importlib.import_module(TASKS[task_name]['main']).main(options(task_name, kind, seed))
    Path('ended').touch()


def random_returns(task_name: str, directory: Path) -> list:
    """Of a policy that draws its actions, over 20 episodes; measured once."""
    path = directory / f'{task_name}-random.json'
    if path.exists():
        return json.loads(path.read_text())
    import importlib

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
        returns.append(float(step.info['eval_episode_return']))
    path.write_text(json.dumps(returns))
    return returns


def follow(process: subprocess.Popen, name: str, directory: Path, max_env_step: int) -> None:
    """A line of progress until the run has ended; its curve is what it says."""
    while process.poll() is None:
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            points = read_curve(directory)
            last = points[-1] if points else dict(env_step=0, mean_return=float('nan'), seconds=0.0)
            share = min(1.0, last['env_step'] / max_env_step)
            bar = '#' * int(30 * share) + '.' * (30 - int(30 * share))
            text = f'{last["env_step"]:>8,} steps  return {last["mean_return"]:8.1f}'
            if sys.stdout.isatty():
                print(f'\r{name:<18} [{bar}] {text}  {last["seconds"] / 60:5.1f} min', end='', flush=True)
    if sys.stdout.isatty():
        print()
    if process.returncode:
        print((directory / 'out').read_text(errors='replace')[-3000:], file=sys.stderr)
        raise SystemExit(f'{name} failed; its output is in {directory / "out"}')


def read_curve(directory: Path) -> list:
    path = directory / 'curve.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def learn(task: str, kinds: list, seeds: list, minutes: float, directory: Path) -> None:
    returns = random_returns(task, directory)
    print(f'{task}: a random policy returns {sum(returns) / len(returns):.1f} over {len(returns)} episodes')
    for seed in seeds:
        for kind in kinds:
            name = f'{task}-{kind}-s{seed}'
            own = directory / name
            if (own / 'ended').exists():
                print(f'{name:<18} has ended before; remove {own} to run it again')
                continue
            own.mkdir(exist_ok=True)
            command = [
                sys.executable,
                str(Path(__file__).resolve()),
                task,
                '--one',
                kind,
                str(seed),
                '--minutes',
                str(minutes),
            ]
            environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
            with open(own / 'out', 'wb') as out:
                process = subprocess.Popen(command, cwd=own, env=environment, stdout=out, stderr=out)
            try:
                follow(process, name, own, TASKS[task]['max_env_step'])
            finally:
                process.kill()
                process.wait()


def plot(directory: Path) -> None:
    """One picture of all curves, and a line of text for each."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    tasks = [task for task in TASKS if (directory / f'{task}-random.json').exists()]
    if not tasks:
        raise SystemExit(f'{directory} has no runs yet')
    figure, axes = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 4), squeeze=False)
    for axis, task in zip(axes[0], tasks):
        returns = json.loads((directory / f'{task}-random.json').read_text())
        mean = sum(returns) / len(returns)
        deviation = (sum((each - mean) ** 2 for each in returns) / (len(returns) - 1)) ** 0.5
        axis.axhline(mean, color='grey', linestyle=':', label='random policy')
        axis.axhspan(mean - 3 * deviation, mean + 3 * deviation, color='grey', alpha=0.15)
        for own in sorted(directory.glob(f'{task}-*-s*')):
            points = read_curve(own)
            if points:
                color = 'tab:blue' if '-store-' in own.name else 'tab:orange'
                steps, values = zip(*((point['env_step'], point['mean_return']) for point in points))
                axis.plot(steps, values, color=color, label=own.name)
                text = 'above' if values[-1] > mean + 3 * deviation else 'not above'
                print(f'{own.name:<18} {values[-1]:8.1f} at {steps[-1]:,} env steps, {text} random + 3 sigma')
        axis.set(title=task, xlabel='env steps', ylabel=f'mean return of {EPISODES} episodes')
        axis.legend(fontsize='small')
    figure.tight_layout()
    figure.savefig(directory / 'learning.png', dpi=120)
    print(f'curves in {directory / "learning.png"}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tasks', nargs='*', metavar='TASK', help=', '.join(TASKS))
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1])
    parser.add_argument('--kinds', nargs='+', choices=['store', 'stock'], default=['store', 'stock'])
    parser.add_argument('--minutes', type=float, default=60.0, help='a run ends after so long')
    parser.add_argument('--directory', type=Path, default=Path('runs/learning'))
    parser.add_argument('--plot', action='store_true', help='only draw what there is')
    parser.add_argument('--one', nargs=2, metavar=('KIND', 'SEED'), help=argparse.SUPPRESS)
    given = parser.parse_args()
    for task in set(given.tasks) - set(TASKS):
        parser.error(f'no task {task!r}; there are: {", ".join(TASKS)}')
    if given.one:
        run_one(given.tasks[0], given.one[0], int(given.one[1]), given.minutes)
        return
    sys.path.insert(0, str(ROOT))
    directory = given.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for task in [] if given.plot else given.tasks:
        learn(task, given.kinds, given.seeds, given.minutes, directory)
    plot(directory)


if __name__ == '__main__':
    main()
