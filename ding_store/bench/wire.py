"""The wire plane beside redis-py: the same bytes through the same server, one process, taken in turns."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List

import numpy as np

from ding_store.bench.scratch import scratch
from ding_store.bench.workloads import size_text
from ding_store.storage import Reader, open_store
from ding_store.storage.embedded import ensure_server

SIZES = (113_000, 3_000_000, 10_000_000)
#: redis-py sends the bytes as one string, or in a pipeline of strings of this size: the faster one counts.
PART_BYTES = 1 << 20


def measure_wire(seconds: float, say: Callable[[str], None]) -> List[Dict[str, float]]:
    """Seconds of append, of read with its ack, of SET and of GET, per payload size; medians."""
    import redis

    with scratch() as directory:
        with open_store(f'embedded://{directory}', 'bench', host_plane='off') as store:
            client = redis.Redis(unix_socket_path=ensure_server(f'{directory}/bench', grace_s=30.0))
            reader, results = Reader(store, 'bench', 'consumer'), []
            for size in SIZES:
                say(f'wire: {size_text(size)}')
                results.append(_measure(reader, client, size, seconds))
            client.close()
            store.retire()
            return results


def _measure(reader: Reader, client: Any, size: int, seconds: float) -> Dict[str, float]:
    array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    store, payload = reader.store, array.tobytes()
    parts = [payload[begin : begin + PART_BYTES] for begin in range(0, size, PART_BYTES)]
    keys = [f'bench:plain:{number}' for number in range(len(parts))]

    def read() -> None:
        (entry,) = reader.read(timeout_s=10.0)
        if entry.arrays['x'].nbytes != size:
            raise AssertionError('another entry than the one appended')
        reader.ack()

    def pipelined(command: str, *arguments: Any) -> None:
        pipe = client.pipeline(transaction=False)
        for each in zip(keys, *arguments):
            getattr(pipe, command)(*each)
        pipe.execute()

    ways: Dict[str, Callable[[], Any]] = {
        'append': lambda: store.append('bench', {}, {'x': array}),
        'read': read,
        'set': lambda: client.set('bench:plain', payload),
        'get': lambda: client.get('bench:plain'),
        'set_parts': lambda: pipelined('set', parts),
        'get_parts': lambda: pipelined('get'),
    }
    times: Dict[str, List[float]] = {name: [] for name in ways}
    deadline = time.perf_counter() + 2 * seconds
    while len(times['append']) < 12 or time.perf_counter() < deadline:
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begin)
    medians = {name: float(np.median(calls[2:])) for name, calls in times.items()}
    for name in ('set', 'get'):
        medians[name] = min(medians[name], medians.pop(f'{name}_parts'))
    ours, plain = medians['append'] + medians['read'], medians['set'] + medians['get']
    return {'bytes': size, **medians, 'fraction_of_redis_py': plain / ours}


def render_wire(results: List[Dict[str, float]]) -> str:
    lines = [
        '',
        'wire plane beside redis-py, the same bytes through the same server: seconds of',
        f'  {"payload":>8} {"append":>10} {"SET":>10} {"read+ack":>10} {"GET":>10} {"of redis-py":>12}',
    ]
    for one in results:
        times = ' '.join(f'{one[name] * 1e3:>8.2f}ms' for name in ('append', 'set', 'read', 'get'))
        lines.append(f'  {size_text(one["bytes"]):>8} {times} {one["fraction_of_redis_py"]:>12.2f}')
    return '\n'.join(lines)
