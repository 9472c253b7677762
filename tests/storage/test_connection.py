"""Sending from where bytes are, past redis-py."""

import os
import socket
import threading

import pytest
import redis

from ding_store.storage.redis.resp import received, send


class Connection:
    """As much of redis-py's as is used."""

    def __init__(self, sock):
        self._sock = sock

    def send_packed_command(self, pieces, check_health):
        for piece in pieces:
            self._sock.sendall(piece)


@pytest.fixture
def ends():
    near, far = socket.socketpair()
    for end in (near, far):
        end.settimeout(60.0)
    with near, far:
        yield Connection(near), far


@pytest.mark.parametrize('lengths', [[5], [0, 3, 0, 70_001], [4_000_000], [9, 3_000_000, 2, 1_000_001], [3] * 2000])
def test_send_delivers_all_buffers_in_order(ends, lengths):
    near, far = ends
    buffers = [memoryview(os.urandom(length)) for length in lengths]
    received = bytearray()

    def receive():
        while len(received) < sum(lengths):
            received.extend(far.recv(1 << 16))

    thread = threading.Thread(target=receive)
    thread.start()
    send(near, buffers)
    thread.join(60.0)
    assert received == b''.join(buffers)


def test_errors_are_those_of_redis_py(ends):
    near, far = ends
    near._sock.settimeout(0.01)
    with pytest.raises(socket.timeout):
        near._sock.sendall(bytes(100_000_000))  # until nothing more fits in
    with pytest.raises(redis.TimeoutError):
        send(near, [b'x'])
    far.close()
    with pytest.raises(redis.ConnectionError):
        send(near, [b'x'])
    with pytest.raises(redis.ConnectionError):
        received(b'')
    assert received(b'x') == b'x'
