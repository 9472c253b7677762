"""A password is in no error, log, repr, status or saved config, whatever goes wrong."""

import logging
import os
import subprocess
import sys
import traceback
from urllib.parse import quote

import pytest
from redis_server import RedisServer

from ding_store import errors
from ding_store.config import StoreConfig
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import chunk
from ding_store.storage.urls import address_of

SECRET = 'hunter2/#?@:%x'
QUOTED = quote(SECRET, safe='')
PIECES = ('hunter2', QUOTED)


def check(text):
    for piece in PIECES:
        assert piece not in text, text


@pytest.fixture
def server(redis_binary, tmp_path):
    file = tmp_path / 'users.acl'
    file.write_text(f'user default on >{SECRET} ~* &* +@all\nuser weak on >{SECRET} ~ding:* +info\n')
    with RedisServer(redis_binary, '--aclfile', str(file)) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_said(caplog, capfd):
    caplog.set_level(logging.DEBUG)
    yield
    check(caplog.text)
    said = capfd.readouterr()
    check(said.out + said.err)


def failing(call):
    """The whole traceback of a failure, causes included, as a log would have it."""
    with pytest.raises(errors.StoreError) as caught:
        call()
    text = ''.join(traceback.format_exception(caught.type, caught.value, caught.tb))
    # Lines of source code may name what they pass; values may not be there.
    check(text)
    check(repr(caught.value))
    return text


@pytest.mark.parametrize(
    'url',
    [
        f'redis://:{QUOTED}@127.0.0.1:1',
        f'redis://user:{QUOTED}@127.0.0.1:1/3',
        f'rediss://user:{QUOTED}@127.0.0.1:1?ssl_cert_reqs=none',
        f'unix://:{QUOTED}@/nowhere/redis.sock',
        f'redis://127.0.0.1:1?password={QUOTED}',
        f'redis://:{QUOTED}@host:port',
        f'redis://:{QUOTED}@host?nonsense={QUOTED}',
        f'redis://:{QUOTED}@host?overflow=block',
        f'redis://:{SECRET}@127.0.0.1:1',
        f'rediss://user:{SECRET}@127.0.0.1:1/0',
        'redis://:hunter2#x@127.0.0.1:1',
        'redis://:hunter2/x@127.0.0.1:1',
        'redis://:hunter2?x@127.0.0.1:1',
        'redis://:hunter2[x@127.0.0.1:1',
        f'reds://:{QUOTED}@host',
        f'redis+sentinel://:{QUOTED}@host',
        f'redis+sentinel://user:{QUOTED}@127.0.0.1:1,127.0.0.1:2/primary',
        f'redis+sentinel://:{SECRET}@127.0.0.1:1/primary',
        f'redis:user:{QUOTED}@host',
        'redis:/user:hunter2@host',
        'unix:/user:hunter2@x',
        'redis://host?password=x@hunter2',
        'rediss://host/0?ssl_password=x@hunter2#x',
        'redis://:x#hunter2@hunter2@host',
    ],
)
def test_password_is_in_no_error_of_a_bad_url(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failing(lambda: open_store(url, connect_timeout_s=0))
    check(address_of(url))


def test_unquoted_password_is_recognised():
    with pytest.raises(errors.ConfigError, match='percent-encode'):
        open_store('redis://:hunter2/x@127.0.0.1:1', connect_timeout_s=0)


def test_password_is_in_no_refusal(server):
    wrong = f'unix://:{QUOTED}hunter2@{server.socket}'
    assert 'denies access' in failing(lambda: open_store(wrong, connect_timeout_s=0))
    failing(lambda: open_store(f'unix://nobody:{QUOTED}@{server.socket}', connect_timeout_s=0))
    with open_store(f'unix://weak:{QUOTED}@{server.socket}') as store:
        for call in (
            lambda: store.append('s', {}, chunk(1)),
            lambda: store.read('s'),
            lambda: store.put('v', {}, {}),
            lambda: store.get('v'),
            lambda: store.add('n'),
            lambda: Reader(store, 's', 'r'),
            lambda: store.delete('s'),
            store.info,
        ):
            assert 'denies access' in failing(call)


def test_password_is_in_no_error_of_a_lost_server(server):
    url = f'unix://:{QUOTED}@{server.socket}'
    with RedisStore(url, 'run', reconnect_timeout_s=0.1, max_pending_bytes=500) as store:
        store.append('s', {}, chunk(1))
        failing(lambda: store.append('s', {}, chunk(1, 1000)))
        failing(lambda: store.append('s', {}, chunk(1, 45), timeout_s=0))
        server.kill()
        for call in (lambda: store.append('s', {}, {}), lambda: store.read('s'), store.info):
            failing(call)
    failing(lambda: store.read('s'))


def test_password_is_in_no_repr_or_status(server):
    url = f'unix://:{QUOTED}@{server.socket}'
    with open_store(url, 'run') as store, RedisStore(url, 'run') as plain:
        for shown in (
            store,
            plain,
            plain.client.server.connection,
            plain.client.server.connection._session,
            plain.info(),
            store.address,
            plain.client.own_writer,
        ):
            check(f'{shown!r} {shown}')
        check(repr(Reader(store, 's', 'r')))
        check(repr(plain.client.server.connection._session.client))


def test_configs_are_saved_so_passwords_are_refused(monkeypatch):
    monkeypatch.delenv('DING_STORE_URL', raising=False)
    for url in (
        f'redis://:{QUOTED}@host',
        f'redis+sentinel://:{QUOTED}@a:1,b:2/primary',
        f'redis://:{SECRET}@host',
        f'unix://user:{QUOTED}@/tmp/x.sock',
        f'redis://host?password={QUOTED}',
        f'rediss://host?ssl_password={QUOTED}',
        f'rediss://host?db=1&SSL_Password={QUOTED}',
        f'redis:user:{QUOTED}@host',
    ):
        with pytest.raises(errors.ConfigError, match='DING_STORE_URL') as caught:
            StoreConfig.from_block({'url': url})
        check(str(caught.value))
    with pytest.raises(errors.ConfigError, match='DING_STORE_URL') as caught:
        StoreConfig.from_block({'store_options': {'ssl_password': SECRET}})
    check(str(caught.value))
    for url in ('unix:///tmp/a:b@c.sock', 'redis://host:6379/0', 'rediss://host?ssl_certfile=x.pem', 'embedded://a:b'):
        assert StoreConfig.from_block({'url': url}).url == url
    monkeypatch.setenv('DING_STORE_URL', f'redis://:{QUOTED}@host')
    config = StoreConfig.from_block({'url': 'embedded://'})
    assert QUOTED in config.url
    check(f'{config} {config!r}')


@pytest.mark.parametrize('words', [['status'], ['forget', '--stream', 's', '--reader', 'r'], ['doctor'], ['run', '-h']])
def test_password_is_in_no_output_of_commands(server, words):
    environment = {**os.environ, 'DING_STORE_URL': f'unix://:{QUOTED}@{server.socket}', 'DING_STORE_RUN': 'run'}
    store = [] if words[0] != 'doctor' else ['--store', environment['DING_STORE_URL']]
    done = subprocess.run(
        [sys.executable, '-c', WITHOUT_PROBE, *words, *store],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.stdout + done.stderr
    check(done.stdout + done.stderr)
    server.kill()
    if words[0] in ('status', 'forget'):
        environment['DING_STORE_URL'] = f'redis://:{QUOTED}@127.0.0.1:1'
        done = subprocess.run(
            [sys.executable, '-c', SHORT, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        check(done.stdout + done.stderr)


#: The command, but for the process in which the doctor imports DI-engine, which takes seconds.
WITHOUT_PROBE = """
from ding_store.doctor import package_checks
package_checks.run_probe = lambda: {}
import sys
from ding_store.cli import main
sys.exit(main())
"""
#: The command, but for the patience with which it tries to connect.
SHORT = """
import sys
from ding_store.storage import options
options.RedisOptions.__init__.__defaults__ = (0.1, 0.1, 10.0, 30.0)
from ding_store.cli import main
sys.exit(main(sys.argv[1:]))
"""
