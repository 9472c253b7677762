"""
Benchmark of data sets: epochs from memory and from the disk, beside the copy of memory, the disk's random reads, and
torch's DataLoader over DI-engine's own HDF5 data set, webdataset and mosaicml-streaming. Then arrays of records, opened
by several processes.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

import numpy as np
import torch

from benchmarks import data_set_peers
from benchmarks.machine import busy_cores, others
from benchmarks.output import say, show
from ding_store.compare.units import size_text
from ding_store.datasets import DataSet, DataSetWriter, RecordArray, export
from ding_store.datasets.segment import NUM_THREADS
from ding_store.errors import ConfigError

#: Observations of a row are as large as those of SAC on Hopper in the published requirements: 2.9 KB with both.
OBS, ACTION = 360, 3
BATCH, PREFETCH = 256, 8
#: Bytes of a record, and processes that open the array.
RECORD_BYTES, NUM_PROCESSES = 256, 8
_PAGE = 4096
#: Rows of the table, and the row to which each is compared.
_DISK, _MEMORY, _PERFECT = 'disk: random reads', 'memory: copy of rows', 'half from the disk, half from memory'
_COLD, _HALF, _WARM = 'epochs, cold', 'epochs, half in memory', 'epochs, warm'
_BOUNDS = {_COLD: _DISK, _HALF: _PERFECT, _WARM: _MEMORY}


def main(num_rows: int, num_records: int, budget_s: float, directory: Optional[str], json_path: Optional[str]) -> int:
    """Measure, print tables, and write the figures to ``json_path``."""
    if num_rows < 10 * BATCH or num_records < 1000:
        raise ConfigError(f'--rows ({num_rows}) must be at least {10 * BATCH}, --records ({num_records}) at least 1000')
    if not budget_s > 0:
        raise ConfigError(f'--seconds ({budget_s:g}) must be above 0')
    with tempfile.TemporaryDirectory(dir=directory, prefix='ding-store-bench-') as path:
        result = {'epochs': measure_epochs(path, num_rows, budget_s)}
        show(render_epochs(result['epochs']))
        result['records'] = measure_records(path, num_records)
        show(render_records(result['records']))
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=1))
    return 0


def measure_epochs(path: str, num_rows: int, budget_s: float) -> Dict[str, Any]:
    """Return rows/s of each way to read the same rows, in random order and batches."""
    cores = busy_cores()
    say('writing rows')
    began = time.perf_counter()
    write_rows(f'{path}/set', num_rows)
    write_s = time.perf_counter() - began
    with DataSet(f'{path}/set', reads='mapped') as mapped, DataSet(f'{path}/set', reads='direct') as direct:
        row_bytes, num_bytes = mapped.layout.row_bytes, mapped.num_bytes
        figures: Dict[str, float] = {}
        say('cold')
        for _ in range(2):  # the better of two, in turn, as others use the disk as well
            for name, make in (
                (_DISK, lambda: random_reads(direct)),
                (_COLD, lambda: batches(direct)),
            ):
                evict(direct)
                figures[name] = max(figures.get(name, 0.0), rate(make(), budget_s))
        say('half in memory')
        with DataSet(f'{path}/set', reads='direct', cache_bytes=num_bytes // 2) as half:
            evict(half)
            half.load_more(len(half))
            warm_up(mapped, len(half) // 2)
            figures[_HALF] = max(rate(batches(half), budget_s) for _ in range(2))
        say('warm')
        warm_up(mapped, num_rows)
        for _ in range(2):
            for name, make in (
                (_MEMORY, lambda: copies(mapped)),
                (_WARM, lambda: batches(mapped)),
                ('data_type=store, DataLoader', lambda: loaded(f'{path}/set')),
            ):
                figures[name] = max(figures.get(name, 0.0), rate(make(), budget_s))
        say('DataLoader over HDF5')
        try:
            export(mapped, f'{path}/set.hdf5', 'hdf5')
            for workers in (0, 2):
                figures[f'HDF5Dataset, DataLoader, {workers} workers'] = rate(
                    hdf5(f'{path}/set.hdf5', workers), budget_s
                )
        except ConfigError as error:
            say(str(error))
        say('webdataset, mosaicml-streaming')
        peers = data_set_peers.rates(mapped, path, BATCH, lambda counts: rate(counts, budget_s))
    return {
        'rows': num_rows,
        'row_bytes': row_bytes,
        'bytes': num_bytes,
        'write_bytes_per_s': num_bytes / write_s,
        'rows_per_s': figures,
        'peers': peers,
        'other_cores': cores,
    }


def write_rows(path: str, num_rows: int) -> None:
    """Write rows of random floats."""
    from ding_store.columns import Schema

    rng = np.random.default_rng(0)
    with DataSetWriter(path) as writer:
        for begin in range(0, num_rows, 4096):
            count = min(4096, num_rows - begin)
            columns = {
                'obs': rng.random((count, OBS), np.float32),
                'next_obs': rng.random((count, OBS), np.float32),
                'action': rng.random((count, ACTION), np.float32),
                'reward': rng.random((count, 1), np.float32),
                'done': np.zeros(count, np.bool_),
            }
            schema = Schema.infer([{name: torch.from_numpy(values[0:1])[0] for name, values in columns.items()}])
            writer.append(columns, schema)


def batches(data_set: DataSet) -> Iterator[int]:
    """Yield the size of each batch of ``epochs``."""
    with data_set.epochs(BATCH, seed=0, prefetch=PREFETCH) as epochs:
        for _ in epochs:
            yield len(epochs.rows)


def random_reads(data_set: DataSet) -> Iterator[int]:
    """
    Read rows at random places, several at a time, past the page cache: what the disk can do. A read begins and ends at
    multiples of the block size, as the disk demands.
    """
    (segment, *_) = data_set.segments
    file = segment._direct_file()
    descriptor, alignment = file.descriptor, file.alignment
    size, row_bytes = segment.num_bytes, segment.layout.row_bytes
    places = (np.random.default_rng(2).permutation(segment.num_rows) * row_bytes).tolist()
    counts = [0] * NUM_THREADS
    closed, queue = threading.Event(), iter(places)
    lock = threading.Lock()

    def run(number: int) -> None:
        import mmap

        memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
        while not closed.is_set():
            with lock:
                some = list(itertools.islice(queue, 32))
            if not some:
                return
            for place in some:
                start = place // alignment * alignment
                stop = -(-(place + row_bytes) // alignment) * alignment
                os.preadv(descriptor, [memory[: min(stop, -(-size // alignment) * alignment) - start].data], start)
            counts[number] += len(some)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    seen = 0
    try:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.01)
            now = sum(counts)
            yield now - seen
            seen = now
    finally:
        closed.set()
        for thread in threads:
            thread.join()


def copies(data_set: DataSet) -> Iterator[int]:
    """Copy random rows of the mapped file to memory that is reused, row by row: one copy and nothing else."""
    records = data_set.segments[0].records
    kind = np.dtype((np.void, records.dtype.itemsize))
    source, target = records.view(kind), np.empty(BATCH, kind)
    rows = np.random.default_rng(1).permutation(len(records))
    for begin in itertools.cycle(range(0, len(rows) - BATCH, BATCH)):
        np.take(source, rows[begin : begin + BATCH], axis=0, out=target, mode='clip')
        yield BATCH


def _config(kind: str, path: str) -> Any:
    from easydict import EasyDict

    collect = dict(data_type=kind, data_path=path)
    return EasyDict(import_names=['ding_store.datasets'], policy=dict(collect=collect), env={})


def _loader(kind: str, path: str, workers: int) -> Iterable[Any]:
    from ding.data import create_dataset
    from torch.utils.data import DataLoader

    dataset = create_dataset(_config(kind, path))
    return DataLoader(dataset, BATCH, shuffle=True, collate_fn=lambda x: x, num_workers=workers)


def loaded(path: str) -> Iterator[int]:
    """Yield batches of DI-engine's ``serial_offline`` with ``data_type='store'``, as its policies collate them."""
    from ding.policy.common_utils import default_preprocess_learn

    loader = _loader('store', path, 0)
    while True:
        for batch in loader:
            default_preprocess_learn(batch)
            yield BATCH


def hdf5(path: str, workers: int) -> Iterator[int]:
    """Yield batches of DI-engine's ``serial_offline`` with ``data_type='hdf5'``, as its policies collate them."""
    from ding.policy.common_utils import default_preprocess_learn

    loader = _loader('hdf5', path, workers)
    while True:
        for batch in loader:
            default_preprocess_learn(batch)
            yield len(batch)


def rate(counts: Iterator[int], budget_s: float) -> float:
    """Return rows/s from the first batch on, until the budget is spent."""
    next(counts)
    begin, total = time.perf_counter(), 0
    for count in counts:
        total += count
        if time.perf_counter() - begin > budget_s:
            break
    seconds = time.perf_counter() - begin
    close: Callable[[], None] = getattr(counts, 'close', lambda: None)
    close()
    return total / seconds


def evict(data_set: DataSet) -> None:
    """Drop the data set from the page cache."""
    for segment in data_set.segments:
        descriptor = os.open(segment.rows_path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm_up(data_set: DataSet, num_rows: int) -> None:
    """Read the first rows into the page cache."""
    for segment in data_set.segments:
        some = segment.records[:num_rows]
        np.add.reduce(some.view(np.uint8))
        num_rows -= len(some)


def measure_records(path: str, num_records: int) -> Dict[str, Any]:
    """Return figures of an array of records that several processes open and read as a whole."""
    say('writing records')
    data = np.random.default_rng(0).integers(0, 256, (1000, RECORD_BYTES)).astype(np.uint8)
    pieces = [each.tobytes() for each in data]
    began = time.perf_counter()
    RecordArray.write(f'{path}/records', (pieces[i % 1000] for i in range(num_records)))
    write_s = time.perf_counter() - began
    say('opening records')
    context = multiprocessing.get_context('fork')
    everyone = context.Barrier(NUM_PROCESSES)
    results = context.Queue()
    arguments = (f'{path}/records', everyone, results)
    processes = [context.Process(target=_read_records, args=arguments) for _ in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    found: List[Dict[str, float]] = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return {
        'records': num_records,
        'bytes': os.path.getsize(f'{path}/records'),
        'write_records_per_s': num_records / write_s,
        'processes': NUM_PROCESSES,
        'open_s': max(each['open_s'] for each in found),
        'take_records_per_s': float(np.median([each['take_per_s'] for each in found])),
        # Proportional: a page that n processes map counts 1/n in each.
        'mapped_bytes': sum(each['pss'] for each in found),
    }


def _read_records(path: str, everyone: Any, results: Any) -> None:
    everyone.wait(300)
    began = time.perf_counter()
    array = RecordArray(path)
    array[len(array) // 2]
    open_s = time.perf_counter() - began
    np.add.reduce(np.asarray(memoryview(array._map)[::_PAGE]))
    rng = np.random.default_rng(os.getpid())
    wanted = rng.integers(0, len(array), (200, BATCH))
    began = time.perf_counter()
    for each in wanted:
        array.take(each)
    take_per_s = wanted.size / (time.perf_counter() - began)
    everyone.wait(300)
    results.put({'open_s': open_s, 'take_per_s': take_per_s, 'pss': _proportional_bytes(path)})
    everyone.wait(300)


def _proportional_bytes(path: str) -> int:
    """Return the bytes that this process's mapping of a file takes, each page divided by the processes that map it."""
    is_ours = False
    for line in Path('/proc/self/smaps').read_text().splitlines():
        if '-' in line.split(' ')[0]:
            is_ours = line.endswith(os.path.realpath(path))
        elif is_ours and line.startswith('Pss:'):
            return int(line.split()[1]) * 1024
    return 0


def render_epochs(found: Dict[str, Any]) -> str:
    """Return the table of epochs."""
    figures = _with_perfect_cache(found['rows_per_s'])
    size = f'{found["rows"]:,} rows of {size_text(found["row_bytes"])} ({size_text(found["bytes"])})'
    lines = [f'data set: {size}, batches of {BATCH}', f'{"":38}{"rows/s":>12}{"GB/s":>8}{"of bound":>10}']
    for name, figure in figures.items():
        share = f'{figure / figures[_BOUNDS[name]]:10.2f}' if name in _BOUNDS else ''
        lines.append(f'{name:38}{figure:12,.0f}{figure * found["row_bytes"] / 1e9:8.2f}{share}')
    for name, peer in found['peers'].items():
        size = f'{peer:12,.0f}{peer * found["row_bytes"] / 1e9:8.2f}' if isinstance(peer, float) else f' {peer}'
        lines.append(f'{name + ", DataLoader":38}{size}')
    lines.append(f'written at {found["write_bytes_per_s"] / 1e6:,.0f} MB/s')
    return '\n'.join(lines + others(found['other_cores']))


def _with_perfect_cache(figures: Dict[str, float]) -> Dict[str, float]:
    """Add what a cache of half of the rows could give at most: the disk reads the others while memory is copied."""
    if not {_HALF, _DISK, _MEMORY} <= set(figures):
        return figures
    made: Dict[str, float] = {}
    for name, figure in figures.items():
        if name == _HALF:
            made[_PERFECT] = min(2 * figures[_DISK], figures[_MEMORY])
        made[name] = figure
    return made


def render_records(found: Dict[str, Any]) -> str:
    """Return the lines about arrays of records."""
    size = f'{found["records"]:,} of {RECORD_BYTES} B ({size_text(found["bytes"])})'
    lines = [
        f'records: {size}, {found["processes"]} processes',
        f'opened in {found["open_s"] * 1e3:.1f} ms, {found["take_records_per_s"]:,.0f} records/s by take of {BATCH}, '
        f'written at {found["write_records_per_s"]:,.0f} records/s',
        f'memory of all processes: {found["mapped_bytes"] / found["bytes"]:.2f} copies of the file',
    ]
    return '\n'.join(lines)
