"""The host plane: payloads in mmap files, and the way to the wire plane and back, without a loss or a repetition."""

import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from forks import child
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from inside import cache_of, rings_of, streams_with_rings, without_keeper
from needs import IS_LONG
from test_delivery import STREAM, MemoryDelivery

from ding_store.compiled import MIN_BYTES, load_for
from ding_store.errors import ConfigError, CorruptPayload, ServerFull, StoreUnavailable, StreamFull
from ding_store.storage import open_store, protocol
from ding_store.storage import store as store_module
from ding_store.storage.exactly_once.outbox import Outbox
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.memory.log import Log
from ding_store.storage.memory.server import MemoryServer
from ding_store.storage.memory.store import Memory, MemoryStore
from ding_store.storage.options import HostOptions, RedisOptions
from ding_store.storage.protocol import FreedCapacity
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.shared_memory import rings, shared_values, transports
from ding_store.storage.shared_memory.mapped_files import PAGE
from ding_store.storage.shared_memory.transports import Reference, is_reference
from ding_store.storage.shared_memory.value_slots import ValueSlots
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

_RUNS = (f'run{number}' for number in itertools.count())


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch):
    """And slots for all values, however small."""
    monkeypatch.setattr(rings, 'FIRST_BYTES', 16 * PAGE)
    monkeypatch.setattr(shared_values, 'SLOTS_FROM_BYTES', 0)


def quiet(store):
    """Return the store, which gets no thread of its own: what happens is up to the state machine."""
    return without_keeper(store)


class Planes(MemoryDelivery):
    """
    The delivery machine, with writers and the learner on one host, and other durable readers that join from elsewhere
    and leave again: each sees once, in order, what was appended from its beginning to its end.
    """

    directories = ()

    @initialize()
    def nobody_else(self):
        self.is_restored = False
        self.far = None  # (reader, its store, what it has seen, what it must see in the end)

    def open(self, directory=0):
        store = super().open(HostOptions(host_cache_dir=self.directories[directory]))
        store.fault = None
        fill = store.client.server.backfill

        def lossy(said):
            fault, store.fault = store.fault, None
            if fault == 'before':
                raise StoreUnavailable('request lost')
            fill(said)
            if fault == 'after':
                raise StoreUnavailable('reply lost')

        store.client.server.backfill = lossy
        return quiet(store)

    @precondition(lambda self: self.far is None)
    @rule(has_a_cache=st.booleans(), start=st.sampled_from(['now', 'oldest']))
    def join(self, has_a_cache, start):
        store = self.open(directory=1) if has_a_cache else MemoryStore(memory=self.memory)
        # What an older snapshot brought back may have been acked by all long ago: nobody has its payload any more.
        is_old = start == 'oldest' and not self.is_restored
        held = self.readers_store.read(STREAM, max_entries=1000) if is_old else []
        reader = Reader(store, STREAM, 'far', start=start)
        self.far = (reader, store, [], {number_of(entry) for entry in held}, self.count)

    @precondition(lambda self: self.far is not None)
    @rule(count=st.integers(1, 5))
    def far_reads(self, count):
        reader, _, seen, *_ = self.far
        seen += [number_of(entry) for entry in reader.read(count)]
        if count > 2:
            reader.ack()
        self.check_far()

    @precondition(lambda self: self.far is not None)
    @rule()
    def leave(self):
        self.finish_far()

    @rule()
    def lose_everything(self):
        super().lose_everything()
        self.readers_return()

    @rule()
    def lose_the_newest_changes(self):
        super().lose_the_newest_changes()
        self.is_restored |= bool(self.snapshots)
        self.readers_return()

    @rule()
    def go_back(self):
        super().go_back()
        self.is_restored = True
        self.readers_return()

    def readers_return(self):
        """Before one acks what the other has not seen: a server that forgot the readers cannot wait for them."""
        for reader in (self.reader, *(self.far[:1] if self.far else ())):
            reader.store.register(STREAM, reader.name)
        if not self.far:
            self.readers_store.forget(STREAM, 'far')  # A snapshot may bring one back that is gone for good.

    def check_far(self):
        reader, _, seen, *_ = self.far
        assert len(seen) == len(set(seen))
        assert reader.num_lost == 0 or self.is_restored
        for writer in (0, 1):
            mine = [number for number in seen if self.writer_of[number] == writer]
            assert mine == sorted(mine)

    def finish_far(self):
        """All that is there can be read, with the writers' help."""
        reader, store, seen, held, count = self.far
        for _ in range(len(self.appended) + 3):
            for one in self.stores:
                self.lose_no_reply(one)
                one.client.own_writer.check_stream(
                    STREAM
                )  # as the keeper does, which also tells what is no longer held
            seen += [number_of(entry) for entry in reader.read()]
            reader.ack()
            self.seen += [number_of(entry) for entry in self.reader.read()]
            self.ack(wait=True)  # There is room for what never found any.
        self.check_far()
        assert held | {number for number in self.appended if number >= count} <= set(seen)
        assert reader.lag() == 0
        reader.forget()
        store.close()
        self.far = None

    def flush(self):
        if getattr(self, 'far', None) is not None:
            self.finish_far()
        super().flush()
        for store in self.stores:
            for stream in streams_with_rings(store):
                assert all(ring.num_held == 0 for ring in rings_of(store, stream))


@pytest.fixture
def run_planes(tmp_path, monkeypatch):
    monkeypatch.setattr(rings, 'FIRST_BYTES', PAGE)
    # Nobody complains: the planes alone must see to it that everything arrives.
    monkeypatch.setattr(MemoryServer, 'request_backfills', lambda self, stream: None)

    def run(kind, **options):
        kind.directories = [str(tmp_path / 'a'), str(tmp_path / 'b')]
        run_state_machine_as_test(kind, settings=settings(stateful_step_count=50, deadline=None, **options))

    return run


def test_planes_switch_without_loss_or_repetition(run_planes):
    run_planes(Planes, max_examples=150 if IS_LONG else 60)


class CarelessLog(Log):
    """With a deliberate mistake: it takes references of a plane that is no more."""

    def handle_request(self, writer, said):
        return super().handle_request(writer, said._replace(transport=self.transport))


class CarelessMemory(Memory):
    def log(self, stream):
        log = super().log(stream)
        log.__class__ = CarelessLog
        return log


class Stale(Planes):
    go_back = append_read_and_go_back = None  # No rules: what they bring back hides the mistake.

    def __init__(self):
        super().__init__()
        self.memory = CarelessMemory()


def test_planes_model_finds_stale_references(run_planes):
    with pytest.raises(AssertionError):
        run_planes(Stale, max_examples=500, database=None, phases=[Phase.generate])


@pytest.fixture
def opened(redis_server, tmp_path):
    """Open stores of one run; each ``host`` is a directory of its own."""
    run, stores = f'planes-{os.getpid()}-{next(_RUNS)}', []

    def open_one(host='a', **options):
        stores.append(open_store(redis_server.url, run, host_cache_dir=str(tmp_path / host), **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def plane_of(entries):
    return ''.join('wire' if entry.guard is None else 'host' for entry in entries[:1])


def files(store):
    return [name for name in os.listdir(os.path.dirname(cache_of(store).path_of('x'))) if name.endswith('.ring')]


def test_transport_follows_the_hosts_of_the_readers(opened):
    writer, near, far = opened(), opened(), opened('b')
    writer.append('s', {}, chunk(0))
    assert plane_of(near.read('s')) == 'wire'  # Nobody is known yet.
    reader = Reader(near, 's', 'near')
    for number, (change, transport) in enumerate(
        [
            (lambda: None, 'host'),
            (lambda: far.register('s', 'far'), 'wire'),
            (lambda: far.forget('s', 'far'), 'host'),
            (lambda: far.register('s', 'viewer', durable=False), 'wire'),
            (lambda: far.forget('s', 'viewer'), 'host'),
        ]
    ):
        change()
        # The first one may be on its way already: it learns of the change, the second one follows it.
        writer.append('s', {}, chunk(number))
        reader.read()
        writer.append('s', {}, chunk(number))
        (entry,) = reader.read()
        assert (plane_of([entry]), number_of(entry), entry.validate()) == (transport, number, True)


def test_reader_on_another_host_gets_earlier_entries(opened):
    writer, near, far = opened(), opened(), opened('b')
    Reader(near, 's', 'near')
    for number in range(20):
        writer.append('s', {}, chunk(number))
    reader, seen = Reader(far, 's', 'far'), []
    while len(seen) < 20:  # The writer does nothing meanwhile: its keeper fills.
        entries = reader.read(timeout_s=WAIT_S)
        assert entries
        seen += map(number_of, entries)
    assert seen == list(range(20))
    # Nobody registered, nothing to map, and no thread of its own.
    with RedisStore(writer._url, writer.run) as plain:
        assert [number_of(entry) for entry in plain.read('s')] == list(range(20))


@pytest.mark.parametrize('what', ['entries', 'values'])
def test_backfill_without_memory_is_sent_later(opened, monkeypatch, what):
    writer, near, far = opened(), opened(), opened('b')
    kind, name = (Outbox, 'backfill') if what == 'entries' else (ValueSlots, 'backfill')
    fill, errors = getattr(kind, name), [MemoryError()]

    def failing(self, *arguments):
        if errors:
            raise errors.pop()
        return fill(self, *arguments)

    monkeypatch.setattr(kind, name, failing)
    if what == 'entries':
        Reader(near, 's', 'near')
        for number in range(3):
            writer.append('s', {}, chunk(number))
        reader, seen = Reader(far, 's', 'far'), []
        while len(seen) < 3:
            entries = reader.read(timeout_s=WAIT_S)
            assert entries
            seen += map(number_of, entries)
        assert (seen, reader.num_lost) == ([0, 1, 2], 0)
    else:
        writer.put('weights', {}, chunk(1, size=100_000))
        assert near.get('weights').arrays['x'][0] == 1
        assert far.get('weights', timeout_s=WAIT_S).arrays['x'][0] == 1
    assert errors == []


def test_append_that_waits_for_room_backfills(opened):
    """The learner comes back on another host, and there is no room before it has read what is only in files."""
    writer, near, far = opened(max_pending_bytes=100_000, host_cache_bytes=20 * PAGE), opened(), opened('b')
    near.register('s', 'learner')
    near.ack('s', 'learner', writer.append('s', {}, chunk(0)))  # It went over the wire.

    def write():
        for number in range(1, 20):
            writer.append('s', {}, chunk(number, size=1000), timeout_s=WAIT_S)

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        eventually(lambda: writer.client.own_writer.stream_writer('s').outbox.sequence == 14, 'the stream is full')
        reader, seen = Reader(far, 's', 'learner'), []
        while len(seen) < 19:
            entries = reader.read(timeout_s=WAIT_S)
            assert entries
            seen += map(number_of, entries)
            reader.ack()
        writing.result(WAIT_S)
    assert (seen, reader.num_lost) == (list(range(1, 20)), 0)


def test_closed_writer_leaves_its_entries_and_no_files(opened):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'near')
    for number in range(5):
        writer.append('s', {}, chunk(number))
    assert len(files(writer)) == 1
    writer.close()
    assert files(near) == []
    assert [number_of(entry) for entry in reader.read()] == [0, 1, 2, 3, 4]
    assert [number_of(entry) for entry in Reader(opened('b'), 's', 'far').read()] == [0, 1, 2, 3, 4]


def test_rings_grow_and_shrink(opened):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'near')
    writer.append('s', {}, chunk(0))
    for number in range(1, 200):
        writer.append('s', {}, chunk(number, size=1000))
    assert len(files(writer)) > 1  # About 1.6 MB in rings that begin with 64 KiB.
    assert [number_of(entry) for entry in reader.read(500)] == list(range(200))
    reader.ack()
    writer.append('s', {}, chunk(200))
    assert len(files(writer)) == 1


def test_ring_stays_small_while_its_reader_keeps_up(opened, monkeypatch):
    """Also when the writer is faster: it waits for room before it takes more."""
    monkeypatch.setattr(rings, 'PATIENCE_S', WAIT_S)
    writer, near = opened(), opened()
    # What asks now and then:
    without_keeper(writer)
    monkeypatch.setattr(writer.client.own_writer, '_checked_at', float('inf'))
    reader = Reader(near, 's', 'near')
    writer.append('s', {}, chunk(0))  # over the wire: it did not know its readers
    writer.append('s', {}, chunk(1, size=1000))
    (first,) = files(writer)
    outbox = writer.client.own_writer.stream_writer('s').outbox
    send_request, asked, is_waiting = outbox.send_request, [], threading.Event()
    wait_for_capacity = writer.client.own_writer._wait_for_capacity

    def announced(said):
        asked.extend([said] * (said.sequence == 0))
        return send_request(said)

    def waited(*arguments):
        is_waiting.set()
        return wait_for_capacity(*arguments)

    monkeypatch.setattr(outbox, 'send_request', announced)
    monkeypatch.setattr(writer.client.own_writer, '_wait_for_capacity', waited)
    with ThreadPoolExecutor() as pool:
        appends = pool.submit(lambda: [writer.append('s', {}, chunk(number, size=1000)) for number in range(2, 200)])
        assert is_waiting.wait(WAIT_S)
        (entry,) = reader.read(1)
        reader.ack()
        seen = [number_of(entry)]
        while len(seen) < 200:
            entries = reader.read(4, timeout_s=WAIT_S)
            seen += map(number_of, entries)
            assert {plane_of([entry]) for entry in entries} == {'host'}
            reader.ack()
        appends.result(WAIT_S)
    assert seen == list(range(200))
    assert files(writer) == [first]
    assert asked == []  # It was told what had made room.


def test_entry_is_released_only_by_acks_of_its_epoch(opened, monkeypatch):
    writer, near = opened(), opened()
    without_keeper(writer)
    reader = Reader(near, 's', 'near')
    writer.append('s', {}, chunk(0))
    place = writer.append('s', {}, chunk(1))
    outbox = writer.client.own_writer.stream_writer('s').outbox
    (ring,) = rings_of(writer)
    assert not outbox.on_freed(FreedCapacity(1000, 'another', 1000))
    assert not outbox.on_freed(FreedCapacity(outbox.freed, place.epoch, 0))
    assert (len(outbox), ring.num_held) == (2, 1)
    reader.read()
    reader.ack()
    assert outbox.on_freed(writer.client.server.wait_for_capacity('s', outbox.freed, 4.0))
    assert (len(outbox), ring.num_held) == (0, 0)


@pytest.mark.parametrize('is_new', [False, True])
@pytest.mark.parametrize('what', ['entry', 'entry like ours', 'string'])
def test_foreign_news_of_acks_and_transports_is_ignored(opened, redis_server, monkeypatch, what, is_new):
    """It is news to nobody twice, and in nobody's way, under an id that the server's clock gave, too."""
    writer, near = opened(), opened()
    without_keeper(writer)
    reader = None if is_new else Reader(near, 's', 'near')
    for number in range(2):
        writer.append('s', {}, chunk(number))
    outbox = writer.client.own_writer.stream_writer('s').outbox
    told = {'planes': outbox.transport, 'room': outbox.freed}
    with redis_server.client() as client:

        def write(part):
            key = writer.client.server.keys.of('s', part)
            client.delete(key)
            like_ours = {'room': {'e': outbox.epoch, 'f': outbox.sequence}, 'planes': {'h': 'x'}}
            fields = like_ours[part] if what == 'entry like ours' else {'r': ''}
            return client.set(key, 'x') if what == 'string' else client.xadd(key, fields)

        def is_put_right(part):
            entries = client.xrange(writer.client.server.keys.of('s', part))
            return [redis_id for redis_id, _ in entries] == [f'{told[part]}-0'.encode()] * (told[part] > 0)

        write('planes')
        writer.client.server.wait_for_transports({'s': outbox.transport}, 4.0)
        assert is_put_right('planes')
        write('room')
        assert writer.client.server.wait_for_capacity('s', outbox.freed, 4.0) is None
        assert is_put_right('room')
        if is_new:
            return
        for part in told:
            write(part)
        writer.client.own_writer.ask_for_acks('s', WAIT_S)
        assert len(outbox) == 2
        assert [number_of(entry) for entry in reader.read()] == [0, 1]
        for part in told:
            write(part)
        reader.ack()  # which says it anew, under a number that no clock gave
        writer.client.own_writer.ask_for_acks('s', WAIT_S)
        assert len(outbox) == 0
        opened('b').register('s', 'far')  # and so does a change of planes
        writer.client.server.wait_for_transports({'s': told['planes']}, 4.0)
        told['planes'] += 1
        assert is_put_right('planes')


def test_foreign_news_of_an_unknown_stream_is_removed(opened, redis_server):
    writer = opened()
    with redis_server.client() as client:
        key = writer.client.server.keys.of('s', 'planes')
        client.xadd(key, {'h': 'x', 'i': 'y'})
        writer.client.server.wait_for_transports({'s': 0}, 4.0)
        assert not client.keys(f'*{writer.run}/s/0*')


@pytest.mark.parametrize('what', ['append', 'enter'])
def test_append_that_fails_leaves_no_hole_in_the_ring(opened, what):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'near')
    writer.append('s', {}, chunk(0))  # over the wire: it did not know its readers
    writer.append('s', {}, chunk(1))
    (ring,) = rings_of(writer)
    owner = writer.client.own_writer if what == 'append' else writer.client
    original = getattr(owner, what)

    def failing(*arguments, **options):
        if ring.num_held > 1:
            raise StreamFull('on purpose')
        return original(*arguments, **options)

    setattr(owner, what, failing)
    with pytest.raises(StreamFull):
        writer.append('s', {}, chunk(2))
    delattr(owner, what)
    assert [number_of(entry) for entry in reader.read()] == [0, 1]
    reader.ack()
    writer.client.own_writer.check_stream('s')
    assert ring.num_held == 0


@pytest.mark.parametrize('where', ['commit', 'reference', 'keeper'])
def test_append_interrupted_leaves_no_hole_in_the_ring(opened, monkeypatch, where):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'near')
    for number in range(2):
        writer.append('s', {}, chunk(number))
    (ring,) = rings_of(writer)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        owner, name = {
            'commit': (ring, 'commit'),
            'reference': (Reference, 'pack'),
            'keeper': (writer._streams, '_start_keeper'),
        }[where]
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.append('s', {}, chunk(7))
    writer.append('s', {}, chunk(2))
    assert [number_of(entry) for entry in reader.read()] == [0, 1, 2]
    reader.ack()
    writer.client.own_writer.check_stream('s')
    assert ring.num_held == 0


def test_acks_are_processed_while_a_ring_is_created(opened, monkeypatch):
    """Another process may hold the lock of the cache for long; reports and reads of this one must not wait with it."""
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'near')
    for number in range(2):
        writer.append('s', {}, chunk(number))
    (ring,) = rings_of(writer)
    create_ring, is_waiting, may_go_on = cache_of(writer).create_ring, threading.Event(), threading.Event()

    def slowly(*arguments):
        is_waiting.set()
        assert may_go_on.wait(WAIT_S)
        return create_ring(*arguments)

    monkeypatch.setattr(cache_of(writer), 'create_ring', slowly)
    with ThreadPoolExecutor() as pool:
        appending = pool.submit(writer.append, 's', {}, chunk(2, size=100_000))
        try:
            assert is_waiting.wait(WAIT_S)
            assert [number_of(entry) for entry in reader.read()] == [0, 1]
            reader.ack()
            pool.submit(writer.client.own_writer.check_stream, 's', WAIT_S).result(WAIT_S / 2)
            assert ring.num_held == 0
        finally:
            may_go_on.set()
        appending.result(WAIT_S)
    assert plane_of(reader.read()) == 'host'


def test_append_succeeds_though_a_backfill_has_no_memory(opened, monkeypatch):
    writer, near, far = opened(), opened(), opened('b')
    without_keeper(writer)  # which would fill
    Reader(near, 's', 'near')
    writer.append('s', {}, chunk(0))  # over the wire
    writer.append('s', {}, chunk(1))
    reader, outbox = Reader(far, 's', 'far'), writer.client.own_writer.stream_writer('s').outbox
    with monkeypatch.context() as patch:

        def no_memory(said):
            raise ServerFull('on purpose')

        patch.setattr(outbox, '_backfill', no_memory)
        assert writer.append('s', {}, chunk(2)).number == 3
    writer.append('s', {}, chunk(3))
    assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [0, 1, 2, 3]


def test_payload_without_ring_space_is_sent_over_the_wire(opened, caplog):
    writer, near = opened(host_cache_bytes=20 * PAGE), opened()
    reader = Reader(near, 's', 'near')
    for number in range(40):
        writer.append('s', {}, chunk(number, size=1000))
    entries = reader.read()
    assert [number_of(entry) for entry in entries] == list(range(40))
    assert {plane_of([entry]) for entry in entries} == {'host', 'wire'}
    assert len([record for record in caplog.records if 'go through Redis' in record.message]) == 1


def test_payload_without_a_directory_is_sent_over_the_wire(opened, tmp_path, caplog):
    (tmp_path / 'file').write_text('')
    writer = opened('file')
    assert writer.host == ''
    assert 'no host cache' in caplog.text
    reader = Reader(opened(), 's', 'near')
    for number in range(2):
        writer.append('s', {}, chunk(number))
    entries = reader.read()
    assert ([number_of(entry) for entry in entries], plane_of(entries)) == ([0, 1], 'wire')


def test_cache_directory_deleted_is_replaced_by_the_wire(opened, tmp_path, caplog):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'near')
    for number in range(3):
        writer.append('s', {}, chunk(number))
    shutil.rmtree(tmp_path / 'a')
    seen = list(map(number_of, reader.read(timeout_s=WAIT_S)))
    writer.append('s', {}, chunk(3))
    while len(seen) < 4:
        entries = reader.read(timeout_s=WAIT_S)
        assert entries, seen
        seen += map(number_of, entries)
    assert (seen, reader.num_lost) == ([0, 1, 2, 3], 0)
    assert 'was deleted' in caplog.text


def test_cache_directory_deleted_without_a_server_loses_nothing(opened, tmp_path, monkeypatch):
    """It hears of it later, and what comes from then on goes over the wire by itself."""
    writer, near = opened(), opened()
    reader, other = Reader(near, 's', 'near'), Reader(near, 'other', 'near')
    for number in range(2):
        writer.append('s', {}, chunk(number))
        writer.append('other', {}, chunk(number))
    shutil.rmtree(tmp_path / 'a')
    register, errors = near.client.server.register_reader, [StoreUnavailable('away')]

    def registering(*arguments):
        if errors:
            raise errors.pop()
        return register(*arguments)

    monkeypatch.setattr(near.client.server, 'register_reader', registering)
    with pytest.raises(StoreUnavailable):
        reader.read(timeout_s=WAIT_S)
    for one in (reader, other):
        seen = []
        while len(seen) < 2:
            seen += map(number_of, one.read(timeout_s=WAIT_S))
        assert (seen, one.num_lost) == ([0, 1], 0)
    assert [near.stream_info(stream).host for stream in ('s', 'other')] == ['', '']


def test_drop_oldest_invalidates_views(opened):
    writer, near = opened(max_pending_bytes=60_000, overflow='drop_oldest'), opened()
    reader = Reader(near, 's', 'near')
    for number in range(3):
        writer.append('s', {}, chunk(number, size=1000))
    entries = reader.read()
    assert all(entry.validate() for entry in entries)
    for number in range(3, 60):
        writer.append('s', {}, chunk(number, size=1000))
    (late,) = [entry for entry in entries if plane_of([entry]) == 'host'][:1]
    assert not late.validate()
    after = [number_of(entry) for entry in reader.read()]
    assert after[-1] == 59
    assert reader.num_lost == 60 - 3 - len(after) > 0


def test_entries_dropped_before_their_copy_are_lost(opened):
    writer, near = opened(max_pending_bytes=60_000, overflow='drop_oldest'), opened()
    reader, read = Reader(near, 's', 'near', copied=True), near.read

    def write(numbers):
        for number in numbers:
            writer.append('s', {}, chunk(number, size=1000))

    def overtaken(*arguments):
        entries = read(*arguments)
        write(range(6, 60))
        return entries

    write(range(6))
    near.read = overtaken
    assert [number_of(entry) for entry in reader.read()] == [0]  # It came over the wire.
    assert reader.num_lost == 5
    near.read = read
    held = reader.read()
    write(range(60, 70))
    numbers = list(map(number_of, held))
    assert numbers == list(range(60 - len(held), 60))
    assert reader.num_lost == 59 - len(held)


def test_damaged_host_plane_payload_is_refused_by_name(opened):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'near')
    for number in range(2):
        writer.append('s', {}, chunk(number))
    (ring,) = rings_of(writer)
    ring._data[30:31] = b'~'
    assert len(near.read('s', max_entries=1)) == 1
    with pytest.raises(CorruptPayload, match="entry 2 of 's'"):
        near.read('s', reader.cursor._replace(number=1))


@pytest.mark.parametrize('checked', [False, True])
def test_overwritten_arrays_are_found_with_a_checksum(opened, tmp_path, checked):
    writer, near = opened(host_checksum=checked), opened()
    reader = Reader(near, 's', 'near')
    for _ in range(2):
        writer.append('s', {}, {'x': np.full(20_000, 201, np.uint8)})
    (path,) = (tmp_path / 'a').rglob('*.ring')
    with open(path, 'r+b') as file:
        file.seek(file.read().find(b'\xc9' * 5000) + 100)
        file.write(b'\xff' * 1000)
    assert (reader.read(max_entries=1)[0].arrays['x'] == 201).all()
    if checked:
        with pytest.raises(CorruptPayload, match="entry 2 of 's'.*checksum"):
            reader.read()
    else:
        assert (reader.read()[0].arrays['x'] == 255).any()


def test_host_plane_options_that_are_wrong_are_refused(opened):
    for options in ({'host_plane': 'on'}, {'host_cache_bytes': 0}, {'host_cache_byte': 1}, {'host_checksum': 1}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            opened(**options)
    assert isinstance(opened(host_plane='off'), RedisStore)


def _use_in_child(store, queue):
    store.append('s', {}, chunk(2))
    store.append('s', {}, chunk(3))
    queue.put(store.host)
    store.close()


def test_forked_and_pickled_stores_have_their_own_rings(opened):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'near')
    for number in range(2):
        writer.append('s', {}, chunk(number))
    queue = multiprocessing.get_context('fork').Queue()
    process = multiprocessing.get_context('fork').Process(target=_use_in_child, args=(writer, queue))
    process.start()
    assert queue.get(timeout=WAIT_S) == writer.host
    process.join(WAIT_S)
    with pickle.loads(pickle.dumps(writer)) as twin:  # noqa: S301 our own bytes
        assert (twin.host, twin.address) == (writer.host, writer.address)
        for number in (4, 5):
            twin.append('s', {}, chunk(number))
        assert len(files(writer)) == 2
        writer.append('s', {}, chunk(6))
        assert [number_of(entry) for entry in reader.read()] == list(range(7))
        reader.ack()


def test_threads_of_a_forked_child_wait_for_its_own_files(opened, monkeypatch):
    writer, near = opened(), opened()
    reader, really_opened = Reader(near, 's', 'near'), store_module._opened
    for number in range(2):
        writer.append('s', {}, chunk(number))

    def append(numbers):
        for number in numbers:
            writer.append('s', {}, chunk(number))

    def opened_slowly(*arguments):
        other = threading.Thread(target=append, args=[range(10, 13)])
        others.append(other)
        other.start()
        other.join(0.5)
        return really_opened(*arguments)

    others = []

    def work():
        monkeypatch.setattr(store_module, '_opened', opened_slowly)
        append(range(20, 23))
        others[0].join(WAIT_S)
        os.write(writing, b'!')

    reading, writing = os.pipe()
    with child(work):
        os.close(writing)
        assert os.read(reading, 1) == b'!'
        append(range(2, 5))
        numbers = [number_of(entry) for entry in reader.read()]
    os.close(reading)
    assert [n for n in numbers if n < 10] == list(range(5))
    assert [n for n in numbers if n >= 20] == [20, 21, 22]
    assert [n for n in numbers if 10 <= n < 20] == [10, 11, 12]


def test_readers_join_and_leave_during_appends(opened):
    """A writer that never stops, a learner on its host, and a reader from elsewhere that comes and goes."""
    least, last, learned, far_errors, joins = 6000 if IS_LONG else 2000, [], [], [], []
    writer, near, far = opened(), opened(), opened('b')
    reader, done = Reader(near, 's', 'near'), threading.Event()

    def learn():
        while not last or learned[-1:] != last:
            entries = reader.read(64, timeout_s=WAIT_S)
            assert entries
            learned.extend(map(number_of, entries))
            reader.ack()

    def come_and_go():
        while not done.is_set():
            joins.append(True)
            one, seen = Reader(far, 's', 'far', start=random.choice(('now', 'oldest'))), []
            for _ in range(random.randint(0, 3)):
                seen += map(number_of, one.read(8, timeout_s=0.01))
                one.ack()
            if seen != list(range(seen[0], seen[0] + len(seen)) if seen else []) or one.num_lost:
                far_errors.append((seen, one.num_lost))
            one.forget()

    with ThreadPoolExecutor() as pool:
        threads = [pool.submit(learn), pool.submit(come_and_go)]
        for number in itertools.count():
            if number >= least and len(joins) > 50:
                last.append(number)
            writer.append('s', {}, chunk(number, size=100))
            if last:
                break
        threads[0].result(WAIT_S)
        done.set()
        threads[1].result(WAIT_S)
    assert learned == list(range(number + 1))
    assert far_errors == []


@pytest.mark.parametrize('is_far', [False, True])
def test_writers_killed_at_random_tear_nothing(opened, monkeypatch, is_far):
    """On their host all that was appended is read, and then the files go; also what is written past the caches."""
    load_for(1 << 30)
    monkeypatch.setattr(rings, 'is_far', lambda num_bytes, area_bytes: is_far)
    most = 10 * MIN_BYTES // 8 if is_far else 5000
    near = opened()
    reader = Reader(near, STREAM, 'learner')

    def write():
        store = opened()
        for number in itertools.count():
            store.append(STREAM, {}, chunk(number, size=random.randint(1, most)))

    sequences = {}
    num_kills = 100 if IS_LONG else 10
    for _ in range(num_kills):
        with child(write) as pid:
            before, count, upto = set(sequences), 0, random.randint(1, 80)
            while count < upto:
                entries = reader.read(8, timeout_s=WAIT_S)
                assert entries
                count += sum(entry.writer not in before for entry in entries)
                check_sequences(entries, sequences)
                reader.ack()
            os.kill(pid, signal.SIGKILL)
    while entries := reader.read():
        check_sequences(entries, sequences)
    reader.ack()
    assert len(sequences) == num_kills
    assert (reader.num_lost, reader.num_duplicates, reader.lag()) == (0, 0, 0)
    near.tidy()
    assert files(near) == []


def check_sequences(entries, sequences):
    for entry in entries:
        assert entry.sequence == sequences.get(entry.writer, 0) + 1
        assert number_of(entry) == entry.sequence - 1
        sequences[entry.writer] = entry.sequence


def test_entries_of_a_dead_writer_are_lost_on_other_hosts(opened, caplog):
    near = opened()
    Reader(near, 's', 'near')
    reading, writing = os.pipe()

    def write():
        store = opened()
        for number in range(4):
            store.append('s', {}, chunk(number))
        os.write(writing, b'x')
        time.sleep(WAIT_S)

    with child(write):
        assert os.read(reading, 1) == b'x'
    writer = opened()
    writer.append('s', {}, chunk(4))
    far = opened('b')
    far.client.server.patience_s = 0.2
    reader = Reader(far, 's', 'far')
    seen = list(map(number_of, reader.read()))
    if seen == [0]:  # It went over the wire, before its writer knew of a reader.
        seen += map(number_of, reader.read(timeout_s=WAIT_S))
    assert seen == [0, 4], 'a writer is waited for once, not for each of its entries'
    assert reader.num_lost == 3
    assert 'entries were lost' in caplog.text
    assert len(near.read('s')) == 5


def test_writer_given_up_is_awaited_once_it_appends(tmp_path, monkeypatch):
    """Its entries from before are lost; that it appended others since then says that it lives."""
    now, patience_s = [0.0], protocol.PATIENCE_S
    monkeypatch.setattr(transports, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    assert patience_s > RedisOptions().reconnect_timeout_s
    far = MemoryStore(memory=Memory())
    writer = quiet(far.another(host=HostOptions(host_cache_dir=str(tmp_path))))
    writer.register('s', 'near')
    for number in range(3):
        writer.append('s', {}, chunk(number))
    (first,) = far.read('s')
    now[0] += patience_s + 1
    assert [entry.is_lost for entry in far.read('s', first.id)] == [True, True]
    place = writer.append('s', {}, chunk(3))
    last = place._replace(number=place.number - 1)
    assert far.read('s', last) == []
    now[0] += patience_s - 1
    assert far.read('s', last) == []
    writer.client.own_writer.check_stream('s')
    assert [number_of(entry) for entry in far.read('s', last)] == [3]
    writer.close()


def test_patience_with_a_writer_exceeds_its_reconnect_timeout(opened):
    for reconnect_timeout_s, patience_s in ((60.0, protocol.PATIENCE_S), (600.0, 900.0)):
        store = opened(reconnect_timeout_s=reconnect_timeout_s)
        assert store.client.server.patience_s == patience_s


@pytest.fixture
def silent(tmp_path, monkeypatch):
    """A clock, a reader elsewhere, and the entry that it got of two: the other one's writer is not heard of."""
    now = [0.0]
    monkeypatch.setattr(transports, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    far = MemoryStore(memory=Memory())
    writer = quiet(far.another(host=HostOptions(host_cache_dir=str(tmp_path))))
    writer.register('s', 'near')
    for number in range(2):
        writer.append('s', {}, chunk(number))
    (first,) = far.read('s')
    yield SimpleNamespace(now=now, far=far, first=first, writer=writer)
    writer.close()


def test_read_stops_before_entries_behind_a_memory_loss(silent, monkeypatch):
    """It comes again, before what was behind it; who passed it over would take it for a repetition."""
    far = silent.far
    far.append('s', {}, chunk(2))
    records = far.client.read('s', silent.first.id, 64, 0.0)
    assert [is_reference(record.payload) for record in records] == [True, False]

    def told_before_it_was_lost(*arguments):
        far.lose_memory()
        return records

    monkeypatch.setattr(far.client, 'read', told_before_it_was_lost)
    assert far.read('s', silent.first.id) == []


def test_time_without_a_server_does_not_count_against_writers(silent, monkeypatch):
    silent.now[0] += protocol.PATIENCE_S - 1
    monkeypatch.setattr(protocol.Availability, 'num_sessions', 1)
    silent.now[0] += 2
    assert silent.far.read('s', silent.first.id) == []
    silent.now[0] += protocol.PATIENCE_S + 1
    assert [entry.is_lost for entry in silent.far.read('s', silent.first.id)] == [True]


def test_writer_is_given_up_despite_lost_connections(silent, monkeypatch):
    """As those do that a server closes because nobody has used them for a while."""
    for num_sessions in range(3 * transports.MAX_PATIENCES):
        monkeypatch.setattr(protocol.Availability, 'num_sessions', num_sessions)
        seen = silent.far.read('s', silent.first.id)
        if seen:
            break
        silent.now[0] += protocol.PATIENCE_S / 2
    assert [entry.is_lost for entry in seen] == [True]
    assert silent.now[0] == transports.MAX_PATIENCES * protocol.PATIENCE_S


def test_writer_is_given_up_despite_restarts_of_the_server(silent):
    """Each restart with the data of a disk begins an epoch, in which the same entry waits for the same writer."""
    disk = silent.far.snapshot()
    reader = Reader(silent.far, 's', 'far')
    assert [number_of(entry) for entry in reader.read()] == [0]
    for _ in range(3 * transports.MAX_PATIENCES):
        silent.far.lose_memory(keep=disk)
        reader.read()
        if reader.num_lost:
            break
        silent.now[0] += protocol.PATIENCE_S / 2
    assert reader.num_lost == 1
    assert silent.now[0] == transports.MAX_PATIENCES * protocol.PATIENCE_S


def test_writer_that_answered_is_awaited_anew_after_a_restart(silent):
    reader = Reader(silent.far, 's', 'far')
    assert [number_of(entry) for entry in reader.read()] == [0]
    assert reader.read() == []
    disk = silent.far.snapshot()
    silent.writer.client.own_writer.check_stream('s')
    assert [number_of(entry) for entry in reader.read()] == [1]
    silent.now[0] += 2 * transports.MAX_PATIENCES * protocol.PATIENCE_S
    silent.far.lose_memory(keep=disk)
    reader = Reader(silent.far, 's', 'far')
    assert [number_of(entry) for entry in reader.read(1)] == [0]
    assert reader.read(1) == []
    silent.now[0] += protocol.PATIENCE_S - 1
    assert reader.read(1) == []
    assert reader.num_lost == 0


def test_unread_ring_of_a_dead_writer_stays_until_read(opened):
    near = opened()
    reader = Reader(near, 's', 'near')
    reading, writing = os.pipe()

    def write():
        store = opened()
        for number in range(3):
            store.append('s', {}, chunk(number))
        os.write(writing, b'x')
        time.sleep(WAIT_S)

    with child(write):
        assert os.read(reading, 1) == b'x'
    assert near.tidy() == 0
    assert [number_of(entry) for entry in reader.read()] == [0, 1, 2]
    reader.ack()
    eventually(lambda: near.tidy() == 1 or files(near) == [], 'the file goes')


def test_memory_loss_with_shared_memory_loses_nothing(forgetful_server, tmp_path):
    seen, total = [], 300
    with open_store(forgetful_server.url, 'run', host_cache_dir=str(tmp_path)) as writer:
        with open_store(forgetful_server.url, 'run', host_cache_dir=str(tmp_path)) as near:
            reader = Reader(near, 's', 'near')
            for number in range(total):
                writer.append('s', {}, chunk(number))
                if number % 100 == 50:
                    forgetful_server.restart()
                if number % 7 == 0:
                    seen += map(number_of, reader.read())
                if number % 21 == 0:
                    reader.ack()
            while len(seen) < total:
                entries = reader.read(timeout_s=WAIT_S)
                seen += map(number_of, entries)
            reader.ack()
            assert seen == list(range(total))
            assert reader.num_lost == 0


@pytest.mark.parametrize('is_near', [False, True])
def test_append_without_a_server_keeps_its_entry(forgetful_server, tmp_path, is_near):
    """Also where it was time to look after those before: who hears StoreUnavailable does not append again."""
    options = {'host_cache_dir': str(tmp_path), 'reconnect_timeout_s': 0.2}
    with open_store(forgetful_server.url, 'keeps', **options) as writer:
        reader = Reader(writer, 's', 'learner')
        writer.append('s', {}, chunk(0))
        for number in range(1, 1 + is_near):
            writer.append('s', {}, chunk(number))
        forgetful_server.kill()
        writer.client.own_writer._checked_at = 0.0  # long ago
        with pytest.raises(StoreUnavailable):
            writer.append('s', {}, chunk(8))
        forgetful_server.start()
        writer.append('s', {}, chunk(9))
        numbers = [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)]
        assert numbers == [*range(1 + is_near), 8, 9]


def test_retired_run_leaves_no_file(opened, tmp_path):
    writer = opened()
    Reader(writer, 's', 'near')
    for number in range(3):
        writer.append('s', {}, chunk(number))
    writer.retire()
    writer.close()
    assert [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith('.ring')] == []


def test_arrays_are_views_of_the_ring(opened):
    writer, near = opened(), opened()
    reader = Reader(near, 's', 'near')
    for _ in range(2):
        writer.append('s', {}, {'x': np.zeros(10, np.uint8)})
    _, entry = reader.read()
    assert not entry.arrays['x'].any()
    (ring,) = rings_of(writer)
    ring._data[:] = b'\xff' * len(ring._data)
    assert entry.arrays['x'].all()
    assert not entry.arrays['x'].flags.writeable
