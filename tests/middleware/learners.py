"""A learner's side of the exchange, without a task around it."""

from types import SimpleNamespace

import torch
import treetensor.torch as ttorch
from ding.framework import task
from ding.framework.context import OnlineRLContext
from easydict import EasyDict

from ding_store.middleware.chunks import ChunkDecoder
from ding_store.middleware.feed import Feed
from ding_store.middleware.learner_exchanger import LearnerExchanger
from ding_store.middleware.replay import data_pusher

HEADER = dict(kind='trajectories', env_step=1, env_episode=0, end_idx=[], train_iter=0, policy_version=0)
CONFIG = EasyDict(policy=dict(collect=dict(unroll_len=1)))


def step(number, env=0, **more):
    return ttorch.as_tensor(
        {
            'obs': torch.full((4,), float(number)),
            'time': torch.tensor([number]),
            'env_data_id': torch.tensor([env]),
            'done': torch.tensor([False]),
            **more,
        }
    )


class OneFeed:
    """Names for what a learner has of its first partition."""

    @property
    def feed(self):
        return next(iter(self.feeds.values()))

    @property
    def reader(self):
        return self.feed.reader

    @reader.setter
    def reader(self, reader):
        self.feed.reader = reader

    @property
    def read_ahead(self):
        return self.feed.read_ahead

    @read_ahead.setter
    def read_ahead(self, read_ahead):
        self.feed.read_ahead = read_ahead

    def have(self, feeds):
        self.feeds = {each.stream: each for each in feeds}
        self.consumer_offset = self.feed.offset


class Learner(OneFeed, LearnerExchanger):
    """The learner's side in front of a pusher, without a task around it."""

    def __init__(self, store, buffer_, direct=True, position=None, allow_pickle=False, **options):
        pusher = data_pusher(CONFIG, buffer_)
        self._push = pusher
        self._member = SimpleNamespace(figures={'began_s': 1.0})
        self.plan = SimpleNamespace(push_direct=pusher.push_columns() if direct else None, replay=pusher.replay)
        self._ingest_plan = self.plan
        self._decoder = ChunkDecoder(allow_pickle)
        self.have([Feed(store, offset=position)])
        self.feed.open(**options)

    def take(self, max_entries=64):
        ctx = OnlineRLContext()
        entries = self.reader.read(max_entries)
        if self._merge(ctx, list(entries)):
            self._push(ctx)
        self.consumer_offset.commit()
        if entries:
            self.reader.ack(entries[-1].id)
        return len(entries)


class Exchanger(OneFeed, LearnerExchanger):
    """The learner's exchanger outside of a task and a run. A test calls its steps one by one."""

    def __init__(self, session, made=None):
        self._session, self._taken, self._ratio_read_ahead, self._ingest_plan = session, [], None, None
        self.have([Feed(session.store)])
        if made is not None:  # in front of the pusher of this Learner
            self._ingest_plan, self._decoder, self._member = made._ingest_plan, made._decoder, made._member
            self.have([Feed(session.store, offset=made.consumer_offset)])

    def begin(self):
        self._begin(OnlineRLContext(), self._ingest_plan)

    def read_with(self, reader):
        self.reader = reader
        self.feed.start()

    def receive(self, ctx):
        """Return the number of chunks that were taken, or None at the run's end."""
        return len(self._taken) if self._receive(ctx) else None

    def take(self, timeout_s):
        return self._take(1, timeout_s)

    def merge(self, entries):
        """Put chunks into the replay."""
        self._taken = list(entries)
        self._merge(OnlineRLContext(), list(entries))

    def send(self, ctx=None):
        self._send(ctx or OnlineRLContext())

    def advance(self, entry_id):
        self._advance(task.ctx, self.feed, entry_id)

    def pass_over_skipped(self):
        self._pass_over_skipped()
