"""Who leaves brings what is left of his entries, but into no other run than his."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from embedded_helpers import kill
from redis_server import left_by_runs

from ding_store.errors import AppendUnsettled, StoreClosed, StoreError, StoreTimeout, StoreUnavailable
from ding_store.storage import client as client_module
from ding_store.storage import open_store
from ding_store.storage import store as store_module
from ding_store.storage.base import OLDEST
from ding_store.storage.embedded.private_server import running
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.memory.server import MemoryServer
from ding_store.storage.memory.store import MemoryStore
from ding_store.storage.redis.server_session import ServerSession
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.store import Store
from ding_store.storage.testing import WAIT_S, chunk, eventually, number_of

STREAM = 'experience'


def test_close_sends_entries_refused_by_a_full_stream():
    with MemoryStore(max_pending_bytes=3000) as store, store.another() as other:
        reader, number = Reader(other, STREAM, 'learner'), 0
        with contextlib.suppress(StoreTimeout):
            while True:
                store.append(STREAM, {}, chunk(number), timeout_s=0.0)
                number += 1
        store.lose_memory(keep=store.snapshot())
        with pytest.raises(AppendUnsettled):  # refused by a new life of a server that may have had it in the old one
            store.append(STREAM, {}, chunk(number), timeout_s=0.0)
        assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == list(range(number))
        reader.ack()
        store.close()
        assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [number]


def unsettled(store):
    """Three entries that nobody acks, and a fourth that a full server may have had when its reply was lost."""
    for number in range(3):
        store.append(STREAM, {}, chunk(number), timeout_s=0.0)
    outbox = store.client.own_writer.stream_writer(STREAM).outbox
    send_request, outbox.send_request = outbox.send_request, lambda said: unavailable()
    with pytest.raises(StoreUnavailable):
        store.append(STREAM, {}, chunk(3))
    outbox.send_request = send_request


def unavailable():
    raise StoreUnavailable('the reply was lost')


@pytest.mark.parametrize('is_named_again', [False, True])
def test_close_writes_nothing_into_a_retired_run(forgetful_server, caplog, is_named_again):
    with RedisStore(forgetful_server.url, 'run') as learner, forgetful_server.client() as client:
        store = RedisStore(forgetful_server.url, 'run')
        unsettled(store)
        learner.retire()
        assert not left_by_runs(client)
        if is_named_again:
            learner.register(STREAM, 'learner')
        keys = set(client.keys())
        store.close()
        assert set(client.keys()) == keys
        assert learner.read(STREAM) == []
    assert "closed with 1 entries of 'experience' not sent" in caplog.text


def retire_after_check(monkeypatch, store, learner):
    """The stream is there when the store asks for it, and no more when it announces something."""
    outbox = store.client.own_writer.stream_writer(STREAM).outbox
    check = outbox.check

    def then_retired():
        check()
        learner.retire()

    monkeypatch.setattr(outbox, 'check', then_retired)


def test_close_during_retire_resends_nothing(forgetful_server, monkeypatch):
    with RedisStore(forgetful_server.url, 'run') as learner:
        store = RedisStore(forgetful_server.url, 'run')
        unsettled(store)
        retire_after_check(monkeypatch, store, learner)
        store.close()
        assert learner.read(STREAM) == []


@pytest.mark.parametrize('end', [Store.close, Store.flush], ids=['close', 'flush'])
def test_end_waits_for_a_thread_that_sends_lost_entries(monkeypatch, end):
    is_lost, is_sending, is_over = threading.Event(), threading.Event(), threading.Event()
    append = MemoryServer.append

    def slow_append(server, request):
        if is_lost.is_set() and request.sequence:
            is_sending.set()
            is_over.wait(0.2)  # Meanwhile the other thread closes or flushes the store.
        return append(server, request)

    monkeypatch.setattr(MemoryServer, 'append', slow_append)
    with MemoryStore() as learner, ThreadPoolExecutor(1) as pool:
        store = learner.another()
        for number in range(4):
            store.append(STREAM, {}, chunk(number))
        learner.lose_memory()
        is_lost.set()
        sent = pool.submit(store.client.own_writer.check_stream, STREAM)
        assert is_sending.wait(WAIT_S)
        end(store)
        is_over.set()
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0, 1, 2, 3]
        sent.result(WAIT_S)


def test_flush_sends_remaining_entries_without_a_wait(redis_server):
    with RedisStore(redis_server.url, 'settled') as store:
        unsettled(store)
        store.flush()
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1, 2, 3]


def test_close_does_not_wait_for_an_absent_server(forgetful_server, caplog):
    store = RedisStore(forgetful_server.url, 'run', reconnect_timeout_s=0.2)
    store.append(STREAM, {}, chunk(0))
    forgetful_server.kill()
    with pytest.raises(StoreUnavailable):
        store.append(STREAM, {}, chunk(1))
    store.close()
    assert store.client.server.connection._opener is None, 'nor is it started again for a store that has left'
    assert "closed with 1 entries of 'experience' not sent" in caplog.text


@pytest.mark.parametrize('says_goodbye', [True, False])
def test_close_resends_entries_lost_by_an_idle_server(forgetful_server, monkeypatch, says_goodbye):
    """Clients of one whose host lost power find out when they next speak."""
    if not says_goodbye:
        monkeypatch.setattr(ServerSession, 'is_hung_up', lambda session: False)
    store = RedisStore(forgetful_server.url, 'run')
    for number in range(3):
        store.append(STREAM, {}, chunk(number))
    forgetful_server.restart()
    store.close()
    with RedisStore(forgetful_server.url, 'run') as learner:
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0, 1, 2]


def test_close_resends_entries_lost_by_a_memory_server():
    with MemoryStore() as learner:
        store = learner.another()
        store.append(STREAM, {}, chunk(0))
        learner.lose_memory()
        store.close()
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0]


def test_close_waits_a_moment_for_a_restarted_server(forgetful_server, monkeypatch):
    monkeypatch.setattr(client_module, 'LEAVE_S', WAIT_S)
    store = RedisStore(forgetful_server.url, 'run')
    store.append(STREAM, {}, chunk(0))
    forgetful_server.kill()
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(store.close)
        eventually(lambda: store.client.server.connection.is_away(), 'it is looked for')
        forgetful_server.start()
        closing.result(WAIT_S)
    with RedisStore(forgetful_server.url, 'run') as learner:
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0]


def set_time_to_leave(monkeypatch, seconds):
    for module in (client_module, store_module):
        monkeypatch.setattr(module, 'LEAVE_S', seconds)


@pytest.mark.parametrize('returns', [False, True])
def test_close_waits_once_for_an_absent_server(forgetful_server, tmp_path, monkeypatch, caplog, returns):
    """Entries and weights of his host are to go over the wire then; they stay in their files, too."""
    set_time_to_leave(monkeypatch, WAIT_S if returns else 0.5)
    here = dict(host_cache_dir=str(tmp_path), reconnect_timeout_s=600.0)
    store, other = (open_store(forgetful_server.url, 'run', **here) for _ in range(2))
    reader = Reader(other, STREAM, 'learner')
    reader.read()
    for number in range(3):
        store.append(STREAM, {}, chunk(number))
    store.put('weights', {}, {'w': np.zeros(1 << 18, np.uint8)})
    assert [number_of(entry) for entry in reader.read(timeout_s=WAIT_S)] == [0, 1, 2]
    forgetful_server.kill()
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(store.close)
        eventually(lambda: store.is_away, 'it is looked for')
        if returns:
            forgetful_server.start()
        closing.result(3 * WAIT_S)
    assert ('closed with entries that only this host can read' in caplog.text) is not returns
    assert ('closed with values that only this host can read' in caplog.text) is not returns
    if returns:
        with open_store(forgetful_server.url, 'run', host_plane='off') as elsewhere:
            assert [number_of(entry) for entry in elsewhere.read(STREAM)] == [0, 1, 2]
    other.close()


def test_close_waits_no_longer_than_the_backfilling_thread(forgetful_server, tmp_path, monkeypatch, caplog):
    """It has the lock of the value then, for as long as it tries to reach the server."""
    set_time_to_leave(monkeypatch, 0.5)
    store = open_store(forgetful_server.url, 'run', host_cache_dir=str(tmp_path), reconnect_timeout_s=2 * WAIT_S)
    store.put('weights', {}, {'w': np.zeros(1 << 18, np.uint8)})
    look = store.client.get

    def look_at_none(*arguments):
        if threading.current_thread() in store._values._fillers.values():
            forgetful_server.kill()
        return look(*arguments)

    monkeypatch.setattr(store.client, 'get', look_at_none)
    with RedisStore(forgetful_server.url, 'run') as elsewhere:
        with elsewhere.nonblocking(), contextlib.suppress(StoreUnavailable):  # it may be killed before it replies
            elsewhere.client.server.request_version('weights')
        eventually(lambda: store.client.server.connection._waiting, 'it waits for the server')
    with ThreadPoolExecutor() as pool:
        pool.submit(store.close).result(WAIT_S)
    assert 'closed with values that only this host can read' in caplog.text


@pytest.mark.parametrize('is_acked', [False, True])
def test_close_without_a_server_logs_entries_at_risk(forgetful_server, caplog, is_acked):
    store = RedisStore(forgetful_server.url, 'run', reconnect_timeout_s=0.2)
    store.register(STREAM, 'learner')
    store.append(STREAM, {}, chunk(0))
    place = store.append(STREAM, {}, chunk(1))
    if is_acked:
        store.ack(STREAM, 'learner', place)
        store.client.own_writer.check(now=True)
    forgetful_server.kill()
    store.close()
    assert ("closed with 2 unacked entries of 'experience'" in caplog.text) is not is_acked


def test_close_neither_waits_for_nor_logs_droppable_entries(forgetful_server, caplog, monkeypatch):
    """Reports of members, which nobody acks: all that has left of a run would wait for them."""
    options = {STREAM: {'max_pending_bytes': 1 << 20, 'overflow': 'drop_oldest'}}
    store = RedisStore(forgetful_server.url, 'run', stream_options=options)
    store.append(STREAM, {}, chunk(0))
    forgetful_server.kill()
    eventually(lambda: store.is_away, 'it is noticed')
    monkeypatch.setattr(store.client.server.connection, 'reach', lambda *arguments: pytest.fail('it is waited for'))
    store.close()
    assert 'closed with' not in caplog.text


def test_close_starts_no_server(tmp_path, caplog):
    """Its file has what was accepted."""
    store = RedisStore(f'embedded://{tmp_path}', 'run')
    store.append(STREAM, {}, chunk(0))
    kill(running(store._directory).supervisor_pid)
    eventually(lambda: store.is_away, 'it dies with its supervisor')
    store.close()
    assert running(store._directory) is None
    assert 'closed with' not in caplog.text
    with RedisStore(f'embedded://{tmp_path}', 'run') as learner:
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0]


@pytest.mark.parametrize('hears', [False, True])
def test_close_writes_nothing_into_the_next_run(forgetful_server, hears):
    """What a run left that ended in order is cleared by the next: its streams go on counting."""
    with RedisStore(forgetful_server.url, 'run') as learner:
        store = RedisStore(forgetful_server.url, 'run')
        unsettled(store)
        learner.clear()
        place = learner.register(STREAM, 'learner')
        if hears:
            store.close_for_writing()
            store.client.own_writer.publish(WAIT_S)
            store.client.own_writer.stream_writer(STREAM).outbox.check()
            store.flush()
        store.close()
        assert learner.read(STREAM, place) == []


def test_close_writes_nothing_into_a_cleared_memory_server():
    with MemoryStore() as learner:
        store = learner.another()
        unsettled(store)
        learner.clear()
        learner.register(STREAM, 'learner')
        store.close()
        assert learner.read(STREAM) == []


@pytest.mark.parametrize('is_named_again', [False, True])
def test_close_with_shared_memory_adds_nothing_to_a_retired_run(forgetful_server, tmp_path, caplog, is_named_again):
    options = dict(run='run', host_cache_dir=str(tmp_path))
    with open_store(forgetful_server.url, **options) as learner, forgetful_server.client() as client:
        learner.register(STREAM, 'learner')
        store = open_store(forgetful_server.url, **options)
        for number in range(3):
            store.append(STREAM, {}, chunk(number))
        assert store.client.own_writer.stream_writer(STREAM).outbox.has_references
        store.close_for_writing()  # else its thread may look after the stream at any moment
        learner.retire()
        if is_named_again:
            learner.register(STREAM, 'learner')
        keys = set(client.keys())
        store.close()
        assert set(client.keys()) == keys
        assert learner.read(STREAM) == []
    assert 'closed with' not in caplog.text
    assert not list(tmp_path.rglob('*.ring'))


def test_writer_closed_for_writing_resends_nothing(forgetful_server):
    """A run that is retired meanwhile is no server that lost its memory."""
    with RedisStore(forgetful_server.url, 'run') as learner, forgetful_server.client() as client:
        store = RedisStore(forgetful_server.url, 'run')
        for number in range(3):
            store.append(STREAM, {}, chunk(number))
        store.close_for_writing()
        learner.retire()
        store.client.own_writer.check(now=True)
        store.client.own_writer.check_stream(STREAM)
        store.close()
        assert not left_by_runs(client)


def test_request_for_backfills_creates_no_stream(redis_server):
    with RedisStore(redis_server.url, 'asked') as store, redis_server.client() as client:
        store.client.own_writer.check_stream('nothing')
        store.client.server.request_backfills('nothing')
        store.forget('nothing', 'reader')
        store.ack('nothing', 'reader', OLDEST)
        assert store.delete('nothing') is False
        assert client.keys('*asked*nothing*') == []
        assert store.info().streams == {}


@pytest.mark.parametrize('is_concluded', [False, True])
def test_close_resends_forgotten_entries(forgetful_server, is_concluded):
    """Its memory lost is no run retired."""
    with RedisStore(forgetful_server.url, 'run') as learner:
        store = RedisStore(forgetful_server.url, 'run')
        unsettled(store)
        if is_concluded:
            store.close_for_writing()
        forgetful_server.restart()
        store.flush()
        store.close_for_writing()
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0, 1, 2, 3]
        store.close()
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0, 1, 2, 3]


def test_close_resends_entries_of_a_lost_memory():
    with MemoryStore() as learner, learner.another() as store:
        for number in range(3):
            store.append(STREAM, {}, chunk(number))
        store.close_for_writing()
        learner.lose_memory()
        store.client.own_writer.check(now=True)
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0, 1, 2]
        learner.lose_memory()
        store.client.own_writer.check(now=True)
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0, 1, 2]


@pytest.mark.parametrize('is_concluded', [False, True])
def test_close_with_shared_memory_resends_forgotten_entries(forgetful_server, tmp_path, is_concluded):
    options = dict(run='run', host_cache_dir=str(tmp_path))
    with open_store(forgetful_server.url, **options) as learner:
        learner.register(STREAM, 'learner')
        store = open_store(forgetful_server.url, **options)
        for number in range(4):
            store.append(STREAM, {}, chunk(number))
        store.append('members', {}, {})
        assert store.client.own_writer.stream_writer(STREAM).outbox.has_references
        if is_concluded:
            store.close_for_writing()
        forgetful_server.restart()
        store.close()
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0, 1, 2, 3]


def test_writer_with_shared_memory_resends_forgotten_entries(forgetful_server, tmp_path):
    options = dict(run='run', host_cache_dir=str(tmp_path), check_every_s=0.1)
    with open_store(forgetful_server.url, **options) as learner, open_store(forgetful_server.url, **options) as store:
        learner.register(STREAM, 'learner')
        for number in range(4):
            store.append(STREAM, {}, chunk(number))
        store.close_for_writing()
        forgetful_server.restart()
        eventually(lambda: [number_of(entry) for entry in learner.read(STREAM)] == [0, 1, 2, 3], 'announced again')


def test_close_logs_entries_that_it_cannot_resend(forgetful_server, caplog):
    store = RedisStore(forgetful_server.url, 'run', reconnect_timeout_s=0.2)
    unsettled(store)
    forgetful_server.restart()
    stream_writer = store.client.own_writer.stream_writer(STREAM)
    with stream_writer.tried(WAIT_S):  # else it is announced again at the reconnect
        stream_writer.outbox.check()
    forgetful_server.kill()
    store.close()
    assert "closed with 4 entries of 'experience' not sent" in caplog.text


def test_append_after_closing_adds_nothing_to_the_next_run(forgetful_server):
    with RedisStore(forgetful_server.url, 'run') as learner, forgetful_server.client() as client:
        store = RedisStore(forgetful_server.url, 'run')
        unsettled(store)
        store.close_for_writing()
        assert store.append(STREAM, {}, chunk(4)).number == 5
        learner.retire()
        for is_named_again in (False, True):
            if is_named_again:
                learner.register(STREAM, 'learner')
            keys = set(client.keys())
            with pytest.raises(StoreClosed, match='retired'):
                store.append(STREAM, {}, chunk(5))
            assert set(client.keys()) == keys
        store.close()
        assert learner.read(STREAM) == []


def test_append_after_closing_in_a_retired_run_is_refused(forgetful_server, monkeypatch):
    with RedisStore(forgetful_server.url, 'run') as learner:
        store = RedisStore(forgetful_server.url, 'run')
        unsettled(store)
        store.close_for_writing()
        retire_after_check(monkeypatch, store, learner)
        with pytest.raises(StoreError, match='retired'):
            store.append(STREAM, {}, chunk(4))
        store.close()
        assert learner.read(STREAM) == []


def test_append_after_closing_resends_forgotten_entries(forgetful_server):
    with RedisStore(forgetful_server.url, 'run') as learner, RedisStore(forgetful_server.url, 'run') as store:
        unsettled(store)
        store.close_for_writing()
        forgetful_server.restart()
        assert store.append(STREAM, {}, chunk(4)).number == 5
        assert [number_of(entry) for entry in learner.read(STREAM)] == [0, 1, 2, 3, 4]


def test_append_after_closing_without_a_server_is_kept(forgetful_server):
    with RedisStore(forgetful_server.url, 'run') as store:
        store.append(STREAM, {}, chunk(0))
        store.close_for_writing()
        forgetful_server.kill()
        with store.nonblocking(), pytest.raises(StoreUnavailable):
            store.append(STREAM, {}, chunk(1))
        forgetful_server.start()
        store.flush()
        assert [number_of(entry) for entry in store.read(STREAM)] == [0, 1]
