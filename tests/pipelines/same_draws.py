"""
Run pipelines of tiny.py with and without the store: ``same_draws.py NAME:ENV_STEPS ...``.

The uniform sampler of both buffers is replaced by one that draws the same places, counted from the oldest element. Each
run is a fork of this process, which has imported everything. The directory ``NAME-store`` or ``NAME-stock`` gets its
output in ``out``, and its losses and draws in ``record.json``.
"""

import dataclasses
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import ding.config.config
import numpy as np
import torch
from ding.data import DequeBuffer
from ding.framework import task
from tiny import PIPELINES, options

from ding_store.buffer.samplers.uniform import Uniform

draws = np.random.RandomState(7)
drawn = []


def places(count: int, size: int) -> np.ndarray:
    chosen = draws.permutation(count)[:size]
    drawn.append([count, *chosen.tolist()])
    return chosen


def of_stock(self: Any, size: int, **_: Any) -> list:
    items = list(self.storage)
    return [items[place] for place in places(len(items), size)]


def of_store(self: Any, index: Any, size: int, *_: Any) -> np.ndarray:
    slots = index.slots_by_age()
    return slots[places(len(slots), size)].astype(np.intp)


def run_one(name: str, kind: str, env_steps: int, record: Path) -> None:
    DequeBuffer.sample, Uniform.choose = of_stock, of_store
    ding.config.config.save_config_py = lambda *args, **kwargs: None
    losses, run = [], task.run

    def watch(ctx: Any) -> None:
        losses.extend(float(output['total_loss']) for output in ctx.train_output or [])

    def watched() -> None:
        task.use(watch)
        run()

    task.run = watched
    torch.set_num_threads(1)
    given = options(name, stock=kind == 'stock', seed=3, max_env_step=env_steps)
    # So small that most elements leave again.
    small = {'policy.other.replay_buffer.replay_buffer_size': 100, 'policy.eval.evaluator.eval_freq': 10**9}
    given = dataclasses.replace(given, settings=(*given.settings, *small.items()))
    importlib.import_module(f'dizoo_configs.{PIPELINES[name][0]}').main(given)
    record.write_text(json.dumps({'losses': losses, 'drawn': drawn}))


def forked(name: str, kind: str, env_steps: int) -> int:
    """Start a run in a process of its own, and return its process id."""
    directory = Path(f'{name}-{kind}')
    directory.mkdir()
    pid = os.fork()
    if pid:
        return pid
    os.chdir(directory)
    out = os.open('out', os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        run_one(name, kind, env_steps, Path('record.json'))
    except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    wanted = [job.split(':') for job in sys.argv[1:]]
    for name, _ in wanted:
        importlib.import_module(f'dizoo_configs.{PIPELINES[name][0]}')
    for name, env_steps in wanted:
        for pid in [forked(name, kind, int(env_steps)) for kind in ('store', 'stock')]:
            os.waitpid(pid, 0)


if __name__ == '__main__':
    main()
