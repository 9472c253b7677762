"""A benchmark that is killed leaves nothing that stays: no directory, no process."""

import os
import signal
import subprocess
from pathlib import Path

from jobs import ding_store, environment

from ding_store.bench.scratch import memory_directory, scratch
from ding_store.storage.testing import WAIT_S, eventually


def test_directories_of_the_dead_are_removed_and_no_other(tmp_path):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with scratch(str(tmp_path)) as directory:
            os.write(writing, directory.encode())
            signal.pause()
    dead = os.read(reading, 1000).decode()
    (tmp_path / 'ding-store-bench-file').mkdir()
    (tmp_path / 'other').mkdir()
    with scratch(str(tmp_path)) as alive:
        assert os.path.exists(dead)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with scratch(str(tmp_path)) as last:
            assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(alive), os.path.basename(last), 'other'])
    assert os.listdir(tmp_path) == ['other']


def test_a_killed_benchmark_takes_its_producer_along():
    command = ding_store('bench', 'transport', '--elements', 'cartpole', '--paths', 'bare ring', '--seconds', '0.5')
    bench = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        parent = Path(memory_directory() or '/tmp')
        before = set(parent.glob('ding-store-bench-*'))
        eventually(lambda: any(map(num_sent, set(parent.glob('ding-store-bench-*')) - before)), 'something is sent')
        (producer,) = producers(bench.pid)
    finally:
        bench.kill()
        bench.wait(WAIT_S)
    eventually(lambda: not is_running(producer), 'the producer ends')
    left = set(parent.glob('ding-store-bench-*')) - before
    with scratch(str(parent)):
        assert not any(path.exists() for path in left)


def num_sent(directory):
    ring = directory / 'ring'  # It begins with that counter.
    return int.from_bytes(ring.read_bytes()[:8], 'little') if ring.exists() else 0


def producers(pid):
    """Processes of a benchmark that have begun to produce: what helps to start them runs another command."""
    children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
    return [one for one in children if b'spawn_main' in Path(f'/proc/{one}/cmdline').read_bytes()]


def is_running(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False
