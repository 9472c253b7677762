#!/usr/bin/env python3
"""
DI-engine's examples, dizoo's mains, some of its configs and the serial entries, each plain and on the store.

    python scripts/breadth.py                                # all cases; resumes if started again
    python scripts/breadth.py --only 'example/*' --again     # cases that match, run again
    python scripts/breadth.py --list
    python scripts/breadth.py --page docs/results/breadth.md         # only write the table of the existing results

Each case is shortened: it ends after a few training iterations, with small batches and two environments. Each side runs
in its own process, plain and on the store. The processes are forked from one that has imported DI-engine, like the
roles of `ding-store run`. Results go to a JSON file. Verdicts:

    works                  it trains on both sides, and its replay is on the store, if it has one
    works, named           it trains on both sides, and `ding-store run` names what is not on the store
    fails as plain does    a package is missing, or DI-engine itself cannot run it
    fails only on the store
    silently plain         its replay is DI-engine's, and no line names it
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = '<!-- table: scripts/breadth.py -->', '<!-- end of table -->'
BEGIN_SEVERAL = '<!-- table: scripts/breadth.py, several processes -->'
WORKS, NAMED, AS_PLAIN, ONLY_STORE, SILENT = (
    'works',
    'works, named',
    'fails as plain does',
    'fails only on the store',
    'silently plain',
)
CARTPOLE, PENDULUM = 'classic_control.cartpole', 'classic_control.pendulum'
#: Entries that run with unchanged configs, because their reward models depend on the numbers.
WHOLE = ('serial_pipeline_ngu', 'serial_pipeline_reward_model_offpolicy')
#: Entries of several processes, as ``ding -m parallel`` and ``ding -m dist`` start them, with a config of dizoo.
SEVERAL = {
    'parallel_pipeline': f'{CARTPOLE}.config.parallel.cartpole_dqn_config',
    'dist': f'{CARTPOLE}.config.parallel.cartpole_dqn_config',
}
#: Number of training iterations of a case.
ITERATIONS = 3
#: Entry of DI-engine -> configs of dizoo.
CONFIGS: Dict[str, List[str]] = {
    'serial_pipeline': [
        *(
            f'{CARTPOLE}.config.cartpole_{name}_config'
            for name in 'dqn c51 qrdqn iqn fqf rainbow sqn sql mdqn dqn_stdim r2d2 r2d2_gtrxl r2d2_residual acer '
            'impala ppo_offpolicy sac'.split()
        ),
        *(f'{PENDULUM}.config.pendulum_{name}_config' for name in 'dqn bdq sac ddpg td3 d4pg'.split()),
        *(
            f'petting_zoo.config.ptz_simple_spread_{name}_config'
            for name in 'qmix vdn wqmix collaq qtran coma madqn atoc maddpg masac'.split()
        ),
        'classic_control.acrobot.config.acrobot_dqn_config',
        'bitflip.config.bitflip_pure_dqn_config',
        'mujoco.config.hopper_sac_config',
        'mujoco.config.hopper_td3_config',
        'atari.config.serial.pong.pong_dqn_config',
        'gym_hybrid.config.gym_hybrid_pdqn_config',
        'box2d.lunarlander.config.lunarlander_dqn_config',
    ],
}
#: The other serial entries, with configs from DI-engine's own tests.
ENTRIES: Dict[str, List[str]] = {
    'serial_pipeline_onpolicy': [
        *(f'{CARTPOLE}.config.cartpole_{name}_config' for name in ('a2c', 'ppo', 'pg')),
        *(f'{PENDULUM}.config.pendulum_{name}_config' for name in ('a2c', 'ppo')),
        'petting_zoo.config.ptz_simple_spread_mappo_config',
    ],
    'serial_pipeline_ngu': [f'{CARTPOLE}.config.cartpole_ngu_config'],
    'serial_pipeline_reward_model_offpolicy': [f'{CARTPOLE}.config.cartpole_dqn_rnd_config'],
    'serial_pipeline_reward_model_onpolicy': [
        f'{CARTPOLE}.config.cartpole_ppo_icm_config',
        f'{CARTPOLE}.config.cartpole_rnd_onppo_config',
    ],
    'serial_pipeline_sqil': [f'{CARTPOLE}.config.cartpole_sqil_config', f'{PENDULUM}.config.pendulum_sqil_sac_config'],
    'serial_pipeline_dqfd': [f'{CARTPOLE}.config.cartpole_dqfd_config'],
    'serial_pipeline_td3_vae': ['box2d.lunarlander.config.lunarlander_cont_td3_vae_config'],
}
#: Mains of dizoo that build a pipeline in code.
MAINS = [
    *(f'{CARTPOLE}.entry.cartpole_{name}_main' for name in 'dqn c51 fqf ppo_offpolicy ppg ppo'.split()),
    *(f'{PENDULUM}.entry.pendulum_{name}_main' for name in 'ddpg td3 d4pg ppo'.split()),
    'bitflip.entry.bitflip_dqn_main',
    'mujoco.entry.mujoco_ddpg_main',
]


def cases() -> Iterator[str]:
    """Yield names of cases: ``example/MODULE``, ``main/MODULE``, ``ENTRY/MODULE``, from the installed packages."""
    import ding.example

    for module in pkgutil.iter_modules(ding.example.__path__):
        yield f'example/{module.name}'
    for main in MAINS:
        yield f'main/{main}'
    for entry, configs in (*CONFIGS.items(), *ENTRIES.items()):
        for config in configs:
            yield f'{entry}/{config}'
    for entry, config in SEVERAL.items():
        yield f'{entry}/{config}'


class Done(BaseException):
    """A case has trained enough."""


def shorten(main: Any, create: Any = None) -> None:
    """Make a config of dizoo small: two environments in this process, small batches."""
    policy = main.policy
    policy.cuda = False
    for key, most in (('collector_env_num', 2), ('evaluator_env_num', 1), ('n_evaluator_episode', 1)):
        if key in main.env:
            main.env[key] = min(main.env[key], most)
    for mode, most in ((policy.get('collect', {}), 2), (policy.get('eval', {}), 1)):
        if 'env_num' in mode:
            mode.env_num = min(mode.env_num, most)
    if policy.get('random_collect_size', 0):
        policy.random_collect_size = min(policy.random_collect_size, 64)
    learn = policy.get('learn', {})
    for key, most in (('batch_size', 16), ('update_per_collect', 2), ('epoch_per_collect', 2)):
        if key in learn:
            learn[key] = min(learn[key], most)
    collect = policy.get('collect', {})
    for key, most in (('n_sample', 32), ('n_episode', 4)):
        if collect.get(key):
            collect[key] = min(collect[key], most)
    if 'collector_env_num' in policy.get('model', {}):
        policy.model.collector_env_num = 2  # read by NGU
    if create is not None and 'env_manager' in create:
        create.env_manager.type = 'base'


def end_early(counts: Dict[str, int]) -> None:
    """Make every pipeline end after some training iterations."""
    import ding.config.config
    from ding.framework.task import Task
    from ding.worker import BaseLearner

    ding.config.config.save_config = lambda *args, **kwargs: None  # formatting the config takes longer than the rest
    train, run = BaseLearner.train, Task.run

    def train_some(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        counts['trained'] += 1
        if counts['trained'] >= ITERATIONS:
            raise Done
        return result

    def look(ctx: Any) -> None:
        counts['trained'] = max(counts['trained'], getattr(ctx, 'train_iter', 0))
        if counts['trained'] >= ITERATIONS:
            raise Done

    def run_some(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.use(look)
        return run(self, *args, **kwargs)

    BaseLearner.train, Task.run = train_some, run_some


def end_coordinator_early(counts: Dict[str, int]) -> None:
    """Make a pipeline of several processes end when its coordinator has heard of some training iterations."""
    from ding.worker import Coordinator

    hear = Coordinator.deal_with_learner_send_info

    def hear_some(self: Any, *args: Any, **kwargs: Any) -> None:
        hear(self, *args, **kwargs)
        counts['trained'] += 1
        self._system_shutdown_flag |= counts['trained'] >= ITERATIONS

    Coordinator.deal_with_learner_send_info = hear_some


def run_dist(config: str) -> None:
    """Start what the commands of ``ding -m dist`` start: a learner, two collectors and a coordinator, as processes."""
    from ding.entry import dist_entry

    config = dist_entry.dist_prepare_config(shutil.copy(config, 'config.py'), 0, 'local', *[None] * 6)
    for name in ('learner0', 'collector0', 'collector1'):
        launch = dist_entry.dist_launch_learner if name == 'learner0' else dist_entry.dist_launch_collector
        multiprocessing.Process(target=launch, args=(config, 0, None, name)).start()
    dist_entry.dist_launch_coordinator(config, 0, None, disable_flask_log=True)


def count_plain_buffers(counts: Dict[str, int]) -> None:
    """Count the instances of DI-engine's own buffers."""
    from ding.data.buffer.deque_buffer import DequeBuffer
    from ding.worker.replay_buffer import AdvancedReplayBuffer, NaiveReplayBuffer

    for kind in (DequeBuffer, AdvancedReplayBuffer, NaiveReplayBuffer):
        kind = getattr(kind, '__ding_store_stock__', kind)

        def counting(self: Any, *args: Any, init: Callable = kind.__init__, **kwargs: Any) -> None:
            counts['plain_buffers'] += 1
            init(self, *args, **kwargs)

        kind.__init__ = counting  # type: ignore[method-assign]


def expert_of(main: Any, create: Any) -> str:
    """Write an untrained policy to a file, for entries that collect an expert's data. Return its path."""
    import copy

    import torch
    from ding.config import compile_config
    from ding.policy import create_policy

    create = copy.deepcopy(create)
    create.policy.type += '_command'
    cfg = compile_config(copy.deepcopy(main), create_cfg=create, auto=True, save_cfg=False, seed=0)
    policy = create_policy(cfg.policy, enable_field=['learn', 'collect'])
    torch.save(policy.collect_mode.state_dict(), 'expert.pth')
    return os.path.abspath('expert.pth')


def run_case(name: str) -> None:
    kind, _, module = name.partition('/')
    if kind == 'example':
        found = importlib.import_module(f'ding.example.{module}')
        for key in [key for key in vars(found) if key.endswith('main_config')]:
            shorten(vars(found)[key])
        found.main()
        return
    if kind == 'main':
        found = importlib.import_module(f'dizoo.{module}')
        configs = [each for key, each in vars(found).items() if key.endswith('_config') and isinstance(each, dict)]
        config = next(each for each in configs if 'exp_name' in each)
        shorten(config)
        found.main(config)
        return
    found = importlib.import_module(f'dizoo.{module}')
    if kind == 'dist':
        run_dist(found.__file__)
        return
    entry = getattr(importlib.import_module('ding.entry'), kind)
    if kind in SEVERAL:
        entry((found.main_config, found.create_config, found.system_config), seed=0)
        return
    pair = (found.main_config, found.create_config)
    if kind in WHOLE:
        pair[0].policy.cuda = False
        pair[1].env_manager.type = 'base'
    else:
        shorten(*pair)
    if kind in ('serial_pipeline_sqil', 'serial_pipeline_dqfd'):
        import copy

        expert = copy.deepcopy(pair)
        pair[0].policy.collect.model_path = expert[0].policy.collect.model_path = expert_of(*expert)
        if kind == 'serial_pipeline_dqfd':
            pair[0].policy.learn.per_train_iter_k = 1
            expert[0].policy.learn.expert_replay_buffer_size = 64
        entry(pair, expert, seed=0, max_train_iter=ITERATIONS)
        return
    entry(pair, seed=0, max_train_iter=ITERATIONS)


def child(name: str, is_store: bool, result: str) -> None:
    """Run a case until it ends in this process, and write its result."""
    counts = dict(trained=0, plain_buffers=0)
    error = ''
    try:
        if is_store:
            from ding_store.hook import install

            install()
        (end_coordinator_early if name.partition('/')[0] in SEVERAL else end_early)(counts)
        count_plain_buffers(counts)
        run_case(name)
    except Done:
        pass
    except BaseException as e:  # noqa: BLE001 - any exception is the case's result
        traceback.print_exc()
        error = f'{type(e).__name__}: {e}'.strip().splitlines()[0][:200]
    Path(result).write_text(json.dumps({**counts, 'error': error}))


def run_forked(name: str, is_store: bool, limit_s: float, logs: Path) -> Dict[str, Any]:
    from ding_store.environment import read_environment, write_environment
    from ding_store.hook.usage import uses

    directory = Path(tempfile.mkdtemp(prefix='ding_store_breadth_'))
    side, began = 'store' if is_store else 'plain', time.monotonic()
    log = logs / f'{name.replace("/", "-")}-{side}.log'
    with uses() as used:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.chdir(directory)
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(out, 1)
                os.dup2(out, 2)
                write_environment(replace(read_environment(), uses=used.path))
                child(name, is_store, str(directory / 'result.json'))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(0)
        descriptor = os.pidfd_open(pid)
        is_over = bool(select.select([descriptor], [], [], limit_s)[0])
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # includes environments in other processes
        os.waitpid(pid, 0)
        said = used.summary().splitlines() if is_store else []
    file = directory / 'result.json'
    made = (
        json.loads(file.read_text()) if file.exists() else dict(trained=0, plain_buffers=0, error='its process crashed')
    )
    if not is_over:
        made['error'] = f'not over after {limit_s:g} s'
    shutil.rmtree(directory, ignore_errors=True)
    return {**made, 'seconds': round(time.monotonic() - began, 1), 'said': said}


def verdict(plain: Dict[str, Any], store: Dict[str, Any]) -> str:
    is_named = any('not on the store: ' in line for line in store['said'])
    is_on_store = any('on the store:' in line and 'replay' in line and 'not' not in line for line in store['said'])
    if plain['error'] and store['error']:
        return AS_PLAIN
    if store['error']:
        return ONLY_STORE
    if is_named:
        return NAMED
    if plain['plain_buffers'] and not is_on_store:
        return SILENT
    return WORKS


def remark(plain: Dict[str, Any], store: Dict[str, Any]) -> str:
    error = store['error'] or plain['error']
    if error:
        return re.sub(r'(/[^\s/:\'"]+){2,}', '...', error).replace('|', '/')
    named = [line.partition('not on the store: ')[2] for line in store['said'] if 'not on the store: ' in line]
    if named:
        return '; '.join(named)
    return '' if plain['plain_buffers'] else 'has no replay'


def page(results: Dict[str, Any], command: str) -> str:
    """Return the results as a Markdown table."""
    git = ['git', '-C', str(ROOT)]
    commit = subprocess.run([*git, 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True).stdout.strip()
    counts: Dict[str, int] = {}
    for each in results.values():
        counts[each['verdict']] = counts.get(each['verdict'], 0) + 1
    summary = ', '.join(f'{count} {name}' for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    lines = [
        f'`{command}` on {date.today()} at commit `{commit}`, DI-engine {version("DI-engine")}, '
        f'torch {version("torch")}, Python {platform.python_version()}, {os.cpu_count()} cores. '
        f'{len(results)} cases: {summary}.',
        '',
        '| case | verdict | seconds: plain | store | remark |',
        '|---|---|---|---|---|',
    ]
    for name, each in results.items():
        plain, store = each['plain'], each['store']
        cells = (f'`{name}`', each['verdict'], plain['seconds'], store['seconds'], remark(plain, store))
        lines.append(f'| {" | ".join(map(str, cells))} |')
    return '\n'.join(lines) + '\n'


def version(name: str) -> str:
    from importlib import metadata

    return metadata.version(name)


def write_page(path: Path, results: Dict[str, Any], command: str) -> None:
    """Write the tables that have results into a page. A table without results stays as it is."""
    several = {name: each for name, each in results.items() if name.partition('/')[0] in SEVERAL}
    others = {name: each for name, each in results.items() if name not in several}
    text = path.read_text()
    for begin, rows in ((BEGIN, others), (BEGIN_SEVERAL, several)):
        if rows:
            before, _, after = text.partition(begin)
            text = f'{before}{begin}\n{page(rows, command)}{END}{after.partition(END)[2]}'
    path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--only', metavar='NAME', action='append', help='run cases that match, e.g. example/dqn or main/*'
    )
    parser.add_argument('--list', action='store_true', help='only list the cases')
    parser.add_argument(
        '--limit', metavar='S', type=float, default=180.0, help='seconds per case (default: %(default)g)'
    )
    parser.add_argument(
        '--results', metavar='FILE', default='breadth.json', help='file of the results (default: %(default)s)'
    )
    parser.add_argument('--again', action='store_true', help='run cases again that have results')
    parser.add_argument(
        '--logs', metavar='DIR', default='breadth_logs', help='directory of the logs (default: %(default)s)'
    )
    parser.add_argument('--page', metavar='FILE', help='write the table into this page, and run nothing')
    options = parser.parse_args()
    file = Path(options.results)
    results: Dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if options.page:
        write_page(Path(options.page), results, 'python scripts/breadth.py')
        return 0
    names = [name for name in cases() if not options.only or any(fnmatch.fnmatch(name, only) for only in options.only)]
    if options.list:
        sys.stdout.write(''.join(f'{name}\n' for name in names))
        return 0
    from ding_store.launch.user_script import preload

    logs = Path(options.logs).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    preload()
    # Compile the loops once for the installation, so that no case's time includes it.
    code = 'from ding_store.buffer.kernels.load import load_kernels; load_kernels()'
    subprocess.run([sys.executable, '-c', code], check=True)

    for place, name in enumerate(names, 1):
        if name in results and not options.again:
            continue
        plain, store = (run_forked(name, is_store, options.limit, logs) for is_store in (False, True))
        results[name] = dict(verdict=verdict(plain, store), plain=plain, store=store)
        new = file.with_suffix('.new')
        new.write_text(json.dumps(results, indent=1))
        new.replace(file)
        sys.stdout.write(f'{place}/{len(names)} {name}: {results[name]["verdict"]}. {remark(plain, store)}\n')
        sys.stdout.flush()
    bad = [name for name, each in results.items() if each['verdict'] in (ONLY_STORE, SILENT)]
    for name in bad:
        sys.stdout.write(f'{results[name]["verdict"]}: {name}\n')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
