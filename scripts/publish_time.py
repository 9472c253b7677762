"""
Where a put of weights spends its time while other processes copy what it publishes, beside a bare program that copies
into shared memory, tells a process in the server's place, which wakes the same readers, and waits for its answer.

    python scripts/publish_time.py [--mb 50] [--readers 0,4] [--rounds 15]
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
from ding_store.storage.slots import SlotWriter

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
        for target, array in zip(self.shared, arrays):
            np.copyto(target, array)
        copied = time.monotonic()
        os.write(self.told[1], b'x')
        os.read(self.answered[0], 1)
        return copied - began


def read(url, bare, number, arrays, begin, num_rounds):
    own = [array.copy() for array in arrays]
    with open_store(url, 'publish') as store:
        for version in range(num_rounds):
            begin.wait(WAIT_S)
            value = store.get('weights', version, WAIT_S)
            for target, array in zip(own, value.arrays.values()):
                np.copyto(target, array)
            del value, array
            begin.wait(WAIT_S)
            begin.wait(WAIT_S)
            os.read(bare.wakes[number][0], 1)
            for target, array in zip(own, bare.shared):
                np.copyto(target, array)
            begin.wait(WAIT_S)


def measure(num_bytes, num_readers, num_rounds):
    """Seconds per round: put, its copy, the bare program, its copy."""
    arrays = [np.zeros(num_bytes // NUM_ARRAYS // 4, np.float32) for _ in range(NUM_ARRAYS)]
    bare, begin = Bare(arrays, num_readers), _fork.Barrier(num_readers + 1)
    with tempfile.TemporaryDirectory(prefix='ding') as directory:
        url = f'embedded://{directory}'
        readers = [(url, bare, number, arrays, begin, num_rounds) for number in range(num_readers)]
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
    times = []
    for publish in (lambda: store.put('weights', {}, {str(i): array for i, array in enumerate(arrays)}), None):
        for array in arrays:
            array += 1
        begin.wait(WAIT_S)
        began = time.monotonic()
        copy_s = bare.publish(arrays) if publish is None else (publish(), TimedSlots.copy_s)[1]
        times += [time.monotonic() - began, copy_s]
        begin.wait(WAIT_S)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--mb', type=int, default=50)
    parser.add_argument('--readers', default='0,4')
    parser.add_argument('--rounds', type=int, default=15)
    options = parser.parse_args()
    import ding_store.storage.cache_dir

    ding_store.storage.cache_dir.SlotWriter = TimedSlots
    sys.stdout.write(f'{options.mb} MB in {NUM_ARRAYS} arrays, {os.cpu_count()} cores, ms, medians\n')
    sys.stdout.write(f'{"readers":>8} {"put":>8} {"copy":>8} {"rest":>8}   {"bare":>8} {"copy":>8} {"rest":>8}\n')
    for num_readers in map(int, options.readers.split(',')):
        put, copy, bare, bare_copy = np.median(measure(options.mb * 1_000_000, num_readers, options.rounds), 0) * 1e3
        figures = (put, copy, put - copy, bare, bare_copy, bare - bare_copy)
        numbers = [f'{figure:>8.1f}' for figure in figures]
        sys.stdout.write(f'{num_readers:>8} {" ".join(numbers[:3])}   {" ".join(numbers[3:])}\n')


if __name__ == '__main__':
    main()
