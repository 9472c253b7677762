"""
Benchmark of the memory bank: appends and gathers of elements from 10 KB to 1 MB, compared with copies in memory, a dict
of arrays, diskcache and lmdb, and the memory of processes that read one bank.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import numpy as np

from benchmarks.machine import busy_cores, others
from benchmarks.output import say, show
from benchmarks.replay import timed
from ding_store.errors import ConfigError

#: Elements of a gather.
BATCH = 64
#: Number of processes that read one bank.
NUM_READERS = 8
#: Bytes of the elements: all the same, or log-uniform between two sizes.
SIZES = {'10 KB': (10_000, 10_000), '100 KB': (100_000, 100_000), '10 KB to 1 MB': (10_000, 1_000_000)}

NOTE = (
    'diskcache, lmdb and a MemoryBank with a path survive kill -9. lmdb with sync and a MemoryBank with fsync '
    'also survive power cuts.\n'
    'Of the three, only MemoryBank writes checksums.'
)

Figures = Dict[str, Any]


class Ours:
    """MemoryBank, in memory or with a path."""

    fsync = False

    def __init__(self, size: int, path: Optional[str] = None) -> None:
        from ding_store.buffer import MemoryBank

        self.bank = MemoryBank(size, path=path, fsync=self.fsync)

    def append(self, number: int, value: np.ndarray) -> None:
        self.bank.append({'value': value})

    def extend(self, first: int, values: List[np.ndarray]) -> None:
        self.bank.extend([{'value': value} for value in values])

    def gather(self, numbers: np.ndarray) -> Any:
        return self.bank.gather(numbers)

    def close(self) -> None:
        self.bank.close()


class Padded(Ours):
    """The same, with gathers of one padded batch."""

    def gather(self, numbers: np.ndarray) -> Any:
        return self.bank.gather_batch(numbers).data


class Synced(Ours):
    """The same with a path, and safe from power cuts."""

    fsync = True


class Peer:
    """Base of the peers, which append elements one by one."""

    def append(self, number: int, value: np.ndarray) -> None:
        raise NotImplementedError(f'{type(self).__name__} must override append')

    def extend(self, first: int, values: List[np.ndarray]) -> None:
        for number, value in enumerate(values, first):
            self.append(number, value)


class DictOfArrays(Peer):
    """A dict of numpy arrays. A gather copies them."""

    def __init__(self, size: int, path: Optional[str] = None) -> None:
        self._size = size
        self._arrays: Dict[int, np.ndarray] = {}

    def append(self, number: int, value: np.ndarray) -> None:
        self._arrays[number] = value.copy()
        self._arrays.pop(number - self._size, None)

    def gather(self, numbers: np.ndarray) -> Any:
        return [self._arrays[number].copy() for number in numbers.tolist()]

    def close(self) -> None:
        self._arrays.clear()


class DiskCache(Peer):
    """diskcache, without eviction of its own."""

    def __init__(self, size: int, path: Optional[str] = None) -> None:
        import diskcache

        self._size = size
        self._cache = diskcache.Cache(path, eviction_policy='none', size_limit=1 << 40)

    def append(self, number: int, value: np.ndarray) -> None:
        self._cache.set(number, value.tobytes())
        self._cache.delete(number - self._size)

    def gather(self, numbers: np.ndarray) -> Any:
        return [np.frombuffer(self._cache.get(number), np.uint8) for number in numbers.tolist()]

    def close(self) -> None:
        self._cache.close()


class Lmdb(Peer):
    """lmdb, with one transaction per call. Like our bank with a path, it survives a kill, and no power cut."""

    options: Dict[str, Any] = {'sync': False, 'metasync': False, 'writemap': True, 'map_async': True}

    def __init__(self, size: int, path: Optional[str] = None) -> None:
        import lmdb

        self._size = size
        self._env = lmdb.open(path, map_size=1 << 34, **self.options)

    def append(self, number: int, value: np.ndarray) -> None:
        self.extend(number, [value])

    def extend(self, first: int, values: List[np.ndarray]) -> None:
        with self._env.begin(write=True) as transaction:
            for number, value in enumerate(values, first):
                transaction.put(number.to_bytes(8, 'big'), value.data)
                if number >= self._size:
                    transaction.delete((number - self._size).to_bytes(8, 'big'))

    def gather(self, numbers: np.ndarray) -> Any:
        with self._env.begin(buffers=True) as transaction:
            keys = [number.to_bytes(8, 'big') for number in numbers.tolist()]
            return [np.array(np.frombuffer(transaction.get(key), np.uint8)) for key in keys]

    def close(self) -> None:
        self._env.close()


class SyncedLmdb(Lmdb):
    """The same with lmdb's defaults: each transaction survives power cuts."""

    options: Dict[str, Any] = {}


#: Name -> class, and whether it gets a path.
KINDS: Dict[str, Any] = {
    'MemoryBank': (Ours, False),
    'MemoryBank, padded batch': (Padded, False),
    'MemoryBank with a path': (Ours, True),
    'dict of arrays': (DictOfArrays, False),
    'diskcache': (DiskCache, True),
    'lmdb': (Lmdb, True),
    'MemoryBank with fsync': (Synced, True),
    'lmdb with sync': (SyncedLmdb, True),
}


def main(megabytes: float, budget_s: float, directory: Optional[str], json_path: Optional[str]) -> int:
    """Measure all sizes, print a table, and write the figures to ``json_path``."""
    if not megabytes >= 1 or not budget_s > 0:
        raise ConfigError(f'--megabytes ({megabytes:g}) must be at least 1, and --seconds ({budget_s:g}) above 0')
    result: Figures = {'megabytes': megabytes, 'sizes': {}, 'busy_cores': busy_cores()}
    with _scratch(directory) as scratch:
        for name, (low, high) in SIZES.items():
            figures = result['sizes'][name] = measure(name, low, high, int(megabytes * 1e6), budget_s, scratch)
            show(render(name, figures))
        say('readers')
        result['readers'] = measure_readers(int(megabytes * 1e6), scratch)
    show('\n'.join([render_readers(result['readers']), NOTE, *others(result['busy_cores'])]))
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=1))
    return 0


def measure(name: str, low: int, high: int, num_bytes: int, budget_s: float, scratch: str) -> Figures:
    """Return seconds per element of all kinds, for elements from ``low`` to ``high`` bytes."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(low), np.log(high), max(2 * BATCH, int(num_bytes / np.sqrt(low * high)))))
    ends = np.concatenate([[0], np.cumsum(sizes.astype(int))])
    source = rng.integers(0, 255, ends[-1], np.uint8)
    values = [source[begin:end] for begin, end in zip(ends.tolist(), ends[1:].tolist())]
    chosen = rng.integers(0, len(values), (1000, BATCH))
    figures: Figures = {'elements': len(values), 'mean_bytes': float(np.diff(ends).mean()), 'kinds': {}}
    figures['memcpy'] = copy_limit(values, chosen, budget_s)
    for kind, (make, has_path) in KINDS.items():
        say(f'{name}: {kind}')
        path = tempfile.mkdtemp(dir=scratch) if has_path else None
        try:
            figures['kinds'][kind] = _measure(make(len(values), path), values, chosen, budget_s)
        except ImportError as e:
            figures['kinds'][kind] = {'left_out': str(e)}
        finally:
            if path is not None:
                shutil.rmtree(path)
    return figures


def copy_limit(values: List[np.ndarray], chosen: np.ndarray, budget_s: float) -> Figures:
    """Return seconds per element of copies to memory that was used before: for a gather, and for an append."""
    # Two batches in turn, as in a loop that holds the last one.
    warm = [np.empty(max(map(len, values)), np.uint8) for _ in range(2 * BATCH)]
    area = np.zeros(sum(map(len, values)), np.uint8)
    places = np.cumsum([0, *map(len, values)]).tolist()

    def gather(i: int) -> None:
        for place, number in enumerate(chosen[i % len(chosen)].tolist(), i % 2 * BATCH):
            value = values[number]
            warm[place][: len(value)] = value

    def append(i: int) -> None:
        number = i % len(values)
        area[places[number] : places[number + 1]] = values[number]

    appends = _mean(timed(append, budget_s))
    return {'gather_s': _mean(timed(gather, budget_s)) / BATCH, 'append_s': appends, 'extend_s': appends}


def _measure(made: Any, values: List[np.ndarray], chosen: np.ndarray, budget_s: float) -> Figures:
    try:
        for first in range(0, len(values), BATCH):
            made.extend(first, values[first : first + BATCH])
        count = len(values)
        held: List[Any] = [None]

        def gather(i: int) -> None:
            # The batch before the last is free, as in a training loop.
            held[0] = made.gather(chosen[i % len(chosen)] + count - len(values))

        gathers = timed(gather, budget_s)

        def append(i: int) -> None:
            nonlocal count
            made.append(count, values[count % len(values)])
            count += 1

        appends = timed(append, budget_s)

        def extend(i: int) -> None:
            nonlocal count
            first = i * BATCH % (len(values) - BATCH + 1)
            made.extend(count, values[first : first + BATCH])
            count += BATCH

        extends = timed(extend, budget_s)
        return {'gather_s': _mean(gathers) / BATCH, 'append_s': _mean(appends), 'extend_s': _mean(extends) / BATCH}
    finally:
        made.close()


def measure_readers(num_bytes: int, scratch: str) -> Figures:
    """Return the proportional share of memory that readers of one bank have, when each has read all of it."""
    from ding_store.buffer import MemoryBank

    path, size = tempfile.mkdtemp(dir=scratch), 100_000
    bank = MemoryBank(max(1, num_bytes // size), path=path)
    for number in range(bank.buffer.size):
        bank.append({'value': np.full(size, number % 250, np.uint8)})
    readers = [_Reader(path) for _ in range(NUM_READERS)]
    try:
        for reader in readers:
            reader.wait()
        owner, shares = pss(path), [reader.ask() for reader in readers]
    finally:
        for reader in readers:
            reader.end()
    figures = {'bank_bytes': bank.num_bytes, 'readers': len(readers), 'pss_bytes': owner + sum(shares)}
    bank.close()
    return figures


def pss(path: str) -> int:
    """Return the proportional share of this process in the memory of the files below a directory."""
    total, is_ours = 0, False
    with open('/proc/self/smaps') as file:
        for line in file:
            words = line.split()
            if '-' in words[0] and not words[0].endswith(':'):
                is_ours = len(words) > 5 and words[5].startswith(path)
            elif is_ours and words[0] == 'Pss:':
                total += 1024 * int(words[1])
    return total


class _Reader:
    """A forked process that reads all of a bank, and then reports its share of the memory."""

    def __init__(self, path: str) -> None:
        self._answers, answering = os.pipe()
        asked, self._asking = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            with suppress(BaseException):
                self._work(path, asked, answering)
                code = 0
            os._exit(code)
        os.close(answering)
        os.close(asked)

    def wait(self) -> None:
        if os.read(self._answers, 1) != b'.':
            raise RuntimeError('a reader failed')

    def ask(self) -> int:
        os.write(self._asking, b'?')
        return int(os.read(self._answers, 32))

    def end(self) -> None:
        # Not by closing the pipe: later readers have it open as well.
        with suppress(BrokenPipeError):
            os.write(self._asking, b'.')
        os.close(self._asking)
        os.close(self._answers)
        os.waitpid(self._pid, 0)

    def _work(self, path: str, asked: int, answering: int) -> None:
        from ding_store.buffer import MemoryBank

        os.close(self._asking)
        reader = MemoryBank.open(path)
        rows = reader.rows()
        for first in range(0, len(rows), BATCH):
            reader.gather(rows[first : first + BATCH])
        os.write(answering, b'.')
        if os.read(asked, 1) == b'?':
            os.write(answering, str(pss(path)).encode())
            # The files stay mapped until all have reported.
            os.read(asked, 1)


def render(name: str, figures: Figures) -> str:
    """Return the table of one kind of sizes."""
    copy = figures['memcpy']
    head = f'{"gather":>12}{"of memcpy":>11}{"beyond it":>12}{"append":>12}{f"append {BATCH}":>12}'
    lines = [f'{name}: {figures["elements"]} elements of {figures["mean_bytes"] / 1000:.0f} KB on average']
    lines.append(f'  {"microseconds per element":26}{head}')
    lines.append(f'  {"memcpy":26}{_us(copy["gather_s"])}{1:11.2f}{_us(0)}{_us(copy["append_s"])}')
    for kind, each in figures['kinds'].items():
        if 'left_out' in each:
            lines.append(f'  {kind:26}left out: {each["left_out"]}')
            continue
        ratio, beyond = copy['gather_s'] / each['gather_s'], each['gather_s'] - copy['gather_s']
        gathers = f'{_us(each["gather_s"])}{ratio:11.2f}{_us(beyond)}'
        lines.append(f'  {kind:26}{gathers}{_us(each["append_s"])}{_us(each["extend_s"])}')
    return '\n'.join([*lines, ''])


def render_readers(readers: Figures) -> str:
    """Return the line about the memory of readers."""
    copies = readers['pss_bytes'] / readers['bank_bytes']
    return (
        f'{readers["readers"]} reader processes and the owner: {readers["pss_bytes"] / 1e6:.0f} MB in all (PSS) for a '
        f'bank of {readers["bank_bytes"] / 1e6:.0f} MB, so {copies:.2f} copies'
    )


def _us(seconds: float) -> str:
    return f'{seconds * 1e6:12.1f}'


def _mean(seconds: List[float]) -> float:
    """Return the mean without the slowest tenth, which other processes delayed."""
    fastest = sorted(seconds)[: max(1, len(seconds) * 9 // 10)]
    return sum(fastest) / len(fastest)


@contextmanager
def _scratch(directory: Optional[str]) -> Iterator[str]:
    """Yield a directory for files, and remove it afterwards."""
    path = tempfile.mkdtemp(prefix='ding-store-bank-', dir=directory)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
