"""What a process does if its replicas do not reply, and sessions that are closed while they are used."""

from collections import deque
from types import SimpleNamespace
from unittest.mock import Mock

from ding_store.storage.protocol import unwatched
from ding_store.storage.redis import replicas
from ding_store.storage.redis.replicas import Replicas
from ding_store.storage.redis.server_session import ServerSession


def test_replica_out_of_reach_is_tried_ever_less_often(monkeypatch, caplog):
    caplog.set_level('INFO', replicas.__name__)
    monkeypatch.setattr(replicas, 'PAUSE_S', 1e-6)
    find = Mock(return_value=['redis://127.0.0.1:1'])
    connection = SimpleNamespace(num_sessions=1, is_nonblocking=False, in_cluster=False, find_replicas=find)
    asked = Replicas(connection)

    def read():
        return asked.read([(b'key', memoryview(bytearray(1)))], unwatched)

    assert [read() for _ in range(3)] == [[0]] * 3
    said = [one for one in caplog.records if 'is not read for' in one.message]
    assert [one.args[1] for one in said] == [1e-6, 2e-6, 4e-6]
    assert [one.levelname for one in said] == ['INFO', 'WARNING', 'INFO']
    assert 'read_replicas=False' in said[1].message
    connection.is_nonblocking = True
    assert (read(), find.call_count) == ([0], 3)


def test_session_closes_while_a_call_borrows_from_it():
    class Borrowed(deque):
        """Another thread took the last connection between two looks."""

        def pop(self):
            self.clear()
            return super().pop()

    client = Mock()
    ServerSession(client, {}, Mock(), Borrowed([Mock()])).close()
    client.connection_pool.disconnect.assert_called_once_with(inuse_connections=False)
