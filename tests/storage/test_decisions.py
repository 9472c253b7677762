"""Decisions at a failover: a real primary and its replica, and a store whose address leads to the one that lives."""

import contextlib
import os
import socket

import pytest
from redis_server import RedisServer

from ding_store.errors import ConfigError, VersionConflict
from ding_store.storage import open_store
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import eventually


def free_port():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


class Pair:
    """A primary, its replica, and the path of a socket that leads to one of them."""

    def __init__(self, primary, replica, port, path):
        self.primary, self.replica, self.port, self.path = primary, replica, port, path
        path.symlink_to(primary.socket)

    def attach(self):
        with self.replica.client() as client:
            client.replicaof('127.0.0.1', self.port)
            eventually(lambda: client.info('replication').get('master_link_status') == 'up', 'the replica has a copy')

    def detach(self):
        """The replica gets nothing more. It is promoted, but clients do not know that yet."""
        with self.replica.client() as client:
            client.replicaof('NO', 'ONE')

    def fail_over(self):
        self.primary.kill()
        self.detach()
        self.path.unlink()
        self.path.symlink_to(self.replica.socket)


@pytest.fixture
def pair(redis_binary):
    port = free_port()
    with RedisServer(redis_binary, '--port', str(port)) as primary, RedisServer(redis_binary) as replica:
        pair = Pair(primary, replica, port, replica.directory / 'store.sock')
        pair.attach()
        yield pair


@pytest.fixture
def opened(pair):
    with contextlib.ExitStack() as stack:

        def opened(min_replicas=1):
            return stack.enter_context(
                RedisStore(f'unix://{pair.path}', f'run-{os.getpid()}', min_replicas=min_replicas)
            )

        yield opened


def test_decision_on_a_replica_survives_a_failover(pair, opened, caplog):
    decider, other = opened(), opened()
    version = decider.decide('finish', {'reason': 'done'}, expected_version=0)
    pair.fail_over()
    found = other.get('finish')
    assert (found.header, found.version.put_id) == ({'reason': 'done'}, version.put_id)
    with pytest.raises(VersionConflict):
        other.decide('finish', {}, expected_version=0)
    assert decider.uphold('finish')
    assert other.get('finish').version.put_id == version.put_id
    assert 'min_replicas' not in caplog.text


@pytest.mark.parametrize('min_replicas', [0, 1])
def test_decision_that_no_replica_has_is_decided_again(pair, opened, caplog, min_replicas):
    decider, other = opened(min_replicas), opened()
    pair.detach()
    version = decider.decide('finish', {'reason': 'done'}, expected_version=0)
    assert ("decision 'finish' is on 0 of 1 replicas (min_replicas)" in caplog.text) == (min_replicas > 0)
    pair.fail_over()
    assert other.get('finish') is None
    assert decider.uphold('finish')
    found = other.get('finish')
    assert found.header == {'reason': 'done'}
    assert found.version > version
    assert decider.uphold('finish')
    assert other.get('finish').version == found.version


def test_decision_after_a_failover_stands_against_a_lost_one(pair, opened):
    decider, other = opened(0), opened(0)
    pair.detach()
    decider.decide('finish', {'by': 'decider'}, expected_version=0)
    pair.fail_over()
    other.decide('finish', {'by': 'other'}, expected_version=0)
    with pytest.raises(VersionConflict):
        decider.uphold('finish')
    assert decider.get('finish').header == {'by': 'other'}


def test_lost_decision_replaces_what_it_had_replaced(pair, opened):
    decider, other = opened(0), opened(0)
    first = other.decide('lease', {'by': 'other'}, expected_version=0)
    with pair.replica.client() as client:
        eventually(lambda: any(b'lease' in key for key in client.scan_iter()), 'the replica has the value')
    pair.detach()
    decider.decide('lease', {'by': 'decider'}, expected_version=first)
    pair.fail_over()
    assert other.get('lease').header == {'by': 'other'}
    assert decider.uphold('lease')
    assert other.get('lease').header == {'by': 'decider'}
    with pytest.raises(VersionConflict):
        other.uphold('lease')


@pytest.mark.parametrize('wrong', [-1, 0.5, '1', True, None])
def test_number_of_replicas_is_checked(wrong):
    with pytest.raises(ConfigError, match='min_replicas'):
        open_store('redis://localhost:1', min_replicas=wrong)
