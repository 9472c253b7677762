"""A collector that waits is woken by the progress that permits its next chunk, and by no earlier one.

A model: collectors, a learner, and a server that may lose its memory or its newest changes. Where nothing was lost, a
progress wakes exactly the collectors that may go on. Whatever was lost, a collector finds that at its next look.
"""

import itertools
import math
import os
import threading

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from ding_store.middleware import backpressure as backpressure_module
from ding_store.middleware.backpressure import PROGRESS, Backpressure, ProgressWriter, coarse
from ding_store.storage import Reader
from ding_store.storage.memory.store import Memory, MemoryStore
from ding_store.storage.protocol import StartVersions
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually

STREAM, MAX_LEAD, NUM_COLLECTORS = 'experience', 2, 9
collectors = st.integers(0, NUM_COLLECTORS - 1)


class Collector:
    def __init__(self, store):
        self.store, self.backpressure = store, Backpressure(store, MAX_LEAD)
        self.place, self.num_appended = None, 0  # of its last entry
        self.due = None  # while it waits: the value and the version that it waits for
        self.is_exact = self.is_early = False  # while it waits: it must be woken in time; it may be woken before

    def look(self, is_exact):
        """Append if the progress permits it, otherwise wait. Return whether it has appended."""
        self.due = None
        if self.backpressure.wait_within_lead(0.0):
            self.place = self.store.append(STREAM, {}, chunk(0, 4))
            self.backpressure.appended(self.place)
            self.num_appended += 1
            return True
        self.due, self.is_exact = self.backpressure.awaited(), is_exact
        self.is_early = self.due[0] != PROGRESS  # The coarse progress comes before the one that permits the chunk.
        return False


class Wakeups(RuleBasedStateMachine):
    def open(self):
        raise NotImplementedError

    def forget_everything(self):
        raise NotImplementedError

    def snapshot(self):
        raise NotImplementedError

    def restore(self, snapshot):
        """In one life of the server."""
        raise NotImplementedError

    @initialize()
    def begin(self):
        self.collectors = [Collector(self.open()) for _ in range(NUM_COLLECTORS)]
        self.stores = [collector.store for collector in self.collectors]
        self.ingested = None
        self.is_known = False  # the newest progress is the learner's last one
        self.start_learner({})
        self.saved = self.snapshot()

    def start_learner(self, marks):
        self.learner = self.open()
        self.stores.append(self.learner)
        self.reader = Reader(self.learner, STREAM, 'learner', marks=marks)
        self.progress = ProgressWriter()
        self.is_known = False

    @rule(number=collectors)
    def collect(self, number):
        self.collectors[number].look(self.is_known)

    @rule()
    def collect_all(self):
        for number in range(NUM_COLLECTORS):
            self.collect(number)

    @rule(count=st.integers(1, 4))
    def learn(self, count):
        entries = self.reader.read(count)
        if not entries:
            return
        self.ingested = entries[-1].id
        self.progress.publish(self.reader, self.ingested, {'ingested': list(self.ingested)})
        self.learner.flush()
        newest = {name: self.learner.get(name) for name in (PROGRESS, coarse(PROGRESS))}
        versions = {name: value.version for name, value in newest.items() if value is not None}

        def is_woken_up(collector):
            name, version = collector.due
            return versions.get(name, 0) >= version

        for collector in self.waiting():
            is_woken, is_due = is_woken_up(collector), self.is_due(collector)
            if collector.is_exact and self.is_known:
                assert is_woken or not is_due
                assert is_due or not is_woken or collector.is_early
        self.is_known = True
        for collector in self.waiting():
            if is_woken_up(collector):
                is_due = self.is_due(collector)
                assert collector.look(True) or not is_due

    def waiting(self):
        return [collector for collector in self.collectors if collector.due is not None]

    def is_due(self, collector):
        """Whether the last progress permits its next chunk. Of another epoch than its entry's, any does."""
        is_same = collector.place.epoch == self.ingested.epoch
        return not is_same or collector.place.number - self.ingested.number <= MAX_LEAD

    def lose(self):
        self.is_known = False
        for collector in self.waiting():
            collector.is_exact = False

    @rule()
    def save(self):
        self.saved = self.snapshot()

    @rule()
    def lose_everything(self):
        self.forget_everything()
        self.lose()

    @rule()
    def go_back(self):
        self.restore(self.saved)
        self.lose()

    @rule()
    def restart_the_learner(self):
        self.start_learner(self.reader.marks)
        self.lose()

    @rule()
    def lose_the_progress(self):
        self.learner.delete(PROGRESS)
        self.lose()

    @rule()
    def lose_the_coarse_progress(self):
        self.learner.delete(coarse(PROGRESS))
        self.lose()

    @rule(behind=st.integers(0, 3))
    def another_learner_puts_late_progress(self, behind):
        """A learner that was presumed crashed, or the learner that puts its progress again."""
        if self.ingested is None or self.ingested.number <= behind:
            return
        place = [self.ingested.epoch, self.ingested.number - behind]
        self.collectors[0].store.put(PROGRESS, {'ingested': place}, {})
        for collector in self.collectors:
            collector.is_early = True

    def teardown(self):
        if hasattr(self, 'collectors'):
            self.settle()
            for store in self.stores:
                store.close()

    def settle(self):
        """If nothing more is lost, every collector can go on and on. Each looks at times, and the learner as well."""
        before = [collector.num_appended for collector in self.collectors]
        for _ in range(8 * NUM_COLLECTORS + sum(before)):
            for collector in self.collectors:
                collector.store.client._writer.check(now=True)
                collector.look(False)
            self.reader.losses.looked_at = -math.inf
            self.learn(4)
            newest = self.learner.get(PROGRESS)
            if self.ingested is not None and (newest is None or newest.header['ingested'] != list(self.ingested)):
                self.learner.put(PROGRESS, {'ingested': list(self.ingested)}, {})
            if all(collector.num_appended >= count + 3 for collector, count in zip(self.collectors, before)):
                return
        raise AssertionError('a collector cannot go on')


class MemoryWakeups(Wakeups):
    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def open(self):
        return MemoryStore(memory=self.memory)

    def forget_everything(self):
        self.learner.lose_memory()

    def snapshot(self):
        return self.memory.snapshot()

    def restore(self, snapshot):
        self.memory.go_back(snapshot)

    @rule()
    def restart_the_server_with_old_data(self):
        self.learner.lose_memory(keep=self.saved)
        self.lose()


class RedisWakeups(Wakeups):
    server = None
    numbers = itertools.count()

    def __init__(self):
        super().__init__()
        self.run = f'wakeups{os.getpid()}-{next(self.numbers)}'
        self.client = self.server.client()

    def open(self):
        return RedisStore(self.server.url, self.run)

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

    def teardown(self):
        super().teardown()
        self.client.close()


@pytest.fixture(params=[64, 2])
def entries_per_coarse_progress(request, monkeypatch):
    """With 64, the collectors of the model are never far from their turn. With 2, some are."""
    monkeypatch.setattr(backpressure_module, 'COARSE', request.param)
    return request.param


def test_wakeups_in_memory_equal_a_model(entries_per_coarse_progress):
    run_state_machine_as_test(MemoryWakeups, settings=settings(max_examples=50, stateful_step_count=40, deadline=None))


def test_wakeups_on_redis_equal_a_model(redis_server, entries_per_coarse_progress):
    RedisWakeups.server = redis_server
    options = settings(max_examples=6, stateful_step_count=30, deadline=None, phases=[Phase.generate])
    run_state_machine_as_test(RedisWakeups, settings=options)


def test_wakeups_model_finds_versions_that_do_not_follow(monkeypatch):
    monkeypatch.setattr(StartVersions, 'follow', lambda self, name, entry_id: None)
    machine = MemoryWakeups()
    machine.begin()
    for number in (0, 1, 2):
        machine.collect(number)
    machine.learn(1)
    for number in (0, 1, 2, 3, 3):
        machine.collect(number)
    with pytest.raises(AssertionError):
        machine.learn(4)


@pytest.mark.parametrize('num_collectors', [3, 12])
def test_progress_wakes_only_collectors_that_are_due(own_server, num_collectors):
    """Each of these collectors may go on at another progress. So each progress costs one look."""
    permitted, is_over = [], threading.Event()

    def collect(store, backpressure, number):
        while not is_over.is_set():
            if backpressure.wait_within_lead(2 * WAIT_S):
                permitted.append(number)
                return

    with RedisStore(own_server.url, 'r', socket_timeout_s=3 * WAIT_S) as store, own_server.client() as client:
        store.client.check_every_s = 2 * WAIT_S  # No collector looks because of the time.
        reader, waits = Reader(store, STREAM, 'learner'), []
        store.append(STREAM, {}, {})
        (entry,) = reader.read(1)
        reader.advance(entry.id, PROGRESS, {'ingested': list(entry.id)})
        store.flush()
        for number in range(num_collectors):
            backpressure = Backpressure(store, 0, is_over.is_set)
            backpressure.appended(store.append(STREAM, {}, {}))
            waits.append(threading.Thread(target=collect, args=(store, backpressure, number), daemon=True))
            waits[-1].start()
        try:
            eventually(lambda: client.info('clients')['blocked_clients'] == num_collectors, 'all collectors wait')
            before = calls_of(client)
            for number in range(num_collectors):
                (entry,) = reader.read(1)
                reader.advance(entry.id, PROGRESS, {'ingested': list(entry.id)})
                eventually(lambda: len(permitted) > number, 'the next collector may go on')  # noqa: B023
            assert permitted == list(range(num_collectors))
            looks = calls_of(client) - before
            assert looks == num_collectors
        finally:
            is_over.set()
            for wait in waits:
                wait.join(WAIT_S)


def calls_of(client):
    """Return how often a process has read the newest version of a value."""
    return client.info('commandstats').get('cmdstat_xrevrange', {'calls': 0})['calls']
