"""How fast a table is saved: save_data beside plain writes of as many bytes to the same disk, in turn."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from typing import Callable

import numpy as np

from ding_store.buffer import StoreBuffer

BLOCK = 8 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--gb', type=float, default=4.0, help='payload (default: %(default)g)')
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--directory', help='on the disk to be measured (default: the temporary one)')
    options = parser.parse_args()
    row_bytes = 4 * 84 * 84 * 2
    num_rows = int(options.gb * 1e9 / row_bytes)
    buffer = StoreBuffer(num_rows)
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (256, 2, 4, 84, 84), dtype=np.uint8)
    for first in range(0, num_rows, 256):
        count = min(256, num_rows - first)
        buffer.extend({'obs': frames[:count, 0], 'next_obs': frames[:count, 1]})
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = os.path.join(directory, 'file')
        saves, writes = [], []
        for _ in range(options.repeats):
            writes.append(timed(lambda: write(path, num_rows * row_bytes), path))
            saves.append(timed(lambda: buffer.save_data(path), path))
    size = num_rows * row_bytes / 1e9
    save, plain = statistics.median(saves), statistics.median(writes)
    print(
        f'{num_rows:,} rows of {row_bytes:,} bytes, {size:.2f} GB, both ending with fsync; medians of {options.repeats}'
    )
    print(f'plain writes {plain:.2f} s ({size / plain:.2f} GB/s), save_data {save:.2f} s ({size / save:.2f} GB/s)')
    print(f'save_data at {plain / save:.2f} of plain writes')
    return 0


def timed(call: Callable[[], None], path: str) -> float:
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    os.unlink(path)
    return seconds


def write(path: str, num_bytes: int) -> None:
    block = np.random.default_rng(1).bytes(BLOCK)
    with open(path, 'wb', buffering=0) as file:
        for first in range(0, num_bytes, BLOCK):
            file.write(memoryview(block)[: min(BLOCK, num_bytes - first)])
        os.fsync(file.fileno())


if __name__ == '__main__':
    sys.exit(main())
