"""What a collector makes of a store that cannot take its chunk now."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ding_store.config import StoreConfig
from ding_store.metrics.figures import APPEND_BUCKETS_S
from ding_store.middleware import collector_exchanger
from ding_store.middleware.chunks import ChunkWriter
from ding_store.middleware.collector_exchanger import UNSETTLED, CollectorExchanger, take_ordinal
from ding_store.middleware.partitions import Part, Partitioner
from ding_store.run.members import Member
from ding_store.run.recording import STREAM
from ding_store.run.session import RunSession
from ding_store.storage import open_store
from ding_store.storage.base import EntryId
from ding_store.storage.exactly_once.reader import Reader

pytest.importorskip('ding')

HEADER = dict(kind='trajectories', env_step=1, env_episode=0, end_idx=[])


def test_collector_of_a_full_restarted_server_loses_no_chunk():
    with open_store('memory://', max_pending_bytes=1000) as store:
        learner = Reader(store.another(), STREAM, 'learner')
        exchanger = SimpleNamespace(_chunks=[ChunkWriter(store, STREAM)])

        def attempt(number):
            element = {'obs': np.full(64, number, np.float32)}
            return CollectorExchanger._try_append(exchanger, 0, Part([element], HEADER), {}, 0.0)

        number = 0
        while attempt(number) is not None:
            number += 1
        store.lose_memory(keep=store.snapshot())
        assert attempt(number) == UNSETTLED  # refused by the new life of a server that may have had it in the old one
        seen, deadline = [], time.monotonic() + 60
        while len(seen) <= number:
            seen += [int(entry.arrays['obs'][0, 0]) for entry in learner.read()]
            learner.ack()
            store.client.own_writer.check(now=True)
            assert time.monotonic() < deadline
        assert seen == list(range(number + 1))
        assert attempt(number + 1) is not None


def test_collector_sends_its_last_chunks_before_it_leaves():
    with open_store('memory://', max_pending_bytes=1000) as store:
        learner, number, held = Reader(store.another(), STREAM, 'learner'), 0, []
        outbox = store.client.own_writer.stream_writer(STREAM).outbox
        session = SimpleNamespace(store=store, leaves_alone=False, leave=lambda: held.append(outbox.num_queued))
        exchanger = SimpleNamespace(_chunks=[ChunkWriter(store, STREAM)], _session=session)

        def attempt():
            part = Part([{'obs': np.zeros(64, np.float32)}], HEADER)
            return CollectorExchanger._try_append(exchanger, 0, part, {}, 0.0)

        while attempt() is not None:
            number += 1
        store.lose_memory(keep=store.snapshot())
        assert attempt() == UNSETTLED
        assert len(learner.read()) == number
        learner.ack()
        CollectorExchanger._leave(exchanger, None)
        assert held == [0]
        assert len(learner.read()) == 1


def test_forgetful_server_reuses_no_number_of_a_live_collector():
    with open_store('memory://') as store:
        members = [Member(f'c{number}', 'collector', number) for number in range(3)]
        for number, member in enumerate(members):
            assert take_ordinal(store) == number
            member.figures = {'ordinal': number}
            member.report(store)
        assert take_ordinal(store) == 3  # Which has not reported yet.
        before = store.snapshot()
        for _ in range(2):
            store.lose_memory()
            members[1].report(store)
            members[2].report(store)
            assert [take_ordinal(store) for _ in range(2)] == [3, 4]
        store.lose_memory(keep=before)
        assert take_ordinal(store) == 4


def test_at_maxmemory_collectors_still_get_numbers(forgetful_server):
    with open_store(forgetful_server.url) as store, forgetful_server.client() as client:
        client.config_set('maxmemory', 1)
        assert [take_ordinal(store) for _ in range(2)] == [0, 1]


def test_collector_waits_for_a_server_at_its_maxmemory(forgetful_server, caplog):
    with open_store(forgetful_server.url) as store, forgetful_server.client() as client:
        chunks, session = ChunkWriter(store, STREAM), RunSession(StoreConfig(enable=True), store=store)
        exchanger = SimpleNamespace(_chunks=[chunks], _session=session)

        def attempt(number):
            element = {'obs': np.full(64, number, np.float32)}
            return CollectorExchanger._try_append(exchanger, 0, Part([element], HEADER), {}, 0.01)

        assert attempt(0) is not None
        client.config_set('maxmemory', 1)
        assert [attempt(1), attempt(1)] == [None, None]
        assert [record.levelname for record in caplog.records if 'maxmemory' in record.message] == ['WARNING']
        gives_room = threading.Timer(0.2, client.config_set, ('maxmemory', 0))
        gives_room.start()
        assert session.wait_for('room', lambda timeout_s: attempt(1)) is not None
        assert [int(entry.arrays['obs'][0, 0]) for entry in store.read(STREAM)] == [0, 1]
        gives_room.join(20)  # It has the server's answer before its client is closed.


class Appending(CollectorExchanger):
    """A collector's exchanger outside of a task. Its partitions take what ``has_room`` says."""

    def __init__(self, num, has_room, wait_for):
        self._session = SimpleNamespace(wait_for=wait_for)
        self._partitioner, self._has_room = Partitioner(num, keeps_episodes=False), has_room
        self._backpressures = [SimpleNamespace(appended=lambda entry_id: None)] * num
        self._ordinal, self._num_rows, self._append_buckets, self.appended = 0, 0, {}, []

    def _try_append(self, partition, part, fixups, timeout_s):
        if not self._has_room(partition):
            return None
        self.appended.append(partition)
        return EntryId('', len(self.appended))

    def append(self, num_rows=4):
        rows = [{'obs': torch.zeros(1)} for _ in range(num_rows)]
        return self._append_parts(rows, dict(HEADER)), self._append_buckets, self._num_rows


def test_collector_counts_its_appends_by_duration(monkeypatch):
    """A chunk that was not appended, because the run ended, is not counted."""
    now = iter([0.0, 0.002, 1.0, 1.0025, 2.0, 52.0, 60.0])
    monkeypatch.setattr(collector_exchanger, 'time', SimpleNamespace(monotonic=lambda: next(now)))
    room = iter([True, True, True, False])
    exchanger = Appending(1, lambda partition: next(room), lambda what, attempt, *rest: attempt(0.5))
    assert [exchanger.append()[0] for _ in range(4)] == [True, True, True, False]
    assert exchanger._append_buckets == {'append_bucket_1': 2, 'append_bucket_10': 1}
    assert APPEND_BUCKETS_S[1] == 0.003
    assert len(APPEND_BUCKETS_S) == 10


def test_full_partition_holds_up_no_other_partition():
    """A learner that waits for a chunk would otherwise stop the learner whose stream is full, for ever."""
    full = {0}

    def wait_for(what, attempt, *rest):
        assert attempt(0.5) is None
        assert exchanger.appended == [1, 2]
        full.clear()
        return attempt(0.5)

    exchanger = Appending(3, lambda partition: partition not in full, wait_for)
    is_appended, buckets, num_rows = exchanger.append()
    assert (is_appended, sum(buckets.values()), num_rows) == (True, 3, 4)
    assert exchanger.appended == [1, 2, 0]
