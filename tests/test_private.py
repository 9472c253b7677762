"""Directories are 0700 and files 0600, whatever the umask: see SECURITY.md."""

import os
from pathlib import Path
from typing import Iterator

import numpy as np
import pytest
import torch

from ding_store.buffer import Prioritized, RateLimiter, StoreBuffer, limited
from ding_store.checkpoint import CheckpointDir


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def assert_private(directory: Path) -> None:
    for path in [directory, *directory.rglob('*')]:
        expected = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & 0o777 == expected, path


def test_replay_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / 'replay'
    sampler = limited(Prioritized(), max_times_sampled=3)
    buffer = StoreBuffer(100, path=str(path), sampler=sampler, limiter=RateLimiter(1, max_insert=10, max_sample=4))
    buffer.extend({'x': np.arange(10)}, meta={'a': 1})
    buffer.sample_batch(4)
    buffer.update('9', buffer[0].data)
    buffer.resize(200)
    buffer.save_data(str(tmp_path / 'save'))
    buffer.load_data(str(tmp_path / 'save'))
    assert_private(path)
    buffer.close()
    assert_private(path)
    assert (tmp_path / 'save').stat().st_mode & 0o777 == 0o600


def test_checkpoint_files_are_private(tmp_path: Path) -> None:
    checkpoints = CheckpointDir(str(tmp_path / 'checkpoints'))
    for _ in range(2):
        checkpoints.begin()
        checkpoints.save(1, {'model': {'weight': torch.ones(3)}})
        checkpoints.save_best({'model': {'weight': torch.ones(3)}}, 1.0)
        checkpoints.finish('done')
    assert (tmp_path / 'checkpoints' / 'previous').is_dir()
    assert_private(tmp_path / 'checkpoints')
