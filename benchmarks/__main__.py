"""
Benchmarks: figures with their bounds and with peers, all measured in one run.

    python -m benchmarks replay --workloads small-per --json figures.json

A benchmark and its peers are imported only when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Optional, Sequence

from ding_store.errors import ConfigError, StoreError


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one benchmark and return the exit code."""
    from ding_store.cli import check_outputs
    from ding_store.launch.termination import signals_as_interrupt

    options = _parser().parse_args(argv)
    # One thread, as in every other figure of these tables. Set it before numpy and torch are imported.
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    try:
        check_outputs(options)
        with signals_as_interrupt():
            return options.bench(options)
    except (StoreError, KeyboardInterrupt) as error:
        sys.stderr.write(f'benchmarks: {str(error) or "interrupted"}\n')
        return 2 if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks', description='Measure the store, its bounds and the peers that are installed.'
    )
    kinds = parser.add_subparsers(title='benchmarks', metavar='WHAT', required=True)
    replay = kinds.add_parser('replay', help='push, sample and priority update of replay buffers')
    replay.add_argument('--workloads', metavar='NAME,...', help='workloads to measure (default: all)')
    replay.add_argument(
        '--buffers',
        metavar='NAME,...',
        help='buffers to measure (default: ding_store, DequeBuffer and installed peers)',
    )
    replay.add_argument('--scale', type=float, default=1.0, help='factor of the number of rows (default: %(default)s)')
    replay.add_argument('--seconds', type=float, default=2.0, help='seconds per figure (default: %(default)s)')
    replay.add_argument(
        '--fill-seconds', type=float, default=180.0, help='leave out peers that take longer (default: %(default)s)'
    )
    replay.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    replay.set_defaults(bench=_bench_replay)
    frames = kinds.add_parser('frames', help='replay and chunks of Atari frames, shared and not shared')
    frames.add_argument('--games', metavar='NAME,...', help='games to play (default: pong, qbert, space_invaders)')
    frames.add_argument('--rows', type=int, default=20_000, help='rows of the replay (default: %(default)s)')
    frames.add_argument('--seconds', type=float, default=2.0, help='seconds per figure (default: %(default)s)')
    frames.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    frames.set_defaults(bench=_bench_frames)
    datasets = kinds.add_parser(
        'datasets', help="epochs of a data set, cold and warm, beside torch's DataLoader over DI-engine's HDF5 data set"
    )
    datasets.add_argument('--rows', type=int, default=200_000, help='rows of 2.9 KB (default: %(default)s)')
    datasets.add_argument('--records', type=int, default=1_000_000, help='records of 256 B (default: %(default)s)')
    datasets.add_argument('--seconds', type=float, default=3.0, help='seconds per figure (default: %(default)s)')
    datasets.add_argument('--directory', metavar='DIR', help='directory on the disk to measure (default: TMPDIR)')
    datasets.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    datasets.set_defaults(bench=_bench_datasets)
    bank = kinds.add_parser('bank', help='appends and gathers of a memory bank, and the memory of its readers')
    bank.add_argument('--megabytes', type=float, default=400, help='size of a bank in MB (default: %(default)s)')
    bank.add_argument('--seconds', type=float, default=2.0, help='seconds per figure (default: %(default)s)')
    bank.add_argument('--directory', metavar='DIR', help='directory for files (default: that of temporary files)')
    bank.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    bank.set_defaults(bench=_bench_bank)
    objects = kinds.add_parser(
        'objects', help='put and get of objects beside memcpy and Ray, spilled reads, and eviction orders on traces'
    )
    objects.add_argument('--seconds', type=float, default=2.0, help='seconds per figure (default: %(default)s)')
    objects.add_argument('--directory', metavar='DIR', help='directory on the disk to spill to (default: TMPDIR)')
    objects.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    objects.set_defaults(bench=_bench_objects)
    transport = kinds.add_parser(
        'transport',
        help="from a producer's process to a consumer's collated batch, and Redis compared with redis-py",
        description='Send elements of 60 B, 113 KB and 3 MB from one process into warm batches of another. Print '
        'throughput beside memcpy and a bare ring, latency, and bursts with an idle reader. Then measure the Redis '
        "transport with each codec, and compare it with redis-py and torchrl's storage in Redis.",
    )
    transport.add_argument(
        '--tables', metavar='NAME,...', help='tables to print: processes, wire, compression, torchrl (default: all)'
    )
    transport.add_argument(
        '--elements', metavar='NAME,...', help='elements to send: cartpole, dqn-atari, impala-atari (default: all)'
    )
    transport.add_argument(
        '--paths', metavar='NAME,...', help='paths of table processes (default: ours, a bare ring and installed peers)'
    )
    transport.add_argument('--seconds', type=float, default=3.0, help='seconds per figure (default: %(default)s)')
    transport.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    transport.set_defaults(bench=_bench_transport)
    checkpoint = kinds.add_parser('checkpoint', help='how long a checkpoint stalls training, compared with torch.save')
    checkpoint.add_argument(
        '--megabytes', type=float, default=500, help='size of the state in MB (default: %(default)s)'
    )
    checkpoint.add_argument(
        '--repeats', type=int, default=7, help='number of checkpoints; figures are medians (default: %(default)s)'
    )
    checkpoint.add_argument('--directory', metavar='DIR', help='directory to write to (default: the current one)')
    checkpoint.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    checkpoint.set_defaults(bench=_bench_checkpoint)
    weights = kinds.add_parser('weights', help='time from publishing weights until all readers of this host have them')
    weights.add_argument(
        '--sizes', metavar='MB,...', default='50,500', help='sizes of the weights in MB (default: %(default)s)'
    )
    weights.add_argument(
        '--ways', metavar='NAME,...', help='ways to measure: bare, ding_store, in_place, torch, nng, ray (default: all)'
    )
    weights.add_argument(
        '--readers', type=int, default=4, help='number of processes that load the weights (default: %(default)s)'
    )
    weights.add_argument('--rounds', type=int, default=15, help='rounds to measure (default: %(default)s)')
    weights.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    weights.add_argument(
        '--wire', action='store_true', help='measure between two hosts, over TCP, compared with redis-py'
    )
    weights.set_defaults(bench=_bench_weights)
    learners = kinds.add_parser('learners', help='several learners, beside the same loop on data in memory with gloo')
    learners.add_argument('--learners', metavar='N,...', default='2', help='numbers of learners (default: %(default)s)')
    learners.add_argument('--batch', type=int, default=512, help='batch of all learners (default: %(default)s)')
    learners.add_argument('--updates', type=int, default=300, help='a multiple of 10 (default: %(default)s)')
    learners.add_argument('--rounds', type=int, default=5, help='rounds to measure (default: %(default)s)')
    learners.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    learners.set_defaults(bench=_bench_learners)
    parameters = kinds.add_parser(
        'parameters',
        help='one synchronous step of several workers through a parameter server, compared with gloo',
        description='Measure a step of several processes: their gradients become the parameters that all of them '
        'continue with. The ways take turns. Ratios are of the same round, with quartiles.',
    )
    parameters.add_argument(
        '--sizes', metavar='MB,...', default='5,50', help='sizes of the model in MB (default: %(default)s)'
    )
    parameters.add_argument(
        '--workers', metavar='N,...', default='2,4', help='numbers of workers (default: %(default)s)'
    )
    parameters.add_argument('--rounds', type=int, default=15, help='rounds to measure (default: %(default)s)')
    parameters.add_argument('--json', metavar='FILE', help='write all figures to FILE')
    parameters.add_argument(
        '--wire', action='store_true', help='send all bytes through the Redis server, compared with redis-py'
    )
    parameters.set_defaults(bench=_bench_parameters)
    return parser


def _bench_replay(options: argparse.Namespace) -> int:
    from benchmarks.replay import main as bench

    return bench(options.workloads, options.buffers, options.scale, options.seconds, options.fill_seconds, options.json)


def _bench_frames(options: argparse.Namespace) -> int:
    from benchmarks.frames import main as bench

    return bench(options.games, options.rows, options.seconds, options.json)


def _bench_datasets(options: argparse.Namespace) -> int:
    from benchmarks.datasets import main as bench

    return bench(options.rows, options.records, options.seconds, options.directory, options.json)


def _bench_bank(options: argparse.Namespace) -> int:
    from benchmarks.bank import main as bench

    return bench(options.megabytes, options.seconds, options.directory, options.json)


def _bench_objects(options: argparse.Namespace) -> int:
    from benchmarks.objects import main as bench

    return bench(options.seconds, options.directory, options.json)


def _bench_checkpoint(options: argparse.Namespace) -> int:
    if options.megabytes <= 0 or options.repeats < 1:
        raise ConfigError(
            f'--megabytes ({options.megabytes:g}) must be above 0 and --repeats ({options.repeats}) at least 1'
        )
    from benchmarks.checkpoint import main as bench

    return bench(options.megabytes, options.repeats, options.directory, options.json)


def _bench_weights(options: argparse.Namespace) -> int:
    if options.wire:
        from benchmarks.weights_wire import main as bench_wire

        return bench_wire(options.sizes, options.readers, options.rounds, options.json)
    from benchmarks.weights import main as bench

    return bench(options.sizes, options.ways, options.readers, options.rounds, options.json)


def _bench_parameters(options: argparse.Namespace) -> int:
    from benchmarks.parameters import main as bench

    return bench(options.sizes, options.workers, options.rounds, options.json, options.wire)


def _bench_learners(options: argparse.Namespace) -> int:
    from benchmarks.learners import main as bench

    return bench(options.learners, options.batch, options.updates, options.rounds, options.json)


def _bench_transport(options: argparse.Namespace) -> int:
    from benchmarks.transport import main as bench

    return bench(options.elements, options.paths, options.seconds, options.json, options.tables)


if __name__ == '__main__':
    sys.exit(main())
