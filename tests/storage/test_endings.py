"""Who is late brings nothing of a run that ended into the next of its name, whatever became of the server meanwhile."""

import contextlib
import logging
import os
import subprocess
import sys
import uuid

import pytest
from embedded_helpers import kill, wait_for_end
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
from needs import IS_LONG
from redis_server import RedisServer

from ding_store.errors import StoreClosed, StoreUnavailable
from ding_store.storage import Reader, open_store
from ding_store.storage.base import OLDEST
from ding_store.storage.embedded.private_server import running
from ding_store.storage.memory.store import Memory, MemoryStore
from ding_store.storage.redis import server_checks
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

STREAM = 'experience'


@contextlib.contextmanager
def unavailable(store, is_on=True):
    """For what the store announces."""

    def fail(said):
        if not is_on:
            return send_request(said)
        raise StoreUnavailable('the request was lost')

    outbox = store.client.own_writer.stream_writer(STREAM).outbox
    send_request, outbox.send_request = outbox.send_request, fail
    try:
        yield
    finally:
        outbox.send_request = send_request


class Late:
    """A writer, the run that it is of, and what it appended to that."""

    def __init__(self, store, run):
        self.store, self.run = store, run
        self.numbers = []
        self.is_concluded = False


class Endings(RuleBasedStateMachine):
    """
    One name, run after run: each ends, on purpose, once its writers have said that they append no more. What they hold
    unacked by then they hold on to until they are closed. The server restarts with what it had, or with nothing; that
    only while no writer of an earlier run lives, since a server that remembers nothing knows no end, and before a run
    ends its writers, who live, look at what was lost.
    """

    def open(self):
        raise NotImplementedError

    def restart(self):
        raise NotImplementedError

    def forget_everything(self):
        raise NotImplementedError

    @initialize()
    def begin(self):
        self.learner = self.open()
        self.run, self.count = 0, 0
        self.has_lost = False
        self.writers = []
        self.run_of = {}
        self.acked = set()

    @precondition(lambda self: len(self.writers) < 4)
    @rule()
    def join(self):
        self.writers.append(Late(self.open(), self.run))

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def append(self, data):
        writer = data.draw(st.sampled_from(self.writers))
        number, self.count = self.count, self.count + 1
        self.run_of[number] = writer.run
        if writer.run == self.run:
            writer.store.append(STREAM, {}, chunk(number, 4))
            writer.numbers.append(number)
        elif writer.numbers:
            with pytest.raises(StoreClosed):
                writer.store.append(STREAM, {}, chunk(number, 4))

    @precondition(lambda self: self._known())
    @rule(data=st.data())
    def append_and_lose_it(self, data):
        """It is kept, and will be announced. Whose first it is has heard of no run that may end."""
        writer = data.draw(st.sampled_from(self._known()))
        number, self.count = self.count, self.count + 1
        self.run_of[number] = self.run
        with unavailable(writer.store), pytest.raises(StoreUnavailable):
            writer.store.append(STREAM, {}, chunk(number, 4))
        writer.numbers.append(number)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def close_for_writing(self, data):
        writer = data.draw(st.sampled_from(self.writers))
        writer.store.close_for_writing()

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), how=st.sampled_from(['check', 'settle', 'publish']))
    def look(self, data, how):
        self._look(data.draw(st.sampled_from(self.writers)), how)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def leave(self, data):
        writer = self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1)))
        writer.store.close()

    @rule()
    def ack(self):
        self.learner.register(STREAM, 'learner')
        for entry in self.learner.read(STREAM):
            self.acked.add(number_of(entry))
            self.learner.ack(STREAM, 'learner', entry.id)

    @rule(how=st.sampled_from(['clear', 'retire']), is_seen=st.booleans())
    def end(self, how, is_seen):
        self.learner.register(STREAM, 'learner')
        for writer in self.writers:
            if is_seen or self.has_lost:
                self._look(writer, 'check')
            writer.store.close_for_writing()
        self.has_lost = False
        getattr(self.learner, how)()
        self.run += 1

    @rule()
    def restart_with_all(self):
        self.restart()

    @precondition(lambda self: all(writer.run == self.run for writer in self.writers))
    @rule()
    def lose_everything(self):
        self.forget_everything()
        self.has_lost = True

    @invariant()
    def nothing_is_of_another_run(self):
        if hasattr(self, 'learner'):
            assert {self.run_of[number_of(entry)] for entry in self.learner.read(STREAM)} <= {self.run}

    def teardown(self):
        if not hasattr(self, 'learner'):
            return
        for writer in self.writers:
            self._look(writer, 'check')
        held = {number_of(entry) for entry in self.learner.read(STREAM)}
        for writer in self.writers:
            if writer.run == self.run:
                assert set(writer.numbers) <= held | self.acked, 'nothing of the run that lives is lost'
            writer.store.close()
        self.nothing_is_of_another_run()
        self.learner.close()

    def _known(self):
        return [writer for writer in self.writers if writer.run == self.run and writer.numbers]

    def _look(self, writer, how):
        if how == 'check':
            writer.store.client.own_writer.check(now=True)
        elif how == 'settle':
            writer.store.flush()
        elif writer.run != self.run:
            writer.store.client.own_writer.publish(0.0)


class MemoryEndings(Endings):
    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def open(self):
        return MemoryStore(memory=self.memory)

    def restart(self):
        self.learner.lose_memory(keep=self.learner.snapshot())

    def forget_everything(self):
        self.learner.lose_memory()


class RedisEndings(Endings):
    """On a real server, whose restarts are what scripts are told of them: another life."""

    server: RedisServer
    generation: str
    runs = 0

    def __init__(self):
        super().__init__()
        RedisEndings.runs += 1
        self.name = f'ends{os.getpid()}-{RedisEndings.runs}'
        self.client = self.server.client()
        self.begin_life()

    def open(self):
        return RedisStore(self.server.url, self.name)

    def restart(self):
        self.begin_life()
        for store in [self.learner, *(writer.store for writer in self.writers)]:
            store.client.server.connection._session.generation.run_id = RedisEndings.generation

    def begin_life(self):
        RedisEndings.generation = (uuid.uuid4().hex * 2)[:40]

    def forget_everything(self):
        self.client.flushall()
        self.restart()

    def teardown(self):
        super().teardown()
        self.client.close()


def test_endings_in_memory_equal_a_model():
    run_state_machine_as_test(
        MemoryEndings, settings=settings(max_examples=300 if IS_LONG else 100, stateful_step_count=40, deadline=None)
    )


def test_endings_on_redis_equal_a_model(redis_server, monkeypatch):
    facts = server_checks.facts_of
    monkeypatch.setattr(server_checks, 'facts_of', lambda reply: {**facts(reply), 'run_id': RedisEndings.generation})
    RedisEndings.server = redis_server
    run_state_machine_as_test(
        RedisEndings,
        settings=settings(
            max_examples=80 if IS_LONG else 30, stateful_step_count=30, deadline=None, phases=[Phase.generate]
        ),
    )


class UnseenEndings(MemoryEndings):
    """With a deliberate mistake: writers go by the server's lives alone."""

    def open(self):
        store = super().open()
        send_request = store.client.server.append
        store.client.server.append = lambda said: send_request(said)._replace(ends=(0, 0))
        return store


def test_restart_does_not_undo_an_end():
    for machine in (MemoryEndings(), UnseenEndings()):
        machine.begin()
        machine.join()
        (writer,) = machine.writers
        for number in (0, 1):
            machine.run_of[number] = 0
            with unavailable(writer.store, is_on=number > 0), contextlib.suppress(StoreUnavailable):
                writer.store.append(STREAM, {}, chunk(number))
        machine.end('clear', is_seen=False)
        machine.restart()
        machine._look(writer, 'check')
        if isinstance(machine, UnseenEndings):
            with pytest.raises(AssertionError):
                machine.nothing_is_of_another_run()
        else:
            machine.nothing_is_of_another_run()


@pytest.mark.parametrize('num_restarts', [1, 2])
@pytest.mark.parametrize('is_named_again', [False, True])
@pytest.mark.parametrize('end', ['clear', 'retire'])
def test_server_restarted_from_its_file_keeps_the_end(own_server, end, is_named_again, num_restarts):
    with RedisStore(own_server.url, 'run') as learner:
        store = RedisStore(own_server.url, 'run')
        for number in range(3):
            store.append(STREAM, {}, chunk(number))
        with unavailable(store), pytest.raises(StoreUnavailable):
            store.append(STREAM, {}, chunk(3))
        store.close_for_writing()
        getattr(learner, end)()
        for _ in range(num_restarts):
            own_server.restart()
            if is_named_again:
                learner.register(STREAM, 'learner')
        store.flush()
        store.client.own_writer.check(now=True)
        store.close()
        assert learner.read(STREAM) == []


@pytest.mark.parametrize('num_ends', [1, 3])
@pytest.mark.parametrize('end', ['clear', 'retire'])
def test_run_longer_than_a_day_stays_ended(own_server, end, num_ends):
    """By then the count that the ends before it had left has expired."""
    url = own_server.url
    with RedisStore(url, 'run') as learner, RedisStore(url, 'run') as late, own_server.client() as client:
        for _ in range(num_ends):
            late.append(STREAM, {}, {})
            getattr(learner, end)()
        store = RedisStore(own_server.url, 'run')
        store.append(STREAM, {}, chunk(0))
        (key,) = client.keys('ding:{run/*:ends')
        assert client.pexpire(key, 1)
        eventually(lambda: not client.exists(key), 'it expires')
        with unavailable(store), pytest.raises(StoreUnavailable):
            store.append(STREAM, {}, chunk(1))
        store.close_for_writing()
        getattr(learner, end)()
        own_server.restart()
        store.client.own_writer.check(now=True)
        store.close()
        assert learner.read(STREAM) == []


def test_keys_left_by_a_retired_run_expire(redis_server):
    """Nothing is left where all of its writers have left."""
    url = redis_server.url
    with RedisStore(url, 'expires') as store, RedisStore(url, 'expires') as late, redis_server.client() as client:
        for _ in range(2):
            store.append(STREAM, {}, {})
            store.put('weights', {}, {})
            store.add('collectors', 1)
            store.delete('nothing')
            store.retire()
            assert client.keys('ding:{expires*') == []
        late.append(STREAM, {}, {})
        store.retire()
        (key,) = client.keys('ding:{expires*')
        assert key == b'ding:{expires/experience/0}:ends'
        assert client.ttl(key) > 0


@pytest.mark.parametrize('is_named_again', [False, True])
def test_embedded_server_killed_after_the_end_stays_ended(tmp_path, is_named_again):
    store = RedisStore(f'embedded://{tmp_path}', 'run', grace_s=0.0)
    for number in range(3):
        store.append(STREAM, {}, chunk(number))
    store.close_for_writing()
    retire = f'from ding_store.storage import open_store; open_store("embedded://{tmp_path}", run="run").retire()'
    subprocess.run([sys.executable, '-c', retire], check=True, timeout=WAIT_S)
    kill(running(store._directory).supervisor_pid)
    eventually(lambda: store.is_away, 'it dies with its supervisor')
    with RedisStore(f'embedded://{tmp_path}', 'run', grace_s=0.0) as other:
        if is_named_again:
            other.register(STREAM, 'learner')
        store.flush()
        store.client.own_writer.check(now=True)
        store.close()
        assert other.read(STREAM, OLDEST) == []


@pytest.mark.parametrize('transport', ['auto', 'off'])
def test_retired_run_neither_waits_for_nor_restarts_a_server(tmp_path, caplog, transport):
    store = open_store(f'embedded://{tmp_path}', 'run', host_plane=transport)
    reader = Reader(store, STREAM, 'learner')
    for number in range(3):
        store.append(STREAM, {}, chunk(number))
        reader.read(timeout_s=WAIT_S)
    server = running(tmp_path / 'run').server_pid
    store.retire()
    wait_for_end(server)
    if transport == 'auto':
        store._streams._keepers[0].join(WAIT_S)  # It waited for news of the server, which is no more.
        assert not store._streams._keepers[0].is_alive()
    with pytest.raises(StoreClosed, match='retired'):
        store.info()
    store.close()
    assert running(tmp_path / 'run') is None
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
