"""Files of deleted objects are used again, but never while a process can read them."""

import contextlib
import itertools
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
from processes import child
from test_objects import tmpfs, unmount

from ding_store import private_files
from ding_store.errors import NotEnoughSpace, ObjectGone
from ding_store.storage import open_store
from ding_store.storage.objects import free_files

_RUNS = (f'freed{number}' for number in itertools.count())
MB = 1000_000


def arrays(size, number=1):
    return {'x': np.full(size, number, np.uint8)}


def is_right(array, number):
    return bool((array == number).all())


@pytest.fixture
def opened(redis_server, tmp_path):
    """Stores of one run on one host."""
    run = next(_RUNS)
    return lambda: open_store(redis_server.url, run, host_cache_dir=str(tmp_path / 'cache'))


@pytest.mark.parametrize('size', [300_000, 3 * MB])
def test_file_of_a_deleted_object_is_used_again(opened, size):
    with opened() as store:
        objects = store.objects(max_bytes=100 * MB)
        refs = []
        for number in range(5):
            refs.append(objects.put(arrays(size - number, number), {'n': number}))
            found = objects.get(refs[-1])
            assert found.header == {'n': number}
            assert found.arrays['x'].nbytes == size - number
            assert is_right(found.arrays['x'], number)
            del found
            objects.delete(refs[-1])
        assert objects.info().counts['reused'] == 4
        assert objects.info().in_memory == (0, 0)
        for ref in refs:
            with pytest.raises(ObjectGone, match='was deleted'):
                objects.get(ref)


def test_used_file_is_spilled_without_its_unused_bytes(opened, tmp_path):
    with opened() as store:
        objects = store.objects(max_bytes=40 * MB, spill_dir=str(tmp_path / 'disk'), eviction='fifo')
        refs = []
        for number in range(30):
            objects.delete(objects.put(arrays(3 * MB, 99)))
            refs.append(objects.put(arrays(3 * MB, number)))
        info = objects.info()
        assert info.counts['reused'] >= 30
        assert info.spilled.num_objects >= 15
        assert info.spilled.num_bytes < 3.01 * MB * info.spilled.num_objects
        assert [is_right(objects.get(ref).arrays['x'], number) for number, ref in enumerate(refs)] == [True] * 30


def test_file_that_a_process_can_read_is_not_used_again(opened, monkeypatch, tmp_path):
    """Random puts, gets and deletes. Views of all kinds are held by this process and by a forked child."""
    monkeypatch.setattr(free_files, '_FROM_BYTES', 1)
    rng, alive, views = random.Random(0), {}, []
    with contextlib.ExitStack() as stack, opened() as store:
        objects = store.objects(max_bytes=60 * MB, eviction='fifo')
        (directory,) = tmp_path.rglob('objects')
        children = []

        def check(held):
            assert all(is_right(array, number) for array, number in held)

        def child_of(held):
            def work(pipe):
                pipe.write('started\n')
                signal.sigwait([signal.SIGUSR1])
                check(held)
                pipe.write('right\n')

            return work

        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        stack.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGUSR1])
        for number in range(600):
            size = rng.choice([20_000, 200_000, 1_100_000, 2_900_000, 4_100_000]) - rng.randrange(3000)
            alive[objects.put(arrays(size, number % 251))] = number % 251
            ref = rng.choice(list(alive))
            with contextlib.suppress(ObjectGone):
                views.append((objects.get(ref).arrays['x'], alive[ref]))
            if len(views) > 6:
                views.pop(rng.randrange(len(views)))
            while len(alive) > 8:
                ref = rng.choice(list(alive))
                objects.delete(ref)
                del alive[ref]
            if number in (100, 300):
                children.append(stack.enter_context(child(child_of(list(views)))))
                assert children[-1][1].readline() == 'started\n'
            if number % 20 == 0:
                check(views)
                assert sum(path.stat().st_blocks * 512 for path in directory.rglob('*')) < 61 * MB
        for pid, pipe in children:
            os.kill(pid, signal.SIGUSR1)
            assert pipe.readline() == 'right\n'
        assert objects.info().counts['reused'] > 200


def test_reader_that_opens_a_file_too_late_does_not_read_it(monkeypatch):
    """It had looked up the name. Then the object was deleted, and another one uses the file."""
    with open_store('memory://') as store:
        objects = store.objects()
        old, new, opener = objects.put(arrays(MB, 1)), [], private_files.opener

        def late(path, flags=os.O_RDONLY):
            if path.endswith(old) and not new:
                new.append('')
                objects.delete(old)
                new[0] = objects.put(arrays(MB, 2))
                return opener(path.replace(old, new[0]), flags)
            return opener(path, flags)

        with monkeypatch.context() as patched:
            patched.setattr(private_files, 'opener', late)
            with pytest.raises(ObjectGone, match='was deleted'):
                objects.get(old)
        assert objects.info().counts['reused'] == 1
        assert is_right(objects.get(new[0]).arrays['x'], 2)


def test_eviction_that_opens_a_file_too_late_does_not_spill_it(monkeypatch, tmp_path):
    """It had chosen an object. Then the object was deleted, and another one uses the file."""
    with open_store('memory://') as store:
        objects = store.objects(max_bytes=10 * MB, spill_dir=str(tmp_path / 'disk'), eviction='fifo')
        old, *others = (objects.put(arrays(MB, number)) for number in range(9))
        new, opener = [], private_files.opener

        def late(path, flags=os.O_RDONLY):
            if path.endswith(old) and not new:
                new.append('')
                objects.delete(old)
                new[0] = objects.put(arrays(MB, 77))
                return opener(path.replace(old, new[0]), flags)
            return opener(path, flags)

        with monkeypatch.context() as patched:
            patched.setattr(private_files, 'opener', late)
            objects.put(arrays(2 * MB))
        info = objects.info()
        assert info.counts['reused'] == 1
        assert info.counts['spilled_objects'] == info.spilled.num_objects
        assert [objects.get(ref).arrays['x'][0] for ref in (*others, new[0])] == [*range(1, 9), 77]


def test_object_that_is_too_large_leaves_the_free_files(opened, tmp_path):
    with opened() as store:
        objects = store.objects(max_bytes=20 * MB)
        objects.delete(objects.put(arrays(MB)))
        with pytest.raises(NotEnoughSpace, match='Raise max_bytes'):
            objects.put(arrays(21 * MB))
        assert len(list(tmp_path.rglob('free-[0-9]*'))) == 1
        assert objects.info().counts['put'] == 1


def test_pinned_or_mapped_file_is_removed(opened):
    with opened() as store, opened() as other:
        objects = store.objects(max_bytes=100 * MB)
        pinned, mapped = objects.put(arrays(MB)), objects.put(arrays(MB, 2))
        pin, view = other.objects().pin(pinned), other.objects().get(mapped).arrays['x']
        objects.delete([pinned, mapped])
        objects.put(arrays(MB, 3))
        assert objects.info().counts['reused'] == 0
        assert is_right(view, 2)
        pin.release()


def test_full_file_system_takes_free_files_first(redis_server, tmp_path):
    tmpfs(tmp_path / 'shm', '6m')
    try:
        with open_store(redis_server.url, next(_RUNS), host_cache_dir=str(tmp_path / 'shm')) as store:
            objects = store.objects(max_bytes=100 * MB)
            objects.delete(objects.put(arrays(3 * MB)))
            assert list(tmp_path.rglob('free-[0-9]*')) != []
            ref = objects.put(arrays(4 * MB, 2))
            assert list(tmp_path.rglob('free-[0-9]*')) == []
            assert is_right(objects.get(ref).arrays['x'], 2)
            objects.delete(ref)
            assert list(tmp_path.rglob('free-[0-9]*')) != []
            store.put('weights', {}, arrays(MB, 4))  # Its file is another part of the host cache.
            assert list(tmp_path.rglob('*.slots')) != []
            assert list(tmp_path.rglob('free-[0-9]*')) == []
    finally:
        unmount(tmp_path / 'shm')


def test_free_file_that_cannot_grow_is_used_as_it_is(redis_server, tmp_path):
    """Huge pages would take 4 MiB. The next object ends in the same page as the last one."""
    tmpfs(tmp_path / 'shm', '6m')
    try:
        with open_store(redis_server.url, next(_RUNS), host_cache_dir=str(tmp_path / 'shm')) as store:
            objects = store.objects(max_bytes=100 * MB)
            ref = objects.put(arrays(3 * MB, 1))
            (tmp_path / 'shm' / 'filler').write_bytes(bytes(2 * MB))
            objects.delete(ref)
            for number, size in enumerate((3 * MB + 64, 3 * MB + 1280, 3 * MB - 640)):
                ref = objects.put(arrays(size, number))
                assert is_right(objects.get(ref).arrays['x'], number)
                assert objects.get(ref).arrays['x'].nbytes == size
                objects.delete(ref)
            assert objects.info().counts['reused'] == 3
    finally:
        unmount(tmp_path / 'shm')


def test_file_that_a_killed_process_left_is_removed(opened, tmp_path):
    with opened() as store:
        objects = store.objects(max_bytes=100 * MB)
        objects.delete(objects.put(arrays(MB)))
        (free,) = tmp_path.rglob('free-[0-9]*')
        number = int(free.name.partition('-')[2])
        Path(free.parent / f'free-{number + 3}').write_bytes(bytes(MB))  # Killed before the word of it was written.
        objects.info()
        assert list(tmp_path.rglob('free-[0-9]*')) == [free]
        free.unlink()  # Killed after it was taken.
        assert is_right(objects.get(objects.put(arrays(MB, 2))).arrays['x'], 2)
        assert objects.info().counts['reused'] == 0
