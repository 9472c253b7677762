"""What a primary sends for weights that several hosts read, with and without reads from its replica.

    python scripts/replica_reads.py --readers 4

A primary, a replica and three sentinels run with the files of docs/howto/sentinel.md. A writer puts versions of a
value. Each reader stands for a host: it downloads each version by itself. The bytes are those of the servers' INFO, and
exact on a busy machine. The CPU seconds are not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Dict, Tuple

import numpy as np

from ding_store.environment import ENV_SENTINEL_PASSWORD
from ding_store.storage import Store, open_store
from ding_store.storage.embedded.binary import find_server

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests'))

from sentinel_group import ASK_PASSWORD, Node, SentinelGroup, wait_until  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--readers', type=int, default=4, help='hosts that read (default: %(default)s)')
    parser.add_argument('--versions', type=int, default=10, help='versions of the value (default: %(default)s)')
    parser.add_argument('--mb', type=int, default=8, help='MiB of the value (default: %(default)s)')
    options = parser.parse_args()
    if min(options.readers, options.versions, options.mb) < 1:
        parser.error('--readers, --versions and --mb must be >= 1')
    os.environ[ENV_SENTINEL_PASSWORD] = ASK_PASSWORD
    with SentinelGroup(str(find_server())) as group:
        primary = group.primary()
        nodes = {'primary': primary, 'replica': next(one for one in group.servers if one is not primary)}
        print(f'{options.readers} readers, {options.versions} versions of {options.mb} MiB')
        print(f'{"read_replicas":15}{"server":10}{"sent, MiB":>10}{"CPU, s":>8}')
        for read_replicas in (False, True):
            before = {name: used(node) for name, node in nodes.items()}
            exchange(group.url(), options, nodes, read_replicas)
            for name, node in nodes.items():
                num_bytes, cpu_s = (after - begun for after, begun in zip(used(node), before[name]))
                print(f'{read_replicas!s:15}{name:10}{num_bytes / (1 << 20):10.0f}{cpu_s:8.2f}')
    return 0


def used(node: Node) -> Tuple[float, float]:
    """Return the bytes that a server has sent, to replicas also, and its CPU seconds."""
    info = node.client.info()
    return info['total_net_output_bytes'], info['used_cpu_user'] + info['used_cpu_sys']


def exchange(url: str, options: argparse.Namespace, nodes: Dict[str, Node], read_replicas: bool) -> None:
    generator = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:

        def opened(**changes: bool) -> Store:
            return stack.enter_context(open_store(url, 'replica-reads', host_plane='off', **changes))

        writer, readers = opened(), [opened(read_replicas=read_replicas) for _ in range(options.readers)]
        for _ in range(options.versions):
            version = writer.put('weights', {}, {'x': generator.integers(0, 255, options.mb << 20, np.uint8)})
            wait_until(lambda: is_level(nodes), 'the replica has all')
            for reader in readers:
                value = reader.get('weights')
                assert value is not None
                assert value.version == version
        writer.delete('weights')


def is_level(nodes: Dict[str, Node]) -> bool:
    sent = nodes['primary'].client.info('replication')['master_repl_offset']
    return bool(nodes['replica'].client.info('replication')['slave_repl_offset'] == sent)


if __name__ == '__main__':
    sys.exit(main())
