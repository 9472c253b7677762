"""Random faults against a store of real processes: no entry may be lost, torn, doubled or reordered, no wait hang.

    python scripts/chaos.py --seconds 120 --seed 7
    python scripts/chaos.py --seconds 120 --seed 7 --servers 2
    python scripts/chaos.py --seconds 120 --seed 7 --cluster

Writers append numbered entries. Durable readers commit what they read and their marks before they ack. About every
second a process is killed or stopped, a connection cut, or a file deleted. If the records of writers and readers differ
at the end, the exit status is 1, and the records and logs are kept.

The server also goes back in time within one generation: it reloads an older file, or follows a lagging replica.

With several servers, there is a stream on each. Each writer appends to one stream, and each reader reads all of them,
in threads. kill_shard keeps one server down until the others' entries were read. Other faults that lose memory are for
the first server.

With --cluster, the servers are three primaries of a Redis Cluster with a replica each, and there is a stream on each
primary. A primary is killed (fail_over), replaced on purpose (plan_fail_over), or killed while its replica lacks the
newest entries (lag). Or it is stopped until another one has replaced it, and then goes on (two_primaries). A stream's
slot is moved key by key (reshard).

Faults that the store does not cover are left out. The server keeps its memory while a writer may not have the list of
all readers. It goes back only to moments with the same readers. After a loss, no writer is killed or started until all
entries are announced again. Entries that only a killed writer had may be missing.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Callable, DefaultDict, Dict, Iterator, List, Optional, Tuple

import numpy as np
import redis

from ding_store.errors import StoreError
from ding_store.parent_death import end_with
from ding_store.storage import Reader
from ding_store.storage.embedded.binary import find_server
from ding_store.storage.options import HostOptions
from ding_store.storage.redis.groups import NUM_GROUPS, slot_of, tag_of
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.shards.placement import shard_of
from ding_store.storage.shared_memory.cache_root import root_in

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests'))

from redis_cluster import REPLICA_PASSWORD, Node, RedisCluster, wait_until  # noqa: E402

NEAR, FAR = 'near', 'far'  # directories of host caches
PATIENCE_S = 15.0  # wait for a payload that only a killed writer had (the default outlasts most runs)
HANG_S = 150.0  # no wait of any process may be longer
PAUSE_S = 20.0  # no new fault if nothing was read for this time


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.directory, options.ports = Path(tempfile.mkdtemp(prefix='chaos')), free_ports()
    result: Dict[str, Any] = {'problems': []}
    with RedisCluster(options.binary, 3, 3) if options.cluster else nullcontext() as cluster:
        options.url = cluster.url() if cluster else ''
        chaos = Chaos(options, cluster)
        try:
            chaos.run()
            result = chaos.result()
        finally:
            for child in chaos.children():
                child.kill()
            if not result['problems']:
                shutil.rmtree(options.directory, ignore_errors=True)
    report(options, result)
    return 1 if result['problems'] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=float, default=60.0, help='seconds of faults (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=random.randrange(1 << 31), help='seed of faults and payloads')
    parser.add_argument('--writers', type=int, default=3, help='writers at a time (default: %(default)s)')
    parser.add_argument(
        '--readers', type=int, default=2, help='readers from the beginning to the end (default: %(default)s)'
    )
    parser.add_argument('--servers', type=int, default=1, help='servers of one run (default: %(default)s)')
    parser.add_argument('--cluster', action='store_true', help='a Redis Cluster instead of servers')
    parser.add_argument('--faults', metavar='NAME,...', help='faults to choose from (default: all)')
    parser.add_argument('--json', metavar='FILE', help='write the result to FILE')
    options = parser.parse_args()
    for name, least in (('seconds', 1), ('seed', 0), ('writers', 1), ('readers', 1), ('servers', 1)):
        if not least <= getattr(options, name) < 1 << 31:
            parser.error(f'--{name} ({getattr(options, name):g}) must be >= {least} and below 2^31')
    if options.cluster and options.servers > 1:
        parser.error(f'--cluster is for --servers 1, and not {options.servers}')
    if options.cluster:
        known = [*CLUSTER_FAULTS, 'kill_writer', 'kill_reader', 'stop_writer', 'stop_reader', 'delete_cache']
    else:
        known = [name for name in FAULTS if options.servers > 1 or name != 'kill_shard']
    options.faults = known if options.faults is None else options.faults.split(',')
    if not set(options.faults) <= set(known):
        parser.error(f'--faults ({",".join(options.faults)}) must be of {", ".join(known)}')
    num_streams = 3 if options.cluster else options.servers
    options.streams = ['s'] if num_streams == 1 else [f's/{number}' for number in range(num_streams)]
    try:
        options.binary = str(find_server())
        version = subprocess.run([options.binary, '--version'], check=True, capture_output=True, text=True).stdout
        options.allows_debug = 'v=6.' not in version  # only from Redis 7 on it must be allowed
        open(options.json or os.devnull, 'a').close()
    except (StoreError, OSError, subprocess.CalledProcessError) as e:
        parser.error(str(e))
    return options


def live(options: argparse.Namespace, parent: int, name: str, target: Any, number: int, host: str) -> None:
    end_with(parent, signal.SIGKILL)
    os.setsid()  # Ctrl-C is for the parent, which then kills this process
    logging.basicConfig(filename=f'{options.directory}/{name}.log', level='INFO', format='%(asctime)s %(message)s')
    target(options, Books(options, name), number, host)


def serve(options: argparse.Namespace, _: Any, number: int, host: str) -> None:
    directory = directory_of(options, number)
    directory.mkdir(exist_ok=True)
    words = '--logfile server.log --appendonly yes --appendfsync always'
    if options.allows_debug:
        words += ' --enable-debug-command yes'
    redis_server(options, directory, words)


def lag(options: argparse.Namespace, *_: Any) -> None:
    """Run a replica, which is detached from the server most of the time."""
    directory = options.directory / 'lagging'
    directory.mkdir(exist_ok=True)
    redis_server(options, directory, '--logfile server.log')


def redis_server(options: argparse.Namespace, directory: Path, words: str) -> None:
    os.chdir(directory)
    ports = {'lagging': options.ports[0], options.directory.name: options.ports[1]}
    port = ports.get(directory.name, 0)
    words += f' --port {port} --bind 127.0.0.1 --unixsocket redis.sock --repl-diskless-sync-delay 0 --save '
    os.execv(options.binary, [options.binary, *words.split(' ')])


def directory_of(options: argparse.Namespace, number: int) -> Path:
    """Return the directory of a server. The first one's has the records of all processes as well."""
    return Path(options.directory, *[f'server-{number}'] * (number > 0))


def free_ports() -> Tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(('127.0.0.1', 0))
        return one.getsockname()[1], other.getsockname()[1]


def opened(options: argparse.Namespace, host: str) -> RedisStore:
    # A small limit: a reader that is away fills the stream, and writers wait.
    waits: Dict[str, Any] = {'check_every_s': 1.0, 'connect_timeout_s': HANG_S}
    (options.directory / host).mkdir(exist_ok=True)
    cache = HostOptions(host_cache_dir=str(options.directory / host))
    sockets = (f'unix://{directory_of(options, number)}/redis.sock' for number in range(options.servers))
    store = RedisStore(options.url or ' '.join(sockets), 'chaos', host=cache, max_pending_bytes=8 << 20, **waits)
    store.client.server.patience_s = PATIENCE_S
    return store


def write(options: argparse.Namespace, books: Books, writer: int, host: str) -> None:
    pauses, number, stream = random.Random(writer), 0, options.streams[writer % len(options.streams)]
    with opened(options, host) as store:
        while not (options.directory / 'finish').exists():
            number, begun_at = number + 1, time.monotonic()
            header = {'writer': writer, 'number': number}
            try:
                store.append(stream, header, {'p': payload_of(options, **header)}, timeout_s=HANG_S)
                books.write('confirmed', number, begun_at)
            except StoreError as e:  # the entry may be there, or not
                books.write('raised', number, repr(e))
            time.sleep(pauses.choice((0.0, 0.0, 0.0, 0.005, 0.05)))


def read(options: argparse.Namespace, books: Books, _: int, host: str) -> None:
    os.truncate(books.path, books.place)  # a line that a kill cut off was not committed
    with opened(options, host) as store, ThreadPoolExecutor(len(options.streams)) as pool:
        readers = []
        for stream in options.streams:
            lines = [line for line in books['read'] if line[0].endswith(f' {stream}')]
            marks = dict(mark for line in lines for mark in line[2].items())
            heads = lines[-1][3] if lines else None
            readers.append(Reader(store, stream, books.name, marks=marks, heads=heads, loss_grace_s=PATIENCE_S))
        books.write('registered', time.monotonic())
        for done in as_completed([pool.submit(read_stream, options, books, reader) for reader in readers]):
            if done.exception() is not None:
                logging.error('a thread failed', exc_info=done.exception())
                os._exit(1)  # the others would go on


def read_stream(options: argparse.Namespace, books: Books, reader: Reader) -> None:
    marks, chance, is_done = reader.marks, random.Random(), False
    while not is_done:
        is_last, is_leaving = ((options.directory / word).exists() for word in ('drain', f'leave-{books.name}'))
        entries = reader.read(chance.randint(1, 64), timeout_s=0.5)
        expected = [payload_of(options, **one.header) for one in entries]
        seen = [(*one.header.values(), np.array_equal(one.arrays['p'], p)) for one, p in zip(entries, expected)]
        changed = dict(reader.marks.items() - marks.items())
        marks.update(changed)
        counts, generation = (reader.num_lost, reader.num_duplicates), f'{os.getpid()} {reader.stream}'
        # Write entries and their marks in one line, so that a kill keeps all of it or nothing.
        books.write('read', generation, counts, changed, reader.heads(), seen)
        is_done = is_leaving or (is_last and not entries and reader.lag() == 0)
        if is_done or chance.random() < 0.8:
            reader.ack(wait=is_done or chance.random() < 0.5)
    if is_leaving:
        reader.forget()


def payload_of(options: argparse.Namespace, writer: int, number: int) -> np.ndarray[Any, Any]:
    """Return a payload that follows from its writer and number. Sizes are log-uniform from 4 to 300,000 bytes."""
    chance = np.random.default_rng([options.seed, writer, number])
    return np.frombuffer(chance.bytes(int(np.exp(chance.uniform(np.log(4), np.log(300_000))))), np.uint8)


class Books(DefaultDict[str, List[Any]]):
    """Records that a process committed, one per line: kind -> lines."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        super().__init__(list)
        self.name, self.path, self.place = name, options.directory / f'{name}.books', 0
        self.path.touch()
        self.poll()

    def write(self, kind: str, *what: Any) -> None:
        with open(self.path, 'ab', buffering=0) as file:
            file.write(json.dumps((kind, *what)).encode() + b'\n')

    def poll(self) -> None:
        with open(self.path, 'rb') as file:
            file.seek(self.place)
            lines, end, _ = file.read().rpartition(b'\n')
        self.place += len(lines + end)
        for kind, *what in map(json.loads, lines.splitlines()):
            self[kind].append(what)


class Child:  # a writer, or a reader or server over several restarts
    def __init__(self, options: argparse.Namespace, name: str, target: Any, number: int = 0, host: str = NEAR) -> None:
        self.options, self.name, self.target, self.number, self.host = options, name, target, number, host
        self.books = Books(options, name)
        self.lives, self.is_leaving, self.has_ended = 0, False, False
        self.start()

    def start(self) -> None:
        arguments = (self.options, os.getpid(), self.name, self.target, self.number, self.host)
        self.process = multiprocessing.get_context('spawn').Process(target=live, args=arguments, daemon=True)
        self.process.start()
        self.lives, self.was_killed = self.lives + 1, False

    @property
    def is_alive(self) -> bool:
        return not (self.was_killed or self.has_ended)

    @property
    def is_at_work(self) -> bool:
        has_begun = (
            self.books['confirmed'] or len(self.books['registered']) == self.lives or self.target in (serve, lag)
        )
        return bool(has_begun) and self.is_alive and not self.is_leaving

    def kill(self) -> None:
        self.was_killed = True
        self.process.kill()
        self.process.join()


class NotNow(Exception):
    """The fault has no process to hit now, or would be one that the store does not cover."""


class Chaos:
    def __init__(self, options: argparse.Namespace, cluster: Optional[RedisCluster] = None) -> None:
        self.cluster = cluster
        self.options, self.directory, self.chance = options, options.directory, random.Random(options.seed)
        names = ['server', *(f'server-{number}' for number in range(1, options.servers))]
        self.servers: List[Child] = []
        self.lagging: List[Child] = []
        if cluster is None:
            self.servers = [Child(options, name, serve, number) for number, name in enumerate(names)]
            self.lagging.append(Child(options, 'lagging', lag))
        self.copied_at = {'file': 0.0, 'replica': 0.0}  # a state that the server can go back to -> its time
        self.writers: List[Child] = []
        self.readers: List[Child] = []
        self.performed = {name: 0 for name in options.faults}
        self.later: List[Tuple[float, Callable[[], Any]]] = []
        self.problems: List[str] = []
        # forgotten_at: the server lost entries. changed_at: it did, or a reader came or went.
        self.forgotten_at = self.changed_at = 0.0
        self.begun_at = self.said_at = self.read_at = self.counted_at = time.monotonic()
        self.last_num_read, self.num_pauses, self.is_paused = 0, 0, False

    def run(self) -> None:
        try:
            # Before the first entry: entries that all known readers have acked are not kept for later readers.
            self.readers = [Child(self.options, f'reader-{i}', read) for i in range(self.options.readers)]
            self.wait('readers register', lambda: all(one.is_at_work for one in self.readers))
            for _ in range(self.options.writers):
                self.start_writer()
            self.wait('writers append', lambda: all(one.is_at_work for one in self.writers))
            end, due = time.monotonic() + self.options.seconds, 0.0
            while time.monotonic() < end and not self.problems:
                self.step()
                with suppress(NotNow):
                    if self.cluster is None:
                        self.copy_server()
                if self.pauses():
                    continue
                if time.monotonic() >= due and self.happens(self.chance.choice(self.options.faults)):
                    due = time.monotonic() + self.chance.uniform(0.3, 1.7)
            self.wait('all go on', lambda: not self.later)
            if 'flush_server' in self.options.faults:
                self.flush_before_close()
            (self.directory / 'finish').touch()
            self.signal(self.writers, signal.SIGCONT)
            self.wait('writers close', lambda: not any(one.is_alive for one in self.writers))
            self.signal(self.readers, signal.SIGCONT)
            (self.directory / 'drain').touch()
            self.wait('readers have all', lambda: not any(one.is_alive for one in self.readers))
        except TimeoutError as e:
            self.problems.append(str(e))

    def pauses(self) -> bool:
        """Return whether faults pause, since nothing was read for ``PAUSE_S``."""
        now = time.monotonic()
        if now >= self.counted_at + 1.0:
            self.counted_at, num_read = now, sum(self.num_read().values())
            if num_read != self.last_num_read:
                self.last_num_read, self.read_at = num_read, now
            was_paused, self.is_paused = self.is_paused, now - self.read_at >= PAUSE_S
            self.num_pauses += self.is_paused and not was_paused
        return self.is_paused

    def flush_before_close(self) -> None:
        """Flush the server while the readers are stopped, so that writers close with entries that no reader has."""
        self.wait('the server is flushed', self.flush_without_readers)

    def flush_without_readers(self) -> bool:
        """Stop the readers, and flush the server when every writer has appended since. Return False if it did not."""
        self.wait('no reader comes or goes', lambda: all(one.is_at_work or one.has_ended for one in self.readers))
        self.signal(self.readers, signal.SIGSTOP)
        self.changed_at = stopped_at = time.monotonic()  # from now on every writer must append an entry
        while time.monotonic() < stopped_at + 5.0:
            self.step()
            self.signal(self.writers, signal.SIGSTOP)  # otherwise each would append more before it closes
            if self.happens('flush_server'):
                return True
            self.signal(self.writers, signal.SIGCONT)
        self.signal(self.readers, signal.SIGCONT)  # The stream may be full, and stopped readers make no room.
        self.wait('writers append', lambda: not self.waiting_writers())
        return False

    def signal(self, children: List[Child], number: int) -> None:
        for child in children:
            if child.is_alive:
                os.kill(child.process.pid, number)

    def happens(self, fault: str) -> bool:
        try:
            {**FAULTS, **CLUSTER_FAULTS}[fault](self)
        except NotNow:
            return False
        self.performed[fault] += 1
        return True

    def wait(self, what: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + HANG_S
        while not condition():
            if self.problems or time.monotonic() >= deadline:
                busy = [one.name for one in self.writers + self.readers if one.is_alive]
                raise TimeoutError(f'gave up the wait until {what}; there are still {", ".join(busy)}')
            self.step()

    def step(self) -> None:
        time.sleep(0.05)
        now = time.monotonic()
        for child in self.children():
            is_moving = child.target is read and (child.is_leaving or not child.books['registered'])
            child.has_ended = not (child.was_killed or child.process.is_alive())
            child.books.poll()
            if is_moving:
                self.changed_at = time.monotonic()
                child.is_leaving = child.is_leaving and not child.has_ended
            if child.has_ended and child.process.exitcode:
                self.problems.append(f'{child.name} ended with status {child.process.exitcode}: see its log')
            if (
                child.target not in (serve, lag)
                and child.is_alive
                and time.time() - child.books.path.stat().st_mtime > HANG_S
            ):
                self.problems.append(f'{child.name} hangs: it committed nothing for {HANG_S:g} s')
        todo, self.later = self.later, []
        for due, action in todo:
            try:
                action() if due <= now else self.later.append((due, action))
            except NotNow:
                self.later.append((due, action))
        if now - self.said_at >= 10.0:
            self.said_at, num_appended = now, sum(len(one.books['confirmed']) for one in self.writers)
            num_read = sum(len(seen) for one in self.readers for *_, seen in one.books['read'])
            said = f'appended {num_appended}, read {num_read}, faults {sum(self.performed.values())}'
            print(f'{now - self.begun_at:5.0f} s: {said}', file=sys.stderr, flush=True)

    def one_of(self, children: List[Child]) -> Child:
        able = [one for one in children if one.is_at_work]
        if not able:
            raise NotNow
        return self.chance.choice(able)

    def soon(self, action: Callable[[], Any]) -> None:
        self.later.append((time.monotonic() + self.chance.uniform(0.0, 2.0), action))

    def waiting_writers(self) -> List[Child]:
        """Return the writers that got no reply since the server lost entries, or a reader came or went."""
        heard = [(one, one.books['confirmed'][-1:]) for one in self.writers if one.is_alive]
        return [one for one, last in heard if not (last and last[0][1] > self.changed_at)]

    def need_settled(self) -> None:
        if self.waiting_writers():
            raise NotNow

    def start_writer(self) -> None:
        number = len(self.writers)
        self.writers.append(Child(self.options, f'writer-{number}', write, number, FAR if number % 4 == 3 else NEAR))

    def kill_writer(self) -> None:
        self.need_settled()
        self.one_of(self.writers).kill()
        self.soon(lambda: self.need_settled() or self.start_writer())

    def kill(self, children: List[Child]) -> None:
        child = self.one_of(children)
        child.kill()
        self.soon(child.start)

    def kill_shard(self) -> None:
        """
        Kill one of several servers. Start it again when entries of all other servers were read since, or when a process
        starts, which needs all servers.
        """
        if not all(one.is_at_work for one in self.servers):
            raise NotNow
        child = self.one_of(self.servers)
        child.kill()
        num_read, deadline = self.num_read(), time.monotonic() + HANG_S / 2

        def start_when_others_went_on() -> None:
            at_work = {one.number % self.options.servers for one in self.writers if one.is_at_work}
            others = [self.options.streams[number] for number in at_work - {child.number}]
            now, are_starting = self.num_read(), not all(one.is_at_work or one.has_ended for one in self.readers)
            if not are_starting and not all(now.get(stream, 0) > num_read.get(stream, 0) for stream in others):
                if time.monotonic() < deadline:
                    raise NotNow
                self.problems.append(f'{child.name} is away, and no entries of {", ".join(others)} are read')
            child.start()

        self.soon(start_when_others_went_on)

    def num_read(self) -> Dict[str, int]:
        """Return stream -> number of entries that readers have committed."""
        counts: Dict[str, int] = {}
        for reader in self.readers:
            for generation, *_, seen in reader.books['read']:
                stream = generation.split(' ')[1]
                counts[stream] = counts.get(stream, 0) + len(seen)
        return counts

    def stop(self, children: List[Child]) -> None:
        process = self.one_of(children).process
        os.kill(process.pid, signal.SIGSTOP)
        self.soon(lambda: process.is_alive() and os.kill(process.pid, signal.SIGCONT))

    def empty_server(self) -> None:
        self.need_settled()
        self.one_of(self.writers)  # a writer restores the list of readers in the server
        self.kill(self.servers[:1])
        self.forgotten_at = self.changed_at = time.monotonic()
        for path in self.directory.glob('appendonly*'):  # a file, or a directory since Redis 7
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def client(self, directory: str = '.') -> Iterator[Any]:
        self.one_of(self.servers[:1])
        path = f'{self.directory}/{directory}/redis.sock'
        client = redis.Redis(unix_socket_path=path, socket_timeout=1.0, retry=None)
        with suppress(redis.RedisError), client:
            yield client

    def copy_server(self) -> None:
        """Copy the server's state, so that it can go back to it until a reader comes or goes."""
        self.need_settled()
        if min(self.copied_at.values()) > self.changed_at:
            raise NotNow
        with self.client() as client, self.client('lagging') as lagging:
            client.save()
            self.copied_at['file'] = time.monotonic()
            lagging.replicaof('127.0.0.1', self.options.ports[1])
            if self.poll(lambda: lagging.info('replication')['master_link_status'] == 'up'):
                self.copied_at['replica'] = time.monotonic()
            lagging.replicaof('NO', 'ONE')

    def reload_server(self) -> None:
        with self.going_back('file') as client:
            client.execute_command('DEBUG', 'RELOAD', 'NOSAVE')
            client.bgrewriteaof()  # otherwise the append-only file has entries of both times
            self.poll(lambda: not client.info('persistence')['aof_rewrite_in_progress'])

    def fail_back(self) -> None:
        """Make the lagging server the primary for a moment, and then this one again."""
        with self.going_back('replica') as client:
            with client.pipeline() as pipe:  # no call must block then: it would end with an error of the server
                pipe.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
                pipe.replicaof('127.0.0.1', self.options.ports[0])
                pipe.execute()
            self.poll(lambda: client.info('replication')['master_link_status'] == 'up')
            client.replicaof('NO', 'ONE')

    def flush_server(self) -> None:
        with self.going_back('') as client:
            client.flushall()

    @contextmanager
    def going_back(self, to: str) -> Iterator[Any]:
        self.need_settled()
        self.one_of(self.writers)  # a writer restores the list of readers in the server
        # Another reader may have come since, or one may have left.
        if to and self.copied_at[to] <= self.changed_at:
            raise NotNow
        answers = False
        with self.client() as client:
            answers = client.ping()
        if not answers:
            raise NotNow  # it may be stopped
        with self.client() as client:
            yield client
        self.forgotten_at = self.changed_at = time.monotonic()

    def poll(self, condition: Callable[[], Any]) -> bool:
        deadline = time.monotonic() + 5.0
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(condition())

    def cut_connections(self) -> None:
        with self.client() as client:
            client.client_kill_filter(_type='normal')

    def foreign_news(self) -> None:
        """Write foreign data to the keys where writers and readers wait for news of room and of planes."""
        part, is_entry = self.chance.choice(('room', 'planes')), self.chance.random() < 0.5
        key = f'ding:{{chaos/{self.options.streams[0]}/0}}:{part}'
        with self.client() as client:
            client.xadd(key, {'x': 'y'}) if is_entry else client.set(key, 'x')

    def delete_cache(self) -> None:
        shutil.rmtree(root_in(str(self.directory / self.chance.choice((NEAR, NEAR, FAR)))), ignore_errors=True)

    def far_reader(self) -> None:
        far = self.readers[-1]
        if far.host == FAR and not far.has_ended:
            self.one_of([far]).is_leaving = True
            (self.directory / f'leave-{far.name}').touch()
        else:
            self.need_settled()
            self.readers.append(Child(self.options, f'far-{len(self.readers)}', read, host=FAR))

    # --- faults of a cluster

    @contextmanager
    def losing(self) -> Iterator[Tuple[Node, Node]]:
        """Lend a primary and its replica, for a fault in which another one takes over, and wait until all is well."""
        assert self.cluster is not None
        self.need_settled()
        self.one_of(self.writers)  # a writer restores the list of readers in the server
        former = self.chance.choice(self.cluster.nodes_with_slots())
        replica = self.cluster.replica_of(former)
        self.changed_at = time.monotonic()
        yield former, replica
        wait_until(lambda: replica in self.cluster.nodes_with_slots(), f'{replica.address} takes over')
        self.cluster.bring_back()
        self.forgotten_at = self.changed_at = time.monotonic()

    def fail_over(self) -> None:
        with self.losing() as (former, _):
            former.kill()

    def plan_fail_over(self) -> None:
        with self.losing() as (_, replica):
            RedisCluster.plan_failover(replica)

    def lag(self) -> None:
        """Cut a replica off from its primary for a moment, and kill the primary."""
        with self.losing() as (former, replica):
            replica.client.config_set('masterauth', 'another')
            replica.client.execute_command('CLIENT', 'KILL', 'TYPE', 'master')
            time.sleep(self.chance.uniform(0.1, 1.0))
            former.kill()
            wait_until(lambda: replica.client.info('replication')['role'] == 'master', f'{replica.address} takes over')
            replica.client.config_set('masterauth', REPLICA_PASSWORD)

    def two_primaries(self) -> None:
        """Stop a primary until its replica has replaced it. Then it goes on as one, until the others tell it."""
        with self.losing() as (former, replica):
            former.signal(signal.SIGSTOP)
            wait_until(lambda: replica.client.info('replication')['role'] == 'master', f'{replica.address} takes over')
            former.signal(signal.SIGCONT)

    def reshard(self) -> None:
        """Move a stream's slot to another node key by key. Processes may die meanwhile."""
        assert self.cluster is not None
        slot = slot_of(tag_of('chaos', shard_of(self.chance.choice(self.options.streams), NUM_GROUPS)))
        source = self.cluster.node_of(slot)
        target = self.chance.choice([one for one in self.cluster.nodes_with_slots() if one is not source])
        for _ in self.cluster.moving(slot, target):
            if self.chance.random() < 0.05:
                others = [fault for fault in self.options.faults if fault not in CLUSTER_FAULTS]
                if others and self.chance.random() < 0.3:
                    self.happens(self.chance.choice(others))
                self.step()

    def children(self) -> List[Child]:
        return [*self.servers, *self.lagging, *self.writers, *self.readers]

    def result(self) -> Dict[str, Any]:
        rows, problems = {}, list(self.problems)
        for reader in self.readers:
            rows[reader.name], found = self.balance(reader)
            # After a problem the reader has not read all.
            problems += [f'{reader.name}: {one}' for one in found if not self.problems]
        counts = {kind: sum(len(one.books[kind]) for one in self.writers) for kind in ('confirmed', 'raised')}
        counts['killed writers'] = sum(one.was_killed for one in self.writers)
        found = {'faults': self.performed, 'pauses': self.num_pauses, 'appends': counts}
        return {**found, 'readers': rows, 'problems': problems}

    def balance(self, reader: Child) -> Tuple[Dict[str, int], List[str]]:
        lines, registered_at = reader.books['read'], (reader.books['registered'] or [[np.inf]])[0][0]
        last_counts = {generation: counts for generation, counts, *_ in lines}.values()
        lost, duplicates = (sum(counts[i] for counts in last_counts) for i in range(2))
        entries = [entry for *_, seen in lines for entry in seen]
        found = [f'entry {number} of writer-{writer} is torn' for writer, number, is_whole in entries if not is_whole]
        num_torn, num_forgotten = len(found), 0
        has_left = (self.directory / f'leave-{reader.name}').exists()
        missing: Dict[bool, List[str]] = {True: [], False: []}  # writer was killed -> problems
        for writer in self.writers:
            confirmed, numbers = writer.books['confirmed'], [n for who, n, _ in entries if who == writer.number]
            found += [f'entry {b} of {writer.name} came after {a}' for a, b in zip(numbers, numbers[1:]) if b <= a]
            first, last, seen = min(numbers, default=np.inf), max(numbers, default=0), set(numbers)
            # A far reader gets the entries that were appended after it came, and some of those before.
            owed = [n for n, begun_at in confirmed if begun_at > registered_at or n > first]
            absent = [n for n in owed if n not in seen and (n < last or not has_left)]
            # Only the first server loses memory, and any node of a cluster.
            is_of_first = self.cluster is not None or writer.number % self.options.servers == 0
            if writer.was_killed and absent and is_of_first and self.forgotten_at >= confirmed[-1][1]:
                num_forgotten += sum(n > last for n in absent)
                absent = [n for n in absent if n < last]
            missing[writer.was_killed] += [f'entry {n} of {writer.name} is missing' for n in absent]
        # A killed writer's payload may have been in a deleted file, or on another host. The reader counts such losses.
        if len(missing[True]) <= lost and (self.performed.get('delete_cache') or self.performed.get('far_reader')):
            missing[True] = []
        absent = missing[False] + missing[True]
        row = dict(read=len(entries), lives=reader.lives, lost=lost, forgotten=num_forgotten, duplicates=duplicates)
        return {**row, 'torn': num_torn, 'missing': len(absent)}, found + absent


FAULTS: Dict[str, Callable[[Chaos], None]] = {
    'kill_writer': Chaos.kill_writer,
    'kill_reader': lambda chaos: chaos.kill(chaos.readers),
    'kill_server': lambda chaos: chaos.kill(chaos.servers),
    'stop_writer': lambda chaos: chaos.stop(chaos.writers),
    'stop_reader': lambda chaos: chaos.stop(chaos.readers),
    'stop_server': lambda chaos: chaos.stop(chaos.servers),
    'kill_shard': Chaos.kill_shard,
    'empty_server': Chaos.empty_server,
    'reload_server': Chaos.reload_server,
    'fail_back': Chaos.fail_back,
    'flush_server': Chaos.flush_server,
    'cut_connections': Chaos.cut_connections,
    'foreign_news': Chaos.foreign_news,
    'delete_cache': Chaos.delete_cache,
    'far_reader': Chaos.far_reader,
}
CLUSTER_FAULTS: Dict[str, Callable[[Chaos], None]] = {
    'fail_over': Chaos.fail_over,
    'plan_fail_over': Chaos.plan_fail_over,
    'lag': Chaos.lag,
    'two_primaries': Chaos.two_primaries,
    'reshard': Chaos.reshard,
}


def report(options: argparse.Namespace, result: Dict[str, Any]) -> None:
    if options.json:
        Path(options.json).write_text(json.dumps({'seed': options.seed, **result}))
    for name, times in result['faults'].items():
        print(f'{name:16} {times:10}')
    print(f'pauses           {result["pauses"]:10}')
    print('appends: ' + ', '.join(f'{name} {number}' for name, number in result['appends'].items()))
    for name, row in result['readers'].items():
        print(f'{name:10}' + ', '.join(f'{what} {number:6}' for what, number in row.items()))
    again = ' '.join(
        f'--{name} {getattr(options, name)}' for name in ('seconds', 'seed', 'writers', 'readers', 'servers')
    )
    again += ' --cluster' * options.cluster
    print(f'seed {options.seed}; again: python scripts/chaos.py {again} --faults {",".join(options.faults)}')
    if result['problems']:
        where = f'{len(result["problems"])} in all; books and logs are in {options.directory}'
        print('FAULTY:', *result['problems'][:5], where, sep='\n')


if __name__ == '__main__':
    sys.exit(main())
