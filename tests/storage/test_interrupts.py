"""Signals that raise, wherever the interpreter looks for them: what was appended is there once, and appends go on."""

import threading
import time

import numpy as np
import pytest
from inside import rings_of, stream_rings
from interrupting import Interrupt, InterruptedAt

from ding_store.compiled import join_past_caches, past_caches
from ding_store.errors import StoreError
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.testing import WAIT_S, chunk, number_of

#: Where an append keeps what must hang together.
_FILES = ('exactly_once/outbox.py', 'exactly_once/writer.py', 'shared_memory/rings.py', 'shared_memory/ring.py')


@pytest.mark.parametrize('transport', ['auto', 'off'])
def test_append_interrupted_anywhere_loses_nothing(redis_server, tmp_path, transport):
    writer = open_store(redis_server.url, f'interrupts-{transport}', host_plane=transport, host_cache_dir=str(tmp_path))
    near = open_store(redis_server.url, f'interrupts-{transport}', host_plane=transport, host_cache_dir=str(tmp_path))
    with writer, near:
        reader, appended, seen, places = Reader(near, 's', 'near'), [], [], []
        own = writer.client.own_writer
        writer.append('s', {}, chunk(0))
        for number in range(2, 4000, 2):
            tracing = InterruptedAt(number // 2, _FILES)
            with tracing:
                writer.append('s', {}, chunk(number - 1, size=20_000), timeout_s=WAIT_S)
            if tracing.where is None:
                break
            places.append(tracing.where)
            try:
                writer.append('s', {}, chunk(number, size=20_000), timeout_s=WAIT_S)
            except StoreError as e:
                raise AssertionError(f'interrupted at {tracing.where}') from e
            appended.append(number)
            while seen[-1:] != [number]:
                entries = reader.read(timeout_s=WAIT_S)
                assert entries, tracing.where
                seen += map(number_of, entries)
                reader.ack()
            own.check_stream('s')
            assert own.num_unacked('s') == 0, tracing.where
            if transport == 'auto':
                assert [ring.num_held for ring in rings_of(writer)] == [0], tracing.where
        assert len(set(places)) > 20
        assert seen == sorted(set(seen))
        assert set(appended) <= set(seen)
        assert (reader.num_lost, reader.num_duplicates) == (0, 0)


def test_append_within_an_append_is_refused(redis_server, monkeypatch):
    """As of a signal handler, whose entry would get the same sequence."""
    with open_store(redis_server.url, 'nested', host_plane='off') as store:
        reader = Reader(store, 's', 'near')
        store.append('s', {}, chunk(0))
        outbox = store.client.own_writer.stream_writer('s').outbox
        send_request, refused = outbox.send_request, []

        def announcing(said):
            if not refused:
                with pytest.raises(StoreError, match='within an append') as error:
                    store.append('s', {}, chunk(100), timeout_s=0.1)
                refused.append(error.value)
            return send_request(said)

        monkeypatch.setattr(outbox, 'send_request', announcing)
        for number in (1, 2, 3):
            store.append('s', {}, chunk(number))
        assert refused
        assert [number_of(entry) for entry in reader.read()] == [0, 1, 2, 3]


def test_region_released_by_gc_waits_for_no_lock(redis_server, tmp_path):
    """It may do so in any thread: also in one that the lock's holder waits for."""
    with open_store(redis_server.url, 'garbage', host_cache_dir=str(tmp_path)) as store:
        Reader(store, 's', 'near')
        store.append('s', {}, chunk(0))
        store.append('s', {}, chunk(1))
        rings = stream_rings(store, 's')
        payloads = [rings.pack({}, chunk(2))]
        dropping = threading.Thread(target=payloads.clear, daemon=True)
        with rings._lock:
            dropping.start()
            dropping.join(WAIT_S)
            assert not dropping.is_alive()
            (ring,) = rings._rings
            assert ring.num_held == 2
        store.append('s', {}, chunk(3))
        assert [region.is_released for region in ring._regions] == [False, True, False]


def test_copy_threads_stop_after_an_interrupt(monkeypatch):
    """It would write where something else is by then."""
    monkeypatch.setattr(past_caches, '_SHARED_BYTES', 1)
    monkeypatch.setattr(past_caches, '_PIECE_BYTES', past_caches.MIN_BYTES)
    monkeypatch.setattr(past_caches.os, 'sched_getaffinity', lambda pid: range(2))
    copy, helps, may_go_on = past_caches.copy_past_caches, threading.Event(), threading.Event()
    main, done = threading.main_thread(), []

    def copying(target, source):
        if threading.current_thread() is main:
            assert helps.wait(WAIT_S)
            threading.Timer(0.05, may_go_on.set).start()
            raise Interrupt
        helps.set()
        assert may_go_on.wait(WAIT_S)
        time.sleep(0.05)
        copy(target, source)
        done.append(True)

    monkeypatch.setattr(past_caches, 'copy_past_caches', copying)
    target = np.zeros(8 * past_caches.MIN_BYTES, np.uint8)
    with pytest.raises(Interrupt):
        join_past_caches(target, [np.ones(len(target), np.uint8)])
    assert done == [True]
    held = target.copy()
    assert 0 < held.sum() < len(target)
    helpers = [one for one in threading.enumerate() if one.daemon and '_help' in one.name]
    for one in helpers:
        one.join(WAIT_S)
    assert (target == held).all()
