"""
Benchmark of objects: put and get on one host beside copies in memory and Ray, reads of spilled objects beside the disk
read past the page cache, and the orders of eviction on traces.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from benchmarks import ray_cluster
from benchmarks.machine import busy_cores, others
from benchmarks.output import say, show
from ding_store.errors import ConfigError

#: Bytes of the objects that are put and got.
SIZES = {'1 KB': 1_000, '113 KB': 113_000, '3 MB': 3_000_000, '100 MB': 100_000_000}
#: Bytes of the spilled objects that are read back.
SPILLED_SIZES = {'113 KB': 113_000, '3 MB': 3_000_000}
#: Objects of one call that gets several.
_MANY = 16
#: Bytes of all arrays that are put in turn: more than caches of processors hold.
_SOURCE_BYTES = 256_000_000
#: Objects of a trace, and reads of it. The cache has room for a tenth.
_TRACE_OBJECTS, _TRACE_READS = 1_000, 8_000

Figures = Dict[str, Any]


def main(budget_s: float, directory: Optional[str], json_path: Optional[str]) -> int:
    """Measure all tables, print them, and write the figures to ``json_path``."""
    if not budget_s > 0:
        raise ConfigError(f'--seconds ({budget_s:g}) must be above 0')
    result: Figures = {'busy_cores': busy_cores(), 'put_get': {}, 'spilled': {}, 'traces': {}}
    for name, size in SIZES.items():
        say(name)
        result['put_get'][name] = measure(size, budget_s)
    show(render_put_get(result['put_get']))
    for name, size in SPILLED_SIZES.items():
        say(f'spilled, {name}')
        result['spilled'][name] = measure_spilled(size, budget_s, directory)
    show(render_spilled(result['spilled']))
    for trace in TRACES:
        say(f'trace {trace}')
        result['traces'][trace] = {order: hit_ratio(trace, order) for order in ('fifo', 'lru', 's3fifo')}
    show('\n'.join([render_traces(result['traces']), *others(result['busy_cores'])]))
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=1))
    return 0


# --- put and get


def measure(size: int, budget_s: float) -> Figures:
    """Return seconds of a put, a get and a delete, of two copies in memory, and of Ray's put and get."""
    arrays = _sources(size)
    figures: Figures = {'bytes': size, 'ding_store': _measure_ours(arrays, budget_s)}
    figures['two_memcpys'] = _measure_copies(arrays, budget_s)
    try:
        figures['ray'] = _measure_ray(arrays, budget_s)
    except ImportError as e:
        figures['ray'] = {'left_out': str(e)}
    return figures


def _sources(size: int) -> List[np.ndarray]:
    count = min(1000, max(2, _SOURCE_BYTES // size))
    data = np.random.default_rng(0).integers(0, 255, count * size, np.uint8)
    return list(data.reshape(count, size))


def _measure_ours(arrays: Sequence[np.ndarray], budget_s: float) -> Figures:
    from ding_store.storage import open_store

    with open_store('memory://') as store:
        objects = store.objects(max_bytes=2 * _SOURCE_BYTES + 4 * arrays[0].nbytes)
        held: Any = [None]

        def put(array: np.ndarray) -> str:
            return objects.put({'x': array})

        def get(ref: str) -> None:
            held[0] = objects.get(ref).arrays['x']

        return _timed(arrays, put, get, objects.delete, budget_s)


def _measure_ray(arrays: Sequence[np.ndarray], budget_s: float) -> Figures:
    import ray

    scratch = tempfile.mkdtemp(prefix='ray', dir='/tmp')
    try:
        ray_cluster.start(scratch, 4 * _SOURCE_BYTES, 1)
        held: Any = [None]

        def get(ref: Any) -> None:
            held[0] = ray.get(ref)

        def drop(ref: Any) -> None:
            """Ray frees an object with its last reference."""

        return _timed(arrays, ray.put, get, drop, budget_s)
    finally:
        ray_cluster.leave()
        shutil.rmtree(scratch, ignore_errors=True)


def _measure_copies(arrays: Sequence[np.ndarray], budget_s: float) -> float:
    """Return the median seconds of two copies: into memory that was used before, and out of it."""
    size = arrays[0].nbytes
    areas = np.ones((len(arrays), size), np.uint8)
    out = np.ones(size, np.uint8)
    samples, number, deadline = [], 0, time.perf_counter() + budget_s
    while time.perf_counter() < deadline or len(samples) < 5:
        array, area = arrays[number % len(arrays)], areas[number % len(arrays)]
        begin = time.perf_counter()
        np.copyto(area, array)
        np.copyto(out, area)
        samples.append(time.perf_counter() - begin)
        number += 1
    return float(np.median(samples))


def _timed(
    arrays: Sequence[np.ndarray],
    put: Callable[[np.ndarray], Any],
    get: Callable[[Any], None],
    drop: Callable[[Any], Any],
    budget_s: float,
) -> Figures:
    """Put, get and drop in turn. An object is dropped after the next one was got, as a consumer does it."""
    samples: List[List[float]] = []
    number, last, deadline = 0, None, time.perf_counter() + budget_s
    while time.perf_counter() < deadline or len(samples) < 5:
        array = arrays[number % len(arrays)]
        times = [time.perf_counter()]
        ref = put(array)
        times.append(time.perf_counter())
        get(ref)
        times.append(time.perf_counter())
        if last is not None:
            drop(last)
        times.append(time.perf_counter())
        last = ref
        number += 1
        samples.append(np.diff(times).tolist())
    medians = np.median(np.array(samples[len(samples) // 5 :]), axis=0).tolist()
    return dict(zip(('put_s', 'get_s', 'delete_s'), medians))


def render_put_get(tables: Figures) -> str:
    """Return the table of puts and gets, in microseconds."""
    lines = [f'{"object":<8} {"put":>8} {"get":>8} {"delete":>8} {"two memcpys":>12} {"ratio":>6} {"Ray put+get":>12}']
    for name, figures in tables.items():
        ours, ray = figures['ding_store'], figures['ray']
        both = ours['put_s'] + ours['get_s']
        peer = ray['left_out'] if 'left_out' in ray else f'{(ray["put_s"] + ray["get_s"]) * 1e6:.0f}'
        lines.append(
            f'{name:<8} {ours["put_s"] * 1e6:>8.0f} {ours["get_s"] * 1e6:>8.0f} {ours["delete_s"] * 1e6:>8.0f} '
            f'{figures["two_memcpys"] * 1e6:>12.0f} {both / figures["two_memcpys"]:>6.2f} {peer:>12}'
        )
    return '\n'.join(['put and get on one host, in microseconds; ratio: put + get to two memcpys', *lines])


# --- spilled objects


def measure_spilled(size: int, budget_s: float, directory: Optional[str]) -> Figures:
    """
    Return bytes per second of cold reads of spilled objects, and of the same files read past the page cache: into a new
    array for each, which the caller could keep as it keeps an object, and into one buffer. Several objects are read by
    one call, and their files by as many threads.
    """
    from ding_store.storage import open_store

    scratch = tempfile.mkdtemp(prefix='spill', dir=directory)
    count = min(2000, _SOURCE_BYTES // size)
    try:
        with open_store('memory://') as store:
            objects = store.objects(max_bytes=4 * size, spill_dir=scratch, spill_max_bytes=4 * _SOURCE_BYTES)
            arrays = _sources(size)
            refs = [objects.put({'x': arrays[number % len(arrays)]}) for number in range(count)]
            files = {path.name: path for path in Path(scratch).rglob('*') if path.name in set(refs)}
            chosen = [ref for ref in refs if ref in files]
            num_bytes = -(-(size + 4096) // 4096) * 4096
            buffer = memoryview(mmap.mmap(-1, num_bytes))
            buffer[:] = bytes(num_bytes)

            def direct(ref: str, target: Any) -> Any:
                descriptor = os.open(files[ref], os.O_RDONLY | os.O_DIRECT)
                try:
                    os.preadv(descriptor, [target], 0)
                finally:
                    os.close(descriptor)
                return target

            def new_array() -> np.ndarray:
                made = np.empty(num_bytes + 4096, np.uint8)
                return made[-made.ctypes.data % 4096 :][:num_bytes]

            def direct_to_new(ref: str) -> Any:
                return direct(ref, new_array())

            with ThreadPoolExecutor(_MANY) as threads:
                ways: Dict[str, Tuple[int, Callable[[List[str]], Any]]] = {
                    'ding_store': (1, lambda some: objects.get(some[0])),
                    'o_direct': (1, lambda some: direct_to_new(some[0])),
                    'o_direct_one_buffer': (1, lambda some: direct(some[0], buffer)),
                    'get_many': (_MANY, objects.get_many),
                    'o_direct_many': (
                        _MANY,
                        lambda some: list(threads.map(lambda ref: direct(ref, new_array()), some)),
                    ),
                }
                seconds = _cold(ways, chosen, files, budget_s)
        return {'bytes': size, **{way: ways[way][0] * size / each_s for way, each_s in seconds.items()}}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _cold(ways: Dict[str, Any], refs: List[str], files: Dict[str, Path], budget_s: float) -> Dict[str, float]:
    """
    Return the mean seconds of each way to read files that are not in the page cache. The ways take turns, in a new
    order each time: what a way did before makes the next one slower or faster.
    """
    rng = np.random.default_rng(0)
    samples: Dict[str, List[float]] = {way: [] for way in ways}
    deadline = time.perf_counter() + len(ways) * budget_s
    while time.perf_counter() < deadline or len(samples['ding_store']) < 5:
        for way in rng.permutation(list(ways)).tolist():
            count, read = ways[way]
            some = [refs[at] for at in rng.choice(len(refs), min(count, len(refs)), replace=False).tolist()]
            for ref in some:
                descriptor = os.open(files[ref], os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
            begin = time.perf_counter()
            kept = read(some)  # Its memory is freed when the clock stands.
            samples[way].append(time.perf_counter() - begin)
            del kept
    return {way: float(np.mean(each)) for way, each in samples.items()}


def render_spilled(tables: Figures) -> str:
    """Return the table of spilled reads, in MB per second."""
    head = ('get', 'O_DIRECT', 'ratio', 'one buffer', f'get {_MANY}', f'O_DIRECT x{_MANY}', 'ratio')
    lines = [f'{"object":<8} ' + ' '.join(f'{name:>{_width(name)}}' for name in head)]
    for name, figures in tables.items():
        get, bare, one, many, bare_many = (
            figures[way] / 1e6 for way in ('ding_store', 'o_direct', 'o_direct_one_buffer', 'get_many', 'o_direct_many')
        )
        cells = (get, bare, get / bare, one, many, bare_many, many / bare_many)
        lines.append(
            f'{name:<8} '
            + ' '.join(f'{cell:>{_width(name)}.{2 if name == "ratio" else 0}f}' for name, cell in zip(head, cells))
        )
    title = f'cold reads of spilled objects, in MB/s; O_DIRECT: to new memory, one file or {_MANY} by as many threads'
    return '\n'.join([title, *lines])


def _width(head: str) -> int:
    return max(6, len(head))


# --- traces


def _zipf(rng: Any) -> np.ndarray:
    """Return reads of which few objects get most, as of weights, demonstrations or an opponent's policies."""
    weights = 1 / np.arange(1, _TRACE_OBJECTS + 1) ** 0.9
    chosen = rng.choice(_TRACE_OBJECTS, _TRACE_READS, p=weights / weights.sum())
    return rng.permutation(_TRACE_OBJECTS)[chosen]


def _replay(rng: Any) -> np.ndarray:
    """Return uniform reads of the newest objects, as of a replay that grows, and drops what is old."""
    newest = np.linspace(_TRACE_OBJECTS // 4, _TRACE_OBJECTS, _TRACE_READS)
    return (newest - rng.uniform(0, _TRACE_OBJECTS // 4, _TRACE_READS)).astype(int)


def _scans(rng: Any) -> np.ndarray:
    """Return zipf reads with scans of all objects in between, as of a checkpoint or an export."""
    reads = _zipf(rng)[: _TRACE_READS * 7 // 10]
    parts = np.array_split(reads, 3)
    return np.concatenate([one for part in parts for one in (part, np.arange(_TRACE_OBJECTS))])


TRACES = {'zipf': _zipf, 'replay': _replay, 'zipf with scans': _scans}


def hit_ratio(trace: str, eviction: str) -> float:
    """Return the share of reads of a trace that a cache with room for a tenth of the objects has."""
    from ding_store.storage.objects.host_objects import HostObjects

    scratch = tempfile.mkdtemp(prefix='trace', dir='/dev/shm' if os.path.isdir('/dev/shm') else None)
    try:
        cache = HostObjects(scratch, {'max_bytes': _TRACE_OBJECTS // 10 * 4096, 'eviction': eviction})
        reads, num_hits = TRACES[trace](np.random.default_rng(0)), 0
        for number in reads.tolist():
            ref = hashlib.blake2b(number.to_bytes(8, 'little'), digest_size=20).hexdigest()
            if cache.view(ref) is not None:
                num_hits += 1
            else:  # a copy of another host's object, fetched again
                cache.write(ref, [b'x'], 1, is_copy=True)
        cache.close()
        return num_hits / len(reads)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def render_traces(tables: Figures) -> str:
    """Return the table of hit ratios."""
    lines = [f'{"trace":<16} ' + ' '.join(f'{order:>7}' for order in ('fifo', 'lru', 's3fifo'))]
    lines += [
        f'{name:<16} ' + ' '.join(f'{100 * ratio:>6.1f}%' for ratio in ratios.values())
        for name, ratios in tables.items()
    ]
    return '\n'.join(['reads that a cache with room for a tenth of the objects has', *lines])
