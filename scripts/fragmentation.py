"""
Show how much space the file of packets loses between packets, when many come and leave in their order.

    python scripts/fragmentation.py --steps 1000000

Sizes are log-uniform, as those of a memory bank are. The result is the largest size of the file, divided by the largest
size of the packets in it.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from typing import Deque, Tuple

import numpy as np

from ding_store.buffer.elements.extents import Extents

#: Packets begin at multiples of this.
ALIGNMENT = 64


def measure(steps: int, rows: int, low: int, high: int, seed: int) -> Tuple[float, int]:
    """Return the ratio, and the largest number of free extents."""
    sizes = np.exp(np.random.default_rng(seed).uniform(np.log(low), np.log(high), steps)).astype(np.int64)
    extents = Extents()
    held: Deque[Tuple[int, int]] = deque()
    used = largest_used = largest_end = most_free = 0
    for size in (-(-sizes // ALIGNMENT) * ALIGNMENT).tolist():
        held.append((extents.allocate(size), size))
        used += size
        # As in a full buffer: the packet of a new row is written before the oldest row leaves.
        largest_used, largest_end = max(largest_used, used), max(largest_end, extents.end)
        most_free = max(most_free, len(extents._starts))
        if len(held) > rows:
            start, freed = held.popleft()
            extents.free(start, freed)
            used -= freed
    return largest_end / largest_used, most_free


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=1_000_000, help='packets that come (default: %(default)s)')
    parser.add_argument('--rows', type=int, default=2000, help='packets that are kept (default: %(default)s)')
    parser.add_argument('--low', type=int, default=10_000, help='least bytes of a packet (default: %(default)s)')
    parser.add_argument('--high', type=int, default=1_000_000, help='most bytes of a packet (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the sizes (default: %(default)s)')
    options = parser.parse_args()
    ratio, most_free = measure(options.steps, options.rows, options.low, options.high, options.seed)
    sys.stdout.write(
        f'{options.steps} packets, {options.rows} at a time: the file is {ratio:.3f} times as large as its packets at '
        f'most, with {most_free} free extents at most\n'
    )
    return 0


if __name__ == '__main__':
    sys.exit(main())
