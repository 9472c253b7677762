"""One contract: every command of ``protocol.Server``, on Redis, in memory, on two servers, and in a cluster."""

import contextlib
import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from ding_store.errors import CorruptPayload, StoreClosed, VersionConflict
from ding_store.storage.base import OLDEST, EntryId, ValueVersion
from ding_store.storage.encoding.framing import decode, encode, encode_pieces
from ding_store.storage.memory.server import Memory, MemoryServer
from ding_store.storage.options import RedisOptions
from ding_store.storage.protocol import (
    FILLED,
    FORGOTTEN,
    FULL,
    GAP,
    GONE,
    LOST,
    OK,
    OVER,
    PLANE,
    STALE,
    WAITING,
    AppendReply,
    AppendRequest,
    Backfill,
    fetch_own,
)
from ding_store.storage.redis.cluster import ClusterServer
from ding_store.storage.redis.server import RedisServer
from ding_store.storage.shards.server import ShardedServer
from ding_store.storage.shared_memory.transports import Reference
from ding_store.storage.testing import WAIT_S

_NUMBERS = itertools.count()
REFERENCE = Reference('0' * 32, 1, 2, 3, 4, 5).pack()
PAYLOAD = encode({'number': 1}, {})


@pytest.fixture(params=['redis', 'memory', 'shards', 'cluster'])
def opened(request):
    """Returns a function that opens the servers of one run, one for each writer."""
    run, servers, memories = f'commands-{os.getpid()}-{next(_NUMBERS)}', [], (Memory(), Memory())
    url = request.getfixturevalue('redis_server').url if request.param == 'redis' else ''

    def opened(writer='a'):
        if url:
            servers.append(RedisServer(url, None, run, writer, RedisOptions()))
        elif request.param == 'cluster':
            nodes = request.getfixturevalue('redis_cluster').url()
            servers.append(ClusterServer(nodes, run, writer, RedisOptions()))
        elif request.param == 'shards':
            servers.append(ShardedServer(run, [MemoryServer(memory, run, writer) for memory in memories]))
            servers[-1].connect()
        else:
            servers.append(MemoryServer(memories[0], run, writer))
        return servers[-1]

    yield opened
    for name in {*opened().info().streams, *servers[0].info().values, *servers[0].info().counters}:
        servers[-1].delete(name)
    for server in servers:
        server.close()


@pytest.fixture
def server(opened):
    return opened()


class Appends:
    """The requests of one writer to a stream, as an outbox makes them."""

    def __init__(self, server, stream='s'):
        self.server, self.stream = server, stream
        self.state = server.append(AppendRequest(stream, '', 1, 1, PAYLOAD, size=len(PAYLOAD)))
        assert self.state.status == STALE

    def __call__(self, sequence, payload=PAYLOAD, base=1, **changes):
        request = AppendRequest(self.stream, self.state.epoch, sequence, base, payload, size=len(payload))
        return self.server.append(request._replace(admission=self.state.admission)._replace(**changes))


@pytest.fixture
def append(server):
    return Appends(server)


def test_append_of_a_known_epoch_gets_the_next_number(append, opened):
    other = Appends(opened('b'))
    replies = [append(1), other(1), append(2)]
    assert [reply.status for reply in replies] == [OK, OK, OK]
    assert [reply.number for reply in replies] == [1, 2, 3]
    assert [reply.last for reply in replies] == [1, 1, 2]
    entries = opened('reader').read('s', OLDEST, 9)
    assert [(one.id.number, one.writer, one.sequence, bytes(one.payload)) for one in entries] == [
        (1, 'a', 1, PAYLOAD),
        (2, 'b', 1, PAYLOAD),
        (3, 'a', 2, PAYLOAD),
    ]
    assert [one.id.chain for one in entries] == [reply.chain for reply in replies]


def test_append_repeated_is_stored_once(server, append):
    first = append(1)
    assert append(1)[:4] == first[:4]
    assert len(server.read('s', OLDEST, 9)) == 1


def test_append_out_of_turn_is_a_gap(append):
    append(1)
    reply = append(3)
    assert (reply.status, reply.last) == (GAP, 1)
    assert append(3, base=3).status == OK  # the writer no longer has the second one


def test_append_of_another_epoch_is_stale(append):
    append(1)
    reply = append(2, epoch='another')
    assert (reply.status, reply.epoch, reply.last) == (STALE, append.state.epoch, 1)


def test_append_of_another_admission_is_forgotten(append):
    assert append(1, admission=append.state.admission + 1).status == FORGOTTEN


def test_append_after_a_lost_reply_begins_an_epoch(append):
    append(1)
    reply = append(2, last_reply='4:5')
    assert reply.status == STALE
    assert reply.epoch != append.state.epoch


def test_append_with_lost_readers_registers_them(server, append):
    append(1, readers='\nlearner\there\t\n')
    assert server.stream_info('s').durable == {'learner': True}


def test_append_to_a_full_stream_is_refused_until_an_ack(server, append):
    limit = {'max_pending_bytes': 2 * len(PAYLOAD)}
    server.register_reader('s', 'r')
    first, _ = append(1, **limit), append(2, **limit)
    refused = append(3, **limit)
    assert refused.status == FULL
    assert server.wait_for_capacity('s', refused.freed, 0.01) is None
    server.ack('s', 'r', EntryId(first.epoch, 1))
    freed = server.wait_for_capacity('s', refused.freed, 4.0)
    assert freed[1:] == (first.epoch, 1, first.chain)
    assert append(3, **limit).status == OK


def test_append_that_drops_the_oldest_counts_them(server, append):
    limit = {'max_pending_bytes': 2 * len(PAYLOAD), 'drop_oldest': True}
    replies = [append(number, **limit) for number in (1, 2, 3)]
    assert [reply.status for reply in replies] == [OK, OK, OK]
    assert (replies[-1].num_dropped, replies[-1].floor) == (1, 1)
    assert [one.sequence for one in server.read('s', OLDEST, 9)] == [2, 3]


def test_sequence_0_returns_the_state_of_the_stream(append):
    append(1)
    reply = append(0)
    assert (reply.status, reply.number, reply.last) == (OK, 1, 1)


def test_writer_that_leaves_is_dropped_with_its_last_entry(server, append):
    server.register_reader('s', 'r')
    reply = append(1)
    server.leave('s', append.state.admission)
    assert server.stream_info('s').writers == {'a': 1}
    server.ack('s', 'r', EntryId(reply.epoch, 1))
    assert server.stream_info('s').writers == {}


def test_read_goes_on_after_an_entry(server, append):
    for number in (1, 2, 3):
        append(number)
    first, second = server.read('s', OLDEST, 2)
    assert [one.sequence for one in server.read('s', first.id, 9)] == [2, 3]
    assert [one.sequence for one in server.read('s', second.id, 9)] == [3]
    assert server.read('s', server.read('s', OLDEST, 9)[-1].id, 9, 0.01) == []


def test_read_after_a_past_epoch_begins_at_the_oldest(server, append):
    append(1)
    assert [one.sequence for one in server.read('s', EntryId('past', 9), 9)] == [1]


def test_read_after_an_entry_that_is_no_more_begins_an_epoch(server, append):
    append(1)
    (entry,) = server.read('s', OLDEST, 9)
    (found,) = server.read('s', entry.id.chained('another'), 9)
    assert found.sequence == 1
    assert found.id.epoch != entry.id.epoch


def test_read_waits_for_an_entry(opened, append):
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(opened('reader').read, 's', OLDEST, 9, 4.0)
        append(1)
        # A server may return before the time is over.
        assert [one.sequence for one in reading.result(WAIT_S) or opened('reader').read('s', OLDEST, 9)] == [1]


def test_reader_registered_again_keeps_its_cursor(server, append):
    replies = [append(number) for number in (1, 2)]
    assert server.register_reader('s', 'old') == EntryId(replies[0].epoch, 0)
    assert server.register_reader('s', 'new', start='now') == EntryId(replies[0].epoch, 2)
    server.ack('s', 'old', EntryId(replies[0].epoch, 1))
    place = server.register_reader('s', 'old', durable=False)
    assert (place, place.chain) == (EntryId(replies[0].epoch, 1), replies[0].chain)
    assert server.stream_info('s').durable == {'old': False, 'new': True}


def test_ack_trims_what_all_durable_readers_have_acked(server, append):
    replies = [append(number) for number in (1, 2, 3)]
    server.register_reader('s', 'fast')
    server.register_reader('s', 'slow')
    server.register_reader('s', 'ephemeral', durable=False)
    server.ack('s', 'fast', EntryId(replies[0].epoch, 3))
    assert server.stream_info('s').floor == 0
    server.ack('s', 'slow', EntryId(replies[0].epoch, 2))
    server.ack('s', 'slow', EntryId(replies[0].epoch, 1))
    info = server.stream_info('s')
    assert (info.floor, info.last, info.readers) == (2, 3, {'fast': 3, 'slow': 2, 'ephemeral': 0})
    assert info.pending_bytes == len(PAYLOAD)


@pytest.mark.parametrize(
    'place', [EntryId('past', 1), EntryId('', 1), 'chain'], ids=['past epoch', 'no epoch', 'another entry']
)
def test_ack_of_what_is_no_more_trims_nothing(server, append, place):
    reply = append(1)
    server.register_reader('s', 'r')
    server.ack('s', 'r', EntryId(reply.epoch, 1).chained('another') if place == 'chain' else place)
    server.ack('s', 'unknown', EntryId(reply.epoch, 1))
    info = server.stream_info('s')
    assert (info.floor, info.readers) == (0, {'r': 0})


def test_ack_without_a_wait_takes_effect_by_the_flush(server, append):
    reply = append(1)
    server.register_reader('s', 'r')
    server.ack('s', 'r', EntryId(reply.epoch, 1), wait=False)
    server.flush()
    assert server.stream_info('s').floor == 1


def test_unregister_of_the_last_durable_reader_trims_all(server, append):
    append(1)
    server.register_reader('s', 'r')
    assert server.unregister_reader('s', 'r')
    assert not server.unregister_reader('s', 'r')
    info = server.stream_info('s')
    assert (info.floor, info.readers) == (1, {})


class TestReferences:
    """Readers of the host 'here' get references, until one of another host comes."""

    @pytest.fixture(autouse=True)
    def _reader(self, server):
        server.register_reader('s', 'near', host='here')
        self.append = Appends(server)
        assert (self.append.state.host, self.append.state.transport) == ('here', 1)

    def refer(self, sequence):
        return self.append(sequence, REFERENCE, transport=self.append.state.transport, base=sequence)

    def test_reference_is_wanted_once_another_host_reads(self, server):
        assert self.refer(1).status == OK
        server.wait_for_transports({'s': 0}, 4.0)
        server.register_reader('s', 'far')
        server.wait_for_transports({'s': 1}, 4.0)
        refused = self.refer(2)
        assert (refused.status, refused.transport, refused.host, refused.wanted) == (PLANE, 2, '', 1)
        assert self.append(2).status == OK

    def test_reference_is_wanted_once_it_is_requested(self, server):
        assert self.refer(1).status == OK
        server.request_backfills('s')
        reply = self.append(0)
        assert (reply.host, reply.transport, reply.wanted) == ('here', 2, 1)

    def test_backfill_adds_the_payload(self, server):
        place = self.refer(1)
        (entry,) = server.read('s', OLDEST, 9)
        waiting = server.read_backfill('s', entry, fetch_own)
        assert (waiting.payload, waiting.fate) == (None, WAITING)
        for sequence in (1, 2, 1):  # there is no second one, and a repetition does no harm
            server.backfill(Backfill('s', place.epoch, sequence, 9, PAYLOAD))
        assert server.wait_for_capacity('s', waiting.freed, 4.0) is not None
        filled = server.read_backfill('s', entry, fetch_own)
        assert (bytes(filled.payload), filled.fate) == (PAYLOAD, FILLED)
        server.ack('s', 'near', entry.id)
        assert server.read_backfill('s', entry, fetch_own)[:2] == (None, GONE)
        assert server.read_backfill('s', entry._replace(id=EntryId('past', 1)), fetch_own)[:2] == (None, OVER)

    def test_reference_without_its_writers_copy_is_lost(self, server):
        self.refer(1)
        (entry,) = server.read('s', OLDEST, 9)
        self.append(0, base=2)
        assert server.read_backfill('s', entry, fetch_own)[:2] == (None, LOST)


def test_put_counts_versions_of_a_value(server, opened):
    assert server.get('v') is None
    first = server.put('v', encode_pieces({'of': 1}, {}))
    second = opened('b').put('v', encode_pieces({'of': 2}, {}))
    assert (first, second) == (1, 2)
    found = server.get('v')
    assert (found.version, found.version.put_id, found.reference) == (2, second.put_id, b'')
    assert decode(found.payload)[0] == {'of': 2}
    assert server.get('v', newer_than=second) is None
    assert server.info().values == {'v': 2}


def test_get_that_waits_returns_a_lower_version(server):
    """A server that lost its memory counts from 1 again."""
    server.put('v', encode_pieces({'of': 1}, {}))
    known = ValueVersion(9, 'before the loss')
    for timeout_s in (0.001, WAIT_S):  # below and above the time after which the Redis server looks
        found = server.get('v', newer_than=known, timeout_s=timeout_s)
        assert (found.version, decode(found.payload)[0]) == (1, {'of': 1})


def test_put_of_an_expected_version_compares_the_put_too(server):
    first = server.put('v', encode_pieces({}, {}), expected_version=0)
    for expected in (0, 2, type(first)(1, 'another')):
        with pytest.raises(VersionConflict):
            server.put('v', encode_pieces({}, {}), expected_version=expected)
    assert server.put('v', encode_pieces({}, {}), expected_version=first) == 2


def test_put_continues_above_the_start_version(server):
    server.versions.raise_to('v', 7)
    server.versions.raise_to('v', 3)
    assert server.put('v', encode_pieces({}, {})) == 8


def test_decide_compares_and_puts(server, opened):
    decided = server.decide('v', encode_pieces({'of': 1}, {}), expected_version=0)
    assert (decided.version, decided.num_replicas, decided.generation) == (1, 0, server.generation('v'))
    assert opened('reader').get('v').version.put_id == decided.version.put_id
    for expected in (0, 2, type(decided.version)(1, 'another')):
        with pytest.raises(VersionConflict):
            opened('b').decide('v', encode_pieces({}, {}), expected)
    assert opened('b').decide('v', encode_pieces({'of': 2}, {}), decided.version).version == 2
    assert server.info().values == {'v': 2}


def test_generation_is_the_same_for_all_clients(server, opened):
    assert server.generation('v') == opened('b').generation('v') != ''


def test_get_waits_for_a_version(server, opened):
    with ThreadPoolExecutor() as pool:
        getting = pool.submit(opened('reader').get, 'v', 0, 4.0)
        server.put('v', encode_pieces({}, {}))
        found = getting.result(WAIT_S) or server.get('v')
        assert found.version == 1


def test_wait_for_a_version_ends_with_it(server, opened):
    assert not server.wait_for_version('v', 1, 0.01)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(opened('reader').wait_for_version, 'v', 3, 4.0)
        for _ in range(3):
            server.put('v', encode_pieces({}, {}))
        assert waiting.result(WAIT_S)
    assert server.wait_for_version('v', 3, 0.01)
    assert not server.wait_for_version('v', 4, 0.01)


def test_wait_for_a_version_ends_if_it_is_over(server):
    assert not server.wait_for_version('v', 1, 4.0, is_over=lambda: True)
    server.put('v', encode_pieces({}, {}))
    assert server.get('v').version == 1  # no late reply is read


def test_version_without_a_payload_is_filled_on_request(server, opened):
    writer = opened('writer')
    version = writer.put('v', None, REFERENCE)
    assert server.get('v')[1:] == (b'', REFERENCE, False)
    asked = writer.wait_for_requests({'v': ''}, 0.01)
    server.request_version('v')
    assert writer.wait_for_requests(asked, 4.0) != asked
    assert server.get('v', newer_than=version, or_filled=True) is None or not server.get('v').payload
    assert not writer.backfill_version('v', 9, encode_pieces({}, {}))
    assert writer.backfill_version('v', version, encode_pieces({'filled': True}, {}))
    assert decode(server.get('v', newer_than=version, or_filled=True).payload)[0] == {'filled': True}


def test_advance_acks_and_puts(server, append):
    server.register_reader('s', 'r')
    for number in (1, 2, 3):  # the second and third may go without a wait for their replies
        reply = append(number)
        server.advance('s', 'r', EntryId(reply.epoch, reply.number), 'at', {'at': number})
    server.flush()
    assert server.stream_info('s').floor == 3
    assert decode(server.get('at').payload)[0] == {'at': 3}


def test_versions_follow_the_numbers_of_entries(server):
    def put_of(epoch, number):
        server.versions.follow('at', EntryId(epoch, number))
        return server.put('at', encode_pieces({}, {}))

    assert [put_of('a', number) for number in (4, 5, 9, 9)] == [4, 5, 9, 10]
    assert put_of('a', 11) == 12
    assert put_of('a', 10) == 13, 'never below'
    assert [put_of('b', number) for number in (1, 2, 7)] == [14, 15, 20], 'a new epoch counts on'


def test_counter_begins_at_0(server, opened):
    assert [server.add('c', 2), opened('b').add('c', -5), server.add('c', 0)] == [2, -3, -3]
    assert server.info().counters == {'c': -3}


def test_delete_keeps_only_the_writers_sequences(server, append):
    append(1)
    server.register_reader('s', 'r')
    server.put('s', encode_pieces({}, {}))
    server.add('s', 1)
    assert server.delete('s')
    assert not server.delete('s')
    info = server.info()
    assert (info.streams, info.values, info.counters) == ({}, {}, {})
    assert server.stream_info('s') is None
    reply = append(2)
    assert (reply.status, reply.last) == (STALE, 1)
    assert sum(reply.ends) > 0  # so its writer knows that the first one was not lost


def test_close_ends_the_waits_of_other_threads(opened, append):
    waiting = opened('waiting')
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(waiting.get, 'v', 0, 4.0),
            pool.submit(waiting.wait_for_version, 'v', 1, 4.0),
            pool.submit(waiting.wait_for_capacity, 's', append.state.freed, 4.0),
            pool.submit(waiting.wait_for_transports, {'s': append.state.transport}, 4.0),
        ]
        assert waiting.finish() is None
        waiting.close()
        for call in calls:
            with pytest.raises(StoreClosed):
                call.result(WAIT_S)
    with pytest.raises(StoreClosed):
        waiting.add('c', 1)
    waiting.close()


#: What a reply and a stream's state must have in common. Epochs are random, and the counters of freed capacity differ.
REPLY = ('status', 'number', 'last', 'floor', 'num_dropped', 'transport', 'host', 'wanted', 'chain')


class Twins:
    """Two servers that get the same requests of two writers and two readers."""

    def __init__(self, url, seed):
        self.random, run, memory = random.Random(seed), f'same-{os.getpid()}-{seed}', Memory()
        self.servers = {
            writer: (RedisServer(url, None, run, writer, RedisOptions()), MemoryServer(memory, run, writer))
            for writer in 'ab'
        }
        self.states = {}  # writer -> the last reply of each server
        self.sequences = dict.fromkeys(self.servers, 0)

    def step(self):
        """Send one random request. Return its name, and the two replies."""
        writer, reader = self.random.choice('ab'), self.random.choice(('near', 'far'))
        requests = (
            self.append,
            self.append,
            self.append,
            self.state,
            self.register,
            self.ack,
            self.forget,
            self.delete,
        )
        request = self.random.choice(requests)
        return request.__name__, [*map(list, zip(*request(self.servers[writer], writer, reader)))]

    def look(self):
        """Return what both servers hold."""
        server, oracle = self.servers['a']
        for one in (server, oracle):
            info = one.stream_info('s')
            entries = [(each.id.number, each.id.chain, *each[1:]) for each in one.read('s', OLDEST, 999)]
            yield (None if info is None else {**vars(info), 'epoch': ''}), entries

    def append(self, servers, writer, reader):
        gap = self.random.choice((1, 1, 1, 0, 2))
        base, limit = self.random.randint(1, 2), self.random.choice((0, 200))
        yield from self._append(servers, writer, max(1, self.sequences[writer] + gap), base, limit)
        self.sequences[writer] = self.states[writer][0].last

    def state(self, servers, writer, reader):
        if writer in self.states:
            yield from self._append(servers, writer, 0, 1, 0)

    def _append(self, servers, writer, sequence, base, limit):
        known = self.states.get(writer, [AppendReply('', '', 0, 0, 0, 0, 0)] * 2)
        requests = [
            AppendRequest('s', one.epoch, sequence, base, PAYLOAD, limit, False, len(PAYLOAD), admission=one.admission)
            for one in known
        ]
        replies = self.states[writer] = [server.append(request) for server, request in zip(servers, requests)]
        yield from zip(*([getattr(reply, name) for name in REPLY] for reply in replies))

    def register(self, servers, writer, reader):
        host, is_durable = self.random.choice(('here', '')), self.random.random() < 0.7
        start = self.random.choice(('oldest', 'now'))
        yield [server.register_reader('s', reader, is_durable, start, host).number for server in servers]

    def ack(self, servers, writer, reader):
        number = self.random.randint(0, 99)
        for server, state in zip(servers, self.states.get(writer, ())):
            server.ack('s', reader, EntryId(state.epoch, state.floor + number % 6))
        yield None, None

    def forget(self, servers, writer, reader):
        yield [server.unregister_reader('s', reader) for server in servers]

    def delete(self, servers, writer, reader):
        if self.random.random() < 0.2:
            yield [server.delete('s') for server in servers]

    def close(self):
        for servers in self.servers.values():
            for server in servers:
                server.delete('s')
                server.close()


@pytest.mark.parametrize('seed', range(4))
def test_servers_give_the_same_replies_to_random_requests(redis_server, seed):
    with contextlib.closing(Twins(redis_server.url, seed)) as twins:
        for number in range(200):
            name, replies = twins.step()
            assert not replies or replies[0] == replies[1], (number, name)
            one, other = twins.look()
            assert one == other, (number, name)


def test_entry_of_another_program_is_corrupt(redis_server):
    server = RedisServer(redis_server.url, None, f'foreign-{os.getpid()}', 'a', RedisOptions())
    Appends(server)(1)
    with redis_server.client() as client:
        client.xadd(server.keys.of('s', 'log'), {'foreign': '1'})
    assert len(server.read('s', OLDEST, 9)) == 1
    with pytest.raises(CorruptPayload):
        server.read('s', server.read('s', OLDEST, 1)[0].id, 9)
    server.delete('s')
    server.close()
