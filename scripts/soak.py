"""Many writers and one reader like a learner, for any time: checks that memory stays flat, lag bounded, nothing lost.

    python scripts/soak.py --seconds 600

The default rate is that of DQN on Atari: 400 elements of 110 KB a second. The exit status is 1 if an entry was lost or
repeated, if memory grew, or if the rate was not reached.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Sequence

import numpy as np

from ding_store.storage import Reader, Store, open_store
from ding_store.storage.shared_memory.cache_files import files_of, size_of

STREAM = 'experience'
PAGE_BYTES = os.sysconf('SC_PAGE_SIZE')
MIN_SECONDS = 2
BARS = ' ▁▂▃▄▅▆▇█'


@dataclass
class Sample:
    """Figures of one second."""

    at_s: float
    num_rows: int
    rows_per_s: float
    lag: int
    pending_mb: float
    server_mb: float
    reader_mb: float
    writers_mb: float
    cache_mb: float  # files of the run in the host cache, which all of its processes map


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix='soak') as directory:
        url = options.store or f'embedded://{directory}'
        return soak(options, url)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=float, default=60.0)
    parser.add_argument('--processes', type=int, default=4, help='writer processes (default: %(default)s)')
    parser.add_argument(
        '--threads', type=int, default=16, help='threads per process, each with its own store (default: %(default)s)'
    )
    parser.add_argument('--rate', type=float, default=400.0, help='elements per second of all writers together')
    parser.add_argument('--element-bytes', type=int, default=110_000)
    parser.add_argument('--chunk', type=int, default=1, help='elements per entry (default: %(default)s)')
    parser.add_argument('--store', metavar='URL', help='URL of the store (default: a new server)')
    parser.add_argument('--run', default=f'soak-{os.getpid()}')
    parser.add_argument(
        '--host-plane', choices=('auto', 'off'), default='auto', help='off: all payloads go through the server'
    )
    parser.add_argument('--csv', metavar='FILE', help='write the figures of every second to FILE')
    parser.add_argument('--json', metavar='FILE', help='write the result to FILE')
    options = parser.parse_args()
    if options.seconds < MIN_SECONDS:
        parser.error(f'--seconds ({options.seconds:g}) must be >= {MIN_SECONDS}: figures are read once a second')
    return options


def soak(options: argparse.Namespace, url: str) -> int:
    context = multiprocessing.get_context('spawn')
    stop = context.Event()
    appended, done = context.Array('q', options.processes * options.threads), context.Semaphore(0)
    with open_store(url, options.run, host_plane=options.host_plane) as store:
        reader = Reader(store, STREAM, 'learner')
        writers = [
            context.Process(target=write, args=(number, options, url, stop, appended, done), daemon=True)
            for number in range(options.processes)
        ]
        for writer in writers:
            writer.start()
        samples: List[Sample] = []
        learner = Learner(reader, options)
        watching = threading.Thread(target=watch, args=(learner, store, writers, samples, stop), daemon=True)
        watching.start()
        learner.run(options.seconds)
        stop.set()
        deadline = time.monotonic() + 60
        # All is appended. Writers stay until the learner has read it.
        num_ended = sum(done.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in appended)
        learner.drain(sum(appended))
        for writer in writers:
            writer.join(60)
        watching.join(10)
        result = {
            'num_appended': sum(appended),
            'num_ingested': learner.num_rows,
            'num_lost': reader.num_lost,
            'num_wrong': learner.num_wrong,
            'num_writers': len(learner.expected),
            'max_lag': max(sample.lag for sample in samples),
            'faults': faults(samples, learner, reader, sum(appended), num_ended, options),
        }
        store.retire()
    report(options, samples, result)
    return 1 if result['faults'] else 0


def write(number: int, options: argparse.Namespace, url: str, stop: Any, appended: Any, done: Any) -> None:
    threads = [
        threading.Thread(target=write_one, args=(number * options.threads + i, options, url, stop, appended, done))
        for i in range(options.threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_one(number: int, options: argparse.Namespace, url: str, stop: Any, appended: Any, done: Any) -> None:
    period_s = options.chunk * options.processes * options.threads / options.rate
    obs = np.zeros((options.chunk, options.element_bytes), np.uint8)
    with open_store(url, options.run, host_plane=options.host_plane) as store:
        due, count = time.monotonic() + period_s * number / (options.processes * options.threads), 0
        while not stop.wait(max(0.0, due - time.monotonic())):
            obs[:] = count % 251
            store.append(STREAM, {'writer': number, 'count': count}, {'obs': obs})
            count += 1
            appended[number] += options.chunk
            due += period_s
        done.release()
        # Its copies are needed until the learner has read all.
        store.get('finished', timeout_s=60)


class Learner:
    """Reader that copies rows into a table of fixed size, and checks that each writer's come once and in order."""

    def __init__(self, reader: Reader, options: argparse.Namespace) -> None:
        self.reader = reader
        self.num_rows = 0
        self.num_wrong = 0
        self.expected: Dict[int, int] = {}
        self._table = np.zeros((1000, options.element_bytes), np.uint8)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step()

    def drain(self, total: int) -> None:
        """Read what was appended before the end. Then let the writers end."""
        end = time.monotonic() + 60
        while self.num_rows < total and time.monotonic() < end:
            self.step()
        self.reader.store.put('finished', {}, {})

    def step(self) -> None:
        for entry in self.reader.read(64, timeout_s=0.1):
            writer, count, obs = entry.header['writer'], entry.header['count'], entry.arrays['obs']
            slots = np.arange(self.num_rows, self.num_rows + len(obs)) % len(self._table)
            self._table[slots] = obs
            is_right = count == self.expected.get(writer, 0) and (obs[:, ::997] == count % 251).all()
            self.num_wrong += not is_right
            self.expected[writer] = count + 1
            self.num_rows += len(obs)
        self.reader.ack()


def watch(learner: Learner, store: Store, writers: Sequence[Any], samples: List[Sample], stop: Any) -> None:
    begin = last = time.monotonic()
    num_rows = 0
    while not stop.wait(1.0):
        info, now = store.info().streams.get(STREAM), time.monotonic()
        samples.append(
            Sample(
                at_s=now - begin,
                num_rows=learner.num_rows,
                rows_per_s=(learner.num_rows - num_rows) / (now - last),
                lag=info.last - info.floor if info else 0,
                pending_mb=(info.pending_bytes if info else 0) / 1e6,
                server_mb=server_bytes(store) / 1e6,
                reader_mb=rss_bytes(os.getpid()) / 1e6,
                writers_mb=sum(rss_bytes(writer.pid) for writer in writers) / 1e6,
                cache_mb=cache_bytes(store) / 1e6,
            )
        )
        last, num_rows = now, learner.num_rows


def server_bytes(store: Any) -> int:
    return int(
        store.client.server.connection.call('info', lambda session: session.client.info('memory')['used_memory'])
    )


def rss_bytes(pid: int) -> int:
    """Return a process's own memory. Mapped file pages are shared, and counted in ``cache_bytes``."""
    try:
        with open(f'/proc/{pid}/statm') as statm:
            words = statm.read().split()
    except OSError:
        return 0
    return (int(words[1]) - int(words[2])) * PAGE_BYTES


def cache_bytes(store: Any) -> int:
    cache = getattr(store, '_cache', None)
    return sum(map(size_of, files_of(os.path.dirname(cache.path_of(''))))) if cache is not None else 0


def faults(
    samples: List[Sample],
    learner: Learner,
    reader: Reader,
    num_appended: int,
    num_ended: int,
    options: argparse.Namespace,
) -> List[str]:
    found, num_writers = [], options.processes * options.threads
    if num_ended < num_writers:
        found.append(f'{num_writers - num_ended} of {num_writers} writers did not come to their end')
    if learner.num_rows != num_appended:
        found.append(f'{num_appended} rows were appended, {learner.num_rows} ingested')
    if reader.num_lost or learner.num_wrong:
        found.append(f'{reader.num_lost} entries were lost, {learner.num_wrong} were torn, repeated or out of order')
    # Caches and pools fill in the first quarter.
    settled = samples[len(samples) // 4 :]
    half = len(settled) // 2
    if half:
        seconds, num_rows = settled[-1].at_s - settled[0].at_s, settled[-1].num_rows - settled[0].num_rows
        # A second's rows may still be on their way.
        if num_rows < (0.95 * seconds - 1) * options.rate:
            found.append(f'{options.rate:g} rows a second were requested, {num_rows / seconds:.0f} came')
    # The lag may grow by the entries of a second, because a busy machine may pause at any moment.
    slack = {'server_mb': 10, 'reader_mb': 10, 'writers_mb': 10, 'cache_mb': 20, 'lag': options.rate / options.chunk}
    for name in slack if half else ():
        before, after = (np.median([getattr(one, name) for one in part]) for part in (settled[:half], settled[half:]))
        if after > 1.1 * before + slack[name]:
            found.append(f'{name} grew from {before:.0f} to {after:.0f}')
    return found


def report(options: argparse.Namespace, samples: List[Sample], result: Dict[str, Any]) -> None:
    if options.csv:
        with open(options.csv, 'w', newline='') as file:
            rows = csv.DictWriter(file, list(asdict(samples[0])))
            rows.writeheader()
            rows.writerows(asdict(sample) for sample in samples)
    if options.json:
        with open(options.json, 'w') as file:
            json.dump(result, file)
    print(f'{"":12} {"min":>9} {"median":>9} {"max":>9}  over time')
    for name in ('rows_per_s', 'lag', 'pending_mb', 'server_mb', 'reader_mb', 'writers_mb', 'cache_mb'):
        values = [float(getattr(sample, name)) for sample in samples]
        line = f'{min(values):9.1f} {np.median(values):9.1f} {max(values):9.1f}'
        print(f'{name:12} {line}  {sparkline(values)}')
    for name, value in result.items():
        print(f'{name}: {value}')


def sparkline(values: List[float], width: int = 60) -> str:
    """Return marks from zero to the largest value. Each mark is the largest of its part of the time."""
    parts = [part.max() for part in np.array_split(values, min(width, len(values)))]
    top = max(parts) or 1.0
    return ''.join(BARS[int(np.ceil(value / top * (len(BARS) - 1)))] for value in parts)


if __name__ == '__main__':
    sys.exit(main())
