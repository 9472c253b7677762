"""
Where sampling ahead pays: a training step of about the time of a gather, with ``prefetch`` 0, 1 and 2.

    python scripts/prefetch.py [--seconds 2]

The step is a real one (forward, backward and SGD of an MLP on data of its own, one thread), repeated until it takes as
long as sampling does. ``bound`` is what perfect overlap would take: the longer of the two.
"""

import argparse
import time
from dataclasses import replace
from typing import Callable, List

import numpy as np
import torch

from ding_store.bench.workloads import WORKLOADS, Workload, size_text
from ding_store.buffer import StoreBuffer

_SHAPES = {'impala-atari': 16, 'r2d2-atari': 8, 'dqn-atari': 64, 'sac-mujoco': 256, 'small-1M': 512}


def workloads() -> List[Workload]:
    found = [replace(each, batch=_SHAPES[each.name]) for each in WORKLOADS if each.name in _SHAPES]
    # As many rows as leave the processor's caches behind, and no more: all are written first.
    return [replace(each, capacity=max(4 * each.batch, min(200_000, int(1e9 / each.row_bytes)))) for each in found]


def filled(workload: Workload, prefetch: int) -> StoreBuffer:
    buffer = StoreBuffer(workload.capacity, seed=0, prefetch=prefetch)
    step = max(1, min(workload.capacity, int(64e6 / workload.row_bytes)))
    columns = workload.columns(step)
    for _ in range(0, workload.capacity, step):
        buffer.extend(columns)
    return buffer


def training_step() -> Callable[[], None]:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer, data = torch.optim.SGD(model.parameters(), 1e-4), torch.randn(64, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def median_s(call: Callable[[], object], seconds: float) -> float:
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 10:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[len(taken) // 10 :]))


def measure(workload: Workload, seconds: float) -> str:
    step = training_step()
    buffers = {depth: filled(workload, depth) for depth in (0, 1, 2)}
    sample_s, step_s = median_s(lambda: buffers[0].sample_batch(workload.batch), seconds), median_s(step, seconds)
    repeats = max(1, round(sample_s / step_s))

    def iteration(buffer: StoreBuffer) -> None:
        batch = buffer.sample_batch(workload.batch)
        for _ in range(repeats):
            step()
        del batch

    train_s = median_s(lambda: [step() for _ in range(repeats)], seconds)
    taken = [median_s(lambda buffer=buffer: iteration(buffer), seconds) for buffer in buffers.values()]
    for buffer in buffers.values():
        buffer.close()
    times = [sample_s, train_s, max(sample_s, train_s), *taken]
    name = f'{workload.name} {size_text(workload.row_bytes)} x {workload.batch}'
    return f'{name:<30}' + ''.join(f'{1e3 * each:>10.3f}' for each in times) + f'{taken[0] / min(taken[1:]):>10.2f}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=float, default=2.0, help='per measurement')
    options = parser.parse_args()
    torch.set_num_threads(1)
    titles = ('sample', 'train', 'bound', 'ahead 0', 'ahead 1', 'ahead 2', 'speed-up')
    print(f'{"ms per iteration (median)":<30}' + ''.join(f'{title:>10}' for title in titles))
    for workload in workloads():
        print(measure(workload, options.seconds), flush=True)


if __name__ == '__main__':
    main()
