"""Mains of dizoo_configs on a GPU, with checkpoints; what they began goes on on the CPU, and the other way round."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from needs import need_extra
from tiny import PIPELINES

SCRIPT = Path(__file__).with_name('train_on_gpu.py')


def train(directory: Path, name: str, device: str, train_iter: int) -> str:
    """What it said; its policies were on that device."""
    path = os.pathsep.join(each for each in (os.environ.get('PYTHONPATH'), *sys.path) if each)
    command = [sys.executable, str(SCRIPT), name, device, str(train_iter)]
    environment = {**os.environ, 'PYTHONPATH': path}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    used = json.loads(done.stdout.splitlines()[-1])
    assert used == ['cuda:0' if device == 'cuda' else 'cpu']
    return done.stdout + done.stderr


@pytest.mark.parametrize(('first', 'then'), [('cuda', 'cpu'), ('cpu', 'cuda')])
@pytest.mark.parametrize('name', ['cartpole_dqn', 'pong_r2d2'])
def test_main_resumes_on_another_device(tmp_path: Any, name: str, first: str, then: str) -> None:
    _, _, extra, module = PIPELINES[name]
    if extra:
        need_extra(module, extra)
    train(tmp_path, name, first, 4)
    said = train(tmp_path, name, then, 8)
    resumed = re.search(r'resuming from .*: train iteration (\d+)', said)
    assert resumed, said[-3000:]
    assert int(resumed[1]) >= 4
