"""Payloads in parts: whole or not at all, and no part outlives what it belongs to."""

import re
import subprocess
import sys

import numpy as np
import pytest
from processes import child
from redis_server import RedisServer

from ding_store.errors import CorruptPayload, ServerFull, StoreTimeout, VersionConflict
from ding_store.storage import EntryId
from ding_store.storage.encoding.framing import encode, encode_pieces
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.protocol import Backfill, StoredEntry
from ding_store.storage.redis import parts
from ding_store.storage.redis import values as redis_values
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

STREAM = 'experience'
#: 3.2 MB: four parts.
LARGE = 400_000


@pytest.fixture
def client(forgetful_server: RedisServer):
    with forgetful_server.client() as client:
        yield client


@pytest.fixture
def store(forgetful_server):
    with RedisStore(forgetful_server.url, 'run') as store:
        yield store


WRITE = parts.write_parts


def fetch(store, *payloads):
    return store.client.server._parts.fetch(
        's', [StoredEntry(EntryId('e', i), 'w', i, one) for i, one in enumerate(payloads, 1)]
    )


def written(connection, *what):
    num_replies, rest = WRITE(connection, *what)
    connection.send_packed_command([rest])
    for _ in range(num_replies):
        connection.read_response()


def num_parts(client):
    return len(client.keys('*:part:*'))


def test_places_of_parts_survive_packing():
    place = parts.Parted('ding:{r/s/0/w}:1:ab:part:', 1000, 2001)
    assert parts.unpack(place.pack()) == place
    assert (place.num_parts, place.keys[2]) == (3, b'ding:{r/s/0/w}:1:ab:part:2')
    assert parts.unpack(b'DGW\x02whatever') is None
    packed = place.pack()
    damaged = [packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :] for at in range(4, len(packed))]
    # Well-formed, but for a few bytes in the server as much memory as there may be parts.
    many = parts.Parted(place.key, 1, 2_000_000_000).pack()
    for bad in (packed[:5], packed[:-1], packed[:-1] + b'\xff', many, *damaged):
        with pytest.raises(CorruptPayload):
            parts.unpack(bad)


@pytest.mark.parametrize('extra', [-1, 0, 1])
@pytest.mark.parametrize('count', [1, 2, 3, 6])
def test_payloads_of_sizes_around_whole_parts_arrive(store, client, count, extra, monkeypatch):
    monkeypatch.setattr(parts, 'INLINE_BYTES', 1000)
    monkeypatch.setattr(parts, 'PART_BYTES', 1000)
    payload = np.random.default_rng(0).bytes(count * 1000 + extra)
    place = parts.place_of('ding:{x}:part:', payload)
    assert place.num_parts == -(-len(payload) // 1000)
    pieces = [(key, [part[:7], part[7:]]) for key, part in parts.parts_of(place, payload)]
    store.client.server.connection.call('write', lambda session: parts._borrowing(session, written, pieces, 0))
    (fetched,) = fetch(store, place.pack())
    assert bytes(fetched) == payload
    assert [len(one) for one in fetch(store, b'x', *[place.pack()] * 3)] == [1, *[len(payload)] * 3]
    assert client.pttl('ding:{x}:part:0') > 60_000
    client.delete(place.keys[-1])
    assert fetch(store, place.pack(), b'x') == [None, b'x']
    client.set(place.keys[-1], 'too short or too long')
    assert fetch(store, place.pack(), b'x') == [None, b'x']
    # The connection is still good for other commands.
    assert store.add('n', 1) == 1


def test_small_part_after_more_than_the_window_arrives(store):
    """The reply to the large one cannot come before the small one is sent, too."""
    for size in (parts.WINDOW_BYTES + 1, 2 * parts.WINDOW_BYTES):
        store.put('notes', {'long': 'x' * size}, chunk(1))
        assert len(store.get('notes').header['long']) == size


def test_parts_are_deleted_with_their_entry(store, client):
    reader = Reader(store, STREAM, 'learner')
    for i in range(3):
        store.append(STREAM, {}, chunk(i, LARGE))
    store.append(STREAM, {}, chunk(3))
    assert num_parts(client) == 12
    assert {client.ttl(key) for key in client.keys('*:part:*')} == {-1}
    entries = reader.read()
    assert [number_of(entry) for entry in entries] == [0, 1, 2, 3]
    reader.ack(entries[1].id)
    assert num_parts(client) == 4
    reader.ack()
    assert num_parts(client) == 0
    assert client.hget('ding:{run/experience/0}:meta', 'parted') == b'0'
    store.append(STREAM, {}, chunk(4, LARGE))
    store.delete(STREAM)
    assert num_parts(client) == 0


def test_drops_and_refusals_leave_no_parts(forgetful_server, client):
    options = {'max_pending_bytes': 7_000_000}
    with RedisStore(forgetful_server.url, 'run', overflow='drop_oldest', **options) as store:
        for i in range(5):
            store.append(STREAM, {}, chunk(i, LARGE))
        assert num_parts(client) == 8
    with RedisStore(forgetful_server.url, 'run', **options) as store:
        with pytest.raises(StoreTimeout):
            store.append(STREAM, {}, chunk(5, LARGE), timeout_s=0.05)
        assert num_parts(client) == 8


def test_read_of_large_entries_is_bounded_in_bytes(store, monkeypatch):
    monkeypatch.setattr('ding_store.storage.redis.entries.MAX_READ_BYTES', 5_000_000)
    reader = Reader(store, STREAM, 'learner')
    for i in range(5):
        store.append(STREAM, {}, chunk(i, LARGE))
    assert [[number_of(entry) for entry in reader.read()] for _ in range(3)] == [[0, 1], [2, 3], [4]]


def test_writers_killed_between_parts_leave_whole_entries(forgetful_server, store, client, monkeypatch):
    """Killed behind some part: the entry is there whole or not at all, and parts of no entry have an end."""
    monkeypatch.setattr(parts, '_LIFE_S', 3)
    monkeypatch.setattr(parts, '_SLOWEST_BYTES_PER_S', 1e9)
    reader = Reader(store, STREAM, 'learner')
    orphans = 0

    def write(upto):
        def work(pipe):
            with RedisStore(forgetful_server.url, 'run') as mine:
                mine.append(STREAM, {}, chunk(7, LARGE))
                send, count = parts.send, 0

                def watched(*arguments):
                    nonlocal count
                    send(*arguments)
                    count += 1
                    if count == upto:
                        print('there', file=pipe)
                        while True:
                            pipe.flush()

                parts.send = watched
                mine.append(STREAM, {}, chunk(8, LARGE))

        return work

    for upto in (2, 3, 2, 3):
        with child(write(upto)) as (_, pipe):
            assert pipe.readline().strip() == 'there'
            eventually(lambda upto=upto: num_parts(client) >= 4 + upto - 1, 'parts arrive')
            orphans += num_parts(client) - 4
        assert [number_of(entry) for entry in reader.read()] == [7]
        reader.ack()
    assert orphans >= 4
    eventually(lambda: num_parts(client) == 0, 'parts of nobody go')
    assert reader.num_lost == 0


def test_parts_that_vanish_are_sent_again(store, client, monkeypatch):
    count = 0

    def forgetful(connection, *arguments):
        nonlocal count
        written(connection, *arguments)
        count += 1
        if count < 3:
            client.delete(client.keys('*:part:*')[0])
        return 0, b''

    monkeypatch.setattr(parts, 'write_parts', forgetful)
    monkeypatch.setattr(redis_values, 'write_parts', forgetful)
    store.append(STREAM, {}, chunk(1, LARGE))
    assert [number_of(entry) for entry in store.read(STREAM)] == [1]
    assert count == 3
    count = 0
    assert store.put('weights', {}, chunk(2, LARGE)) == 1
    assert number_of(store.get('weights')) == 2
    monkeypatch.setattr(parts, 'write_parts', lambda *arguments: (0, b''))
    with pytest.raises(ServerFull, match='vanish'):
        store.append(STREAM, {}, chunk(1, LARGE))


def test_missing_part_is_refused_by_name(store, client):
    reader = Reader(store, STREAM, 'learner', on_corrupt='skip')
    place = store.append(STREAM, {}, chunk(0, LARGE))
    store.append(STREAM, {}, chunk(1))
    client.delete(*client.keys('*:part:1'))
    with pytest.raises(CorruptPayload, match=f"entry {place.number} of 'experience'"):
        store.read(STREAM)
    assert reader.read() == []
    assert [number_of(entry) for entry in reader.read()] == [1]
    store.put('weights', {}, chunk(0, LARGE))
    client.delete(*client.keys('*weights*:part:1'))
    with pytest.raises(CorruptPayload, match="'weights'"):
        store.get('weights')


def test_part_of_another_type_is_refused_by_name(store, client):
    reader = Reader(store, STREAM, 'learner', on_corrupt='skip')
    store.append(STREAM, {}, chunk(0, LARGE))
    store.append(STREAM, {}, chunk(1))
    store.put('weights', {}, chunk(0, LARGE))
    for key in client.keys('*:part:1'):
        client.delete(key)
        client.rpush(key, 'of another program')
    assert reader.read() == []
    assert [number_of(entry) for entry in reader.read()] == [1]
    assert (reader.num_corrupt, reader.num_lost) == (1, 0)
    with pytest.raises(CorruptPayload, match="'weights'"):
        store.get('weights')


@pytest.mark.parametrize('num_bytes', [0, 100_000, (1 << 20) + 1])
def test_part_of_another_length_is_refused_by_name(store, client, num_bytes):
    reader = Reader(store, STREAM, 'learner', on_corrupt='skip')
    store.append(STREAM, {}, chunk(0, LARGE))
    store.append(STREAM, {}, chunk(1, LARGE))
    store.put('weights', {}, chunk(0, LARGE))
    first, *_ = sorted(client.keys('*:1:*:part:0'))
    (of_value,) = client.keys('*weights*:part:1')
    for key in (first, of_value):
        client.set(key, b'x' * num_bytes)
    assert reader.read() == []
    assert [number_of(entry) for entry in reader.read()] == [1]
    assert (reader.num_corrupt, reader.num_lost) == (1, 0)
    with pytest.raises(CorruptPayload, match="'weights'"):
        store.get('weights')


READ_WITH_LITTLE_MEMORY = """
import resource, sys
from ding_store.errors import NotEnoughSpace
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.testing import number_of
with open_store(sys.argv[1], 'run', host_plane='off') as store:
    reader = Reader(store, 'experience', 'learner', on_corrupt='skip')
    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    seen = []
    try:
        while 9 not in seen:
            seen += map(number_of, reader.read())
            reader.ack()
    except NotEnoughSpace as error:
        print(error)
    print(seen, reader.num_corrupt, reader.num_lost)
    try:
        store.get('weights')
    except NotEnoughSpace as error:
        print(error)
"""


@pytest.mark.parametrize('is_genuine', [False, True])
def test_place_without_memory_for_it_is_refused_by_name(store, forgetful_server, client, is_genuine):
    """A lie about 2 GB is skipped as other damage is; an entry that is as large as it says, and no more, says so."""
    size = 128 << 20
    store.append(STREAM, {}, chunk(1))
    if is_genuine:
        store.append(STREAM, {}, {'x': np.zeros(size, np.uint8)})
    else:
        client.set('ding:{lie}:0', 'short')
        for key in ('ding:{missing}:', 'ding:{lie}:'):
            store.client.append(STREAM, Payload(parts.Parted(key, 1 << 20, 2_000_000_000).pack()))
    store.append(STREAM, {}, chunk(9))
    store.put('weights', {}, {'x': np.zeros(size, np.uint8)})
    command = [sys.executable, '-c', READ_WITH_LITTLE_MEMORY, forgetful_server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    *first, last = done.stdout.splitlines() or ['']
    assert re.match("value 'weights' has 1342.* bytes, and this process has no memory", last), done.stderr
    if is_genuine:
        assert re.match("entry 2 of 'experience' has 1342.* bytes, and this process cannot allocate them", first[0])
        assert first[1] == '[1] 0 0'
    else:
        assert first == ['[1, 9] 2 0']


def test_parts_of_the_previous_version_are_kept(store, client):
    for i in range(4):
        assert store.put('weights', {}, chunk(i, LARGE)) == i + 1
        assert number_of(store.get('weights')) == i
    assert num_parts(client) == 9  # four of the array, twice; the head did not change
    store.put('weights', {}, chunk(9))
    assert num_parts(client) == 5
    assert number_of(store.get('weights')) == 9
    store.delete('weights')
    assert num_parts(client) == 0


def test_put_that_is_refused_leaves_no_parts(store, client):
    assert store.put('weights', {}, chunk(1, LARGE)) == 1
    kept = sorted(client.keys('*:part:*'))
    with pytest.raises(VersionConflict):
        store.put('weights', {}, chunk(2, LARGE), expected_version=3)
    assert sorted(client.keys('*:part:*')) == kept
    with pytest.raises(VersionConflict):
        store.put('nothing', {}, chunk(2, LARGE), expected_version=3)
    assert sorted(client.keys('*:part:*')) == kept
    assert number_of(store.get('weights')) == 1
    assert store.put('weights', {}, chunk(3, LARGE), expected_version=1) == 2
    assert number_of(store.get('weights')) == 3


def test_backfill_of_a_replaced_version_leaves_no_parts(store, client):
    assert store.put('weights', {}, chunk(1, LARGE)) == 1
    kept = sorted(client.keys('*:part:*'))
    assert not store.client.server.backfill_version('weights', 7, encode_pieces({}, chunk(2, LARGE)))
    assert sorted(client.keys('*:part:*')) == kept
    assert number_of(store.get('weights')) == 1


@pytest.mark.parametrize('is_last', [True, False])
def test_backfill_of_an_acked_entry_leaves_no_parts(store, client, is_last):
    reader = Reader(store, STREAM, 'learner')
    place = store.append(STREAM, {}, chunk(0))
    if not is_last:
        store.append(STREAM, {}, chunk(1))
    assert number_of(reader.read()[0]) == 0
    reader.ack(place)
    store.client.server.backfill(Backfill(STREAM, place.epoch, 1, 2, encode({}, chunk(0, LARGE))))
    assert num_parts(client) == 0
    assert [number_of(entry) for entry in store.read(STREAM)] == ([] if is_last else [1])


def test_parts_of_a_reused_number_are_deleted(forgetful_server, store, client, monkeypatch):
    """Somebody else wrote behind the newest entry, so that the log begins anew, and another writer is there first."""
    with RedisStore(forgetful_server.url, 'run') as other:
        reader = Reader(store, STREAM, 'learner')
        for number, one in enumerate((store, other)):
            one.append(STREAM, {}, chunk(number))
        client.xadd(store.client.server.keys.of(STREAM, 'log'), {'foreign': 'entry'})
        stream_writer = store.client.own_writer.stream_writer(STREAM)
        send_request, verdicts = stream_writer.outbox.send_request, []

        def announcing(said):
            verdicts.append(send_request(said))
            if len(verdicts) == 1:
                assert verdicts[0].status == 'STALE'
                assert client.ttl(client.keys('*:part:*')[0]) > 0
                other.append(STREAM, {}, chunk(2, LARGE))
            return verdicts[-1]

        monkeypatch.setattr(stream_writer.outbox, 'send_request', announcing)
        store.append(STREAM, {}, chunk(3, LARGE))
        seen = []
        while len(seen) < 4:
            (entry,) = reader.read(1, timeout_s=WAIT_S)
            seen.append(number_of(entry))
            reader.ack()
        assert (seen, reader.num_lost) == ([0, 1, 2, 3], 0)
        assert num_parts(client) == 0


@pytest.mark.parametrize('what', ['entry', 'fill', 'value'])
def test_parts_with_one_missing_keep_their_time_to_live(store, client, monkeypatch, what):
    """Else the parts of a writer that is killed now would stay for good. A writer that gives up deletes them."""
    place = store.append(STREAM, {}, chunk(0))
    left = []

    def all_but_one(connection, all_parts, num_bytes):
        left.extend(client.ttl(key) for key in client.keys('*:part:*'))
        written(connection, list(all_parts)[:-1], num_bytes)
        return 0, b''

    monkeypatch.setattr(parts, 'write_parts', all_but_one)
    monkeypatch.setattr(redis_values, 'write_parts', all_but_one)
    calls = {
        'entry': lambda: store.append(STREAM, {}, chunk(1, LARGE)),
        'fill': lambda: store.client.server.backfill(Backfill(STREAM, place.epoch, 1, 1, encode({}, chunk(0, LARGE)))),
        'value': lambda: store.put('weights', {}, chunk(1, LARGE)),
    }
    with pytest.raises(ServerFull, match='vanish'):
        calls[what]()
    assert left
    assert all(life_s > 0 for life_s in left)
    assert num_parts(client) == 0


def test_value_replaced_during_a_fetch_is_fetched_again(store, client, monkeypatch):
    store.put('weights', {}, chunk(1, LARGE))
    read, count = redis_values.read_parts, 0

    def slow(connection, places, moved):
        nonlocal count
        count += 1
        if count < 3:
            for _ in range(2):
                store.put('weights', {}, chunk(count + 10, LARGE))
        return read(connection, places, moved)

    monkeypatch.setattr(redis_values, 'read_parts', slow)
    value = store.get('weights')
    assert (number_of(value), count) == (12, 3)


def test_large_entries_survive_a_restart_of_a_durable_server(own_server):
    with RedisStore(own_server.url, 'run') as store:
        for i in range(2):
            store.append(STREAM, {}, chunk(i, LARGE))
    own_server.restart()
    with RedisStore(own_server.url, 'run') as store, own_server.client() as client:
        reader = Reader(store, STREAM, 'learner')
        assert [number_of(entry) for entry in reader.read()] == [0, 1]
        reader.ack()
        assert num_parts(client) == 0
