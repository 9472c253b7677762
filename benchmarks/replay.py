"""Benchmark of replay buffers: push, sample and priority update, with the limits of one process, and with peers."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

import numpy as np

from benchmarks.buffers import BUFFERS, MODULES, Columns, Ours, tree_of
from benchmarks.output import say, show
from benchmarks.workloads import WORKLOADS, Workload, scaled
from ding_store.compare.units import size_text
from ding_store.errors import ConfigError
from ding_store.free_space import available_memory

#: Rows that are pushed into the full buffer, to measure the steady state.
NUM_PUSHED = 256
FILL_CHUNK_BYTES = 64 << 20
#: Minimum number of parts of a fill. After each part the time and memory of the rest are estimated.
FILL_PARTS = 50
#: Maximum number of timed calls.
MAX_CALLS = 5000


class NotFilled(Exception):
    """A buffer cannot hold so many rows in free memory, or takes too long to fill."""


class Timing:
    """
    Overview:
        Times of single calls in seconds. Rates use the median, because these machines have other load.
    """

    def __init__(self, calls: Sequence[float], rows_per_call: int) -> None:
        self._calls = np.asarray(calls)
        self._rows = rows_per_call

    def record(self, row_bytes: int, limit: Optional[float]) -> Dict[str, float]:
        median, p90, p99 = np.percentile(self._calls, [50, 90, 99])
        rate = self._rows / median
        result = {'elements_per_s': rate, 'gb_per_s': rate * row_bytes / 1e9}
        result.update(median_s=median, p90_s=p90, p99_s=p99, max_s=float(self._calls.max()))
        if limit:
            result['fraction_of_limit'] = rate / limit
        return result


def timed(call: Callable[[int], Any], budget_s: float, least: int = 20, most: int = MAX_CALLS) -> List[float]:
    """
    Return durations of single calls until the budget is spent, at least ``least``. The first five are not counted.
    """
    for i in range(5):
        call(i)
    calls: List[float] = []
    deadline = time.perf_counter() + budget_s
    while len(calls) < most and (len(calls) < least or time.perf_counter() < deadline):
        begin = time.perf_counter()
        call(len(calls))
        calls.append(time.perf_counter() - begin)
    return calls


def gather_limit(workload: Workload, columns: Columns, budget_s: float) -> float:
    """Return rows/s of ``np.take(column, rows, axis=0, out=warm, mode='clip')`` over all leaves, of random rows."""
    rng = np.random.default_rng(1)
    count = len(columns['reward'])
    warm = {name: np.empty((workload.batch, *column.shape[1:]), column.dtype) for name, column in columns.items()}
    # Take different rows in every call, as a sampler does. A few sets of rows would stay in the cache.
    rows = rng.integers(0, count, (MAX_CALLS, workload.batch))

    def gather(i: int) -> None:
        for name, column in columns.items():
            np.take(column, rows[i], axis=0, out=warm[name], mode='clip')

    return workload.batch / float(np.median(timed(gather, budget_s)))


def copy_limit(columns: Columns, source: Columns, rows: int, budget_s: float) -> float:
    """Return rows/s of copying ``rows`` consecutive rows, leaf by leaf, into columns that are in memory already."""
    count, num_source = len(columns['reward']), len(source['reward'])

    def copy(i: int) -> None:
        to, start = i * rows % (count - rows + 1), i * rows % (num_source - rows + 1)
        for name, column in columns.items():
            column[to : to + rows] = source[name][start : start + rows]

    return rows / float(np.median(timed(copy, budget_s)))


def measure(
    workload: Workload, titles: Iterable[str], budget_s: float, say: Callable[[str], None], fill_s: float
) -> Dict[str, Any]:
    """Return all figures of a workload: the limits, and a record per buffer. A peer has ``fill_s`` seconds to fill."""
    source = workload.columns(min(NUM_PUSHED, workload.capacity), seed=2)
    limits = _limits(workload, source, budget_s)
    result: Dict[str, Any] = {'workload': workload.title, 'row_bytes': workload.row_bytes, **limits, 'buffers': {}}
    for title in titles:
        say(f'{workload.name}: {title}')
        try:
            patience = None if title == Ours.title else fill_s
            result['buffers'][title] = _measure_buffer(BUFFERS[title], workload, source, limits, budget_s, patience)
        except NotFilled as reason:
            result['buffers'][title] = {'left_out': str(reason)}
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and the others still count
            if title == Ours.title:
                raise
            result['buffers'][title] = {'error': f'{type(error).__name__}: {error}'}
        gc.collect()
    return result


def _limits(workload: Workload, source: Columns, budget_s: float) -> Dict[str, float]:
    columns = {name: np.empty((workload.capacity, *c.shape[1:]), c.dtype) for name, c in source.items()}
    for name, column in columns.items():
        for begin in range(0, workload.capacity, len(source[name])):
            part = column[begin : begin + len(source[name])]
            part[:] = source[name][: len(part)]
    return {
        'gather_limit': gather_limit(workload, columns, budget_s),
        'copy_limit': copy_limit(columns, source, 1, budget_s),
        'copy_columns_limit': copy_limit(columns, source, _rows_at_once(source), budget_s),
    }


def _measure_buffer(
    kind: Any, workload: Workload, source: dict, limits: dict, budget_s: float, fill_s: Optional[float]
) -> Dict[str, Any]:
    _load(kind)
    before = resident_bytes()
    buffer = kind(workload)
    _fill(buffer, workload, fill_s)
    buffer.sample()
    beyond = resident_bytes() - before - workload.capacity * workload.row_bytes
    count = len(source['reward'])
    elements = [tree_of(source, i) for i in range(min(count, 64))]
    gather, copy, size = limits['gather_limit'], limits['copy_limit'], workload.row_bytes

    def push(i: int) -> None:
        buffer.push(source, i % len(elements), elements[i % len(elements)])

    record = {'push': Timing(timed(push, budget_s), 1).record(size, copy)}
    if hasattr(buffer, 'push_columns'):
        rows = _rows_at_once(source)
        # Push different chunks in turn, as the limit does. A single chunk would stay in the nearest cache.
        starts = range(0, count - rows + 1, rows)
        chunks = [{name: column[start : start + rows] for name, column in source.items()} for start in starts]
        calls = timed(lambda i: buffer.push_columns(chunks[i % len(chunks)]), budget_s)
        record['push_columns'] = Timing(calls, rows).record(size, limits['copy_columns_limit'])
    record['sample'] = Timing(timed(lambda i: buffer.sample(), budget_s), workload.batch).record(size, gather)
    if workload.kind == 'prioritized':
        rng = np.random.default_rng(3)
        priority = rng.random((64, workload.batch)).astype(np.float64) + 0.01

        def sample_and_update(i: int) -> None:
            buffer.sample()
            buffer.update(priority[i % 64])

        record['sample_update'] = Timing(timed(sample_and_update, budget_s), workload.batch).record(size, gather)
    return {**record, 'beyond_payload': {'bytes_per_row': beyond / workload.capacity}}


def _load(kind: Any) -> None:
    """Use a small buffer once, so that imports and compiled code do not count as memory of its rows."""
    small = scaled(next(one for one in WORKLOADS if one.kind == 'prioritized' and one.row_bytes < 1000), 0)
    buffer = kind(small)
    _fill(buffer, small)
    buffer.sample()
    buffer.update(np.full(small.batch, 0.5))


def resident_bytes() -> int:
    gc.collect()
    # Return freed memory that the allocator keeps, e.g. of the fill's chunks.
    getattr(ctypes.CDLL(None), 'malloc_trim', int)(0)
    return _resident()


def _resident() -> int:
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def _rows_at_once(source: Columns) -> int:
    return min(64, len(source['reward']))


def _fill(buffer: Any, workload: Workload, most_s: Optional[float] = None) -> None:
    """
    Fill a buffer with rows of the workload.

    Raises:
        - NotFilled: It would take longer than ``most_s``, or more memory than is free. None: no limit.
    """
    capacity = workload.capacity
    rows = max(1, min(-(-capacity // FILL_PARTS), FILL_CHUNK_BYTES // workload.row_bytes))
    chunk = workload.columns(rows)
    begin_s, before = time.perf_counter(), _resident()
    for begin in range(0, capacity, rows):
        left = min(rows, capacity - begin)
        buffer.fill({name: column[:left] for name, column in chunk.items()})
        if most_s is not None:
            times = capacity / (begin + left)
            _check(capacity, (time.perf_counter() - begin_s) * times, (_resident() - before) * (times - 1), most_s)


def _check(capacity: int, seconds: float, more_bytes: float, most_s: float) -> None:
    there = available_memory()
    if more_bytes > there:
        reason = f'{size_text(more_bytes)} more memory, of which {size_text(there)} are there'
    elif seconds > most_s:
        reason = f'{seconds:.0f} s (--fill-seconds {most_s:g})'
    else:
        return
    raise NotFilled(f'{capacity:,} rows would take {reason}; --scale makes them fewer')


def choose(names: Optional[str]) -> List[Workload]:
    """Return workloads by comma-separated names. None: all."""
    known = {workload.name: workload for workload in WORKLOADS}
    chosen = names.split(',') if names else list(known)
    for name in chosen:
        if name not in known:
            raise ConfigError(f'no workload {name!r}; known are {", ".join(known)}')
    return [known[name] for name in chosen]


def installed(names: Optional[str]) -> List[str]:
    """Return buffers by comma-separated titles. None: all that can be imported."""
    for name in names.split(',') if names else []:
        if name not in BUFFERS:
            raise ConfigError(f'no buffer {name!r}; known are {", ".join(BUFFERS)}')
    there = [title for title in BUFFERS if importlib.util.find_spec(MODULES.get(title, 'ding_store')) is not None]
    return [title for title in there if names is None or title in names.split(',')]


def main(
    names: Optional[str],
    buffers: Optional[str],
    scale: float,
    budget_s: float,
    fill_s: float,
    json_file: Optional[str],
) -> int:
    """Measure, and print a table per workload. Write all figures to ``json_file``, if given."""
    if not fill_s > 0:
        raise ConfigError(f'--fill-seconds ({fill_s:g}) must be above 0')
    titles = installed(buffers)
    results = []
    missing = [title for title in BUFFERS if title not in titles]
    show(f'{os.cpu_count()} cores, OMP_NUM_THREADS={os.environ.get("OMP_NUM_THREADS", "unset")}; {_tree_path()}')
    if missing and buffers is None:
        show(f'not installed, so not measured: {", ".join(missing)}')
    for workload in choose(names):
        results.append(measure(scaled(workload, scale), titles, budget_s, say, fill_s))
        show(render(results[-1]))
    if json_file:
        with open(json_file, 'w') as out:
            json.dump(results, out, indent=1)
    return 0


def _tree_path() -> str:
    from ding_store.buffer import Prioritized, StoreBuffer

    sampler = Prioritized(seed=0)
    StoreBuffer(8, sampler=sampler)
    if sampler.priorities.is_compiled:
        return 'sum trees by numba'
    return 'sum trees by numpy (pip install "ding_store[fast]" for numba)'


def render(result: Dict[str, Any]) -> str:
    """Return a table of one workload: rates from medians, fractions of the limit, and the tail of single calls."""
    lines = [
        '',
        f'{result["workload"]}',
        f'  limits: gather {result["gather_limit"]:,.0f} el/s '
        f'({size_text(result["gather_limit"] * result["row_bytes"])}/s), copy {result["copy_limit"]:,.0f} el/s, '
        f'{result["copy_columns_limit"]:,.0f} el/s as columns',
        f'  {"buffer":<12} {"what":<14} {"el/s":>12} {"GB/s":>7} {"/limit":>7} '
        + ' '.join(f'{name:>9}' for name in ('median', 'P90', 'P99', 'max')),
    ]
    for title, record in result['buffers'].items():
        if 'error' in record:
            lines.append(f'  {title:<12} failed: {record["error"][:90]}')
            continue
        if 'left_out' in record:
            lines.append(f'  {title:<12} left out: {record["left_out"]}')
            continue
        for what, figures in record.items():
            if what == 'beyond_payload':
                lines.append(f'  {title:<12} memory beyond the payload: {figures["bytes_per_row"]:,.0f} B per row')
                continue
            times = ' '.join(f'{figures[key] * 1e6:>7.0f}us' for key in ('median_s', 'p90_s', 'p99_s', 'max_s'))
            rate, speed = figures['elements_per_s'], figures['gb_per_s']
            fraction = figures.get('fraction_of_limit', float('nan'))
            lines.append(f'  {title:<12} {what:<14} {rate:>12,.0f} {speed:>7.2f} {fraction:>7.2f} {times}')
    return '\n'.join(lines)
