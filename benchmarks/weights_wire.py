"""Benchmark of weights between two hosts over TCP, compared with redis-py and the same bytes."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Dict, Iterator, List, Optional

import numpy as np
import redis
import torch

from benchmarks.output import say, show
from benchmarks.weights import measure, sizes_of, write_json
from benchmarks.weights_ways import LIMIT_S, NUM_TENSORS, Ours, Way
from ding_store.compare.tcp_server import tcp_server
from ding_store.errors import ConfigError, StoreError
from ding_store.storage import open_store

#: Environment variable with the port, set by ``_server`` for the processes that are forked meanwhile.
_PORT = 'DING_STORE_BENCH_PORT'


class RedisPy(Way):
    """
    SET and GET in pipelines, and a barrier. redis-py sends and receives plain bytes: making and loading tensors is not
    counted.
    """

    part_bytes = 1 << 20

    def open_writer(self, model: torch.nn.Module) -> None:
        self.model = model
        self.client = redis.Redis(port=int(os.environ[_PORT]))

    open_reader = open_writer

    def prepare(self) -> None:
        payload = b''.join(parameter.detach().numpy().tobytes() for parameter in self.model.parameters())
        self.parts = [payload[at : at + self.part_bytes] for at in range(0, len(payload), self.part_bytes)]

    def publish(self) -> None:
        pipe = self.client.pipeline(transaction=False)
        for number, part in enumerate(self.parts):
            pipe.set(f'plain:{number}', part)
        pipe.execute()

    def load(self) -> None:
        num_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
        pipe = self.client.pipeline(transaction=False)
        for number in range(-(-num_bytes // self.part_bytes)):
            pipe.get(f'plain:{number}')
        self.received = pipe.execute()

    def last_elements(self) -> float:
        return float(np.frombuffer(b''.join(self.received), np.float32).reshape(NUM_TENSORS, -1)[:, -1].sum())

    def close(self) -> None:
        self.client.close()


class RedisPyWhole(RedisPy):
    title, part_bytes = 'redis-py, whole', 500_000_000  # the largest string is 512 MB


class RedisPyMiB(RedisPy):
    title, part_bytes = 'redis-py, 1 MiB', 1 << 20


class RedisPyQuarter(RedisPy):
    title, part_bytes = 'redis-py, 256 KiB', 256 << 10


class OverTheWire(Ours):
    """The store with one host cache for the writer and another for the readers, so that all bytes go through Redis."""

    title = 'ding_store'

    def open_reader(self, model: torch.nn.Module) -> None:
        self.host = 'readers'
        super().open_reader(model)

    host = 'writer'

    def _opened(self) -> Any:
        # A process takes another directory for another host.
        directory = os.path.join(self.directory, self.host)
        return open_store(f'redis://127.0.0.1:{os.environ[_PORT]}', type(self).__name__, host_cache_dir=directory)


class HalfFrozen(OverTheWire):
    """The store with every other tensor frozen: none of its elements changes."""

    title = 'ding_store, half frozen'

    def prepare(self) -> None:
        with torch.no_grad():
            for parameter in list(self.model.parameters())[::2]:
                parameter.fill_(0.5)

    def last_elements(self) -> float:
        parameters = [float(parameter.detach().reshape(-1)[-1]) for parameter in self.model.parameters()]
        if set(parameters[::2]) != {0.5}:
            raise StoreError('frozen tensors have changed')
        return 2 * sum(parameters[1::2])


WAYS: Dict[str, Any] = {
    'redis_whole': RedisPyWhole,
    'redis_mib': RedisPyMiB,
    'redis_quarter': RedisPyQuarter,
    'ding_store': OverTheWire,
    'half_frozen': HalfFrozen,
}


def main(sizes_mb: str, num_readers: int, num_rounds: int, json_file: Optional[str]) -> int:
    """Measure, and print a table per size. Write all figures to ``json_file``, if given."""
    if num_readers < 1 or num_rounds < 1:
        raise ConfigError(f'--readers ({num_readers}) and --rounds ({num_rounds}) must be >= 1')
    torch.set_num_threads(1)
    results = []
    for size in sizes_of(sizes_mb):
        result: Dict[str, Any] = {'mb': size, 'readers': num_readers, 'rounds': num_rounds}
        try:
            with _server():
                found = measure(list(WAYS), size * 1_000_000, num_readers, num_rounds, say, WAYS)
        except threading.BrokenBarrierError as error:
            raise StoreError(f'a reader failed, or took longer than {LIMIT_S:.0f} s: see above') from error
        best = min(found[name]['loaded_s'] for name in WAYS if name.startswith('redis'))
        for figures in found.values():
            figures['fraction_of_redis_py'] = best / figures['loaded_s']
        result['ways'] = found
        show(_render(result))
        results.append(result)
    write_json(results, json_file)
    return 0


@contextlib.contextmanager
def _server() -> Iterator[None]:
    with tcp_server() as port:
        os.environ[_PORT] = str(port)
        try:
            yield
        finally:
            del os.environ[_PORT]


def _render(result: Dict[str, Any]) -> str:
    lines: List[str] = [
        f'\n{result["mb"]} MB in {NUM_TENSORS} tensors, published -> loaded by {result["readers"]} readers of another '
        f'host over TCP on this machine, ms; {os.cpu_count()} cores, medians of {result["rounds"]} rounds',
        f'  {"":<24} {"loaded":>8} {"P90":>8} {"max":>8} {"publish":>8} {"of redis-py":>12}',
    ]
    for name, found in result['ways'].items():
        numbers = [f'{found[key] * 1e3:>8.1f}' for key in ('loaded_s', 'p90_s', 'max_s', 'publish_s')]
        lines.append(f'  {WAYS[name].title:<24} {" ".join(numbers)} {found["fraction_of_redis_py"]:>12.2f}')
    return '\n'.join(lines)
