"""
Readers join and leave while a writer is stopped at a step of its protocol: at every step, thousands of times, in one
process, so that each interleaving is the one that the seed says. In memory, and on a real server, whose scripts decide.
"""

import contextlib
import os
import random
from collections import Counter

import pytest
from needs import IS_LONG
from test_shared_memory import CarelessMemory, quiet

from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.memory.server import MemoryServer
from ding_store.storage.memory.store import Memory, MemoryStore
from ding_store.storage.options import HostOptions
from ding_store.storage.protocol import WIRE
from ding_store.storage.redis.appends import RedisAppends
from ding_store.storage.redis.server import RedisServer
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.shared_memory import rings
from ding_store.storage.shared_memory.mapped_files import PAGE
from ding_store.storage.shared_memory.ring import RingWriter
from ding_store.storage.shared_memory.rings import Rings
from ding_store.storage.testing import WAIT_S, chunk, number_of

STREAM = 'experience'
STEPS = ('reserved', 'written', 'committed', 'announcing', 'announced', 'blocked', 'filling', 'filled')
LIMIT = 1000  # bytes: three entries or so


class Far:
    """A durable reader of another host, or without files."""

    def __init__(self, store, start):
        self.store, self.start = store, start
        self.reader = Reader(store, STREAM, 'far', start=start)
        self.seen = []

    def read(self, count=64):
        self.seen += [number_of(entry) for entry in self.reader.read(count)]
        self.reader.ack()

    def leave(self):
        self.reader.forget()
        self.store.close()


class InMemory:
    """Where the stream of one round is."""

    def __init__(self, memory):
        self._memory = memory

    def open(self, **options):
        return MemoryStore(memory=self._memory, **options)

    def state(self):
        """(number up to which it is trimmed, bytes that it holds)"""
        log = self._memory.log(STREAM)
        return log.floor, log.pending_bytes

    def close(self):
        pass


class OnServer:
    """The same on a real one."""

    def __init__(self, url, run):
        self._url, self._run = url, run
        self._looking = self.open()

    def open(self, **options):
        # Hardly a look around by the clock: what a store does is up to the seed.
        return RedisStore(self._url, self._run, check_every_s=5, **options)

    def state(self):
        stream = self._looking.stream_info(STREAM)
        return (stream.floor, stream.pending_bytes) if stream is not None else (0, 0)

    def close(self):
        self._looking.retire()
        self._looking.close()


class Interleaved:
    """Two writers and a learner on one host; whatever a writer does, others act between its steps."""

    def __init__(self, tmp_path, seed, monkeypatch, place):
        self.random = random.Random(seed)
        self.place = place
        self.hosts = [HostOptions(host_cache_dir=str(tmp_path / name)) for name in 'ab']
        self.stopped = None  # the step at which a writer is
        self.stops, self.joins = Counter(), 0
        self.count, self.learned, self.far = 0, [], None
        self.num_stuck = 0
        self.appended_by = {}
        self._stop_in_rings(monkeypatch)
        self.writers = [self.writer(), self.writer()]
        self.learners_store = quiet(place.open(host=self.hosts[0]))
        self.learner = Reader(self.learners_store, STREAM, 'learner')

    def writer(self):
        store = self.place.open(max_pending_bytes=LIMIT, host=self.hosts[0])
        send_request, fill = store.client.server.append, store.client.server.backfill

        def announced(said):
            self.at('announcing')
            reply = send_request(said)
            self.at('announced')
            return reply

        def filled(said):
            self.at('filling')
            fill(said)
            self.at('filled')

        def blocked(stream, room, timeout_s):
            self.at('blocked')
            self.stopped = 'blocked'  # Until it has found room nothing else happens: it must, by itself.
            self.make_room()

        store.client.server.append, store.client.server.backfill, store.client.own_writer._wait_for_capacity = (
            announced,
            filled,
            blocked,
        )
        return quiet(store)

    def _stop_in_rings(self, monkeypatch):
        announce_reserved, commit, pack = RingWriter._announce_reserved, RingWriter.commit, Rings.pack

        def reserved(ring, end):
            announce_reserved(ring, end)
            self.at('reserved')

        def committed(ring, region):
            self.at('written')
            commit(ring, region)
            self.at('committed')

        def packed(rings, header, arrays):
            # As a ring does that is smaller than the limit: what comes before there is no room goes over the wire.
            return pack(rings, header, arrays) if self.place.state()[1] < LIMIT // 2 else None

        monkeypatch.setattr(Rings, 'pack', packed)
        monkeypatch.setattr(RingWriter, '_announce_reserved', reserved)
        monkeypatch.setattr(RingWriter, 'commit', committed)

    def at(self, step):
        """A writer is stopped here: others act, and are not stopped themselves."""
        if self.stopped is not None:
            return
        self.stopped = step
        self.stops[step] += 1
        for _ in range(self.random.randint(1, 3)):
            self.random.choice((self.join, self.leave, self.join, self.leave, self.learn, self.look))()
        self.stopped = None

    def join(self):
        if self.far is None:
            has_files = self.random.random() < 0.1
            store = quiet(self.place.open(host=self.hosts[1])) if has_files else self.place.open()
            self.far = Far(store, self.random.choice(('oldest', 'now')))
            self.joins += 1

    def leave(self):
        if self.far is not None:
            self.far.read(self.random.randint(1, 5))
            far, self.far = self.far, None
            far.leave()
            self.check(far)

    def look(self):
        if self.far is not None:
            self.far.read(self.random.randint(1, 5))

    def learn(self, count=0):
        self.learned += [number_of(entry) for entry in self.learner.read(count or self.random.randint(1, 8))]
        self.learner.ack()

    def append(self, writer):
        number, self.count = self.count, self.count + 1
        self.appended_by[number] = writer
        self.num_stuck = 0
        self.writers[writer].append(STREAM, {}, chunk(number, self.random.randint(1, 60)), timeout_s=WAIT_S)
        self.stopped = None

    def make_room(self):
        """All readers read what there is. A writer that waits for room still makes readable what is wanted of it."""
        floor, _ = self.place.state()
        self.help()
        self.learn(64)
        if self.far is not None:
            self.far.read()
        self.num_stuck = 0 if self.place.state()[0] > floor else self.num_stuck + 1
        assert self.num_stuck < 3

    def help(self):
        """What the writers' own threads do."""
        for store in self.writers:
            store.client.own_writer.check_stream(STREAM)

    def catch_up(self):
        """All that was appended reaches all readers, with the writers' help, and nobody comes who would help, too."""
        self.stopped = 'catching up'
        while len(self.learned) < self.count or (self.far is not None and self.far.reader.lag()):
            before = len(self.learned), self.far and len(self.far.seen)
            self.help()
            self.learn()
            if self.far is not None:
                self.far.read()
            stuck = before == (len(self.learned), self.far and len(self.far.seen))
            assert not stuck or self.far is None or not self.far.reader.lag(), (self.learned, self.far.seen)
        assert sorted(self.learned) == list(range(self.count))
        if self.far is not None:
            self.check(self.far)
            held = self.learned[-len(self.far.seen) :] if self.far.seen else []
            assert self.far.seen == held, 'it has seen all since it came'
        self.stopped = None

    def check(self, far):
        """Each saw a stretch of the one order in which entries were appended, without a gap or a repetition."""
        assert (far.reader.num_lost, far.reader.num_duplicates) == (0, 0)
        assert len(set(far.seen)) == len(far.seen)
        order = self.learned + [number for number in far.seen if number not in set(self.learned)]
        if far.seen:
            first = order.index(far.seen[0])
            assert far.seen == order[first : first + len(far.seen)]

    def close(self):
        self.catch_up()
        assert (self.learner.num_lost, self.learner.num_duplicates) == (0, 0)
        for writer in (0, 1):
            mine = [number for number in self.learned if self.appended_by[number] == writer]
            assert mine == sorted(mine)
        if self.far is not None:
            self.far.leave()
        self.stopped = 'over'
        for store in (*self.writers, self.learners_store):
            store.close()


@pytest.fixture(autouse=True)
def _small_rings_and_no_complaints(monkeypatch):
    monkeypatch.setattr(rings, 'FIRST_BYTES', PAGE)
    monkeypatch.setattr(rings, 'PATIENCE_S', 0.0)
    # Nobody complains: the planes alone must see to it that everything arrives.
    for kind in (MemoryServer, RedisServer):
        monkeypatch.setattr(kind, 'request_backfills', lambda self, stream: None)


def run(tmp_path, monkeypatch, num_runs, place, num_appends=60):
    stops, joins = Counter(), 0
    for seed in range(num_runs):
        with monkeypatch.context() as patches, contextlib.closing(place(seed)) as where:
            one = Interleaved(tmp_path / str(seed), seed, patches, where)
            for _ in range(num_appends):
                one.append(one.random.randint(0, 1))
                if one.random.random() < 0.15:
                    one.catch_up()
            one.close()
            stops += one.stops
            joins += one.joins
    return stops, joins


def test_readers_join_and_leave_at_every_step_in_memory(tmp_path, monkeypatch):
    num_runs = 90 if IS_LONG else 30
    stops, joins = run(tmp_path, monkeypatch, num_runs, lambda seed: InMemory(Memory()))
    assert set(stops) == set(STEPS)
    assert min(stops.values()) > 3 * num_runs, stops
    assert joins > 30 * num_runs


@pytest.fixture
def on_server(redis_server):
    return lambda seed: OnServer(redis_server.url, f'steps-{os.getpid()}-{seed}')


def test_readers_join_and_leave_at_every_step_on_a_server(tmp_path, monkeypatch, on_server):
    num_runs = 15 if IS_LONG else 3
    stops, joins = run(tmp_path, monkeypatch, num_runs, on_server)
    assert set(stops) == set(STEPS)
    assert min(stops.values()) > 2 * num_runs, stops
    assert joins > 60 * num_runs


def test_interleavings_find_stale_references(tmp_path, monkeypatch):
    with pytest.raises(AssertionError):
        run(tmp_path, monkeypatch, 60, lambda seed: InMemory(CarelessMemory()))


def test_interleavings_find_a_server_accepting_stale_ones(tmp_path, monkeypatch, on_server, redis_server):
    append = RedisAppends._append

    def careless(appends, said, *place):
        with redis_server.client() as client:
            transport = client.hget(appends._keys.of(STREAM, 'meta'), 'plane')
        return append(appends, said if said.transport == WIRE else said._replace(transport=int(transport or 0)), *place)

    monkeypatch.setattr(RedisAppends, '_append', careless)
    with pytest.raises(AssertionError):
        run(tmp_path, monkeypatch, 20, on_server)
