"""The server dies in the middle of the learner's loop, at any command: it goes on, and all is said later."""

import select
import signal
import threading
from time import monotonic

import numpy as np
import pytest
import redis
import torch

pytest.importorskip('ding')

from ding.framework.context import OnlineRLContext  # noqa: E402
from inside import slots_of  # noqa: E402
from learners import HEADER, Exchanger, Learner, step  # noqa: E402

from ding_store.buffer import StoreBuffer  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import StoreUnavailable  # noqa: E402
from ding_store.middleware.backpressure import Backpressure  # noqa: E402
from ding_store.middleware.chunks import ChunkWriter  # noqa: E402
from ding_store.middleware.ingest_plan import replay_figures  # noqa: E402
from ding_store.middleware.weights import WeightsSender  # noqa: E402
from ding_store.run.recording import STREAM  # noqa: E402
from ding_store.run.session import RunSession  # noqa: E402
from ding_store.run.waiting import PeerWatch  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.testing import WAIT_S, eventually  # noqa: E402

#: How long one iteration may take without the server, and how long a call that waits for it would.
DEADLINE_S, RECONNECT_S = 15.0, 60.0


class Fault:
    """The server is killed at a command of the loop: before it goes out, or when its reply has come and is lost."""

    def __init__(self, monkeypatch, loop, kill):
        self._loop, self._kill = loop, kill
        self._send = redis.UnixDomainSocketConnection.send_packed_command
        self._left, self._is_late = 0, False
        monkeypatch.setattr(
            redis.UnixDomainSocketConnection,
            'send_packed_command',
            lambda connection, *args, **kwargs: self._pass(connection, *args, **kwargs),
        )

    def set(self, number, is_late):
        self._left, self._is_late = number, is_late

    @property
    def is_over(self):
        return self._left == 0

    def _pass(self, connection, *args, **kwargs):
        is_ours = threading.get_ident() == self._loop.iterating and self._left > 0
        self._left -= is_ours
        if not is_ours or self._left:
            return self._send(connection, *args, **kwargs)
        if self._is_late:
            self._send(connection, *args, **kwargs)
            assert select.select([connection._sock], [], [], WAIT_S)[0]
            connection._sock.recv(1 << 20)
            return self._kill()
        self._kill()
        return self._send(connection, *args, **kwargs)


class Loop:
    """The parts of a learner that talk to the store, and a collector; each iteration has its deadline."""

    def __init__(self, server, ratio='free', num_weights=8, **options):
        config = StoreConfig(
            url=server.url, run='r', train_ratio=ratio, reconnect_timeout_s=RECONNECT_S, store_options=options
        )
        self.ctx, self.buffer, self.session = OnlineRLContext(), StoreBuffer(1000), RunSession(config)
        self.store, self.collector = self.session.store, open_store(server.url, run='r', **options)
        self._model = torch.nn.Linear(num_weights, num_weights)
        made = Learner(self.store, self.buffer)
        made.plan.replay_figures = lambda: replay_figures(self.buffer)
        self.learner = Exchanger(self.session, made)
        self.learner.read_with(made.reader)
        self.sender = WeightsSender(self.session, self._model, 'main')
        self.writer, self.backpressure = ChunkWriter(self.collector, STREAM), Backpressure(self.collector, max_lead=1)
        self.num_collected, self.iterating = 0, 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.learner.read_ahead.wake()
        self.store.close()
        self.collector.close()

    def collect(self, num_chunks):
        for _ in range(num_chunks):
            self.backpressure.appended(self.writer.write([step(self.num_collected)], HEADER))
            self.num_collected += 1

    def iterate(self):
        begin, self.iterating = monotonic(), threading.get_ident()
        backward = self.sender(self.ctx)
        next(backward)
        assert self.learner.receive(self.ctx) is not None
        self.ctx.train_iter += 1
        with torch.no_grad():
            self._model.weight.fill_(self.ctx.train_iter)
        self.learner.send(self.ctx)
        self.sender._say_at = 0.0  # it looks at the members, too
        next(backward, None)
        self.iterating = 0
        assert monotonic() - begin < DEADLINE_S

    def read_ahead(self, num_chunks):
        self.collect(num_chunks)
        eventually(lambda: len(self.learner.read_ahead) == num_chunks, 'chunks are read ahead')

    def flush(self):
        """The server is there: nothing is lost, doubled or left over, and all have heard of it."""
        eventually(lambda: not self.store.is_away, 'the store is back')
        before = self.collector.get('weights/main')
        self.collect(1)
        while len(self.buffer) < self.num_collected:
            self.iterate()
        self.store.flush()
        assert self.backpressure.wait_within_lead(WAIT_S)
        value = self.collector.get('weights/main')
        assert value.version == self.sender.version > (before.version if before is not None else 0)
        assert value.header['train_iter'] == self.ctx.train_iter
        assert (value.arrays['weight'] == self.ctx.train_iter).all()
        assert [int(item.data.time) for item in self.buffer] == list(range(self.num_collected))
        reader = self.learner.reader
        assert (reader.lag(), reader.num_lost) == (0, 0)
        stream = self.collector.stream_info(STREAM)
        assert stream.readers['learner'] == stream.last == self.num_collected


#: Weights in a slot, inline, and in parts.
WEIGHTS = {
    'slots': dict(num_weights=128),
    'inline': dict(num_weights=8),
    'parts': dict(num_weights=512, host_plane='off'),
}


@pytest.mark.parametrize('is_late', [False, True])
@pytest.mark.parametrize(('ratio', 'weights'), [('free', 'slots'), ('keep', 'inline'), ('free', 'parts')])
def test_learner_loop_does_not_wait_for_a_server_that_dies(own_server, tmp_path, monkeypatch, ratio, weights, is_late):
    with Loop(own_server, ratio, host_cache_dir=str(tmp_path), **WEIGHTS[weights]) as loop:
        fault, number = Fault(monkeypatch, loop, own_server.kill), 0
        loop.collect(1)
        loop.flush()
        fired = []
        while number == len(fired):
            number += 1
            loop.read_ahead(3)
            fault.set(number, is_late)
            before = loop.ctx.train_iter
            for _ in range(3):
                if not fault.is_over and len(loop.learner.read_ahead) == 0:
                    loop.read_ahead(1)
                loop.iterate()
            fired += [number] * fault.is_over
            assert loop.ctx.train_iter == before + 3
            if fault.is_over:
                own_server.start()
            fault.set(0, False)
            loop.flush()
        assert len(fired) > 8


def test_learner_loop_waits_once_for_a_server_that_hangs(own_server, tmp_path):
    """As long as one reply may take; what it does when it wakes up, with what was sent before, harms nothing."""
    options = dict(host_cache_dir=str(tmp_path), check_every_s=0.2, socket_timeout_s=1.0)
    with Loop(own_server, num_weights=128, **options) as loop:
        for _ in range(2):
            loop.read_ahead(1)
            own_server.signal(signal.SIGSTOP)
            before = loop.ctx.train_iter
            for _ in range(20):
                loop.iterate()
            assert loop.store.is_away
            own_server.signal(signal.SIGCONT)
            assert loop.ctx.train_iter == before + 20
            loop.flush()


def is_held(lock):
    """By another thread."""
    is_free = lock.acquire(blocking=False)
    if is_free:
        lock.release()
    return not is_free


def test_nonblocking_call_does_not_wait_for_other_threads(own_server, tmp_path):
    """A thread waits for the server with the lock of a value that it fills, and of what has no reply yet."""
    with open_store(own_server.url, 'r', host_cache_dir=str(tmp_path), reconnect_timeout_s=RECONNECT_S) as store:
        arrays = {'weight': np.zeros(1 << 16)}
        store.put('weights', {}, arrays)
        store.register('s', 'r')
        one, two = (store.append('s', {}, {}) for _ in range(2))
        store.advance('s', 'r', one, 'news', {'number': 1})
        store.flush()
        own_server.signal(signal.SIGSTOP)
        store.advance('s', 'r', two, 'news', {'number': 2})
        own_server.kill()
        others = [threading.Thread(target=one) for one in (slots_of(store, 'weights').backfill, store.flush)]
        for thread in others:
            thread.start()
        eventually(slots_of(store, 'weights')._lock.locked, 'one waits for the server')
        eventually(lambda: is_held(store.client.server._unanswered._lock), 'one waits for the server')
        begin, refused = monotonic(), 0
        with store.nonblocking():
            for call in (
                lambda: store.put('weights', {}, arrays),
                store.flush,
                lambda: store.get('weights'),
                lambda: store.advance('s', 'r', two, 'news', {'number': 3}),
            ):
                try:
                    call()
                except StoreUnavailable:
                    refused += 1
                with store.nonblocking():
                    pass
        assert (refused, monotonic() - begin < DEADLINE_S) == (4, True)
        own_server.start()
        for thread in others:
            thread.join(WAIT_S)
        assert store.put('weights', {}, arrays) > 1
        assert store.get('news').header == {'number': 2}


@pytest.mark.parametrize('ratio', ['keep', 'free'])
def test_learner_trains_while_the_store_is_away(own_server, tmp_path, caplog, ratio):
    """Free on its table, else on the chunks that it has; acks, progress and weights come when the store is back."""
    with Loop(own_server, ratio, host_cache_dir=str(tmp_path)) as loop:
        loop.collect(1)
        loop.flush()
        loop.read_ahead(2)
        version, before = loop.sender.version, loop.ctx.train_iter
        own_server.kill()
        for _ in range(2 if ratio == 'keep' else 20):
            loop.iterate()
        if ratio == 'keep':
            assert loop.learner.take(0.01) is None
        assert loop.ctx.train_iter > before
        assert (len(loop.buffer), loop.sender.version) == (loop.num_collected, version)
        session = loop.session
        peers = PeerWatch(session.store, 'collector', 60.0, lambda: True, lambda: False)
        assert peers.look() == '; the store is away'
        own_server.start()
        loop.flush()
    assert caplog.text.count('the store is away') == caplog.text.count('the store is back after') == 1


def test_only_nonblocking_calls_reconnect(own_server):
    """Nobody else asks the server, and the hasty do not wait for a connection: one is made beside them."""
    with open_store(own_server.url, run='hasty') as store, store.nonblocking():
        assert store.add('n', 1) == 1
        own_server.kill()
        with pytest.raises(StoreUnavailable):
            store.add('n', 0)
        own_server.start()

        def is_back():
            try:
                return store.add('n', 0) == 1
            except StoreUnavailable:
                return False

        eventually(is_back, 'a new connection')
