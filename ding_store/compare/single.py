"""Measurement in one process: adds and samples of a replay in its steady state, at the ratio of the job."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

import numpy as np

from ding_store.compare.rows import Columns, Row
from ding_store.compare.units import PEERS, size_text
from ding_store.compare.worker import Effort, Worker, WorkerFailed
from ding_store.gc_freeze import leave_out_of_collections

PAGE_BYTES = 4096
#: Bytes of the elements that the store's pushes and both bounds read: more than caches hold.
SOURCE_BYTES = 256 << 20
#: Bytes of an element when a side is first loaded.
SMALL_BYTES = 1000


class Measured:
    """
    Overview:
        One side of one row, filled in the calling process. ``window`` runs the job for a while.
    """

    def __init__(self, row: Row, title: str, length: int) -> None:
        self._source = row.columns(max(4, min(length, _num_elements(row))), seed=2)
        self._row = row
        from ding_store.compare.sides import SIDES, Side

        _load(row.smaller(SMALL_BYTES), title)
        gc.collect()
        before = memory_bytes()
        self._side: Side = SIDES[title](row, length)
        gc.disable()
        self._side.fill(self._source)
        gc.enable()
        self.bytes_per_element = (memory_bytes() - before) / length
        # The fill's objects stay: collections need not visit them. DI-engine has millions of them, the store has few.
        leave_out_of_collections()
        self._bounds = Bounds(row, self._source)
        self._due = 0.0
        self._training: Any = None
        for _ in range(3):
            self._round([], [])

    def window(self, seconds: float) -> Dict[str, Any]:
        """
        Overview:
            Add and sample in turn for about this long, right after measuring the two bounds.
        Returns:
            - figures (:obj:`dict`): Counts and seconds of adds and samples, seconds per sample, bounds per second.
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
        """Train the row's policy on this replay. See ``training``."""
        if self._training is None:
            from ding_store.compare.training import Training

            self._training = Training(self._side)
        return self._training.window(seconds)

    def _round(self, adds: List[float], samples: List[float]) -> int:
        """Add as many elements as the job adds per sample, then sample once. Return the number of adds."""
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
    """Use a side once, so that imports and compiled code do not count as memory of its elements."""
    from ding_store.compare.sides import SIDES, Side

    side: Side = SIDES[title](row, 2 * row.batch)
    side.fill(row.columns(row.batch))
    side.push(side.elements(1))
    side.sample()


class Bounds:
    """Copy rates of this process: rows gathered at random into warm arrays, and single rows into warm columns."""

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
    """Return the resident bytes of this process, including the private files that it maps."""
    with open('/proc/self/statm') as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES


def summary(row: Row, windows: List[Dict[str, Any]], bytes_per_element: float) -> Dict[str, float]:
    """
    Overview:
        Return medians over windows. ``headroom`` is how many times the required adds and samples together fit into a
        second of the process. ``bound_headroom`` is the same for the two bounds.
    """
    adds = _median([w['num_adds'] / w['adds_s'] for w in windows if w['num_adds']])
    samples = _median([w['num_samples'] / w['samples_s'] for w in windows])
    gather, copy = _median([w['gather_per_s'] for w in windows]), _median([w['copy_per_s'] for w in windows])
    calls = np.concatenate([w['sample_calls_s'] for w in windows])
    p50, p90, p99 = np.percentile(calls, [50, 90, 99])
    return {
        'adds_per_s': adds,
        'samples_per_s': samples,
        'sample_bytes_per_s': samples * row.element_bytes,
        'headroom': headroom(row, adds, samples),
        'gather_per_s': gather,
        'copy_per_s': copy,
        'bound_headroom': headroom(row, copy, gather),
        'memory_per_element': bytes_per_element,
        'sample_p50_s': float(p50),
        'sample_p90_s': float(p90),
        'sample_p99_s': float(p99),
        'sample_max_s': float(calls.max()),
    }


def headroom(row: Row, adds_per_s: float, samples_per_s: float) -> float:
    """Return 1 / seconds that one second of the job's adds and samples takes at these rates, one after the other."""
    return 1 / (row.adds_per_s / adds_per_s + row.samples_per_s / samples_per_s)


def bound_headroom(row: Row, effort: Effort) -> float:
    """Return the headroom of a process that only copies: each element into a replay, each sample out of it."""
    worker = Worker('ding_store.compare.single:Bounds', row, timeout_s=effort.timeout_s)
    with contextlib.closing(worker):
        found = worker.call('measure', effort.seconds)
    return headroom(row, found['copy_per_s'], found['gather_per_s'])


def _median(values: List[float]) -> float:
    return float(np.median(values)) if values else math.nan


def interleaved(
    row: Row, length: int, titles: List[str], effort: Effort, train: bool, say: Callable[[str], None]
) -> Dict[str, Dict[str, Any]]:
    """
    Overview:
        Measure each side in its own process: fill one after the other, then measure windows in turn. If a side's
        process fails, the others go on.
    Arguments:
        - train (:obj:`bool`): True to train the row's policy as well.
    Returns:
        - sides (:obj:`dict`): Title -> figures of ``summary``, and with ``train`` those of ``training.Training``. A
          side that failed has only ``WorkerFailed.record``.
    """
    workers: Dict[str, Worker] = {}
    failed: Dict[str, Dict[str, Any]] = {}
    memory: Dict[str, float] = {}

    @contextlib.contextmanager
    def kept(title: str) -> Iterator[None]:
        try:
            yield
        except WorkerFailed as error:
            say(f'{PEERS[title]}: {error}')
            failed[title] = error.record
            workers.pop(title).close()

    def in_turn(name: str, what: str) -> Dict[str, List[Dict[str, Any]]]:
        found: Dict[str, List[Dict[str, Any]]] = {title: [] for title in titles}
        for number in range(effort.repeats):
            for title, worker in list(workers.items()):
                say(f'{PEERS[title]}: {what} {number + 1} of {effort.repeats}')
                with kept(title):
                    found[title].append(worker.call(name, effort.seconds))
        return found

    try:
        for title in titles:
            say(f'{PEERS[title]}: filling {length:,} x {size_text(row.element_bytes)}')
            workers[title] = Worker(
                'ding_store.compare.single:Measured', row, title, length, timeout_s=effort.timeout_s
            )
            with kept(title):
                memory[title] = workers[title].get('bytes_per_element')
        windows = in_turn('window', 'window')
        trained = in_turn('train', 'training, window') if train else {}
        sides = {}
        for title in titles:
            sides[title] = failed.get(title) or {
                **summary(row, windows[title], memory[title]),
                **_medians(trained.get(title, [])),
            }
        return sides
    finally:
        for worker in workers.values():
            worker.close()


def _medians(windows: List[Dict[str, float]]) -> Dict[str, float]:
    return {name: _median([window[name] for window in windows]) for name in (windows[0] if windows else ())}
