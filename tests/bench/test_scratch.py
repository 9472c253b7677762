"""Directories of benchmarks: those of the dead go, and no other."""

import os
import signal

from ding_store.compare.scratch import scratch


def test_directories_of_dead_processes_only_are_removed(tmp_path):
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
