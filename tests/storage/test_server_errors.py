"""Error replies in mid-run: those that pass are waited out, the others name their fix; an append's fate is known."""

import contextlib
import re
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import redis
from redis_server import RedisServer

from ding_store.errors import AppendUnsettled, StoreUnavailable
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.replies import REPLIES, code_of
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

STREAM = 'experience'
PAGE = Path(__file__).parents[2] / 'docs' / 'server_errors.md'
#: Calls that are waited for, each with what makes its result comparable.
CALLS = {
    'append': lambda store: store.append(STREAM, {}, chunk(7)).number,
    'append in parts': lambda store: store.append(STREAM, {}, chunk(7, 300_000)).number,
    'read': lambda store: [number_of(entry) for entry in store.read(STREAM)],
    'ack': lambda store: store.ack(STREAM, 'learner', store.read(STREAM)[0].id),
    'put': lambda store: store.put('weights', {}, chunk(1)),
    'put in parts': lambda store: store.put('weights', {}, chunk(1, 300_000)),
    'get': lambda store: store.get('weights').version,
    'add': lambda store: store.add('counter', 1),
    'info': lambda store: sorted(store.info().streams),
    'register': lambda store: store.register(STREAM, 'another').number,
}
READS = ('read', 'get', 'info')


@contextlib.contextmanager
def busy(server):
    """Another client's script runs, and does not end by itself."""
    with server.client() as client, server.client() as other, ThreadPoolExecutor() as pool:
        client.config_set('lua-time-limit', 10)
        pool.submit(other.eval, 'while true do end', 0)  # which ends with an error
        eventually(lambda: replied(client) == {'BUSY'}, 'the server is busy')
        try:
            yield
        finally:
            client.script_kill()


@contextlib.contextmanager
def configured(server, **options):
    with server.client() as client:
        before = {name: client.config_get(name)[name] for name in options}
        for name, value in options.items():
            client.config_set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                client.config_set(name, value)


def few_replicas(server):
    return configured(server, **{'min-replicas-to-write': 1})


@contextlib.contextmanager
def demoted(server, stale='yes'):
    """A replica of a primary that is not there."""
    with configured(server, **{'replica-serve-stale-data': stale}), server.client() as client:
        client.execute_command('REPLICAOF', '127.0.0.1', '1')
        try:
            yield
        finally:
            client.execute_command('REPLICAOF', 'NO', 'ONE')


def without_primary(server):
    return demoted(server, stale='no')


@contextlib.contextmanager
def unwritable(server):
    """Its last snapshot failed."""
    directory = server.directory / 'gone'
    directory.mkdir()
    with configured(server, dir=str(directory), save='3600 1'), server.client() as client:
        directory.rmdir()
        client.set('x', 1)
        client.bgsave()
        eventually(lambda: client.info('persistence')['rdb_last_bgsave_status'] == 'err', 'it cannot write')
        try:
            yield
        finally:
            directory.mkdir()
            client.config_set('stop-writes-on-bgsave-error', 'no')


PASSING = {
    'BUSY': busy,
    'NOREPLICAS': few_replicas,
    'READONLY': demoted,
    'MASTERDOWN': without_primary,
    'MISCONF': unwritable,
}


def replied(client):
    """The codes of the replies to a write, inside a script and out of one; '' where it goes through."""
    codes = set()
    for command in (('SET', 'x', 1), ('EVAL', "return redis.call('SET', KEYS[1], 1)", 1, 'x')):
        try:
            client.execute_command(*command)
            codes.add('')
        except redis.RedisError as error:
            codes.add(code_of(error))
    return codes


@pytest.mark.parametrize('code', PASSING)
def test_reply_that_passes_is_waited_out_by_every_call(forgetful_server, code):
    """In a run that goes on, and as one process: no call raises, none is done twice."""
    with contextlib.ExitStack() as stores, ThreadPoolExecutor(len(CALLS)) as pool:
        opened = {
            name: stores.enter_context(RedisStore(forgetful_server.url, f'run{i}')) for i, name in enumerate(CALLS)
        }
        for store in opened.values():
            store.register(STREAM, 'learner')
            store.append(STREAM, {}, chunk(0))
            store.put('weights', {}, chunk(0))
        with PASSING[code](forgetful_server):
            with forgetful_server.client() as client:
                assert code in replied(client)
            waiting = {name: pool.submit(CALLS[name], store) for name, store in opened.items()}
            refused = [waiting[name] for name in CALLS if code in ('BUSY', 'MASTERDOWN') or name not in READS]
            assert not wait(refused, timeout=0.1, return_when=FIRST_COMPLETED).done
        results = {name: future.result(WAIT_S) for name, future in waiting.items()}
        assert results['append'] == results['append in parts'] == results['put'] == results['put in parts'] == 2
        assert (results['read'], results['get'], results['add'], results['info']) == ([0], 1, 1, [STREAM])
        for name in ('append', 'append in parts'):
            assert [number_of(entry) for entry in opened[name].read(STREAM)] == [0, 7]


@pytest.mark.parametrize('code', PASSING)
def test_append_given_up_on_a_reply_that_passes_arrives_once(forgetful_server, code):
    with RedisStore(forgetful_server.url, 'run', reconnect_timeout_s=0.1) as store:
        store.append(STREAM, {}, chunk(0))
        with PASSING[code](forgetful_server):
            for number in (1, 2):
                with pytest.raises(AppendUnsettled, match=re.escape(REPLIES[code].fix)) as caught:
                    store.append(STREAM, {}, chunk(number))
                assert not caught.value.needs_room
            with store.hasty(), pytest.raises(StoreUnavailable):
                store.put('weights', {}, {})
        store.settle()
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1, 2]


@pytest.mark.parametrize('how', ['REPLICAOF', 'CLIENT UNBLOCK'])
@pytest.mark.parametrize('call', ['read', 'get', 'append'])
def test_call_that_was_unblocked_waits_on(forgetful_server, call, how):
    options = dict(max_pending_bytes=1000)
    calls = {
        'read': lambda store: [number_of(entry) for entry in store.read(STREAM, timeout_s=WAIT_S)],
        'get': lambda store: store.get('weights', timeout_s=WAIT_S).version,
        'append': lambda store: store.append('full', {}, chunk(1, 80), timeout_s=WAIT_S).number,
    }
    with RedisStore(forgetful_server.url, 'run', **options) as store, forgetful_server.client() as client:
        with RedisStore(forgetful_server.url, 'run') as other, ThreadPoolExecutor() as pool:
            store.register('full', 'learner')
            first = store.append('full', {}, chunk(0, 80))
            waiting = pool.submit(calls[call], store)
            for _ in range(2):
                eventually(lambda: client.info('clients')['blocked_clients'] == 1, 'it waits')
                if how == 'REPLICAOF':
                    with demoted(forgetful_server):
                        eventually(lambda: client.info('clients')['blocked_clients'] == 0, 'it was unblocked')
                else:
                    (one,) = [one for one in client.client_list() if 'b' in one['flags']]
                    assert client.execute_command('CLIENT', 'UNBLOCK', one['id'], 'ERROR') == 1
                    eventually(lambda: one['id'] not in {o['id'] for o in client.client_list()}, 'it began anew')
            other.append(STREAM, {}, chunk(5))
            other.put('weights', {}, {})
            other.ack('full', 'learner', first)
            assert waiting.result(WAIT_S) == {'read': [5], 'get': 1, 'append': 2}[call]


def test_reader_goes_on_through_every_reply_that_passes(forgetful_server):
    """One writer, one learner, on the host plane as users have it: all entries once, in order."""
    total, seen = 40, []
    with open_store(forgetful_server.url, 'run') as writer, open_store(forgetful_server.url, 'run') as learner:
        reader = Reader(learner, STREAM, 'learner')

        def append():
            for number in range(total):
                writer.append(STREAM, {}, chunk(number, 2000 if number % 3 else 8))

        def read():
            while len(seen) < total:
                seen.extend(map(number_of, reader.read(timeout_s=WAIT_S)))
                reader.ack()

        with ThreadPoolExecutor() as pool:
            work = [pool.submit(append), pool.submit(read)]
            for fault in PASSING.values():
                with fault(forgetful_server):
                    threading.Event().wait(0.05)
            for future in work:
                future.result(WAIT_S)
    assert (seen, reader.num_lost, reader.num_duplicates) == (list(range(total)), 0, 0)


def test_server_that_loads_its_data_is_waited_out(redis_binary):
    """Each command of its file takes it 0.4 ms; it looks for clients after 1000 of them."""
    slow = ('--key-load-delay', '400', '--appendonly', 'yes', '--appendfsync', 'no')
    with RedisServer(redis_binary, *slow) as server, RedisStore(server.url, 'run') as store:
        store.append(STREAM, {}, chunk(0))
        with server.client() as client, client.pipeline(transaction=False) as pipe:
            for number in range(3000):
                pipe.set('key', number)
            pipe.execute()
        server.kill()
        server.launch()
        codes = set()
        with ThreadPoolExecutor() as pool, server.client() as client:
            appending = pool.submit(store.append, STREAM, {}, chunk(1))
            while not appending.done():
                codes |= replied(client)
            assert appending.result().number == 2
        assert 'LOADING' in codes
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1]
