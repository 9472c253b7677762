"""rediss://: an authority of one's own, client certificates, and every way to get it wrong."""

import contextlib
import shutil
import socket
import socketserver
import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from urllib.parse import quote, urlencode

import numpy as np
import pytest
from certificates import Authority
from flow import Flow
from proxy import Proxy
from redis_cluster import RedisCluster
from redis_server import RedisServer, has_tls
from sentinel_group import SentinelGroup

from ding_store import errors
from ding_store.doctor.cluster_checks import check_cluster
from ding_store.doctor.finding import OK
from ding_store.doctor.redis_checks import check_store
from ding_store.doctor.sentinel_checks import check_sentinels
from ding_store.environment import ENV_SENTINEL_PASSWORD, ENV_SENTINEL_TLS, ENV_SENTINEL_USER
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, number_of


@pytest.fixture(scope='module')
def authority(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp('tls') / 'ca')
    authority.issue('server')
    authority.issue('client')
    authority.issue('elsewhere', '10.1.2.3')
    return authority


@pytest.fixture(scope='module')
def strangers(tmp_path_factory):
    strangers = Authority(tmp_path_factory.mktemp('tls') / 'strangers')
    strangers.issue('client')
    return strangers


def url(port, authority, client=None, user=''):
    query = {'ssl_ca_certs': str(authority.ca)}
    if client is not None:
        query['ssl_certfile'], query['ssl_keyfile'] = client.pair('client')
    return f'rediss://{user}127.0.0.1:{port}?{urlencode(query)}'


@pytest.fixture
def proxy(redis_server, authority):
    """TLS ended by a proxy, as stunnel or a cloud's load balancer would."""
    with Proxy(redis_server.socket, tls=authority.context('server', wants_client=True)) as proxy:
        yield proxy


def exercise(store):
    """Small and large, both ways, through readers and values."""
    reader = Reader(store, 's', 'r')
    for i, size in enumerate((8, 10_000, 400_000)):
        store.append('s', {}, chunk(i, size))
    assert [number_of(entry) for entry in reader.read()] == [0, 1, 2]
    reader.ack()
    store.put('v', {}, {'x': np.arange(500_000)})
    assert store.get('v').arrays['x'][-1] == 499_999
    store.retire()


def test_client_certificate_of_a_private_authority_is_accepted(proxy, authority):
    with open_store(url(proxy.port, authority, authority), 'tls') as store:
        assert store.address == f'rediss://127.0.0.1:{proxy.port}'
        exercise(store)


def test_connections_cut_under_tls_lose_nothing(proxy, authority):
    with open_store(url(proxy.port, authority, authority), 'tls-cut') as store:
        reader = Reader(store, 's', 'r')
        for i in range(12):
            proxy.cut_after(1000 + 40_000 * i)
            store.append('s', {}, chunk(i, 30_000))
        assert [number_of(entry) for entry in reader.read()] == list(range(12))
        store.retire()


def test_client_without_a_certificate_is_refused(proxy, authority):
    with pytest.raises(errors.StoreUnavailable, match=f'rediss://127.0.0.1:{proxy.port}'):
        open_store(url(proxy.port, authority), connect_timeout_s=0.2)


def test_client_certificate_of_another_authority_is_refused(proxy, authority, strangers):
    with pytest.raises(errors.StoreUnavailable):
        open_store(url(proxy.port, authority, strangers), connect_timeout_s=0.2)


def test_server_of_another_authority_is_refused(proxy, strangers):
    with pytest.raises(errors.StoreDenied, match='TLS failed'):
        open_store(url(proxy.port, strangers, strangers), connect_timeout_s=0)


def test_certificate_for_another_address_is_refused(redis_server, authority):
    with Proxy(redis_server.socket, tls=authority.context('elsewhere', wants_client=False)) as proxy:
        with pytest.raises(errors.StoreDenied, match=r'TLS failed.*(mismatch|match)'):
            open_store(url(proxy.port, authority), connect_timeout_s=0)


def test_server_without_tls_is_named(redis_server, authority):
    with Proxy(redis_server.socket) as proxy:
        with pytest.raises(
            errors.StoreDenied, match=f'rediss://127.0.0.1:{proxy.port} does not speak TLS. Use redis://'
        ):
            open_store(url(proxy.port, authority), connect_timeout_s=0, socket_timeout_s=0.4, check_every_s=0.2)


def test_server_that_requires_tls_is_named(proxy):
    with pytest.raises(errors.StoreDenied, match=f'redis://127.0.0.1:{proxy.port} speaks TLS. Use rediss://'):
        open_store(f'redis://127.0.0.1:{proxy.port}', connect_timeout_s=0, socket_timeout_s=0.4, check_every_s=0.2)


@pytest.mark.parametrize('name', ['ssl_ca_certs', 'ssl_certfile', 'ssl_keyfile'])
def test_certificate_files_that_are_missing_are_named(redis_server, name):
    """Nothing is tried, and nothing waited for: the default patience would be."""
    with Proxy(redis_server.socket) as proxy:
        with pytest.raises(errors.ConfigError, match=f'{name} in the URL of rediss://127.0.0.1:{proxy.port}') as caught:
            open_store(f'rediss://127.0.0.1:{proxy.port}?{name}=/nowhere/hunter2.crt')
        assert 'hunter2' not in str(caught.value)
        assert proxy.num_connections == 0


def test_doctor_names_what_tls_requires(proxy, strangers):
    """A server of another authority: a password would change nothing."""
    finding = check_store(url(proxy.port, strangers, strangers), lambda url: open_store(url, connect_timeout_s=0))
    assert 'TLS failed' in finding.found
    assert 'ssl_ca_certs=' in finding.fix


@pytest.fixture(scope='module')
def tls_binary(redis_binary):
    if not has_tls(redis_binary):
        pytest.skip(f'{redis_binary} was built without TLS. Name another one in DING_STORE_REDIS_SERVER')
    return redis_binary


def test_redis_with_its_own_tls_is_accepted(tls_binary, authority):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    certificate, key = authority.pair('server')
    words = ['--tls-port', str(port), '--tls-cert-file', certificate, '--tls-key-file', key]
    words += ['--tls-ca-cert-file', str(authority.ca), '--requirepass', 'se/cret']
    with RedisServer(tls_binary, *words):
        with RedisStore(url(port, authority, authority, ':se%2Fcret@'), 'tls') as store:
            exercise(store)
        with pytest.raises(errors.StoreUnavailable):
            open_store(url(port, authority), connect_timeout_s=0.2)


def test_real_sentinels_with_tls_and_users_are_followed(tls_binary, authority, monkeypatch):
    with SentinelGroup(tls_binary, tls=authority) as group:
        for sentinel in group.sentinels:
            sentinel.client.execute_command('ACL', 'SETUSER', 'asker', 'on', '>se/cr@t', 'allchannels', '+@all')
        monkeypatch.setenv(ENV_SENTINEL_USER, 'asker')
        monkeypatch.setenv(ENV_SENTINEL_PASSWORD, 'se/cr@t')
        found = {finding.name: finding for finding in check_sentinels(group.url())}
        assert {name: one.status for name, one in found.items()} == dict.fromkeys(found, OK)
        assert 'from a replica: 127.0.0.1' in found['replica reads'].found
        with Flow(group.url(), 'tls', host_plane='off') as flow:
            group.primary().kill()
            flow.go_on()
        monkeypatch.setenv(ENV_SENTINEL_PASSWORD, 'wrong')
        with pytest.raises(errors.StoreDenied, match='the sentinels deny access'):
            open_store(group.url(), connect_timeout_s=0.1)


def test_real_cluster_with_tls_is_followed(tls_binary, authority):
    with RedisCluster(tls_binary, num_replicas=1, tls=authority) as cluster:
        assert {finding.name for finding in check_cluster(cluster.url()) if finding.status == OK} >= {'cluster'}
        with Flow(cluster.url(), 'tls', 's/0', host_plane='off') as flow:
            cluster.nodes[0].kill()
            flow.go_on()
        with open_store(cluster.url(), 'tls') as store:
            exercise(store)


def test_certificate_missing_during_a_reconnect_is_awaited(proxy, authority, tmp_path):
    own = tmp_path / 'ca.crt'
    shutil.copy(authority.ca, own)
    address = url(proxy.port, authority, authority).replace(urlencode({'': str(authority.ca)})[1:], quote(str(own), ''))
    with open_store(address, 'rotated') as store:
        store.append('s', {}, chunk(0))
        own.unlink()
        proxy.cut_after(10)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(store.append, 's', {}, chunk(1))
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            shutil.copy(authority.ca, own)
            waiting.result(WAIT_S)
        assert [number_of(entry) for entry in store.read('s')] == [0, 1]
        store.retire()


@contextlib.contextmanager
def sentinel_for(port, logins):
    """Stands in for a sentinel: it says that the primary is at this port. The server of the wheel has no TLS."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while line := self.rfile.readline():
                words = [self.rfile.readline() and self.rfile.readline().strip() for _ in range(int(line[1:]))]
                if words[0] == b'AUTH':
                    logins.append(words[1:])
                address = b'*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n' % (len(str(port)), port)
                self.wfile.write(address if words[0] == b'SENTINEL' else b'+OK\r\n')

    with socketserver.ThreadingTCPServer(('127.0.0.1', 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.server_address
        finally:
            server.shutdown()


def test_sentinels_and_servers_with_tls_are_accepted(proxy, authority, strangers, monkeypatch):
    def of_sentinel(port, authority):
        return url(port, authority, authority).replace('rediss://', 'rediss+sentinel://').replace('?', '/mymaster?')

    logins = []
    with (
        sentinel_for(proxy.port, logins) as address,
        Proxy(address, tls=authority.context('server', wants_client=True)) as sentinel,
    ):
        monkeypatch.setenv(ENV_SENTINEL_USER, 'asker')
        monkeypatch.setenv(ENV_SENTINEL_PASSWORD, 'se/cr@t')
        with open_store(of_sentinel(sentinel.port, authority), 'tls') as store:
            assert store.address == f'rediss+sentinel://127.0.0.1:{sentinel.port}/mymaster'
            exercise(store)
        assert set(map(tuple, logins)) == {(b'asker', b'se/cr@t')}
        with pytest.raises(errors.StoreDenied, match='TLS failed with the sentinels.*ssl_ca_certs=') as caught:
            open_store(of_sentinel(sentinel.port, strangers))
        assert 'se/cr@t' not in str(caught.value)
        monkeypatch.setenv(ENV_SENTINEL_TLS, '0')
        with open_store(of_sentinel(address[1], authority), 'tls') as store:
            exercise(store)
