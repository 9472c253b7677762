"""Workloads of the replay benchmark: elements with the structure and size of real ones, filled with random bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Tuple

import numpy as np

from ding_store.compare.units import size_text

Leaves = Dict[str, Tuple[type, Tuple[int, ...]]]


@dataclass(frozen=True)
class Workload:
    """
    Overview:
        Replay to measure.
    Arguments:
        - leaves (:obj:`dict`): Name -> (dtype, shape) of one element's leaf.
        - capacity (:obj:`int`): Rows. If rows are large, only as many as the steady state needs.
        - batch (:obj:`int`): Rows per sample.
        - kind (:obj:`str`): 'uniform', 'prioritized' or 'fifo'.
    """

    name: str
    leaves: Leaves
    capacity: int
    batch: int
    kind: str

    @property
    def row_bytes(self) -> int:
        return sum(int(np.dtype(dtype).itemsize * np.prod(shape, dtype=int)) for dtype, shape in self.leaves.values())

    @property
    def title(self) -> str:
        return f'{self.name}: {size_text(self.row_bytes)} x {self.capacity:,}, batch {self.batch}, {self.kind}'

    def columns(self, count: int, seed: int = 0) -> Dict[str, np.ndarray]:
        """Return ``count`` rows of random bytes, as columns ``(count, *leaf)``."""
        rng = np.random.default_rng(seed)
        columns = {}
        for name, (dtype, shape) in self.leaves.items():
            kind: np.dtype = np.dtype(dtype)
            size = (count, *shape)
            if kind.kind == 'f':
                columns[name] = rng.random(size, dtype=kind if kind.itemsize >= 4 else np.float32).astype(kind)
            elif kind.kind == 'b':
                columns[name] = rng.random(size) < 0.01
            else:
                columns[name] = rng.integers(0, np.iinfo(kind).max, size, dtype=kind)
        return columns


def _transition(obs: Tuple[type, Tuple[int, ...]], action: Tuple[type, Tuple[int, ...]]) -> Leaves:
    return {
        'obs': obs,
        'next_obs': obs,
        'action': action,
        'reward': (np.float32, (1,)),
        'done': (np.bool_, ()),
        'value_gamma': (np.float32, (1,)),
        'collect_train_iter': (np.int64, (1,)),
        'env_data_id': (np.int64, (1,)),
    }


def _sequence(length: int, obs: Tuple[int, ...]) -> Leaves:
    return {
        'obs': (np.uint8, (length, *obs)),
        'action': (np.int64, (length,)),
        'reward': (np.float32, (length, 1)),
        'done': (np.bool_, (length,)),
        'prev_state': (np.float32, (2, 512)),
    }


_SMALL = _transition((np.float32, (8,)), (np.float32, (2,)))

WORKLOADS: List[Workload] = [
    Workload('dqn-atari', _transition((np.uint8, (8, 84, 84)), (np.int64, ())), 8_000, 64, 'prioritized'),
    Workload('r2d2-atari', _sequence(354, (4, 84, 84)), 128, 32, 'prioritized'),
    Workload('impala-atari', _sequence(106, (4, 84, 84)), 384, 32, 'fifo'),
    Workload('sac-mujoco', _transition((np.float32, (360,)), (np.float32, (3,))), 200_000, 64, 'uniform'),
    Workload('small-1M', _SMALL, 1_000_000, 64, 'uniform'),
    Workload('small-per', _SMALL, 400_000, 64, 'prioritized'),
    Workload('small-per-512', _SMALL, 400_000, 512, 'prioritized'),
    Workload('small-per-10M', _SMALL, 10_000_000, 64, 'prioritized'),
]


def scaled(workload: Workload, factor: float) -> Workload:
    """Return the workload with fewer or more rows."""
    return replace(workload, capacity=max(2 * workload.batch, int(workload.capacity * factor)))
