"""The cost of several servers: chunks per second, and CPU per chunk, with the router and without.

    python scripts/shards.py --rounds 9

Each way has servers of its own. Each round measures all ways once, in an order that changes: one server by its URL, and
1, 2 and 3 servers by redis+shards://. In the last way, the same process uses 3 servers by 3 stores without a router, so
the difference to '3' is the router's. A chunk is an append to one of six partitions, its read, and the ack with the
progress. All chunks go through Redis. Ratios are to the server by its URL, in the same round: the median, and the
lowest and highest one. A ratio of chunks per second below 1 is slower. Server CPU is that of INFO cpu, of all servers.

Client and servers share this machine's cores, so this shows costs. It shows no gain by several cores. On two cores,
one server and the client keep a core each, while three servers displace each other and the client.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Dict, List

import numpy as np

from ding_store.storage import Reader, Store, open_store
from ding_store.storage.embedded.binary import find_server

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / 'tests')]

from redis_server import RedisServer  # noqa: E402

NUM_PARTITIONS = 6
#: Name of a way -> its number of servers.
WAYS = {'1, plain': 1, '1, routed': 1, '2': 2, '3': 3, '3, plain': 3}
#: The ways without a router.
PLAIN = ('1, plain', '3, plain')
TITLES = {'chunks_per_s': 'chunks/s', 'client_us': 'client CPU per chunk', 'server_us': 'server CPU per chunk'}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=9, help='rounds (default: %(default)s)')
    parser.add_argument('--chunks', type=int, default=1500, help='chunks per way and round (default: %(default)s)')
    parser.add_argument('--bytes', type=int, default=2000, help='bytes of a chunk (default: %(default)s)')
    parser.add_argument('--json', metavar='FILE', help='write the figures to FILE')
    options = parser.parse_args()
    figures: Dict[str, List[Dict[str, float]]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        ways = {name: Way(stack, name, number, options.bytes) for name, number in WAYS.items()}
        for number in range(-1, options.rounds):
            names = list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]
            for name in names[:: 1 if number % 2 else -1]:
                found = ways[name].measure(options.chunks)
                if number >= 0:  # the first round warms up
                    figures[name].append(found)
    print(f'{options.rounds} rounds of {options.chunks} chunks of {options.bytes} bytes')
    print(f'{"servers":10}' + ''.join(f'{title + ", ratio":>32}' for title in TITLES.values()))
    for name, found in figures.items():
        print(f'{name:10}' + ''.join(f'{text_of(ratios(found, figures[PLAIN[0]], key)):>32}' for key in TITLES))
    for name in ('client_us', 'server_us'):
        print(f'{name}: ' + ', '.join(f'{way} {median(one[name] for one in figures[way]):.0f}' for way in WAYS))
    if options.json:
        Path(options.json).write_text(json.dumps(figures))
    return 0


def ratios(found: List[Dict[str, float]], plain: List[Dict[str, float]], key: str) -> List[float]:
    return sorted(one[key] / other[key] for one, other in zip(found, plain))


def text_of(found: List[float]) -> str:
    return f'{median(found):.3f} ({found[0]:.3f} to {found[-1]:.3f})'


def free_ports(count: int) -> List[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(('127.0.0.1', 0))
        return [int(one.getsockname()[1]) for one in sockets]


class Way:
    """A run on so many servers: a writer, and a reader of each partition."""

    def __init__(self, stack: ExitStack, name: str, num_servers: int, num_bytes: int) -> None:
        ports = free_ports(num_servers)
        servers = [stack.enter_context(RedisServer(str(find_server()), '--port', str(port))) for port in ports]
        self._clients = [stack.enter_context(server.client()) for server in servers]
        addresses = [f'127.0.0.1:{port}' for port in ports]
        is_plain = name in PLAIN
        urls = [f'redis://{one}' for one in addresses] if is_plain else [f'redis+shards://{",".join(addresses)}']
        writers, others = ([stack.enter_context(self._opened(url)) for url in urls] for _ in range(2))
        assert (type(others[0].client.server).__name__ == 'ShardedServer') == (not is_plain)
        #: Of each partition.
        self._writers = [writers[number % len(writers)] for number in range(NUM_PARTITIONS)]
        self._readers = [
            Reader(others[number % len(others)], f'experience/{number}', 'learner') for number in range(NUM_PARTITIONS)
        ]
        self._arrays = {'x': np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)}

    @staticmethod
    def _opened(url: str) -> Store:
        return open_store(url, 'shards', host_plane='off')

    def measure(self, num_chunks: int) -> Dict[str, float]:
        cpu_s, client_s, begin = self._cpu_s(), time.process_time(), time.perf_counter()
        for number in range(num_chunks):
            partition = number % NUM_PARTITIONS
            reader = self._readers[partition]
            self._writers[partition].append(reader.stream, {'number': number}, self._arrays)
            (entry,) = reader.read()
            reader.advance(entry.id, f'progress/{partition}', {'number': number})
        wall_s, client_s = time.perf_counter() - begin, time.process_time() - client_s
        return {
            'chunks_per_s': num_chunks / wall_s,
            'client_us': client_s / num_chunks * 1e6,
            'server_us': (self._cpu_s() - cpu_s) / num_chunks * 1e6,
        }

    def _cpu_s(self) -> float:
        infos: List[Any] = [client.info('cpu') for client in self._clients]
        return sum(info['used_cpu_user'] + info['used_cpu_sys'] for info in infos)


if __name__ == '__main__':
    sys.exit(main())
