#!/usr/bin/env python3
"""
Profile of loops: where the time of dizoo_configs' mains goes, on the store and in plain DI-engine, by parts.

    python scripts/profile_loop.py                                     # all with installed extras; about 20 minutes
    python scripts/profile_loop.py hopper_sac smax_qmix --seconds 20 --turns 5
    python scripts/profile_loop.py --roles learner=1,collector=2       # the learner of a job of several processes
    python scripts/profile_loop.py pong_dqn pong_r2d2 --plain-rows     # the store with and without shared frames

Every window of a loop is a process with one thread, which has its environments, collector and learner: DI-engine's
configs with smaller models. Both sides take turns. The clock starts after some iterations. A part has the time that is
spent in it and in no other part that it calls. The rest is the collector's own work, loggers and the task. Evaluation
is left out. The table has medians of the windows: iterations per second with minimum and maximum, and the median of
store / stock turn by turn. It also has milliseconds per iteration: CPU time of all threads, wall time of each part.
"""

import argparse
import functools
import importlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

ROOT = Path(__file__).resolve().parent.parent
#: Rounds of the loop with training, before the clock starts.
WARM_UP = 2
PARTS = ['environment', 'act', 'push', 'sample', 'train', 'exchange', 'weights', 'rest']

#: (module, name in it, part). For policies and their collate see ``watch_policies``.
WATCHED = [
    ('ding.envs.env_manager.base_env_manager', 'BaseEnvManagerV2.step', 'environment'),
    ('ding.envs.env_manager.base_env_manager', 'BaseEnvManagerV2.reset', 'environment'),
    ('ding.data', 'DequeBuffer.push', 'push'),
    ('ding.data', 'DequeBuffer.sample', 'sample'),
    ('ding.data', 'DequeBuffer.update', 'sample'),
    ('ding_store.buffer', 'StoreBuffer.push', 'push'),
    ('ding_store.buffer', 'StoreBuffer.extend', 'push'),
    ('ding_store.buffer', 'StoreBuffer.extend_elements', 'push'),
    ('ding_store.buffer', 'StoreBuffer.sample', 'sample'),
    ('ding_store.buffer', 'StoreBuffer.sample_batch', 'sample'),
    ('ding_store.buffer', 'StoreBuffer.sample_time_major', 'sample'),
    ('ding_store.buffer', 'StoreBuffer.update_priorities', 'sample'),
]
COLLATES = ('default_preprocess_learn', 'timestep_collate', 'default_collate')
#: Module of an exchanger -> part.
EXCHANGES = {'ding_store.middleware.context_exchanger': 'exchange', 'ding_store.middleware.weights': 'weights'}

SMALL = {'policy.cuda': False, 'env.stop_value': 10**9}
ATARI = {**SMALL, 'policy.model.encoder_hidden_size_list': [16, 32, 128]}
HEADS = {'policy.model.actor_head_hidden_size': 64, 'policy.model.critic_head_hidden_size': 64}
R2D2 = {
    'policy.model.encoder_hidden_size_list': [8, 8, 64],
    'policy.burnin_step': 4,
    'policy.learn_unroll_len': 16,
    'policy.collect.overlap': 10,
    'policy.learn.batch_size': 16,
    'policy.learn.update_per_collect': 4,
}
IMPALA = {'policy.model.encoder_hidden_size_list': [8, 8, 64], 'policy.unroll_len': 16}

#: Side -> settings. `plain` is the store without shared frames.
SIDES: Dict[str, Dict[str, Any]] = {'stock': {}, 'store': {}, 'plain': {'store.share_frames': False}}

#: Name -> main, config, settings.
LOOPS = {
    'cartpole_dqn': ('cartpole.cartpole_dqn_main', '', SMALL),
    'pong_dqn': ('atari.atari_dqn_main', '', ATARI),
    'pong_dqn_per': ('atari.atari_dqn_main', 'atari.pong_dqn_per_config', ATARI),
    'pong_r2d2': ('atari.atari_r2d2_main', '', {**ATARI, **R2D2}),
    'pong_impala': ('atari.atari_impala_main', '', {**ATARI, **HEADS, **IMPALA}),
    'qbert_ppo': (
        # Heads as wide as their input. A quarter of the steps, and of the updates that max_use permits.
        'atari.atari_ppo_main', '',
        {
            **ATARI, **HEADS, 'policy.model.encoder_hidden_size_list': [16, 32, 64],
            'policy.collect.n_sample': 256, 'policy.learn.update_per_collect': 6,
        },
    ),
    'hopper_sac': (
        'mujoco.hopper_sac_main', '', {**SMALL, 'policy.random_collect_size': 1000, 'policy.collect.n_sample': 8},
    ),
    'smax_qmix': ('smac.smac_3s5z_qmix_main', 'smac.smax_3s5z_qmix_config', SMALL),
    'smax_masac': ('smac.smac_3s5z_masac_main', 'smac.smax_3s5z_masac_config', SMALL),
    'gobigger_dqn': ('gobigger.gobigger_dqn_main', '', SMALL),
}  # fmt: skip


class Clock:
    """Seconds of this thread in each part. Nested parts count for the innermost."""

    def __init__(self) -> None:
        self.seconds: Counter = Counter()
        self._stack, self._since, self._thread = ['rest'], time.perf_counter(), threading.get_ident()

    def restart(self) -> None:
        self.seconds.clear()
        self._since = time.perf_counter()

    def _switch(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def timed(self, call: Callable, part: str) -> Callable:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            self._switch()
            self._stack.append(part)
            try:
                return call(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()

        return timed


def watch(clock: Clock, is_stock: bool) -> None:
    """Time the methods in WATCHED. Call it before the main is imported."""
    for module, name, part in WATCHED:
        if is_stock and module.startswith('ding_store'):
            continue
        kind, _, method = name.partition('.')
        owner = getattr(importlib.import_module(module), kind)
        setattr(owner, method, clock.timed(getattr(owner, method), part))


def watch_policies(clock: Clock) -> None:
    """Time every policy's forward passes and collate functions. Call it after the main is imported."""
    from ding.policy import Policy

    kinds: List[type] = [Policy]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
        for method, part in (('_forward_learn', 'train'), ('_forward_collect', 'act')):
            if method in vars(kind) and not getattr(vars(kind)[method], '__isabstractmethod__', False):
                setattr(kind, method, clock.timed(vars(kind)[method], part))
    for name, module in list(sys.modules.items()):
        if name.startswith(('ding.policy.', 'dizoo_configs.')):
            for collate in COLLATES:
                if hasattr(module, collate):
                    setattr(module, collate, clock.timed(getattr(module, collate), 'sample'))


def watch_exchangers(clock: Clock, task: Any) -> None:
    """Time the exchangers: their first half, before ``yield``, and their second, which sends."""
    forward = type(task).forward

    def watched(self: Any, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        part = EXCHANGES.get(type(fn).__module__)
        return (clock.timed(forward, part) if part else forward)(self, fn, *args, **kwargs)

    def sent(self: Any, stack: Any = None, **kwargs: Any) -> None:
        stack = stack or self._backward_stack
        while stack:
            _, generator = stack.popitem()
            part = EXCHANGES.get(generator.gi_frame.f_globals['__name__'], 'rest')
            clock.timed(next, part)(generator, None)

    type(task).forward, type(task).backward = watched, sent


def run_one(name: str, side: str, seconds: float, out: str, traffic: Any = None) -> None:
    """
    Run one window in this process. With roles, every role runs it, and the learner writes the figures. ``traffic``
    counts what the replay receives and gives (``replay_traffic.Traffic``), and then writes them instead.
    """
    import torch
    from ding.framework import task

    from dizoo_configs.command import Options

    torch.set_num_threads(1)
    clock, run = Clock(), task.run
    watch(clock, side == 'stock')
    if traffic is not None:
        traffic.watch(side == 'stock')
    main, config, settings = LOOPS[name]
    settings = {**settings, **SIDES[side]}
    module: Any = importlib.import_module(f'dizoo_configs.{main}')
    if task.router.is_active:
        watch_exchangers(clock, task)
    watch_policies(clock)
    module.interaction_evaluator = lambda *args, **kwargs: task.void()
    begin: Dict[str, Any] = {}

    def note(ctx: Any) -> None:
        begin['rounds'] = begin.get('rounds', 0) + (int(ctx.train_iter) > 0)
        if begin['rounds'] == WARM_UP:
            begin.update(at=time.perf_counter(), train_iter=int(ctx.train_iter), env_step=int(ctx.env_step))
            begin['cpu'] = time.process_time()
            clock.restart()
            if traffic is not None:
                traffic.restart()
        elif begin['rounds'] > WARM_UP and time.perf_counter() - begin['at'] > seconds and not begin.get('is_over'):
            begin['is_over'] = True
            taken = time.perf_counter() - begin['at']
            rates = {key: (int(getattr(ctx, key)) - begin[key]) / taken for key in ('train_iter', 'env_step')}
            clock._switch()
            num_iterations = int(ctx.train_iter) - begin['train_iter']
            parts = {part: 1e3 * spent / num_iterations for part, spent in clock.seconds.items()}
            parts['CPU'] = 1e3 * (time.process_time() - begin['cpu']) / num_iterations
            if traffic is not None:
                traffic.end(taken, {**rates, 'ms': parts}, out)
            else:
                Path(out).write_text(json.dumps({**rates, 'ms': parts}))
                task.finish = True

    def watched_run() -> None:
        if not task.router.is_active or task.has_role(task.role.LEARNER):
            task.use(note)
        run()

    task.run = watched_run
    config = f'dizoo_configs.{config}' if config else ''
    module.main(Options(config=config, stock=side == 'stock', env_manager='base', settings=tuple(settings.items())))


class NoExtra(RuntimeError):
    """A package that a loop's environment needs is not installed."""


def measure(name: str, side: str, seconds: float, roles: str, script: str = __file__) -> Dict[str, Any]:
    """Run one window in a process of its own, by a script that knows the loop, and return its figures."""
    from ding_store.parent_death import end_with

    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'SDL_VIDEODRIVER': 'dummy'}
    with tempfile.TemporaryDirectory(prefix='profile') as directory:
        out, log = Path(directory, 'out.json'), Path(directory, 'log')
        child = [str(Path(script).resolve()), '--child', name, side, str(out), '--seconds', str(seconds)]
        command = [sys.executable, '-W', 'ignore', *child]
        if roles:
            command = [sys.executable, '-m', 'ding_store.cli', 'run', '--roles', roles, '--', 'python', *child]
        with log.open('wb') as stream:
            subprocess.run(
                command, cwd=directory, env=environment, stdout=stream, stderr=stream, timeout=600 + seconds,
                preexec_fn=functools.partial(end_with, os.getpid(), signal.SIGKILL),
            )  # fmt: skip
        if not out.exists():
            said = log.read_text(errors='replace')
            # This is the text of dizoo_configs/extras.py. Any other missing module is an error of this repository.
            for missing in [line for line in said.splitlines() if 'is missing, which the environments of' in line][-1:]:
                raise NoExtra(f'{name} is left out: {missing}')
            raise RuntimeError(f'{name} {side} gave no figures:\n{said[-3000:]}')
        return dict(json.loads(out.read_text()))


def line(name: str, side: str, windows: List[Dict[str, Any]], stock: List[Dict[str, Any]], parts: List[str]) -> str:
    rates = [window['train_iter'] for window in windows]
    steps = statistics.median(window['env_step'] for window in windows)
    ratios = [rate / other['train_iter'] for rate, other in zip(rates, stock)]
    of_stock = f'{statistics.median(ratios):.2f}' if ratios else ''
    ms = [statistics.median(window['ms'].get(part, 0.0) for window in windows) for part in parts]
    return (
        f'{name:<14}{side:<6}{statistics.median(rates):>8.1f}{f"{min(rates):.1f} - {max(rates):.1f}":>17}'
        f'{of_stock:>9}{steps:>9.1f}' + ''.join(f'{each:>13.2f}' for each in ms)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('loops', nargs='*', help=f'loops to profile (default: all of {" ".join(LOOPS)})')
    parser.add_argument('--seconds', type=float, default=10.0, help='seconds per window (10)')
    parser.add_argument('--turns', type=int, default=3, help='windows per loop and side (3)')
    parser.add_argument('--roles', default='', help='roles as in ding-store run, on the store only')
    parser.add_argument('--plain-rows', action='store_true', help='also the store without shared frames, as side plain')
    parser.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    parser.add_argument('--child', nargs=3, metavar=('LOOP', 'SIDE', 'OUT'), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, side, out = options.child
        run_one(name, side, options.seconds, out)
        return 0
    for name in options.loops:
        if name not in LOOPS:
            parser.error(f'no loop {name!r}; known are {", ".join(LOOPS)}')
    if not 0 < options.seconds < math.inf:
        parser.error(f'--seconds ({options.seconds:g}) must be above 0, and finite')
    if options.turns < 1:
        parser.error(f'--turns ({options.turns}) must be at least 1')
    file = Path(options.json).resolve() if options.json else None
    if file and not file.parent.is_dir():
        parser.error(f'--json {options.json}: there is no directory {file.parent}')
    sys.path.insert(0, str(ROOT))
    from ding_store.launch.termination import signals_as_interrupt

    try:
        with signals_as_interrupt():
            sides = ['store', *(['plain'] if options.plain_rows else [])]
            sides = sides if options.roles else ['stock', *sides]
            return profile(options.loops, options.seconds, options.turns, options.roles, sides, file)
    except KeyboardInterrupt:
        raise SystemExit('interrupted') from None


def profile(loops: List[str], seconds: float, turns: int, roles: str, sides: List[str], file: Optional[Path]) -> int:
    """Measure and print all loops. Return 1 if a loop gave no figures, or a named one lacks its extra."""
    from benchmarks.output import say, show

    parts = ['CPU', *(part for part in PARTS if roles or part not in EXCHANGES.values())]
    titles = ''.join(f'{part:>13}' for part in parts)
    show(f'{"loop":<14}{"side":<6}{"it/s":>8}{"least - most":>17}{"of stock":>9}{"step/s":>9}{titles}')
    failed, figures = 0, {}
    for name in loops or LOOPS:
        windows: Dict[str, List[Dict[str, Any]]] = {side: [] for side in sides}
        try:
            for turn in range(turns):
                for side in sides if turn % 2 == 0 else sides[::-1]:
                    say(f'{name} {side}, window {turn + 1} of {turns}')
                    windows[side].append(measure(name, side, seconds, roles))
        except NoExtra as error:
            failed = failed or int(bool(loops))
            sys.stderr.write(f'{error}\n')
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed = 1
            sys.stderr.write(f'{error}\n')
        for side, found in windows.items():
            if found:
                figures[f'{name} {side}'] = found
                show(line(name, side, found, windows.get('stock', []) if side != 'stock' else [], parts))
        if file:
            file.write_text(json.dumps(figures, indent=1))
    say('')
    return failed


if __name__ == '__main__':
    sys.exit(main())
