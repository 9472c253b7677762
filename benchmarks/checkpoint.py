"""Benchmark of checkpoints: how long one stalls training, compared with a blocking torch.save of the same state."""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

from ding_store.checkpoint import Saver, write_state
from ding_store.compare.scratch import scratch
from ding_store.launch.progress import table

#: Layers of the model. Weights and biases make as many tensors as an actor-critic of ResNets has in its state.
_NUM_LAYERS = 25


class Policy:
    """Model, target model and Adam, trained on the CPU. ``total_bytes`` is the size of the whole state."""

    def __init__(self, total_bytes: int) -> None:
        # A state has four tensors per parameter: model, target, and two moments.
        width = max(8, int((total_bytes / 4 / 4 / _NUM_LAYERS) ** 0.5))
        layers = [layer for _ in range(_NUM_LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers)
        self.target = copy.deepcopy(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self._batch = torch.randn(64, width)

    def state(self) -> Dict[str, Any]:
        parts: Dict[str, Any] = dict(model=self.model, target_model=self.target, optimizer=self.optimizer)
        return {name: part.state_dict() for name, part in parts.items()}

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).pow(2).mean().backward()
        self.optimizer.step()

    @property
    def num_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters()) * 4


def main(megabytes: float, repeats: int, directory: Optional[str], json_path: Optional[str]) -> int:
    """
    Overview:
        Train a policy with a state of this many MB, and checkpoint it. Figures are medians over ``repeats``.
    """
    with scratch(directory or os.getcwd()) as folder:
        figures = measure(Policy(int(megabytes * 1e6)), folder, repeats)
    if json_path:
        Path(json_path).write_text(json.dumps(figures))
    sys.stdout.write(
        f'python -m benchmarks checkpoint --megabytes {megabytes:g} --repeats {repeats}: '
        f'{figures["state_mb"]:.0f} MB, {torch.get_num_threads()} threads; medians\n' + render(figures) + '\n'
    )
    return 0


def measure(policy: Policy, folder: str, repeats: int) -> Dict[str, float]:
    path = os.path.join(folder, 'iteration_0.pth.tar')
    policy.train()
    usual = [_timed(policy.train) for _ in range(max(3, repeats))]
    saver, stalls, copying, beside, written = Saver([policy.optimizer]), [], [], [], []
    blocking = []
    for i in range(repeats + 1):
        # Measure both in turn, so that other load on the machine slows both.
        blocking.append(_timed(lambda: torch.save(policy.state(), path)))
        slower, written_s = _checkpoint(saver, policy, path)
        if i == 0:
            first_s = saver.copying_s + saver.waiting_s  # its memory is touched for the first time
            continue
        stalls.append(saver.copying_s + saver.waiting_s)
        copying.append(saver.copying_s)
        beside.append(statistics.mean(slower))
        written.append(written_s)
    median = statistics.median
    return dict(
        state_mb=policy.num_bytes / 1e6,
        blocking_s=median(blocking[1:]),
        stall_s=median(stalls),
        fraction=median(stalls) / median(blocking[1:]),
        copying_s=median(copying),
        first_stall_s=first_s,
        iteration_s=median(usual),
        iteration_beside_s=median(beside),
        written_s=median(written),
    )


def render(figures: Dict[str, float]) -> str:
    rows = {
        'blocking torch.save (ms)': 'blocking_s',
        'stall per checkpoint (ms)': 'stall_s',
        '  of it before training goes on': 'copying_s',
        'stall of the first one (ms)': 'first_stall_s',
        'iteration (ms)': 'iteration_s',
        'iteration beside a checkpoint (ms)': 'iteration_beside_s',
        'until it is on the disk (ms)': 'written_s',
    }
    cells = {name: f'{1e3 * figures[key]:.1f}' for name, key in rows.items()}
    return table([('ding_store', {**cells, 'stall / torch.save': f'{figures["fraction"]:.1%}'})])


def _checkpoint(saver: Saver, policy: Policy, path: str) -> Any:
    """Return the durations of the iterations during a checkpoint, and the seconds until it was on the disk."""
    begin = time.perf_counter()
    saver.save(policy.state(), lambda state: write_state(path, state))
    durations: List[float] = []
    while saver.is_busy or not durations:
        durations.append(_timed(policy.train))
    return durations, time.perf_counter() - begin


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
