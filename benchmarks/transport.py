"""Benchmark of transports: from a producer's process to a consumer's collated batch, with the limits."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Type

import numpy as np

from benchmarks.machine import busy_cores, others
from benchmarks.output import say, show
from benchmarks.paths import Element, Outputs, Path, Timeout
from benchmarks.peers import PATHS, is_installed
from benchmarks.wire import measure_wire, render_wire
from benchmarks.workloads import WORKLOADS, Leaves
from ding_store.compare.scratch import memory_directory, scratch
from ding_store.compare.units import size_text
from ding_store.compiled import load_for
from ding_store.errors import ConfigError
from ding_store.launch.termination import interrupts_later

_CARTPOLE: Leaves = {
    'obs': (np.float32, (4,)),
    'next_obs': (np.float32, (4,)),
    'action': (np.int64, ()),
    'reward': (np.float32, (1,)),
    'collect_train_iter': (np.int64, (1,)),
    'env_data_id': (np.int64, (1,)),
}
_OF = {workload.name: workload.leaves for workload in WORKLOADS}

ELEMENTS = {
    one.name: one
    for one in (
        Element('cartpole', _CARTPOLE, chunk=64, batch=64, number='env_data_id'),
        Element('dqn-atari', _OF['dqn-atari'], chunk=64, batch=64, number='env_data_id'),
        Element('impala-atari', _OF['impala-atari'], chunk=4, batch=32, number='action'),
    )
}
TABLES = ('processes', 'wire', 'compression', 'torchrl')
#: Maximum seconds that one chunk may be on its way.
_TIMEOUT_S = 10.0
#: Maximum seconds for a producer to start, or to send a burst.
_READY_S = 60.0
BURST = 2000
_LATENCIES = 50  # at least
#: Minimum number of bytes that a way copies in total.
_MANY_BYTES = 1 << 30
#: Size of a source that no cache holds.
_MEMORY_BYTES = 256 << 20
_LARGE_BYTES = 1 << 20
#: Bytes of a burst: less than the default ``max_pending_bytes``.
_HELD_BYTES = 240_000_000


def main(
    names: Optional[str], paths: Optional[str], seconds: float, json_file: Optional[str], tables: Optional[str] = None
) -> int:
    """Measure, and print a table per element and those of the Redis transport. Write all to ``json_file``, if given."""
    if not seconds > 0:
        raise ConfigError(f'--seconds ({seconds}) must be > 0')
    chosen, ways, wanted = choose(names), installed(paths), choose_tables(tables)
    results: Dict[str, Any] = {'cores': os.cpu_count(), 'elements': [], 'wire': [], 'compression': [], 'torchrl': []}
    if 'processes' in wanted:
        show(f'{os.cpu_count()} cores; producer and consumer are processes of their own, one thread each')
        missing = [title for title, path in PATHS.items() if not is_installed(path)]
        if missing:
            show(f'not installed, so not measured: {", ".join(missing)}')
        for element in chosen:
            results['elements'].append(measure(element, ways, seconds))
            show(render(results['elements'][-1]))
    if 'wire' in wanted:
        results['wire'] = measure_wire(seconds, say)
        show(render_wire(results['wire']))
    if not {'compression', 'torchrl'}.isdisjoint(wanted):
        _measure_frames(wanted, [element.name for element in chosen], seconds, results)
    if json_file:
        with open(json_file, 'w') as out:
            json.dump(results, out, indent=1)
        show(f'all figures are in {json_file}')
    failed = [each['element'] for each in results['elements'] if 'error' in each['paths'].get('ding_store', {})]
    return 1 if failed else 0


def _measure_frames(wanted: List[str], names: List[str], seconds: float, results: Dict[str, Any]) -> None:
    """Measure the tables that narrow frames. They need torch and DI-engine, which producers must not load."""
    from benchmarks.compression import measure_compression, needs, render_compression
    from benchmarks.torchrl_redis import lacking, measure_torchrl, render_torchrl

    if needs():
        show(f'no frames of games are measured: no {", ".join(needs())} (the extra `atari`)')
    if 'compression' in wanted and not needs():
        results['compression'] = measure_compression(seconds, say)
        show(render_compression(results['compression']))
    if 'torchrl' in wanted and (lack := lacking()):
        show(lack)
    elif 'torchrl' in wanted:
        for result in measure_torchrl(names, seconds, say):
            results['torchrl'].append(result)
            show(render_torchrl(result))


def measure(element: Element, ways: List[Type[Path]], seconds: float) -> Dict[str, Any]:
    """Return all figures of one element: memcpy's, and a record per way."""
    busy = busy_cores()
    limit, cached = memcpy_limit(element, seconds, _MEMORY_BYTES), memcpy_limit(element, seconds, 0)
    result: Dict[str, Any] = {'element': element.name, 'row_bytes': element.row_bytes, 'chunk': element.chunk}
    result.update(batch=element.batch, memcpy_elements_per_s=limit, cached_elements_per_s=cached, paths={})
    for path in ways:
        say(f'{element.name}: {path.title}')
        record: Dict[str, Any] = {}
        result['paths'][path.title] = record
        try:
            record.update(throughput(path, element, seconds))
            record['fraction_of_memcpy'] = record['elements_per_s'] / limit
            record['latency'] = latency(path, element, seconds)
            record['burst'] = burst(path, element)
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way, and the others still count
            record['error'] = ' '.join(f'{type(error).__name__}: {error}'.split())
    result['others_cores'] = max(busy, busy_cores())
    return result


def memcpy_limit(element: Element, seconds: float, num_bytes: int) -> float:
    """
    Return rows/s of copying batches leaf by leaf into a warm one. The source has ``num_bytes``, at least one batch.
    """
    num_batches = max(1, num_bytes // (element.batch * element.row_bytes))
    source, outputs = columns_of(element, element.batch * num_batches), Outputs(element, np.copyto)
    durations: List[float] = []
    deadline = time.perf_counter() + seconds
    while len(durations) < 20 or time.perf_counter() < deadline:
        start = len(durations) % num_batches * element.batch
        begin = time.perf_counter()
        outputs.add(source, start)
        outputs.take()
        durations.append(time.perf_counter() - begin)
    return element.batch / float(np.median(durations[2:]))


def throughput(path: Type[Path], element: Element, seconds: float) -> Dict[str, float]:
    """
    Overview:
        Measure a producer that sends as fast as it may, over ``seconds`` after the first batches came. Rows whose
        numbers are missing between two received ones count as lost.
    """
    with running(path, element, _flood) as (way, _):
        num_rows = num_lost = 0
        expected = next_number(element, way.batch(_TIMEOUT_S), 0)[1]
        begin = warm_until = time.perf_counter() + min(1.0, seconds / 2)
        while (now := time.perf_counter()) < warm_until + seconds or num_rows < 2 * element.batch:
            lost, expected = next_number(element, way.batch(_TIMEOUT_S), expected)
            if now < warm_until:
                begin = time.perf_counter()
                continue
            num_rows, num_lost = num_rows + element.batch, num_lost + lost
        duration = time.perf_counter() - begin
    rate = num_rows / duration
    return {'elements_per_s': rate, 'gb_per_s': rate * element.row_bytes / 1e9, 'lost': num_lost}


def latency(path: Type[Path], element: Element, seconds: float) -> Dict[str, float]:
    """Return seconds from before a send until the consumer has the chunk, with one chunk on its way at a time."""
    durations: List[float] = []
    element = replace(element, batch=element.chunk)
    with running(path, element, _one_by_one) as (way, control):
        deadline = time.perf_counter() + seconds
        while len(durations) < _LATENCIES or time.perf_counter() < deadline:
            control.send(None)
            way.chunk(_TIMEOUT_S)
            arrived = time.perf_counter()
            durations.append(arrived - receive(control, path, 'did not return from a send'))
    p50, p90, p99 = np.percentile(durations[10:], [50, 90, 99])
    return {'p50_s': float(p50), 'p90_s': float(p90), 'p99_s': float(p99), 'max_s': float(max(durations[10:]))}


def burst(path: Type[Path], element: Element, count: int = BURST) -> Optional[Dict[str, int]]:
    """
    Overview:
        Send ``count`` chunks while the consumer reads nothing, then count what it reads. Large chunks have one row.
        Return None if a stream may not hold so many bytes, or the way holds nothing.
    """
    if element.row_bytes * element.chunk > _LARGE_BYTES:
        element = replace(element, chunk=1, batch=1)
    if not path.is_queue or element.row_bytes * element.chunk * count > _HELD_BYTES:
        return None
    received = 0
    with running(path, element, _burst) as (way, control):
        control.send(count)
        receive(control, path, 'blocks in a burst')
        expected = 0
        while expected < count * element.chunk:
            try:
                expected = next_number(element, way.batch(1.0), expected)[1]
            except Timeout:
                break
            received += element.batch
    return {'sent': count * element.chunk, 'received': received}


def receive(control: Any, path: Type[Path], what_if_not: str) -> Any:
    """Return the producer's next message. Raise ``Timeout`` if none comes in time, or the producer crashed."""
    if not control.poll(_READY_S):
        raise Timeout(f'{path.title}: the producer {what_if_not} within {_READY_S:.0f} s')
    try:
        return control.recv()
    except EOFError as e:
        raise Timeout(f'{path.title}: the producer crashed') from e


@contextmanager
def running(path: Type[Path], element: Element, produce: Callable[..., None]) -> Iterator[Any]:
    """
    Open the consumer's side of a way here, and start a producer process. Yield the way and a pipe to the producer.
    """
    context = multiprocessing.get_context('spawn')
    # Peers and the bare ring need memory. The store chooses it by itself.
    with scratch(memory_directory()) as address:
        way = _loaded(path, element, address)
        way.consume()
        ours, theirs = context.Pipe()
        producer = context.Process(target=produce, args=(path, element, address, theirs), daemon=True)
        try:
            with interrupts_later():
                producer.start()
            theirs.close()  # so that the end of a producer that crashes is seen here
            receive(ours, path, 'is not ready')
            yield way, ours
        finally:
            if producer.pid is not None:
                producer.terminate()
                producer.join()
            way.close()


def _opened(path: Type[Path], element: Element, address: str) -> Path:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    way = _loaded(path, element, address)
    way.produce()
    return way


def _loaded(path: Type[Path], element: Element, address: str) -> Path:
    load_for(_MANY_BYTES)  # numba, which every process of DI-engine has loaded
    return path(element, address)


def _end_with_parent() -> None:
    """Exit when the parent ends: a killed benchmark must not leave a producer that sends forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _flood(path: Type[Path], element: Element, address: str, control: Any) -> None:
    way, columns, number = _opened(path, element, address), columns_of(element, element.chunk), 0
    control.send(None)
    while True:
        number = stamp(element, columns, number)
        way.send(columns)


def _one_by_one(path: Type[Path], element: Element, address: str, control: Any) -> None:
    way, columns, number = _opened(path, element, address), columns_of(element, element.chunk), 0
    control.send(None)
    while True:
        control.recv()
        number = stamp(element, columns, number)
        begin = time.perf_counter()
        way.send(columns)
        control.send(begin)


def _burst(path: Type[Path], element: Element, address: str, control: Any) -> None:
    way, columns, number = _opened(path, element, address), columns_of(element, element.chunk), 0
    control.send(None)
    for _ in range(control.recv()):
        number = stamp(element, columns, number)
        way.send(columns)
    control.send(None)
    control.recv()  # until this process is terminated


def columns_of(element: Element, rows: int) -> Dict[str, np.ndarray]:
    """Return rows of random bytes."""
    rng = np.random.default_rng(0)
    columns: Dict[str, np.ndarray] = {}
    for name, (dtype, shape) in element.leaves.items():
        column: np.ndarray = np.empty((rows, *shape), dtype)
        column.reshape(-1).view(np.uint8)[:] = rng.integers(0, 2 if dtype is np.bool_ else 256, column.nbytes, np.uint8)
        columns[name] = column
    return columns


def stamp(element: Element, columns: Dict[str, np.ndarray], number: int) -> int:
    """Number the rows of a chunk from ``number`` on. Return the next number."""
    leaf = columns[element.number].reshape(len(columns[element.number]), -1)
    leaf[:, 0] = np.arange(number, number + len(leaf))
    return number + len(leaf)


def next_number(element: Element, batch: Any, expected: int) -> Any:
    """
    Check that a batch's numbers rise, and count the missing ones.

    Returns:
        - lost (:obj:`int`): Number of missing rows between ``expected`` and the batch's last one.
        - expected (:obj:`int`): Number of the next row.
    """
    numbers = batch[element.number].reshape(len(batch[element.number]), -1)[:, 0]
    if not (np.diff(numbers) > 0).all() or numbers[0] < expected:
        raise AssertionError(f'rows came twice, or out of order: {numbers[:8]} where {expected} is next')
    end = int(numbers[-1]) + 1
    return end - expected - len(numbers), end


def choose(names: Optional[str]) -> List[Element]:
    """Return elements by comma-separated names. None: all."""
    for name in names.split(',') if names else []:
        if name not in ELEMENTS:
            raise ConfigError(f'no element {name!r}; known are {", ".join(ELEMENTS)}')
    return [element for name, element in ELEMENTS.items() if not names or name in names.split(',')]


def choose_tables(names: Optional[str]) -> List[str]:
    """Return tables by comma-separated names. None: all."""
    for name in names.split(',') if names else []:
        if name not in TABLES:
            raise ConfigError(f'no table {name!r}; known are {", ".join(TABLES)}')
    return names.split(',') if names else list(TABLES)


def installed(names: Optional[str]) -> List[Type[Path]]:
    """Return ways by comma-separated titles. None: all that can be imported."""
    for name in names.split(',') if names else []:
        if name not in PATHS:
            raise ConfigError(f'no path {name!r}; known are {", ".join(PATHS)}')
    return [path for title, path in PATHS.items() if is_installed(path) and (not names or title in names.split(','))]


def render(result: Dict[str, Any]) -> str:
    """Return a table of one element's figures. Column ``/memcpy`` relates to memcpy from memory."""
    size, limit, cached = result['row_bytes'], result['memcpy_elements_per_s'], result['cached_elements_per_s']
    lines = [
        '',
        f'{result["element"]}: {size_text(size)}, chunks of {result["chunk"]}, batches of {result["batch"]}',
        f'  memcpy into a warm batch: {limit:,.0f} el/s ({size_text(limit * size)}/s) from memory, '
        f'{cached:,.0f} el/s ({size_text(cached * size)}/s) of one batch again and again',
        f'  {"way":<18} {"el/s":>10} {"GB/s":>7} {"/memcpy":>8} {"lost":>8} '
        f'{"P50":>10} {"P99":>10} {"max":>10}   burst: of rows sent came',
    ]
    for title, record in result['paths'].items():
        failed = f'failed: {record["error"]}' if 'error' in record else ''
        if 'elements_per_s' not in record:
            lines.append(f'  {title:<18} {failed}')
            continue
        latency_s = record.get('latency', {})
        times = ' '.join(
            f'{latency_s[key] * 1e3:>8.2f}ms' if key in latency_s else f'{"-":>10}'
            for key in ('p50_s', 'p99_s', 'max_s')
        )
        burst_text = '{received:,} of {sent:,}'.format(**record['burst']) if record.get('burst') else failed or '-'
        lines.append(
            f'  {title:<18} {record["elements_per_s"]:>10,.0f} {record["gb_per_s"]:>7.2f} '
            f'{record["fraction_of_memcpy"]:>8.2f} {record["lost"]:>8,} {times}   {burst_text}'
        )
    return '\n'.join(lines + others(result['others_cores']))
