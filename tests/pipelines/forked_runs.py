"""
Runs pipelines of tiny.py, forked from this process, which has imported everything: NAME:store or NAME:stock in one
process, NAME:workers for stock in several, which DI-engine starts, NAME:serial for the store in DI-engine's config
pipeline ... In a directory per run, with its output in ``out`` and what came of it in ``record.0.json``, the learner's,
and one for each other node.
"""

import functools
import importlib
import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path

import ding.config.config
import torch
import torch._dynamo  # noqa: F401 - the first optimizer imports it: more than a second, in every process
from ding.entry import serial_pipeline
from ding.framework import Parallel, parallel, task
from ding.framework.middleware import ModelExchanger
from ding.utils import POLICY_REGISTRY, SumSegmentTree
from mpire.pool import WorkerPool
from tiny import PIPELINES, options, serial_options

from dizoo_configs.command import Options, run

#: Longer than any of them takes, ten times; and than four of the waits of stock whose messages were lost.
LIMIT_S = 300.0
NUM_WORKERS = 4
STORE = ('ding_store.buffer', 'ding_store.storage')


def run_main(name: str, is_stock: bool, parallel_workers: int = 1) -> None:
    given = options(name, stock=is_stock, max_train_iter=6, parallel_workers=parallel_workers)
    run(functools.partial(watched_main, name), given)


def watched_main(name: str, given: Options) -> None:
    main = importlib.import_module(f'dizoo_configs.{PIPELINES[name][0]}').main
    record = {'losses': [], 'env_step': 0, 'train_iter': 0, 'models': 0}

    def watch(ctx) -> None:
        outputs = ctx.train_output or []
        outputs = [outputs] if isinstance(outputs, dict) else outputs  # of DI-engine's trainer for one update
        record['losses'] += [float(output['total_loss']) for output in outputs if 'total_loss' in output]
        record.update(env_step=int(ctx.env_step), train_iter=int(ctx.train_iter))
        record['evaluation'] = float(ctx.last_eval_value)
        record['modules'] = [module for module in STORE if module in sys.modules]

    stock_run, take_model = task.run, ModelExchanger._cache_state_dict

    def watched() -> None:
        task.use(watch)
        if given.parallel_workers > 1:
            wait_for_others(given.parallel_workers)
        stock_run()

    def counted(self, state_dict) -> None:
        record['models'] += 1
        take_model(self, state_dict)

    task.run, ModelExchanger._cache_state_dict = watched, counted
    main(given)
    Path(f'record.{task.router.node_id or 0}.json').write_text(json.dumps(record))


def wait_for_others(number: int) -> None:
    """Until all have subscribed: what is sent to one that has not is lost, and stock waits a minute for it, or two."""
    Path(f'ready.{task.router.node_id}').touch()
    deadline = time.monotonic() + LIMIT_S
    while len(list(Path().glob('ready.*'))) < number:
        assert time.monotonic() < deadline, 'not all workers have come'
        time.sleep(0.02)


def run_serial(name: str) -> None:
    module = importlib.import_module(f'dizoo_configs.{PIPELINES[name][0]}')
    main_config, create_config = serial_options(name).configs(module.CONFIGS[0])
    kind = POLICY_REGISTRY.get(create_config.policy.type)
    record, train = {'losses': [], 'batches': []}, kind._forward_learn

    @functools.wraps(train)
    def watched(policy, batch):
        record['batches'].append(type(batch).__name__)
        output = train(policy, batch)
        record['losses'].append(float(output['total_loss']))
        return output

    kind._forward_learn = watched
    serial_pipeline((main_config, create_config), seed=0, max_train_iter=6)
    result = pickle.loads(Path(main_config.exp_name, 'result.pkl').read_bytes())  # noqa: S301 - written just now
    record.update(env_step=int(result['env_step']), train_iter=int(result['train_iter']))
    Path('record.0.json').write_text(json.dumps(record))


def forked(job: str) -> int:
    name, _, kind = job.partition(':')
    directory = Path(f'{name}-{kind}')
    directory.mkdir()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # it can be ended with all of its workers
    parallel.random.seed()  # of their addresses
    os.chdir(directory)
    out = os.open('out', os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        if kind == 'serial':
            run_serial(name)
        elif kind == 'workers':
            run_main(name, is_stock=True, parallel_workers=NUM_WORKERS)
        else:
            run_main(name, is_stock=kind == 'stock')
    except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    if any(job.endswith((':stock', ':workers')) and not job.startswith('cartpole') for job in sys.argv[1:]):
        SumSegmentTree(2)  # of stock prioritized replay: numba compiles it for seconds
    # Its workers are forked, too, and begin at once.
    parallel.WorkerPool = lambda **given: WorkerPool(**{**given, 'start_method': 'fork'})
    Parallel.runner = functools.partial(Parallel.runner, startup_interval=0)
    ding.config.config.save_config_py = lambda *args, **kwargs: None  # formatting one takes longer than the run
    for name in {PIPELINES[job.partition(':')[0]][0] for job in sys.argv[1:]}:
        importlib.import_module(f'dizoo_configs.{name}')
    # The first of SMAX compiles its battle, and the others load it: they come last.
    smax = [job for job in sys.argv[1:] if job.startswith('smax')]
    waiting, running = [*smax[:1], *(job for job in sys.argv[1:] if job not in smax), *smax[1:]], {}
    while waiting or running:
        while waiting and len(running) < 2:
            job = waiting.pop(0)
            running[forked(job)] = (job, time.monotonic())
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.pop(pid)
            continue
        for pid, (job, began) in running.items():
            if time.monotonic() - began > LIMIT_S:
                os.killpg(pid, 9)
                with open(Path(job.replace(':', '-'), 'out'), 'a') as out:
                    out.write(f'killed after {LIMIT_S:.0f} s\n')
        time.sleep(0.02)


if __name__ == '__main__':
    main()
