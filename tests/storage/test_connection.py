"""Sending from where bytes are, and receiving where they stay, past redis-py."""

import os
import socket
import threading

import pytest
import redis

from ding_store.storage.wire import connection
from ding_store.storage.wire.connection import read_entries, send


class Connection:
    """As much of redis-py's as is used."""

    def __init__(self, sock):
        self._sock = sock

    def send_packed_command(self, pieces, check_health):
        for piece in pieces:
            self._sock.sendall(piece)

    def read_response(self):
        return 'left to redis-py'


@pytest.fixture
def ends():
    near, far = socket.socketpair()
    for end in (near, far):
        end.settimeout(10.0)
    with near, far:
        yield Connection(near), far


def string(text):
    return b'$%d\r\n%b\r\n' % (len(text), text)


def entry(payload, number=b'5-0', name=b'p'):
    fields = (b'e', b'epoch-0', b'w', b'host:1:ab', b's', b'17', name, payload)
    return b'*2\r\n' + string(number) + b'*8\r\n' + b''.join(map(string, fields))


def reply(*entries):
    return b'*1\r\n*2\r\n' + string(b'ding:{r/s/0}:log') + b'*%d\r\n' % len(entries) + b''.join(entries)


@pytest.mark.parametrize('lengths', [[5], [0, 3, 0, 70_001], [4_000_000], [9, 3_000_000, 2, 1_000_001], [3] * 2000])
def test_what_is_sent_comes_whole_and_in_order(ends, lengths):
    near, far = ends
    buffers = [memoryview(os.urandom(length)) for length in lengths]
    received = bytearray()

    def receive():
        while len(received) < sum(lengths):
            received.extend(far.recv(1 << 16))

    thread = threading.Thread(target=receive)
    thread.start()
    send(near, buffers)
    thread.join(10.0)
    assert received == b''.join(buffers)


def test_one_large_entry_is_received_in_place(ends):
    near, far = ends
    payload = os.urandom(40_000)
    far.sendall(reply(entry(payload)) + b'+next')
    ((_, (found,)),) = read_entries(near)
    assert found[0] == b'5-0'
    assert dict(zip(found[1][::2], found[1][1::2])) == {
        b'e': b'epoch-0',
        b'w': b'host:1:ab',
        b's': b'17',
        b'p': payload,
    }
    assert isinstance(found[1][7], memoryview)
    assert found[1][7].readonly
    assert near._sock.recv(100) == b'+next'


def test_a_large_entry_may_come_in_pieces(ends):
    near, far = ends
    payload = os.urandom(40_000)
    whole = reply(entry(payload))
    far.sendall(whole[:200])

    def rest():
        for at in range(200, len(whole), 9_999):
            far.sendall(whole[at : at + 9_999])

    thread = threading.Thread(target=rest)
    thread.start()
    ((_, (found,)),) = read_entries(near)
    thread.join(10.0)
    assert found[1][7] == payload


@pytest.mark.parametrize(
    'text',
    [
        b'*-1\r\n',
        b'-ERR no\r\n',
        reply(entry(b'small')),
        reply(entry(bytes(40_000)), entry(bytes(40_000))),
        reply(entry(bytes(40_000), name=b'q')),
        reply(entry(bytes(40_000)))[:50],
    ],
    ids=['nothing', 'error', 'small', 'several', 'foreign', 'too little yet'],
)
def test_of_other_replies_nothing_is_taken(ends, text):
    near, far = ends
    far.sendall(text)
    assert read_entries(near) == 'left to redis-py'
    assert near._sock.recv(len(text), socket.MSG_WAITALL) == text


def test_errors_are_those_of_redis_py(ends):
    near, far = ends
    near._sock.settimeout(0.01)
    with pytest.raises(redis.TimeoutError):
        read_entries(near)
    far.sendall(reply(entry(bytes(40_000)))[:30_000])
    far.close()
    with pytest.raises(redis.ConnectionError):
        read_entries(near)
    with pytest.raises(redis.ConnectionError):
        send(near, [b'x'])
    assert connection.checked(len, b'abc') == 3
