"""Objects beside a plain dict, in a process that is killed at any moment: nothing is lost, torn, or leaked."""

import itertools
import os
import random
import signal

import numpy as np
import pytest
from processes import child

from ding_store.errors import NotEnoughSpace, ObjectGone
from ding_store.storage import open_store
from ding_store.storage.objects import free_files
from ding_store.storage.testing import WAIT_S, eventually

NUM_KILLS = 8 * int(os.environ.get('DING_STORE_MORE_KILLS', '1'))
#: Half of the objects that are alive fit into memory. The disk takes all of them.
OPTIONS = {'max_bytes': 400_000, 'spill_max_bytes': 50_000_000}
MAX_ALIVE = 40
_RUNS = (f'objects-crash{number}' for number in itertools.count())


def array_of(seed):
    size = 1000 * (1 + seed % 40)
    return np.random.default_rng(seed).integers(0, 255, size).astype(np.uint8)


def is_right(stored, seed):
    return stored.header == {'seed': seed} and np.array_equal(stored.arrays['x'], array_of(seed))


class Model:
    """The objects of a run as a dict, from the lines that its process wrote before and after each change."""

    def __init__(self):
        self.alive = {}  # reference -> seed
        self.deleted = set()
        self.in_doubt = set()  # deletions that began

    def follow(self, line):
        words = line.split()
        if words[0] == 'put':
            self.alive[words[1]] = int(words[2])
        elif words[0] == 'deleting':
            self.in_doubt.add(words[1])
        elif words[0] == 'deleted':
            self.in_doubt.discard(words[1])
            del self.alive[words[1]]
            self.deleted.add(words[1])

    def check(self, objects):
        for ref, seed in list(self.alive.items()):
            try:
                assert is_right(objects.get(ref), seed)
            except ObjectGone:
                assert ref in self.in_doubt, f'{ref} is lost'
                del self.alive[ref]
        for ref in self.deleted:
            with pytest.raises(ObjectGone, match='was deleted'):
                objects.get(ref)
        self.in_doubt.clear()


def work(url, run, options, alive, seed):
    """Return the work of a process: random changes, each written to the pipe, and checked against its own dict."""

    def change(pipe):
        rng, model, pins = random.Random(seed), dict(alive), {}
        seeds = itertools.count(seed * 100_000)
        with open_store(url, run, **options['store']) as store:
            objects = store.objects(**options['objects'])
            pipe.write('ready\n')
            while True:
                choice = rng.random()
                if choice < 0.4 and len(model) < MAX_ALIVE:
                    number = next(seeds)
                    ref = objects.put({'x': array_of(number)}, {'seed': number})
                    model[ref] = number
                    pipe.write(f'put {ref} {number}\n')
                elif model and choice < 0.7:
                    ref = rng.choice(list(model))
                    assert is_right(objects.get(ref), model[ref]), ref
                elif model and choice < 0.8 and len(pins) < 4:
                    ref = rng.choice(list(model))
                    pins[ref] = objects.pin(ref)
                elif pins and choice < 0.9:
                    pins.pop(rng.choice(list(pins))).release()
                elif model:
                    ref = rng.choice(list(model))
                    pipe.write(f'deleting {ref}\n')
                    objects.delete(ref)
                    del model[ref]
                    pipe.write(f'deleted {ref}\n')

    return change


@pytest.mark.parametrize('eviction', ['fifo', 's3fifo'])
def test_killed_process_loses_and_leaks_no_object(redis_server, tmp_path, eviction, monkeypatch):
    uses_again = eviction == 's3fifo'
    monkeypatch.setattr(free_files, '_FROM_BYTES', 1 if uses_again else 1 << 30)
    url, run, rng = redis_server.url, next(_RUNS), random.Random(0)
    options = {
        'store': {'host_cache_dir': str(tmp_path / 'cache')},
        'objects': {**OPTIONS, 'spill_dir': str(tmp_path / 'disk'), 'eviction': eviction},
    }
    model = Model()
    with open_store(url, run, **options['store']) as store:
        objects = store.objects(**options['objects'])
        for number in range(NUM_KILLS):
            with child(work(url, run, options, model.alive, number + 1)) as (pid, pipe):
                assert pipe.readline() == 'ready\n'
                for _ in range(rng.randrange(40, 120)):
                    line = pipe.readline()
                    assert line, 'the process failed'
                    model.follow(line)
                os.kill(pid, signal.SIGKILL)
                for line in pipe:
                    if line.endswith('\n'):
                        model.follow(line)
            model.check(objects)
            # Nothing is left of what the process was writing, and the numbers are right again.
            info = objects.info()
            names = [path.name for path in tmp_path.rglob('*.new')]
            assert names == []
            assert info.in_memory.num_bytes <= OPTIONS['max_bytes']
            assert info.in_memory.num_objects + info.spilled.num_objects >= len(model.alive)
            assert info.counts['spilled_objects'] > 0
            assert (info.counts['reused'] > 0) == uses_again
            (memory,) = (tmp_path / 'cache').rglob('objects')
            files = [path for path in memory.iterdir() if path.name.startswith(('free-', *'0123456789abcdef'))]
            assert sum(path.stat().st_size for path in files) <= OPTIONS['max_bytes'] + 4096
        # Its pins are gone: all objects can leave the memory.
        big = objects.put({'x': np.zeros(390_000, np.uint8)})
        assert objects.info().in_memory.num_objects == 1
        model.check(objects)
        objects.delete([big, *model.alive])
        info = objects.info()
        # An object whose put was not reported is the process's own: at most one per kill.
        assert info.in_memory.num_objects + info.spilled.num_objects <= NUM_KILLS


def test_process_killed_while_it_spills_leaves_the_object(redis_server, tmp_path):
    """The copy on the disk is cut, again and again at another byte, and the object stays in memory."""
    url, run = redis_server.url, next(_RUNS)
    options = {'max_bytes': 40 << 20, 'spill_dir': str(tmp_path / 'disk'), 'spill_max_bytes': 1 << 30}
    cache = {'host_cache_dir': str(tmp_path / 'cache')}
    arrays = {'x': np.random.default_rng(0).integers(0, 255, 30 << 20).astype(np.uint8)}
    with open_store(url, run, **cache) as store:
        objects = store.objects(**options)
        ref = objects.put(arrays)
        for _ in range(3):

            def spill(pipe):
                with open_store(url, run, **cache) as mine:
                    pipe.write('spilling\n')
                    mine.objects().put(arrays)

            with child(spill) as (pid, pipe):
                assert pipe.readline() == 'spilling\n'
                eventually(
                    lambda: any((tmp_path / 'disk').rglob('*.new')) or objects.info().spilled.num_objects, 'a spill'
                )
                os.kill(pid, signal.SIGKILL)
            assert np.array_equal(objects.get(ref).arrays['x'], arrays['x'])
            usage = objects.info()
            assert usage.in_memory.num_bytes <= 40 << 20
            assert list(tmp_path.rglob('*.new')) == []


def test_pin_of_a_killed_process_ends(redis_server, tmp_path):
    url, run = redis_server.url, next(_RUNS)
    cache = {'host_cache_dir': str(tmp_path / 'cache')}
    with open_store(url, run, **cache) as store:
        objects = store.objects(max_bytes=1 << 20, eviction='fifo')
        ref = objects.put({'x': np.zeros(900_000, np.uint8)})

        def pin(pipe):
            held = open_store(url, run, **cache).objects().pin(ref)
            pipe.write(f'{held.ref}\n')
            signal.pause()

        with child(pin) as (pid, pipe):
            assert pipe.readline() == f'{ref}\n'
            with pytest.raises(NotEnoughSpace, match='pinned'):
                objects.put({'x': np.zeros(500_000, np.uint8)})
            assert objects.get(ref).arrays['x'].nbytes == 900_000
        objects.put({'x': np.zeros(500_000, np.uint8)})
        with pytest.raises(ObjectGone, match='evicted'):
            objects.get(ref, timeout_s=WAIT_S)
