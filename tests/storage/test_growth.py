"""Writers come and go by the thousand: what the server and a reader know of them is bounded by those that live.

The machines are of a few writers, of which the server keeps two that are silent. Writers are closed, killed, or stopped
for so long that the server drops them; what a connection still held of a dead writer arrives late; the server forgets
everything, or its newest changes; the reader is killed. Nothing comes twice. Of a writer that lives nothing is lost.
"""

import contextlib
import json
import os
import threading
import uuid

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from inside import streams_with_rings

from ding_store.errors import StoreClosed, StoreUnavailable
from ding_store.storage import protocol
from ding_store.storage.exactly_once import losses
from ding_store.storage.exactly_once import reader as reader_module
from ding_store.storage.exactly_once import writer as writer_module
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.exactly_once.writer import MAX_ENDED, SPARE_STREAMS
from ding_store.storage.memory.store import Memory, MemoryStore
from ding_store.storage.options import HostOptions
from ding_store.storage.redis import appends
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.shared_memory import transports
from ding_store.storage.store import NO_HOST_CACHE
from ding_store.storage.testing import WAIT_S, abandon, chunk, number_of

STREAM = 'experience'
SILENT = 2
picks = st.integers(0, 4)


@pytest.fixture
def few_silent(monkeypatch):
    for module in (protocol, appends):
        monkeypatch.setattr(module, 'MAX_SILENT_WRITERS', SILENT)
    monkeypatch.setattr(losses, 'LOOK_EVERY_S', 0.0)


class Fleet(RuleBasedStateMachine):
    def open(self):
        raise NotImplementedError

    def say(self, writer, said):
        raise NotImplementedError

    def forget_everything(self):
        raise NotImplementedError

    def save(self):
        raise NotImplementedError

    def go_back(self, saved):
        raise NotImplementedError

    @initialize()
    def begin(self):
        self.readers_store = self.open()
        self.fleet, self.late, self.saved = [], [], None
        self.appended, self.seen = {}, []  # number -> writer
        self.is_dead = {}
        self.reader = Reader(self.readers_store, STREAM, 'learner')
        self.commit()

    def pick(self, which):
        if which >= len(self.fleet):
            self.fleet.append(self.opened())
        return self.fleet[min(which, len(self.fleet) - 1)]

    def opened(self):
        store = self.open()
        send_request = store.client.server.append

        def lossy(said):
            fault, store.fault = getattr(store, 'fault', None), None
            reply = None if fault == 'before' else send_request(said)
            if fault is not None:
                self.late.append((store.writer, said))  # It may arrive later, or once more.
                raise StoreUnavailable('the reply was lost')
            return reply

        store.client.server.append = lossy
        self.is_dead[store.writer] = False
        return store

    @rule(which=picks, fault=st.sampled_from([None, None, None, 'before', 'after']))
    def append(self, which, fault):
        store, number = self.pick(which), len(self.appended)
        store.fault, self.appended[number] = fault, store.writer
        try:
            store.append(STREAM, {}, chunk(number))
        except StoreUnavailable:
            pass
        store.fault = None

    @rule(which=picks)
    def look(self, which):
        if self.fleet:
            store = self.pick(min(which, len(self.fleet) - 1))
            store.client.own_writer.check(now=True)

    @precondition(lambda self: self.fleet)
    @rule(which=picks, in_order=st.booleans())
    def go(self, which, in_order):
        store = self.fleet.pop(which % len(self.fleet))
        self.is_dead[store.writer] = True
        if not in_order:
            abandon(store)
        store.close()

    @precondition(lambda self: self.late)
    @rule(which=picks)
    def arrive_late(self, which):
        """What a connection still held."""
        self.say(*self.late[which % len(self.late)])

    @rule(count=st.integers(1, 5))
    def read(self, count):
        self.seen += [number_of(entry) for entry in self.reader.read(count)]

    @rule()
    def ack(self):
        self.commit()
        self.reader.ack()

    @rule()
    def commit(self):
        known = {'marks': self.reader.marks, 'heads': self.reader.heads()}
        self.committed = json.dumps(known), len(self.seen)

    @rule()
    def kill_the_reader(self):
        known, count = self.committed
        del self.seen[count:]
        self.reader = Reader(self.readers_store, STREAM, 'learner', **json.loads(known))

    @rule()
    def lose_everything(self):
        self.forget_everything()

    @rule()
    def save_to_disk(self):
        self.saved = self.save()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def lose_the_newest_changes(self):
        self.go_back(self.saved)

    @invariant()
    def nothing_is_seen_twice_or_out_of_order(self):
        if not hasattr(self, 'seen'):
            return
        assert len(self.seen) == len(set(self.seen))
        for writer in set(self.appended.values()):
            mine = [number for number in self.seen if self.appended[number] == writer]
            assert mine == sorted(mine)

    def flush(self):
        for _ in range(3):
            for store in self.fleet:
                store.fault = None
                store.client.own_writer.check(now=True)
            while self.reader.lag():
                self.read(64)
            self.ack()
        self.read(64)
        self.ack()
        self.read(64)

    def teardown(self):
        if not hasattr(self, 'seen'):
            return
        self.flush()
        self.nothing_is_seen_twice_or_out_of_order()
        missing = {number for number in self.appended if number not in set(self.seen)}
        assert not {number for number in missing if not self.is_dead[self.appended[number]]}
        self.check_bounds()
        for store in (*self.fleet, self.readers_store):
            store.close()

    def num_known(self):
        raise NotImplementedError

    def check_bounds(self):
        bound = len(self.fleet) + 3 * SILENT
        assert self.num_known() <= bound


class MemoryFleet(Fleet):
    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def open(self):
        return MemoryStore(memory=self.memory)

    def say(self, writer, said):
        self.memory.log(said.stream).handle_request(writer, said)

    def forget_everything(self):
        self.readers_store.lose_memory()

    def save(self):
        return self.readers_store.snapshot()

    def go_back(self, saved):
        self.readers_store.lose_memory(keep=saved)

    def num_known(self):
        return len(self.memory.log(STREAM).writers)


class RedisFleet(Fleet):
    def __init__(self):
        super().__init__()
        self.run = f'fleet{os.getpid()}-{uuid.uuid4().hex[:6]}'
        self.client = self.server.client()

    def open(self):
        return RedisStore(self.server.url, self.run)

    def say(self, writer, said):
        store = self.readers_store
        keys = store.client.server.keys
        appends.RedisAppends(store.client.server.connection, keys, writer).send_request(said)

    def forget_everything(self):
        self.client.flushall()

    def save(self):
        return {key: self.client.dump(key) for key in self.client.keys(f'ding:{{{self.run}*')}

    def go_back(self, saved):
        self.client.flushall()
        for key, dumped in saved.items():
            self.client.restore(key, 0, dumped)
        meta = f'ding:{{{self.run}/{STREAM}/0}}:meta'
        if self.client.exists(meta):
            self.client.hset(meta, 'life', 'another')

    def num_known(self):
        meta = self.client.hgetall(f'ding:{{{self.run}/{STREAM}/0}}:meta')
        fields = [field for field in meta if field.startswith(b'w:')]
        assert int(meta.get(b'writers', 0)) == len(fields)
        assert all(b'w:' + field[2:] in meta for field in meta if field.startswith(b'b:'))
        return len(fields)

    def teardown(self):
        super().teardown()
        self.client.close()


@pytest.mark.usefixtures('few_silent')
class TestFleets:
    def test_fleet_in_memory_doubles_and_leaves_nothing(self):
        run_state_machine_as_test(
            MemoryFleet, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
        )

    def test_fleet_on_redis_doubles_and_leaves_nothing(self, redis_server):
        RedisFleet.server = redis_server
        run_state_machine_as_test(
            RedisFleet,
            settings=settings(max_examples=25, stateful_step_count=40, deadline=None, phases=[Phase.generate]),
        )


def known_writers(client, run):
    meta = client.hgetall(f'ding:{{{run}/{STREAM}/0}}:meta')
    return sum(field.startswith(b'w:') for field in meta)


@pytest.mark.usefixtures('few_silent')
class TestWritersOnRedis:
    @pytest.fixture(autouse=True)
    def _server(self, redis_server):
        self.server, self.run = redis_server, f'growth-{uuid.uuid4().hex[:8]}'
        with redis_server.client() as self.client:
            yield

    def open(self):
        return RedisStore(self.server.url, self.run)

    def keys(self):
        return self.client.keys(f'ding:{{{self.run}*')

    def test_writer_that_leaves_is_dropped_with_its_last_entry(self, monkeypatch):
        monkeypatch.setattr(reader_module, 'MAX_CARRIED', 0)
        with self.open() as learner:
            reader = Reader(learner, STREAM, 'learner')
            for number in range(20):
                with self.open() as store:
                    store.append(STREAM, {}, chunk(number))
            assert [number_of(entry) for entry in reader.read(19)] == list(range(19))
            reader.ack()
            assert known_writers(self.client, self.run) == 1
            assert len(reader.read()) == 1
            reader.ack()
            reader.read()
            assert known_writers(self.client, self.run) == 0
            assert reader.marks == {}

    def test_writer_that_left_adds_no_late_entry(self, monkeypatch):
        """What it said twice, on a connection that it had given up, arrives when it is gone."""
        monkeypatch.setattr(reader_module, 'MAX_CARRIED', 0)
        said = []
        with self.open() as learner:
            reader = Reader(learner, STREAM, 'learner')
            with self.open() as store:
                send_request = store.client.server.append
                outbox_ = store.client.own_writer.stream_writer(STREAM).outbox
                outbox_.send_request = lambda one: (said.append(one), send_request(one))[1]
                store.append(STREAM, {}, chunk(0))
                assert len(reader.read()) == 1
                reader.ack()
            reader.read()
            assert reader.marks == {}
            keys = learner.client.server.keys
            late = appends.RedisAppends(learner.client.server.connection, keys, store.writer)
            for one in (*said, *said):
                late.send_request(one)
            assert reader.read() == []

    def test_writer_killed_long_ago_is_dropped(self):
        with self.open() as learner:
            reader, stores = Reader(learner, STREAM, 'learner'), []
            for number in range(10 * SILENT):
                stores.append(self.open())
                stores[-1].append(STREAM, {}, chunk(number))
                abandon(stores[-1])  # It says no more, as if it was killed.
                assert len(reader.read()) == 1
                reader.ack()
            assert 0 < known_writers(self.client, self.run) <= 3 * SILENT
            for store in stores:
                store.close()

    @pytest.mark.parametrize('is_lost', [False, True])
    def test_writer_dropped_while_stopped_continues(self, is_lost):
        """It had not heard that its entries were acked; also where the server loses its memory before it does."""
        with self.open() as learner, self.open() as stopped:
            reader = Reader(learner, STREAM, 'learner')
            for number in range(3):
                stopped.append(STREAM, {}, chunk(number))
            seen = [number_of(entry) for entry in reader.read()]
            reader.ack()
            others = [self.open() for _ in range(5 * SILENT)]
            for number, store in enumerate(others, 3):
                store.append(STREAM, {}, chunk(number))
                seen += [number_of(entry) for entry in reader.read()]
                reader.ack()
            assert stopped.writer not in learner.stream_info(STREAM).writers
            if is_lost:
                self.client.flushall()
            stopped.append(STREAM, {}, chunk(100))
            for store in others:
                store.close()
            while reader.lag():
                seen += [number_of(entry) for entry in reader.read()]
                reader.ack()
            assert sorted(seen) == [*range(3 + len(others)), 100]
            assert reader.num_lost == 0

    @pytest.mark.parametrize('is_killed', [False, True])
    def test_writer_that_left_is_read_once_after_going_back(self, is_killed):
        with self.open() as learner:
            reader = Reader(learner, STREAM, 'learner')
            with self.open() as store:
                store.append(STREAM, {}, chunk(0))
                saved = {key: self.client.dump(key) for key in self.keys()}
            assert len(reader.read()) == 1
            reader.ack()
            reader.read()
            known = json.loads(json.dumps({'marks': reader.marks, 'heads': reader.heads()}))
            self.client.flushall()
            for key, dumped in saved.items():
                self.client.restore(key, 0, dumped)
            self.client.hset(f'ding:{{{self.run}/{STREAM}/0}}:meta', 'life', 'another')
            learner.register(STREAM, 'learner')  # With which the server begins an epoch.
            if is_killed:
                reader = Reader(learner, STREAM, 'learner', **known)
            assert reader.read() == []
            assert (reader.num_duplicates, reader.num_lost) == (1, 0)

    def test_readers_are_listed_only_when_they_change(self):
        with self.open() as learner, self.open() as store:
            for number in range(50):
                learner.register(STREAM, f'reader-{number}')
            verdicts, outbox_ = [], store.client.own_writer.stream_writer(STREAM).outbox
            send_request = outbox_.send_request
            outbox_.send_request = lambda one: (verdicts.append(send_request(one)), verdicts[-1])[1]
            store.append(STREAM, {}, chunk(0))
            store.append(STREAM, {}, chunk(1))
            assert [one.readers is None for one in verdicts] == [False, True, True]
            learner.forget(STREAM, 'reader-0')
            store.append(STREAM, {}, chunk(2))
            assert verdicts[-1].readers.count('reader-') == 49

    def test_readers_that_were_forgotten_leave_a_bounded_trace(self):
        with self.open() as learner:
            for number in range(600):
                learner.register(STREAM, f'reader-{number}')
                learner.forget(STREAM, f'reader-{number}')
            meta = self.client.hgetall(f'ding:{{{self.run}/{STREAM}/0}}:meta')
            assert len(meta) < 30
            assert sum(map(len, meta.values())) < 8000

    @pytest.mark.parametrize('kind', ['streams', 'values'])
    def test_deleted_streams_and_values_leave_no_key(self, kind):
        with self.open() as store:
            for number in range(30):
                name = f'one-{number}'
                if kind == 'streams':
                    Reader(store, name, 'reader')
                    store.append(name, {}, chunk(0))
                    assert len(store.read(name)) == 1
                else:
                    store.put(name, {}, chunk(0, 100_000))
                assert store.delete(name)
            assert self.keys() == []

    def test_stream_deleted_under_a_writer_leaves_expiring_keys(self):
        with self.open() as store, self.open() as other:
            other.append(STREAM, {}, chunk(0))
            store.delete(STREAM)
            keys = self.keys()
            assert keys
            assert all(0 < self.client.ttl(key) <= 86400 for key in keys)
            other.append(STREAM, {}, chunk(1))
            assert [number_of(entry) for entry in store.read(STREAM)] == [1]
            assert {self.client.ttl(key) for key in self.keys() if not key.endswith(b':ends')} == {-1}
            store.delete(STREAM)
        assert [key for key in self.keys() if not key.endswith(b':ends')] == []


class TestStreamsOfOneWriter:
    """Streams come and go by the thousand: what a process knows of them is bounded by those that live."""

    @pytest.fixture(autouse=True)
    def _server(self, redis_server, tmp_path):
        self.url, self.run, self.directory = redis_server.url, f'streams-{uuid.uuid4().hex[:8]}', tmp_path
        with redis_server.client() as self.client, contextlib.ExitStack() as self.stores:
            yield

    def open(self, host=None):
        cache = NO_HOST_CACHE if host is None else HostOptions(host_cache_dir=str(self.directory / host))
        return self.stores.enter_context(RedisStore(self.url, self.run, host=cache, check_every_s=0.05))

    @pytest.mark.parametrize('is_own', [False, True])
    def test_streams_that_were_deleted_are_forgotten(self, is_own):
        store = self.open()
        deleter, living = store if is_own else self.open(), [f'lives-{number}' for number in range(3)]
        for name in living:
            store.append(name, {}, chunk(0))
        for number in range(4 * SPARE_STREAMS):
            store.append(f'goes-{number}', {}, chunk(0))
            deleter.delete(f'goes-{number}')
        assert len(store.client.own_writer._stream_writers) <= (0 if is_own else 2 * SPARE_STREAMS) + len(living)
        assert all(store.client.own_writer.has_stream_writer(name) for name in living)
        store.client.own_writer.forget_deleted()
        left = [key for key in self.client.keys(f'ding:{{{self.run}/goes-*') if not key.endswith(b':ends')]
        assert left == [], 'a store that forgets a stream leaves it'

    @pytest.mark.parametrize('is_own', [False, True])
    @pytest.mark.parametrize('max_ended', [MAX_ENDED, 1])
    def test_reader_of_a_forgotten_stream_continues(self, is_own, max_ended, monkeypatch):
        """It knows how far the writer was, and takes what is not behind that for something read before."""
        monkeypatch.setattr(writer_module, 'MAX_ENDED', max_ended)
        store, learner = self.open(), self.open()
        reader = Reader(learner, STREAM, 'learner')
        for number in range(3):
            store.append(STREAM, {}, chunk(number))
        assert len(reader.read()) == 3
        reader.ack()
        (store if is_own else learner).delete(STREAM)
        for number in range(3):
            store.append(f'other-{number}', {}, chunk(0))
            learner.delete(f'other-{number}')
        store.client.own_writer.forget_deleted()
        assert not store.client.own_writer.has_stream_writer(STREAM)
        store.append(STREAM, {}, chunk(3))
        assert [number_of(entry) for entry in reader.read()] == [3]
        assert (reader.num_lost, reader.num_duplicates) == (0, 0)

    def test_forgotten_stream_refuses_appends_after_closing(self):
        store, learner = self.open(), self.open()
        store.append(STREAM, {}, chunk(0))
        learner.delete(STREAM)
        store.client.own_writer.forget_deleted()
        store.close_for_writing()
        with pytest.raises(StoreClosed, match='had appended its last'):
            store.append(STREAM, {}, chunk(1))
        assert learner.read(STREAM) == []
        store.append('another', {}, chunk(1))
        assert len(learner.read('another')) == 1

    def test_appends_to_a_forgotten_stream_all_arrive(self):
        """By threads of one writer, as another process deletes the stream again and again."""
        store, learner = self.open(), self.open()
        counts, is_over = [0, 0], threading.Event()

        def write(which):
            while not is_over.is_set():
                store.append(f'{STREAM}-{which}', {}, chunk(counts[which]))
                counts[which] += 1
                store.client.own_writer.forget_deleted()

        threads = [threading.Thread(target=write, args=(which % 2,)) for which in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(50):
                learner.delete(f'{STREAM}-0')
        finally:
            is_over.set()
            for thread in threads:
                thread.join(WAIT_S)
        found = [number_of(entry) for entry in learner.read(f'{STREAM}-1', max_entries=100_000)]
        assert found == list(range(counts[1]))

    def test_files_of_streams_that_were_deleted_are_removed(self):
        store, learner = self.open('a'), self.open('a')
        for number in range(SPARE_STREAMS + 10):
            learner.register(f'goes-{number}', 'learner')
            for _ in range(2):  # The first one hears that the reader is here.
                store.append(f'goes-{number}', {}, chunk(number))
            entry = learner.read(f'goes-{number}')[-1]
            learner.ack(f'goes-{number}', 'learner', entry.id)
            learner.delete(f'goes-{number}')
        assert list(self.directory.rglob('*.ring'))
        store.client.own_writer.forget_deleted()
        store._tidied_at = 0.0
        store.append('lives', {}, chunk(0))
        assert set(streams_with_rings(store)) <= {'lives'}
        assert list(self.directory.rglob('*.ring')) == [], 'and the one that lives has no reader here'

    def test_requested_writers_are_forgotten_with_their_streams(self, monkeypatch):
        monkeypatch.setattr(transports, 'SPARE_ASKED', 5)
        store, near, far = self.open('a'), self.open('a'), self.open('b')
        for number in range(20):
            name = f'goes-{number}'
            near.register(name, 'near')
            for _ in range(2):  # The first one hears that the reader is here.
                store.append(name, {}, chunk(number))
            found = far.read(name, timeout_s=WAIT_S)
            if len(found) == 1:
                found += far.read(name, found[0].id, timeout_s=WAIT_S)
            assert [number_of(entry) for entry in found] == [number] * 2
            store.delete(name)
        assert 0 < len(far._streams._resolver._asked) <= 5 + 1
