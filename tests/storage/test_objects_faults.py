"""Objects while another process is in the middle of something: it lists, forks, waits, or was killed."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from processes import child
from two_hosts import two_hosts

from ding_store.errors import ForeignFile, ObjectGone, StoreTimeout
from ding_store.storage import open_store
from ding_store.storage.objects import host_objects, transfers
from ding_store.storage.objects.eviction import MAIN, ORDERS, Found, Listing
from ding_store.storage.shared_memory.mapped_files import is_claimed
from ding_store.storage.testing import WAIT_S, eventually

_RUNS = (f'objects-faults{number}' for number in itertools.count())
KB, MB = 1000, 1000_000


def arrays(size, number=1):
    return {'x': np.full(size, number, np.uint8)}


@contextlib.contextmanager
def thread_of(work):
    """Yield a running thread, and a list that gets the result or the error of its work."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as e:  # noqa: BLE001 the test looks at it
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield thread, found
    finally:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize('listed', ['new', 'objects'])
def test_listing_counts_an_object_that_is_being_put_once(monkeypatch, listed):
    """The put ends after this directory was listed."""
    writes, is_listed, scandir, write = threading.Event(), threading.Event(), os.scandir, os.pwritev
    with open_store('memory://') as store:
        objects = store.objects(max_bytes=3 * 4096, eviction='fifo')

        def pwritev(*arguments):
            writes.set()
            assert is_listed.wait(WAIT_S)
            return write(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(os, 'pwritev', pwritev)
            with thread_of(lambda: objects.put(arrays(KB))) as (putting, found):
                assert writes.wait(WAIT_S)

                @contextlib.contextmanager
                def slow_scandir(path):
                    with scandir(path) as entries:
                        names = list(entries)
                    if os.path.basename(path) == listed:
                        is_listed.set()
                        putting.join(WAIT_S)
                    yield iter(names)

                patched.setattr(os, 'scandir', slow_scandir)
                assert objects.info().in_memory.num_objects == (1 if listed == 'new' else 0)
        assert objects.get(found[0]).arrays['x'].sum() == KB
        # Only ``info`` counts anew. There is room for two more.
        for _ in range(2 if listed == 'new' else 3):
            objects.put(arrays(KB))
        assert (objects.info().counts['evicted'] > 0) == (listed == 'objects')


def test_request_that_fails_does_not_stop_the_next_ones(redis_server, tmp_path, caplog):
    with two_hosts(redis_server, tmp_path) as (here, there), here.open() as store, there.open() as other:
        bad, good = (store.objects().put(arrays(KB, number)) for number in range(2))
        (path,) = Path(here.directory).rglob(bad)
        path.unlink()
        path.symlink_to('/dev/null')  # The process refuses to read it.
        with pytest.raises(StoreTimeout, match='did not come in time'):
            other.objects().get(bad, timeout_s=0.5)
        assert other.objects().get(good, timeout_s=10.0).arrays['x'].sum() == KB
        assert f"request 'fetch' of another host for object {bad} failed" in caplog.text


def test_get_keeps_its_timeout_while_another_waits_for_the_host(redis_server, tmp_path):
    dead = '0123abcd'  # a host that never answers
    with contextlib.ExitStack() as stack:
        with open_store(redis_server.url, next(_RUNS), host_cache_dir=str(tmp_path)) as store:
            objects = store.objects()
            waiting, _ = stack.enter_context(thread_of(lambda: objects.get(dead * 5, timeout_s=WAIT_S)))
            eventually(lambda: any(map(is_claimed, map(str, tmp_path.rglob(f'fetch-{dead}-*')))), 'it has the lock')
            with pytest.raises(StoreTimeout, match='another process of this host downloads from the same host'):
                objects.get(dead * 4 + '0000000d', timeout_s=2.0)
            assert waiting.is_alive()


def test_get_many_waits_for_several_objects_at_once(redis_server, tmp_path):
    dead = '0123abcd'  # a host that never answers
    with two_hosts(redis_server, tmp_path) as (here, there), here.open() as store, there.open() as other:
        refs = [f'{dead * 4}0000000{number}' for number in range(4)]
        with thread_of(lambda: other.objects().get_many(refs, timeout_s=2.0)) as (_, found):
            eventually(
                lambda: sum(map(is_claimed, map(str, tmp_path.rglob(f'fetch-{dead}-*')))) == 4, 'it asks for all'
            )
        assert isinstance(found[0], StoreTimeout)
        refs = [store.objects().put(arrays(KB, number)) for number in range(20)]
        wanted = [*refs, refs[3]]
        many = other.objects().get_many(wanted, WAIT_S)
        assert [one.arrays['x'][0] for one in many] == [*range(20), 3]
        assert store.objects().info().counts['served'] == 20
        with pytest.raises(ObjectGone, match='does not know it'):
            other.objects().get_many([f'{refs[0][:8]}{number:032x}' for number in range(8)], WAIT_S)


def test_get_many_ends_when_one_object_is_gone(redis_server, tmp_path):
    dead = '0123abcd'  # a host that never answers
    with two_hosts(redis_server, tmp_path) as (here, there), here.open() as store, there.open() as other:
        gone = store.objects().put(arrays(KB))[:8] + f'{0:032x}'
        with thread_of(lambda: other.objects().get_many([dead * 5, gone], 10 * WAIT_S)) as (_, found):
            pass
        assert isinstance(found[0], ObjectGone)


def test_interrupted_get_many_ends(redis_server, tmp_path):
    dead = '0123abcd'  # a host that never answers
    with open_store(redis_server.url, next(_RUNS), host_cache_dir=str(tmp_path)) as store:
        objects = store.objects()

        def interrupt():
            eventually(lambda: any(map(is_claimed, map(str, tmp_path.rglob(f'fetch-{dead}-*')))), 'it asks')
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        began = threading.active_count()
        with thread_of(interrupt), pytest.raises(KeyboardInterrupt):
            objects.get_many([f'{dead * 4}0000000{number}' for number in range(2)], 10 * WAIT_S)
        assert threading.active_count() <= began + 1


def test_child_forked_during_a_download_holds_no_object(redis_server, tmp_path):
    with two_hosts(redis_server, tmp_path) as (here, there), here.open() as store, there.open() as other:
        ref = store.objects().put(arrays(3 * MB))
        objects = other.objects()
        there.proxy.bytes_per_s = 3e6
        with thread_of(lambda: objects.get(ref, WAIT_S).arrays['x'].sum()) as (downloading, found):
            # The mapping of a file that has no name of its own yet.
            eventually(lambda: f'{ref}.' in Path('/proc/self/maps').read_text(), 'it downloads')
            with child(lambda pipe: signal.pause()):
                there.proxy.bytes_per_s = None
                downloading.join(WAIT_S)
                assert found == [3 * MB]
                objects.pin(ref).release()


def test_forked_child_whose_first_call_fails_may_try_again(redis_server, tmp_path):
    with open_store(redis_server.url, next(_RUNS), host_cache_dir=str(tmp_path)) as store:
        objects = store.objects()
        (directory,) = tmp_path.rglob('objects')

        def use(pipe):
            directory.rename(tmp_path / 'away')
            directory.touch()  # It cannot open its own.
            with pytest.raises(ForeignFile):
                objects.put(arrays(KB))
            directory.unlink()
            (tmp_path / 'away').rename(directory)
            print(objects.put(arrays(KB)), file=pipe)
            store.close()

        with child(use) as (_, pipe):
            assert objects.get(pipe.readline().strip()).arrays['x'].sum() == KB


def test_directory_for_spilled_objects_that_vanishes_is_made_again(tmp_path, monkeypatch):
    """Another process removed it as abandoned, after this one had locked a file in it."""
    samestat, removed = os.path.samestat, []

    def vanishing(*arguments):
        if not removed:
            removed.extend(path.parent for path in tmp_path.rglob('members'))
            shutil.rmtree(removed[0])
            raise FileNotFoundError('members')
        return samestat(*arguments)

    monkeypatch.setattr(os.path, 'samestat', vanishing)
    with open_store('memory://') as store:
        objects = store.objects(max_bytes=10 * 4096, spill_dir=str(tmp_path))
        refs = [objects.put(arrays(3 * KB)) for _ in range(20)]
        assert len(removed) == 1
        assert len(objects.get_many(refs)) == 20
        assert objects.info().spilled.num_objects >= 10


def test_process_killed_while_it_notes_the_options_keeps_them(redis_server, tmp_path, monkeypatch):
    run, given = next(_RUNS), {'max_bytes': 10 * 4096, 'spill_dir': str(tmp_path / 'disk')}

    def opened():
        return open_store(redis_server.url, run, host_cache_dir=str(tmp_path / 'cache'))

    with opened() as first, opened() as second, opened() as third:
        refs = [first.objects(**given).put(arrays(3 * KB)) for _ in range(20)]
        with monkeypatch.context() as patched:
            patched.setattr(json, 'dump', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with contextlib.suppress(KeyboardInterrupt):
                second.objects()
        assert third.objects().info().options == first.objects().info().options
        assert len(third.objects().get_many(refs)) == 20


def test_upload_stays_while_a_slow_link_downloads_it(redis_server, tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, 'UPLOAD_S', 0.0)
    monkeypatch.setattr(transfers, 'SLOWEST_BYTES_PER_S', 1e5)
    with two_hosts(redis_server, tmp_path) as (here, there):
        with here.open(check_every_s=0.05) as store, there.open() as other:
            ref = store.objects().put(arrays(3 * MB))
            other.objects()
            there.proxy.latency_s = 0.05  # It asks for the parts after ``UPLOAD_S``.
            assert other.objects().get(ref, WAIT_S).arrays['x'].sum() == 3 * MB


def test_main_queue_goes_when_the_small_one_is_empty():
    """If all that arrived since the listing is pinned, there is still something to evict."""
    stamps = {'a': MAIN + 4, 'b': MAIN + 8}
    objects = [Found(stamp, name, 10) for name, stamp in stamps.items()]
    listing = Listing(objects, lambda name: stamps.get(name, -1), stamps.__setitem__, lambda: 100)
    assert [found.name for found in ORDERS['s3fifo']().victims(listing)] == ['a', 'b']
    victims = ORDERS['s3fifo']().victims(listing)
    del stamps[next(victims).name]
    assert list(victims) == [], 'one has left, and what has arrived is next'


def test_objects_of_before_a_reboot_are_removed(redis_server, tmp_path, monkeypatch):
    """A host cache on a disk has them still, but the clock of their stamps has begun anew."""
    run = next(_RUNS)

    def opened():
        return open_store(redis_server.url, run, host_cache_dir=str(tmp_path))

    def fill(pipe):
        objects = opened().objects(max_bytes=MB)
        print(objects.put(arrays(KB)), file=pipe)
        signal.pause()

    with child(fill) as (pid, pipe):
        ref = pipe.readline().strip()
        os.kill(pid, signal.SIGKILL)
    assert list(tmp_path.rglob(ref)) != []
    monkeypatch.setattr(host_objects, 'boot_id', lambda: 'fedcba98-7654-3210-0123-456789abcdef')
    with opened() as store:
        assert store.objects().info().in_memory == (0, 0)
        assert list(tmp_path.rglob(ref)) == []
        new = store.objects().put(arrays(KB))
        with opened() as other:
            assert other.objects().get(new).arrays['x'].sum() == KB
