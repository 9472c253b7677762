"""The user of docs/howto/security.md, exactly as written there: all that the store does works, and nothing else."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import redis
from redis_server import RedisServer
from test_contract import TestRedisStore as RedisContract

import ding_store
from ding_store import errors
from ding_store.doctor.finding import OK
from ding_store.doctor.redis_checks import check_store, opened
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S

DEPLOY = Path(__file__).parents[2] / 'docs' / 'howto' / 'security.md'
LUA = Path(ding_store.__file__).parent / 'storage' / 'redis' / 'lua'


@pytest.fixture(scope='module')
def acl_server(redis_binary, tmp_path_factory):
    (line,) = re.findall(r'^user ding .*$', DEPLOY.read_text(), re.MULTILINE)
    file = tmp_path_factory.mktemp('acl') / 'users.acl'
    file.write_text(line.replace('CHANGE-ME', 'p%ss') + '\nuser default on nopass ~* &* +@all\n')
    with RedisServer(redis_binary, '--aclfile', str(file)) as server:
        server.url = f'unix://ding:p%25ss@{server.socket}'
        yield server


class TestRestrictedUser(RedisContract):
    @pytest.fixture(autouse=True)
    def _server(self, acl_server):
        self.server = acl_server
        with acl_server.client() as self.client:
            self.client.acl_log_reset()
            yield
            # Not one command was refused, not even one whose refusal something swallowed.
            refused = [row for row in self.client.acl_log() if row['object'] != 'client|setinfo']
            assert [(row['reason'], row['object']) for row in refused if row['object'] != 'client'] == []

    def test_restricted_user_may_send_large_payloads(self):
        with self.open() as store:
            array = np.arange(600_000)
            store.append('s', {}, {'x': array})
            store.put('v', {}, {'x': array})
            assert store.read('s')[0].arrays['x'][-1] == 599_999
            assert store.get('v').arrays['x'][-1] == 599_999
            store.delete('s')
            store.delete('v')
            assert self.client.keys(f'ding:*{store.run}*:part:*') == []


def use_all(url, run):
    """What needs each of the rights."""
    large, small = {'x': np.zeros(400_000, np.uint8)}, {'x': np.zeros(3)}
    with RedisStore(url, run) as store:
        reader = Reader(store, 's', 'reader')
        for arrays in (small, large):
            store.append('s', {}, arrays)
            assert len(reader.read(timeout_s=WAIT_S)) == 1
            reader.ack()
            for _ in range(3):
                store.put('v', {}, arrays)
            store.get('v')
        with redis.Redis.from_url(url) as client:
            client.xadd(f'ding:{{{run}/s/0}}:log', {'another': 'program'})  # No entry can come behind that.
        store.append('s', {}, large)
        store.add('counter', 1)
        assert len(reader.read(timeout_s=WAIT_S)) == 1
        reader.ack()
        assert store.read('s', timeout_s=0.01) == []
        assert store.info().streams
        store.retire()


def test_each_right_is_needed(redis_server):
    (line,) = re.findall(r'^user ding .*$', DEPLOY.read_text(), re.MULTILINE)
    words, url = line.split()[2:], f'unix://ding:CHANGE-ME@{redis_server.socket}'
    rights, needless = [word for word in words if word.startswith('+')], []
    with redis_server.client() as client:
        try:
            for number, missing in enumerate(['', *rights]):
                client.script_flush()
                client.acl_log_reset()
                client.execute_command('ACL', 'SETUSER', 'ding', 'reset', *(word for word in words if word != missing))
                try:
                    use_all(url, f'right{number}')
                    # A script that fails in its middle may be tried again, and then do without.
                    if missing.strip('+') not in {row['object'] for row in client.acl_log()}:
                        needless.append(missing)
                except (errors.StoreDenied, errors.AppendUnsettled) as error:
                    is_denied = errors.StoreDenied in (type(error), type(error.__cause__))
                    assert missing and is_denied, error  # noqa: PT017, PT018 it is looked at in the other case, too
        finally:
            client.execute_command('ACL', 'DELUSER', 'ding')
            client.delete(*client.keys('ding:{right*'))
    assert needless == ['']


def test_each_command_of_a_script_has_its_right():
    (line,) = re.findall(r'^user ding .*$', DEPLOY.read_text(), re.MULTILINE)
    text = ''.join(path.read_text() for path in sorted(LUA.glob('*.lua')))
    used = {*re.findall(r"\bp?call\('([A-Z]+)'", text), 'PERSIST'}  # of keep_parts
    assert used
    assert {f'+{name.lower()}' for name in used} <= set(line.split())


def test_rights_to_one_run_exclude_other_runs(redis_server):
    """As written there, for 6.2 and so for all: that run works, the doctor sees so, and no other run is let in."""
    text = DEPLOY.read_text()
    (line,) = re.findall(r'^user ding .*$', text, re.MULTILINE)
    (keys,) = re.findall(r'`(~ding:{pong}[^`]*)` \(6.2\)', text)
    url = f'unix://ding:CHANGE-ME@{redis_server.socket}'
    with redis_server.client() as client:
        words = [word for word in line.split()[2:] if word != '~ding:*'] + keys.split()
        client.execute_command('ACL', 'SETUSER', 'ding', 'reset', *words)
        try:
            use_all(url, 'pong')
            for other in ('other', 'pong2'):
                with pytest.raises(errors.StoreDenied):
                    use_all(url, other)
            assert check_store(url, functools.partial(opened, run='pong')).status == OK
            assert client.keys('ding:{doctor*') == []
        finally:
            client.execute_command('ACL', 'DELUSER', 'ding')


@pytest.mark.parametrize(
    'command',
    ['CONFIG GET *', 'KEYS *', 'SCAN 0', 'FLUSHALL', 'FLUSHDB', 'DEBUG SLEEP 0', 'SHUTDOWN', 'ACL LIST', 'MONITOR'],
)
def test_restricted_user_is_denied_other_commands(acl_server, command):
    with redis.Redis(unix_socket_path=str(acl_server.socket), username='ding', password='p%ss') as client:
        # Redis 7 refuses DEBUG to everybody, in words of its own.
        with pytest.raises(redis.ResponseError, match='no permissions|not allowed'):
            client.execute_command(*command.split())


def test_restricted_user_is_denied_other_keys(acl_server):
    with redis.Redis(unix_socket_path=str(acl_server.socket), username='ding', password='p%ss') as client:
        for call in (lambda: client.get('secret'), lambda: client.set('x', 1), lambda: client.delete('ding')):
            with pytest.raises(redis.exceptions.NoPermissionError):
                call()


@pytest.mark.parametrize('right', ['+evalsha', '+script|load', '+xadd', '+info', '~ding:*'])
def test_missing_right_is_named(redis_binary, tmp_path, right):
    (line,) = re.findall(r'^user ding .*$', DEPLOY.read_text(), re.MULTILINE)
    assert f' {right} ' in line
    file = tmp_path / 'users.acl'
    file.write_text(line.replace(f' {right} ', ' ') + '\nuser default on nopass ~* &* +@all\n')
    with RedisServer(redis_binary, '--aclfile', str(file)) as server:
        with pytest.raises(errors.StoreDenied, match='denies access') as caught:
            with RedisStore(f'unix://ding:CHANGE-ME@{server.socket}', 'run') as store:
                store.append('s', {}, {})
        assert 'CHANGE-ME' not in str(caught.value)
