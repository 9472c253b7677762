"""A server at its maxmemory: what is short always goes through, and what is refused leaves nothing there."""

import numpy as np
import pytest
import redis
from redis_server import left_by_runs

from ding_store.errors import ServerFull
from ding_store.storage.encoding.framing import encode, encode_pieces
from ding_store.storage.protocol import Backfill
from ding_store.storage.redis.resp import pack
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import chunk, number_of


@pytest.fixture
def client(forgetful_server):
    with forgetful_server.client() as client:
        yield client


@pytest.mark.parametrize('is_known', [False, True], ids=['new names', 'a new connection'])
def test_short_commands_at_maxmemory_succeed(forgetful_server, client, is_known):
    with RedisStore(forgetful_server.url, 'run') as store, RedisStore(forgetful_server.url, 'run') as other:
        places = [store.append('s', {}, chunk(number)) for number in range(3)]
        other.register('s', 'r')
        if is_known:
            other.advance('s', 'r', places[0], 'progress', {'at': 0})
            other.put('finish', {'reason': 'first'}, {})
            other.add('collectors', 1)
            other.flush()
            client.execute_command('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes')
        client.config_set('maxmemory', 1)
        assert other.register('s', 'r').number == int(is_known)
        assert other.register('another', 'r').number == 0
        with other.nonblocking():
            other.advance('s', 'r', places[1], 'progress', {'at': 1})
        other.flush()
        assert [number_of(entry) for entry in other.read('s', places[1])] == [2]
        assert other.stream_info('s').floor == 2
        assert (other.add('collectors', 1), other.add('collectors', 1)) == (int(is_known) + 1, int(is_known) + 2)
        other.put('finish', {'reason': 'done'}, {})
        assert (other.get('progress').header, other.get('finish').header) == ({'at': 1}, {'reason': 'done'})
        assert (sorted(other.info().streams), sorted(other.info().values)) == (['another', 's'], ['finish', 'progress'])
        other.retire()
        assert not left_by_runs(client)


@pytest.mark.parametrize('size', [400_000, 1_000_000], ids=['at once', 'in windows'])
def test_parts_of_a_refused_append_take_no_memory(forgetful_server, client, size):
    with RedisStore(forgetful_server.url, 'run') as store:
        store.append('s', {}, chunk(0))
        client.config_set('maxmemory', client.info('memory')['used_memory'] + 2_500_000)
        for _ in range(2):
            with pytest.raises(ServerFull):
                store.append('s', {}, chunk(1, size))
            assert client.keys('*:part:*') == []
        client.config_set('maxmemory', 0)
        store.append('s', {}, chunk(2, size))
        assert [number_of(entry) for entry in store.read('s')] == [0, 2]


def test_refused_backfill_keeps_the_parts_of_its_entry(forgetful_server, client):
    """As a reference it was refused, and then appended over the wire: parts of one payload are named alike."""
    with RedisStore(forgetful_server.url, 'run') as store:
        place = store.append('s', {}, chunk(0, 1_000_000))
        (item,) = store.client.own_writer.stream_writer('s').outbox._sent
        client.config_set('maxmemory', 1)
        with pytest.raises(ServerFull):
            store.client.server.backfill(Backfill('s', place.epoch, 1, place.number, item.payload.on_wire()))
        assert [number_of(entry) for entry in store.read('s')] == [0]


@pytest.mark.parametrize('is_there', [False, True])
def test_parts_of_a_fill_that_is_refused_take_no_memory(forgetful_server, client, is_there):
    """Unless an earlier try came through, whose reply was lost: then they are the entry's."""
    with RedisStore(forgetful_server.url, 'run') as store:
        place = store.append('s', {}, chunk(0))
        fill = Backfill('s', place.epoch, 1, place.number, encode({}, chunk(0, 1_000_000)))
        if is_there:
            store.client.server.backfill(fill)
        parts = sorted(client.keys('*:part:*'))
        assert bool(parts) == is_there
        client.config_set('maxmemory', client.info('memory')['used_memory'] + 2_500_000 * (not is_there))
        with pytest.raises(ServerFull):
            store.client.server.backfill(fill)
        assert sorted(client.keys('*:part:*')) == parts


def weights(number):
    return {f'layer{i}': np.full(1_000_000, number + i, np.uint8) for i in range(6)}


@pytest.mark.parametrize('is_fill', [False, True], ids=['put', 'fill'])
def test_parts_of_a_value_that_is_refused_take_no_memory(forgetful_server, client, is_fill):
    with RedisStore(forgetful_server.url, 'run') as store:

        def publish(number):
            if is_fill:
                return store.client.server.backfill_version('v', version, encode_pieces({}, weights(number)))
            return store.put('v', {}, weights(number))

        version = store.client.server.put('v', None, b'a reference') if is_fill else 0
        client.config_set('maxmemory', client.info('memory')['used_memory'] + 2_500_000)
        for _ in range(2):
            with pytest.raises(ServerFull):
                publish(1)
            assert client.keys('*:part:*') == []
        client.config_set('maxmemory', 0)
        assert publish(2)
        assert [array[0] for array in store.get('v').arrays.values()] == [2, 3, 4, 5, 6, 7]
        kept = client.keys('*:part:*')
        client.config_set('maxmemory', 1)
        with pytest.raises(ServerFull):
            store.put('v', {}, weights(3))
        assert sorted(client.keys('*:part:*')) == sorted(kept), 'those of the version that is there stay'
        assert [array[0] for array in store.get('v').arrays.values()] == [2, 3, 4, 5, 6, 7]


def test_parts_of_a_version_whose_second_try_is_refused_are_kept(forgetful_server, client, monkeypatch):
    with RedisStore(forgetful_server.url, 'run') as store:
        run = store.client.server._values._run

        def lossy(*arguments, **options):
            run(*arguments, **options)
            monkeypatch.setattr(store.client.server._values, '_run', run)
            client.config_set('maxmemory', 1)
            return run(*arguments, **options)

        monkeypatch.setattr(store.client.server._values, '_run', lossy)
        with pytest.raises(ServerFull):
            store.put('v', {}, weights(1))
        assert [array[0] for array in store.get('v').arrays.values()] == [1, 2, 3, 4, 5, 6]


def test_parts_of_an_entry_whose_second_try_is_refused_are_kept(forgetful_server, client, monkeypatch):
    with RedisStore(forgetful_server.url, 'run') as store:
        store.append('s', {}, chunk(0))
        append = store.client.server._appends._append

        def lossy(said, *place):
            append(said, *place)
            monkeypatch.setattr(store.client.server._appends, '_append', append)
            client.config_set('maxmemory', 1)
            return append(said, *place)

        monkeypatch.setattr(store.client.server._appends, '_append', lossy)
        assert store.append('s', {}, chunk(1, 400_000)).number == 2
        assert [number_of(entry) for entry in store.read('s')] == [0, 1]


def test_script_runs_after_a_command_that_fails(forgetful_server, client):
    """Else who asks what the server has, since one was refused, may ask before the script runs."""

    def before(connection):
        late = pack(('BLPOP', 'never', '0.3'))
        return 2, pack(('SET', 'key', 'value', 'no such option')) + late

    with RedisStore(forgetful_server.url, 'run') as store:
        keys = store.client.server.keys.of_value('v')
        put, known = ('token', 0, -1, b'payload', '', ''), ('writer', 1, '')
        session = store.client.server.connection.call('look', lambda session: session)
        session.run('put', keys, *put, *known)  # the server has the script
        with pytest.raises(redis.ResponseError, match='syntax'):
            session.run('put', keys, 'another', *put[1:3], b'new', '', '', 'writer', 2, '', before=before)
        assert store.client.server._values.newest('v', 0, False).payload == b'new'


def test_value_readable_on_one_host_is_requested_at_maxmemory(forgetful_server, client):
    with RedisStore(forgetful_server.url, 'run') as store:
        store.client.server.put('weights', None, b'a reference')
        client.config_set('maxmemory', 1)
        store.client.server.request_version('weights')
        assert store.client.server.wait_for_requests({'weights': ''}, 0.0)['weights']
