"""Loops that run in numpy because numba is told not to compile, as coverage and debuggers tell it."""

import os
import subprocess
import sys

BUFFER = """
import torch
from ding_store.buffer import Prioritized, StoreBuffer
buffer = StoreBuffer(50, sampler=Prioritized())
for i in range(60):
    buffer.push({'obs': torch.zeros(30000), 'env': torch.tensor(i % 2), 'done': torch.tensor(False)})
batch = buffer.sample_batch(8)
buffer.update_priorities(batch.rows, [1.0] * 8)
assert not buffer.sampler.priorities.is_compiled
print(tuple(buffer.sample_sequences(2, 3, 'env').data.obs.shape))
"""


def test_buffer_without_jit_runs_in_numpy() -> None:
    environment = {**os.environ, 'NUMBA_DISABLE_JIT': '1'}
    run = subprocess.run(
        [sys.executable, '-c', BUFFER], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout) == (0, '(3, 2, 30000)\n'), run.stderr
