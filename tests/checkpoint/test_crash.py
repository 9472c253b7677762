"""Killed in the middle of a save, a process leaves the checkpoint before it or the new one; a wrong order does not."""

import mmap
import os
import random
import signal
import time
import traceback

import numpy as np
import pytest
import torch

from ding_store.checkpoint import EXTRA, CheckpointDir, archive, directory

KILLS = int(os.environ.get('DING_STORE_KILLS', '20'))
NUM_TENSORS, SIZE = 8, 40_000


def state_of(number):
    tensors = {str(i): torch.full((SIZE,), float(number * NUM_TENSORS + i)) for i in range(NUM_TENSORS)}
    return {'model': tensors, EXTRA: {'train_iter': number}}


def work(path, word):
    """Save one checkpoint after the other; ``word`` says which one is known to be there."""
    checkpoints = CheckpointDir(path, keep=1)
    checkpoints.begin()
    newest = checkpoints.newest()
    number = newest[1][EXTRA]['train_iter'] if newest else 0
    while True:
        number += 1
        checkpoints.save(number, state_of(number))
        word[0] = number


def wrong(path, known):
    """What is wrong with what a killed one has left; None if nothing is."""
    newest = CheckpointDir(path).newest()
    if newest is None:
        return f'no checkpoint is left, {known} was there' if known else None
    if EXTRA not in newest[1]:
        return f'{newest[0]} is empty'
    number = newest[1][EXTRA]['train_iter']
    if number < known:
        return f'checkpoint {number} is left, {known} was there'
    same = [torch.equal(newest[1]['model'][str(i)], state_of(number)['model'][str(i)]) for i in range(NUM_TENSORS)]
    return None if all(same) else f'checkpoint {number} is torn: {same}'


def kill_repeatedly(path, kills, seed):
    rng, word = random.Random(seed), np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    for number in range(kills):
        pid, before = os.fork(), word[0]
        if pid == 0:
            try:
                torch.set_num_threads(1)
                work(path, word)
            except BaseException:  # noqa: BLE001  the child must not return into the test
                traceback.print_exc()
            os._exit(1)
        deadline = time.monotonic() + 60
        while number % 4 and word[0] == before and time.monotonic() < deadline:
            os.sched_yield()  # three of four are killed after their first save, one while it begins
        # Not to wait for something: to kill it just anywhere.
        time.sleep(rng.uniform(0, 0.015))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        found = wrong(path, int(word[0]))
        if found:
            return f'kill {number}: {found}'
    return None


def test_checkpoint_save_killed_anywhere_leaves_old_or_new(tmp_path):
    assert kill_repeatedly(str(tmp_path), KILLS, seed=KILLS) is None


def write_in_place(path, state, reads_back):
    """No temporary file: the name stands for what is not there yet."""
    archive._write(path, state)


def rename_first(path, state, reads_back):
    """The name before the bytes."""
    torch.save({}, path)
    time.sleep(0.005)
    archive._write(path + '.new', state)
    os.replace(path + '.new', path)


def save_with_the_oldest_removed_first(self, train_iter, state):
    for path in self.paths():
        os.unlink(path)
    time.sleep(0.005)
    archive.write_state(self.file(f'iteration_{train_iter}.pth.tar'), state)


@pytest.mark.parametrize(
    ('where', 'name', 'mutant'),
    [
        (directory, 'write_state', write_in_place),
        (directory, 'write_state', rename_first),
        (CheckpointDir, 'save', save_with_the_oldest_removed_first),
    ],
)
def test_checkpoint_save_in_a_wrong_order_is_found(tmp_path, monkeypatch, where, name, mutant):
    monkeypatch.setattr(where, name, mutant)
    assert any(kill_repeatedly(str(tmp_path / str(i)), 10, seed=i) for i in range(20))
