"""
A whole run of a pipeline of tiny.py, ``same_draws.py NAME store|stock ENV_STEPS RECORD``, whose uniform sampler, the
store's or stock's, is replaced by one that draws the same places, counted from the oldest element, in both.
"""

import dataclasses
import importlib
import json
import sys
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


def main(name: str, kind: str, env_steps: int, record: Path) -> None:
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


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
