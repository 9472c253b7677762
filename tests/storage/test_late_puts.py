"""Puts that come when their writer is dead, or has given them up: those that nobody has answered replace nothing."""

import itertools
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from forks import child
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from needs import IS_LONG

from ding_store.errors import StoreUnavailable
from ding_store.storage.base import OLDEST
from ding_store.storage.encoding.framing import encode_pieces
from ding_store.storage.encoding.value_parts import STILL_AFTER, SentParts
from ding_store.storage.redis import values as redis_values
from ding_store.storage.redis.server_session import ServerSession
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, found_in, number_of

_RUNS = (f'late{number}' for number in itertools.count())
NAME = 'news'


@pytest.fixture
def opened(redis_server):
    run = next(_RUNS)
    with ExitStack() as stores:
        yield lambda **options: stores.enter_context(RedisStore(redis_server.url, run, **options))


def underway(store, number):
    """A put of this writer as its kernel may still have it."""
    return store.client.server._values.put_command(NAME, encode_pieces({'number': number}, {}).sealed())


def arrive(store, late):
    """On some connection: nobody reads the reply."""
    store.client.server.connection.call('arrive', lambda session: session.run(late.script, late.keys, *late.arguments))


@pytest.mark.parametrize('has_put', [False, True])
def test_late_put_of_a_dead_writer_replaces_no_newer_version(opened, has_put):
    dead, successor = opened(), opened()
    if has_put:
        dead.put(NAME, {'number': 0}, {})
    late = underway(dead, 1)
    version = successor.put(NAME, {'number': 2}, {})
    arrive(successor, late)
    assert found_in(successor) == ({'number': 2}, version)
    assert successor.put(NAME, {'number': 3}, {}) == version + 1


def test_late_put_of_a_dead_writer_restores_no_deleted_value(opened):
    dead, successor = opened(), opened()
    dead.put(NAME, {'number': 0}, {})
    late = underway(dead, 1)
    successor.delete(NAME)
    arrive(successor, late)
    assert successor.get(NAME) is None


@pytest.mark.parametrize('size', [1, 400_000])
def test_puts_of_alternating_writers_are_all_seen(opened, size):
    stores = [opened(), opened()]
    for number, store in zip(range(1, 7), itertools.cycle(stores)):
        assert store.put(NAME, {'number': number}, chunk(number, size)) == number
        value = stores[0].get(NAME)
        assert (value.header, value.arrays['x'][-1]) == ({'number': number}, number)


@pytest.mark.parametrize('other', ['deletes', 'puts'])
def test_repeated_put_of_arrays_now_unchanged_is_whole(opened, redis_server, other):
    """Those that stay part from those that change: a try's parts must not bear the names of the try before."""
    store = opened()
    for number in range(1, 8):
        if number == STILL_AFTER + 1 and other == 'deletes':
            opened().delete(NAME)
        elif number == STILL_AFTER + 1:
            opened().put(NAME, {}, {})
        arrays = {str(i): np.full(12_500, number if i % 3 else 0.0) for i in range(30)}
        version = store.put(NAME, {'number': number}, arrays)
        for reader in (store, opened()):
            value = reader.get(NAME)
            assert (value.version, value.header) == (version, {'number': number})
            assert [set(array) for array in value.arrays.values()] == [{number if i % 3 else 0.0} for i in range(30)]
    with redis_server.client() as client:
        lives = {client.ttl(part) for part in client.keys(f'ding:{{{store.run}/{NAME}/*:part:*')}
    assert lives == {-1}, 'what was sent was used'


def test_parts_sent_are_reused_by_the_next_try():
    """Nor are they others, though an array was the same for long enough with this version; it is published but once."""
    sent, fresh = SentParts(lambda token: f'{token}:'), (f'{number:032x}' for number in itertools.count())
    for version in range(STILL_AFTER):
        pieces = encode_pieces({}, {'still': np.zeros(100), 'moving': np.full(100, version)})
        dict(sent.changed(pieces, next(fresh)))
        sent.flush(True)
    pieces = encode_pieces({}, {'still': np.zeros(100), 'moving': np.full(100, -1)})
    assert len(dict(sent.changed(pieces, next(fresh)))) == 1
    listed = sent.parts
    sent.keep()
    for _ in range(STILL_AFTER + 1):
        assert dict(sent.changed(pieces, next(fresh))) == {}
        assert sent.parts == listed
        sent.keep()
    sent.flush(True)
    assert len(dict(sent.changed(pieces, next(fresh)))) == 2, 'no longer in one part'
    assert [unit.age for unit in sent._units][1:] == [STILL_AFTER, 0]


def test_late_reply_of_an_older_version_lowers_no_version(forgetful_server, monkeypatch):
    """Two threads put: else the number comes again with other content once the server has forgotten it."""
    reply, is_late = redis_values._reply, threading.Event()

    def late(raw):
        if threading.current_thread() is not threading.main_thread():
            has_put.set()
            is_late.wait(WAIT_S)
        return reply(raw)

    has_put = threading.Event()
    with RedisStore(forgetful_server.url, 'late') as store, RedisStore(forgetful_server.url, 'late') as other:
        store.put(NAME, {}, chunk(1))
        monkeypatch.setattr(redis_values, '_reply', late)
        first = threading.Thread(target=store.put, args=(NAME, {}, chunk(2)))
        first.start()
        assert has_put.wait(WAIT_S)
        assert store.put(NAME, {}, chunk(3)) == 3
        is_late.set()
        first.join(WAIT_S)
        forgetful_server.restart()
        assert store.put(NAME, {}, chunk(4)) == 4
        assert number_of(other.get(NAME, newer_than=3)) == 4


def test_put_without_a_reply_behind_another_thread_counts_on(forgetful_server, monkeypatch):
    with RedisStore(forgetful_server.url, 'late') as store:
        store.put(NAME, {}, chunk(1))
        publish = store.client.server._values._publish

        def lost(*arguments):
            monkeypatch.undo()
            assert store.put(NAME, {}, chunk(2)) == 2
            publish(*arguments)
            raise StoreUnavailable('its reply is lost')

        monkeypatch.setattr(store.client.server._values, '_publish', lost)
        with pytest.raises(StoreUnavailable):
            store.put(NAME, {}, chunk(3))
        assert store.get(NAME).version == 3
        forgetful_server.restart()
        assert store.put(NAME, {}, chunk(4)) == 4


def test_start_version_is_separate_in_a_forked_child(forgetful_server):
    with RedisStore(forgetful_server.url, 'late') as store:

        def work():
            store.set_start_version(NAME, 9)
            store.put(NAME, {}, chunk(1))

        with child(work):
            assert store.get(NAME, timeout_s=WAIT_S).version == 10


def test_advance_of_alternating_writers_is_put_again(opened):
    stores = [opened(), opened()]
    for number, store in zip(range(1, 7), itertools.cycle(stores)):
        store.advance('s', 'r', OLDEST, NAME, {'number': number})
        store.flush()
        assert found_in(stores[0]) == ({'number': number}, number)


def test_put_that_is_always_overtaken_succeeds(opened, monkeypatch):
    slow, fast = opened(), opened()
    run, is_on = ServerSession.run, True

    def overtaken(session, script, keys, *arguments, before=None):
        nonlocal is_on
        if script == 'put' and is_on:
            is_on = False
            fast.put(NAME, {'number': 0}, {})
            is_on = True
        return run(session, script, keys, *arguments, before=before)

    monkeypatch.setattr(ServerSession, 'run', overtaken)
    version = slow.put(NAME, {'number': 1}, {})
    assert found_in(slow) == ({'number': 1}, version)


class Puts(RuleBasedStateMachine):
    """Writers put, die and come back as others; what they had under way arrives at any time, or never."""

    url = ''

    @initialize()
    def begin(self):
        self.stores, self.run, self.numbers = ExitStack(), next(_RUNS), itertools.count(1)
        self.looker, self.writers = self.open(), [self.open(), self.open()]
        self.newest = None  # number in the newest version
        self.author = None  # whose that is, and which of his puts
        self.heard = {}  # writer -> number in the newest version when he was last answered
        self.under_way = []

    def open(self):
        return self.stores.enter_context(RedisStore(self.url, self.run))

    def publish(self, store, number):
        self.newest, self.author = number, store

    @rule(who=st.integers(0, 1), way=st.sampled_from(['put', 'advance']))
    def put(self, who, way):
        number, store = next(self.numbers), self.writers[who]
        if way == 'put':
            store.put(NAME, {'number': number}, {})
        else:
            store.advance('s', 'r', OLDEST, NAME, {'number': number})
            store.flush()
        self.publish(store, number)
        self.heard[store] = number

    @rule(who=st.integers(0, 1))
    def send(self, who):
        number, store = next(self.numbers), self.writers[who]
        self.under_way.append((underway(store, number), store, number, self.heard.get(store)))

    @rule(data=st.data())
    def arrive(self, data):
        if self.under_way:
            late, store, number, heard = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
            arrive(self.looker, late)
            # Nothing has happened since he heard of the value, or only puts of his own, of before.
            if heard == self.newest or (self.author is store and number > self.newest):
                self.publish(store, number)

    @rule(who=st.integers(0, 1))
    def die(self, who):
        self.writers[who] = self.open()

    @rule()
    def delete(self):
        self.looker.delete(NAME)
        self.publish(None, None)

    @invariant()
    def look(self):
        value = self.looker.get(NAME)
        assert (value and value.header['number']) == self.newest

    def teardown(self):
        if hasattr(self, 'stores'):
            self.stores.close()


def test_puts_of_living_and_dead_writers_equal_a_model(redis_server):
    class Here(Puts):
        url = redis_server.url

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=100 if IS_LONG else 40,
            stateful_step_count=20,
            deadline=None,
            phases=[Phase.generate],
            derandomize=True,
        ),
    )
