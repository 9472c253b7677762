"""Sequences out of a step-wise replay: sample_sequences beside the gather of as many rows, in turn."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, Callable, Dict

import numpy as np

from ding_store.buffer import SequencePrioritized, StoreBuffer

ENVS, EPISODE = 8, 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rows', type=int, default=400_000)
    parser.add_argument('--obs-bytes', type=int, default=1440, help='of float32, per row (default: %(default)s)')
    parser.add_argument('--length', type=int, default=40)
    parser.add_argument('--batch', type=int, default=32)
    parser.add_argument('--prioritized', action='store_true', help='by the priorities of their starts')
    parser.add_argument('--repeats', type=int, default=300)
    options = parser.parse_args()
    buffer = filled(options.rows, options.obs_bytes, SequencePrioritized(seed=0) if options.prioritized else None)
    columns, num_steps = buffer.table.columns, options.length * options.batch
    warm = {name: np.empty((num_steps, *column.shape[1:]), column.dtype) for name, column in columns.items()}
    random = np.random.default_rng(1)
    steps = np.arange(options.length)[:, None] * ENVS

    def gather() -> None:
        starts = random.integers(0, options.rows - int(steps[-1, 0]), options.batch)
        slots = (starts + steps).ravel()
        for name, column in columns.items():
            np.take(column, slots, axis=0, out=warm[name], mode='clip')

    gathers, samples = [], []
    for _ in range(options.repeats + 5):
        gathers.append(timed(gather))
        samples.append(timed(lambda: buffer.sample_sequences(options.batch, options.length, 'env')))
    limit, ours = statistics.median(gathers[5:]), statistics.median(samples[5:])
    print(f'{options.batch} sequences of {options.length} of {options.rows:,} rows of {buffer.table.row_bytes:,} bytes')
    print(f'gather limit {limit * 1e6:.0f} us, sample_sequences {ours * 1e6:.0f} us: {limit / ours:.2f} of the limit')
    return 0


def filled(num_rows: int, obs_bytes: int, sampler: Any) -> StoreBuffer:
    buffer, chunk = StoreBuffer(num_rows, seed=0, sampler=sampler), max(1, (64 << 20) // obs_bytes)
    frames = np.random.default_rng(0).random((min(chunk, num_rows), obs_bytes // 4), dtype=np.float32)
    for first in range(0, num_rows, chunk):
        rows = np.arange(first, min(first + chunk, num_rows))
        columns: Dict[str, np.ndarray] = {'obs': frames[: len(rows)], 'action': rows % 6, 'env': rows % ENVS}
        buffer.extend({**columns, 'done': rows // ENVS % EPISODE == EPISODE - 1})
    return buffer


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == '__main__':
    sys.exit(main())
