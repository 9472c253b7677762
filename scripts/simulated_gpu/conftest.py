"""Tests of what happens on a GPU, simulated or real: ``python scripts/simulated_gpu.py scripts/simulated_gpu``."""

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[2] / 'tests'
sys.path += [str(TESTS), str(TESTS / 'pipelines')]


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip('fewer than two GPUs: python scripts/simulated_gpu.py runs this')
