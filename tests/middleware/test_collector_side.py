"""What a collector makes of a store that cannot take its chunk now."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from ding_store.middleware.chunks import ChunkWriter
from ding_store.middleware.collector_side import UNSETTLED, CollectorSide
from ding_store.middleware.side import STREAM
from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader

pytest.importorskip('ding')

HEADER = dict(kind='trajectories', env_step=1, env_episode=0, end_idx=[])


def test_a_server_that_comes_back_full_costs_no_chunk_and_no_collector():
    with open_store('memory://', max_pending_bytes=1000) as store:
        learner = Reader(store.another(), STREAM, 'learner')
        side = SimpleNamespace(_chunks=ChunkWriter(store, STREAM))

        def attempt(number):
            element = {'obs': np.full(64, number, np.float32)}
            return CollectorSide._try_append(side, [element], HEADER, {}, 0.0)

        number = 0
        while attempt(number) is not None:
            number += 1
        store.lose_memory(keep=store.snapshot())
        assert attempt(number) == UNSETTLED  # refused by the new life of a server that may have had it in the old one
        seen, deadline = [], time.monotonic() + 30
        while len(seen) <= number:
            seen += [int(entry.arrays['obs'][0, 0]) for entry in learner.read()]
            learner.ack()
            store.own_writer.check(now=True)
            assert time.monotonic() < deadline
        assert seen == list(range(number + 1))
        assert attempt(number + 1) is not None
