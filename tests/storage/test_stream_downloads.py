"""Payloads of streams between hosts: fetched once per host, never half, whoever is killed meanwhile; and let go."""

import contextlib
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from inside import cache_of
from needs import IS_LONG
from processes import child
from proxy import DOWN
from two_hosts import is_mapped, two_hosts

from ding_store.errors import CorruptPayload, StoreUnavailable
from ding_store.storage import EntryId, Reader
from ding_store.storage.shared_memory import reader_page as host_readers
from ding_store.storage.shared_memory import stream_downloads
from ding_store.storage.shared_memory.cache_dir import collect_garbage, open_cache_dir
from ding_store.storage.shared_memory.download_lock import FetchLock
from ding_store.storage.shared_memory.mapped_files import claim
from ding_store.storage.shared_memory.reader_page import HostReaders, is_behind, mark_of
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

STREAM = 'experience'
#: 3 MB: three parts.
LARGE, NUM_PARTS, LARGE_BYTES = 375_000, 3, 3_000_000


@pytest.fixture
def hosts(redis_server, tmp_path):
    with two_hosts(redis_server, tmp_path) as both:
        yield both


def files(host, kind='.payload'):
    return sorted(
        os.path.join(path, name) for path, _, names in os.walk(host.directory) for name in names if kind in name
    )


def follow(host, name, count, acks=True, **options):
    """A process that reads so many entries, says which, and whether it is in a file, and acks it."""

    def work(pipe):
        with host.open(**options) as store:
            reader = Reader(store, STREAM, name)
            print('ready', file=pipe)
            for _ in range(count):
                (entry,) = reader.read(1, WAIT_S)
                print(number_of(entry), is_mapped(entry.arrays['x'], '.payload'), file=pipe)
                if acks:
                    reader.ack()

    return work


def sent_by(server):
    """Of a server: how many parts it was asked for, and all bytes that it sent."""
    with server.client() as client:
        info = client.info('everything')
    return info.get('cmdstat_get', {'calls': 0})['calls'], info['total_net_output_bytes']


@pytest.mark.parametrize(('transport', 'num_downloads'), [('auto', 1), ('off', 4)])
def test_four_readers_of_a_host_cause_one_download(forgetful_server, tmp_path, transport, num_downloads):
    with two_hosts(forgetful_server, tmp_path) as (here, there), here.open() as writer, contextlib.ExitStack() as stack:
        work = [follow(there, f'reader{number}', 5, host_plane=transport) for number in range(4)]
        pipes = [stack.enter_context(child(one))[1] for one in work]
        assert [pipe.readline() for pipe in pipes] == ['ready\n'] * 4
        writer.client.own_writer.check_stream(STREAM)  # its first question about a stream takes a GET
        calls, num_bytes = sent_by(forgetful_server)
        for number in range(5):
            writer.append(STREAM, {}, chunk(number, LARGE))
        for number in range(5):
            assert [pipe.readline().split() for pipe in pipes] == [[str(number), str(transport == 'auto')]] * 4
        assert [pipe.readline() for pipe in pipes] == [''] * 4
        calls_then, num_bytes_then = sent_by(forgetful_server)
        assert calls_then - calls == num_downloads * 5 * NUM_PARTS
        expected = num_downloads * 5 * LARGE_BYTES
        assert expected < num_bytes_then - num_bytes < 1.05 * expected
        assert files(there) == []


def test_reader_alone_on_its_host_creates_no_files(hosts):
    here, there = hosts
    with here.open() as writer, here.open() as near, there.open() as far:
        readers = [Reader(near, STREAM, 'near'), Reader(far, STREAM, 'far')]
        far.read(STREAM)  # Who looks without being a reader is nobody's peer.
        for number in range(3):
            writer.append(STREAM, {}, chunk(number, LARGE))
            with there.counted() as received:
                for reader in readers:
                    (entry,) = reader.read(1, WAIT_S)
                    assert (number_of(entry), is_mapped(entry.arrays['x'], '.payload')) == (number, False)
            assert LARGE_BYTES < received[0] < 1.05 * LARGE_BYTES
            assert files(here) + files(there) == []
        # Another one comes, and goes.
        with there.open() as second:
            late = Reader(second, STREAM, 'late', start='now')
            writer.append(STREAM, {}, chunk(3, LARGE))
            assert is_mapped(readers[1].read(1, WAIT_S)[0].arrays['x'], '.payload')
            assert number_of(late.read(1, WAIT_S)[0]) == 3
            readers[1].ack()
            assert len(files(there)) == 1
            late.ack()
            assert files(there) == []
            late.forget()
        writer.append(STREAM, {}, chunk(4, LARGE))
        assert not is_mapped(readers[1].read(1, WAIT_S)[0].arrays['x'], '.payload')


def test_stream_that_is_deleted_leaves_no_files(hosts):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as store:
        readers = [Reader(store, STREAM, f'{number}') for number in range(2)]
        writer.append(STREAM, {}, chunk(0, LARGE))
        (entry,) = readers[0].read()
        assert len(files(there)) == 1
        assert store.delete(STREAM)
        assert files(there) == []
        assert number_of(entry) == 0


def test_readers_in_one_process_share_a_download(hosts):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as store, ThreadPoolExecutor(3) as pool:
        readers = [Reader(store, STREAM, f'{number}') for number in range(3)]
        for number in range(6):
            writer.append(STREAM, {}, chunk(number, LARGE))
        with there.counted() as received:
            found = list(pool.map(lambda reader: [number_of(entry) for entry in reader.read(6)], readers))
        assert found == [[0, 1, 2, 3, 4, 5]] * 3
        assert received[0] < 6 * 1.05 * LARGE_BYTES
        for left, reader in zip((6, 6, 0), readers):
            reader.ack()
            assert len(files(there)) == left


def test_download_stays_while_a_process_maps_it(hosts):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as first, there.open() as second:
        readers = [Reader(first, STREAM, 'first'), Reader(second, STREAM, 'second')]
        held = []
        for number in range(5):
            writer.append(STREAM, {}, chunk(number, LARGE))
            for reader in readers:
                held += reader.read(1, WAIT_S)
                reader.ack()
        assert files(there) == []
        assert [number_of(entry) for entry in held] == [number for number in range(5) for _ in readers]


def test_readers_killed_during_a_download_leave_it_to_others(hosts):
    """At another byte each time: the others go on at once, nobody sees a half, and nothing is left of the dead."""
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as survivor:
        reader = Reader(survivor, STREAM, 'survivor')
        for number, moment in enumerate((20_000, 1_500_000, 2_900_000, 100_000)):
            writer.append(STREAM, {}, chunk(number, LARGE))
            before, there.proxy.bytes_per_s = there.proxy.num_bytes[DOWN], 20e6
            with child(follow(there, 'victim', 1)) as (pid, pipe), ThreadPoolExecutor() as pool:
                assert pipe.readline() == 'ready\n'
                eventually(lambda: there.proxy.num_bytes[DOWN] - before > moment, 'it is in mid-download')  # noqa: B023
                waiting = pool.submit(reader.read, 1, WAIT_S)
                os.kill(pid, signal.SIGKILL)
                assert pipe.read().split() in ([], [str(number), 'True'])
                there.proxy.bytes_per_s = None
                (entry,) = waiting.result(WAIT_S)
            assert number_of(entry) == number
            reader.ack()
            survivor.forget(STREAM, 'victim')
        survivor.tidy()
        assert files(there) + files(there, '.new') == []


def test_reader_stopped_during_a_download_delays_others_briefly(hosts, impatient):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as store, ThreadPoolExecutor() as pool:
        reader = Reader(store, STREAM, 'other')
        for number in range(2):
            writer.append(STREAM, {}, chunk(number, LARGE))
        before, there.proxy.bytes_per_s = there.proxy.num_bytes[DOWN], 2e6
        with child(follow(there, 'stopped', 1)) as (pid, pipe):
            assert pipe.readline() == 'ready\n'
            eventually(lambda: there.proxy.num_bytes[DOWN] - before > 100_000, 'it is in mid-download')
            os.kill(pid, signal.SIGSTOP)
            there.proxy.bytes_per_s = None
            for number in range(2):
                (entry,) = pool.submit(reader.read, 1, WAIT_S).result(WAIT_S)
                assert (number_of(entry), is_mapped(entry.arrays['x'], '.payload')) == (number, False)
            os.kill(pid, signal.SIGCONT)
            assert pipe.readline().split() == ['0', 'True']


def test_slow_download_is_awaited(hosts, monkeypatch):
    """For longer than one that does not move, which is up to twice the patience."""
    monkeypatch.setattr(FetchLock, 'patience_s', 1.5)
    here, there = hosts
    with here.open(host_plane='off') as writer, contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        stores = [stack.enter_context(there.open()) for _ in range(3)]
        readers = [Reader(store, STREAM, f'{number}') for number, store in enumerate(stores)]
        writer.append(STREAM, {}, chunk(0, LARGE))
        there.proxy.bytes_per_s = LARGE_BYTES / (2.5 * FetchLock.patience_s)
        with there.counted() as received:
            for (entry,) in pool.map(lambda reader: reader.read(1), readers):
                assert (number_of(entry), is_mapped(entry.arrays['x'], '.payload')) == (0, True)
        assert LARGE_BYTES < received[0] < 1.05 * LARGE_BYTES


def num_descriptors(host):
    """Of this process, of files of the host: not of what other tests left for the collector of garbage."""
    found = 0
    for one in os.listdir('/proc/self/fd'):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f'/proc/self/fd/{one}').startswith(host.directory)
    return found


def test_held_payloads_use_no_descriptors(hosts):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as first, there.open() as second:
        readers = [Reader(store, STREAM, name) for store, name in ((first, 'first'), (second, 'second'))]
        held, before = [], 0
        for number in range(8):
            writer.append(STREAM, {}, chunk(number, LARGE))
            held += [entry for reader in readers for entry in reader.read(1, WAIT_S)]
            before = before or num_descriptors(there)
        assert all(is_mapped(entry.arrays['x'], '.payload') for entry in held)
        assert [number_of(entry) for entry in held] == [number for number in range(8) for _ in readers]
        assert num_descriptors(there) == before


def test_readers_killed_anywhere_see_entries_whole_in_order(hosts):
    """Four that are killed and come again with what they had acked; in the end nothing is left."""
    here, there = hosts
    count, chance = 25, random.Random(0)
    with here.open(host_plane='off', max_pending_bytes=count * LARGE_BYTES * 2) as writer:
        names = [f'reader{number}' for number in range(4)]
        for name in names:
            writer.register(STREAM, name)
        for number in range(count):
            writer.append(STREAM, {}, chunk(number, LARGE))
        left = dict.fromkeys(names, 0)  # what each reads next at the earliest
        for kill in [True] * (6 if IS_LONG else 3) + [False]:
            with contextlib.ExitStack() as stack:
                running = {}
                for name in left:
                    running[name] = stack.enter_context(child(follow(there, name, count - left[name])))
                if kill:
                    victim = chance.choice(names)
                    for _ in range(chance.randrange(4)):
                        running[victim][1].readline()
                for pid, _ in running.values() if kill else ():
                    os.kill(pid, signal.SIGKILL)
                for name, (_, pipe) in running.items():
                    seen = [int(line.split()[0]) for line in pipe.read().splitlines()[1:]]
                    assert seen[:1] in ([], [left[name]], [left[name] + 1])
                    assert seen == list(range(seen[0], seen[0] + len(seen))) if seen else kill
            left = {name: writer.stream_info(STREAM).readers[name] for name in names}
            left = {name: done for name, done in left.items() if done < count}
            if not left:
                break
        assert left == {}
    with there.open() as store:
        store.tidy()
        assert files(there) + files(there, '.new') == []


def test_damaged_payload_is_never_shared(hosts, redis_server):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as first, there.open() as second:
        readers = [Reader(first, STREAM, 'first'), Reader(second, STREAM, 'second', on_corrupt='skip')]
        entry_id = writer.append(STREAM, {}, chunk(0, LARGE))
        writer.append(STREAM, {}, chunk(1, LARGE))
        with redis_server.client() as client:
            part = sorted(client.keys(f'ding:{{{here.run}/{STREAM}*:1:*:part:*'))[1]
            client.setrange(part, 1000, b'\xff')
        for _ in range(2):
            with pytest.raises(CorruptPayload, match=f'entry {entry_id.number} .*checksum'):
                readers[0].read()
        found = [number_of(entry) for _ in range(2) for entry in readers[1].read()]
        assert (found, readers[1].num_corrupt) == ([1], 1)
        assert len(files(there)) == 1
        assert files(there, '.new') == []


def test_download_with_missing_parts_is_refused(hosts, redis_server):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as first, there.open() as second:
        readers = [Reader(store, STREAM, name) for store, name in ((first, 'first'), (second, 'second'))]
        for number in range(2):
            writer.append(STREAM, {}, chunk(number, LARGE))
        with redis_server.client() as client:
            client.delete(*client.keys(f'ding:{{{here.run}/{STREAM}*:2:*:part:1'))
        for reader in readers:
            assert [number_of(entry) for entry in reader.read()] == [0]
            with pytest.raises(CorruptPayload, match='parts of it are missing'):
                reader.read()
        assert len(files(there)) == 1


@pytest.mark.parametrize('what', ['entry', 'value'])
def test_server_lost_during_a_download_is_not_a_file_error(forgetful_server, tmp_path, caplog, what):
    options = {'reconnect_timeout_s': 0.1}
    with two_hosts(forgetful_server, tmp_path) as (here, there), ThreadPoolExecutor() as pool:
        with here.open(host_plane='off', **options) as writer, there.open(**options) as store:
            readers = [Reader(store, STREAM, f'{number}') for number in range(2)]
            writer.append(STREAM, {}, chunk(0, 8 * LARGE))  # more than what is on its way
            writer.put('weights', {}, chunk(0, 8 * LARGE))
            before, there.proxy.bytes_per_s = there.proxy.num_bytes[DOWN], 20e6
            get = readers[0].read if what == 'entry' else lambda: store.get('weights')
            failing = pool.submit(get)
            eventually(lambda: there.proxy.num_bytes[DOWN] - before > 500_000, 'it is in mid-download')
            forgetful_server.kill()
            there.proxy.bytes_per_s = None
            with pytest.raises(StoreUnavailable):
                failing.result(WAIT_S)
            assert [record.message for record in caplog.records if 'for itself' in record.message] == []
            assert files(there, '.new') == []
            forgetful_server.start()


def no_room(store):
    cache_of(store).max_bytes = 1 << 20


def no_directory(store):
    shutil.rmtree(cache_of(store).root)


def a_lock_that_hangs(store):
    store._streams._copies._streams[STREAM].lock.patience_s = 0.05
    store.held = claim(cache_of(store).fetch_path_of(f'stream {STREAM}'))


@pytest.mark.parametrize('trouble', [no_room, no_directory, a_lock_that_hangs])
def test_readers_without_shared_files_fetch_each_alone(hosts, trouble):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as store:
        readers = [Reader(store, STREAM, name) for name in ('first', 'second')]
        trouble(store)
        for number in range(3):
            writer.append(STREAM, {}, chunk(number, LARGE))
        with there.counted() as received:
            for reader in readers:
                entries = reader.read()
                assert [number_of(entry) for entry in entries] == [0, 1, 2]
                assert not any(is_mapped(entry.arrays['x'], '.payload') for entry in entries)
                reader.ack()
        assert 6 * LARGE_BYTES < received[0] < 6 * 1.05 * LARGE_BYTES
        if trouble is a_lock_that_hangs:
            store.held.close()
            writer.append(STREAM, {}, chunk(3, LARGE))
            assert all(is_mapped(reader.read()[0].arrays['x'], '.payload') for reader in readers)


def test_slow_reader_uses_no_more_space_than_the_stream(hosts):
    here, there = hosts
    limit = int(3.5 * LARGE_BYTES)
    with here.open(host_plane='off') as writer, contextlib.ExitStack() as stack:
        stores = [stack.enter_context(there.open(max_pending_bytes=limit)) for _ in range(3)]
        readers = [Reader(store, STREAM, f'{number}') for number, store in enumerate(stores)]
        for number in range(8):
            writer.append(STREAM, {}, chunk(number, LARGE))
        with there.counted() as received:
            for number in range(8):
                for reader in readers[:2]:
                    (entry,) = reader.read(1)
                    assert (number_of(entry), is_mapped(entry.arrays['x'], '.payload')) == (number, True)
                    reader.ack()
                assert sum(map(os.path.getsize, files(there))) <= limit
        assert received[0] < 8 * 1.05 * LARGE_BYTES
        assert len(files(there)) == 3
        # What is gone by then is fetched again, and what is not, is not.
        with there.counted() as received:
            assert [number_of(readers[2].read(1)[0]) for _ in range(8)] == list(range(8))
        assert 5 * LARGE_BYTES < received[0] < 5 * 1.05 * LARGE_BYTES
        readers[2].ack()
        assert files(there) == []


def test_downloads_known_are_bounded_if_a_reader_never_acks(hosts, monkeypatch):
    here, there = hosts
    monkeypatch.setattr(stream_downloads, '_MAX_USED', 4)
    with here.open(host_plane='off') as writer, there.open() as first, there.open() as second:
        reader, _ = Reader(first, STREAM, 'reader'), Reader(second, STREAM, 'viewer', durable=False)
        for number in range(10):
            writer.append(STREAM, {}, chunk(number, LARGE))
            (entry,) = reader.read(1, WAIT_S)
            assert is_mapped(entry.arrays['x'], '.payload')
            reader.ack()
        assert len(first._streams._copies._streams[STREAM].used) == 4
        assert len(files(there)) == 10
        second.ack(STREAM, 'viewer', entry.id)
        # All of them go, those that are forgotten, too.
        first.tidy()
        assert files(there) == []


@pytest.mark.parametrize(('former', 'present'), [('a', 'b'), ('b', 'a')])
def test_downloads_of_another_epoch_are_removed(tmp_path, former, present):
    """Of processes that were killed: marks of several epochs are in no order."""
    cache = open_cache_dir('run', str(tmp_path))

    def fetched(epoch, numbers):
        marks = [mark_of(EntryId(epoch, number)) for number in numbers]
        wanted = [(mark, cache.payload_path_of(STREAM, mark, 1000, b'%d' % mark), 1000) for mark in marks]
        made = cache.create_payloads(STREAM, wanted, 3500)
        for file in made:
            file.publish()
            file.close()
        return len(made)

    assert fetched(former, [7, 8, 9]) == 3
    assert fetched(present, [1]) == 1
    assert fetched(present, [2, 3, 4]) == 3
    assert [mark for mark, _ in cache.payloads_of(STREAM)] == [mark_of(EntryId(present, n)) for n in (2, 3, 4)]
    # Who is behind takes no place of what is in front.
    assert fetched(present, [1]) == 0
    cache.close()


def test_downloads_make_room_for_rings_and_values(hosts):
    here, there = hosts
    with here.open(host_plane='off') as writer, contextlib.ExitStack() as stack:
        stores = [stack.enter_context(there.open(host_cache_bytes=16 << 20)) for _ in range(2)]
        first, _ = [Reader(store, STREAM, f'{number}') for number, store in enumerate(stores)]
        for number in range(4):
            writer.append(STREAM, {}, chunk(number, LARGE))
        assert len(first.read()) == 4
        assert len(files(there)) == 4
        cache_of(stores[1]).create_ring(8 << 20, {}).close()
        assert len(files(there)) == 2


def test_downloads_of_dead_readers_are_removed(hosts):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as store:
        reader = Reader(store, STREAM, 'living')
        for number, acks in enumerate((True, False)):
            with child(follow(there, f'dead{number}', 1000, acks)) as (_, pipe):
                assert pipe.readline() == 'ready\n'
                writer.append(STREAM, {}, chunk(number, LARGE))
                assert pipe.readline().split() == [str(number), 'True']
            assert len(files(there)) == 1
            store.forget(STREAM, f'dead{number}')
            assert [number_of(entry) for entry in reader.read()] == [number]
            reader.ack()
            assert files(there) == []


def test_downloads_read_only_by_dead_processes_are_garbage(hosts):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as store:
        with child(follow(there, 'one', 9, False)) as (_, one), child(follow(there, 'other', 9, False)) as (_, other):
            assert [pipe.readline() for pipe in (one, other)] == ['ready\n'] * 2
            writer.append(STREAM, {}, chunk(0, LARGE))
            assert [pipe.readline().split() for pipe in (one, other)] == [['0', 'True']] * 2
        assert len(files(there)) == 1
        (garbage,) = collect_garbage(there.directory, dry_run=True)
        assert garbage.num_files == 1
        assert LARGE_BYTES < garbage.num_bytes < 1.01 * LARGE_BYTES
        assert store.tidy() == 1
        assert files(there) == []


def test_server_restart_removes_downloads_of_the_old_epoch(own_server, tmp_path):
    """It begins another epoch; files of the old one go."""
    with two_hosts(own_server, tmp_path) as (here, there), here.open(host_plane='off') as writer:
        with there.open() as first, there.open() as second:
            readers = [Reader(first, STREAM, 'first'), Reader(second, STREAM, 'second')]
            for number in range(3):
                writer.append(STREAM, {}, chunk(number, LARGE))
            assert [number_of(entry) for entry in readers[0].read(2)] == [0, 1]
            assert len(files(there)) == 2
            own_server.restart()
            writer.append(STREAM, {}, chunk(3, LARGE))
            found = [[], []]
            for _ in range(4):
                for reader, seen in zip(readers, found):
                    seen += [number_of(entry) for entry in reader.read()]
                    reader.ack()
            assert found == [[2, 3], [0, 1, 2, 3]]
            assert [reader.num_lost for reader in readers] == [0, 0]
            for store in (first, second):
                store.tidy()
            assert files(there) == []


def test_backfilled_entries_are_fetched_once_per_host(hosts):
    """Entries that were on the host plane until readers elsewhere came."""
    here, there = hosts
    with here.open() as writer, contextlib.ExitStack() as stack:
        near = Reader(writer, STREAM, 'near')
        for number in range(3):
            writer.append(STREAM, {}, chunk(number, LARGE))
        assert near.read()[-1].guard is not None
        readers = [Reader(stack.enter_context(there.open()), STREAM, f'{number}') for number in range(3)]
        writer.append(STREAM, {}, chunk(3, LARGE))
        with there.counted() as received:
            for reader in readers:
                seen = []
                while len(seen) < 4:
                    seen += [number_of(entry) for entry in reader.read(4, WAIT_S)]
                assert seen == [0, 1, 2, 3]
                reader.ack()
        assert received[0] < 4 * 1.1 * LARGE_BYTES
        assert files(there) == []


def test_read_marks_order_entries_of_one_epoch():
    first, second, other = (mark_of(EntryId(*place)) for place in (('e', 7), ('e', 8), ('f', 8)))
    assert is_behind(first, [first, second])
    assert not is_behind(second, [first, second])
    assert not is_behind(first, [other])
    assert is_behind(first, [])
    assert mark_of(EntryId('', 0)) == 0


def test_reader_page_lists_readers_of_this_host(tmp_path):
    path = str(tmp_path / 'x.readers')
    assert not host_readers.are_there(path)
    host_readers.create(path)
    assert not host_readers.are_there(path)
    first = HostReaders(path)
    assert host_readers.are_there(path)
    assert not first.are_several
    others = [HostReaders(path) for _ in range(5)]
    for number, one in enumerate(others):
        one.mark = number + 10
    assert sorted(first.others()) == [10, 11, 12, 13, 14]
    assert sorted(others[2].others()) == [0, 10, 11, 13, 14]
    others[0].close()
    with child(lambda pipe: print(len(HostReaders(path).others()), file=pipe)) as (_, pipe):
        assert pipe.readline() == '5\n'  # It took the place that is free.
        assert pipe.read() == ''
    assert sorted(first.others()) == [11, 12, 13, 14]
    assert HostReaders(path).mark == 0
    for one in others[1:]:
        one.close()
    assert not first.are_several


def test_reader_page_that_is_full_is_logged(hosts, monkeypatch, caplog):
    here, there = hosts
    monkeypatch.setattr(host_readers, 'MAX_PROCESSES', 2)
    with here.open(host_plane='off') as writer, contextlib.ExitStack() as stack:
        stores = [stack.enter_context(there.open()) for _ in range(3)]
        readers = [Reader(store, STREAM, f'{number}') for number, store in enumerate(stores)]
        writer.append(STREAM, {}, chunk(1, LARGE))
        assert [is_mapped(reader.read()[0].arrays['x'], '.payload') for reader in readers] == [True, True, False]
    assert [record.name for record in caplog.records] == [stream_downloads.logger.name]
