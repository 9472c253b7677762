"""Error replies in mid-run: those that pass are waited out, the others name their fix; an append's fate is known."""

import contextlib
import re
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import redis
from proxy import DOWN, Proxy
from redis_server import RedisServer

from ding_store.errors import AppendUnsettled, ServerFull, StoreDenied, StoreError, StoreUnavailable
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.replies import REPLIES, ReplyKind, code_of, text_of
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

STREAM = 'experience'
PAGE = Path(__file__).parents[2] / 'docs' / 'reference' / 'server-errors.md'
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
def test_temporary_reply_is_waited_out_by_every_call(forgetful_server, code):
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
def test_append_abandoned_at_a_temporary_reply_arrives_once(forgetful_server, code):
    with RedisStore(forgetful_server.url, 'run', reconnect_timeout_s=0.1) as store:
        store.append(STREAM, {}, chunk(0))
        with PASSING[code](forgetful_server):
            for number in (1, 2):
                with pytest.raises(AppendUnsettled, match=re.escape(REPLIES[code].fix)) as caught:
                    store.append(STREAM, {}, chunk(number))
                assert not caught.value.needs_room
            with store.nonblocking(), pytest.raises(StoreUnavailable):
                store.put('weights', {}, {})
        store.flush()
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1, 2]


def blocked_in(client):
    return [one['id'] for one in client.client_list() if 'b' in one['flags']]


@pytest.mark.parametrize('how', ['REPLICAOF', 'CLIENT UNBLOCK'])
@pytest.mark.parametrize('call', ['read', 'get', 'append'])
def test_call_that_was_unblocked_waits_again(forgetful_server, call, how):
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
                    (blocked,) = blocked_in(client)
                    assert client.execute_command('CLIENT', 'UNBLOCK', blocked, 'ERROR') == 1
                    eventually(lambda blocked=blocked: blocked not in blocked_in(client), 'it was unblocked')
            other.append(STREAM, {}, chunk(5))
            other.put('weights', {}, {})
            other.ack('full', 'learner', first)
            assert waiting.result(WAIT_S) == {'read': [5], 'get': 1, 'append': 2}[call]


def test_reader_continues_after_every_temporary_reply(forgetful_server):
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
            for number in range(6000):
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


class TestDefinite:
    """Replies that do not pass: what raises names the fix, and the entry's fate is what the error says."""

    def check(self, store, other, error, match, refuse, mend):
        """Entry 1 is refused; when all is mended it arrives if, and only if, the error says that it may."""
        store.append(STREAM, {}, chunk(0))
        refuse()
        with pytest.raises(error, match=match) as caught:
            store.append(STREAM, {}, chunk(1))
        is_kept = isinstance(caught.value, AppendUnsettled)
        mend()
        store.append(STREAM, {}, chunk(2))
        reader = Reader(other, STREAM, 'learner')
        assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [0, *[1] * is_kept, 2]
        assert (reader.num_lost, reader.num_duplicates) == (0, 0)
        return caught.value

    def test_oom_is_server_full_and_the_entry_never_arrives(self, forgetful_server):
        with RedisStore(forgetful_server.url, 'run') as store, forgetful_server.client() as client:
            error = self.check(
                store,
                store,
                ServerFull,
                'maxmemory.*lower max_pending_bytes',
                lambda: client.config_set('maxmemory', 1),
                lambda: client.config_set('maxmemory', 0),
            )
            assert not isinstance(error, StoreUnavailable)

    @pytest.mark.parametrize('right', ['evalsha', 'xadd', 'hset', 'hmget', '@all'])
    def test_noperm_names_the_rights_and_the_fate(self, forgetful_server, right):
        """Without ``hset`` the script fails behind its append, and the store can ask nothing: the entry may arrive."""
        with forgetful_server.client() as client, RedisStore(forgetful_server.url, 'run') as other:
            client.execute_command('ACL', 'SETUSER', 'ding', 'on', '>p', '~*', '+@all')
            with RedisStore(f'unix://ding:p@{forgetful_server.socket}', 'run') as store:
                error = self.check(
                    store,
                    other,
                    StoreUnavailable,
                    'denies access.*rights in docs/howto/security.md',
                    lambda: client.execute_command('ACL', 'SETUSER', 'ding', f'-{right}'),
                    lambda: client.execute_command('ACL', 'SETUSER', 'ding', '+@all'),
                )
            assert isinstance(error, AppendUnsettled if right in ('hset', 'hmget') else StoreDenied)

    @pytest.mark.parametrize('part', ['meta', 'log', 'sizes', 'readers'])
    def test_wrongtype_names_the_keys_and_the_fate(self, forgetful_server, part):
        key = f'ding:{{run/{STREAM}/0}}:{part}'
        with RedisStore(forgetful_server.url, 'run') as store, forgetful_server.client() as client:
            store.append(STREAM, {}, chunk(0))
            client.rename(key, 'aside') if client.exists(key) else None
            client.set(key, 'of another program')
            with pytest.raises(StoreError, match='another type.*Delete the keys') as caught:
                store.register(STREAM, 'learner') if part == 'readers' else store.append(STREAM, {}, chunk(1))
            client.delete(key)
            client.rename('aside', key) if client.exists('aside') else None
            is_kept = isinstance(caught.value, AppendUnsettled)
            store.append(STREAM, {}, chunk(2))
            numbers = [number_of(entry) for entry in Reader(store, STREAM, 'learner').read(timeout_s=WAIT_S)]
            assert numbers == [0, *[1] * is_kept, 2]

    def test_password_that_changes_names_the_url(self, forgetful_server):
        with forgetful_server.client() as client, RedisStore(forgetful_server.url, 'run') as other:
            client.execute_command('ACL', 'SETUSER', 'ding', 'on', '>p', '~*', '+@all')
            url = f'unix://ding:p@{forgetful_server.socket}'

            def change():
                client.execute_command('ACL', 'SETUSER', 'ding', 'resetpass', '>other')
                client.execute_command('CLIENT', 'KILL', 'USER', 'ding')

            with RedisStore(url, 'run', reconnect_timeout_s=WAIT_S) as store:
                self.check(
                    store,
                    other,
                    StoreUnavailable,
                    'denies access.*DING_STORE_URL',
                    change,
                    lambda: client.execute_command('ACL', 'SETUSER', 'ding', 'resetpass', '>p'),
                )


#: As servers say them that are not at hand: Redis 7 puts the code first also where a script met with it.
OTHERS = {
    'READONLY': "READONLY You can't write against a read only replica. script: 0c, on @user_script:330.",
    'NOREPLICAS': 'NOREPLICAS Not enough good replicas to write. script: 0c, on @user_script:330.',
    'MISCONF': 'MISCONF Errors writing to the AOF file: No space left on device. script: 0c, on @user_script:330.',
    'BUSY': 'BUSY Redis is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.',
    'LOADING': 'LOADING Redis is loading the dataset in memory',
    'MOVED': 'MOVED 3999 127.0.0.1:6381',
    'ASK': 'ASK 3999 127.0.0.1:6381',
    'TRYAGAIN': 'TRYAGAIN Multiple keys request during rehashing of slot',
    'CLUSTERDOWN': 'CLUSTERDOWN The cluster is down',
    'UNBLOCKED': 'UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)',
    'MAXCLIENTS': 'ERR max number of clients reached',
    'SCRIPTKILLED': 'ERR Error running script (call to f_0c): @user_script:1: Script killed by user',
}
DEFINITE = {
    'OOM': "OOM command not allowed when used memory > 'maxmemory'. script: 0c, on @user_script:330.",
    'NOPERM': 'NOPERM ACL failure in script: User ding has no permissions to run the command script: 0c',
    'NOAUTH': 'NOAUTH Authentication required.',
    'WRONGPASS': 'WRONGPASS invalid username-password pair or user is disabled.',
    'DENIED': 'DENIED Redis is running in protected mode',
    'WRONGTYPE': 'WRONGTYPE Operation against a key holding the wrong kind of value script: 0c',
    'NOCLUSTER': 'ERR This instance has cluster support disabled',
    'CROSSSLOT': "CROSSSLOT Keys in request don't hash to the same slot",
    'UNKNOWN': 'ERR unknown command `EVALSHA`, with args beginning with: ',
    'NODB': 'ERR DB index is out of range',
    '': 'ERR something that nobody has heard of',
}


@pytest.fixture
def proxy(forgetful_server):
    with Proxy(forgetful_server.socket) as proxy:
        yield proxy


@pytest.mark.parametrize('code', OTHERS)
def test_injected_temporary_reply_is_waited_out(proxy, code):
    with RedisStore(proxy.url(), 'run') as store, ThreadPoolExecutor() as pool:
        store.append(STREAM, {}, chunk(0))
        proxy.reply = OTHERS[code].encode()
        waiting = pool.submit(store.append, STREAM, {}, chunk(1))
        eventually(lambda: proxy.num_replies > 2 or waiting.done(), 'it is tried again and again')
        proxy.reply = b''
        assert waiting.result(WAIT_S).number == 2
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1]


@pytest.mark.parametrize('code', DEFINITE)
def test_injected_definite_reply_raises_its_fix(proxy, code):
    fix = REPLIES[code].fix if code else 'documentation of Redis'
    with RedisStore(proxy.url(), 'run') as store:
        store.append(STREAM, {}, chunk(0))
        proxy.reply = DEFINITE[code].encode()
        with pytest.raises(StoreError, match=re.escape(fix)):
            store.add('counter', 1)
        with pytest.raises(StoreError, match=re.escape(fix)) as caught:
            store.append(STREAM, {}, chunk(1))
        is_kept = isinstance(caught.value, AppendUnsettled)
        assert is_kept != (code in ('NOAUTH', 'WRONGPASS', 'DENIED')), 'no script began, so nothing was appended'
        proxy.reply = b''
        store.append(STREAM, {}, chunk(2))
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, *[1] * is_kept, 2]


def test_refusal_after_a_lost_connection_keeps_the_entry(forgetful_server, proxy):
    """What was sent over that may come to the server late, when it has memory again."""
    with RedisStore(proxy.url(), 'run') as store, forgetful_server.client() as client:
        store.append(STREAM, {}, chunk(0))
        client.config_set('maxmemory', 1)
        proxy.cut_after(1, DOWN)
        with pytest.raises(AppendUnsettled, match='maxmemory') as caught:
            store.append(STREAM, {}, chunk(1))
        assert (proxy.num_cuts, caught.value.needs_room) == (1, True)
        client.config_set('maxmemory', 0)
        store.flush()
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1]


@pytest.mark.parametrize(
    'around',
    [
        '{}',
        '-{}',
        'Command # 3 (HGETALL ding:{{run/s/0}}:meta) of pipeline caused error: {}',
        'Error running script (call to f_0c): @user_script:1: @user_script: 1: -{}',
        '@user_script: 330: -{}',
        'Command # 1 (EVALSHA a\nb) of pipeline caused error: Error running script (call to f_0c): @user_script:1: {}',
    ],
)
def test_code_of_a_reply_is_found_in_any_text(around):
    text = 'NOREPLICAS Not enough good replicas to write.'
    error = redis.ResponseError(around.format(text))
    assert (code_of(error), text_of(error)) == ('NOREPLICAS', text)


def test_replies_of_the_table_are_all_tried():
    assert {*OTHERS, *DEFINITE, *PASSING, 'NOREDIS'} == {*REPLIES, ''}


#: What is done, in the words of the page; and what replies without a code of their own are called there.
DOES = {
    ReplyKind.RETRY: '| waits |',
    ReplyKind.RECONNECT: '| waits, over a new connection |',
    ReplyKind.FULL: '`ServerFull`',
    ReplyKind.DENIED: '`StoreDenied`',
    ReplyKind.UNSUITABLE: '`StoreUnsuitable`',
    ReplyKind.SETTING: '`ConfigError`',
    ReplyKind.DEFINITE: '`StoreError`',
}
NAMES = {
    'MAXCLIENTS': '`ERR max number of clients reached`',
    'SCRIPTKILLED': '`ERR ... Script killed by user`',
    'UNKNOWN': '`ERR unknown command`',
    'NODB': '`ERR DB index is out of range`',
    'NOCLUSTER': '`ERR ... cluster support disabled`',
    'NOREDIS': 'no reply of Redis',
}


def test_table_in_the_docs_equals_that_of_the_code():
    rows = {line.split('|')[1].strip(): line for line in PAGE.read_text().splitlines() if line.startswith('| ')}
    for code, reply in REPLIES.items():
        row = rows[NAMES.get(code, f'`{code}`')]
        assert DOES[reply.answer] in row, row
