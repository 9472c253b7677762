"""Replays larger than memory: a table on disk in a process with a memory limit, and the disk's own random reads."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from ding_store.compare.rows import Row
from ding_store.compare.scratch import scratch
from ding_store.compare.worker import Effort, Worker

CGROUPS = Path('/sys/fs/cgroup')
#: Prefix of cgroups. The pid of the process that made one follows.
_PREFIX = 'ding_store-'
#: Bytes that the process itself needs, besides its share of the table.
OWN_BYTES = 0.6e9
#: Number of batches that are gathered ahead.
AHEAD = 2
#: Number of simultaneous reads that measure the disk's own rate.
READS_AT_ONCE = 4
#: Width of the matrices whose product is a learner's step: some milliseconds, in the core's own caches.
_WIDTH = 512


class Version(NamedTuple):
    """Names in a version of cgroups: the file with the limit, and the pages of files in memory.stat."""

    limit: str
    cached: str


V1, V2 = Version('memory.limit_in_bytes', 'cache'), Version('memory.max', 'file')


class Limit:
    """
    Overview:
        A memory cgroup, which limits the files' pages that a process keeps as well as its own. ``reason`` says why
        there is none. Then the table is not larger than memory, and the figures record the reason.
    """

    def __init__(self, limit_bytes: float) -> None:
        self.path: Optional[Path] = None
        self.reason = ''
        try:
            parent, self._version = _place()
            _remove_left(parent, self._version)
            path = Path(tempfile.mkdtemp(prefix=f'{_PREFIX}{os.getpid()}-', dir=parent))
            try:
                (path / self._version.limit).write_text(str(int(limit_bytes)))
            except OSError:
                path.rmdir()
                raise
            self.path = path
        except OSError as error:
            self.reason = f'no memory cgroup can be made here ({error.strerror})'

    def cached_bytes(self) -> Optional[int]:
        """Return the bytes of files that its processes keep in memory. Reads of these need no disk."""
        if self.path is None:
            return None
        stat = dict(line.split() for line in (self.path / 'memory.stat').read_text().splitlines())
        return int(stat[self._version.cached])

    def close(self) -> None:
        """Remove the group. Its processes must have ended."""
        if self.path is not None:
            _remove(self.path, self._version)


def _remove(group: Path, version: Version) -> None:
    if version is V1:  # in version 2, its pages go to the group above
        (group / 'memory.force_empty').write_text('1')
    group.rmdir()


def _remove_left(parent: Path, version: Version) -> None:
    """Remove groups whose makers were killed. The kernel refuses to remove a group that still has a process."""
    for group in parent.glob(f'{_PREFIX}*-*'):
        if not Path('/proc', group.name[len(_PREFIX) :].partition('-')[0]).exists():
            with contextlib.suppress(OSError):
                _remove(group, version)


def _place() -> Tuple[Path, Version]:
    """
    Return the group below which one can be made. In version 1 that is this process's own. In version 2 it is the
    nearest one above that delegates the memory controller, because a group with processes in it may not.
    """
    memory = CGROUPS / 'memory'
    if memory.is_dir():
        return memory / _own_group('memory'), V1
    own = CGROUPS / _own_group('')
    for group in (own, *own.parents):
        control = group / 'cgroup.subtree_control'
        if control.exists() and 'memory' in control.read_text().split():
            return group, V2
    raise OSError(errno.ENOENT, 'no group above hands the memory controller on')


def _own_group(controller: str) -> str:
    """Return the path of this process's group: for a controller of version 1, or '' for version 2."""
    for line in Path('/proc/self/cgroup').read_text().splitlines():
        _, controllers, path = line.split(':', 2)
        if controller in controllers.split(','):
            return path.lstrip('/')
    return ''


def is_memory(directory: str) -> bool:
    """Return True if a directory's files are in memory and on no disk."""
    device = os.stat(directory).st_dev
    number = f'{os.major(device)}:{os.minor(device)}'
    mounts = [line.split() for line in Path('/proc/self/mountinfo').read_text().splitlines()]
    return any(mount[2] == number and mount[mount.index('-') + 1] in ('tmpfs', 'ramfs') for mount in mounts)


class OnDisk:
    """Table on disk in the limited process: fill it up to so many bytes as stored, then sample it."""

    def __init__(self, row: Row, table_bytes: float, directory: str, group: Optional[str]) -> None:
        if group is not None:
            Path(group, 'cgroup.procs').write_text(str(os.getpid()))
        from ding_store.buffer import StoreBuffer
        from ding_store.compare.sides import elements_of, sampler_of

        self._row, self._directory = row, directory
        size = max(1, int(64e6 // row.element_bytes))
        elements = elements_of(row, row.columns(size))
        probe = StoreBuffer(1)
        probe.extend_elements(elements[:1])
        #: Frames may be stored in a quarter of their bytes.
        self._row_bytes = probe._elements.table.columns.row_bytes
        self._length = int(max(4 * row.batch, table_bytes // self._row_bytes))
        self._buffer = StoreBuffer(self._length, path=directory, sampler=sampler_of(row), seed=0, prefetch=AHEAD)
        for begin in range(0, self._length, size):
            self._buffer.extend_elements(elements[: min(size, self._length - begin)])
        # Written pages wait in memory for the disk. Measure reads after they are on it.
        os.sync()

    def table(self) -> Tuple[int, int]:
        """Return the table's length and the bytes that it stores per element."""
        return self._length, self._row_bytes

    def window(self, seconds: float) -> float:
        """Return elements sampled per second, at random from the whole table."""
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds or count < 3 * self._row.batch:
            self._buffer.sample_time_major(self._row.batch)
            count += self._row.batch
        return count / (time.perf_counter() - begin)

    def learner(self, seconds: float, rate: float) -> float:
        """
        Return steps of fixed work per second in this thread. If ``rate`` is not 0, sample in between at this rate.
        """
        import torch

        matrix = torch.ones(_WIDTH, _WIDTH)
        product = torch.empty_like(matrix)
        begin, steps, count = time.perf_counter(), 0, 0
        while (elapsed := time.perf_counter() - begin) < seconds or not steps:
            if count < elapsed * rate:
                self._buffer.sample_time_major(self._row.batch)
                count += self._row.batch
            torch.mm(matrix, matrix, out=product)
            steps += 1
        return steps / (time.perf_counter() - begin)

    def disk(self, seconds: float) -> float:
        """
        Return the disk's own rate, in elements per second: random reads of an element's stored size past the page
        cache. Reads are one at a time or several at once, whichever is faster.
        """
        path = max(Path(self._directory).rglob('*'), key=lambda one: one.stat().st_blocks)
        size = self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)

        def read(number: int) -> int:
            rng, memory, done = np.random.default_rng(number), mmap.mmap(-1, size), 0
            until = time.perf_counter() + seconds / 2
            while time.perf_counter() < until:
                os.preadv(file, [memory], int(rng.integers(0, path.stat().st_size // size)) * size)
                done += 1
            return done

        rates = []
        try:
            for at_once in (1, READS_AT_ONCE):
                with ThreadPoolExecutor(at_once) as pool:
                    begin = time.perf_counter()
                    rates.append(sum(pool.map(read, range(at_once))) / (time.perf_counter() - begin))
        finally:
            os.close(file)
        return max(rates)


def on_disk(
    row: Row, table_bytes: float, limit_bytes: float, effort: Effort, directory: str, say: Callable
) -> Dict[str, Any]:
    """
    Overview:
        Fill and sample a table that stores ``table_bytes``, in a process that may use ``limit_bytes`` in total.
    Returns:
        - figures (:obj:`dict`): 'samples_per_s' and 'disk_per_s' are medians over windows in turn, 'fraction' their
          ratio. 'table_bytes' and 'limit_bytes' are the sizes. If no limit could be set, 'limit_bytes' is None, and
          'reason' says why. 'cached' is the largest share of the table whose reads need no disk, or None.
          'learner_at' is the speed of a learner that samples as often as the job, relative to one that does not.
    """
    samples: List[float] = []
    disk: List[float] = []
    learners: List[float] = []
    with scratch(directory) as place, contextlib.closing(Limit(limit_bytes)) as limit:
        say(f'on disk: filling {table_bytes / 1e9:.1f} GB')
        group = None if limit.path is None else str(limit.path)
        make = 'ding_store.compare.disk:OnDisk'
        worker = Worker(make, row, table_bytes, place, group, timeout_s=effort.timeout_s)
        with contextlib.closing(worker):
            length, row_bytes = worker.call('table')
            seconds = effort.seconds
            worker.call('window', seconds)
            for number in range(effort.repeats):
                say(f'on disk: window {number + 1} of {effort.repeats}')
                disk.append(worker.call('disk', seconds))
                samples.append(worker.call('window', seconds))
                busy = worker.call('learner', seconds, row.samples_per_s)
                learners.append(busy / worker.call('learner', seconds, 0.0))
            cached = limit.cached_bytes()
    figures = {'samples_per_s': float(np.median(samples)), 'disk_per_s': float(np.median(disk))}
    return {
        **figures,
        'fraction': figures['samples_per_s'] / figures['disk_per_s'],
        'learner_at': float(np.median(learners)),
        'length': length,
        'cached': None if cached is None else min(1.0, cached / (length * row_bytes)),
        'table_bytes': length * row_bytes,
        'limit_bytes': None if limit.path is None else limit_bytes,
        'reason': limit.reason,
    }
