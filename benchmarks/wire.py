"""Benchmark of the Redis transport and redis-py: the same bytes through the same server, one process, in turn."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List

import numpy as np

from ding_store.compare.scratch import scratch
from ding_store.compare.units import size_text
from ding_store.storage import Reader, open_store
from ding_store.storage.embedded.private_server import ensure_server

#: Payload bytes: one element of 113 KB, one of 3 MB, a collector's chunk of 64 of 113 KB, and one of 10 MB.
SIZES = (113_000, 3_000_000, 64 * 113_000, 10_000_000)
#: Bytes of a part. redis-py sends one string, or a pipeline of such parts: the faster way counts.
PART_BYTES = 1 << 20
#: Payloads of each way in a row. Acks are not waited for, so their work falls to the next payload.
IN_A_ROW = 8


def measure_wire(seconds: float, say: Callable[[str], None]) -> List[Dict[str, float]]:
    """
    Overview:
        Return medians per payload size of the seconds of append, of read, of sending the ack, of SET and of GET. A
        redis-py stream has XADD, XREAD and XTRIM, without the store's guarantees.
    """
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
    ways = {'ours': _ours(reader, array), **_redis_py(client, array.tobytes())}
    times: Dict[str, List[List[float]]] = {name: [] for name in ways}
    deadline = time.perf_counter() + 2 * seconds
    while len(times['ours']) < 4 * IN_A_ROW or time.perf_counter() < deadline:
        for name, steps in ways.items():
            times[name] += [_timed(steps) for _ in range(IN_A_ROW)]
            reader.store.flush()
    return _figures(size, {name: np.array(found[IN_A_ROW:]) for name, found in times.items()})


def _ours(reader: Reader, array: np.ndarray) -> List[Callable[[], Any]]:
    def read() -> None:
        (entry,) = reader.read(timeout_s=10.0)
        if entry.arrays['x'].nbytes != array.nbytes:
            raise AssertionError('another entry than the one appended')

    return [lambda: reader.store.append('bench', {}, {'x': array}), read, lambda: reader.ack(wait=False)]


def _redis_py(client: Any, payload: bytes) -> Dict[str, List[Callable[[], Any]]]:
    parts = [payload[begin : begin + PART_BYTES] for begin in range(0, len(payload), PART_BYTES)]
    keys = [f'bench:plain:{number}' for number in range(len(parts))]
    stream = 'bench:plain:stream'

    def pipelined(command: str, *arguments: Any) -> None:
        pipe = client.pipeline(transaction=False)
        for each in zip(keys, *arguments):
            getattr(pipe, command)(*each)
        pipe.execute()

    return {
        'whole': [lambda: client.set('bench:plain', payload), lambda: client.get('bench:plain')],
        'parts': [lambda: pipelined('set', parts), lambda: pipelined('get')],
        'stream': [
            lambda: client.xadd(stream, {'p': payload}),
            lambda: client.xread({stream: '0-0'}),
            lambda: client.xtrim(stream, maxlen=0, approximate=False),
        ],
    }


def _timed(steps: List[Callable[[], Any]]) -> List[float]:
    """Return the seconds of each step."""
    marks = [time.perf_counter()]
    for step in steps:
        step()
        marks.append(time.perf_counter())
    return np.diff(marks).tolist()


def _figures(size: int, times: Dict[str, np.ndarray]) -> Dict[str, float]:
    medians = {name: np.median(found, axis=0) for name, found in times.items()}
    append_s, read_s, ack_s = medians['ours']
    set_s, get_s = np.minimum(medians['whole'], medians['parts'])
    figures = {'append': append_s, 'read': read_s, 'ack': ack_s, 'set': set_s, 'get': get_s}
    figures['stream'] = medians['stream'].sum()
    figures['fraction_of_redis_py'] = (set_s + get_s) / medians['ours'].sum()
    figures['fraction_of_stream'] = figures['stream'] / medians['ours'].sum()
    return {'bytes': size, **{name: float(figure) for name, figure in figures.items()}}


def render_wire(results: List[Dict[str, float]]) -> str:
    lines = [
        '',
        'wire plane beside redis-py, the same bytes through the same server, ms:',
        f'  {"payload":>8} {"append":>7} {"SET":>7} {"read":>7} {"GET":>7} {"ack":>7}  of SET and GET '
        ' XADD, XREAD, XTRIM  of those',
    ]
    for one in results:
        times = ' '.join(f'{one[name] * 1e3:>7.2f}' for name in ('append', 'set', 'read', 'get', 'ack'))
        lines.append(
            f'  {size_text(one["bytes"]):>8} {times} {one["fraction_of_redis_py"]:>15.2f} '
            f'{one["stream"] * 1e3:>20.2f} {one["fraction_of_stream"]:>9.2f}'
        )
    return '\n'.join(lines)
