"""What was sent without waiting for its reply is done, or said not to be, whatever happens to the server meanwhile."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from ding_store.errors import ServerFull, StoreClosed, StoreUnavailable
from ding_store.storage.base import OLDEST
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually


@pytest.fixture
def store(own_server):
    with RedisStore(own_server.url, 'run') as store:
        store.register('s', 'r')
        yield store


def advance(store, number):
    store.advance('s', 'r', store.append('s', {}, chunk(number)), 'news', {'at': number})


def is_told(url, number):
    with RedisStore(url, 'run') as other:
        value = other.get('news')
        return value is not None and value.header == {'at': number}


def is_done(url, number):
    with RedisStore(url, 'run') as other:
        return is_told(url, number) and other.read('s') == []


def test_advance_survives_a_server_restart(own_server, store):
    for number in range(5):
        advance(store, number)
        own_server.restart()
        store.flush()
        assert is_told(own_server.url, number)  # the entry is of an epoch that is over: its reader will see it again


@pytest.mark.parametrize('also_at_the_next', [False, True])
def test_advance_survives_cut_connections(own_server, store, also_at_the_next):
    for number in range(20):
        advance(store, number)
        with own_server.client() as client:
            client.client_kill_filter(_type='normal', skipme=True)
        if not also_at_the_next:
            store.flush()
            assert is_done(own_server.url, number)
    store.flush()
    assert is_done(own_server.url, 19)


def test_advance_survives_flushed_scripts(own_server, store):
    advance(store, 0)
    store.flush()
    for number in range(1, 4):
        with own_server.client() as client:
            client.script_flush()
        advance(store, number)
        store.flush()
        assert is_done(own_server.url, number)


def test_advance_at_maxmemory_raises_an_error_that_names_it(own_server, store):
    place = store.append('s', {}, chunk(0))
    store.advance('s', 'r', place, 'news', {'at': 0})
    store.flush()
    with own_server.client() as client:
        client.config_set('maxmemory', 1)
        store.advance('s', 'r', place, 'news', {'at': 1})
        store.flush()
        assert is_told(own_server.url, 1), 'short news always go through: they take the place of those before'
        store.advance('s', 'r', place, 'news', {'at': 1, 'much': 'x' * 2000})
        with pytest.raises(ServerFull, match='maxmemory'):
            store.flush()
        client.config_set('maxmemory', 0)
    store.flush()
    store.advance('s', 'r', place, 'news', {'at': 2})
    store.flush()
    assert is_done(own_server.url, 2)


def test_advance_without_a_server_raises(own_server):
    with RedisStore(own_server.url, 'run', reconnect_timeout_s=0.2) as store:
        store.register('s', 'r')
        advance(store, 0)
        store.flush()
        place = store.append('s', {}, chunk(1))
        own_server.kill()
        with pytest.raises(StoreUnavailable):
            store.advance('s', 'r', place, 'news', {'at': 1})


def test_close_right_after_an_advance_sends_it(own_server):
    with RedisStore(own_server.url, 'run') as other:
        for number in range(20):
            with RedisStore(own_server.url, 'run') as store:
                store.register('s', 'r')
                advance(store, number)
            assert other.get('news', newer_than=number, timeout_s=WAIT_S).header == {'at': number}


@pytest.fixture
def unheard(own_server):
    """A store whose last news a server has got, but never read, before it was killed."""
    with RedisStore(own_server.url, 'run') as store:
        for number in range(2):
            store.advance('s', 'r', OLDEST, 'news', {'at': number})
        store.flush()
        own_server.signal(signal.SIGSTOP)
        store.advance('s', 'r', OLDEST, 'news', {'at': 2})
        own_server.kill()
        yield store


@pytest.mark.parametrize('is_noticed', [False, True])
def test_close_resends_an_advance_that_was_not_received(own_server, unheard, is_noticed):
    """A learner's: it appends nothing that others must have."""
    own_server.start()
    if is_noticed:
        with pytest.raises(StoreUnavailable), unheard.nonblocking():
            unheard.flush()
    unheard.close()
    assert is_told(own_server.url, 2)


@pytest.mark.parametrize('is_noticed', [False, True])
def test_close_without_a_server_does_not_wait_for_an_advance(unheard, caplog, is_noticed):
    if is_noticed:
        with pytest.raises(StoreUnavailable), unheard.nonblocking():
            unheard.flush()
    unheard.close()
    assert "closed before advance 'r' in 's' was done" in caplog.text
    assert unheard.client.server.connection._opener is None, 'nor is it started again for a store that has left'


@pytest.mark.parametrize('is_appending', [False, True])
def test_close_does_not_reconnect_to_a_server_that_hangs(own_server, caplog, monkeypatch, is_appending):
    """It was waited for already, for ``socket_timeout_s``."""
    store = RedisStore(own_server.url, 'run', check_every_s=0.1, socket_timeout_s=0.3, reconnect_timeout_s=0.3)
    for number in range(2):
        store.advance('s', 'r', OLDEST, 'news', {'at': number})
    store.flush()
    if is_appending:
        store.append('s', {}, chunk(0))
    own_server.signal(signal.SIGSTOP)
    store.advance('s', 'r', OLDEST, 'news', {'at': 2})
    monkeypatch.setattr(store.client.server.connection, '_target', lambda: pytest.fail('it is looked for'))
    store.close()
    own_server.signal(signal.SIGCONT)
    assert "closed before advance 'r' in 's' was done" in caplog.text


def test_close_resends_entries_and_advance_after_memory_loss(forgetful_server):
    """No connection is at rest that would show that the server was away: a reply is awaited."""
    with RedisStore(forgetful_server.url, 'run') as store:
        for number in range(2):
            store.advance('s', 'r', OLDEST, 'news', {'at': number})
        store.flush()
        store.append('s', {}, chunk(0))
        forgetful_server.signal(signal.SIGSTOP)  # else its reply may have come by then
        store.advance('s', 'r', OLDEST, 'news', {'at': 2})
        forgetful_server.restart()
        store.close()
        assert is_told(forgetful_server.url, 2)
        with RedisStore(forgetful_server.url, 'run') as other:
            assert len(other.read('s')) == 1


def test_close_during_a_resend_logs_an_unfinished_advance(unheard, caplog):
    """One that may wait for the server, as who reads ahead."""
    with ThreadPoolExecutor() as pool:
        flushed = pool.submit(unheard.flush)
        eventually(lambda: unheard.client.server.connection._waiting, 'it waits')
        unheard.close()
        with pytest.raises(StoreClosed):
            flushed.result(WAIT_S)
    assert "closed before advance 'r' in 's' was done" in caplog.text


def test_close_at_maxmemory_logs_an_unfinished_advance(own_server, store, caplog):
    with own_server.client() as client:
        for number in range(2):
            advance(store, number)
        store.flush()
        client.config_set('maxmemory', 1)
        store.advance('s', 'r', OLDEST, 'news', {'much': 'x' * 2000})
        store.close()
    assert 'maxmemory' in caplog.text


def test_advance_while_another_thread_closes_raises(store):
    """The server may pass over what comes from a connection that is closed by then."""

    def closed_meanwhile(session):
        store.client.server.connection._waiting[0] = redis.ConnectionError(
            'lost'
        )  # so that nobody in haste waits for a lock
        with ThreadPoolExecutor() as pool:
            pool.submit(store.client.server._unanswered.finish).result(WAIT_S)
        return []

    with pytest.raises(StoreClosed, match='closed during the call'):
        store.client.server._unanswered.send('advance', closed_meanwhile, lambda replies: None, lambda: None)
