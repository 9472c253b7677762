"""
Where a put of weights spends its time while other processes wait for what it publishes, and read it in place or copy
it; beside a bare program that copies into shared memory, tells a process in the server's place, which wakes the same
readers, and waits for its answer. CPU is what the calling thread had of the cores, also in the kernel: work that grows
with the readers would show there.

    python scripts/publish_time.py [--mb 50] [--readers 0,1,4,8] [--rounds 15]
"""

import argparse
import mmap
import multiprocessing
import os
import sys
import tempfile
import time

import numpy as np

from ding_store.storage import open_store
from ding_store.storage.shared_memory.slots import SlotWriter

NUM_ARRAYS = 50
WAIT_S = 60.0
_fork = multiprocessing.get_context('fork')


class TimedSlots(SlotWriter):
    """Says how long the copy took that it made last."""

    copy_s = 0.0

    def write(self, parts):
        began = time.monotonic()
        try:
            return super().write(parts)
        finally:
            TimedSlots.copy_s = time.monotonic() - began


class Bare:
    """Shared memory, a pipe per reader, and two to the process in between."""

    def __init__(self, arrays, num_readers):
        shared = np.frombuffer(mmap.mmap(-1, sum(array.nbytes for array in arrays)), np.float32)
        self.shared = np.split(shared, len(arrays))
        self.wakes = [os.pipe() for _ in range(num_readers)]
        self.told, self.answered = os.pipe(), os.pipe()

    def serve(self):
        while os.read(self.told[0], 1) != b'q':
            for _, wake in self.wakes:
                os.write(wake, b'x')
            os.write(self.answered[1], b'x')

    def publish(self, arrays):
        """Returns how long the copy took."""
        began = time.monotonic()
        copy(self.shared, arrays)
        copied = time.monotonic()
        os.write(self.told[1], b'x')
        os.read(self.answered[0], 1)
        return copied - began


def copy(targets, arrays):
    for target, array in zip(targets, arrays):
        np.copyto(target, array)


def read(url, bare, number, arrays, begin, num_rounds, copies):
    own = [array.copy() for array in arrays] if copies else []
    with open_store(url, 'publish') as store:
        for version in range(num_rounds):
            begin.wait(WAIT_S)
            value = store.get('weights', version, WAIT_S)
            copy(own, value.arrays.values())
            del value
            begin.wait(WAIT_S)
            begin.wait(WAIT_S)
            os.read(bare.wakes[number][0], 1)
            copy(own, bare.shared)
            begin.wait(WAIT_S)


def measure(num_bytes, num_readers, copies, num_rounds):
    """Seconds per round: put, its CPU time, its copy, the bare program, its CPU time, its copy."""
    arrays = [np.zeros(num_bytes // NUM_ARRAYS // 4, np.float32) for _ in range(NUM_ARRAYS)]
    bare, begin = Bare(arrays, num_readers), _fork.Barrier(num_readers + 1)
    with tempfile.TemporaryDirectory(prefix='ding') as directory:
        url = f'embedded://{directory}'
        readers = [(url, bare, number, arrays, begin, num_rounds, copies) for number in range(num_readers)]
        processes = [_fork.Process(target=read, args=one, daemon=True) for one in readers]
        processes.append(_fork.Process(target=bare.serve, daemon=True))
        for process in processes:
            process.start()
        with open_store(url, 'publish') as store:
            times = [_round(store, bare, arrays, begin) for _ in range(num_rounds)]
            os.write(bare.told[1], b'q')
            for process in processes:
                process.join(WAIT_S)
            store.retire()
    return np.array(times[2:])


def _round(store, bare, arrays, begin):
    def put():
        store.put('weights', {}, {str(i): array for i, array in enumerate(arrays)})
        return TimedSlots.copy_s

    times = []
    for publish in (put, lambda: bare.publish(arrays)):
        for array in arrays:
            array += 1
        begin.wait(WAIT_S)
        began, began_cpu = time.monotonic(), time.thread_time()
        copy_s = publish()
        times += [time.monotonic() - began, time.thread_time() - began_cpu, copy_s]
        begin.wait(WAIT_S)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--mb', type=int, default=50)
    parser.add_argument('--readers', default='0,1,4,8')
    parser.add_argument('--rounds', type=int, default=15)
    options = parser.parse_args()
    import ding_store.storage.shared_memory.cache_dir

    ding_store.storage.shared_memory.cache_dir.SlotWriter = TimedSlots
    sys.stdout.write(f'{options.mb} MB in {NUM_ARRAYS} arrays, {os.cpu_count()} cores, ms, medians\n')
    names = ('put', 'CPU', 'copy', 'bare', 'CPU', 'copy')
    sys.stdout.write(f'{"readers":>8} {"":<9}{" ".join(f"{name:>8}" for name in names)}\n')
    for copies in (False, True):
        for num_readers in map(int, options.readers.split(',')):
            if num_readers or not copies:
                times = measure(options.mb * 1_000_000, num_readers, copies, options.rounds)
                figures = ' '.join(f'{figure:>8.1f}' for figure in np.median(times, 0) * 1e3)
                kind = '' if not num_readers else 'copy' if copies else 'in place'
                sys.stdout.write(f'{num_readers:>8} {kind:<9}{figures}\n')
                sys.stdout.flush()


if __name__ == '__main__':
    main()
