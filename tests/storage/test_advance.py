"""What was sent without waiting for its reply is done, or said not to be, whatever happens to the server meanwhile."""

import pytest

from ding_store.errors import ServerFull, StoreUnavailable
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk


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


def test_a_server_that_is_killed_and_started_again(own_server, store):
    for number in range(5):
        advance(store, number)
        own_server.restart()
        store.settle()
        assert is_told(own_server.url, number)  # the entry is of an epoch that is over: its reader will see it again


@pytest.mark.parametrize('also_at_the_next', [False, True])
def test_connections_that_are_cut(own_server, store, also_at_the_next):
    for number in range(20):
        advance(store, number)
        with own_server.client() as client:
            client.client_kill_filter(_type='normal', skipme=True)
        if not also_at_the_next:
            store.settle()
            assert is_done(own_server.url, number)
    store.settle()
    assert is_done(own_server.url, 19)


def test_scripts_that_the_server_forgot(own_server, store):
    advance(store, 0)
    store.settle()
    for number in range(1, 4):
        with own_server.client() as client:
            client.script_flush()
        advance(store, number)
        store.settle()
        assert is_done(own_server.url, number)


def test_a_server_at_its_limit_is_an_error_that_names_it(own_server, store):
    place = store.append('s', {}, chunk(0))
    store.advance('s', 'r', place, 'news', {'at': 0})
    store.settle()
    with own_server.client() as client:
        client.config_set('maxmemory', 1)
        store.advance('s', 'r', place, 'news', {'at': 1})
        store.settle()
        assert is_told(own_server.url, 1), 'short news always go through: they take the place of those before'
        store.advance('s', 'r', place, 'news', {'at': 1, 'much': 'x' * 2000})
        with pytest.raises(ServerFull, match='maxmemory'):
            store.settle()
        client.config_set('maxmemory', 0)
    store.settle()
    store.advance('s', 'r', place, 'news', {'at': 2})
    store.settle()
    assert is_done(own_server.url, 2)


def test_a_server_that_stays_away_is_an_error(own_server):
    with RedisStore(own_server.url, 'run', reconnect_timeout_s=0.2) as store:
        store.register('s', 'r')
        advance(store, 0)
        store.settle()
        place = store.append('s', {}, chunk(1))
        own_server.kill()
        with pytest.raises(StoreUnavailable):
            store.advance('s', 'r', place, 'news', {'at': 1})


def test_a_store_that_is_closed_right_after_it(own_server):
    with RedisStore(own_server.url, 'run') as other:
        for number in range(20):
            with RedisStore(own_server.url, 'run') as store:
                store.register('s', 'r')
                advance(store, number)
            assert other.get('news', newer_than=number, timeout_s=WAIT_S).header == {'at': number}
