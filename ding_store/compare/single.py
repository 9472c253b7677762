"""One process: adds and samples of one replay in its steady state, at the ratio that the job requires."""

from __future__ import annotations

import gc
import time
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from ding_store.compare.rows import Columns, Row
from ding_store.compare.sides import SIDES, Side

PAGE_BYTES = 4096
#: Elements from which the store's pushes and both bounds are taken: more than caches hold.
SOURCE_BYTES = 256 << 20
#: Of the elements that a side is tried with.
SMALL_BYTES = 1000


class Measured:
    """
    Overview:
        One side of one row, filled, in the process that called. ``window`` runs the job for a while.
    """

    def __init__(self, row: Row, title: str, length: int) -> None:
        self._source = row.columns(max(4, min(length, _num_elements(row))), seed=2)
        self._row = row
        _load(row.smaller(SMALL_BYTES), title)
        gc.collect()
        before = memory_bytes()
        self._side: Side = SIDES[title](row, length)
        gc.disable()
        self._side.fill(self._source)
        gc.enable()
        self.bytes_per_element = (memory_bytes() - before) / length
        # The fill's objects stay: collections need not look at them again. Stock has millions, the store has few.
        gc.freeze()
        self._bounds = Bounds(row, self._source)
        self._due = 0.0
        self._training: Any = None
        for _ in range(3):
            self._round([], [])

    def window(self, seconds: float) -> Dict[str, Any]:
        """
        Overview:
            Adds and samples in turn, for about so long, and the two bounds right before.
        Returns:
            - figures (:obj:`dict`): Counts and seconds of adds and samples, each sample's seconds, bounds per second.
        """
        adds: List[float] = []
        samples: List[float] = []
        num_adds = 0
        bounds = self._bounds.measure(seconds / 4)
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline or len(samples) < 3:
            num_adds += self._round(adds, samples)
        return {
            'num_adds': num_adds,
            'adds_s': sum(adds),
            'num_samples': len(samples) * self._row.batch,
            'samples_s': sum(samples),
            'sample_calls_s': samples,
            'count': self._side.count(),
            **bounds,
        }

    def train(self, seconds: float) -> Dict[str, float]:
        """Iterations of the row's policy on this replay; see ``training``."""
        if self._training is None:
            from ding_store.compare.training import Training

            self._training = Training(self._side)
        return self._training.window(seconds)

    def _round(self, adds: List[float], samples: List[float]) -> int:
        """As many adds as the job makes per sample, then one sample."""
        self._due += self._row.batch * self._row.adds_per_s / self._row.samples_per_s
        count = int(self._due)
        self._due -= count
        elements = self._side.elements(count)
        begin = time.perf_counter()
        self._side.push(elements)
        middle = time.perf_counter()
        batch = self._side.sample()
        samples.append(time.perf_counter() - middle)
        adds.append(middle - begin)
        del batch
        return count


def _num_elements(row: Row) -> int:
    return max(4, SOURCE_BYTES // row.element_bytes)


def _load(row: Row, title: str) -> None:
    """What a side imports and compiles at its first use is no memory of its elements."""
    side: Side = SIDES[title](row, 2 * row.batch)
    side.fill(row.columns(row.batch))
    side.push(side.elements(1))
    side.sample()


class Bounds:
    """What this process can copy: rows gathered at random into warm arrays, and single rows into warm columns."""

    def __init__(self, row: Row, source: Optional[Columns] = None) -> None:
        self._row, self._source = row, row.columns(_num_elements(row)) if source is None else source
        self._count = len(next(iter(self._source.values())))
        self._warm = {path: np.empty((row.batch, *each.shape[1:]), each.dtype) for path, each in self._source.items()}
        self._rng = np.random.default_rng(1)

    def measure(self, seconds: float) -> Dict[str, float]:
        return {
            'gather_per_s': self._row.batch / _median_s(self._gather, seconds / 2),
            'copy_per_s': 1 / _median_s(self._copy, seconds / 2),
        }

    def _gather(self) -> None:
        rows = self._rng.integers(0, self._count, self._row.batch)
        for path, column in self._source.items():
            np.take(column, rows, axis=0, out=self._warm[path], mode='clip')

    def _copy(self) -> None:
        to, origin = self._rng.integers(0, self._count, 2)
        for column in self._source.values():
            column[to] = column[origin]


def _median_s(call: Callable[[], None], seconds: float) -> float:
    call()
    calls: List[float] = []
    deadline = time.perf_counter() + seconds
    while len(calls) < 3 or time.perf_counter() < deadline:
        begin = time.perf_counter()
        call()
        calls.append(time.perf_counter() - begin)
    return float(np.median(calls))


def memory_bytes() -> int:
    """Of this process: its own pages, and what it maps of files that nobody else can open."""
    with open('/proc/self/statm') as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES
