"""The ``ding-store bench`` command: what is measured is imported when it is asked for."""

from __future__ import annotations

import argparse
import os
from typing import List

from ding_store.errors import ConfigError


def add_bench(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser('bench', help='measure, beside the bound and the peers that are installed')
    parser.set_defaults(call=_bench)
    kinds = parser.add_subparsers(title='what', metavar='WHAT', required=True)
    replay = kinds.add_parser('replay', help='push, sample and priority update of replay buffers')
    replay.add_argument('--workloads', metavar='NAME,...', help='default: all of them')
    replay.add_argument('--buffers', metavar='NAME,...', help='default: ding_store, DequeBuffer and installed peers')
    replay.add_argument('--scale', type=float, default=1.0, help='rows, times this (default: %(default)s)')
    replay.add_argument('--seconds', type=float, default=2.0, help='per figure (default: %(default)s)')
    replay.add_argument(
        '--fill-seconds', type=float, default=180.0, help='peers that take longer are left out (default: %(default)s)'
    )
    replay.add_argument('--json', metavar='FILE', help='write all figures there')
    replay.set_defaults(bench=_bench_replay)
    transport = kinds.add_parser(
        'transport',
        help="a producer's process to a collated batch in the consumer's; the wire plane beside redis-py",
        description='Elements of 60 B, 113 KB and 3 MB from one process into warm batches of another: throughput '
        'beside memcpy and a bare ring, latency, bursts with an idle reader; the wire plane beside redis-py, with each '
        "codec, and beside torchrl's storage in Redis.",
    )
    transport.add_argument('--tables', metavar='NAME,...', help='processes, wire, compression, torchrl (default: all)')
    transport.add_argument('--elements', metavar='NAME,...', help='cartpole, dqn-atari, impala-atari (default: all)')
    transport.add_argument(
        '--paths', metavar='NAME,...', help='of `processes`; default: ours, a bare ring and installed peers'
    )
    transport.add_argument('--seconds', type=float, default=3.0, help='per figure (default: %(default)s)')
    transport.add_argument('--json', metavar='FILE', help='write all figures there')
    transport.set_defaults(bench=_bench_transport)
    checkpoint = kinds.add_parser('checkpoint', help='what a checkpoint makes training wait, beside torch.save')
    checkpoint.add_argument('--megabytes', type=float, default=500, help='of the state (default: %(default)s)')
    checkpoint.add_argument('--repeats', type=int, default=7, help='figures are medians (default: %(default)s)')
    checkpoint.add_argument('--directory', metavar='DIR', help='where to write (default: here)')
    checkpoint.add_argument('--json', metavar='FILE', help='write all figures there')
    checkpoint.set_defaults(bench=_bench_checkpoint)
    weights = kinds.add_parser('weights', help='from publishing weights until all readers of this host have them')
    weights.add_argument('--sizes', metavar='MB,...', default='50,500', help='default: %(default)s')
    weights.add_argument(
        '--ways', metavar='NAME,...', help='of bare, ding_store, in_place, torch, nng, ray; default: all'
    )
    weights.add_argument('--readers', type=int, default=4, help='processes that load (default: %(default)s)')
    weights.add_argument('--rounds', type=int, default=15, help='default: %(default)s')
    weights.add_argument('--json', metavar='FILE', help='write all figures there')
    weights.add_argument('--wire', action='store_true', help='between two hosts, over TCP, beside redis-py')
    weights.set_defaults(bench=_bench_weights)


def _bench(options: argparse.Namespace, command: List[str]) -> int:
    from ding_store.launch.termination import signals_as_interrupt

    with signals_as_interrupt():
        return options.bench(options, command)


def _bench_replay(options: argparse.Namespace, command: List[str]) -> int:
    # One thread, as every other figure of these tables: before numpy and torch are imported.
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    from ding_store.bench.replay import main as bench

    return bench(options.workloads, options.buffers, options.scale, options.seconds, options.fill_seconds, options.json)


def _bench_checkpoint(options: argparse.Namespace, command: List[str]) -> int:
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    if options.megabytes <= 0 or options.repeats < 1:
        raise ConfigError(
            f'--megabytes ({options.megabytes:g}) must be above 0 and --repeats ({options.repeats}) at least 1'
        )
    from ding_store.bench.checkpoint import main as bench

    return bench(options.megabytes, options.repeats, options.directory, options.json)


def _bench_weights(options: argparse.Namespace, command: List[str]) -> int:
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    if options.wire:
        from ding_store.bench.weights_wire import main as bench_wire

        return bench_wire(options.sizes, options.readers, options.rounds, options.json)
    from ding_store.bench.weights import main as bench

    return bench(options.sizes, options.ways, options.readers, options.rounds, options.json)


def _bench_transport(options: argparse.Namespace, command: List[str]) -> int:
    os.environ.setdefault('OMP_NUM_THREADS', '1')  # as above
    from ding_store.bench.transport import main as bench

    return bench(options.elements, options.paths, options.seconds, options.json, options.tables)
