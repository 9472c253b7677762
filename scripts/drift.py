"""Whether the sums of priorities drift: so many updates of a buffer, then its tree beside one made of its leaves."""

from __future__ import annotations

import argparse
import math
import sys
import time

import numpy as np

from ding_store.buffer import Prioritized, StoreBuffer
from ding_store.buffer.sampling.sum_tree import SumTree

#: Rows per call: as large as a call may be before its fixed costs no longer show.
CHUNK = 1 << 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--updates', type=float, default=1e8, help='default: %(default)g')
    parser.add_argument('--rows', type=float, default=1e6, help='default: %(default)g')
    options = parser.parse_args()
    num_rows, num_updates = int(options.rows), int(options.updates)
    sampler = Prioritized(alpha=0.6, seed=0)
    buffer = StoreBuffer(num_rows, sampler=sampler)
    for first in range(0, num_rows, CHUNK):
        buffer.extend({'x': np.arange(first, min(first + CHUNK, num_rows), dtype=np.float32)})
    random, done, begin = np.random.default_rng(0), 0, time.perf_counter()
    while done < num_updates:
        count = min(CHUNK, num_updates - done)
        # Twelve orders of magnitude, so that sums that are added to would lose the small ones.
        buffer.update_priorities(random.integers(0, num_rows, count), 10 ** random.uniform(-6, 6, count))
        done += count
    seconds = time.perf_counter() - begin
    tree = sampler._tree
    fresh = SumTree(num_rows)
    fresh.rebuild(tree.masses[:num_rows])
    exact = math.fsum(tree.masses[:num_rows].tolist())
    is_same = all((ours == theirs).all() for ours, theirs in ((tree._sums, fresh._sums), (tree._minima, fresh._minima)))
    path = 'numba' if sampler.is_compiled else 'numpy'
    print(f'{done:,} updates of {num_rows:,} rows in {seconds:.0f} s ({path}), random numbers included')
    print(f'every sum and minimum as in a tree made anew of the leaves, to the last bit: {"yes" if is_same else "NO"}')
    print(f'total beside the exact sum: relative difference {abs(tree.total / exact - 1):.1e}')
    return 0 if is_same else 1


if __name__ == '__main__':
    sys.exit(main())
