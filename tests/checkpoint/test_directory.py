"""A run's directory: what is kept, what is resumed, what makes way."""

import errno
import fcntl
import gc
import itertools
import json
import os
import random
import signal
import types

import pytest
import torch

from ding_store.checkpoint import EXTRA, CheckpointDir
from ding_store.errors import ConfigError, CorruptPayload


def state(number):
    return {'model': {'w': torch.full((3,), float(number))}, EXTRA: {'train_iter': number}}


def files(path):
    return sorted(name for name in os.listdir(path) if name.endswith('.pth.tar'))


def test_checkpoints_kept_are_the_last_and_the_newest_is_read(tmp_path):
    directory = CheckpointDir(str(tmp_path), keep=2)
    assert directory.newest() is None
    assert directory.begin() is False
    for number in (5, 90, 100):
        directory.save(number, state(number))
    assert files(tmp_path) == ['iteration_100.pth.tar', 'iteration_90.pth.tar']
    path, newest = directory.newest()
    assert (os.path.basename(path), newest[EXTRA]['train_iter']) == ('iteration_100.pth.tar', 100)


def test_checkpoint_that_is_damaged_is_passed_over(tmp_path):
    directory = CheckpointDir(str(tmp_path))
    directory.begin()
    for number in (1, 2):
        directory.save(number, state(number))
    (tmp_path / 'iteration_2.pth.tar').write_bytes(b'damaged')
    assert directory.newest()[1][EXTRA]['train_iter'] == 1


def test_checkpoint_with_a_wrong_weight_is_passed_over(tmp_path, caplog):
    directory = CheckpointDir(str(tmp_path))
    directory.begin()
    for number in (1, 2):
        directory.save(number, state(number))
    path = tmp_path / 'iteration_2.pth.tar'
    content = path.read_bytes()
    weights = torch.full((3,), 2.0).numpy().tobytes()
    assert content.count(weights) == 1
    path.write_bytes(content.replace(weights, torch.full((3,), 2.5).numpy().tobytes()))
    assert torch.load(path)['model']['w'].tolist() == [2.5] * 3  # torch does not look
    assert directory.newest()[1][EXTRA]['train_iter'] == 1
    assert str(path) in caplog.text


def test_checkpoint_that_is_damaged_replaces_no_other(tmp_path):
    directory = CheckpointDir(str(tmp_path), keep=1)
    directory.begin()
    directory.save(20, state(20))
    (tmp_path / 'iteration_20.pth.tar').write_bytes(b'damaged')
    for number in (10, 15):  # of a learner that went on from an older one
        directory.save(number, state(number))
        assert directory.newest()[1][EXTRA]['train_iter'] == number
    directory.save(25, state(25))
    assert files(tmp_path) == ['iteration_25.pth.tar']


def test_directory_with_foreign_checkpoints_is_refused(tmp_path):
    torch.save(state(3), tmp_path / 'iteration_3.pth.tar')
    with pytest.raises(ConfigError, match=r'run\.json.*store\.checkpoint\.load'):
        CheckpointDir(str(tmp_path)).begin()
    assert os.listdir(tmp_path) == ['iteration_3.pth.tar']


@pytest.mark.parametrize('text', ['', '{', '{}', '[1]', '"run"'])
def test_run_file_that_is_damaged_is_refused_with_a_fix(tmp_path, text):
    """It is a ConfigError, for which nobody starts the learner again."""
    directory = CheckpointDir(str(tmp_path / 'run'))
    directory.begin()
    directory.save(3, state(3))
    (tmp_path / 'run' / 'run.json').write_text(text)
    with pytest.raises(ConfigError, match=r'run\.json.*store\.checkpoint\.path.*store\.checkpoint\.load'):
        directory.begin()
    assert files(tmp_path / 'run') == ['iteration_3.pth.tar']


def test_checkpoint_that_could_not_be_read_is_refused_at_once(tmp_path):
    directory = CheckpointDir(str(tmp_path))
    directory.begin()
    for _ in range(2):
        with pytest.raises(CorruptPayload, match='SimpleNamespace'):
            directory.save(1, {**state(1), 'settings': types.SimpleNamespace()})
    with pytest.raises(CorruptPayload, match='SimpleNamespace'):
        directory.save_best({**state(1), 'settings': types.SimpleNamespace()}, 1.0)
    assert os.listdir(tmp_path) == ['run.json']


def test_run_is_resumed_until_it_finishes(tmp_path):
    directory = CheckpointDir(str(tmp_path))
    directory.begin()
    run = directory.run
    directory.save(7, state(7))
    (tmp_path / 'iteration_8.pth.tar.new').write_bytes(b'of one that was killed')
    again = CheckpointDir(str(tmp_path))
    assert again.begin() is True
    assert again.run == run
    assert not (tmp_path / 'iteration_8.pth.tar.new').exists()
    again.finish('it is good enough')
    assert again.run is None
    assert again.begin() is False
    assert again.run not in (None, run)
    assert again.newest() is None
    assert files(tmp_path / 'previous') == ['iteration_7.pth.tar']


def test_previous_directory_holds_one_run(tmp_path):
    for number in (1, 2):
        directory = CheckpointDir(str(tmp_path))
        directory.begin()
        directory.save(number, state(number))
        directory.save_best(state(number), number)
        directory.finish('done')
    CheckpointDir(str(tmp_path)).begin()
    assert files(tmp_path / 'previous') == ['best.pth.tar', 'iteration_2.pth.tar']


def test_checkpoints_killed_while_moved_to_previous_are_kept(tmp_path):
    def killed_at(directory, number):
        """At this call that renames or removes a file; whether there were so many."""
        child = os.fork()
        if not child:
            left = iter(range(number))

            def killing(call):
                def either(*args):
                    if next(left, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args)

                return either

            os.replace, os.unlink = killing(os.replace), killing(os.unlink)
            try:
                CheckpointDir(str(directory)).begin()
            finally:
                os._exit(0)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    for number in itertools.count():
        directory = tmp_path / str(number)
        for first in (1, 10):
            made = CheckpointDir(str(directory))
            made.begin()
            for iteration in range(first, first + 3):
                made.save(iteration, state(iteration))
            made.save_best(state(first), 1.0)
            made.finish('done')
        was_killed = killed_at(directory, number)
        CheckpointDir(str(directory)).begin()
        kept = ['best.pth.tar', *(f'iteration_{iteration}.pth.tar' for iteration in (10, 11, 12))]
        assert files(directory / 'previous') == kept, f'killed at {number}'
        assert files(directory) == []
        if not was_killed:
            break
    assert number > 5


def test_best_checkpoint_is_that_of_the_current_run(tmp_path):
    directory = CheckpointDir(str(tmp_path))
    assert directory.save_best(state(1), 1.0) is False  # no run has begun
    directory.begin()
    assert directory.save_best(state(1), 1.0)
    assert not CheckpointDir(str(tmp_path)).save_best(state(2), 0.5)
    assert CheckpointDir(str(tmp_path)).save_best(state(3), 1.5)
    assert torch.load(tmp_path / 'best.pth.tar')['model']['w'].tolist() == [3.0] * 3
    directory.finish('done')
    directory.begin()
    assert directory.save_best(state(4), 0.1)  # of another run


def test_checkpoint_directory_is_locked_until_its_process_ends(tmp_path):
    """Two that take a directory for theirs resume from one another's, and write the same files."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = CheckpointDir(str(tmp_path))
        held.claim()
        os.write(writing, b'x')
        signal.pause()
        os._exit(1)
    try:
        assert os.read(reading, 1) == b'x'
        directory = CheckpointDir(str(tmp_path))
        with pytest.raises(ConfigError, match=rf'(?s){tmp_path}.*process {pid}.*store\.checkpoint\.path'):
            directory.claim()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
    for each in (directory, CheckpointDir(str(tmp_path))):
        each.claim()


def test_lock_when_a_second_claim_ends_is_still_held(tmp_path):
    first = CheckpointDir(str(tmp_path))
    first.claim()
    second = CheckpointDir(str(tmp_path))
    second.claim()
    del second
    gc.collect()
    (tmp_path / 'lock').read_bytes()  # Whoever opens and closes the file in this process changes nothing, too.
    assert asked_by_another(tmp_path) == 'refused'
    first.claim()
    del first
    gc.collect()
    assert asked_by_another(tmp_path) == 'claimed'


def asked_by_another(path):
    """What another process is told that claims the directory."""
    child = os.fork()
    if not child:
        try:
            CheckpointDir(str(path)).claim()
        except ConfigError:
            os._exit(1)
        os._exit(0)
    return 'refused' if os.waitpid(child, 0)[1] else 'claimed'


def test_checkpoint_directory_without_locks_is_accepted(tmp_path, monkeypatch):
    def unknown(*args):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', unknown)
    CheckpointDir(str(tmp_path)).claim()


def test_checkpoint_keep_below_1_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'keep \(0\)'):
        CheckpointDir(str(tmp_path), keep=0)


def flipped(path, place, bit):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_checkpoint_with_a_flipped_bit_is_passed_over(tmp_path):
    """Or what is in it is what was saved: no other weight, counter or score."""
    directory = CheckpointDir(str(tmp_path))
    directory.begin()
    for number in (1, 2):
        directory.save(number, state(number))
    directory.save_best(state(2), 0.75)
    path, best = tmp_path / 'iteration_2.pth.tar', tmp_path / 'best.pth.tar'
    content, of_best, rng = path.read_bytes(), best.read_bytes(), random.Random(0)
    outcomes = set()
    for _ in range(80):
        flipped(path, rng.randrange(len(content)), rng.randrange(8))
        name, found = directory.newest()
        number = found[EXTRA]['train_iter']
        outcomes.add(number)
        assert os.path.basename(name) == f'iteration_{number}.pth.tar'
        assert found['model']['w'].tolist() == [number] * 3
        path.write_bytes(content)
    assert outcomes == {1, 2}
    for _ in range(40):
        flipped(best, rng.randrange(len(of_best)), rng.randrange(8))
        is_kept = not directory.save_best(state(3), 0.5)
        assert is_kept or torch.load(best)['model']['w'].tolist() == [3] * 3
        if is_kept:
            assert not directory.save_best(state(3), 0.75)
            assert directory.save_best(state(3), 0.76)
        best.write_bytes(of_best)


@pytest.mark.parametrize('is_finished', [False, True])
def test_run_with_a_flipped_bit_is_refused(tmp_path, is_finished):
    """Every bit of what says which run this is of, and of which one those in ``previous`` are."""
    directory = CheckpointDir(str(tmp_path))
    for number in (1, 2):
        directory.begin()
        directory.save(number, state(number))
        if number == 1 or is_finished:
            directory.finish('done')
    run, before = directory.run, {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    names = [tmp_path / 'run.json'] + ([tmp_path / 'previous' / 'of_run'] if is_finished else [])
    for path in names:
        for place in range(len(before[path])):
            flipped(path, place, place % 8)
            with pytest.raises(ConfigError, match=f'{path.name}.*damaged'):
                directory.begin()
            path.write_bytes(before[path])
            assert {each: each.read_bytes() for each in tmp_path.rglob('*') if each.is_file()} == before
    assert directory.run == run


def test_run_of_an_earlier_version_is_resumed(tmp_path):
    directory = CheckpointDir(str(tmp_path))
    directory.begin()
    directory.save(1, state(1))
    run = directory.run
    (tmp_path / 'run.json').write_text(json.dumps({'run': run, 'finished': None}))
    assert directory.begin() is True
    directory.finish('done')
    (tmp_path / 'previous').mkdir(mode=0o700)
    (tmp_path / 'previous' / 'of_run').write_text('0' * 32)
    assert directory.begin() is False
    assert files(tmp_path / 'previous') == ['iteration_1.pth.tar']
