"""The delivery protocol against a plain model: what is appended is seen once by every reader, whatever gets lost.

The server may forget everything or its newest changes, as it restarts or in one life, and any reply may be lost.
Writers live on, and the reader does, or is killed and goes on from what it had committed. The model says which entries
a durable reader must have seen when all has settled, and that nobody ever sees one twice.
"""

import contextlib
import itertools
import json
import math
import os

import pytest
import redis
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from needs import IS_LONG
from redis_cluster import RedisCluster
from redis_server import RedisServer

from ding_store.errors import AppendUnsettled, StoreTimeout, StoreUnavailable, StreamFull
from ding_store.storage.exactly_once import losses
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.memory.log import Log
from ding_store.storage.memory.store import Memory, MemoryStore
from ding_store.storage.redis import parts
from ding_store.storage.redis.groups import NUM_GROUPS, slot_of, tag_of
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.shards.placement import shard_of
from ding_store.storage.store import NO_HOST_CACHE
from ding_store.storage.testing import chunk, number_of

STREAM = 'experience'
LIMIT = 3000  # about eight entries

writers = st.integers(0, 1)


class Delivery(RuleBasedStateMachine):
    """Two writers and a durable reader; entries are numbered over all, so that the model is a list of numbers."""

    def open(self):
        raise NotImplementedError

    def forget_everything(self):
        raise NotImplementedError

    def snapshot(self):
        raise NotImplementedError

    def restore(self, snapshot):
        """In one life of the server."""
        raise NotImplementedError

    def lose_next_reply(self, store, before):
        raise NotImplementedError

    def lose_no_reply(self, store):
        raise NotImplementedError

    @initialize()
    def begin(self):
        self.stores = [self.open(), self.open()]
        self.readers_store = self.open()
        self.reader = Reader(self.readers_store, STREAM, 'learner')
        self.appended = []  # numbers whose append returned, or whose fate was called unknown, by writer
        self.seen = []
        self.writer_of = {}
        self.count = 0
        self.commit()
        self.save_to_disk()

    @rule(writer=writers)
    def append(self, writer):
        self._append(writer)

    @rule(writer=writers, before=st.booleans())
    def append_and_lose_the_reply(self, writer, before):
        self.lose_next_reply(self.stores[writer], before)
        self._append(writer)

    @rule(count=st.integers(1, 5))
    def read(self, count):
        self.seen += [number_of(entry) for entry in self.reader.read(count)]

    @rule(wait=st.booleans())
    def ack(self, wait):
        self.commit()
        self.reader.ack(wait=wait)

    @rule()
    def commit(self):
        self.committed = json.dumps({'marks': self.reader.marks, 'heads': self.reader.heads()}), len(self.seen)

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
        self.snapshots = [self.snapshot()]

    @rule()
    def go_back(self):
        self.restore(self.snapshots[-1])

    @rule(writer=writers, count=st.integers(1, 3), num_read=st.integers(0, 5), acks=st.booleans())
    def append_read_and_go_back(self, writer, count, num_read, acks):
        self.save_to_disk()
        for _ in range(count):
            self._append(writer)
        if num_read:
            self.read(num_read)
        if acks:
            self.ack(wait=True)
        self.go_back()

    @rule(writer=writers)
    def idle_writer_looks(self, writer):
        self.lose_no_reply(self.stores[writer])
        self.stores[writer].client.own_writer.check(now=True)

    @invariant()
    def nothing_is_seen_twice_or_out_of_order(self):
        if not hasattr(self, 'seen'):
            return
        assert len(self.seen) == len(set(self.seen))
        for writer in (0, 1):
            mine = [number for number in self.seen if self.writer_of[number] == writer]
            assert mine == sorted(mine)
        assert self.reader.num_lost == 0

    def teardown(self):
        if hasattr(self, 'seen'):
            self.flush()
            for store in (*self.stores, self.readers_store):
                store.close()

    def flush(self):
        """In the end everything is seen, and nobody holds a copy of anything."""
        for store in (*self.stores, self.readers_store):
            self.lose_no_reply(store)
            store.stream_info(STREAM)  # This finds the server. Checks of writers skip a stream whose server is away.
        for _ in range(len(self.appended) + 3):  # Entries that found no room come one by one.
            # Look at once, instead of within a second, whether the server went back to a time without this reader.
            self.reader.losses.looked_at = -math.inf
            for store in self.stores:
                store.client.own_writer.check(now=True)
            while self.reader.lag():
                self.seen += [number_of(entry) for entry in self.reader.read()]
            self.reader.ack()
        self.reader.losses.deadline = 0.0  # Who was to announce again has had his time.
        assert self.reader.read() == []
        self.nothing_is_seen_twice_or_out_of_order()
        assert sorted(self.seen) == sorted(self.appended)
        for store in self.stores:
            assert store.client.own_writer.num_unacked(STREAM) == 0
        stream = self.readers_store.stream_info(STREAM)
        assert stream is None or (stream.pending_bytes, stream.last - stream.floor) == (0, 0)

    def _append(self, writer):
        number, self.count = self.count, self.count + 1
        self.writer_of[number] = writer
        try:
            self.stores[writer].append(STREAM, {}, chunk(number, 4), timeout_s=0)
        except (StoreTimeout, StreamFull):
            return  # Nothing was appended.
        except StoreUnavailable:
            pass  # It is kept, and will be announced.
        self.appended.append(number)


class MemoryDelivery(Delivery):
    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def open(self, host=NO_HOST_CACHE):
        store = MemoryStore(memory=self.memory, max_pending_bytes=LIMIT, host=host)
        send_request = store.client.server.append

        def lossy(request):
            fault, store.fault = getattr(store, 'fault', None), None
            if fault == 'before':
                raise StoreUnavailable('request lost')
            reply = send_request(request)
            if fault == 'after':
                raise StoreUnavailable('reply lost')
            return reply

        store.client.server.append = lossy
        return store

    def forget_everything(self):
        self.readers_store.lose_memory()

    def lose_next_reply(self, store, before):
        store.fault = 'before' if before else 'after'

    def lose_no_reply(self, store):
        store.fault = None

    def snapshot(self):
        return self.readers_store.snapshot()

    def restore(self, snapshot):
        self.memory.go_back(snapshot)

    @rule()
    def lose_the_newest_changes(self):
        self.readers_store.lose_memory(keep=self.snapshots[-1])


class RedisDelivery(Delivery):
    """The same on a real server; a lost reply is a connection that the server closes."""

    server: RedisServer
    runs = 0
    num_lost = 0

    def __init__(self):
        super().__init__()
        RedisDelivery.runs += 1
        self.run = f'run{os.getpid()}-{RedisDelivery.runs}'
        self.client = self.server.client()

    def open(self):
        return RedisStore(self.server.url, self.run, max_pending_bytes=LIMIT)

    def forget_everything(self):
        self.client.flushall()

    def snapshot(self):
        return {key: self.client.dump(key) for key in self.client.scan_iter()}

    def restore(self, snapshot):
        with self.client.pipeline() as pipe:
            pipe.flushall()
            for key, dumped in snapshot.items():
                pipe.restore(key, 0, dumped)
            pipe.execute()

    def session_of(self, store):
        return store.client.server.connection._session

    def lose_next_reply(self, store, before):
        session = self.session_of(store)
        if session is None:
            return
        self.lose_no_reply(store)
        run = session.run

        def lossy(*arguments, **options):
            self.lose_no_reply(store)
            if not before:
                run(*arguments, **options)
            self.client.client_kill_filter(_type='normal', skipme=True)
            RedisDelivery.num_lost += 1
            raise redis.ConnectionError('the request, or its reply, is lost')

        vars(session)['run'] = lossy

    def lose_no_reply(self, store):
        session = self.session_of(store)
        if session is not None:
            vars(session).pop('run', None)

    def teardown(self):
        super().teardown()
        self.client.close()


class ShardedDelivery(RedisDelivery):
    """The same on two servers. The other one has no part of the stream, and loses its memory as well."""

    other: RedisServer

    def __init__(self):
        super().__init__()
        self.other_client = self.other.client()
        self.num_other = 0

    def open(self):
        servers = self.server.url, self.other.url
        assert shard_of(STREAM, 2) == 1
        return RedisStore(' '.join(reversed(servers)), self.run, max_pending_bytes=LIMIT)

    def session_of(self, store):
        return store.client.server.availability_of(STREAM)._session

    @rule()
    def lose_everything_of_the_other(self):
        self.other_client.flushall()

    @rule(writer=writers)
    def lose_connections_to_the_other(self, writer):
        self.other_client.client_kill_filter(_type='normal', skipme=True)
        self.stores[writer].add('finish', 1)
        assert shard_of('finish', 2) == 0

    @rule(writer=writers)
    def append_to_the_other(self, writer):
        with contextlib.suppress(StoreTimeout):  # no reader makes room
            self.stores[writer].append('finish', {}, chunk(self.num_other, 4), timeout_s=0)
        self.num_other += 1

    def teardown(self):
        super().teardown()
        self.other_client.close()


class ClusterDelivery(RedisDelivery):
    """
    The same in a cluster. Any call may come when the stream's slot is on its way to another node. It goes key by key:
    some of the stream's keys and parts are here and some there, and no node runs a script.
    """

    cluster: RedisCluster
    num_moves = 0

    def __init__(self):
        super().__init__()
        self.client.close()
        self.slot = slot_of(tag_of(self.run, shard_of(STREAM, NUM_GROUPS)))
        self.moving = None

    def open(self):
        return RedisStore(self.cluster.url(), self.run, max_pending_bytes=4 * LIMIT)

    def session_of(self, store):
        self.client = self.cluster.node_of(self.slot).client
        return store.client.server.availability_of(STREAM)._session

    def forget_everything(self):
        self.cluster.flush()

    def snapshot(self):
        self.arrive()
        pattern = f'ding:{{{tag_of(self.run, shard_of(STREAM, NUM_GROUPS))}}}*'
        node = self.cluster.node_of(self.slot).raw
        return {key: (node.dump(key), max(0, node.pttl(key))) for key in node.scan_iter(pattern, count=1000)}

    def restore(self, snapshot):
        self.arrive()
        node = self.cluster.node_of(self.slot).raw
        node.flushall()
        for key, (dumped, life_ms) in snapshot.items():
            node.restore(key, life_ms, dumped)

    @rule(count=st.integers(0, 12))
    def move_some_keys(self, count):
        """Begin to move the slot, or move more of its keys. Calls that need them wait, or raise StoreUnavailable."""
        if self.moving is None:
            nodes = self.cluster.nodes_with_slots()
            source = self.cluster.node_of(self.slot)
            self.moving = self.cluster.moving(self.slot, nodes[(nodes.index(source) + 1) % len(nodes)])
            next(self.moving)
            self.waits = contextlib.ExitStack()
            for store in (*self.stores, self.readers_store):
                self.waits.enter_context(store.nonblocking())
        for _ in range(count):
            if next(self.moving, None) is None:
                self.arrive()
                return

    @rule()
    def arrive(self):
        """Move the rest. From now on the other node has the slot."""
        if self.moving is None:
            return
        for _ in self.moving:
            pass
        self.moving = None
        self.waits.close()
        ClusterDelivery.num_moves += 1

    @rule(writer=writers, counts=st.tuples(*[st.integers(0, 4)] * 4), wait=st.booleans())
    def append_read_and_ack_on_the_way(self, writer, counts, wait):
        steps = (lambda: self._append(writer), lambda: self.read(5), lambda: self.ack(wait), lambda: self._append(0))
        for count, step in zip(counts, steps):
            self.move_some_keys(count)
            step()
        self.arrive()

    def during(self):
        return contextlib.suppress(*((StoreUnavailable,) if self.moving is not None else ()))

    @rule(count=st.integers(1, 5))
    def read(self, count):
        with self.during():
            super().read(count)

    @rule(wait=st.booleans())
    def ack(self, wait):
        with self.during():
            super().ack(wait)

    @rule()
    def kill_the_reader(self):
        self.arrive()  # A reader begins with a call that waits.
        super().kill_the_reader()

    @rule(writer=writers)
    def idle_writer_looks(self, writer):
        with self.during():
            super().idle_writer_looks(writer)

    def flush(self):
        self.arrive()
        super().flush()

    def _append(self, writer):
        number, self.count = self.count, self.count + 1
        self.writer_of[number] = writer
        is_large = number % 3 == 0
        try:
            self.stores[writer].append(STREAM, {}, chunk(number, 200 if is_large else 4), timeout_s=0)
        except (StoreTimeout, StreamFull):
            return
        except AppendUnsettled:
            pass
        self.appended.append(number)


def test_delivery_in_memory_equals_a_model():
    run_state_machine_as_test(
        MemoryDelivery, settings=settings(max_examples=400 if IS_LONG else 150, stateful_step_count=40, deadline=None)
    )


def test_delivery_on_redis_equals_a_model(redis_server):
    check_on_redis(RedisDelivery, redis_server, num_examples=40 if IS_LONG else 8)


def test_delivery_on_two_servers_equals_a_model(redis_server, forgetful_server):
    ShardedDelivery.other = forgetful_server
    check_on_redis(ShardedDelivery, redis_server, num_examples=40 if IS_LONG else 6)


def test_delivery_in_a_cluster_equals_a_model(redis_server, redis_cluster, monkeypatch):
    monkeypatch.setattr(parts, 'INLINE_BYTES', 1000)
    monkeypatch.setattr(parts, 'PART_BYTES', 400)
    RedisDelivery.server, ClusterDelivery.cluster, ClusterDelivery.num_moves = redis_server, redis_cluster, 0
    machine = ClusterDelivery()
    machine.begin()
    for writer, wait in itertools.product((0, 1), (False, True)):
        machine.append_read_and_ack_on_the_way(writer, (1, 2, 4, 3), wait)
    machine.teardown()
    assert ClusterDelivery.num_moves >= 4
    run_state_machine_as_test(
        ClusterDelivery,
        settings=settings(
            max_examples=40 if IS_LONG else 5, stateful_step_count=30, deadline=None, phases=[Phase.generate]
        ),
    )


def check_on_redis(machine, server, num_examples):
    RedisDelivery.server, RedisDelivery.num_lost = server, 0
    for _ in range(5):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=num_examples, stateful_step_count=30, deadline=None, phases=[Phase.generate]
            ),
        )
        if RedisDelivery.num_lost > num_examples // 2:  # which is drawn: mostly in one round
            break
    assert RedisDelivery.num_lost > num_examples // 2


class MistakenDelivery(MemoryDelivery):
    """With a deliberate mistake: no client tells the server of what that had and has no more."""

    def open(self):
        store = super().open()
        send_request = store.client.server.append
        store.client.server.append = lambda request: send_request(request._replace(last_reply=''))
        return store


def reuse_numbers(machine, how):
    """The newest entries are read, then forgotten; their numbers go to entries of the other writer."""
    machine.begin()
    machine.append(0)
    machine.save_to_disk()
    machine.append(0)
    machine.append(0)
    machine.read(5)
    getattr(machine, how)()
    machine.append(1)
    machine.append(1)
    machine.read(5)
    machine.flush()


@pytest.mark.parametrize('fault', ['before', 'after'])
def test_append_without_a_reply_arrives_once(fault):
    with MemoryDelivery().open() as store:
        store.append(STREAM, {}, chunk(0))
        store.fault = fault
        with pytest.raises(AppendUnsettled):
            store.append(STREAM, {}, chunk(1))
        store.append(STREAM, {}, chunk(2))
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1, 2]


@pytest.mark.parametrize('how', ['lose_the_newest_changes', 'go_back'])
def test_older_server_begins_a_new_epoch(how):
    reuse_numbers(MemoryDelivery(), how)


def test_older_redis_begins_a_new_epoch(redis_server):
    RedisDelivery.server = redis_server
    reuse_numbers(RedisDelivery(), 'go_back')


def test_delivery_model_finds_writers_that_send_no_place(monkeypatch):
    monkeypatch.setattr(Log, '_has', lambda self, place: True)
    with pytest.raises(AssertionError):
        reuse_numbers(MistakenDelivery(), 'go_back')


def test_restarted_reader_that_acks_late_counts_no_loss():
    """A learner was killed between the commit of its rows and the ack: its next life acks, and then reads."""
    store = MemoryStore()
    Reader(store, STREAM, 'learner')
    entries = [store.append(STREAM, {}, chunk(number)) for number in range(3)]
    marks = {entry.writer: entry.sequence for entry in Reader(store, STREAM, 'another').read(2)}
    learner = Reader(store, STREAM, 'learner', marks=marks)
    store.forget(STREAM, 'another')
    learner.ack(entries[1])
    assert [number_of(entry) for entry in learner.read()] == [2]
    assert (learner.num_lost, learner.num_duplicates) == (0, 0)


def test_entries_acked_before_a_server_crash_are_not_lost():
    """The restored server remembers our ack, and lets go of the entry while we read the new epoch from its oldest."""
    memory = Memory()
    writer, store = MemoryStore(memory=memory), MemoryStore(memory=memory)
    learner, far = Reader(store, STREAM, 'learner'), Reader(store, STREAM, 'far')
    writer.append(STREAM, {}, chunk(0))
    writer.append(STREAM, {}, chunk(1))
    assert len(learner.read()) == 2
    learner.ack()
    snapshot = store.snapshot()
    writer.append(STREAM, {}, chunk(2))
    store.lose_memory(keep=snapshot)
    assert learner.read(1) == []
    writer.client.own_writer.check(now=True)
    assert [number_of(entry) for entry in far.read()] == [0, 1, 2]
    far.ack()
    assert [number_of(entry) for entry in learner.read()] == [2]
    assert (learner.num_lost, far.num_lost) == (0, 0)


def test_reader_restarted_with_start_now_continues_at_its_ack():
    """Whoever starts it again says 'now' again: that is for readers that are new."""
    with MemoryStore() as store:
        store.append(STREAM, {}, chunk(0))
        reader = Reader(store, STREAM, 'viewer', start='now')
        for number in range(1, 4):
            store.append(STREAM, {}, chunk(number))
        assert [number_of(entry) for entry in reader.read(1)] == [1]
        reader.ack()
        again = Reader(store, STREAM, 'viewer', start='now')
        assert [number_of(entry) for entry in again.read()] == [2, 3]
        assert (again.num_lost, again.num_duplicates) == (0, 0)


@pytest.mark.parametrize('is_read', [False, True])
def test_reader_forgotten_while_alive_is_registered_again(monkeypatch, caplog, is_read):
    """
    Else its acks would make no room: writers would wait for ever for a learner that an operator took for dead. What it
    had not read by then was given up, and it says so.
    """
    monkeypatch.setattr(losses, 'LOOK_EVERY_S', 0.0)
    with MemoryStore(max_pending_bytes=LIMIT) as store, store.another() as other:
        reader, count = Reader(other, STREAM, 'learner'), 0
        while True:
            try:
                store.append(STREAM, {}, chunk(count), timeout_s=0.0)
            except StoreTimeout:
                break
            count += 1
        seen = [number_of(entry) for entry in reader.read(count - 1)]
        assert store.forget(STREAM, 'learner')
        if is_read:
            seen += [number_of(entry) for entry in reader.read()]
        reader.ack()
        seen += [number_of(entry) for entry in reader.read()]
        reader.ack()
        store.append(STREAM, {}, chunk(count), timeout_s=0.0)
        seen += [number_of(entry) for entry in reader.read()]
        assert seen == [*range(count - 1), count]
        assert (reader.num_lost, reader.num_duplicates) == (1, 0)
        assert caplog.text.count('was removed while it runs') == 1
        reader.forget()
        reader.read()
        assert store.stream_info(STREAM).readers == {}, 'who leaves stays away'
