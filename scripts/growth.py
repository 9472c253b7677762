"""Count what is left when writers, runs, values, streams and readers have come and gone on one server and one learner.

    python scripts/growth.py                 # 20,000 writers, 1,000 runs, 10,000 values and streams, 500 readers
    python scripts/growth.py --scale 0.02    # the same, small

It prints a table of counts before and after, and exits with 1 if a count is above its bound. A fifth of the writers are
in processes that are killed by SIGKILL. The learner commits with its rows how far it has read each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple
from urllib.parse import quote

import numpy as np

from ding_store.buffer import StoreBuffer
from ding_store.middleware.consumer_offset import ConsumerOffset
from ding_store.middleware.ingest_plan import Replay
from ding_store.storage import Reader, open_store
from ding_store.storage.embedded.private_server import running, stop_server
from ding_store.storage.exactly_once.reader import MAX_CARRIED
from ding_store.storage.protocol import MAX_SILENT_WRITERS
from ding_store.storage.store import Store

STREAM = 'experience'
#: How long a process with writers may take.
WAIT_S = 60.0
#: A dropped writer's field may wait for the next sweep, and a reader reads of it within a second.
MAX_WRITERS_KNOWN = 3 * MAX_SILENT_WRITERS
MAX_MARKS = MAX_WRITERS_KNOWN + MAX_CARRIED


class Count(NamedTuple):
    name: str
    before: int
    after: int
    bound: int

    @property
    def is_over(self) -> bool:
        return self.after > self.bound


class Learner:
    """The part of a learner that reads experience and commits its offset with the rows."""

    def __init__(self, store: Store, path: str) -> None:
        self.buffer = StoreBuffer(size=64, path=path)
        self.position = ConsumerOffset()
        self.position.keep_in(Replay(self.buffer), path, 'growth')
        self.reader = self.position.reader(store, STREAM, 'learner')

    def read_all(self) -> None:
        while True:
            entries = self.reader.read(256)
            for entry in entries:
                self.position.take(entry)
            self.buffer.commit(self.position.note() or {})
            self.reader.ack()
            if not entries and not self.reader.lag():
                return

    def note_bytes(self) -> int:
        return len(json.dumps(self.buffer.committed))


def entry(store: Store, number: int) -> None:
    store.append(STREAM, {'rows': 1, 'env_step': 1, 'env_episode': 0}, {'x': np.full(4, number)})


def scaled(number: int, scale: float) -> int:
    return max(1, int(number * scale))


def all_counts(learner: Learner, client: Any) -> Dict[str, int]:
    client_keys = list(client.scan_iter('ding:*', count=1000))
    ends = [key for key in client_keys if key.endswith(b':ends')]
    hashes = [key for key in client_keys if client.type(key) == b'hash']
    return {
        "bytes of the learner's note": learner.note_bytes(),
        'writers with marks in it': len((learner.buffer.committed or {}).get('marks', {})),
        'keys of the server': len(client_keys) - len(ends),
        'fields of its hashes': sum(client.hlen(key) for key in hashes),
        'names in its indexes': sum(client.scard(key) for key in client_keys if key.endswith(b':index')),
        'keys that expire (:ends)': len(ends),
        'descriptors of this process': len(os.listdir('/proc/self/fd')),
        'mappings of this process': len(Path('/proc/self/maps').read_text().splitlines()),
        'threads of this process': threading.active_count(),
    }


def writers(url: str, learner: Learner, number: int) -> None:
    """Open and close writers. Of each 50, the last 10 are in a process that is killed."""
    for first in range(0, number, 50):
        end = min(first + 50, number)
        closed = range(first, end - (end - first) // 5)
        for one in closed:
            with open_store(url, run='growth') as store:
                entry(store, one)
        kill_writers(url, range(closed.stop, end))
        learner.read_all()


def kill_writers(url: str, numbers: Sequence[int]) -> None:
    """Open writers in a process, and kill it when each has appended its entry."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            stores = [open_store(url, run='growth') for _ in numbers]
            for store, one in zip(stores, numbers):
                entry(store, one)
            os.write(writing, b'.')
            signal.pause()
        except BaseException:  # noqa: BLE001 - whatever it is, this process must not go on as the script
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    has_written = bool(select.select([reading], [], [], WAIT_S)[0]) and os.read(reading, 1) == b'.'
    os.close(reading)
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not has_written or code != -signal.SIGKILL:
        raise RuntimeError(f'a process with {len(numbers)} writers ended with {code} before it was killed')


def runs(url: str, number: int) -> None:
    for one in range(number):
        with open_store(url, run=f'run-{one}') as store:
            reader = Reader(store, STREAM, 'learner')
            entry(store, one)
            store.put('weights', {}, {'x': np.zeros(20_000)})
            store.add('collectors', 1)
            reader.read()
            reader.ack()
            del reader
            # Delete this run alone. The server is shared by all runs here, and must not stop with one of them.
            store.retire()


def names(url: str, number: int) -> None:
    with open_store(url, run='growth') as store:
        for one in range(number):
            name = f'name-{one}'
            if one % 2:
                store.put(name, {}, {'x': np.zeros(20_000 if one % 100 == 1 else 4)})
                value = store.get(name)
                assert value is not None
                del value
            else:
                store.register(name, 'reader')
                store.append(name, {}, {'x': np.full(4, one)})
                assert len(store.read(name)) == 1
            store.delete(name)


def readers(url: str, number: int) -> None:
    with open_store(url, run='growth') as store:
        for one in range(number):
            reader = Reader(store, STREAM, f'reader-{one}', durable=bool(one % 2), start='now')
            entry(store, one)
            assert len(reader.read(timeout_s=60.0)) >= 1
            reader.ack()
            reader.forget()


def measure(url: str, client: Any, directory: str, scale: float, say: Callable[[str], None]) -> List[Count]:
    with open_store(url, run='growth') as store:
        learner = Learner(store, os.path.join(directory, 'replay'))
        with open_store(url, run='growth') as first:
            entry(first, 0)
        learner.read_all()
        parts: List[Tuple[str, Callable[[], None]]] = [
            (f'{scaled(20_000, scale)} writers', lambda: writers(url, learner, scaled(20_000, scale))),
            (f'{scaled(1_000, scale)} runs', lambda: runs(url, scaled(1_000, scale))),
            (f'{scaled(10_000, scale)} values and streams', lambda: names(url, scaled(10_000, scale))),
            (f'{scaled(500, scale)} readers', lambda: readers(url, scaled(500, scale))),
        ]
        before = all_counts(learner, client)
        for name, part in parts:
            part()
            learner.read_all()
            say(f'{name}: done')
        # The server's last sweep was before the last acks, and a reader looks once a second.
        after = settled(learner, client)
        bounds = {
            "bytes of the learner's note": before["bytes of the learner's note"] + 100 * MAX_MARKS,
            'writers with marks in it': MAX_MARKS,
            'keys of the server': before['keys of the server'] + 8,
            'fields of its hashes': before['fields of its hashes'] + 2 * MAX_WRITERS_KNOWN,
            'names in its indexes': before['names in its indexes'],
            'keys that expire (:ends)': 0,
            'descriptors of this process': before['descriptors of this process'] + 16,
            'mappings of this process': before['mappings of this process'] + 64,
            'threads of this process': before['threads of this process'] + 2,
        }
        learner.buffer.close()
        return [Count(name, before[name], after[name], bounds[name]) for name in before]


def settled(learner: Learner, client: Any) -> Dict[str, int]:
    pause = threading.Event()
    for _ in range(3):
        pause.wait(1.1)
        learner.read_all()
    return all_counts(learner, client)


def main(arguments: List[str]) -> int:
    parser = argparse.ArgumentParser(
        description='Count what is left when writers, runs, values, streams and readers have come and gone.',
        epilog='example: python scripts/growth.py --scale 0.02',
    )
    parser.add_argument('--scale', type=float, default=1.0, help='part of the full numbers (default: 1.0)')
    asked = parser.parse_args(arguments)
    import redis

    with tempfile.TemporaryDirectory(prefix='ding-growth-') as directory:
        home = os.path.join(directory, f'server-{uuid.uuid4().hex[:6]}')
        with open_store(f'embedded://{home}', run='server') as keeper:
            keeper.add('started', 0)
            info = running(os.path.join(home, 'server'))
            assert info is not None
            with redis.Redis(unix_socket_path=info.socket) as client:
                counts = measure(f'unix://{quote(info.socket)}', client, directory, asked.scale, print)
        stop_server(os.path.join(home, 'server'))
    print(f'{"":32}{"before":>10}{"after":>10}{"bound":>10}')
    for count in counts:
        print(f'{count.name:32}{count.before:>10,}{count.after:>10,}{count.bound:>10,}{"  over" * count.is_over}')
    return int(any(count.is_over for count in counts))


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
