"""A server at its maxmemory: what is short, and makes room or ends the run, always goes through."""

import pytest

from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import chunk, number_of


@pytest.fixture
def client(forgetful_server):
    with forgetful_server.client() as client:
        yield client


@pytest.mark.parametrize('is_known', [False, True], ids=['new names', 'a new connection'])
def test_what_is_short_goes_through(forgetful_server, client, is_known):
    with RedisStore(forgetful_server.url, 'run') as store, RedisStore(forgetful_server.url, 'run') as other:
        places = [store.append('s', {}, chunk(number)) for number in range(3)]
        other.register('s', 'r')
        if is_known:
            other.advance('s', 'r', places[0], 'progress', {'at': 0})
            other.put('finish', {'reason': 'first'}, {})
            other.settle()
            client.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
        client.config_set('maxmemory', 1)
        assert other.register('s', 'r').number == int(is_known)
        assert other.register('another', 'r').number == 0
        with other.hasty():
            other.advance('s', 'r', places[1], 'progress', {'at': 1})
        other.settle()
        assert [number_of(entry) for entry in other.read('s', places[1])] == [2]
        assert other.stream_info('s').floor == 2
        other.put('finish', {'reason': 'done'}, {})
        assert (other.get('progress').header, other.get('finish').header) == ({'at': 1}, {'reason': 'done'})
        client.config_set('maxmemory', 0)
        other.register('another', 'r')
        other.put('finish', {'reason': 'done'}, {})
        other.advance('s', 'r', places[2], 'progress', {'at': 2})
        other.settle()
        assert sorted(other.info().values) == ['finish', 'progress'], 'they are on the list when there is room for it'
        assert sorted(other.info().streams) == ['another', 's']
