"""Failovers of a Redis server at random moments: no entry may be lost, doubled or reordered.

    python scripts/failover.py --failovers 100 --seed 7

A primary, a replica and three sentinels run with the files of docs/howto/sentinel.md. Two writers append numbered
entries without a pause between failovers: one by the store, one by XADD with redis-py's Sentinel client. Two readers
read them, by the store and by XREADGROUP. Both writers try again after an error. Each failover is one of:

    kill   the primary is killed, and comes back as a replica
    stop   the primary is stopped, and continues as a second primary until the sentinels notice
    plan   the sentinels are told to move the primary
    lag    the replica lags up to a second, then the primary is killed

The exit status is 1 if an entry of the store was lost, doubled or reordered.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import redis
from redis.sentinel import MasterNotFoundError, Sentinel

from ding_store.environment import ENV_SENTINEL_PASSWORD
from ding_store.parent_death import end_with
from ding_store.storage import Reader, open_store
from ding_store.storage.embedded.binary import find_server

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / 'tests' / part) for part in ('', 'storage')]

import sentinel_group  # noqa: E402
from proxy import Proxy  # noqa: E402
from sentinel_group import Node, SentinelGroup, wait_until  # noqa: E402

PAUSE_S = 0.005  # between two entries of a writer
DRAIN_S = 60.0
STREAM = 'entries'
SIDES = ('store', 'plain')
BYTES = b'x' * 1000
#: Errors after which the plain writer and reader try again.
PASSING = (redis.RedisError, MasterNotFoundError)


def main() -> int:
    options = parse()
    os.environ[ENV_SENTINEL_PASSWORD] = sentinel_group.ASK_PASSWORD
    options.directory = Path(tempfile.mkdtemp(prefix='failover'))
    try:
        with SentinelGroup(str(find_server())) as group:
            options.url = group.url()
            options.sentinels = [('127.0.0.1', sentinel.port) for sentinel in group.sentinels]
            result = Failovers(options, group).run()
    finally:
        shutil.rmtree(options.directory, ignore_errors=True)
    report(options, result)
    return int(any(result['store'][fault] for fault in ('lost', 'twice', 'out of order')))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--failovers', type=int, default=10, help='number of failovers (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=random.randrange(1 << 31), help='seed of moments and kinds')
    parser.add_argument('--kinds', default=','.join(KINDS), help='kinds to choose from (default: %(default)s)')
    parser.add_argument('--json', metavar='FILE', help='write the result to FILE')
    options = parser.parse_args()
    options.kinds = options.kinds.split(',')
    if not set(options.kinds) <= set(KINDS):
        parser.error(f'--kinds ({",".join(options.kinds)}) must be of {", ".join(KINDS)}')
    if options.failovers < 1:
        parser.error(f'--failovers ({options.failovers}) must be >= 1')
    return options


# --- the four processes


class Records(List[Tuple[int, float]]):
    """Numbers of entries and times, which one process writes and another one reads."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        super().__init__()
        self.path, self.place = options.directory / name, 0
        self.stop, self.drained = options.directory / 'stop', options.directory / 'drained'
        self.path.touch()

    def write(self, number: int, at: float) -> None:
        with open(self.path, 'ab', buffering=0) as file:
            file.write(f'{number} {at}\n'.encode())

    def poll(self) -> Records:
        with open(self.path, 'rb') as file:
            file.seek(self.place)
            lines, end, _ = file.read().rpartition(b'\n')
        self.place += len(lines + end)
        self.extend((int(number), float(at)) for number, at in map(bytes.split, lines.splitlines()))
        return self


def live(options: argparse.Namespace, parent: int, target: Any, name: str) -> None:
    end_with(parent, signal.SIGKILL)
    os.setsid()
    logging.basicConfig(filename=f'{options.directory}/{name}.log', level='INFO', format='%(asctime)s %(message)s')
    target(options, Records(options, name))


def write_to_store(options: argparse.Namespace, records: Records) -> None:
    number = 0
    with open_store(options.url, 'failover', host_plane='off') as store:
        while not records.stop.exists():
            number, begun_at = number + 1, time.time()
            store.append(STREAM, {'number': number, 'bytes': len(BYTES)}, {})
            records.write(number, begun_at)
            time.sleep(PAUSE_S)


def read_from_store(options: argparse.Namespace, records: Records) -> None:
    with open_store(options.url, 'failover', host_plane='off') as store:
        reader = Reader(store, STREAM, 'reader')
        (options.directory / 'registered').touch()
        while not records.drained.exists():
            for entry in reader.read(64, timeout_s=0.2):
                records.write(entry.header['number'], time.time())
            reader.ack()


def plain_client(options: argparse.Namespace) -> redis.Redis:
    login = {'password': sentinel_group.ASK_PASSWORD, 'socket_timeout': 0.5}
    sentinel = Sentinel(options.sentinels, sentinel_kwargs=login, socket_timeout=3.0)
    return sentinel.master_for('mymaster')


def write_plainly(options: argparse.Namespace, records: Records) -> None:
    number, client = 0, plain_client(options)
    while not records.stop.exists():
        number, begun_at = number + 1, time.time()
        while True:
            try:
                client.xadd('plain', {'number': number, 'bytes': BYTES})
                break
            except PASSING:
                time.sleep(0.1)
        records.write(number, begun_at)
        time.sleep(PAUSE_S)


def read_plainly(options: argparse.Namespace, records: Records) -> None:
    client = plain_client(options)
    client.xgroup_create('plain', 'readers', id='0', mkstream=True)
    while not records.drained.exists():
        try:
            for _, entries in client.xreadgroup('readers', 'reader', {'plain': '>'}, count=64, block=200) or ():
                for _, fields in entries:
                    records.write(int(fields[b'number']), time.time())
                client.xack('plain', 'readers', *(key for key, _ in entries))
        except PASSING:
            time.sleep(0.1)


# --- the failovers


class Failovers:
    def __init__(self, options: argparse.Namespace, group: SentinelGroup) -> None:
        self.options, self.group, self.chance = options, group, random.Random(options.seed)
        self.rows: List[Dict[str, Any]] = []
        self.books = {f'{do}-{side}': Records(options, f'{do}-{side}') for do in ('read', 'write') for side in SIDES}
        self.processes: List[Any] = []
        self.began_at = self.failed_over_at = 0.0

    def run(self) -> Dict[str, Any]:
        self.start('read-store', read_from_store)
        self.start('read-plain', read_plainly)
        wait_until((self.options.directory / 'registered').exists, 'the reader is registered')
        self.start('write-store', write_to_store)
        self.start('write-plain', write_plainly)
        wait_until(lambda: all(self.books[f'read-{side}'].poll() for side in SIDES), 'entries arrive')
        try:
            for number in range(self.options.failovers):
                time.sleep(self.chance.uniform(0.2, 1.5))
                self.fail_over(number)
            (self.options.directory / 'stop').touch()
            self.drain()
        finally:
            (self.options.directory / 'drained').touch()
            for process in self.processes:
                process.join(DRAIN_S)
                process.kill()
        return {'failovers': self.rows, 'store': self.balance('store'), 'plain': self.balance('plain')}

    def start(self, name: str, target: Any) -> None:
        arguments = (self.options, os.getpid(), target, name)
        process = multiprocessing.get_context('spawn').Process(target=live, args=arguments, daemon=True)
        process.start()
        self.processes.append(process)

    def fail_over(self, number: int) -> None:
        kind, former = self.chance.choice(self.options.kinds), self.group.primary()
        self.num_read = {side: len(self.books[f'read-{side}'].poll()) for side in SIDES}
        KINDS[kind](self, former)  # returns when the former primary is a replica
        row = {'kind': kind, 'failover_s': self.failed_over_at - self.began_at}
        for side in SIDES:
            row[f'{side}_s'] = self.pause_of(side)
        self.rows.append(row)
        said = ', '.join(f'{name} {value:.2f}' for name, value in row.items() if name != 'kind')
        print(f'{number + 1:4} {kind:5} {said}', file=sys.stderr, flush=True)

    def pause_of(self, side: str) -> float:
        """Return the longest pause of the reader until it has read an entry that came behind the failover."""
        written, read = self.books[f'write-{side}'], self.books[f'read-{side}']

        def has_read_newer() -> bool:
            is_newer = itertools.takewhile(lambda entry: entry[1] > self.failed_over_at, reversed(written.poll()))
            numbers = {number for number, _ in is_newer}
            return any(number in numbers for number, _ in read.poll()[self.num_read[side] :])

        wait_until(has_read_newer, f'an entry arrives: {side}')
        times = [self.began_at, *(at for _, at in read[self.num_read[side] :] if at > self.began_at)]
        return max(after - before for before, after in zip(times, times[1:]))

    def note_failover(self, former: Node) -> None:
        self.group.wait_for_failover(former)
        self.failed_over_at = time.time()

    def kill(self, former: Node) -> None:
        self.began_at = time.time()
        former.kill()
        self.note_failover(former)
        self.group.restart_as_replica(former)

    def stop(self, former: Node) -> None:
        self.began_at = time.time()
        former.signal(sentinel_group.STOP)
        self.note_failover(former)
        time.sleep(self.chance.uniform(0.0, 3.0))
        former.signal(sentinel_group.CONTINUE)
        if self.chance.random() < 0.5:
            self.group.follow(former)  # else it is a second primary until the sentinels see that, after 8 s
        wait_until(self.group.is_complete, 'the sentinels see the replica')

    def plan(self, former: Node) -> None:
        self.began_at = time.time()
        self.group.plan_failover()
        self.note_failover(former)
        wait_until(self.group.is_complete, 'the sentinels see the replica')

    def lag(self, former: Node) -> None:
        (replica,) = [one for one in self.group.servers if one is not former]
        with Proxy(('127.0.0.1', former.port)) as proxy:
            replica.client.replicaof('127.0.0.1', proxy.port)
            self.group.wait_for_link(replica)
            proxy.black_hole()
            time.sleep(self.chance.uniform(0.0, 1.0))
            self.began_at = time.time()
            former.kill()
            proxy.cut()
            self.note_failover(former)
        self.group.restart_as_replica(former)

    # --- the result

    def drain(self) -> None:
        """Wait until the readers have all, or have read nothing more for a while."""
        for process in self.processes[2:]:
            process.join(DRAIN_S)
        sizes: Dict[str, int] = {}
        since = time.monotonic()
        while time.monotonic() < since + 5.0:
            now = {side: len(self.books[f'read-{side}'].poll()) for side in SIDES}
            if now != sizes:
                sizes, since = now, time.monotonic()
            time.sleep(0.5)

    def balance(self, side: str) -> Dict[str, int]:
        appended = [number for number, _ in self.books[f'write-{side}'].poll()]
        read = [number for number, _ in self.books[f'read-{side}'].poll()]
        counts = collections.Counter(read)
        return {
            'appended': len(appended),
            'read': len(read),
            'lost': len(set(appended) - set(read)),
            'twice': sum(count - 1 for count in counts.values()),
            'out of order': sum(b < a for a, b in zip(read, read[1:])),
        }


KINDS: Dict[str, Callable[[Failovers, Node], None]] = {
    'kill': Failovers.kill,
    'stop': Failovers.stop,
    'plan': Failovers.plan,
    'lag': Failovers.lag,
}


def report(options: argparse.Namespace, result: Dict[str, Any]) -> None:
    if options.json:
        Path(options.json).write_text(json.dumps({'seed': options.seed, **result}))
    for side, name in (('store', 'ding_store'), ('plain', 'redis-py')):
        print(f'{name:12}' + ', '.join(f'{what} {count}' for what, count in result[side].items()))
    print(
        'seconds, median and maximum: until the sentinels name another primary '
        f'(down-after: {sentinel_group.DOWN_AFTER_S:g}), and the longest pause of each reader'
    )
    for kind in options.kinds:
        rows = [row for row in result['failovers'] if row['kind'] == kind]
        if rows:
            columns = ('failover_s', 'store_s', 'plain_s')
            values = {name: [row[name] for row in rows] for name in columns}
            text = ', '.join(f'{name[:-2]} {statistics.median(v):.2f} {max(v):.2f}' for name, v in values.items())
            print(f'{kind:5}{len(rows):4}  {text}')
    late = [row['store_s'] - row['failover_s'] for row in result['failovers'] if row['kind'] != 'plan']
    if late:
        text = f'median {statistics.median(late):.2f}, maximum {max(late):.2f}'
        print(f'from the failover to the next entry in the reader of the store: {text}')
    print(f'seed {options.seed}')


if __name__ == '__main__':
    sys.exit(main())
