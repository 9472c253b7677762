"""Objects: one contract for memory, an embedded server and a Redis server, on one host and between two."""

import contextlib
import itertools
import json
import os
import signal
import subprocess

import numpy as np
import pytest
from needs import IS_LONG, lacking
from processes import child
from two_hosts import is_mapped, two_hosts

from ding_store.errors import ConfigError, NotEnoughSpace, ObjectGone, StoreClosed, StoreTimeout
from ding_store.storage import open_store
from ding_store.storage.objects import host_objects, transfers
from ding_store.storage.shared_memory.cache_dir import collect_garbage
from ding_store.storage.testing import WAIT_S, eventually

_RUNS = (f'objects{number}' for number in itertools.count())
KB, MB = 1000, 1000_000


def arrays(size, number=1):
    return {'x': np.full(size, number, np.uint8), 'small': np.arange(3)}


@pytest.fixture(scope='module')
def embedded(tmp_path_factory):
    """A run with a private server, which is kept running for all tests."""
    url, run = f'embedded://{tmp_path_factory.mktemp("embedded")}', next(_RUNS)
    with open_store(url, run, grace_s=0.0):
        yield url, run


@pytest.fixture(params=['memory', 'embedded', 'redis'])
def opened(request, tmp_path):
    """Opens stores of one run: each of a host of its own, as far as it can tell."""
    with contextlib.ExitStack() as stack:
        if request.param == 'memory':
            first = stack.enter_context(open_store('memory://'))
            yield lambda host='a': stack.enter_context(first.another())
            return
        url, run = '', next(_RUNS)
        if request.param == 'embedded':
            url, run = request.getfixturevalue('embedded')
        else:
            url = request.getfixturevalue('redis_server').url
        yield lambda host='a': stack.enter_context(open_store(url, run, host_cache_dir=str(tmp_path / host)))


def test_object_is_what_was_put(opened):
    objects = opened().objects()
    given = {'image': np.arange(60_000, dtype=np.float32).reshape(3, 200, 100), 'none': np.empty((0, 4)), 'b': np.True_}
    ref = objects.put(given, {'episode': 7, 'tags': ['a', None]})
    assert len(ref) == 40
    found = objects.get(ref)
    assert found.header == {'episode': 7, 'tags': ['a', None]}
    assert list(found.arrays) == list(given)
    for name, array in given.items():
        assert np.array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype
        with pytest.raises(ValueError, match='read-only'):
            found.arrays[name][...] = 0
    given['image'][:] = 0
    assert objects.get(ref).arrays['image'][0, 0, 1] == 1


@pytest.mark.parametrize('size', [100, 113 * KB, 3 * MB])
def test_object_of_another_host_is_fetched_once(opened, size):
    here, there = opened('a').objects(), opened('b').objects()
    refs = [here.put(arrays(size, number), {'n': number}) for number in range(3)]
    for _ in range(2):
        found = there.get_many(refs, timeout_s=WAIT_S)
        assert [one.header['n'] for one in found] == [0, 1, 2]
        for number, one in enumerate(found):
            assert (one.arrays['x'] == number).all()
            assert one.arrays['x'].nbytes == size
    assert there.info().counts['fetched'] == here.info().counts['served'] == 3


def test_fetched_object_leaves_no_value_on_the_server(opened):
    first, second = opened('a'), opened('b')
    ref = first.objects().put(arrays(3 * MB))
    second.objects().get(ref, timeout_s=WAIT_S)
    eventually(lambda: not [name for name in first.info().values if ref[:8] in name], 'the upload is deleted')


def test_deleted_object_is_gone_on_both_hosts(opened):
    here, there = opened('a').objects(), opened('b').objects()
    refs = [here.put(arrays(200 * KB, number)) for number in range(3)]
    views = there.get_many(refs, timeout_s=WAIT_S)
    assert there.delete(refs[:2]) == 2
    for ref in refs[:2]:
        with pytest.raises(ObjectGone, match=f'object {ref} is gone: it was deleted'):
            there.get(ref)
    eventually(lambda: here.info().in_memory.num_objects == 1, 'the other host deletes them')
    with pytest.raises(ObjectGone, match='was deleted'):
        here.get(refs[0])
    assert here.get(refs[2]).arrays['x'][0] == 2
    assert [int(view.arrays['x'].sum()) for view in views] == [0, 200 * KB, 400 * KB], 'views stay valid'


def test_object_that_its_host_deleted_is_gone(opened):
    here, there = opened('a').objects(), opened('b').objects()
    ref = here.put(arrays(KB))
    assert here.delete(ref) == 1
    assert here.delete(ref) == 0
    with pytest.raises(ObjectGone, match='it was deleted'):
        there.get(ref, timeout_s=WAIT_S)
    unknown = ref[:8] + 'f' * 32
    for objects in (here, there):
        with pytest.raises(ObjectGone, match='does not know it'):
            objects.get(unknown, timeout_s=WAIT_S)


def test_host_that_does_not_answer_is_named_in_time(opened):
    objects = opened().objects()
    with pytest.raises(StoreTimeout, match='no process of the host'):
        objects.get('0123abcd' * 5, timeout_s=0.2)


@pytest.mark.parametrize(
    'ref',
    ['', 'x' * 40, 'A' * 40, '0' * 39, '0' * 41, '../' * 13 + 'a', '0' * 39 + '/', None, 7, b'0' * 40, ['0' * 40]],
)
def test_hostile_reference_is_refused_by_name(opened, ref):
    objects = opened().objects()
    for call in (objects.get, objects.pin, lambda ref: objects.get_many([ref]), lambda ref: objects.delete([ref])):
        with pytest.raises(ObjectGone, match='is no reference of an object'):
            call(ref)


def test_hostile_request_is_skipped(opened):
    store, other = opened('a'), opened('b').objects()
    ref = store.objects().put(arrays(KB))
    good = {'kind': 'fetch', 'ref': ref, 'host': '0' * 8, 'number': '0' * 16, 'lane': 0}
    stream = f'objects/{ref[:8]}'
    for change in (
        {'ref': '../../x'},
        {'host': '../x'},
        {'lane': 10**9},
        {'kind': 'run'},
        {'number': None},
        {'lane': True},
    ):
        store.append(stream, {**good, **change}, {})
    store.append(stream, {}, {'x': np.zeros(3)})
    assert other.get(ref, timeout_s=WAIT_S).arrays['x'][0] == 1
    assert not [name for name in store.info().values if 'x' in name]


def test_closed_store_refuses_objects_and_keeps_views(opened):
    store = opened()
    objects = store.objects()
    ref = objects.put(arrays(MB))
    view = objects.get(ref).arrays['x']
    assert store.objects() is objects
    store.close()
    for call in (lambda: objects.get(ref), lambda: objects.put(arrays(1)), store.objects):
        with pytest.raises(StoreClosed):
            call()
    assert view.sum() == MB


@pytest.mark.parametrize(
    ('options', 'match'),
    [
        ({'max_bytes': 0}, 'max_bytes'),
        ({'eviction': 'random'}, 'fifo, lru, s3fifo'),
        ({'spill_bytes_per_s': -1}, 'spill_bytes_per_s'),
        ({'max_byte': 3}, 'no option'),
    ],
)
def test_wrong_option_is_refused(opened, options, match):
    with pytest.raises(ConfigError, match=match):
        opened().objects(**options)


def test_second_process_with_other_options_is_refused(redis_server, tmp_path):
    run = next(_RUNS)
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(open_store(redis_server.url, run, host_cache_dir=str(tmp_path))) for _ in range(2)
        )
        first.objects(max_bytes=5 * MB, eviction='lru')
        assert second.objects().info().options.max_bytes == 5 * MB
        with pytest.raises(ConfigError, match='max_bytes=5000000 on this host, not 6'):
            second.objects(max_bytes=6)
    with open_store(redis_server.url, run, host_plane='off') as store, pytest.raises(ConfigError, match='host cache'):
        store.objects()


# --- room


def names_of(objects, refs):
    """Return the numbers of the objects that are there."""
    found = []
    for number, ref in enumerate(refs):
        with contextlib.suppress(ObjectGone):
            objects.get(ref)
            found.append(number)
    return found


def test_evicted_object_says_why_and_pinned_one_stays(opened):
    objects = opened().objects(max_bytes=100 * 4096, eviction='fifo')
    pinned = objects.put(arrays(3 * KB))
    with objects.pin(pinned):
        refs = [objects.put(arrays(3 * KB, number % 256)) for number in range(150)]
        with pytest.raises(ObjectGone, match='evicted to make room. Raise max_bytes'):
            objects.get(refs[0])
        assert objects.get(pinned).arrays['x'][0] == 1
        assert names_of(objects, refs)[-1] == 149
        assert objects.info().in_memory.num_bytes <= 100 * 4096
    refs += [objects.put(arrays(3 * KB)) for _ in range(100)]
    with pytest.raises(ObjectGone, match='evicted'):
        objects.get(pinned)


def test_object_larger_than_the_cache_is_refused(opened):
    objects = opened().objects(max_bytes=MB)
    ref = objects.put(arrays(500 * KB))
    with pytest.raises(NotEnoughSpace, match='Raise max_bytes'):
        objects.put(arrays(2 * MB))
    assert objects.get(ref).arrays['x'][0] == 1


@pytest.mark.parametrize('eviction', ['fifo', 'lru', 's3fifo'])
def test_eviction_keeps_what_its_order_keeps(tmp_path, eviction):
    """Two objects are read all the time. Fifo drops them all the same."""
    with open_store('memory://') as store:
        objects = store.objects(max_bytes=100 * 4096, eviction=eviction)
        hot = [objects.put(arrays(3 * KB)) for _ in range(2)]
        for _ in range(300):
            objects.put(arrays(3 * KB))
            names_of(objects, hot)
        assert names_of(objects, hot) == ([] if eviction == 'fifo' else [0, 1])


def test_cache_of_a_tenth_of_the_data_has_all_of_it(tmp_path, monkeypatch):
    """With a disk behind it: random reads get the bytes that were put."""
    with open_store('memory://') as store:
        objects = store.objects(max_bytes=800 * KB, spill_dir=str(tmp_path), eviction='lru')
        refs = [objects.put(arrays(20 * KB, number % 251), {'n': number}) for number in range(400)]
        info = objects.info()
        assert info.in_memory.num_bytes <= 800 * KB
        assert info.in_memory.num_objects + info.spilled.num_objects == 400
        assert info.spilled.num_objects > 350
        for number in np.random.default_rng(0).integers(0, 400, 500).tolist():
            found = objects.get(refs[number])
            assert found.header == {'n': number}
            assert (found.arrays['x'] == number % 251).all()
        wanted = [*range(399, -1, -3), 7, 7]  # more than are read at once
        many = objects.get_many([refs[number] for number in wanted])
        assert [(one.header['n'], one.arrays['x'].max()) for one in many] == [(n, n % 251) for n in wanted]
        monkeypatch.setattr(host_objects, '_OPENED_BYTES', 50 * KB)
        assert [one.header['n'] for one in objects.get_many(refs[5:15])] == [*range(5, 15)]
        assert objects.delete(refs) == 400
        assert objects.info()[1:3] == ((0, 0), (0, 0))
        assert [path for path in tmp_path.rglob('*') if len(path.name) == 40] == []
    assert list(tmp_path.rglob('members')) == [], 'the last process removes the directory'


def test_object_on_the_disk_is_evicted_from_there_in_order(tmp_path):
    with open_store('memory://') as store:
        objects = store.objects(max_bytes=10 * 4096, spill_dir=str(tmp_path), spill_max_bytes=30 * 4096)
        refs = [objects.put(arrays(3 * KB)) for _ in range(100)]
        kept = names_of(objects, refs)
        assert 35 <= len(kept) <= 40
        assert objects.info().spilled.num_bytes <= 30 * 4096
        with pytest.raises(ObjectGone, match='evicted'):
            objects.get(refs[0])


def test_writes_above_the_rate_are_not_spilled(tmp_path):
    with open_store('memory://') as store:
        objects = store.objects(max_bytes=10 * 4096, spill_dir=str(tmp_path), spill_bytes_per_s=4096.0)
        for _ in range(100):
            objects.put(arrays(3 * KB))
        info = objects.info()
        assert info.counts['not_spilled'] >= 50
        assert 1 <= info.spilled.num_objects < 40


def tmpfs(path, size):
    path.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        lacking(f'needs the right to mount a tmpfs: {done.stderr.strip()}')


def unmount(path):
    subprocess.run(['umount', '-l', str(path)], capture_output=True, timeout=60, check=True)


def test_full_disk_refuses_puts_and_loses_nothing(tmp_path):
    tmpfs(tmp_path / 'disk', '1m')
    try:
        with open_store('memory://') as store:
            objects = store.objects(max_bytes=MB, spill_dir=str(tmp_path / 'disk'), spill_max_bytes=100 * MB)
            refs = []
            with pytest.raises(NotEnoughSpace, match='no room to spill .* Make room on this disk'):
                refs.extend(objects.put(arrays(100 * KB), {'n': number}) for number in range(100))
            assert len(refs) >= 15
            assert [objects.get(ref).header['n'] for ref in refs] == list(range(len(refs)))
            assert list((tmp_path / 'disk').rglob('*.new')) == []
            objects.delete(refs[:5])
            assert objects.get(objects.put(arrays(100 * KB))).arrays['x'][0] == 1
    finally:
        unmount(tmp_path / 'disk')


def test_full_memory_refuses_puts_and_loses_nothing(redis_server, tmp_path):
    tmpfs(tmp_path / 'shm', '2m')
    try:
        with open_store(redis_server.url, next(_RUNS), host_cache_dir=str(tmp_path / 'shm')) as store:
            objects = store.objects(max_bytes=100 * MB)
            refs = []
            with pytest.raises(NotEnoughSpace, match='Lower max_bytes'):
                refs.extend(objects.put(arrays(100 * KB)) for _ in range(100))
            assert names_of(objects, refs) == list(range(len(refs)))
            assert objects.info().in_memory.num_objects == len(refs) >= 10
    finally:
        unmount(tmp_path / 'shm')


def test_file_system_without_a_free_inode_is_named(redis_server, tmp_path):
    tmpfs(tmp_path / 'shm', '4m,nr_inodes=40')
    try:
        with open_store(redis_server.url, next(_RUNS), host_cache_dir=str(tmp_path / 'shm')) as store:
            objects, refs = store.objects(max_bytes=MB), []
            with pytest.raises(NotEnoughSpace, match='no room for another file .* Make room there'):
                refs.extend(objects.put(arrays(KB)) for _ in range(100))
            assert names_of(objects, refs) == list(range(len(refs)))
            assert objects.info().in_memory.num_objects == len(refs) > 10
    finally:
        unmount(tmp_path / 'shm')


# --- several processes


def test_processes_of_a_host_read_in_place_and_share_a_fetch(redis_server, tmp_path):
    with two_hosts(redis_server, tmp_path) as (here, there), here.open() as store, contextlib.ExitStack() as stack:
        ref = store.objects().put(arrays(3 * MB))

        def get(pipe):
            with there.open() as mine:
                array = mine.objects().get(ref, WAIT_S).arrays['x']
                print(int(array.sum()), is_mapped(array, ref), file=pipe)

        with there.counted() as received:
            pipes = [stack.enter_context(child(get))[1] for _ in range(3)]
            assert [pipe.readline().split() for pipe in pipes] == [[str(3 * MB), 'True']] * 3
        assert 3 * MB <= received[0] < 3.3 * MB


def test_forked_child_uses_objects_of_its_parent(redis_server, tmp_path):
    with open_store(redis_server.url, next(_RUNS), host_cache_dir=str(tmp_path)) as store:
        objects = store.objects(max_bytes=MB)
        ref = objects.put(arrays(KB))
        pin = objects.pin(ref)

        def use(pipe):
            print(int(objects.get(ref).arrays['x'].sum()), objects.put(arrays(KB, 2)), file=pipe)
            store.close()

        with child(use) as (_, pipe):
            total, other = pipe.readline().split()
        assert int(total) == KB
        assert objects.get(other).arrays['x'][0] == 2
        for _ in range(300):
            objects.put(arrays(6 * KB))
        assert objects.get(pin.ref).arrays['x'][0] == 1, "the pin is the parent's"


def test_serving_process_that_is_killed_is_replaced(redis_server, tmp_path):
    """What it had uploaded for a host that died is deleted in time, too."""
    with two_hosts(redis_server, tmp_path) as (here, there):

        def put(pipe):
            with here.open() as mine:
                print(mine.objects().put(arrays(3 * MB)), file=pipe)
                signal.pause()

        with child(put) as (pid, pipe), here.open() as second, there.open() as reader:
            ref = pipe.readline().strip()
            assert second.objects().get(ref).arrays['x'].nbytes == 3 * MB
            os.kill(pid, signal.SIGKILL)
            assert reader.objects().get(ref, WAIT_S).arrays['x'].sum() == 3 * MB


def test_upload_that_is_not_confirmed_is_deleted(redis_server, tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, 'UPLOAD_S', 0.1)
    monkeypatch.setattr(transfers, 'SLOWEST_BYTES_PER_S', 1e9)
    with two_hosts(redis_server, tmp_path) as (here, there), here.open(check_every_s=0.1) as store:
        ref = store.objects().put(arrays(3 * MB))
        there.proxy.bytes_per_s = 1e6
        with child(lambda pipe: there.open().objects().get(ref)) as (pid, _):
            eventually(lambda: store.info().values != {}, 'it is uploaded')
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: store.info().values == {}, 'it is deleted')


def test_killed_host_leaves_nothing_after_the_garbage_collection(redis_server, tmp_path):
    cache, disk, run = tmp_path / 'cache', tmp_path / 'disk', next(_RUNS)

    def fill(pipe):
        store = open_store(redis_server.url, run, host_cache_dir=str(cache))
        objects = store.objects(max_bytes=MB, spill_dir=str(disk))
        for _ in range(10):
            objects.put(arrays(300 * KB))
        print(json.dumps(objects.info().spilled), file=pipe)
        signal.pause()

    with child(fill) as (pid, pipe):
        count, num_bytes = json.loads(pipe.readline())
        assert count >= 7
        assert list(collect_garbage(str(cache))) == [], 'its process lives'
        os.kill(pid, signal.SIGKILL)
    (garbage,) = collect_garbage(str(cache))
    assert garbage.num_bytes > num_bytes
    assert [path for path in [*cache.rglob('*'), *disk.rglob('*')] if len(path.name) == 40] == []


def test_spilled_objects_of_a_lost_cache_are_removed(redis_server, tmp_path):
    """This is the state after a restart of the machine: /dev/shm is empty, and the disk is not."""
    cache, disk = tmp_path / 'cache', tmp_path / 'disk'

    def fill(pipe):
        store = open_store(redis_server.url, next(_RUNS), host_cache_dir=str(cache))
        objects = store.objects(max_bytes=MB, spill_dir=str(disk))
        for _ in range(10):
            objects.put(arrays(300 * KB))
        pipe.write('done\n')
        signal.pause()

    with child(fill) as (pid, pipe):
        pipe.readline()
        os.kill(pid, signal.SIGKILL)
    cache.rename(tmp_path / 'lost')
    assert [path for path in disk.rglob('*') if len(path.name) == 40] != []
    with open_store('memory://') as store:
        store.objects(spill_dir=str(disk))
        assert [path for path in disk.rglob('*') if len(path.name) == 40] == []


def test_many_small_objects_are_kept_by_order(tmp_path):
    """100,000 of them in the long variant. The directory is listed now and then, not at each eviction."""
    number = 100_000 if IS_LONG else 2500
    limit = number // 5
    with open_store('memory://') as store:
        objects = store.objects(max_bytes=limit * 4096, eviction='fifo')
        refs = [objects.put({'x': np.uint32(i)}) for i in range(number)]
        info = objects.info()
        assert 0.95 * limit <= info.in_memory.num_objects <= limit
        assert info.counts['evicted'] == number - info.in_memory.num_objects
        for i in range(number - info.in_memory.num_objects, number, 97):
            assert objects.get(refs[i]).arrays['x'] == i
