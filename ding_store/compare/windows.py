"""Windows of both sides in turn, and their summary."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Dict, List

import numpy as np

from ding_store.compare.rows import Row
from ding_store.compare.units import size_text
from ding_store.compare.worker import Worker


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


def bound_headroom(row: Row, seconds: float) -> float:
    """Return the headroom of a process that only copies: each element into a replay, each sample out of it."""
    with contextlib.closing(Worker('ding_store.compare.single:Bounds', row)) as worker:
        found = worker.call('measure', seconds)
    return headroom(row, found['copy_per_s'], found['gather_per_s'])


def _median(values: List[float]) -> float:
    return float(np.median(values)) if values else math.nan


def interleaved(
    row: Row, length: int, titles: List[str], repeats: int, seconds: float, train: bool, say: Callable[[str], None]
) -> Dict[str, Dict[str, float]]:
    """
    Overview:
        Measure each side in its own process: fill one after the other, then measure windows in turn.
    Arguments:
        - train (:obj:`bool`): True to train the row's policy as well.
    Returns:
        - sides (:obj:`dict`): Title -> figures of ``summary``, and with ``train`` those of ``training.Training``.
    """
    workers: Dict[str, Worker] = {}
    windows: Dict[str, List[Dict[str, Any]]] = {title: [] for title in titles}
    memory: Dict[str, float] = {}
    try:
        for title in titles:
            say(f'{title}: filling {length:,} x {size_text(row.element_bytes)}')
            workers[title] = Worker('ding_store.compare.single:Measured', row, title, length)
            memory[title] = workers[title].get('bytes_per_element')
        for number in range(repeats):
            for title in titles:
                say(f'{title}: window {number + 1} of {repeats}')
                windows[title].append(workers[title].call('window', seconds))
        trained = _train(workers, repeats, seconds, say) if train else {}
    finally:
        for worker in workers.values():
            worker.close()
    return {title: {**summary(row, windows[title], memory[title]), **trained.get(title, {})} for title in titles}


def _train(
    workers: Dict[str, Worker], repeats: int, seconds: float, say: Callable[[str], None]
) -> Dict[str, Dict[str, float]]:
    windows: Dict[str, List[Dict[str, float]]] = {title: [] for title in workers}
    for number in range(repeats):
        for title, worker in workers.items():
            say(f'{title}: training, window {number + 1} of {repeats}')
            windows[title].append(worker.call('train', seconds))
    return {
        title: {name: _median([window[name] for window in each]) for name in each[0]} for title, each in windows.items()
    }
