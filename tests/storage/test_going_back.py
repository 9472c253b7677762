"""A server whose data become older than what it told its clients, in one life: nothing of a living writer is lost."""

import contextlib
import json
import logging
import pickle
import socket
import threading

import pytest
from inside import slots_of, without_backfills
from redis_server import RedisServer, left_by_runs

from ding_store.errors import VersionConflict
from ding_store.storage import Reader
from ding_store.storage.base import EntryId, ValueVersion
from ding_store.storage.encoding.framing import encode_pieces
from ding_store.storage.exactly_once import losses
from ding_store.storage.options import HostOptions
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, abandon, chunk, eventually, number_of

STREAM = 'experience'
LARGE = 50_000  # numbers: a value of so many goes into a slot


class Reload:
    """``DEBUG RELOAD NOSAVE`` of an older file."""

    def __init__(self, server):
        self.client = server.client()

    def keep(self):
        self.client.save()

    def go_back(self):
        self.client.execute_command('DEBUG', 'RELOAD', 'NOSAVE')

    def close(self):
        self.client.close()


class Failback(Reload):
    """The primary is made a replica of one that lags, and then the primary again."""

    def __init__(self, server):
        super().__init__(server)
        self.replica = RedisServer(server.binary, '--port', str(free_port())).__enter__()
        self.port = server.port

    def keep(self):
        with self.replica.client() as other:
            follow(other, self.port)
            other.replicaof('NO', 'ONE')

    def go_back(self):
        with self.replica.client() as other:
            port = other.config_get('port')['port']
        with self.client.pipeline() as pipe:  # Nobody is in the middle of a call that blocks: that would be an error.
            pipe.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
            pipe.replicaof('127.0.0.1', port)
            pipe.execute()
        eventually(lambda: self.client.info('replication')['master_link_status'] == 'up', 'the primary is a replica')
        self.client.replicaof('NO', 'ONE')

    def close(self):
        super().close()
        self.replica.__exit__()


class QuietFailback(Failback):
    """The same, and connections at rest notice nothing of it."""

    def go_back(self):
        with self.replica.client() as other:
            follow(self.client, other.config_get('port')['port'])
        self.client.replicaof('NO', 'ONE')


class Swap(Reload):
    """Another database of the same server has a copy."""

    def keep(self):
        keys = list(self.client.scan_iter())
        with self.client.pipeline() as pipe:  # of one moment
            for key in keys:
                pipe.copy(key, key, destination_db=1, replace=True)
            pipe.execute()

    def go_back(self):
        self.client.swapdb(0, 1)


class Restart(Reload):
    """Killed, and started with an older file."""

    def __init__(self, server):
        super().__init__(server)
        self.server = server

    def go_back(self):
        self.server.restart()


WAYS = [Reload, Failback, QuietFailback, Swap, Restart]


def free_port():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def follow(client, port):
    client.replicaof('127.0.0.1', port)
    eventually(lambda: client.info('replication').get('master_link_status') == 'up', 'the replica has a copy')


@pytest.fixture
def server(redis_binary):
    port = free_port()
    with RedisServer(redis_binary, '--port', str(port)) as server:
        server.binary, server.port = redis_binary, port
        yield server


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def aged(server, request):
    with contextlib.closing(request.param(server)) as way:
        yield way


@pytest.fixture
def opened(server):
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(RedisStore(server.url, 'run', **options))


def append(store, *numbers):
    for number in numbers:
        store.append(STREAM, {}, chunk(number))


def read(reader):
    return [number_of(entry) for entry in reader.read(1000, timeout_s=0.05)]


def read_all(reader, writers):
    """What is to come once all writers have looked."""
    found = []
    for _ in range(3):
        for writer in writers:
            writer.client.own_writer.check(now=True)
        found += read(reader)
        reader.ack()
    return found


def test_failback_of_an_idle_stream_loses_nothing(opened, aged):
    """All was read and acked, and let go by its writer."""
    store, other = opened(), opened()
    reader = Reader(other, STREAM, 'learner')
    append(store, *range(5))
    aged.keep()
    append(store, *range(5, 10))
    assert read(reader) == list(range(10))
    reader.ack()
    store.client.own_writer.check(now=True)
    assert store.client.own_writer.num_unacked(STREAM) == 0
    aged.go_back()
    append(store, *range(10, 20))
    assert read_all(reader, [store]) == list(range(10, 20))
    assert reader.num_lost == 0


@pytest.mark.parametrize(
    ('num_new', 'is_acked'),
    [
        (1, False),
        (6, True),
        *(pytest.param(*each, marks=pytest.mark.long) for each in [(1, True), (3, False), (3, True), (6, False)]),
    ],
)
def test_going_back_with_reused_numbers_loses_nothing(opened, aged, num_new, is_acked):
    """A writer that lost nothing appends first: it cannot know, and its entries get numbers that were read."""
    one, unhurt, other = opened(), opened(), opened()
    reader = Reader(other, STREAM, 'learner')
    append(unhurt, 0)
    append(one, 1)
    aged.keep()
    append(one, 2, 3, 4)
    assert read(reader) == [0, 1, 2, 3, 4]
    if is_acked:
        reader.ack()
    aged.go_back()
    append(unhurt, *range(5, 5 + num_new))
    if not is_acked:
        reader.ack()  # of what is not there any more
    found = read(reader)
    append(one, 20)
    found += read_all(reader, [one, unhurt])
    assert sorted(found) == [*range(5, 5 + num_new), 20]
    assert reader.num_lost == 0
    assert other.info().streams[STREAM].pending_bytes == 0


def test_going_back_loses_nothing_for_a_slow_reader(opened, aged):
    """What the server lost was not read, and another writer's entries got its numbers, were read and acked."""
    one, unhurt, other = opened(), opened(), opened()
    reader = Reader(other, STREAM, 'learner')
    append(unhurt, 0)
    aged.keep()
    append(one, 1, 2, 3)
    aged.go_back()
    append(unhurt, 4, 5, 6)
    found = read(reader)
    reader.ack()
    one.client.own_writer.ask_for_acks(STREAM, wait_s=0.0)
    found += read_all(reader, [one, unhurt])
    assert sorted(found) == list(range(7))
    assert reader.num_lost == 0


@pytest.mark.parametrize('num_kept', [0, 3])
def test_going_back_before_parts_are_fetched_loses_nothing(opened, aged, num_kept, monkeypatch):
    """The reader has the record, and its parts are gone with it."""
    one, other = opened(), opened()
    reader = Reader(other, STREAM, 'learner')
    append(one, *range(num_kept))
    found = read(reader)
    aged.keep()
    one.append(STREAM, {}, chunk(3, LARGE))
    server, ways = other.client.server, [aged.go_back]
    plain = server.read

    def read_and_go_back(stream, after, max_entries, timeout_s, fetch):
        def go_back_and_fetch(*arguments):
            if ways:
                ways.pop()()
            return fetch(*arguments)

        return plain(stream, after, max_entries, timeout_s, go_back_and_fetch)

    monkeypatch.setattr(server, 'read', read_and_go_back)
    found += read(reader)
    assert ways == []
    found += read_all(reader, [one])
    assert found == [*range(num_kept), 3]
    assert (reader.num_lost, reader.num_corrupt) == (0, 0)


@pytest.mark.parametrize('num_new', [pytest.param(1, marks=pytest.mark.long), 3])
def test_going_back_loses_nothing_for_a_restarted_reader(opened, aged, num_new):
    one, unhurt = opened(), opened()
    reader = Reader(opened(), STREAM, 'learner')
    append(unhurt, 0)
    aged.keep()
    append(one, 1, 2, 3)
    found = read(reader)
    known = dict(marks=reader.marks, heads=reader.heads())
    aged.go_back()
    append(unhurt, *range(4, 4 + num_new))
    again = Reader(opened(), STREAM, 'learner', **known)
    again.ack(reader.cursor)
    found += read_all(again, [one, unhurt])
    assert sorted(found) == list(range(4 + num_new))
    assert again.num_lost == 0


@pytest.mark.parametrize('begins', ['before', pytest.param('after', marks=pytest.mark.long), 'after all was announced'])
def test_going_back_counts_no_loss_for_a_restarted_reader(opened, aged, begins, monkeypatch):
    """Its former life had read and acked what the server has forgotten, and what the writers have let go."""
    monkeypatch.setattr(losses, 'LOOK_EVERY_S', 0.0)
    stores, former = [opened(), opened()], Reader(opened(), STREAM, 'learner')
    for number in range(20):
        append(stores[number % 2], number)
    found = [number_of(entry) for entry in former.read(8)]
    former.ack()
    aged.keep()
    for number in range(20, 40):
        append(stores[number % 2], number)
    found += [number_of(entry) for entry in former.read(28)]
    former.ack()
    for store in stores:
        store.client.own_writer.check(now=True)
        assert store.client.own_writer.num_unacked(STREAM) == 2
    reader = Reader(opened(), STREAM, 'learner') if begins == 'before' else None
    aged.go_back()
    if begins == 'after all was announced':
        stores[0].client.own_writer.check(now=True)
        stores[1].client.own_writer.check(now=True)
    reader = reader or Reader(opened(), STREAM, 'learner')
    for number in range(40, 50):
        append(stores[number % 2], number)
    found += read_all(reader, stores)
    assert set(found) == set(range(50))
    assert reader.num_lost == 0


def test_going_back_is_repaired_by_a_closing_writer(opened, aged):
    reader = Reader(opened(), STREAM, 'learner')
    aged.keep()
    with opened() as store:
        append(store, *range(3))
        aged.go_back()
    assert read(reader) == [0, 1, 2]
    assert reader.num_lost == 0


@pytest.mark.parametrize('num_read', [pytest.param(1, marks=pytest.mark.long), 2])
def test_going_back_counts_entries_of_a_dead_writer_as_lost(server, opened, aged, monkeypatch, num_read):
    monkeypatch.setattr(losses, 'LOOK_EVERY_S', 0.0)
    unhurt = opened()
    reader = Reader(opened(), STREAM, 'learner', loss_grace_s=0.0)
    append(unhurt, 0)
    aged.keep()
    with RedisStore(server.url, 'run') as dead:
        append(dead, 1, 2, 3)
        assert [number_of(entry) for entry in reader.read(num_read)] == [0, 1][:num_read]
        abandon(dead)  # as if it were killed
    aged.go_back()
    append(unhurt, *range(4, 10))
    found = read_all(reader, [unhurt])
    assert found == list(range(4, 10))
    assert reader.num_lost == 4 - num_read


def test_going_back_under_load_loses_nothing(server, opened, aged):
    stores, reader = [opened(check_every_s=0.1) for _ in range(2)], Reader(opened(), STREAM, 'learner')
    counts, is_over = [0, 0], threading.Event()

    def write(which):
        while not is_over.is_set():
            append(stores[which], 2 * counts[which] + which)
            counts[which] += 1

    threads = [threading.Thread(target=write, args=(which,)) for which in range(2)]
    found = []

    def pass_on(count):
        """Read and ack as it comes, so that writers let go of it."""
        end = len(found) + count

        def is_read():
            found.extend(number_of(entry) for entry in reader.read(7, timeout_s=0.05))
            if len(found) % 3:
                reader.ack(wait=False)
            return len(found) >= end

        eventually(is_read, f'{count} more entries come')

    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            pass_on(50)
            aged.keep()
            pass_on(20)
            aged.go_back()
        pass_on(50)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(WAIT_S)
    found += read_all(reader, stores)
    for which in range(2):
        assert [number for number in found if number % 2 == which] == list(range(which, 2 * counts[which], 2))
    assert reader.num_lost == 0


@pytest.mark.parametrize('flush', ['flushall', 'flushdb'])
def test_close_after_a_flush_resends_unread_entries(server, opened, flush, caplog):
    with server.client() as client:
        writers = [opened() for _ in range(2)]
        for which, store in enumerate(writers):
            append(store, *range(which, 20, 2))
        getattr(client, flush)()
        for store in writers:
            store.close()
    reader = Reader(opened(), STREAM, 'learner')
    assert sorted(read(reader)) == list(range(20))
    assert reader.num_lost == 0
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize('end', ['clear', 'retire'])
def test_ended_run_stays_ended_for_active_writers(server, opened, end):
    """They have not said that they appended their last, and hold entries that were acked a moment ago."""
    learner, late = opened(), opened()
    reader = Reader(learner, STREAM, 'learner')
    append(late, *range(5))
    assert read(reader) == list(range(5))
    reader.ack()
    getattr(learner, end)()
    late.client.own_writer.check(now=True)
    late.client.own_writer.check_stream(STREAM, WAIT_S)
    assert learner.read(STREAM) == []
    late.close_for_writing()
    with server.client() as client:
        left = left_by_runs(client)
    assert end == 'clear' or left == []


def test_check_of_an_ended_stream_adds_no_name(server, opened):
    """The list of names is deleted last: what comes onto it behind that would stay."""
    learner, late = opened(), opened()
    append(late, 0)
    late.close_for_writing()
    learner.clear()
    with server.client() as client:
        client.delete('ding:{run}:index')
        late.client.own_writer.check(now=True)
        late.client.own_writer.check_stream(STREAM, WAIT_S)
        assert not client.exists('ding:{run}:index')


def test_values_that_go_back_are_new_and_versions_continue(opened, aged):
    store, other = opened(), opened()
    for number in range(5):
        store.put('weights', {'number': number}, {})
        if number == 2:
            aged.keep()
    assert other.get('weights').version == 5
    aged.go_back()
    assert other.get('weights', newer_than=5).header == {'number': 2}
    assert store.put('weights', {'number': 5}, {}) == 6
    assert other.get('weights', newer_than=5).header == {'number': 5}


def test_value_under_a_reused_version_is_new(opened, aged):
    former, successor, reader = opened(), opened(), opened()
    former.put('weights', {'number': 0}, {})
    aged.keep()
    assert former.put('weights', {'number': 1}, {}) == 2
    known = reader.get('weights')
    assert reader.get('weights', newer_than=known.version) is None
    aged.go_back()
    assert successor.put('weights', {'number': 2}, {}) == 2
    value = reader.get('weights', newer_than=known.version, timeout_s=WAIT_S)
    assert (value.version, value.header) == (2, {'number': 2})
    assert reader.get('weights', newer_than=value.version) is None
    with pytest.raises(VersionConflict, match='went back in time'):
        former.put('weights', {}, {}, expected_version=known.version)


def on_host(server, directory):
    return RedisStore(server.url, 'run', host=HostOptions(host_cache_dir=str(directory)))


def test_value_under_a_reused_version_has_its_own_bytes(server, tmp_path):
    """Its writer fills it for readers elsewhere, and the one that had the number before does not."""
    with (
        contextlib.closing(Reload(server)) as aged,
        on_host(server, tmp_path / 'a') as former,
        on_host(server, tmp_path / 'a') as successor,
        on_host(server, tmp_path / 'a') as near,
        on_host(server, tmp_path / 'b') as far,
    ):
        former.put('weights', {}, chunk(0, LARGE))
        aged.keep()
        former.put('weights', {}, chunk(1, LARGE))
        known = near.get('weights')
        assert number_of(known) == 1
        aged.go_back()
        without_backfills(successor)  # not before the other one has tried
        assert successor.put('weights', {}, chunk(2, LARGE)) == 2
        far.client.server.request_version('weights')
        slots_of(former, 'weights').backfill()
        assert successor.client.get('weights').payload == b''
        assert not former.client.server.backfill_version('weights', known.version, encode_pieces({}, chunk(1, LARGE)))
        slots_of(successor, 'weights').backfill()
        for reader in (near, far):
            assert number_of(reader.get('weights', newer_than=known.version, timeout_s=WAIT_S)) == 2


def test_value_version_travels_with_its_put_id():
    version = pickle.loads(pickle.dumps(ValueVersion(3, 'a')))  # noqa: S301 - our own
    assert (version, version.put_id, json.dumps(version)) == (3, 'a', '3')
    assert not version.is_of_another_put(3)
    assert not version.is_of_another_put(ValueVersion(3, 'a'))
    assert version.is_of_another_put(ValueVersion(3, 'b'))
    assert version.is_of_another_put(2)


def test_entry_id_equality_ignores_the_chain():
    place = EntryId('e', 3)
    assert place.chained('abc') == place == ('e', 3)
    assert hash(place.chained('abc')) == hash(place)
    assert EntryId(*place.chained('abc')).chain == ''
    assert place.chained('abc')._replace(number=4).chain == ''


@pytest.mark.parametrize('is_single', [False, pytest.param(True, marks=pytest.mark.long)])
def test_going_back_resends_from_full_host_plane_writers(server, aged, tmp_path, is_single):
    """They hear of acks by news that names a number, which another writer's entry may have got."""

    def wrapped():
        return on_host(server, tmp_path)

    with wrapped() as one, wrapped() as unhurt, wrapped() as other:
        reader = Reader(other, STREAM, 'learner')
        append(unhurt, 0)
        aged.keep()
        append(one, 1, 2, 3)
        aged.go_back()
        append(one if is_single else unhurt, 4, 5, 6)
        found = read(reader)
        reader.ack()
        one.client.own_writer.ask_for_acks(STREAM, wait_s=0.1)
        found += read_all(reader, [one, unhurt])
        assert sorted(found) == list(range(7))
        assert reader.num_lost == 0
